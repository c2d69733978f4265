"""The attacks of `benchmarks/attack.py` in small: nothing is let through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("attack", "count"),
    [("flips", 25), ("inputs", 500), ("ends", 0), ("kills", 4), ("hostile", 150)],
)
def test_nothing_gets_past_the_programs(attack, count):
    counted = ["--count", str(count)] if count else []
    # The machine code need not be good, and tests bring their own flags for the compiler.
    done = subprocess.run(
        [sys.executable, "benchmarks/attack.py", attack, *counted],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert rows and all(int(row[1]) > 0 and int(row[3]) == 0 for row in rows), done.stdout
