"""What a run says of itself before its first step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import tiny_run
import toy

import dlm_jax.config as configs
from dlm_jax.model.transformer import build
from dlm_jax.training.trainer import describe, parameters_by_part, prepare


def test_the_blocks_are_counted_together_and_every_other_part_by_itself():
    block = {"attention": {"query": {"kernel": np.zeros((3, 2, 2))}}, "norm": np.zeros((3, 2))}
    params = {
        "embedding": np.zeros((5, 2)), "blocks": block, "full_blocks": block,
        "head": {"kernel": np.zeros((2, 5))},
    }  # fmt: skip
    assert parameters_by_part(params) == {
        "blocks/attention": 12, "blocks/norm": 6, "full_blocks/attention": 12,
        "full_blocks/norm": 6, "embedding": 10, "head": 10,
    }  # fmt: skip


def test_the_summary_tells_the_parts_and_what_is_not_the_default(tmp_path):
    said: list[str] = []
    with tiny_run.on_devices(1):
        run = prepare(configs.load(None, tiny_run.flags(tmp_path / "run")), report=said.append)
    with run.checkpoints:
        describe(run, said.append)
    (model,) = [line for line in said if line.startswith("model of ")]
    parts = parameters_by_part(run.state.params)
    total = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    assert sum(parts.values()) == total > 0
    assert model.startswith(f"model of {total:,} parameters on cpu, ")
    for name, size in parts.items():
        assert f"{name} {size:,}" in model
    (groups,) = [line for line in said if line.startswith("optimisers: ")]
    counts = [int(part.split()[1].replace(",", "")) for part in groups.split(": ")[1].split(", ")]
    matrices = sum(
        size for name, size in parts.items() if name in ("blocks/attention", "blocks/mlp")
    )
    # Besides matrices, these parts contain the two norms of attention.
    assert groups.startswith(f"optimisers: adam {total - counts[1]:,} in ")
    assert f"muon {matrices - 2 * 2 * 8:,} in 6 arrays" in groups
    (line,) = [line for line in said if line.startswith("not default: [model]")]
    assert line == "not default: [model] depth=2 width=16 heads=2"


def test_the_summary_names_the_matrices_of_a_network_that_does_not_declare_them(tmp_path):
    said: list[str] = []

    def network(config):
        return dataclasses.replace(build(config), axes=None)

    flags = tiny_run.flags(tmp_path / "run", optim__name="adamw")
    with tiny_run.on_devices(1):
        run = prepare(configs.load(None, flags), network=network, report=said.append)
    with run.checkpoints:
        describe(run, said.append)
    (line,) = [line for line in said if line.startswith("without Network.axes, matrices by rank: ")]
    assert set(line.split(": ")[1].split(", ")) == toy.matrices(build(run.config.model))
