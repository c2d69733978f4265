"""The laws of staged training: who trains when, and who is left alone, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases
import tiny_run
import toy

from dlm_jax.config import HeadsConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, shardings
from dlm_jax.heads import CRITIC, MAIN, SAMPLER, critic
from dlm_jax.objectives.objective import Drawn
from dlm_jax.sampling.propose import Parallel, SamplerReadout, Wavefront
from dlm_jax.store import load_meta
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import TrainState, make_train_step
from dlm_jax.types import Network

ALL = (MAIN, SAMPLER, CRITIC)
KEY = functools.partial(jax.random.key, 5)
SLOW = pytest.mark.slow


def test_each_head_has_a_stream_of_noise_of_its_own_at_each_step():
    task = cases.with_heads()
    heads = {
        name: dataclasses.replace(head, draw=lambda drawn, key: jax.random.key_data(key))
        for name, head in task.heads.items()
    }
    draw = dataclasses.replace(task, heads=heads).draw
    noise = [draw(cases.batch(0), KEY(), jnp.int32(step), ALL).noise for step in (0, 1)]
    keys = {tuple(one[name].tolist()) for one in noise for name in heads}
    assert len(keys) == 2 * len(heads) == 4


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ({}, [{SAMPLER, CRITIC}] * 4),
        (
            {"start_sampler_iteration": 1, "start_critic_iteration": 3},
            [set(), {SAMPLER}, {SAMPLER}, {SAMPLER, CRITIC}],
        ),
        (
            {"start_sampler_iteration": 2},
            [{CRITIC}, {CRITIC}, {SAMPLER, CRITIC}, {SAMPLER, CRITIC}],
        ),
        ({"critic_alpha": 0.0, "start_sampler_iteration": 3}, [set(), set(), set(), {SAMPLER}]),
        (
            {"start_critic_iteration": 2, "end_critic_iteration": 4},
            [{SAMPLER}, {SAMPLER}, {SAMPLER}, {SAMPLER, CRITIC}],
        ),
        (
            {"start_critic_iteration": 2, "end_critic_iteration": 2},
            [{SAMPLER}, {SAMPLER}, {SAMPLER, CRITIC}, {SAMPLER, CRITIC}],
        ),
    ],
)
def test_a_head_trains_from_its_start_on_and_the_model_always(heads, expected):
    for main in ({MAIN}, set()):
        task = cases.with_heads(heads=HeadsConfig(**heads, train_main=bool(main)))
        found = [set(task.stage(step)) for step in range(4)]
        assert found == [main | groups for groups in expected]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (2, 6, [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
        (2, 2, [0, 0, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (4, 0, [0, 0, 0, 0, 0.8, 0.8, 0.8, 0.8]),
        (0, 0, [0.8] * 8),
    ],
)
def test_the_critic_counts_ever_more_from_its_start_to_its_end(start, end, expected):
    config = HeadsConfig(start_critic_iteration=start, end_critic_iteration=end, critic_alpha=0.8)
    task = cases.with_heads(heads=config)
    found = [float(task.heads[CRITIC].weight(jnp.int32(step))) for step in range(8)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # It is computed where it counts, and nowhere else: it would change how the rest is rounded.
    assert [CRITIC in task.stage(step) for step in range(8)] == [weight > 0 for weight in expected]


HALFWAY = HeadsConfig(critic_alpha=0.8, end_critic_iteration=10, sampler_reveal=0.5)
"""At step 5 the critic counts for half of its alpha."""


def _task(network: Network | None = None, mesh: str = "one", **train: Any) -> Task:
    return cases.with_heads(
        network,
        place=cases.mesh(mesh),
        objectives=cases.mixture(0.25),
        heads=HALFWAY,
        train=train,
    )


def _watched(**heads: Any) -> tuple[Network, list[jax.Array]]:
    """The model with some heads replaced, and the canvases that its trunk is shown in tracing."""
    network, shown = cases.model(**cases.WITH_HEADS), []

    def trunk(params, tokens_BL, length_B, cache):
        shown.append(tokens_BL)
        return network.trunk(params, tokens_BL, length_B, cache)

    return dataclasses.replace(network, trunk=trunk, heads={**network.heads, **heads}), shown


class _AskedError(Exception):
    pass


def _refuse(*args: Any) -> Any:
    raise _AskedError


@pytest.mark.parametrize(
    ("groups", "asked", "passes"),
    [
        ((MAIN,), set(), 1),
        ((MAIN, SAMPLER), {"sampler"}, 1),
        ((MAIN, CRITIC), {"critic"}, 2),
        (ALL, {"critic", "sampler"}, 2),
    ],
)
def test_what_does_not_train_is_not_computed(groups, asked, passes):
    def trace(*without: str) -> int:
        refused = {"critic": _refuse, "sampler": SamplerReadout(_refuse)}
        network, shown = _watched(**{name: refused[name] for name in without})
        _trace(_task(network), groups)
        return len(shown)

    assert trace(*{"critic", "sampler"} - asked) == passes
    for name in asked:
        with pytest.raises(_AskedError):
            trace(name)


def _trace(task: Task, groups: tuple[str, ...]) -> None:
    def losses(params, batch, key, step):
        drawn = task.draw(batch, key, step, groups)
        return task.losses(params, {}, drawn, step, groups)

    jax.eval_shape(losses, cases.params(), cases.batch(0), KEY(), jnp.int32(5))


@pytest.mark.parametrize("groups", [(CRITIC,), (SAMPLER, CRITIC)])
def test_the_critic_learns_from_waves_once_the_sampler_head_trains(groups, monkeypatch):
    used = _spy(monkeypatch)
    _trace(_task(), groups)
    assert [type(rule) for rule in used] == [Wavefront if SAMPLER in groups else Parallel]


def test_the_waves_that_the_critic_learns_from_are_those_that_sampling_recommends(monkeypatch):
    plain = SamplingParams(fill="wavefront", sampler_min_neighbors_ratio=0.25)
    alternating = dataclasses.replace(plain, sampler_even_odd=True)
    used = _spy(monkeypatch)
    for given, alternates in ((plain, False), (alternating, True), (SamplingParams(), True)):
        shown_BL = jnp.zeros((2, 8), jnp.int32)
        rows = jnp.zeros((2, 8, 16)), shown_BL, jnp.full(2, 8), shown_BL == 0, jnp.arange(2)
        fill = functools.partial(
            critic.fill_holes, toy.network_with_heads(), sample=given, mask_id=toy.MASK,
            banned_ids=toy.BANNED, in_waves=True,
        )  # fmt: skip
        jax.eval_shape(fill, toy.params_with_heads(), *rows)
        assert used[-1].is_alternating_B == alternates
        assert used[-1].ratio_B == given.sampler_min_neighbors_ratio


def _spy(monkeypatch) -> list[Any]:
    """The fills that the critic calls."""
    used, fill = [], critic.wavefront_fill

    def spied(*args, rule, **settings):
        used.append(rule)
        return fill(*args, rule=rule, **settings)

    monkeypatch.setattr(critic, "wavefront_fill", spied)
    return used


class Outcome(NamedTuple):
    """What a batch comes to at step 5 of `HALFWAY`, without any training step around it."""

    gradient: Any
    means: Any
    canvases: list[jax.Array]
    example: Drawn


@functools.cache
def _compiled_look():
    @jax.jit
    def look(params, weights):
        network, shown = _watched()
        task, step = _task(network), jnp.int32(5)
        part = task.draw(jax.tree.map(jnp.asarray, cases.batch(0)), KEY(), step, ALL)

        def total(params):
            _, means = task.losses(params, {}, part, step, ALL)
            return sum(weights[name] * mean for name, mean in means.items()), means

        gradient, means = jax.grad(total, has_aux=True)(params)
        return Outcome(gradient, means, shown, part)

    return look


NOTHING = dict.fromkeys(("elbo", "denoising", "sampler", "critic"), 0.0)


def _look(**weights: float) -> Outcome:
    """The gradient is that of the weighted sum of these losses."""
    return jax.device_get(_compiled_look()(cases.params(), NOTHING | weights))


def test_a_head_learns_from_its_own_loss_alone_and_the_trunk_from_heads_that_train_it():
    keys = {SAMPLER: "sampler", CRITIC: "critic"}
    records = {keys[name]: head for name, head in cases.records(HALFWAY).items()}
    assert records["critic"].trains_trunk and not records["sampler"].trains_trunk
    for name in NOTHING:
        teaches = name not in records or records[name].trains_trunk
        for path, gradient in cases.by_path(_look(**{name: 1.0}).gradient).items():
            owner = keys.get(path.split("/")[0])
            if owner is not None:
                assert np.any(gradient) == (owner == name), (name, path)
            elif not teaches:
                assert not np.any(gradient), (name, path)


def test_the_critic_sees_the_text_with_its_supervised_holes_filled():
    look = _look()
    shown_BL, filled_BL = look.canvases
    np.testing.assert_array_equal(shown_BL, look.example.shown_BL)
    is_hole_BL = shown_BL == toy.MASK
    assert is_hole_BL.sum() > 10 and (~is_hole_BL).sum() > 10
    np.testing.assert_array_equal(filled_BL[~is_hole_BL], shown_BL[~is_hole_BL])
    assert not np.isin(filled_BL[is_hole_BL], toy.BANNED).any()
    is_wrong_BL = filled_BL != look.example.batch.tokens_BL
    assert 0 < is_wrong_BL[is_hole_BL].mean() < 1, "drawn, not given"


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        pytest.param("cube", 2, marks=pytest.mark.nightly),
        pytest.param("one", 4, marks=SLOW),
    ],
)
def test_a_step_of_all_heads_follows_the_gradient_of_the_whole_on_any_mesh_in_any_parts(
    mesh, parts
):
    optimizer = optax.sgd(0.1)
    params, place = jax.tree.map(np.copy, cases.params()), cases.mesh(mesh)
    state = TrainState(params, optimizer.init(params), np.int32(5))
    state = jax.device_put(state, shardings(state, axes_of(cases.model(**cases.WITH_HEADS)), place))
    task = _task(mesh=mesh, accumulate=parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "optimizer", lambda task, stage: optimizer)
        step = make_train_step(task, ALL, state)
    state, metrics = jax.device_get(step(state, cases.batch(0), KEY()))
    heads = cases.records(HALFWAY)
    weights = {
        "sampler": heads[SAMPLER].weight,
        "critic": float(heads[CRITIC].weight(jnp.int32(5))),
    }
    assert weights == {"sampler": 1.0, "critic": pytest.approx(0.4)}
    shares = {"elbo": 0.75, "denoising": 0.25} | weights
    look = _look(**shares)
    expected = look.means | {
        "loss": sum(shares[name] * mean for name, mean in look.means.items()),
        "grad_norm": optax.tree.norm(look.gradient),
        "param_norm": optax.tree.norm(state.params),
    }
    expected["critic_alpha"] = weights["critic"]
    expected |= {f"grad_norm_{name}": optax.tree.norm(g) for name, g in look.gradient.items()}
    assert metrics.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=3e-5, err_msg=name)
    gradient, begun = cases.by_path(look.gradient), cases.by_path(cases.params())
    for path, leaf in cases.by_path(state.params).items():
        there = begun[path] - 0.1 * gradient[path]
        np.testing.assert_allclose(leaf, there, atol=1e-5, rtol=1e-5, err_msg=path)
        assert np.abs(leaf - begun[path]).max() > 1e-5, path


def test_a_run_compiles_the_step_of_a_stage_exactly_where_it_begins(tmp_path, monkeypatch):
    compiled, taken = [], {}

    class Step:
        """Stands for a compiled step, and learns when it is made and taken."""

        def __init__(self, task, stage, state):
            self.stage = " + ".join(stage)
            assert jax.tree.structure(
                task.optimizer(stage).init(state.params)
            ) == jax.tree.structure(state.opt_state)

        def lower(self, *args):
            return self

        def compile(self):
            compiled.append(self.stage)
            return self

        def memory_analysis(self):
            return None

        def __call__(self, state, batch, key):
            taken[int(state.step)] = self.stage
            own = {"sampler": jnp.float32(state.step)} if SAMPLER in self.stage else {}
            return state._replace(step=state.step + 1), {"loss": jnp.zeros(()), **own}

    monkeypatch.setattr("dlm_jax.training.train_step.make_train_step", Step)
    monkeypatch.setattr("dlm_jax.training.trainer.Trainer.evaluate", lambda loop: None)
    changes = {
        "model__depth": 1, "model__add_sampler_head": "true", "model__add_critic_head": "true",
        "heads__start_sampler_iteration": 2, "heads__start_critic_iteration": 5,
        "train__steps": 8, "train__log_every": 4,
    }  # fmt: skip
    outcome = tiny_run.run(tmp_path, **changes)
    assert outcome.step == 8
    main, sampler, critic = ("main", "main + sampler_head", "main + sampler_head + critic_head")
    assert compiled == [main, sampler, critic]
    assert [taken[step] for step in range(8)] == [main] * 2 + [sampler] * 3 + [critic] * 3
    # A metric is the mean over the steps that have it.
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["sampler"] for line in lines if line["kind"] == "train"] == [2.5, 5.5]
    meta = load_meta(tmp_path)
    assert meta["step"] == 8 and meta["config"]["sample"]["fill"] == "auto"
