"""Whether a denoising loop has the memory for its rows, asked before it runs."""

from __future__ import annotations

from typing import Any

from dlm_jax.distributed.memory import require_room
from dlm_jax.inference.host import HostLoop
from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.state import State

_LARGE = 1 << 15
"""Positions of all slots from which on it is asked: less always fits."""


def require_working_room(loop: Advance | HostLoop, params: Any, state: State) -> None:
    """Nothing, if each device has what a step needs beside its arguments, or the state is small.

    Raises:
      MemoryError: it does not fit; the line says by how much, and the remedy.
    """
    rows, positions = state.canvas.tokens_BL.shape
    if rows * positions < _LARGE:
        return
    require_room(
        loop.working_bytes(params, state),
        state.status_B.devices(),
        f"a step of {rows} rows on a canvas of {positions}",
        "lower max_length or batch_size",
    )
