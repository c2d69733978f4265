"""Objectives that learn from a frozen teacher, which fills a partly hidden text in several steps.

A fraction t of each row is hidden, with t uniform on (0, 1]. The teacher fills this canvas ``z_t``
by ancestral steps, and the student learns from the result while it reads only ``z_t``.

Self-distillation through time (`sdtt`, Deschenaux & Gulcehre 2024) replaces several teacher steps
with one. The teacher takes m steps of length ``1 / (m N)``. The student learns to match the result
in one step of length ``1 / N``::

    loss = E_t,z  mean_{i hidden in z_t}  KL( p_teacher(x_i | z at the step that wrote i)
                                              || p_student(x_i | z_t) ),

where, at positions that are still hidden, ``p_teacher`` is the teacher's prediction at its last
step (algorithm 1 with the Kullback-Leibler divergence). A step from t to s fills each hole with
probability ``(t - s) / t``.

Certainty-forcing distillation (`certainty`, dParallel, Chen et al. 2025) lets the teacher fill the
canvas in K steps in random order. The student learns to predict the teacher's final tokens in one
step, with low entropy where its prediction is correct::

    loss = E  mean_{i hidden}  -ln p(y_i | z_t) + w [argmax_v p(v | z_t) = y_i] H(p_T(. | z_t)),

where y denotes the teacher's tokens, and H is the entropy of the student in nats at a temperature
T. Chen et al. use w = 2, T = 0.5 and a greedy teacher, hide whole blocks after the current block,
and divide the entropy by the number of correct tokens. This implementation divides both terms by
the number of hidden tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dlm_jax.config
from dlm_jax import Network, load
from dlm_jax.contrib import loops
from dlm_jax.objectives.corruption import mask_independently, stratified_times
from dlm_jax.objectives.losses import Loss, at_positions, read_out
from dlm_jax.sampling.rule_tools import key_of
from dlm_jax.settings import require
from dlm_jax.training import Batch, problem

Params = dict[str, Any]


class Distillation(NamedTuple):
    """An objective (`dlm_jax.training.Objective`) that learns from a teacher.

    Attributes:
      draw: ``(batch, key) -> drawn``, a dict of all random values.
      teach: ``(network, teacher, drawn) -> drawn``, which adds the teacher and what it writes.
      loss: ``(network, params, drawn) -> Loss``.
    """

    draw: Callable[[Batch, jax.Array], dict[str, Any]]
    teach: Callable[[Network, Params, dict[str, Any]], dict[str, Any]]
    loss: Callable[[Network, Params, dict[str, Any]], Loss]


def sdtt(
    *, steps: int, teacher_steps: int, mask_id: int, banned_ids: tuple[int, ...]
) -> Distillation:
    """The objective for a student that samples in `steps` steps.

    Args:
      steps: N, number of steps of the student.
      teacher_steps: m, number of teacher steps per student step.
      mask_id: the id of MASK.
      banned_ids: ids that are never written.
    """

    def draw(batch: Batch, key: jax.Array) -> dict[str, Any]:
        time_B, noise = _hidden(batch, key, teacher_steps=teacher_steps, mask_id=mask_id)
        return noise | {"chance": chances(time_B, steps, teacher_steps)}

    def teach(network: Network, teacher: Params, noise: Any) -> Any:
        _, hidden_BLD = walk(
            network,
            teacher,
            noise["shown"],
            noise["length"],
            noise["chance"],
            noise["draws"],
            mask_id=mask_id,
            banned_ids=banned_ids,
        )
        return noise | {"teacher": teacher, "hidden": hidden_BLD}

    def loss(network: Network, params: Params, noise: Any) -> Loss:
        hidden_BLD, _ = network.trunk(params, noise["shown"], noise["length"], None)

        def divergence(params: tuple[Params, Params], *arrays: jax.Array) -> jax.Array:
            """Kullback-Leibler divergence of the student from the teacher in nats."""
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
            (noise["teacher"], params),
            (noise["hidden"], hidden_BLD, noise["is_hidden"].astype(jnp.int32)),
            vocab_size=2 * network.vocab_size,
            is_read_BL=noise["is_hidden"],
        )
        return Loss(jnp.sum(jnp.where(noise["is_hidden"], nats_BL, 0.0)), noise["total"])

    return Distillation(draw, teach, loss)


def certainty(
    *,
    teacher_steps: int,
    teacher_temperature: float,
    weight: float,
    temperature: float,
    mask_id: int,
    banned_ids: tuple[int, ...],
) -> Distillation:
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
        return _hidden(batch, key, teacher_steps=teacher_steps, mask_id=mask_id)[1]

    def teach(network: Network, teacher: Params, noise: Any) -> Any:
        shown_BL = noise["shown"]
        left_K = teacher_steps - jnp.arange(teacher_steps)
        chance_BK = jnp.broadcast_to(1.0 / left_K, (shown_BL.shape[0], teacher_steps))
        tokens_BL, _ = walk(
            network,
            teacher,
            shown_BL,
            noise["length"],
            chance_BK,
            noise["draws"],
            mask_id=mask_id,
            banned_ids=banned_ids,
            temperature=teacher_temperature,
        )
        return noise | {"targets": tokens_BL}

    def cost(logits_NV: jax.Array, targets: jax.Array) -> jax.Array:
        """The sum of the two terms at each position, ``[N]``."""
        targets_N, logits_NV = targets.reshape(-1), logits_NV.astype(jnp.float32)
        log_NV = jax.nn.log_softmax(logits_NV)
        nll_N = -jnp.take_along_axis(log_NV, targets_N[:, None], axis=1)[:, 0]
        cold_NV = jax.nn.log_softmax(logits_NV / temperature)
        # The probability of MASK is 0, and 0 times its infinite logarithm is NaN.
        finite_NV = jnp.where(jnp.isneginf(cold_NV), 0.0, cold_NV)
        entropy_N = -jnp.sum(jnp.exp(cold_NV) * finite_NV, axis=1)
        is_right_N = jnp.argmax(log_NV, axis=1) == targets_N
        return nll_N + weight * is_right_N * entropy_N

    def loss(network: Network, params: Params, noise: Any) -> Loss:
        hidden_BLD, _ = network.trunk(params, noise["shown"], noise["length"], None)
        nats_BL = read_out(
            cost,
            network.readout,
            params,
            (hidden_BLD,),
            (noise["targets"],),
            vocab_size=network.vocab_size,
            mask_id=mask_id,
            is_read_BL=noise["is_hidden"],
        )
        return Loss(jnp.sum(jnp.where(noise["is_hidden"], nats_BL, 0.0)), noise["total"])

    return Distillation(draw, teach, loss)


def _hidden(
    batch: Batch, key: jax.Array, *, teacher_steps: int, mask_id: int
) -> tuple[jax.Array, dict[str, Any]]:
    """The time of each row, and its noise: the canvas, and the draws of the teacher's steps."""
    time_key, mask_key, walk_key = jax.random.split(key, 3)
    time_B = stratified_times(time_key, batch.length_B.size, smallest=1e-3)
    is_hidden_BL = mask_independently(mask_key, time_B, batch.is_free_BL())
    return time_B, {
        "shown": jnp.where(is_hidden_BL, mask_id, batch.tokens_BL),
        "length": batch.length_B,
        "draws": draws(walk_key, batch.tokens_BL, steps=teacher_steps),
        "is_hidden": is_hidden_BL,
        "total": jnp.sum(is_hidden_BL).astype(jnp.float32),
    }


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
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Takes K ancestral steps of a teacher, with one forward pass per step and no gradients.

    Step k fills each hole with probability ``chance_BK[:, k]``. The tokens of a step are drawn
    independently, never from `banned_ids`; a temperature of 0 is greedy. `draws_BKL2` is the result
    of `draws`.

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
      objective: ``sdtt`` or ``certainty``.
      teacher: run, weights file or shipped model; empty: the initial parameters.
      steps: sdtt: number of sampling steps of the student.
      teacher_steps: number of teacher steps per student step (sdtt) or per row (certainty).
      teacher_temperature: certainty: temperature at which the teacher samples; 0 is greedy.
      weight: certainty: weight of the entropy.
      temperature: certainty: temperature of the entropy.
    """

    objective: str = "sdtt"
    teacher: str = ""
    steps: int = 16
    teacher_steps: int = 2
    teacher_temperature: float = 0.0
    weight: float = 2.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            low = {"steps": 1, "teacher_steps": 1, "temperature": 0.01}.get(name, 0)
            require(isinstance(value, str) or value >= low, name, value, f"is below {low}")
        kinds = "sdtt", "certainty"
        require(self.objective in kinds, "objective", self.objective, "is unknown", "use sdtt")


def distil(
    config: Any,
    settings: DistillationSettings | None = None,
    *,
    report: Callable[[str], None] = loops.say,
) -> Params:
    """Trains the model of a config on a teacher's texts, and returns its parameters; see `loops`.

    Args:
      config: a config, or the path of a TOML file; ``train.init_from`` is the student.
      settings: settings of the objective.
      report: called with one-line messages.
    """
    settings = settings or DistillationSettings()
    if isinstance(config, str | PathLike):
        config = dlm_jax.config.load(str(config))
    train, kind = config.train, config.model.attention_type
    begins = settings.teacher or train.init_from
    require(bool(begins), "teacher", settings.teacher, "is empty", "name it, or train.init_from")
    require(kind == "bidirectional", "model.attention_type", kind, "has no steps", "use another")
    task = problem(config, report=report)
    setup, network, optimizer = task.setup, task.network, task.optimizer()
    ids = {"mask_id": setup.mask_id, "banned_ids": setup.banned_ids}
    if settings.objective == "sdtt":
        made = sdtt(steps=settings.steps, teacher_steps=settings.teacher_steps, **ids)
    else:
        made = certainty(
            teacher_steps=settings.teacher_steps,
            teacher_temperature=settings.teacher_temperature,
            weight=settings.weight,
            temperature=settings.temperature,
            **ids,
        )
    init_key, noise_key = jax.random.split(key_of(train.seed))
    params = task.start(init_key, report)
    teacher = jax.tree.map(jnp.copy, params)
    if settings.teacher:
        is_same = load(settings.teacher).tokenizer.to_json() == setup.tokenizer.to_json()
        require(is_same, "teacher", settings.teacher, "has another vocabulary", "use another")
        begins = dataclasses.replace(
            setup.config.train, init_from=settings.teacher, ignore_config=()
        )
        config_of_teacher = dataclasses.replace(setup.config, train=begins)
        setup_of_teacher = dataclasses.replace(setup, config=config_of_teacher)
        task_of_teacher = dataclasses.replace(task.task, setup=setup_of_teacher)
        of_teacher = dataclasses.replace(task, task=task_of_teacher)
        try:
            teacher = of_teacher.start(init_key, report)
        except ValueError as error:
            raise ValueError(f"teacher: {error}") from None

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: loops.LoopState, teacher: Params, batch: Batch, key: jax.Array) -> Any:
        noise = made.teach(network, teacher, made.draw(batch, key))

        def loss(params: Params) -> jax.Array:
            found = made.loss(network, params, noise)
            return found.sum / jnp.maximum(found.weight, 1.0)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.updated(optimizer, grads), {"loss": value}

    batches: list[Iterator[Batch]] = []

    def take_step(state: loops.LoopState, step: int) -> Any:
        if not batches:
            batches.append(task.batches(step))
        return update(state, teacher, next(batches[0]), jax.random.fold_in(noise_key, step))

    state = loops.LoopState(params, optimizer.init(params))
    return loops.run(task, state, take_step, settings=settings, report=report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 2 for input that it refuses."""
    name = "python -m dlm_jax.contrib.distillation"
    parser = argparse.ArgumentParser(prog=name, description="Distils a model to fewer steps.")
    loops.add_settings(parser, DistillationSettings)
    args = parser.parse_args(argv)
    try:
        distil(*loops.settings_of(args, DistillationSettings))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
