"""The program of a run: hosts compare it, and a resumed run prints it."""

from __future__ import annotations

import sys

import tiny_run

import dlm_jax.config as configs
from dlm_jax.training import trainer
from dlm_jax.training.trainer import prepare


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
    name = "source code of schedule"
    before, after = (facts[name] for facts in compared if name in facts)
    assert before != after
    del sys.modules["factors_here"]
