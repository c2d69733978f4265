"""Shows the denoising: live in a terminal, or as an HTML page that replays it."""

from __future__ import annotations

from dlm_jax.viewing.frames import Changes, Frame, Kind, changes
from dlm_jax.viewing.trace import write_trace
from dlm_jax.viewing.watch import Watch

__all__ = [
    "Changes",
    "Frame",
    "Kind",
    "Watch",
    "changes",
    "write_trace",
]
