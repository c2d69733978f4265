"""Checks that arrays fit in memory before they are allocated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from dlm_jax.distributed.mesh import CHIPS

_GIB = float(1 << 30)
_INFO = Path("/proc/meminfo")


def free_bytes(device: Any) -> int | None:
    """Free memory of a device in bytes; None if unknown.

    For a CPU, this is the operating system's available memory.
    """
    if device.platform == "cpu":
        return _free_on_host()
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0)


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
    """Checks that each device of this process has `num_bytes` free.

    The CPU devices of a host share the memory of the host.

    Raises:
      MemoryError: if a device lacks memory; the message gives the sizes and a remedy.
    """
    mine = [device for device in devices if device.process_index == jax.process_index()]
    on_host = [device for device in mine if device.platform == "cpu"]
    for device in (*on_host[:1], *(device for device in mine if device.platform != "cpu")):
        needed = num_bytes * (len(on_host) if device.platform == "cpu" else 1)
        free = free_bytes(device)
        if free is not None and needed > free:
            raise MemoryError(
                f"{what} needs {needed / _GIB:,.1f} GiB, and {free / _GIB:,.1f} GiB are free; "
                f"{remedy}"
            )


def require_working_room(
    program: jax.stages.Compiled, devices: Iterable[Any], what: str, remedy: str
) -> None:
    """Raises MemoryError if a device lacks memory for a program's temporary buffers."""
    plan = program.memory_analysis()
    require_room(getattr(plan, "temp_size_in_bytes", 0), devices, what, remedy)


def _free_on_host() -> int | None:
    try:
        lines = _INFO.read_text().split("\n")
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    kilobytes = sizes.get("MemAvailable", "").split()
    return int(kilobytes[0]) * 1024 if kilobytes else None
