"""Every example runs from top to bottom, as a program of its own in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(path, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_notebook_with_a_title(path):
    """In jupytext's percent format: cells begin with ``# %%``, the first with a heading."""
    lines = path.read_text().splitlines()
    assert lines[0] == "# %% [markdown]" and lines[1].startswith("# # ")
    assert "# %%" in lines
