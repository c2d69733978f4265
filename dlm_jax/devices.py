"""The target devices of the program that is being traced.

A program may be compiled for absent devices, so tracing must not depend on the devices of this
process. Functions that compile programs set the target devices with `used`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, Sharding

_NAMES = {"cuda": "gpu", "rocm": "gpu"}


@contextlib.contextmanager
def used(place: Mesh | Sharding | None) -> Iterator[None]:
    """A context that sets the target devices for tracing; None has no effect.

    They are part of the key of JAX's trace cache, unless they are one device of the default
    platform.
    """
    mesh = _mesh_of(place)
    if mesh is None or (mesh.size == 1 and _platform_of(mesh) == jax.default_backend()):
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def exact(place: Mesh | Sharding | None = None) -> Iterator[None]:
    """As `used`, with float32 products in float32 on GPUs, for sampling, scoring and replay.

    By default, GPUs round the operands to a mantissa of 10 bits, and the tokens of a row would
    depend on the shape of its batch. The option ``jax_default_matmul_precision`` overrides this.
    """
    with used(place):
        if platform() != "gpu" or jax.config.values["jax_default_matmul_precision"] is not None:
            yield
            return
        with jax.default_matmul_precision("highest"):
            yield


def platform() -> str:
    """The platform (cpu, gpu or tpu) of the target devices; by default, that of this process."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None:
        return jax.default_backend()
    return _platform_of(mesh)


def is_concrete(x: object) -> bool:
    """Whether `x` is not a value of a trace."""
    return not isinstance(x, Tracer)


def is_on_one_cpu(x: object) -> bool:
    """Whether `x` is an array in the memory of a single CPU device."""
    if not isinstance(x, jax.Array) or not is_concrete(x):
        return False
    return [device.platform for device in x.devices()] == ["cpu"]


def kind() -> str:
    """The kind of the target devices, such as ``TPU v5 lite``; by default, that of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def num_cores() -> int:
    """The number of cores of a target TPU device, which run its programs together; 1 if unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(jax.devices()[0] if device is None else device, "num_cores", None) or 1


def mesh_in_use() -> AbstractMesh | None:
    """The mesh of the target devices; None for a single device and inside ``jax.shard_map``."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return None
    return mesh


def _mesh_of(place: Mesh | Sharding | None) -> AbstractMesh | None:
    if place is None:
        return None
    mesh = place if isinstance(place, Mesh) else getattr(place, "mesh", None)
    if mesh is None:
        assert isinstance(place, Sharding)
        mesh = Mesh(np.array(list(place.device_set)[:1]), ("data",))
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _platform_of(mesh: AbstractMesh) -> str:
    name = str(mesh.abstract_device.platform)
    return _NAMES.get(name, name)
