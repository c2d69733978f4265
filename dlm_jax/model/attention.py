"""Attention behind one function: who may attend to whom, and which kernel computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dlm_jax import devices
from dlm_jax.model import cpu

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


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each float32 ``[L, K/2]``.

    Position ``l`` turns pair ``i`` by ``l * theta ** (-2i / K)`` (Su et al. 2021, equation 15).
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def attend(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """Attention output ``[B, L, H, K]``, where keys at or beyond ``length_B`` are invisible.

    Heads share the ``G`` key/value heads in consecutive groups. Outputs at positions beyond the
    length are finite and meaningless. The devices in use decide how it is computed: on a CPU in the
    order of work that suits it, on a TPU by the splash kernel, on a GPU in half precision by
    cuDNN's, and otherwise by the plain formula. None but the first and the last holds all scores,
    and the last only as many as fit.

    Args:
      q_BLHK: queries.
      k_BLGK: keys.
      v_BLGK: values.
      length_B: int32 live positions.
      may_see: which keys a query may see by their places; None: all.
    """
    platform, given = devices.platform(), (q_BLHK, k_BLGK, v_BLGK, length_B)
    if platform == "tpu" and q_BLHK.shape[1] >= _LEAST_FOR_SPLASH:
        # Where there is no TPU, importing Pallas would cost every program a third of a second.
        from dlm_jax.model.splash import splash_attention

        # It saves what it returns itself: a name out here would keep the same twice.
        return splash_attention(*given, may_see=may_see, saved=SAVED)
    return checkpoint_name(_form(platform, q_BLHK)(*given, may_see=may_see), SAVED)


def _form(platform: str, q_BLHK: jax.Array) -> Callable[..., jax.Array]:
    if platform == "cpu":
        return cpu.attention
    is_half = q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and is_half and q_BLHK.shape[-1] % 8 == 0:
        return cudnn_attention
    return plain_attention


def cudnn_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """`attend` by the fused kernel of cuDNN: half precision, head sizes that are multiples of 8."""
    # A row of length 0 would be fully masked; one visible key keeps it finite.
    visible_B = jnp.maximum(length_B, 1)
    num_positions = q_BLHK.shape[1]
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        mask=None if may_see in (None, causal) else _seen(may_see, num_positions)[None, None],
        query_seq_lengths=jnp.full_like(visible_B, num_positions),
        key_value_seq_lengths=visible_B,
        is_causal=may_see is causal,
        implementation="cudnn",
    )


def plain_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """`attend` by its formula, for some queries at a time where all scores would not fit.

    Those of one such slice are computed again in the backward pass.
    """
    visible_B = jnp.maximum(length_B, 1)
    num_rows, num_positions, num_heads, _ = q_BLHK.shape
    place_L = jnp.arange(num_positions)
    is_live_B11L = (place_L < visible_B[:, None])[:, None, None]

    def of_queries(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BNHK, query_N = piece
        mask = is_live_B11L
        if may_see is not None:
            mask = mask & may_see(query_N[:, None], place_L[None])[None, None]
        return jax.nn.dot_product_attention(q_BNHK, k_BLGK, v_BLGK, mask=mask)

    mesh = devices.mesh_in_use()
    scores = num_rows * num_heads * num_positions**2 // (1 if mesh is None else mesh.size)
    slices = math.gcd(num_positions, 2 ** max(0, (scores // _MAX_SCORES).bit_length()))
    if slices == 1:
        return of_queries((q_BLHK, place_L))
    q_SBNHK = jnp.moveaxis(q_BLHK.reshape(num_rows, slices, -1, *q_BLHK.shape[2:]), 1, 0)
    y_SBNHK = jax.lax.map(jax.checkpoint(of_queries), (q_SBNHK, place_L.reshape(slices, -1)))
    return jnp.moveaxis(y_SBNHK, 0, 1).reshape(q_BLHK.shape)


def _seen(may_see: MaySee, num_positions: int) -> jax.Array:
    place_L = jnp.arange(num_positions)
    return may_see(place_L[:, None], place_L[None])
