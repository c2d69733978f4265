"""Meshes of devices with named axes, published chip specifications, topologies by name, and checks
that arrays fit in memory before they are allocated.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from dlm_jax.config import MeshConfig


@dataclass(frozen=True)
class Chip:
    """Peak performance of one chip.

    Attributes:
      name: prefix of topology names.
      flops: peak of matrix products in bfloat16, FLOP/s.
      clock: clock rate in the compiler's estimates, cycles/s.
      memory: size of the memory, bytes.
      bandwidth: memory bandwidth, bytes/s.
      link: total bandwidth of the links along one torus dimension in both directions, bytes/s.
      torus: smallest size of a dimension with wrap-around links; 0 if there are none.
    """

    name: str
    flops: float
    clock: float
    memory: float
    bandwidth: float
    link: float
    torus: int


CHIPS: dict[str, Chip] = {
    "TPU v5": Chip("v5p", 459e12, 1.75e9, 95.0 * 2**30, 2.765e12, 1.8e11, 4),
    "TPU v5 lite": Chip("v5e", 197e12, 1.5e9, 15.75 * 2**30, 8.1e11, 9.0e10, 16),
    "TPU v6 lite": Chip("v6e", 918e12, 1.75e9, 31.25 * 2**30, 1.6e12, 1.8e11, 16),
}
"""Chips by JAX device kind.

Sources: the system architecture pages of Cloud TPU for v5p, v5e and v6e; the compiler for clock
rates.
"""


AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Axes of a mesh, from the outermost (least communication) to the innermost."""

ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""

# Axes that every mesh has, because other code refers to these axes.
_ALWAYS = ("data", "fsdp", "tensor")


def shape_of(config: MeshConfig, num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Axis sizes of a mesh: data, fsdp and tensor, plus other axes of `AXES` larger than 1."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    sizes["fsdp"] = max(1, sizes["fsdp"])
    inner = math.prod(size for axis, size in sizes.items() if axis != "data")
    if sizes["data"] == -1:
        sizes["data"] = max(1, num_devices // inner)
    is_whole = math.prod(sizes.values()) == num_devices
    if not is_whole or sizes["data"] % num_slices:
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        problem = f"do not leave whole slices to mesh.data; there are {num_slices} slices"
        if not is_whole:
            problem = f"do not multiply to {num_devices}, the number of devices"
        raise ValueError(f"{asked} {problem}; use divisors of these numbers")
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in _ALWAYS}


def fsdp_for(state_bytes: float, device_bytes: float, num_devices: int) -> int:
    """The default number of devices across which parameters and optimiser state are split.

    The default is the smallest number that leaves three quarters of a device's memory free. A
    larger number has no advantage, because gradients are summed over all devices in any case and
    replicated parameters need no gather.
    """
    if device_bytes <= 0:
        return 1
    divisors = (n for n in range(1, num_devices + 1) if num_devices % n == 0)
    return next((n for n in divisors if state_bytes / n <= device_bytes / 4), num_devices)


def arranged(devices: Sequence[Any], shape: dict[str, int]) -> np.ndarray:
    """The devices arranged in the shape of a mesh.

    Slices of a pod, which are joined by a slow network, are the outermost part of ``data``. Within
    a TPU slice, neighbours in the mesh are neighbours on the torus if each process then provides
    consecutive rows. Otherwise, the devices of each process are neighbours.
    """
    slices: dict[int, list[Any]] = defaultdict(list)
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        slices[getattr(device, "slice_index", 0) or 0].append(device)
    sizes = [shape["data"] // len(slices), *list(shape.values())[1:]]
    num_rows = math.prod(size for axis, size in zip(shape, sizes, strict=True) if axis in ROWS)

    def in_slice(devices: list[Any]) -> np.ndarray:
        by_process = np.asarray(devices, dtype=object).reshape(sizes)
        if devices[0].platform != "tpu":
            return by_process
        try:
            on_torus = mesh_utils.create_device_mesh(
                sizes, devices=devices, allow_split_physical_axes=True
            )
        except (NotImplementedError, ValueError, AssertionError):
            return by_process
        rows_of: dict[int, set[int]] = defaultdict(set)
        for (row, _), device in np.ndenumerate(on_torus.reshape(num_rows, -1)):
            rows_of[device.process_index].add(row)
        is_in_order = all(max(rows) - min(rows) + 1 == len(rows) for rows in rows_of.values())
        return on_torus if is_in_order else by_process

    return np.concatenate([in_slice(slices[number]) for number in sorted(slices)], axis=0)


_NAME = re.compile(r"(v[0-9]+[a-z]*):([0-9]+(?:x[0-9]+){1,2})(?:\*([0-9]+))?")

# Environment variables without which libtpu would query the machine.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU topology, such as ``v5p:8x8x8`` or, with two slices, ``v5e:4x4*2``.

    Programs can be compiled for these devices but not run. Call this function before the first
    array is created; afterwards, the process computes on CPUs.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"--topology={name} is not a topology; use a kind and a shape, such as v5e:4x4, "
            "v5p:8x8x8 or, for two slices, v5p:4x4x4*2"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"--topology={name} needs the TPU compiler; pip install 'dlm_jax[tpu]'")
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    jax.config.update("jax_platforms", "cpu")
    kind, shape, num_slices = found.groups()
    try:
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{kind}:{shape}",
            **({"num_slices": int(num_slices)} if num_slices else {}),
        )
    except Exception as error:  # noqa: BLE001 - libtpu has no error of its own
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(
            f"--topology={name} is not supported by the TPU compiler ({reason}); use v5e:4x4, "
            "v5e:16x16, v5p:4x4x4 or v5p:8x8x8"
        ) from None
    return list(topology.devices)


_INFO = Path("/proc/meminfo")


def device_bytes(device: Any) -> float:
    """The memory of an accelerator in bytes; 0 for a CPU and if unknown.

    For a GPU, this is the memory that XLA may use on the GPUs of this kind in this process.
    """
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].memory
    # Only local devices report their memory.
    here = [one for one in jax.local_devices() if one.device_kind == device.device_kind]
    if not here or here[0].platform == "cpu":
        return 0.0
    return float((here[0].memory_stats() or {}).get("bytes_limit", 0))


def require_room(num_bytes: float, devices: Iterable[Any], what: str, remedy: str) -> None:
    """Checks that the host has `num_bytes` free for each CPU device of this process in `devices`.

    The operating system would end a process that needs more; accelerators raise an error.

    Raises:
      MemoryError: the host lacks memory; the message gives the sizes and a remedy.
    """
    here = (device for device in devices if device.process_index == jax.process_index())
    needed = num_bytes * sum(device.platform == "cpu" for device in here)
    found = re.search(r"MemAvailable: +(\d+) kB", _INFO.read_text() if _INFO.exists() else "")
    if found and needed > (free := int(found[1]) * 1024):
        raise MemoryError(
            f"{what} needs {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; "
            f"{remedy}"
        )
