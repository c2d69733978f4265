"""Where the time of a run goes: into the devices, into waiting for input, into the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from dlm_jax.distributed.chips import CHIPS
from dlm_jax.training.flops import model_flops
from dlm_jax.training.run import Run

# Products in bfloat16 of one GPU, dense, FLOP/s: the vendor's data sheets.
_GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops(device: Any) -> float | None:
    """FLOP/s of a device at best, in bfloat16; None if they are not known, as those of a CPU."""
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].flops
    return next((peak for name, peak in _GPUS.items() if name in device.device_kind), None)


class Meter:
    """Figures of the clock for the metrics of a run, since it was last asked.

    Args:
      run: whose steps it times.
    """

    def __init__(self, run: Run):
        config, devices = run.config, list(run.mesh.devices.flat)
        self._tokens = config.train.batch_size * config.data.seq_len
        self._flops = model_flops(
            run.state.params,
            config.model,
            num_rows=config.train.batch_size,
            num_positions=config.data.seq_len,
        )
        peak = peak_flops(devices[0])
        self._peak = None if peak is None else peak * len(devices)
        self._spent = {"input": 0.0, "device": 0.0}
        self._steps = 0

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Counts the time inside as waiting: for ``input``, once a step, or for the ``device``."""
        self._steps += what == "input"
        start = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - start

    def figures(self, seconds: float) -> dict[str, float]:
        """Figures of the steps since the last call, which took `seconds`; times are of one step.

        ``step_seconds`` is the sum of ``input_seconds`` (waiting for rows), ``device_seconds``
        (waiting for the devices: what they still compute while the host has nothing to do) and
        ``host_seconds`` (everything else). ``flop_utilisation`` is the share of the devices' peak
        that the model's own work is (see `model_flops`), where the peak is known;
        ``device_memory_bytes`` the most that was in use on this process's fullest device, where
        the backend tells.
        """
        spent, self._spent = self._spent, dict.fromkeys(self._spent, 0.0)
        steps, self._steps = self._steps, 0
        found = {
            "tokens_per_second": steps * self._tokens / seconds,
            "step_seconds": seconds / steps,
            "input_seconds": spent["input"] / steps,
            "device_seconds": spent["device"] / steps,
            "host_seconds": max(0.0, seconds - sum(spent.values())) / steps,
        }
        if self._peak is not None:
            found["flop_utilisation"] = steps * self._flops / seconds / self._peak
        in_use = [_peak_memory(device) for device in jax.local_devices()]
        if any(in_use):
            found["device_memory_bytes"] = float(max(in_use))
        return found


def _peak_memory(device: Any) -> int:
    stats = device.memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)))
