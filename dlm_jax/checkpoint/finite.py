"""Whether the parameters of a model are numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.types import Params


def not_finite(params: Params) -> str | None:
    """Path of the first parameter that holds a NaN or an infinity; None if all are finite.

    Reads every parameter once, where it lies (about 1 GB/s on a CPU).
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        # NumPy looks at an array of the host in place; anything else would compile for each shape.
        on_host = not isinstance(leaf, jax.Array) or all(
            d.platform == "cpu" for d in leaf.devices()
        )
        found = np.isfinite(np.asarray(leaf)) if on_host else jnp.isfinite(leaf)
        if not bool(found.all()):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None
