"""Certainty-forcing distillation: dParallel (Chen et al. 2025).

A fraction t of each row is hidden, with t uniform on (0, 1], and the teacher fills the canvas in K
steps in random order. The student reads only the initial canvas. It learns to predict the teacher's
final tokens in one step, with low entropy where its prediction is correct::

    loss = E  mean_{i hidden}  -ln p(y_i | z_t) + w [argmax_v p(v | z_t) = y_i] H(p_T(. | z_t)),

where y denotes the teacher's tokens, and H is the entropy of the student in nats at a temperature
T. Chen et al. use w = 2, T = 0.5 and a greedy teacher, hide whole blocks after the current block,
and divide the entropy by the number of correct tokens. This implementation divides both terms by
the number of hidden tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.corruption import mask_independently, stratified_times
from dlm_jax.diffusion.losses import Loss, at_positions, log_probs
from dlm_jax.diffusion.objectives import Batch, NetworkObjective
from dlm_jax.diffusion.teacher import draws, walk
from dlm_jax.types import Network, Params


def certainty(
    *,
    teacher_steps: int,
    teacher_temperature: float,
    weight: float,
    temperature: float,
    mask_id: int,
    banned_ids: tuple[int, ...],
) -> NetworkObjective:
    """The certainty-forcing objective.

    Args:
      teacher_steps: K, number of forward passes of the teacher.
      teacher_temperature: temperature at which the teacher samples; 0 is greedy.
      weight: w, weight of the entropy.
      temperature: T, temperature of the entropy.
      mask_id: the id of MASK.
      banned_ids: ids that are never written.
    """

    def draw(batch: Batch, key: jax.Array) -> dict[str, Any]:
        time_key, mask_key, walk_key = jax.random.split(key, 3)
        time_B = stratified_times(time_key, batch.length_B.size, smallest=1e-3)
        is_hidden_BL = mask_independently(mask_key, time_B, batch.is_free_BL())
        return {
            "shown": jnp.where(is_hidden_BL, mask_id, batch.tokens_BL),
            "length": batch.length_B,
            "draws": draws(walk_key, batch.tokens_BL, steps=teacher_steps),
            "is_hidden": is_hidden_BL,
            "total": jnp.sum(is_hidden_BL).astype(jnp.float32),
        }

    def anchor(network: Network, params: Params, teacher: Params, noise: Any) -> Any:
        shown_BL = noise["shown"]
        left_K = teacher_steps - jnp.arange(teacher_steps)
        chance_BK = jnp.broadcast_to(1.0 / left_K, (shown_BL.shape[0], teacher_steps))
        tokens_BL, _ = walk(
            network, teacher, shown_BL, noise["length"], chance_BK, noise["draws"],
            mask_id=mask_id, banned_ids=banned_ids, temperature=teacher_temperature,
        )  # fmt: skip
        return noise | {"targets": tokens_BL}

    def loss(network: Network, params: Params, noise: Any, teacher: Params) -> Loss:
        hidden_BLD, _ = network.trunk(params, noise["shown"], noise["length"], None)
        measure = functools.partial(
            _costs, network, weight=weight, temperature=temperature, mask_id=mask_id
        )
        nats_BL = at_positions(
            measure, params, (hidden_BLD, noise["targets"]),
            vocab_size=network.vocab_size, is_read_BL=noise["is_hidden"],
        )  # fmt: skip
        return Loss(jnp.sum(jnp.where(noise["is_hidden"], nats_BL, 0.0)), noise["total"])

    return NetworkObjective(draw, loss, anchor, needs_teacher=True)


def _costs(
    network: Network,
    params: Params,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    weight: float,
    temperature: float,
    mask_id: int,
) -> jax.Array:
    """The sum of the two terms at each position, in the shape of the targets."""
    logits_NV = network.readout(params, hidden.reshape(-1, hidden.shape[-1]))
    targets_N = targets.reshape(-1)
    log_NV = log_probs(logits_NV, mask_id=mask_id)
    nll_N = -jnp.take_along_axis(log_NV, targets_N[:, None], axis=1)[:, 0]
    cold_NV = log_probs(logits_NV / temperature, mask_id=mask_id)
    # The probability of MASK is 0, and 0 times its infinite logarithm is NaN.
    finite_NV = jnp.where(jnp.isneginf(cold_NV), 0.0, cold_NV)
    entropy_N = -jnp.sum(jnp.exp(cold_NV) * finite_NV, axis=1)
    is_right_N = jnp.argmax(log_NV, axis=1) == targets_N
    return (nll_N + weight * is_right_N * entropy_N).reshape(targets.shape)
