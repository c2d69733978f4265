"""Checkpoints that are complete or absent, and never silently wrong."""

from dlm_jax.checkpoint.finite import not_finite
from dlm_jax.checkpoint.loading import load_any, load_meta
from dlm_jax.checkpoint.store import Checkpoints, Restored, load_params
from dlm_jax.checkpoint.weights import load_weights, save_weights

__all__ = [
    "Checkpoints", "Restored", "load_any", "load_meta", "load_params", "load_weights", "not_finite",
    "save_weights",
]  # fmt: skip
