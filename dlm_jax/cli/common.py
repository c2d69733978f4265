"""Shared code of the programs: flags, devices and user modules."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax

import dlm_jax.config as configs
from dlm_jax.cli.ends import keep_output_for_texts
from dlm_jax.config import MeshConfig, SamplingParams
from dlm_jax.distributed.processes import HEARTBEAT_SECONDS
from dlm_jax.hf import hub_id
from dlm_jax.inference.host import shown
from dlm_jax.inference.model import DTYPES, Model, load
from dlm_jax.sampling.params import PRESETS
from dlm_jax.sampling.rules import BUILT_IN, classes_of, with_rules
from dlm_jax.settings import UNSET, Rule, SettingError, nearest
from dlm_jax.store.files import check_regular
from dlm_jax.store.weights import DEFAULT, SHIPPED

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
    """A parser of integers in ``[low, high]``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not in [{low}, {high}]")
        return value

    return number


SEED = whole(0, 2**32 - 1)
"""Parses a seed below 2**32."""
COUNT = whole(1, 2**20)
"""Parses a count of at least 1."""
INDEX = whole(0, 2**20)
"""Parses an index, from 0."""


def add_model_flags(parser: argparse.ArgumentParser, *, has_dtype: bool = True) -> None:
    """Adds the flags that `load_model` reads."""
    checkpoint = (
        "a run, a weights file, a published directory, a Hub id (org/name or org/name@revision), "
        f"or a shipped model: {', '.join(SHIPPED)}; default: {DEFAULT}"
    )
    parser.add_argument("--checkpoint", metavar="PATH", help=checkpoint)
    if has_dtype:
        dtypes = f"dtype of the parameters: {', '.join(DTYPES)}; default: float32"
        parser.add_argument("--dtype", metavar="TYPE", help=dtypes)
    extend = (
        "MODULE:FUNCTION=FILE, a function (model, file) -> model, such as "
        "dlm_jax.contrib.drafter:load=FILE; repeatable"
    )
    parser.add_argument("--extend", action="append", default=[], metavar="CALL", help=extend)
    ignore = "field of a published config.json that is not read; repeatable"
    parser.add_argument("--ignore-config", action="append", default=[], metavar="KEY", help=ignore)


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
    given = {name: text for name, text in overrides.items() if name.startswith("mesh.")}
    return configs.load(None, given).mesh if given or is_distributed else None


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


def refuse_lone_host_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag of a host without ``--distributed``."""
    for name in ("coordinator", "num_processes", "process_id"):
        if getattr(args, name) is not None and not args.distributed:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"command line: {flag} has no effect without --distributed; add --distributed or "
                f"remove it"
            )


def join_hosts(args: argparse.Namespace) -> None:
    """Joins the other processes if ``--distributed`` is set.

    Programs call this before they read files, import a user's module or use a device, because JAX
    cannot start the processes afterwards. The rest of the program runs in `run_together`.
    """
    if not args.distributed:
        return
    keep_output_for_texts()
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"--distributed: {error}; pass --coordinator, --num-processes and --process-id"
        ) from None


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


def import_module(module: str, where: str) -> ModuleType:
    """A user's module, which may be in the working directory; `where` names the flag in errors."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ValueError(f"{where}: {module} fails: {type(error).__name__}: {error}") from None


def import_rules(modules: str | None) -> list[type[Rule]]:
    """The rules in the modules given by ``--rules``."""
    names = [] if modules is None else modules.split(",")
    rules = [cls for name in names for cls in classes_of(import_module(name, f"--rules {name}"))]
    with_rules(rules)  # checks them
    return rules


def import_function(name: str, where: str, example: str) -> Callable[..., Any]:
    """The function ``MODULE:FUNCTION``; `where` names the flag in errors."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{where} is not MODULE:FUNCTION; for example, write {example}")
    imported = import_module(module, where)
    if not hasattr(imported, function):
        known = [known for known in vars(imported) if not known.startswith("_")]
        raise ValueError(f"{where}: {module} has no {function!r}; {nearest(function, known)}")
    found: Callable[..., Any] = getattr(imported, function)
    if not callable(found):
        raise ValueError(f"{where} is {shown(found)}, which is not callable; pass a function")
    return found


def heads_line(model: Model, sample: SamplingParams) -> str:
    """A line with the heads of the model, and the fill and order in `sample`."""
    names = [f"{n} (not trained yet)" if n in model.untrained else n for n in model.heads]
    return f"heads: {', '.join(names) or 'none'}; fill={sample.fill}, order={sample.order}"


def start_jax() -> None:
    """Caches compiled programs on disk, and prints each warning as one line on standard error.

    The cache is in ``$JAX_COMPILATION_CACHE_DIR`` or the user's cache directory. With the cache,
    the second start of a program takes a third of the time of the first start.
    """
    warnings.formatwarning = lambda message, *_, **__: (
        f"warning: {' '.join(str(message).split())}\n"
    )
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # Compiled programs are specific to the processor.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    facts = {line for line in lines if line.startswith(("flags", "model name", "Features"))}
    text = "\n".join([platform.machine(), *sorted(facts)])
    machine = hashlib.sha256(text.encode()).hexdigest()[:12]
    # Without a writable home directory, there is no cache.
    with contextlib.suppress(RuntimeError, OSError):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        cache = cache / "dlm_jax" / f"xla-{machine}"
        cache.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(cache))


def load_model(args: argparse.Namespace, mesh: MeshConfig | None = None) -> Model:
    """A model from `dlm_jax.load`, by the flags of `add_model_flags`."""
    model = load(
        args.checkpoint,
        mesh=mesh,
        dtype=getattr(args, "dtype", None),
        ignore_config=args.ignore_config,
        report=lambda line: print(line, file=sys.stderr),
    )
    for given in args.extend:
        name, where = given.partition("=")[::2], f"--extend {given}"
        extended = import_function(name[0], where, "dlm_jax.contrib.drafter:load=FILE")
        model = extended(model, name[1])
        if not isinstance(model, Model):
            raise ValueError(f"{where} returned {shown(model)}; return a Model")
    return model


def model_name(args: argparse.Namespace) -> str:
    """Name of the checkpoint: Hub id, directory name, or file name without suffix."""
    checkpoint = args.checkpoint or DEFAULT
    asked = hub_id(checkpoint)
    if asked is not None:
        return asked[0]
    path = Path(checkpoint).resolve()
    return path.name if path.is_dir() else path.stem


def read_text(path: str | Path, flag: str = "") -> str:
    """The text of a UTF-8 file; `flag` begins the errors of a file that cannot be read."""
    check_regular(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = f"cannot be read: {error.strerror}; pass a text file"
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 at byte {error.start}; convert it"
    raise ValueError(f"{flag} {path} {why}".strip())
