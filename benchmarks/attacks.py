"""Attacks the programs and counts what gets through.

    python -m benchmarks attacks [flips inputs kills] [--count N] [--folder DIR] [--quick]

``flips``: one bit is flipped in a file that the programs read; the flip must be detected or have no
effect. ``inputs``: bad flags, settings and files; each must be refused in one line with exit code 2
or 6. ``kills``: SIGKILL of training runs and of files of requests; after a restart, the results
must equal those of an uninterrupted run. With ``--folder``, the files stay, and finished runs of
``kills`` are not repeated.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax.config as configs
from benchmarks.report import Table, parser_of
from dlm_jax import load
from dlm_jax.cli import common, evaluation, sample, train
from dlm_jax.data import load_corpus
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.store import load_params, save_weights

ROOT = Path(__file__).parent.parent
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40
# A run of a few seconds with heads, stages and accumulation.
RUN = {
    "model.depth": 2, "model.width": 16, "model.heads": 2, "model.add_sampler_head": "true",
    "model.add_critic_head": "true", "heads.start_sampler_iteration": 6, "sample.steps": 4,
    "heads.start_critic_iteration": 12, "data.seq_len": 16, "optim.warmup_steps": 2,
    "train.steps": 24, "train.batch_size": 8, "train.accumulate": 2, "train.log_every": 3,
    "train.eval_every": 6, "train.eval_windows": 4, "train.checkpoint_every": 4,
}  # fmt: skip
LONG = {"train.steps": 120, "train.checkpoint_every": 7}
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
PATIENCE = 600.0  # seconds to wait for a save
NOISY = ("wall_", "second", "utilisation", "goodput", "memory", "time")  # of keys that tell times

Found = Iterator[tuple[str, str]]
"""Pairs of a kind of attack and the reason why it got through; an empty reason means that it did
not."""


def flags(folder: Path, out_dir: Path, **changes: object) -> list[str]:
    """The flags of the run; a double underscore in the names of `changes` is a dot."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    given = RUN | {"data.source": text, "train.out_dir": out_dir}
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def environment(folder: Path) -> dict[str, str]:
    """The environment of attacked programs: caches of their own, the CPU, quick compilation."""
    return os.environ | {
        "XLA_FLAGS": QUICK, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
        "DLM_JAX_CACHE": str(folder / "tokens"), "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def start(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts ``train.py`` or ``sample.py``."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments], env=environment(folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
    )  # fmt: skip


def finish(folder: Path, script: str, *arguments: str) -> None:
    """Runs a program to its end; raises RuntimeError if its exit code is not 0."""
    child = start(folder, script, *arguments)
    _, err = child.communicate()
    if child.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)}: {child.returncode}\n{err}")


# Flips.


