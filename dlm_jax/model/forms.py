"""The forms of attention off CPU: kernels that never hold all scores, and the plain formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dlm_jax import devices
from dlm_jax.types import live_positions

MaySee = Callable[[Any, Any], Any]
"""``(query places, key places) -> True`` where a query may see a key, whatever the row's length.

A module-level function, or a frozen dataclass with ``__call__``: it is compiled in, compared and
hashed. It must work on NumPy and on JAX integers that broadcast, and let every query see a key.
"""

SAVED = "attention"
"""What rematerialisation may keep by name: the output of attention, and what its kernel needs."""

# Below it a TPU's own fusions are as good as the kernel, whose blocks have at least 128 positions.
_LEAST_FOR_SPLASH = 256
# Scores per device that the plain form holds at a time.
_MAX_SCORES = 2**28


def causal(query: Any, key: Any) -> Any:
    """A position sees itself and those to its left."""
    return key <= query


@dataclass(frozen=True)
class InBlocks:
    """A position sees its own block of that many positions, and all blocks before it."""

    length: int

    def __call__(self, query: Any, key: Any) -> Any:
        """True where a query sees a key."""
        return key // self.length <= query // self.length


@dataclass(frozen=True)
class BesideClean:
    """A noisy position sees the noisy ones of its own block, and the clean ones of those before.

    Attributes:
      length: positions of a block.
      num_positions: of a row; behind so many noisy keys stand the clean ones.
    """

    length: int
    num_positions: int

    def __call__(self, query: Any, key: Any) -> Any:
        """True where a noisy query sees a key."""
        is_noisy = key < self.num_positions
        is_own = key // self.length == query // self.length
        is_before = (key - self.num_positions) // self.length < query // self.length
        return (is_noisy & is_own) | (~is_noisy & is_before)


def attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    length_B: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """Attention output ``[B, L, H, K]`` of queries to the keys that live and that they may see.

    On a TPU by the splash kernel, on a GPU in half precision by cuDNN's, and otherwise by the plain
    formula. The keys may be those of several streams of the rows, one behind the other; then
    `may_see` tells them apart.

    Args:
      q_BLHK: queries.
      k_BMGK: keys; heads share them in consecutive groups.
      v_BMGK: values.
      length_B: int32 live positions of each stream.
      may_see: None: all.
    """
    num_positions, platform = q_BLHK.shape[1], devices.platform()
    # A row of length 0 sees its first key, which keeps it finite.
    is_live_BL = live_positions(jnp.maximum(length_B, 1), num_positions)
    is_live_BM = jnp.tile(is_live_BL, (1, k_BMGK.shape[1] // num_positions))
    given = (q_BLHK, k_BMGK, v_BMGK, is_live_BM)
    if platform == "tpu" and num_positions >= _LEAST_FOR_SPLASH:
        # Where there is no TPU, importing Pallas would cost every program a third of a second.
        from dlm_jax.model.splash import splash_attention

        # It saves what it returns itself: a name out here would keep the same twice.
        return splash_attention(*given, may_see=may_see, saved=SAVED)
    is_half = q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and is_half and q_BLHK.shape[-1] % 8 == 0 and may_see in (None, causal):
        y_BLHK = cudnn_attention(q_BLHK, k_BMGK, v_BMGK, length_B, is_causal=may_see is not None)
    else:
        y_BLHK = plain_attention(*given, may_see=may_see)
    return checkpoint_name(y_BLHK, SAVED)


def cudnn_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
) -> jax.Array:
    """`attention` by the fused kernel of cuDNN: half precision, head sizes of a multiple of 8."""
    visible_B = jnp.maximum(length_B, 1)
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        query_seq_lengths=jnp.full_like(visible_B, q_BLHK.shape[1]),
        key_value_seq_lengths=visible_B,
        is_causal=is_causal,
        implementation="cudnn",
    )


def plain_attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """`attention` by its formula, for some queries at a time where all scores would not fit.

    Those of one such slice are computed again in the backward pass.
    """
    num_rows, num_positions, num_heads, _ = q_BLHK.shape
    key_M = jnp.arange(k_BMGK.shape[1])

    def of_queries(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BNHK, query_N = piece
        mask = is_live_BM[:, None, None, :]
        if may_see is not None:
            mask = mask & may_see(query_N[:, None], key_M[None])[None, None]
        return jax.nn.dot_product_attention(q_BNHK, k_BMGK, v_BMGK, mask=mask)

    mesh, query_L = devices.mesh_in_use(), jnp.arange(num_positions)
    scores = num_rows * num_heads * num_positions * key_M.size // (mesh.size if mesh else 1)
    slices = math.gcd(num_positions, 2 ** max(0, (scores // _MAX_SCORES).bit_length()))
    if slices == 1:
        return of_queries((q_BLHK, query_L))
    q_SBNHK = jnp.moveaxis(q_BLHK.reshape(num_rows, slices, -1, *q_BLHK.shape[2:]), 1, 0)
    y_SBNHK = jax.lax.map(jax.checkpoint(of_queries), (q_SBNHK, query_L.reshape(slices, -1)))
    return jnp.moveaxis(y_SBNHK, 0, 1).reshape(q_BLHK.shape)
