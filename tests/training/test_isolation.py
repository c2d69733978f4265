"""Trunk isolation: with heads beside it the model trains as without, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage_cases as cases
import toy

from dlm_jax.config import HeadsConfig, OptimConfig
from dlm_jax.distributed.partitions import axes_of, shardings
from dlm_jax.heads import CRITIC, MAIN, SAMPLER
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import TrainState, make_train_step
from dlm_jax.types import Network

STEPS, MIDWAY = 100, 40
SLOW = pytest.mark.slow


def _assert_same_bits(ours: Any, theirs: Any) -> None:
    one, other = cases.by_path(ours), cases.by_path(theirs)
    assert one.keys() == other.keys() and one
    assert [path for path in one if one[path].tobytes() != other[path].tobytes()] == []


def _task(
    network: Network,
    optim: OptimConfig,
    names: tuple[str, ...] = (),
    heads: HeadsConfig | None = None,
) -> Task:
    """The task of a run whose model has these heads."""
    added = {f"add_{name}": True for name in names}
    return cases.task(
        network,
        model=toy.config(**added),
        optim=dataclasses.replace(optim, ema_decay=0.9),
        heads=heads or HeadsConfig(),
        train={"steps": STEPS},
    )


def _begun(params: Any, task: Task) -> TrainState:
    state = TrainState(params, task.optimizer().init(params), jnp.int32(0), params)
    return jax.device_get(state)


def _trained(state: TrainState, step: Any, num_steps: int) -> tuple[TrainState, list[Any]]:
    state, seen = jax.tree.map(np.copy, state), []
    # Where the step returns it, or the second step would be compiled anew.
    axes = axes_of(cases.model(**cases.WITH_HEADS))
    state = jax.device_put(state, shardings(state, axes, cases.mesh()))
    for number in range(int(state.step), int(state.step) + num_steps):
        state, metrics = step(state, cases.batch(number), jax.random.key(5))
        seen.append(metrics)
    return jax.device_get((state, seen))


@pytest.mark.parametrize(
    ("name", "changes", "starts"),
    [
        ("adamw", {"tied_head": True}, (0, MIDWAY)),
        pytest.param("muon", {"tied_head": False, "depth": 2}, (0, MIDWAY), marks=SLOW),
        pytest.param(
            "muon",
            {
                "width": 64, "depth": 3, "activation": "swiglu",
                "qkv_bias": True, "sampler_context": 2, "sampler_residual": True,
            },
            (0, MIDWAY),
            marks=SLOW,
        ),
    ],
)  # fmt: skip
def test_with_the_sampler_head_the_model_trains_bit_for_bit_as_without(name, changes, starts):
    optim = OptimConfig(name=name, warmup_steps=1, clip=0.05, weight_decay=0.1)
    heads = HeadsConfig(
        start_sampler_iteration=MIDWAY,
        start_critic_iteration=STEPS,
        warmup_steps=2,
        weight_decay=0.1,
        sampler_reveal=0.5,
    )
    whole = cases.model(**cases.WITH_HEADS, **changes)
    task = _task(cases.model(**changes), optim)
    begun = _begun(cases.main_of(cases.params(**changes)), task)
    expected, seen = _trained(begun, make_train_step(task, (MAIN,), begun), STEPS)
    assert min(metrics["grad_norm"] for metrics in seen) > 2 * optim.clip, "always clipped"
    task = _task(whole, optim, (SAMPLER, CRITIC), heads)
    fresh = _begun(cases.params(**changes), task)
    alone = make_train_step(task, (MAIN,), fresh)
    beside = make_train_step(task, (MAIN, SAMPLER), fresh)
    for start in starts:
        state, _ = _trained(fresh, alone, start)
        for head in (SAMPLER, CRITIC):
            # What does not train yet does not move, and neither does its average.
            _assert_same_bits(state.params[head], fresh.params[head])
            _assert_same_bits(state.ema[head], fresh.params[head])
            _assert_same_bits(_state_of(head, state), _state_of(head, fresh))
        state, seen = _trained(state, beside, STEPS - start)
        _assert_same_bits(cases.main_of(state.params), expected.params)
        _assert_same_bits(cases.main_of(state.ema), expected.ema)
        assert seen[-1]["sampler"] < seen[0]["sampler"]
        _assert_same_bits(state.params[CRITIC], fresh.params[CRITIC])
        _assert_same_bits(_state_of(CRITIC, state), _state_of(CRITIC, fresh))


def _state_of(group: str, state: TrainState) -> Any:
    return state.opt_state.inner_states[group]


def test_without_the_model_the_heads_train_alone_and_the_model_stays():
    heads = HeadsConfig(train_main=False, weight_decay=0.1)
    optim = OptimConfig(warmup_steps=1, weight_decay=0.1)
    task = _task(cases.model(add_sampler_head=True), optim, (SAMPLER,), heads)
    fresh = _begun({k: v for k, v in cases.params().items() if k != CRITIC}, task)
    state, seen = _trained(fresh, make_train_step(task, (SAMPLER,), fresh), 30)
    _assert_same_bits(cases.main_of(state.params), cases.main_of(fresh.params))
    _assert_same_bits(cases.main_of(state.ema), cases.main_of(fresh.params))
    # What does not train has no state of the optimiser.
    assert not cases.by_path(_state_of(MAIN, state))
    assert seen[-1]["sampler"] < seen[0]["sampler"]
