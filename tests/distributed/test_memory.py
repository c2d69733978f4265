"""Whether a state fits on a host is asked before it is made, and told in one line."""

from __future__ import annotations

import types

import jax
import pytest

from dlm_jax.distributed import mesh
from dlm_jax.distributed.mesh import require_room


def _devices(*platforms, process_index=0):
    return [types.SimpleNamespace(platform=p, process_index=process_index) for p in platforms]


def test_devices_that_are_parts_of_one_host_share_its_memory(tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       100 kB\nMemFree:          3 kB\nMemAvailable:     7 kB\n")
    monkeypatch.setattr(mesh, "_INFO", info)
    elsewhere = _devices("cpu", process_index=jax.process_index() + 1)
    require_room(3584, [*_devices("cpu", "cpu", "gpu"), *elsewhere], "the state", "make it smaller")
    with pytest.raises(MemoryError, match="the state needs 0.0 GiB, and .* free; make it smaller"):
        require_room(3585, _devices("cpu", "cpu"), "the state", "make it smaller")
    info.unlink()
    require_room(1 << 60, _devices("cpu"), "the state", "make it smaller")
