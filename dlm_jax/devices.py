"""Which devices the program that is being traced is for.

A program may be compiled for devices that are not there, so what is traced must not follow those of
this process. Functions that compile name their devices with `used` around what they trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

_NAMES = {"cuda": "gpu", "rocm": "gpu"}


@contextlib.contextmanager
def used(place: Mesh | Sharding | None) -> Iterator[None]:
    """What is traced inside is for these devices; None changes nothing.

    They are part of what JAX compares before it takes a trace that it has made, so that no trace
    for other devices is taken. A single device of the kind that this process computes on needs no
    name: its programs stay what they are without one.
    """
    mesh = _mesh_of(place)
    if mesh is None or (mesh.size == 1 and _platform_of(mesh) == jax.default_backend()):
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: that of the devices in use, or else of this process."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None:
        return jax.default_backend()
    return _platform_of(mesh)


def mesh_in_use() -> AbstractMesh | None:
    """The mesh of the devices in use; None for a single device, and where each runs on its own.

    The latter is the inside of ``jax.shard_map``.
    """
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
