"""Compares starts of ``sample.py`` with and without the compilation cache: texts and speed.

``python benchmarks/compile_cache.py --starts 50 --at-once 10`` begins with an empty cache in a
temporary folder, starts the program several times in parallel, and compares every text with that of
a start without a cache. Prints the processor time of the first start and the median of the others,
in seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "sample.py", "--gen-length", "60", "--steps", "8", "--num-samples", "4"]


def start(cache: str | None) -> tuple[str, float]:
    """The output of one start, and its processor time in seconds."""
    off = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    env = os.environ | (off if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache})
    child = [sys.executable, __file__, "--one"]
    done = subprocess.run(child, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    text, _, seconds = done.stdout.rpartition("\n@")
    return text, float(seconds)


def one() -> None:
    """Runs the program and prints its text and its processor time in seconds."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout + f"\n@{used.ru_utime + used.ru_stime}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one()
        return 0
    expected, without = start(None)
    with tempfile.TemporaryDirectory() as cache:
        # Several starts begin with the empty cache, so that they write it concurrently.
        with ThreadPoolExecutor(args.at_once) as pool:
            together = list(pool.map(start, [cache] * args.starts))
        _, second = start(cache)
    wrong = sum(text != expected for text, _ in together)
    later = statistics.median(seconds for _, seconds in together[args.at_once :])
    print(f"{args.starts} starts, {args.at_once} at once: {wrong} texts differ")
    print(
        f"processor seconds: {without:.1f} without a cache, {later:.1f} with one (median of "
        f"{args.starts - args.at_once}), {second:.1f} alone with one: {second / without:.2f}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
