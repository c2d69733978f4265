"""Self-distillation through time (SDTT, Deschenaux & Gulcehre 2024).

A frozen teacher fills a partly hidden text in several steps, which the student learns to replace
with one. A fraction t of each row is hidden, with t uniform on (0, 1]. From this canvas ``z_t``,
the teacher takes m ancestral steps of length ``1 / (m N)``, and the student, which reads only
``z_t``, learns to match the result in one step of length ``1 / N``::

    loss = E_t,z  mean_{i hidden in z_t}  KL( p_teacher(x_i | z at the step that wrote i)
                                              || p_student(x_i | z_t) ),

where, at positions that are still hidden, ``p_teacher`` is the teacher's prediction at its last
step (algorithm 1 with the Kullback-Leibler divergence). A step from t to s fills each hole with
probability ``(t - s) / t``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Network
from dlm_jax.contrib import loops
from dlm_jax.objectives.corruption import mask_independently, stratified_times
from dlm_jax.objectives.losses import Loss, at_positions
from dlm_jax.sampling import key_of
from dlm_jax.settings import require
from dlm_jax.training import Batch, problem

Params = dict[str, Any]


def draw(
    batch: Batch, key: jax.Array, *, steps: int, teacher_steps: int, mask_id: int
) -> dict[str, Any]:
    """All random values: the canvas of each row, and the draws of the teacher's steps.

    Args:
      batch: rows of the corpus.
      key: the key of the step.
      steps: N, number of steps of the student.
      teacher_steps: m, number of teacher steps per student step.
      mask_id: the id of MASK.
    """
    time_key, mask_key, walk_key = jax.random.split(key, 3)
    time_B = stratified_times(time_key, batch.length_B.size, smallest=1e-3)
    is_hidden_BL = mask_independently(mask_key, time_B, batch.is_free_BL())
    return {
        "shown": jnp.where(is_hidden_BL, mask_id, batch.tokens_BL),
        "length": batch.length_B,
        "draws": draws(walk_key, batch.tokens_BL, steps=teacher_steps),
        "is_hidden": is_hidden_BL,
        "total": jnp.sum(is_hidden_BL).astype(jnp.float32),
        "chance": chances(time_B, steps, teacher_steps),
    }


def loss(
    network: Network, params: Params, teacher: Params, noise: Any, taught_BLD: Any, *, mask_id: int
) -> Loss:
    """The divergence of the student from the teacher in nats, summed over hidden positions.

    Args:
      network: the network of both.
      params: the student.
      teacher: the teacher.
      noise: from `draw`.
      taught_BLD: the output of the teacher's trunk, from `walk`.
      mask_id: the id of MASK.
    """
    hidden_BLD, _ = network.trunk(params, noise["shown"], noise["length"], None)

    def divergence(params: tuple[Params, Params], *arrays: jax.Array) -> jax.Array:
        logs = [
            jax.nn.log_softmax(
                network.readout(one, hidden.reshape(-1, hidden.shape[-1]))
                .astype(jnp.float32)
                .at[:, mask_id]
                .set(-jnp.inf)
            )
            for one, hidden in zip(params, arrays, strict=False)
        ]
        teacher_NV = jax.lax.stop_gradient(logs[0])
        # The probability of MASK is 0, and 0 times its infinite logarithm is NaN.
        gap_NV = jnp.where(jnp.isneginf(teacher_NV), 0.0, teacher_NV - logs[1])
        return jnp.sum(jnp.exp(teacher_NV) * gap_NV, axis=1).reshape(arrays[-1].shape)

    nats_BL = at_positions(
        divergence,
        (teacher, params),
        (taught_BLD, hidden_BLD, noise["is_hidden"].astype(jnp.int32)),
        vocab_size=2 * network.vocab_size,
        is_read_BL=noise["is_hidden"],
    )
    return Loss(jnp.sum(jnp.where(noise["is_hidden"], nats_BL, 0.0)), noise["total"])


def chances(time_B: jax.Array, steps: int, teacher_steps: int) -> jax.Array:
    """The probability that a teacher step fills a hole, float32 ``[B, m]`` in [0, 1]."""
    length = 1.0 / (steps * teacher_steps)
    now_BK = time_B[:, None] - length * jnp.arange(teacher_steps)[None]
    return jnp.where(now_BK > length, length / jnp.maximum(now_BK, length), 1.0)


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
) -> tuple[jax.Array, jax.Array]:
    """Takes K ancestral steps of a teacher, with one forward pass per step and no gradients.

    Step k fills each hole with probability ``chance_BK[:, k]``. The tokens of a step are drawn
    independently, never from `banned_ids`. `draws_BKL2` is the result of `draws`.

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
        below_NV = jnp.cumsum(jax.nn.softmax(logits_NV), axis=1)
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
            drawn,
            params,
            (hidden_BLD, draws_BL2[..., 1]),
            vocab_size=network.vocab_size,
            is_read_BL=is_hole_BL,
        )
        is_written_BL = is_hole_BL & (draws_BL2[..., 0] < chance_B[:, None])
        tokens_BL = jnp.where(is_written_BL, ids_BL.astype(jnp.int32), tokens_BL)
        return (tokens_BL, jnp.where(is_hole_BL[..., None], hidden_BLD, last_BLD)), None

    shapes = jax.eval_shape(network.trunk, params, shown_BL, length_B, None)[0]
    begun = shown_BL, jnp.zeros(shapes.shape, shapes.dtype)
    by_step = jnp.moveaxis(chance_BK, 1, 0), jnp.moveaxis(draws_BKL2, 1, 0)
    return jax.lax.stop_gradient(jax.lax.scan(step, begun, by_step)[0])


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """Settings of distillation.

    Attributes:
      steps: number of sampling steps of the student.
      teacher_steps: number of teacher steps per student step.
    """

    steps: int = 16
    teacher_steps: int = 2

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "is below 1")
        require(self.teacher_steps >= 1, "teacher_steps", self.teacher_steps, "is below 1")


