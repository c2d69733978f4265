"""Shared code of the programs: flags, devices, user modules and chats."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import itertools
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import jax
import jax.monitoring

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli.ends import NotFiniteError, keep_output_for_texts, say_error
from dlm_jax.config import MeshConfig, RowSettings
from dlm_jax.config.schema import PRESETS
from dlm_jax.data import Tokenizer
from dlm_jax.distributed.local_rows import OwnRows, num_shares, split_rows
from dlm_jax.distributed.processes import gathered
from dlm_jax.inference.candidates import HostSampler, shown
from dlm_jax.inference.model import Model, load
from dlm_jax.model.quantized import KINDS
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import UNSET, SettingError, nearest
from dlm_jax.store import not_finite
from dlm_jax.store.weights import DEFAULT, SHIPPED
from dlm_jax.types import Params
from dlm_jax.viewing.frames import Frame, special_names
from dlm_jax.viewing.trace import write_trace


def answers(model: dlm_jax.Model, result: dlm_jax.Texts, start: int) -> list[str]:
    """The text after the first `start` tokens of each row."""
    rows = zip(result.tokens, result.lengths, strict=True)
    return [model.tokenizer.decode(tokens[start:length]) for tokens, length in rows]


def asked(model: dlm_jax.Model, args: argparse.Namespace) -> dict[str, Any]:
    """The prompt from the flags, as arguments of `dlm_jax.generate`."""
    if args.chat:
        if model.chat is None:
            raise ValueError(
                "--chat: the model has no chat_template (in tokenizer_config.json, or as "
                "chat_template.jinja); format the turns yourself and omit --chat"
            )
        return {"tokens": model.chat.ids([{"role": "user", "content": args.prompt}]).tolist()}
    texts = {name: getattr(args, name) for name in ("prompt", "template", "draft")}
    return {name: text for name, text in texts.items() if text is not None}


class CompileClock:
    """Wall-clock seconds that JAX has spent tracing, lowering or compiling since this object was
    created.

    JAX reports an interval when it ends; nested intervals are counted once.
    """

    def __init__(self) -> None:
        self._stretches: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self._stretches)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        start = end - duration_secs
        # Nested intervals have already ended, so they are at the end of the list.
        while self._stretches and self._stretches[-1][1] > start:
            start = min(start, self._stretches.pop()[0])
        self._stretches.append((start, end))


@functools.cache
def compile_clock() -> CompileClock:
    """The process's only `CompileClock`, created by the first call."""
    return CompileClock()


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "mesh", "Split rows and parameters over devices; one device by default."
    )
    for name, setting in MeshConfig.declared.items():
        group.add_argument(
            f"--mesh.{name}", metavar=name.upper(), default=argparse.SUPPRESS, help=setting.help
        )


def mesh_of(overrides: Mapping[str, str], *, is_distributed: bool) -> MeshConfig | None:
    """The mesh from the flags; None means the first device only."""
    asked = {name: text for name, text in overrides.items() if name.startswith("mesh.")}
    if not asked and not is_distributed:
        return None
    return configs.load(None, asked).mesh


def check_batch(params: Params, batch_size: int) -> None:
    """Raises ValueError if the batch size is not divisible by the number of shards of the rows."""
    shares = num_shares(split_rows(params))
    if batch_size % shares:
        raise ValueError(
            f"--batch-size {batch_size} is not divisible by the {shares} devices across which the "
            f"rows are split; use {max(1, round(batch_size / shares)) * shares}"
        )


