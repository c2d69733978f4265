"""Devices that are not there, for which programs can be compiled all the same."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

_NAME = re.compile(r"(v[0-9]+[a-z]*):([0-9]+(?:x[0-9]+){1,2})(?:\*([0-9]+))?")

# What libtpu would otherwise ask of the machine it finds itself on.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(name: str) -> list[Any]:
    """The devices of a topology of TPUs, such as ``v5p:8x8x8`` or, for two slices, ``v5e:4x4*2``.

    Programs compile for them, and cannot run. Call it before the first array is made: this process
    computes on CPUs from then on.

    Raises:
      ValueError: the name is none, no such topology is known, or libtpu is not installed.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"--topology={name} is no topology; write the kind and the shape, such as v5e:4x4, "
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
            f"--topology={name} is not known to the TPU compiler ({reason}); use such as v5e:4x4, "
            "v5e:16x16, v5p:4x4x4 or v5p:8x8x8"
        ) from None
    return list(topology.devices)
