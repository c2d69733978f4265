"""Checkpoints that are complete or absent, and never silently wrong."""

from dlm_jax.checkpoint.store import Checkpoints, Restored, load_params

__all__ = ["Checkpoints", "Restored", "load_params"]
