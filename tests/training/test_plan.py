from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
import tiny_run
import toy

import dlm_jax.config as configs
import dlm_jax.training.plan
from dlm_jax.config import (
    Config,
    MeshConfig,
    OptimConfig,
)
from dlm_jax.distributed.mesh import CHIPS, device_bytes
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.training.plan import mesh_config, model_flops, planned_task, state_bytes
from dlm_jax.training.trainer import prepare


def test_the_work_of_a_model_is_that_of_its_products_three_times_over():
    """Forward products counted one by one, in the programs themselves, for one row."""
    positions = 8
    config = toy.config(activation="swiglu", kv_heads=1)
    shapes = jax.eval_shape(toy.build(config).init, jax.random.key(0))
    head, group, inner = 8, 8, config.inner_width
    per_layer = 2 * 16 * (16 + 2 * group + 16) + 2 * 16 * inner * 3
    attention = 2 * 2 * positions * head * 2
    forward = positions * (2 * (per_layer + attention) + 2 * 16 * toy.VOCAB_SIZE)
    found = model_flops(shapes, config, num_rows=1, num_positions=positions)
    assert found == 3 * forward


def test_an_untied_head_counts_instead_of_the_table_and_a_causal_model_sees_half():
    tied, untied = toy.config(), toy.config(tied_head=False)
    causal = toy.config(attention_type="causal", start_id=toy.MASK)

    def work(config):
        shapes = jax.eval_shape(toy.build(config).init, jax.random.key(0))
        return model_flops(shapes, config, num_rows=2, num_positions=8)

    assert work(tied) == work(untied)
    assert work(tied) - work(causal) == 2 * 8 * 12 * 2 * 16 * 4


def test_a_block_causal_model_passes_two_streams_through_its_layers_and_one_through_its_head():
    config = toy.config(attention_type="block_causal", block_length=4)
    shapes = jax.eval_shape(toy.build(config).init, jax.random.key(0))
    found = model_flops(shapes, config, num_rows=1, num_positions=8)
    layers = 16 * 16 * 4 + 2 * 16 * config.inner_width
    # Queries of two blocks of four: clean 4 and 8, noisy 4 and 4 + 4 visible keys.
    pairs = 4 * (4 + 8 + 4 + 8)
    head = 16 * toy.VOCAB_SIZE
    assert found == 6 * 8 * (2 * 2 * layers + head) + 12 * 2 * 16 * pairs


class _Chip:
    platform, device_kind, slice_index = "tpu", "TPU v5 lite", 0


def _size(config: Config) -> int:
    return state_bytes(planned_task(config, make_mesh(MeshConfig(), jax.devices()[:1])))


def test_a_model_is_split_over_as_few_chips_as_leave_room_unless_the_config_says_how():
    def chosen(width: int, **mesh) -> int:
        model = toy.config(width=width, heads=width // 64, vocab_size=1024)
        config = Config(model=model, mesh=MeshConfig(**mesh))
        return mesh_config(config.mesh, [_Chip()] * 16, lambda: _size(config)).fsdp

    assert chosen(256) == 1
    assert chosen(256, fsdp=8) == 8
    assert chosen(256, data=4) == 4
    big = chosen(8192)
    bytes_ = _size(Config(model=toy.config(width=8192, heads=128, vocab_size=1024)))
    limit = CHIPS["TPU v5 lite"].memory / 4
    assert bytes_ / big <= limit < bytes_ / (big / 2)


def test_the_memory_of_a_gpu_is_that_of_a_local_one_of_its_kind(monkeypatch):
    def gpu(kind, stats):
        return SimpleNamespace(device_kind=kind, platform="gpu", memory_stats=stats)

    def refused():
        raise RuntimeError("MemoryStats is only supported for addressable PjRt devices")

    here, remote = gpu("H", lambda: {"bytes_limit": 7}), gpu("H", refused)
    monkeypatch.setattr(jax, "devices", lambda: [remote, here])
    monkeypatch.setattr(jax, "local_devices", lambda: [here])
    assert device_bytes(remote) == device_bytes(here) == 7
    assert device_bytes(gpu("other", refused)) == 0


@pytest.fixture
def accelerators(monkeypatch):
    """Eight devices that are taken for accelerators with so many bytes of memory."""

    def make(num_bytes: float) -> None:
        monkeypatch.setattr(dlm_jax.training.plan, "device_bytes", lambda device: num_bytes)

    return make


def _prepared(out_dir, **changes):
    return prepare(configs.load(None, tiny_run.flags(out_dir, **changes)), report=lambda line: None)


@pytest.mark.parametrize("fsdp", [0, 8])
def test_a_width_that_the_split_in_use_does_not_divide_is_refused(tmp_path, accelerators, fsdp):
    accelerators(1.0)  # the smallest split that leaves room is that over all devices
    with pytest.raises(ValueError, match="mesh.fsdp=8 does not divide model.width=36, which must"):
        _prepared(tmp_path, model__width=36, mesh__fsdp=fsdp)


def test_devices_that_mesh_data_leaves_are_those_of_fsdp(tmp_path, accelerators):
    accelerators(1e12)
    run = _prepared(tmp_path, mesh__data=2)
    assert dict(run.task.mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    kernels = [x for x in jax.tree.leaves(run.state.params) if x.ndim > 2]
    assert kernels and not any(kernel.is_fully_replicated for kernel in kernels)
    run.checkpoints.close()


@pytest.mark.parametrize(
    ("name", "changes", "copies"),
    [
        ("adamw", {}, 0),
        ("muon", {}, 0),
        ("muon", {"optim": {"ema_decay": 0.9}}, 1),
    ],
    ids=["adamw", "muon", "average"],
)
def test_the_state_is_parameters_moments_and_copies(name, changes, copies):
    """One moment for each matrix under muon and two for the rest, besides a few counters."""
    optim = OptimConfig(name=name, **changes.get("optim", {}))
    config = Config(model=toy.config(), **(changes | {"optim": optim}))
    leaves = jax.tree_util.tree_flatten_with_path(toy.params())[0]
    total = sum(leaf.size for _, leaf in leaves)
    matrices = sum(leaf.size for path, leaf in leaves if "kernel" in str(path[-1]))
    moments = 2 * total - (matrices if name == "muon" else 0)
    assert 0 <= _size(config) - 4 * (total * (1 + copies) + moments) < 64
