"""The program of a run: hosts compare it, and a resumed run prints it."""

from __future__ import annotations

import sys

import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.store import files
from dlm_jax.store.files import program_facts
from dlm_jax.training import trainer
from dlm_jax.training.resume import facts_of
from dlm_jax.training.trainer import prepare


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two files, whose facts are read."""
    monkeypatch.setattr(files, "__file__", str(tmp_path / "store" / "files.py"))
    (tmp_path / "store").mkdir()
    for name in ("store/files.py", "optimisers.py"):
        (tmp_path / name).write_text("RATE = 1.0\n")
    return tmp_path


def _change(root):
    (root / "optimisers.py").write_text("RATE = 0.25\n")


def _rename(root):
    (root / "optimisers.py").rename(root / "optimizers.py")


def _move_a_line(root):
    (root / "optimisers.py").write_text("")
    (root / "store" / "files.py").write_text("RATE = 1.0\nRATE = 1.0\n")


@pytest.mark.parametrize("change", [_change, _rename, _move_a_line])
def test_any_change_to_a_source_file_changes_the_facts_that_hosts_compare(package, change):
    before = program_facts.__wrapped__()
    assert program_facts.__wrapped__() == before
    change(package)
    assert program_facts.__wrapped__() != before


def test_hosts_compare_the_version_and_the_source_code_of_the_package():
    facts = facts_of(configs.load(None, {}))
    assert facts["version of dlm_jax"] == dlm_jax.__version__
    assert facts["source code of dlm_jax"] == program_facts()["source code of dlm_jax"]


def test_hosts_compare_the_source_code_of_custom_parts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    compared: list[dict] = []
    monkeypatch.setattr(trainer, "check_same_everywhere", compared.append)
    for factor in ("1.0", "0.5"):
        (tmp_path / "factors_here.py").write_text(f"def constant(step):\n    return {factor}\n")
        import factors_here  # type: ignore[import-not-found]

        with tiny_run.on_devices(1):
            flags = tiny_run.flags(tmp_path / "run")
            run = prepare(configs.load(None, flags), schedule=factors_here.constant, report=print)
        run.checkpoints.close()
    name = "source code of constant"
    before, after = (facts[name] for facts in compared if name in facts)
    assert before != after
    del sys.modules["factors_here"]