def distil(
    config: Any,
    settings: DistillationSettings | None = None,
    *,
    report: Callable[[str], None] = loops.say,
) -> Params:
    """Trains the model of a config on a teacher's texts, and returns its parameters; see `loops`.

    Args:
      config: a config, or the path of a TOML file; ``train.init_from`` is the teacher, as which the
        student begins.
      settings: the steps.
      report: called with one-line messages.
    """
    settings = settings or DistillationSettings()
    task = problem(config, report=report)
    config, tokenizer, mask_id = task.config, task.tokenizer, task.tokenizer.mask_id
    train, kind = config.train, config.model.attention_type
    require(bool(train.init_from), "train.init_from", "", "is empty", "name the teacher")
    require(kind == "bidirectional", "model.attention_type", kind, "has no steps", "use another")
    network, optimizer = task.network, task.optimizer()
    banned_ids = (*tokenizer.banned_ids, tokenizer.pad_id)
    sizes = {"steps": settings.steps, "teacher_steps": settings.teacher_steps}
    init_key, noise_key = jax.random.split(key_of(train.seed))
    params = task.start(init_key, report)
    teacher = jax.tree.map(jnp.copy, params)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: loops.LoopState, teacher: Params, batch: Batch, key: jax.Array) -> Any:
        noise = draw(batch, key, mask_id=mask_id, **sizes)
        _, taught_BLD = walk(
            network, teacher, noise["shown"], noise["length"], noise["chance"], noise["draws"],
            mask_id=mask_id, banned_ids=banned_ids,
        )  # fmt: skip

        def mean(params: Params) -> jax.Array:
            found = loss(network, params, teacher, noise, taught_BLD, mask_id=mask_id)
            return found.sum / jnp.maximum(found.weight, 1.0)

        value, grads = jax.value_and_grad(mean)(state.params)
        return state.updated(optimizer, grads), {"loss": value}

    def take_step(state: loops.LoopState, batch: Batch, step: int) -> Any:
        return update(state, teacher, batch, jax.random.fold_in(noise_key, step))

    state = loops.LoopState(params, optimizer.init(params))
    return loops.run(task, state, take_step, settings=settings, report=report)


def main(argv: Sequence[str] | None = None) -> int:
    def train(args: argparse.Namespace, config: Any, settings: DistillationSettings) -> None:
        distil(config, settings)

    return loops.program(argv, "distillation", DistillationSettings, train)


if __name__ == "__main__":
    raise SystemExit(main())
