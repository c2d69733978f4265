"""Checkpoints that are either complete or absent, and never silently corrupt.

The names in this package are imported on first use, so that code that only uses
`dlm_jax.store.files` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_jax.store.checkpoints import Checkpoints, Restored, load_any, load_meta, load_params
    from dlm_jax.store.weights import load_weights, not_finite, save_weights

__all__ = [
    "Checkpoints", "Restored", "load_any", "load_meta", "load_params", "load_weights",
    "not_finite", "save_weights",
]  # fmt: skip

_HOME_OF = {
    "not_finite": "weights",
    "load_weights": "weights",
    "save_weights": "weights",
    **dict.fromkeys(
        ("Checkpoints", "Restored", "load_any", "load_meta", "load_params"), "checkpoints"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dlm_jax.store' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlm_jax.store.{_HOME_OF[name]}"), name)
