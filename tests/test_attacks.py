"""The attacks of `benchmarks/attacks.py` in small: nothing gets through."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.nightly
@pytest.mark.parametrize("attack", ["flips", "inputs", "kills"])
def test_nothing_gets_past_the_programs(attack):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attacks", attack, "--quick"],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.startswith("machine: ")
    rows = [line.split(" | ") for line in done.stdout.splitlines()[4:]]
    assert rows and all(int(row[1]) > 0 for row in rows), done.stdout
