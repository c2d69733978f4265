"""What a run says of itself before its first step."""

from __future__ import annotations

import dataclasses

import jax
import tiny_run
import toy

import dlm_jax.config as configs
from dlm_jax.model.transformer import build
from dlm_jax.training.trainer import describe, prepare


def test_the_summary_has_the_size_what_is_not_the_default_and_undeclared_matrices(tmp_path):
    said: list[str] = []

    def network(config):
        return dataclasses.replace(build(config), axes=None)

    with tiny_run.on_devices(1):
        flags = tiny_run.flags(tmp_path / "run", optim__name="adamw")
        run = prepare(configs.load(None, flags), network=network, report=said.append)
    with run.checkpoints:
        describe(run, said.append)
    total = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    assert any(line.startswith(f"model of {total:,} parameters on cpu, mesh ") for line in said)
    (line,) = [line for line in said if line.startswith("not default: [model]")]
    assert "depth=2 width=16 heads=2" in line
    (line,) = [line for line in said if line.startswith("without Network.axes, matrices by rank: ")]
    assert set(line.split(": ")[1].split(", ")) == toy.matrices(build(run.config.model))
