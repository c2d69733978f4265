"""Models on a mesh: parameters in parts from the start, rows split, texts as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saved_model
import toy_model
from jax.sharding import NamedSharding, PartitionSpec

import dlm_jax
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.partitions import (
    axes_of,
    make_mesh,
    named_leaves,
    partition,
    path_name,
)
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.request import make_requests
from dlm_jax.store import save_weights

MESH = MeshConfig(data=2, fsdp=2, tensor=2)
SHORT = {"chain": ("temperature",), "order": "left_to_right", "gen_length": 5, "steps": 5}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    meta = {"config": saved_model.configs.to_dict(saved_model.CONFIG),
            "tokenizer": toy_model.TOKENIZER.to_json()}  # fmt: skip
    save_weights(path, toy_model.MODEL.params, meta)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "stored", None])
@pytest.mark.parametrize("source", ["run_dir", "file"])
def test_every_parameter_is_read_in_its_parts_onto_its_devices(source, dtype, request):
    path = request.getfixturevalue(source)
    mesh = make_mesh(MESH)
    model = dlm_jax.load(path, mesh=mesh, dtype=dtype)
    kept = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    axes, num_split = dict(named_leaves(axes_of(model.network))), 0
    for (name, leaf), whole in zip(
        jax.tree_util.tree_flatten_with_path(model.params)[0],
        jax.tree.leaves(toy_model.MODEL.params),
        strict=True,
    ):
        wanted = NamedSharding(mesh, partition(axes[path_name(name)], leaf.shape, mesh))
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        assert leaf.dtype == kept
        assert {shard.data.shape for shard in leaf.addressable_shards} == {
            wanted.shard_shape(leaf.shape)
        }
        num_split += leaf.addressable_shards[0].data.size < leaf.size
        np.testing.assert_array_equal(leaf, whole.astype(kept))
    assert num_split > 5


def test_no_parameter_is_ever_whole_on_a_device(run_dir, file, monkeypatch):
    """Whatever is put onto a device while a model is loaded is a part of a parameter."""
    largest = max(leaf.size for leaf in jax.tree.leaves(toy_model.MODEL.params))
    put, sizes = jax.device_put, []

    def spy(x, *args, **options):
        sizes.extend(leaf.size for leaf in jax.tree.leaves(x) if isinstance(leaf, np.ndarray))
        return put(x, *args, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    for path in (run_dir, file):
        model = dlm_jax.load(path, mesh=MESH)
        split = [leaf for leaf in jax.tree.leaves(model.params) if leaf.size == largest]
        assert all(leaf.addressable_shards[0].data.size == largest // 4 for leaf in split)
    assert all(size < largest for size in sizes)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"data": 4, "tensor": 2}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 4}, id="fsdp"),
    ],
)
def test_texts_on_a_mesh_are_those_of_one_device_and_no_device_has_all_rows(run_dir, axes):
    model = dlm_jax.load(run_dir, mesh=MeshConfig(**axes))
    shares = axes["data"] * axes.get("fsdp", 1)
    asked = [make_requests(model, prompt, SHORT, index)[0]
             for index, prompt in enumerate(["The ", "A ", "cat"] * 3)]  # fmt: skip
    with Engine(model, sizes=(8,)) as engine:
        for request in asked:
            engine.submit(request, is_watched=True)
        engine.step(0)
        (state,) = [queue.slots._state for queue in engine._queues]
        for leaf in jax.tree.leaves(state):
            assert leaf.addressable_shards[0].data.shape[0] == 8 // shares
        rows = {row.number: row for row in engine.run()}  # the last is the finished one
    alone = dlm_jax.load(run_dir)
    with Engine(alone, sizes=(8,)) as engine:
        for row in engine.run(asked):
            assert rows[row.number].tokens.tolist() == row.tokens.tolist()
            np.testing.assert_allclose(rows[row.number].logprobs, row.logprobs, rtol=1e-4)


def test_rows_of_a_mesh_are_fed_and_read_whole_by_a_lone_process():
    from dlm_jax.distributed.partitions import OwnRows

    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    own = OwnRows(NamedSharding(mesh, PartitionSpec(("data", "fsdp"))), 8)
    assert (own.share, own.count) == ((0, 1), 8)
    rows = {"a": np.arange(16).reshape(8, 2), "b": np.arange(8)}
    placed = own.place(rows)
    assert placed["a"].addressable_shards[0].data.shape == (2, 2)
    jax.tree.map(np.testing.assert_array_equal, own.fetch(placed), rows)
