"""Checkpoints that are either complete or absent, and never silently corrupt.

The names in this package are imported on first use, so that code that only uses
`dlm_jax.store.files` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_jax.store.checkpoints import Checkpoints, load_meta, load_params
    from dlm_jax.store.weights import save_weights

__all__ = ["Checkpoints", "load_meta", "load_params", "save_weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dlm_jax.store' has no attribute {name!r}")
    home = "weights" if name == "save_weights" else "checkpoints"
    return getattr(importlib.import_module(f"dlm_jax.store.{home}"), name)
