from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
import stage_cases as cases
import toy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.config import MeshConfig, OptimConfig
from dlm_jax.distributed.partitions import (
    axes_of,
    batch_sharding,
    make_mesh,
    path_name,
    shardings,
    share_of_batch,
    undeclared,
)
from dlm_jax.model.transformer import build
from dlm_jax.training.train_step import abstract_state
from dlm_jax.types import Axes

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    "config", [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(tensor=16), MeshConfig(data=4)]
)
def test_axes_that_do_not_multiply_to_the_devices_are_refused_by_name(config):
    with pytest.raises(
        ValueError, match=r"mesh.tensor=\d+ do not multiply to 8, the number of devices"
    ):
        make_mesh(config)


@pytest.mark.parametrize(("batch_size", "remedy"), [(6, 8), (3, 4)])
def test_a_batch_that_the_devices_do_not_divide_is_refused_with_one_that_they_do(
    batch_size, remedy
):
    mesh = make_mesh(CUBE)
    with pytest.raises(ValueError, match=rf"batch_size={batch_size} .* 4 devices .*use {remedy}$"):
        batch_sharding(mesh, batch_size)
    batch_sharding(mesh, remedy)


def test_rows_are_split_by_data_and_fsdp_and_copied_over_tensor():
    sharding = batch_sharding(make_mesh(CUBE), 8)
    rows = np.arange(8)
    seen = [shard.data[0] for shard in jax.device_put(rows, sharding).addressable_shards]
    assert sorted(map(int, seen)) == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_lone_process_feeds_the_whole_batch():
    for config in (CUBE, MeshConfig(), MeshConfig(tensor=8)):
        assert share_of_batch(batch_sharding(make_mesh(config), 8), 8) == (0, 1)


class _Placed:
    """Stands for a sharding of which this process holds only some devices."""

    def __init__(self, *spans: tuple[int, int]):
        self._spans = spans

    def addressable_devices_indices_map(self, shape):
        return {device: (slice(*span),) for device, span in enumerate(self._spans)}


def test_processes_that_hold_the_same_rows_feed_the_same_share():
    assert share_of_batch(_Placed((4, 6), (6, 8)), 8) == (1, 2)
    assert share_of_batch(_Placed((0, 8)), 8) == (0, 1)
    assert share_of_batch(_Placed((2, 4), (2, 4)), 8) == (1, 4)


@pytest.mark.parametrize("spans", [[(0, 2), (6, 8)], [(0, 2), (4, 6)], [(2, 4), (4, 6)], [(0, 3)]])
def test_a_process_with_rows_that_are_no_equal_share_is_refused(spans):
    with pytest.raises(ValueError, match="not an equal share"):
        share_of_batch(_Placed(*spans), 8)


SHAPES = {
    "small": {},
    "large": {"activation": "swiglu", "kv_heads": 1, "tied_head": False},
    "older": {"activation": "gelu", "qkv_bias": True, "qk_norm": False},
    "canvas": {
        "attention_type": "canvas", "block_length": 8, "attention_window": 16, "start_id": 0,
        "depth": 4, "full_every": 2,
    },
    "experts": {
        "activation": "swiglu", "experts": 4, "experts_per_token": 2, "expert_width": 8,
        "shared_width": 4, "dense_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_matrix_and_its_moments_are_split_the_same_way_over_fsdp_and_tensor(shape, name):
    network = build(toy.config(**SHAPES[shape]))
    task = cases.task(network, place=make_mesh(CUBE), optim=OptimConfig(name=name))
    state = abstract_state(task)
    split = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]:
        split[path_name(path)] = leaf.sharding.spec
        is_router = "router" in path_name(path)
        if not is_router and path_name(path).endswith(("kernel", "embedding", "_up", "_down")):
            assert {"fsdp", "tensor"} <= set(leaf.sharding.spec), path_name(path)
            assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    moments = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]:
        owners = [name for name in split if path_name(path).endswith("/" + name)]
        if owners:
            assert leaf.sharding.spec == split[max(owners, key=len)], path_name(path)
            moments += leaf.size
        else:
            assert leaf.size < 10, path_name(path)
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert moments >= params


def _network(params, axes=None):
    return dataclasses.replace(toy.network(), init=lambda key: params, axes=axes)


def test_an_undeclared_matrix_is_replicated_and_named():
    mesh, params = make_mesh(CUBE), {"blocks": {"adapter": {"lora": np.zeros((2, 4, 4))}}}
    network = _network(params)
    (sharding,) = jax.tree.leaves(shardings(params, axes_of(network), mesh))
    assert sharding.is_fully_replicated
    line = undeclared(network, params, mesh.size)
    name = "blocks/adapter/lora"
    assert line.endswith(
        f"matrices by rank: {name}; parameters without axes are whole on each of 8 devices"
    )


def test_a_network_of_ones_own_declares_how_its_parameters_and_their_moments_are_split():
    mesh, params = make_mesh(CUBE), {"w": np.zeros((4, 8)), "b": np.zeros(8), "own": np.zeros(4)}
    declared = {"w": Axes(("embed", "mlp"), is_matrix=True), "b": Axes(("mlp",))}
    network = _network(params, lambda params: declared)
    found = shardings(optax.adam(1e-3).init(params), axes_of(network), mesh)[0]
    for moment in (found.mu, found.nu):
        assert moment["w"].spec == P("fsdp", "tensor") and moment["b"].spec == P("tensor")
        assert moment["own"].is_fully_replicated
    assert found.count == NamedSharding(mesh, P())
    assert undeclared(network, params, 1) == "without Network.axes, matrices by rank: none"


@pytest.mark.parametrize("names", [("embed",), ("embed", "width"), ("fsdp", "tensor")])
def test_axes_that_do_not_fit_a_parameter_are_refused_by_its_name(names):
    network = _network({"w": np.zeros((4, 8))}, lambda params: {"w": Axes(names)})
    with pytest.raises(ValueError, match=r"^the Axes .* parameter 'w' of shape \(4, 8\)"):
        axes_of(network)
