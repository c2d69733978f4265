"""Ancestral sampling from a frozen teacher."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import at_positions
from dlm_jax.types import Network, Params


def draws(key: jax.Array, shown_BL: jax.Array, *, steps: int) -> jax.Array:
    """Uniform draws for `walk`, float32 ``[B, steps, L, 2]``."""
    num_rows, num_positions = shown_BL.shape
    return jax.random.uniform(key, (num_rows, steps, num_positions, 2))


def walk(
    network: Network,
    params: Params,
    shown_BL: jax.Array,
    length_B: jax.Array,
    chance_BK: jax.Array,
    draws_BKL2: jax.Array,
    *,
    mask_id: int,
    banned_ids: tuple[int, ...],
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Takes K ancestral steps of a teacher, with one forward pass per step and no gradients.

    Step k fills each hole with probability ``chance_BK[:, k]``. The tokens of a step are drawn
    independently.

    Args:
      network: the model.
      params: parameters of the teacher.
      shown_BL: int32 canvas with MASK at its holes.
      length_B: int32, number of live tokens in each row.
      chance_BK: float32 probabilities in [0, 1].
      draws_BKL2: result of `draws`.
      mask_id: the id of MASK.
      banned_ids: ids that are never written.
      temperature: temperature of the draws; 0 is greedy.

    Returns:
      The int32 canvas ``[B, L]`` after the steps, and the output of the trunk ``[B, L, D]`` at the
      step that filled each hole, or at the last step for unfilled holes; 0 at positions that were
      not holes.
    """
    params = jax.lax.stop_gradient(params)
    banned = jnp.array((*banned_ids, mask_id), jnp.int32)

    def drawn(params: Params, *arrays: jax.Array) -> jax.Array:
        hidden, uniform = arrays
        logits_NV = network.readout(params, hidden.reshape(-1, hidden.shape[-1]))
        logits_NV = logits_NV.astype(jnp.float32).at[:, banned].set(-jnp.inf)
        if temperature == 0:
            ids_N = jnp.argmax(logits_NV, axis=1)
        else:
            below_NV = jnp.cumsum(jax.nn.softmax(logits_NV / temperature), axis=1)
            # The uniform number is below 1, so the cumulative sum of at least one id exceeds the
            # threshold, and the first such id has a positive probability.
            threshold_N1 = uniform.reshape(-1, 1) * below_NV[:, -1:]
            ids_N = jnp.argmax(below_NV > threshold_N1, axis=1)
        return ids_N.reshape(uniform.shape).astype(jnp.float32)

    def step(
        before: tuple[jax.Array, jax.Array], given: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        (tokens_BL, last_BLD), (chance_B, draws_BL2) = before, given
        is_hole_BL = tokens_BL == mask_id
        hidden_BLD, _ = network.trunk(params, tokens_BL, length_B, None)
        ids_BL = at_positions(
            drawn, params, (hidden_BLD, draws_BL2[..., 1]),
            vocab_size=network.vocab_size, is_read_BL=is_hole_BL,
        )  # fmt: skip
        is_written_BL = is_hole_BL & (draws_BL2[..., 0] < chance_B[:, None])
        tokens_BL = jnp.where(is_written_BL, ids_BL.astype(jnp.int32), tokens_BL)
        return (tokens_BL, jnp.where(is_hole_BL[..., None], hidden_BLD, last_BLD)), None

    shapes = jax.eval_shape(network.trunk, params, shown_BL, length_B, None)[0]
    begun = shown_BL, jnp.zeros(shapes.shape, shapes.dtype)
    by_step = jnp.moveaxis(chance_BK, 1, 0), jnp.moveaxis(draws_BKL2, 1, 0)
    return jax.lax.stop_gradient(jax.lax.scan(step, begun, by_step)[0])