def flips(folder: Path, count: int, rng: random.Random) -> Found:
    """Flips `count` bits in each file, one at a time; only a ValueError counts as detected."""
    out_dir, weights, text = folder / "run", folder / "x.safetensors", folder / "text.txt"
    finish(folder, "train.py", *flags(folder, out_dir, train__keep_checkpoints=1))
    save_weights(weights, *load_params(out_dir))
    cache = folder / "tokens"

    def unheard(line: str) -> None:
        """Damage of a checkpoint is reported, and an older one is read, if there is one."""

    def corpus() -> Any:
        corpus = load_corpus(text, seq_len=16, cache_dir=cache)
        return corpus.sha256, [corpus.train_rows, corpus.val_rows]

    corpus()
    kinds: list[tuple[str, Iterable[Path], Callable[[], Any]]] = [
        ("weights file", [weights], lambda: load_params(weights)),
        ("checkpoint", (out_dir / "checkpoints").rglob("*"),
         lambda: load_params(out_dir, report=unheard)),
        ("best checkpoint", (out_dir / "best").rglob("*"),
         lambda: load_params(out_dir / "best", report=unheard)),
        ("encoded text", cache.rglob("*.npz"), corpus),
    ]  # fmt: skip
    for kind, paths, read in kinds:
        expected = read()
        for path in sorted(path for path in paths if path.is_file() and path.stat().st_size):
            whole = path.read_bytes()
            for _ in range(count):
                bit = rng.randrange(8 * len(whole))
                damaged = bytearray(whole)
                damaged[bit // 8] ^= 1 << bit % 8
                path.write_bytes(damaged)
                why = ""
                try:
                    why = "" if _same(expected, read()) else "read as something else"
                except ValueError as error:
                    why = "several lines" if "\n" in str(error) else ""
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"[:200]
                yield kind, why and f"{path.name} bit {bit} of {8 * len(whole)}: {why}"
                path.write_bytes(whole)


def _same(one: Any, other: Any) -> bool:
    """Whether two trees of arrays and plain values are equal."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs
    )


# Inputs.

BAD: dict[Any, tuple[str, ...]] = {
    float: ("inf", "-inf", "nan", "1e400", "x", ""),
    int: (str(10**20), str(-(10**20)), str(2**63), "x", "1.5", "", "9" * 5000),
    bool: ("maybe", "2", ""),
}
NAMES = ("nowhere", "/proc/self/mem", "x" * 300, "/" + "y/" * 3000)
TOMLS = (
    b"[train", b"\xff\xfe", b"steps = 3", b"[train]\nsteps = '3'", b"[nothing]\nx = 1",
    b"[model]\nrope_theta = nan", b"[data]\nsource = []", b"[train]\nsteps = 1e30",
    b"x = " + b"[" * 50_000, b"[data]\nheld_out = 1", b'[train]\nout_dir = ""',
)  # fmt: skip
LINES = (
    b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"prompt": 3}', b'{"x": 1}',
    b'{"prompt": "\\ud800"}', b'{"tokens": [1e3]}', b'{"tokens": [99999]}', b'{"seed": -1}',
    b'{"seed": 1.5}', b'{"max_length": 0}', b'{"gen_length": 100000000000000000000}',
    b'{"steps": true}', b'{"logit_bias": {"1": NaN}}', b'{"chain": ["x"]}', b'{"id": 1.5}',
)  # fmt: skip


def inputs(folder: Path, count: int, rng: random.Random) -> Found:
    """Passes `count` bad command lines, and a file of bad requests, to the programs."""
    out_dir, files = folder / "run", folder / "bad"
    finish(folder, "train.py", *flags(folder, out_dir))
    files.mkdir(exist_ok=True)
    cases = list(_command_lines(folder, files, out_dir))
    # Loading takes most of the time and is not attacked here.
    cached = functools.cache(lambda path: load(path))
    setattr(sample, "load_model", lambda args, mesh: cached(args.checkpoint))  # noqa: B010
    for kind, main, arguments in rng.sample(cases, min(count, len(cases))):
        code, out, err = _ended(main, arguments)
        is_refused = code in (2, 6) and not out and err.count("\n") == 1
        is_refused = is_refused and err.startswith("error: ")
        shown = " ".join(part[:60] for part in arguments[-3:])
        yield kind, "" if is_refused else f"{shown!r}: code {code}, {err[-300:]!r}"
    setattr(sample, "load_model", common.load_model)  # noqa: B010
    requests, results = files / "in.jsonl", files / "out.jsonl"
    requests.write_bytes(b"\n".join(LINES) + b"\n")
    paths = ["--prompts", str(requests), "--output", str(results)]
    code, _, err = _ended(sample.main, ["--checkpoint", str(out_dir), *paths])
    rows = [json.loads(line) for line in results.read_bytes().splitlines()]
    for line, row in zip(LINES, rows, strict=True):
        is_told = code == 3 and "error" in row and "\n" not in row["error"]
        yield "lines of requests", "" if is_told else f"{line[:80]!r}: code {code}, {row}"


def _command_lines(
    folder: Path, files: Path, out_dir: Path
) -> Iterator[tuple[str, Callable[..., int], list[str]]]:
    base, run = flags(folder, folder / "new"), ["--checkpoint", str(out_dir)]
    for key, setting in configs.SETTINGS.items():
        for value in _bad_values(setting.annotation):
            yield "keys of a config", train.main, [*base, f"--{key}={value}"]
    for name, setting in BUILT_IN.settings.items():
        for value in _bad_values(setting.annotation):
            yield "settings", sample.main, [*run, f"--{name.replace('_', '-')}={value}"]
    for number, content in enumerate(TOMLS):
        (files / f"{number}.toml").write_bytes(content)
        yield "files", train.main, [*base, "--config", str(files / f"{number}.toml")]
    for name in (*NAMES, str(files)):
        for flag in ("config", "data.source", "train.init_from", "data.tokenizer"):
            yield "files", train.main, [*base, f"--{flag}", name]
        yield "files", sample.main, ["--checkpoint", name]
        yield "files", sample.main, [*run, "--prompts", name, "--output", str(files / "o")]
        yield "files", evaluation.main, [*run, "--text", name]
    for number, content in enumerate(_weights(files, out_dir)):
        path = files / f"{number}.safetensors"
        path.write_bytes(content)
        yield "weights", sample.main, ["--checkpoint", str(path)]
        yield "weights", train.main, [*base, "--train.init_from", str(path)]
    for more in (["--mesh.tensor", "3"], ["--train.stepz", "3"], ["train"], ["--process-id=1"]):
        yield "flags", train.main, [*base, *more]
    yield "flags", train.main, [*flags(folder, out_dir), "--model.depth", "3"]
    for text in ("no gap", "<hole:0>", "<hole:99999999999999999999>", "<hole:x>"):
        yield "flags", sample.main, [*run, "--template", text]
    for flag in ("num-samples", "max-length", "seed", "batch-size"):
        for value in BAD[int]:
            yield "flags", sample.main, [*run, f"--{flag}={value}"]


def _bad_values(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return ("no-such", "", "\u2028")
    return BAD.get(hint, ())


def _weights(files: Path, out_dir: Path) -> Iterator[bytes]:
    """Weights files that are cut, changed, or do not fit their own config."""
    params, meta = load_params(out_dir)
    path = files / "good.safetensors"

    def written(params: Any = params, **changes: Any) -> bytes:
        save_weights(path, params, meta | changes)
        return path.read_bytes()

    good, config = written(), meta["config"]
    yield from (good[:-5], good[:7], b"", b"\xff" * 100, good + b"x")
    for junk in (None, 3, [], "x", {}):
        yield written(config=junk)
        yield written(tokenizer=junk)
    for changes in ({"depth": 1}, {"width": 32}, {"vocab_size": 7}, {"heads": 3}, {"no_such": 1}):
        yield written(config=config | {"model": config["model"] | changes})
    yield written(params | {"more": {"x": np.zeros(2, np.float32)}})


def _ended(main: Callable[..., int], arguments: list[str]) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of a program that runs in this process."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        signal.alarm(0)
    return code, out.getvalue(), err.getvalue()


# Kills.


def kills(folder: Path, count: int, rng: random.Random) -> Found:
    """`count` kills of training, and a fifth as many of requests."""
    yield from _killed_trainings(folder, count, rng)
    yield from _killed_requests(folder, max(1, count // 5), rng)


def _once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Makes `name` in the folder unless it is complete."""
    mark = folder / f"{name}.done"
    if not mark.exists():
        make(folder / name)
        mark.touch()
    return folder / name


def _killed_trainings(folder: Path, count: int, rng: random.Random) -> Found:
    """Six kills per run; every second kill waits for a save to begin."""

    def train_to_end(out_dir: Path) -> None:
        finish(folder, "train.py", *flags(folder, out_dir, **LONG))

    whole = _once(folder, "whole", train_to_end)
    for first in range(0, count, 6):
        out_dir, saving = folder / f"run{first}", []

        def killed(out_dir: Path, number: int = first, saving: list[bool] = saving) -> None:
            for kill in range(min(6, count - number)):
                child, seen = (
                    start(folder, "train.py", *flags(folder, out_dir, **LONG)),
                    _saves(out_dir),
                )
                until = time.monotonic() + (PATIENCE if kill % 2 else rng.uniform(0.3, 12))
                while child.poll() is None and time.monotonic() < until:
                    if kill % 2 and _saves(out_dir) - seen:
                        time.sleep(rng.uniform(0, 0.02))
                        break
                    time.sleep(0.001)
                child.kill()
                child.communicate()
                saving.append(bool(_saves(out_dir) - seen))
            train_to_end(out_dir)

        _once(folder, out_dir.name, killed)
        why = difference(whole, out_dir)
        for number in range(min(6, count - first)):
            during = "during a save" if number < len(saving) and saving[number] else ""
            yield f"training {during}".strip(), why


def _saves(out_dir: Path) -> set[str]:
    """Checkpoints that are being written."""
    return {str(path) for path in out_dir.glob("*/*orbax-checkpoint-tmp*")}


def difference(whole: Path, other: Path) -> str:
    """The first difference between two finished runs; empty if there is none."""
    for part in ("", "best"):
        if not _same(*(load_params(path / part)[0] for path in (whole, other))):
            return f"parameters of {part or 'the run'} differ"
    return "" if _metrics(whole) == _metrics(other) else "metrics differ"


def _metrics(out_dir: Path) -> list[dict[str, Any]]:
    """The records of a run without times."""
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {
            key: value
            for key, value in line.items()
            if key != "run" and not any(part in key for part in NOISY)
        }
        for line in lines
    ]


