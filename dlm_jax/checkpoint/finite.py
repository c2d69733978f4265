"""Whether the parameters of a model are numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.types import Params


def not_finite(params: Params) -> str | None:
    """Path of the first parameter that holds a NaN or an infinity; None if all are finite.

    Reads every parameter once, where it lies (about 1 GB/s on a CPU). A process reads what its own
    devices hold.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        parts = (
            {str(shard.index): shard.data for shard in leaf.addressable_shards}.values()
            if isinstance(leaf, jax.Array)
            else [leaf]
        )
        if not all(_is_finite(part) for part in parts):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None


def _is_finite(part: jax.Array | np.ndarray) -> bool:
    # NumPy looks at an array of the host in place; anything else would compile for each shape.
    if isinstance(part, jax.Array) and any(d.platform != "cpu" for d in part.devices()):
        return bool(jnp.isfinite(part).all())
    return bool(np.isfinite(np.asarray(part)).all())
