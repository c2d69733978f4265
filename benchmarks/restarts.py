"""The parts of the time from the start of a training to its first step, on a first start and later.

Command: python -m benchmarks.restarts [--config quickstart] [--repeats 3] [FLAG ...]

Checkpoints and the compilation cache are in a bucket, an S3 on loopback that moto serves. Each
start has an empty output directory, as on another machine, and is stopped by SIGTERM after its
first step. Further flags are those of ``train.py``. The figures are medians of seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(1, str(ROOT / "tests"))

import buckets  # noqa: E402

STARTS = {"first": False, "restart": False, "restart, cached": True}
_PART = re.compile(r"([a-z]+(?: \(\d+ of \d+ programs cached\))?) (\d+\.\d) s")


def start(flags: list[str], url: str, cache: str | None) -> dict[str, float]:
    """Seconds of the parts of one start, by their names."""
    off = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    env = os.environ | (off if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache})
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            [sys.executable, "train.py", *flags, "--train.out_dir", f"{folder}/run",
             "--train.checkpoint_dir", url],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert run.stdout is not None
        found: dict[str, float] = {}
        lines: list[str] = []
        for line in run.stdout:
            lines.append(line)
            whole = re.search(r"first step after (\d+\.\d) s: (.*)", line)
            if whole:
                parts = {name: float(seconds) for name, seconds in _PART.findall(whole[2])}
                found = parts | {"all": float(whole[1])}
                run.send_signal(signal.SIGTERM)
        if run.wait() != 128 + signal.SIGTERM or not found:
            raise SystemExit("".join(lines[-20:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--repeats", type=int, default=3)
    args, more = parser.parse_known_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STARTS}
    for _ in range(args.repeats):
        with buckets.bucket() as url:
            flags = ["--config", args.config, *more]
            start(flags, f"{url}/other", f"{url}/xla")  # fills the cache
            for name, is_cached in STARTS.items():
                found[name].append(start(flags, f"{url}/run", f"{url}/xla" if is_cached else None))
    names = ["import", "devices", "data", "restore", "other", "compile", "step", "all"]
    print("| start | " + " | ".join(names) + " | programs cached |")
    print("| --- " * (len(names) + 2) + "|")
    for name, all_starts in found.items():
        cells = [
            statistics.median(
                sum(s for part, s in one.items() if part.split(" ")[0] == column)
                for one in all_starts
            )
            for column in names
        ]
        cached = re.search(r"\d+ of \d+", " ".join(all_starts[0]))
        shown = " | ".join(f"{seconds:.1f}" for seconds in cells)
        print(f"| {name} | {shown} | {cached[0] if cached else '-'} |")


if __name__ == "__main__":
    main()
