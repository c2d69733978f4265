from __future__ import annotations

import types
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from dlm_jax.config import MeshConfig
from dlm_jax.distributed import mesh as meshes
from dlm_jax.distributed.mesh import arranged, fsdp_for, require_room, shape_of
from dlm_jax.distributed.partitions import make_mesh, partition
from dlm_jax.types import Axes


@dataclass(frozen=True)
class Chip:
    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "gpu"


def test_axes_that_are_used_are_there_and_their_order_puts_tensor_innermost():
    mesh = make_mesh(MeshConfig(expert=2, context=2, tensor=2))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "expert": 2, "context": 2, "tensor": 2}
    axes = Axes(("layers", "experts", "embed", "mlp"))
    assert tuple(partition(axes, (3, 4, 8, 8), mesh)) == (None, "expert", None, "tensor")


def test_slices_are_the_outermost_part_of_data():
    chips = [Chip(id=i, process_index=i // 2, slice_index=i // 4) for i in range(8)]
    shape = shape_of(MeshConfig(data=4, fsdp=2), 8, num_slices=2)
    mesh = arranged(chips[::-1], shape)
    assert [[chip.slice_index for chip in row.flat] for row in mesh] == [[0, 0]] * 2 + [[1, 1]] * 2


def test_a_mesh_that_would_split_parameters_over_slices_is_refused():
    with pytest.raises(ValueError, match="2 slices; use divisors"):
        shape_of(MeshConfig(fsdp=8), 8, num_slices=2)


@pytest.mark.parametrize(
    ("state", "memory", "expected"), [(8.0, 0.0, 1), (8.0, 80.0, 1), (80.0, 80.0, 4), (1e6, 1.0, 8)]
)
def test_parameters_are_split_over_as_few_devices_as_leave_room(state, memory, expected):
    assert fsdp_for(state, memory, 8) == expected


def test_nothing_said_means_data_parallel_on_cpus():
    assert make_mesh(MeshConfig()).shape["data"] == len(jax.devices())
    assert np.array(arranged(jax.devices(), {"data": 8, "fsdp": 1, "tensor": 1})).shape == (8, 1, 1)


def _devices(*platforms, process_index=0):
    return [types.SimpleNamespace(platform=p, process_index=process_index) for p in platforms]


def test_devices_that_are_parts_of_one_host_share_its_memory(tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       100 kB\nMemFree:          3 kB\nMemAvailable:     7 kB\n")
    monkeypatch.setattr(meshes, "_INFO", info)
    elsewhere = _devices("cpu", process_index=jax.process_index() + 1)
    require_room(3584, [*_devices("cpu", "cpu", "gpu"), *elsewhere], "the state", "make it smaller")
    with pytest.raises(MemoryError, match="the state needs 0.0 GiB, and .* free; make it smaller"):
        require_room(3585, _devices("cpu", "cpu"), "the state", "make it smaller")
    info.unlink()
    require_room(1 << 60, _devices("cpu"), "the state", "make it smaller")
