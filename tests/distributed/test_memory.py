"""Whether something fits is asked before it is made, and told in one line."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from dlm_jax.distributed import mesh
from dlm_jax.distributed.mesh import free_bytes, require_room


class _Device:
    """A device with so much memory."""

    def __init__(self, platform="gpu", *, limit=None, used=0, process_index=0):
        self.platform, self.process_index = platform, process_index
        self._stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self):
        return self._stats


def _refused(num_bytes, devices):
    with pytest.raises(MemoryError) as error:
        require_room(num_bytes, devices, "the state", "make it smaller")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_cpu_has_what_the_operating_system_calls_available(tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       100 kB\nMemFree:          3 kB\nMemAvailable:     7 kB\n")
    monkeypatch.setattr(mesh, "_INFO", info)
    assert free_bytes(_Device("cpu")) == 7 * 1024
    for content in ("", "MemTotal: 100 kB\n"):
        info.write_text(content)
        assert free_bytes(_Device("cpu")) is None
    monkeypatch.setattr(mesh, "_INFO", Path("/no/such/file"))
    assert free_bytes(_Device("cpu")) is None


def test_what_fits_is_let_through_to_the_byte():
    device = _Device(limit=2 << 30, used=1 << 30)
    require_room(1 << 30, [device], "the state", "make it smaller")
    line = _refused((1 << 30) + 1, [device])
    assert line == "the state needs 1.0 GiB, and 1.0 GiB are free; make it smaller"


def test_every_device_is_asked_and_those_of_other_processes_are_not():
    large, small = _Device(limit=100), _Device(limit=10)
    _refused(50, [large, small])
    elsewhere = _Device(limit=10, process_index=jax.process_index() + 1)
    require_room(50, [large, elsewhere], "the state", "make it smaller")


def test_devices_that_are_parts_of_one_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(mesh, "_free_on_host", lambda: 100)
    require_room(50, [_Device("cpu")] * 2, "the state", "make it smaller")
    _refused(50, [_Device("cpu")] * 3)
