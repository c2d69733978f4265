"""Where arrays live: the device mesh, and a partition for every parameter by its path.

A mesh has three axes. ``data`` splits the batch; ``fsdp`` splits the batch too, and the
parameters with their optimiser state; ``tensor`` splits the matrices inside a layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.config import MeshConfig

RULES: tuple[tuple[str, P], ...] = (
    (r"embedding$", P("tensor", "fsdp")),
    (r"(^|/)head/kernel$", P("fsdp", "tensor")),
    (r"blocks/.*/(query|key|value|up|gate)/kernel$", P(None, "fsdp", "tensor")),
    (r"blocks/.*/(out|down)/kernel$", P(None, "tensor", "fsdp")),
    (r"blocks/.*/(query|key|value)/bias$", P(None, "tensor")),
    (r"blocks/.*/expert_(gate|up)$", P(None, None, "fsdp", "tensor")),
    (r"blocks/.*/expert_down$", P(None, None, "tensor", "fsdp")),
    # Small: every device holds all of them.
    (r"blocks/.*/router(/kernel|_bias)$", P()),
    (r"(^|/)adapters/", P()),
    (r"(sampler|scorer)_head/inner/kernel$", P("fsdp", "tensor")),
    (r"sampler_head/out/kernel$", P("tensor", "fsdp")),
    (r"(critic|scorer)_head/out/kernel$", P()),
    (r"(^|/)(norm|\w+_norm)/(scale|bias)$", P()),
    # Other heads are small: every device holds all of them.
    (r"(^|/)\w+_head/", P()),
)
"""Path pattern and partition, first match wins. Optimiser moments end in the same paths."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh with axes ``data``, ``fsdp``, ``tensor`` over all devices of all processes.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    # Neighbours in the mesh share a host, so that each host feeds consecutive rows.
    devices = sorted(
        jax.devices() if devices is None else devices,
        key=lambda device: (device.process_index, device.id),
    )
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data * inner != len(devices):
        raise ValueError(
            f"mesh.data={config.data}, mesh.fsdp={config.fsdp}, mesh.tensor={config.tensor} do not "
            f"multiply to the {len(devices)} devices present; change one of them"
        )
    shape = (data, config.fsdp, config.tensor)
    return Mesh(
        np.asarray(devices).reshape(shape), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
    )


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Sharding of ``[B, ...]`` arrays over the axes that split the batch.

    Raises:
      ValueError: the batch is not divisible by them.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % shards:
        raise ValueError(
            f"train.batch_size={batch_size} is not divisible by the {shards} devices that split "
            f"the batch; use {shards * max(1, round(batch_size / shards))}"
        )
    return NamedSharding(mesh, P(("data", "fsdp")))


def share_of_batch(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """(index, count): this process feeds share `index` of the batch, cut into `count` equal ones.

    Processes that split only parameters or matrices between them feed the same share.

    Raises:
      ValueError: a process holds rows that are not one whole share.
    """
    spans = sharding.addressable_devices_indices_map((batch_size,)).values()
    starts = {(span or (slice(None),))[0].indices(batch_size)[:2] for span in spans}
    first, last = min(start for start, _ in starts), max(stop for _, stop in starts)
    size = last - first
    if sum(stop - start for start, stop in starts) != size or batch_size % size or first % size:
        raise ValueError(
            "mesh: the batch rows of this process are not one equal share of the batch; make "
            "mesh.data * mesh.fsdp a multiple or a divisor of the number of processes"
        )
    return first // size, batch_size // size


def partition(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Partition of the parameter at `path` (``a/b/c``).

    An axis of the mesh that does not divide its dimension is left out: that dimension is
    replicated.

    Raises:
      ValueError: no rule matches a matrix that several devices are to hold.
    """
    for pattern, spec in RULES:
        if re.search(pattern, path):
            return P(
                *(
                    axis if axis is None or size % mesh.shape[axis] == 0 else None
                    for axis, size in zip(spec, shape, strict=False)
                )
            )
    if len(shape) >= 2 and math.prod(shape) > 1 and mesh.size > 1:
        raise ValueError(f"no sharding rule matches parameter {path!r} of shape {shape}; add one")
    return P()


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Sharding of every leaf of a training state, given as arrays or their shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition(path_name(path), leaf.shape, mesh)), tree
    )


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as ``a/b/c``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