def _killed_requests(folder: Path, count: int, rng: random.Random) -> Found:
    """Kills one run of 300 requests `count` times, spread over its results."""
    model = _once(folder, "model", lambda out: finish(folder, "train.py", *flags(folder, out)))
    requests = folder / "requests.jsonl"
    lines = [
        {
            "prompt": "The quick "[: 1 + n % 9],
            "gen_length": 3 + n % 5,
            "steps": 1 + n % 3,
            "seed": n,
        }
        for n in range(300)
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(output: Path) -> list[str]:
        return ["--checkpoint", str(model), "--prompts", str(requests), "--output", str(output),
                "--batch-size", "4"]  # fmt: skip

    whole = _once(folder, "all.jsonl", lambda out: finish(folder, "sample.py", *command(out)))
    output = folder / "killed.jsonl"
    for number in range(count):
        target = rng.randint(number * 290 // count + 1, (number + 1) * 290 // count)
        child = start(folder, "sample.py", *command(output))
        while child.poll() is None and _lines_in(output) < target:
            time.sleep(0.001)
        child.kill()
        child.communicate()
    finish(folder, "sample.py", *command(output))
    one, other = (
        # Every line ends with the seconds of its row and a checksum of the line.
        re.sub(rb'"(seconds|crc)": [^,}]+', b"", path.read_bytes())
        for path in (whole, output)
    )
    for _ in range(count):
        yield "requests", "" if one == other else "results differ"


def _lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


ATTACKS: dict[str, tuple[Callable[[Path, int, random.Random], Found], int, int]] = {
    "flips": (flips, 40, 4),
    "inputs": (inputs, 1000, 60),
    "kills": (kills, 50, 4),
}
"""Each attack with its number of attempts, and the number with ``--quick``."""


def main() -> int:
    """Exit code: 1 if anything got through."""
    parser = parser_of(__doc__)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], default=[])
    parser.add_argument("--count", type=int, help="flips per file, inputs or kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the files here")
    args = parser.parse_args()
    through = 0
    os.environ["XLA_FLAGS"] = QUICK  # before JAX starts
    table = Table(args, "attack", "tried", "let through")
    for name in args.attacks or ATTACKS:
        attack, usual, quick = ATTACKS[name]
        count = args.count or (quick if args.quick else usual)
        with contextlib.ExitStack() as stack:
            folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = folder.resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            os.environ.update(environment(folder))
            tried: dict[str, list[str]] = {}
            for kind, why in attack(folder, count, random.Random(args.seed)):
                tried.setdefault(kind, []).append(why)
        for kind, reasons in tried.items():
            bad = list(filter(None, reasons))
            through += len(bad)
            table.add(f"{name}: {kind}", len(reasons), len(bad))
            print(*(f"    {line}" for line in bad[:20]), sep="\n", end="", file=sys.stderr)
    return 1 if through else 0


if __name__ == "__main__":
    raise SystemExit(main())
