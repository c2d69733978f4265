"""dlm_jax: train masked diffusion language models, sample from them, and take them apart.

The names below are imported on first use, so that the rooms of the library can be imported without
the model's and the checkpoints' dependencies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_jax.api import Texts, generate, stream
    from dlm_jax.models import Model, load
    from dlm_jax.scorer import corruption
    from dlm_jax.types import Network, Status

__all__ = ["Model", "Network", "Status", "Texts", "corruption", "generate", "load", "stream"]
__version__ = "0.1.0"

_HOMES = {
    "Model": "models",
    "Texts": "api",
    "corruption": "scorer",
    "generate": "api",
    "stream": "api",
    "load": "models",
    "Network": "types",
    "Status": "types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlm_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlm_jax.{_HOMES[name]}"), name)
