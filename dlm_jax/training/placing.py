"""The mesh of a run, where the config leaves it open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from dlm_jax.config import Config, MeshConfig
from dlm_jax.distributed.chips import CHIPS
from dlm_jax.distributed.mesh import fsdp_for
from dlm_jax.model.transformer import build
from dlm_jax.randomness import key_of


def mesh_config(config: Config, devices: Sequence[Any]) -> MeshConfig:
    """That of `config`, with ``mesh.fsdp`` chosen by the size of the model if it is 0.

    Args:
      config: with ``model.vocab_size`` set.
      devices: of all processes.
    """
    mesh = config.mesh
    memory = device_bytes(devices[0])
    if mesh.fsdp > 0 or not memory:
        return mesh
    num_slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    inner = mesh.tensor * mesh.expert * mesh.context * num_slices
    if mesh.data == -1:
        split = max(1, len(devices) // inner)
        fsdp = fsdp_for(state_bytes(config) / mesh.tensor, memory, split)
    else:
        # What `data` leaves must be `fsdp`, or the mesh would not hold all devices.
        fsdp = max(1, len(devices) // (mesh.tensor * mesh.expert * mesh.context * mesh.data))
    return dataclasses.replace(mesh, fsdp=fsdp)


def state_bytes(config: Config) -> float:
    """Bytes of the parameters of the config's model, and of what its optimiser keeps of them."""
    shapes = jax.eval_shape(build(config.model).init, key_of(0))
    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    copies = 3 + (config.optim.ema_decay > 0)
    return 4.0 * copies * num_parameters


def device_bytes(device: Any) -> float:
    """Memory of an accelerator; 0 where it is not known, and for a CPU."""
    if device.platform == "cpu":
        return 0.0
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].memory
    return float((device.memory_stats() or {}).get("bytes_limit", 0))