def share_of_host(params: Params) -> tuple[int, int, bool]:
    """Returns (index of this process's part of the rows, number of parts, whether it prints
    results).

    Processes across which only the parameters are sharded have the same part, and only the first of
    them prints.
    """
    rows = split_rows(params)
    index, count = OwnRows(rows, num_shares(rows)).share
    if jax.process_count() == 1:
        return 0, 1, True
    shares: list[Any] = gathered(index)
    return index, count, shares.index(index) == jax.process_index()


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Replaces names of settings in errors with their flags: ``top_p=2`` becomes ``--top-p=2``.

    Use this context only for values of flags. Errors about values in a file must name the file.
    """
    try:
        yield
    except SettingError as error:
        if error.value is UNSET:
            raise
        known = {error.name, *BUILT_IN.settings}

        def flag(match: re.Match[str]) -> str:
            return "--" + match[0].replace("_", "-") if match[0] in known else match[0]

        raise ValueError(re.sub(r"(?<![\w.'\"-])[a-z]\w*(?==)", flag, str(error))) from None


def speeds(tokens: int, seconds: float, compiling: float) -> str:
    """Text with tokens per second, including and excluding compilation time."""
    without = max(seconds - compiling, 1e-6)
    return (
        f"{tokens / max(seconds, 1e-6):,.0f} tokens/s with {compiling:.2f} s of compilation, "
        f"{tokens / without:,.0f} without"
    )


def import_module(module: str, where: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ValueError(f"{where}: {module} fails: {type(error).__name__}: {error}") from None


def allowed_samplers(modules: Collection[str]) -> Callable[[str], HostSampler]:
    """A function that looks up ``MODULE:FUNCTION``; ValueError for modules not in `modules`."""

    @functools.cache
    def find(name: str) -> HostSampler:
        module, where = name.partition(":")[0], f"host_sampler={name!r}"
        if ":" in name and module not in modules:
            raise ValueError(
                f"{where} is in a module that is not allowed; add --allow-host-sampler {module}"
            )
        return import_sampler(name, where)

    return find


def import_sampler(name: str, where: str) -> HostSampler:
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{where} is not MODULE:FUNCTION; for example, write rules:only_digits")
    found = import_module(module, where)
    if not hasattr(found, function):
        known = [known for known in vars(found) if not known.startswith("_")]
        raise ValueError(f"{where}: {module} has no {function!r}; {nearest(function, known)}")
    sampler: HostSampler = getattr(found, function)
    if not callable(sampler):
        raise ValueError(f"{where} is {shown(sampler)}, which is not callable; pass a function")
    return sampler


def heads_line(model: dlm_jax.Model, sample: RowSettings) -> str:
    """A line with the heads of the model, and the fill and order in `sample`."""
    names = [f"{n} (not trained yet)" if n in model.untrained else n for n in model.heads]
    return f"heads: {', '.join(names) or 'none'}; fill={sample.fill}, order={sample.order}"


def print_read_back(result: dlm_jax.Texts, tokenizer: Tokenizer, size: int) -> None:
    """Prints each read-back token with its position, probability, and `size` candidates to standard
    error.
    """

    def piece(token: int) -> str:
        text = tokenizer.decode([token])
        return repr(text) if text else f"<{token}>"

    for record in itertools.chain.from_iterable(result.read_back):
        seen = record.candidates
        best = zip(seen.ids[:size].tolist(), seen.logits[:size].tolist(), strict=True)
        rivals = ", ".join(f"{piece(token)} {logit:.4g}" for token, logit in best)
        print(
            f"row {seen.row} step {seen.step} position {seen.index}: {piece(record.token)} "
            f"p={record.probability:.4g} of {seen.num_survivors} candidates: {rivals}",
            file=sys.stderr,
        )


def check_page(name: str) -> None:
    """Raises ValueError if a page cannot be written to the path `name`."""
    path = Path(name)
    if not path.parent.is_dir():
        raise ValueError(f"--trace {name}: the directory does not exist; create it first")
    if path.is_dir():
        raise ValueError(f"--trace {name} is a directory; pass a file")
    try:
        # Checking permissions would miss some cases, such as a read-only file system.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"--trace {name} cannot be written: {error.strerror}; choose another file"
        ) from None


def write_page(
    model: dlm_jax.Model, prompt: dict[str, Any], frames: dict[int, list[Frame]], path: str
) -> bool:
    """Writes the denoising page, prints a line, and returns True on success."""
    title = prompt.get("prompt") or prompt.get("template") or "unprompted"
    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    try:
        write_trace(
            path, [frames[i] for i in sorted(frames)], decode, title=title[:80], names=names
        )
    except OSError as error:
        say_error(f"--trace {path} cannot be written: {error.strerror}; the texts are complete")
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True


# Seconds until JAX detects a lost host; `distributed.processes.Watch` is faster.
_HEARTBEAT = 50

CHECKPOINT = (
    "a run, a weights file, a published directory, a Hub id (org/name or org/name@revision), "
    f"or a shipped model: {', '.join(SHIPPED)}; default: {DEFAULT}"
)

QUANTIZE = (
    f"store the matrices of the blocks in 8 bits: {', '.join(KINDS)} (also rounds inputs); "
    f"default: no quantisation"
)

PRESET = (
    f"a preset: {', '.join(PRESETS)} (insertions and deletions, docs/edits.md), or a preset of a "
    f"published model, which sets the order of the model's project (docs/published.md)"
)


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError, as the library does, instead of printing usage."""

    def __init__(self, *, prog: str, description: str | None, add_help: bool = True):
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}; --help explains every flag")


