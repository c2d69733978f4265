"""Self-distillation through time (Deschenaux & Gulcehre 2024): one step replaces several teacher
steps.

A fraction t of each row is hidden, with t uniform on (0, 1]. From this canvas ``z_t``, the teacher
takes m ancestral steps of length ``1 / (m N)``. The student learns to match the result in one step
of length ``1 / N``::

    loss = E_t,z  mean_{i hidden in z_t}  KL( p_teacher(x_i | z at the step that wrote i)
                                              || p_student(x_i | z_t) ),

where, at positions that are still hidden, ``p_teacher`` is the teacher's prediction at its last
step (algorithm 1 with the Kullback-Leibler divergence). A step from t to s fills each hole with
probability ``(t - s) / t``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.corruption import mask_independently, stratified_times
from dlm_jax.diffusion.losses import Loss, divergence
from dlm_jax.diffusion.objectives import Batch, NetworkObjective
from dlm_jax.diffusion.teacher import draws, walk
from dlm_jax.types import Network, Params


def sdtt(
    *, steps: int, teacher_steps: int, mask_id: int, banned_ids: tuple[int, ...]
) -> NetworkObjective:
    """The objective for a student that samples in `steps` steps.

    Args:
      steps: N, number of steps of the student.
      teacher_steps: m, number of teacher steps per student step.
      mask_id: the id of MASK.
      banned_ids: ids that are never written.
    """

    def draw(batch: Batch, key: jax.Array) -> dict[str, Any]:
        time_key, mask_key, walk_key = jax.random.split(key, 3)
        num_rows = batch.tokens_BL.shape[0]
        time_B = stratified_times(time_key, num_rows, smallest=1e-3)
        is_hidden_BL = mask_independently(mask_key, time_B, batch.is_free_BL())
        return {
            "shown": jnp.where(is_hidden_BL, mask_id, batch.tokens_BL),
            "length": batch.length_B,
            "chance": chances(time_B, steps, teacher_steps),
            "draws": draws(walk_key, batch.tokens_BL, steps=teacher_steps),
            "is_hidden": is_hidden_BL,
            "total": jnp.sum(is_hidden_BL).astype(jnp.float32),
        }

    def anchor(network: Network, params: Params, teacher: Params, noise: Any) -> Any:
        _, hidden_BLD = walk(
            network, teacher, noise["shown"], noise["length"], noise["chance"], noise["draws"],
            mask_id=mask_id, banned_ids=banned_ids,
        )  # fmt: skip
        return noise | {"hidden": hidden_BLD}

    def loss(network: Network, params: Params, noise: Any, teacher: Params) -> Loss:
        hidden_BLD, _ = network.trunk(params, noise["shown"], noise["length"], None)
        nats_BL = divergence(
            (network.readout, network.readout), (teacher, params),
            ((noise["hidden"],), (hidden_BLD,)), noise["is_hidden"],
            vocab_size=network.vocab_size, mask_id=mask_id,
        )  # fmt: skip
        return Loss(jnp.sum(jnp.where(noise["is_hidden"], nats_BL, 0.0)), noise["total"])

    return NetworkObjective(draw, loss, anchor, needs_teacher=True)


def chances(time_B: jax.Array, steps: int, teacher_steps: int) -> jax.Array:
    """The probability that a teacher step fills a hole, float32 ``[B, m]`` in [0, 1]."""
    length = 1.0 / (steps * teacher_steps)
    now_BK = time_B[:, None] - length * jnp.arange(teacher_steps)[None]
    return jnp.where(now_BK > length, length / jnp.maximum(now_BK, length), 1.0)
