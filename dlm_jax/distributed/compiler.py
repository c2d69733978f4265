"""XLA compiler options for each kind of device, with measured or estimated gains."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from dlm_jax.config import WITHOUT_DEFAULTS
from dlm_jax.distributed.mesh import CHIPS
from dlm_jax.settings import SettingError

Use = Literal["train", "sample"]

# The on-chip memory that one operation may use. More memory allows larger tiles, for which
# compilation takes longer.
_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# The size from which matrix products with a sharded matrix are computed in parts. For smaller
# products, the matrix is gathered first.
_WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"

# The gain by `dlm_jax.contrib.pod_costs`: the model, its topology, milliseconds per step (roof /
# cycles) and seconds of compilation, without and with the option. Rows have 4096 positions in
# training and 1024 in sampling, where a step computes whole canvases.
OPTIONS: Mapping[str, Mapping[Use, Mapping[str, str]]] = {
    "v5p": {
        "train": {_VMEM: "98304"},  # 1.3B, 4x4x4: 658 / 887 to 658 / 765; 78 to 227 s
        "sample": {_VMEM: "65536"},  # 8B, 2x2x1: 1162 / 1563 to 1162 / 1277; 29 to 125 s
    },
    "v5e": {
        "train": {_VMEM: "98304"},  # 1.3B, 16x16: 934 / 1052 to 905 / 946; 212 s
        "sample": {
            _WINDOWED: "1000000",  # 8B, 4x4: 3304 / 6095 to 1406 / 1787; 32 s
            _VMEM: "65536",  # 8B, 4x4: 1406 / 1787 to 1431 / 1565; 32 to 167 s
        },
    },
    "v6e": {
        "train": {
            _WINDOWED: "1000000",  # 1.3B, 4x4: 2016 / 2032 to 876 / 734; 70, 137 s
            _VMEM: "65536",  # 1.3B, 4x4: 876 / 734 to 538 / 689; 137 to 234 s
        },
        "sample": {_VMEM: "65536"},  # 8B, 4x4: 209 / 335 to 214 / 283; 29 to 46 s
    },
    # YNNPACK computes reductions (softmax and norms) in training. Eigen still computes matrix
    # products, because it is faster for the batched products of attention. Without YNNPACK, a
    # sampling step of SmolLM2-135M with 8 rows takes 55 ms instead of 72.
    "cpu": {
        "train": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
        "sample": {},
    },
}
"""Default options by chip name (see `dlm_jax.distributed.mesh.CHIPS`) or platform, and by use.

Options that the installed compiler does not support are omitted. GPUs have no default options.
"""


def options(
    use: Use, place: Mesh | Sharding | None = None, given: Sequence[str] = ()
) -> dict[str, str]:
    """Options for ``jax.jit(..., compiler_options=...)``.

    Args:
      use: whether the program trains or samples.
      place: devices of the program; None means the devices of this process.
      given: ``mesh.compiler_options``, which override the defaults.

    Raises:
      SettingError: the compiler rejects an option in `given` or its value.
    """
    devices: list[Any] = jax.local_devices()
    if place is not None:
        devices = list(place.devices.flat if isinstance(place, Mesh) else place.device_set)
    # One of this process, if possible.
    device = min(devices, key=lambda device: device.process_index != jax.process_index())
    kind = CHIPS[device.device_kind].name if device.device_kind in CHIPS else device.platform
    defaults = {} if WITHOUT_DEFAULTS in given else OPTIONS.get(kind, {}).get(use, {})
    accepted = {name: value for name, value in defaults.items() if not _fault(device, name, value)}
    for text in given:
        name, _, value = text.partition("=")
        if text != WITHOUT_DEFAULTS:
            if fault := _fault(device, name, value):
                why = f"is rejected by the compiler of {device.device_kind} ({fault})"
                raise SettingError("mesh.compiler_options", text, why, "remove it")
            accepted[name] = value
    return accepted


@functools.cache
def _fault(device: Any, name: str, value: str) -> str:
    """The error of a device's compiler for an option; empty if the compiler accepts the option.

    A compiler reports unknown options only when compiling a program.
    """
    place = SingleDeviceSharding(device)
    negative = jax.jit(jnp.negative, compiler_options={name: value}, in_shardings=place)
    try:
        negative.lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")[:200]
    return ""