def whole(low: int, high: int) -> Callable[[str], int]:

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
        if not low <= value <= high:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"{shown} is not in [{low}, {high}]")
        return value

    return number


SEED = whole(0, 2**32 - 1)
"""Parses a seed below 2**32."""
COUNT = whole(1, 2**20)
"""Parses a count of at least 1."""
INDEX = whole(0, 2**20)
"""Parses an index, from 0."""


def add_host_flags(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the flags that join several processes into one run; `more` is appended to the help."""
    group = parser.add_argument_group(
        "hosts",
        "Start the same command on every host. On TPU pods and Slurm, --distributed is sufficient. "
        + more,
    )
    group.add_argument("--distributed", action="store_true", help="join the other processes")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=COUNT, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=INDEX, metavar="I", help="process index, from 0")


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """Writes a warning as one line, without the source location."""
    if issubclass(category, UserWarning):
        text = f"warning: {' '.join(str(message).split())}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def start_jax(args: argparse.Namespace | None = None) -> None:
    """Sets up JAX for a program: joins other hosts if requested, and caches compilations.

    Afterwards, each warning of the library is printed as one line on standard error.

    The cache is in ``$JAX_COMPILATION_CACHE_DIR`` or the user's cache directory. With the cache,
    the second start of a program takes a third of the time of the first start
    (`benchmarks/compile_cache.py`).
    """
    warnings.showwarning = _show_warning
    if args is not None:
        _refuse_lone_host_flags(args)
        join_hosts(args)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Without a writable home directory, there is no cache.
        with contextlib.suppress(RuntimeError, OSError):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            cache = cache / "dlm_jax" / f"xla-{_machine()}"
            cache.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def join_hosts(args: argparse.Namespace) -> None:
    """Joins the other processes if ``--distributed`` is set."""
    if not args.distributed:
        return
    keep_output_for_texts()
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_HEARTBEAT,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"--distributed: {error}; pass --coordinator, --num-processes and --process-id"
        ) from None


def load_model(
    path: str | None,
    *,
    mesh: Any = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> Model:
    model = load(
        path, mesh=mesh, dtype=dtype, quantize=quantize,
        report=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    broken = not_finite(model.params)
    if broken is not None:
        raise NotFiniteError(
            f"{path or DEFAULT}: the parameter {broken} is not finite, so the model "
            "is unusable; load an earlier checkpoint, or train again"
        )
    return model


def _machine() -> str:
    """A hash that identifies the processor, because compiled programs are specific to it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    told = sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), *told]).encode()).hexdigest()[:12]


def _refuse_lone_host_flags(args: argparse.Namespace) -> None:
    for name in ("coordinator", "num_processes", "process_id"):
        if getattr(args, name) is not None and not args.distributed:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"command line: {flag} has no effect without --distributed; add --distributed or "
                f"remove it"
            )
