"""The README's code runs as it stands, and CI runs the README's own test command."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_users_own_network_example_runs_and_prints_a_text(capsys):
    (example,) = [block for block in PYTHON_BLOCKS if "count_pairs" in block]
    exec(compile(example, "README.md", "exec"), {})
    text = capsys.readouterr().out.strip("\n")
    assert text.startswith("the ")
    assert len(text) == 60


def test_the_five_lines_run(capsys, monkeypatch):
    import toy_model

    import dlm_jax

    (example,) = [block for block in PYTHON_BLOCKS if "dlm_jax.load" in block]
    monkeypatch.setattr(dlm_jax, "load", lambda path: toy_model.MODEL, raising=False)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("DONE") == 4


def test_there_are_two_commands_that_set_themselves_up():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert sum(command.endswith("pytest") for command in commands) == 1


@pytest.mark.parametrize("path", re.findall(r"`((?:configs|docs|benchmarks)/[\w./-]+)`", README))
def test_every_file_that_the_readme_names_exists(path):
    assert (ROOT / path).exists()
