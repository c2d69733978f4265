"""The noise of a training step depends on the key and the step alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases

from dlm_jax.config import HeadsConfig, MeshConfig
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.heads import critic
from dlm_jax.objectives.losses import Loss
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import TrainState, make_train_step

MESHES = {"1x1": {}, "2x1": {"data": 2}, "fsdp": {"fsdp": 2}, "1x2": {"tensor": 2}}
SLOW = pytest.mark.slow


def _trace_of(noise_B, tokens_BL):
    """An integer of all bits of the rows' noise, each bit with its row; exact as float32, in any
    order of summation.
    """
    noise_BN = noise_B.astype(jnp.uint32).reshape(len(tokens_BL), -1)
    place_BL = jnp.arange(1, tokens_BL.shape[1] + 1, dtype=jnp.uint32)[None]
    row_B1 = jnp.sum(tokens_BL.astype(jnp.uint32) * place_BL**3, axis=1, keepdims=True)
    place_BN = jnp.arange(noise_BN.shape[1], dtype=jnp.uint32)[None]
    mixed_BN = (noise_BN + 1) * jnp.uint32(2654435761) + row_B1 * 40503 + place_BN * 69069
    mixed_BN = (mixed_BN ^ (mixed_BN >> 15)) * jnp.uint32(2246822519)
    return jnp.sum((mixed_BN >> 17).astype(jnp.float32))


@functools.cache
def _traces(mesh: str, parts: int) -> dict[str, float]:
    """What a training step draws for all objectives and heads, as metrics."""
    real, targets_of, canvases = Task.losses, critic.critic_targets, []
    place = make_mesh(MeshConfig(**MESHES[mesh]), jax.devices()[: 1 if mesh == "1x1" else 2])
    optimizer, params = optax.sgd(0.1), jax.tree.map(np.copy, cases.params())
    state = TrainState(params, optimizer.init(params), np.int32(5))
    state = jax.device_put(state, shardings(state, axes_of(cases.model(**cases.WITH_HEADS)), place))
    task = cases.with_heads(
        place=place,
        objectives=cases.mixture(0.25),
        heads=HeadsConfig(sampler_reveal=0.5),
        train={"accumulate": parts},
    )

    def losses(task, trained, frozen, drawn, step, stage):
        total, means = real(task, trained, frozen, drawn, step, stage)
        drawn_B = {"shown": drawn.shown_BL, "supervised": drawn.is_supervised_BL()}
        drawn_B |= {"sampler_head": drawn.noise["sampler_head"][0]}
        drawn_B |= {"critic_head": drawn.noise["critic_head"][0]}
        tokens_BL = drawn.batch.tokens_BL
        return total, means | {f"in {name}": _trace_of(x, tokens_BL) for name, x in drawn_B.items()}

    def critic_targets(*args, **settings):
        canvases.append(targets_of(*args, **settings))
        return canvases[-1]

    head = task.heads["critic_head"]

    def critic_loss(network, params, drawn):
        total, weight = head.loss(network, params, drawn)[:2]
        filled_BL, _ = canvases.pop()
        return Loss(total, weight, {"filled": (_trace_of(filled_BL, filled_BL), jnp.ones(()))})

    watched = {"critic_head": dataclasses.replace(head, loss=critic_loss)}
    task = dataclasses.replace(task, heads={**task.heads, **watched})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "losses", losses)
        patch.setattr(Task, "optimizer", lambda task, stage: optimizer)
        patch.setattr(critic, "critic_targets", critic_targets)
        step = make_train_step(task, task.last_stage, state)
        _, metrics = jax.device_get(step(state, cases.batch(0), jax.random.key(5)))
    return {name: x for name, x in metrics.items() if name.startswith(("in ", "filled"))}


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [("1x2", 1), ("2x1", 2), pytest.param("1x1", 2, marks=SLOW), pytest.param("2x1", 1, marks=SLOW),
     pytest.param("fsdp", 2, marks=SLOW), pytest.param("1x2", 2, marks=SLOW)],
)  # fmt: skip
def test_noise_does_not_depend_on_devices_nor_on_the_parts_of_a_batch(mesh, parts):
    """Corruption, what the sampler head is shown, and the seeds and the fill of the critic."""
    expected = _traces("1x1", 1)
    assert len(expected) == 5 and all(0 < x < 2**24 for x in expected.values())
    assert _traces(mesh, parts) == expected
