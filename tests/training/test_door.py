"""The door of training: one's own optimiser, schedule and callbacks, and loops of one's own."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases
import tiny_run
import toy

import dlm_jax.config as configs
from dlm_jax.heads import MAIN
from dlm_jax.training import prepare, problem, train, trainer
from dlm_jax.training.init_from import part_name
from dlm_jax.training.optimisers import learning_rate, make_optimizer, rates_of
from dlm_jax.training.tasks import make_task
from dlm_jax.types import Axes

FLAGS = {
    "model__depth": 1, "model__add_sampler_head": True, "heads__start_sampler_iteration": 2,
    "heads__warmup_steps": 0, "train__steps": 6, "train__log_every": 1, "train__eval_every": 6,
    "train__checkpoint_every": 2,
}  # fmt: skip


def labels(params: Any) -> Any:
    """Embeddings learn slowly, all else as fast as the others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "slow" if "embedding" in jax.tree_util.keystr(path) else "fast", params
    )


def partitioned(slow: float = 1e-3) -> optax.GradientTransformation:
    return optax.partition(
        {"slow": optax.sgd(slow, momentum=0.9), "fast": optax.lion(1e-3)}, labels
    )


def _config(out_dir: Path, **changes: Any) -> configs.Config:
    return configs.load(None, tiny_run.flags(out_dir, **(FLAGS | changes)))


def _train(out_dir: Path, report=lambda line: None, flags: Any = None, **parts: Any):
    with tiny_run.on_devices(1):
        return train(_config(out_dir, **(flags or {})), report=report, **parts)


TOLD: list[Any] = []


def note(run, state, record):
    """What the callback of the uninterrupted run is told."""
    TOLD.append((record, int(state.step), jax.tree.map(np.array, state.params)))


@functools.cache
def _whole(folder: Path):
    return _train(folder / "whole", optimizer=partitioned(), callbacks=[note])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("door")


def test_callbacks_are_told_of_every_record_with_the_state_of_its_step(folder):
    _whole(folder)
    told = [(record["kind"], record["step"], step) for record, step, _ in TOLD]
    assert told == [*(("train", n, n) for n in range(1, 7)), ("evaluation", 6, 6)]
    lines = tiny_run.records(folder / "whole")
    assert [line["loss"] for line in lines[:6]] == [record["loss"] for record, *_ in TOLD[:6]]


def test_labels_of_an_own_optimiser_decide_how_parameters_move(folder):
    """Lion moves each number by its rate; the head keeps its own optimiser and its stage."""
    _whole(folder)
    (one, _, first), (_, _, second), (three, _, third) = TOLD[:3]

    def moved(name):
        leaves = zip(*(jax.tree.leaves(params[name]) for params in (second, first)), strict=True)
        return np.concatenate([np.abs(new - old).ravel() for new, old in leaves])

    blocks = moved("blocks")
    np.testing.assert_allclose(blocks[blocks > 1e-4], 1e-3, rtol=0.01)
    assert np.unique(moved("embedding").round(9)).size > 10
    assert not moved("sampler_head").any()
    assert any(map(np.any, jax.tree.leaves(
        jax.tree.map(np.subtract, third["sampler_head"], second["sampler_head"])
    )))  # fmt: skip
    assert not one.keys() & {"learning_rate", "sampler_learning_rate"}
    assert "learning_rate" not in three and "sampler_learning_rate" in three


def test_a_stopped_run_with_an_own_optimiser_ends_as_the_uninterrupted_one(folder, monkeypatch):
    with monkeypatch.context() as patch:
        tiny_run.stop_after(3, patch)
        assert _train(folder / "stopped", optimizer=partitioned()).reason == "interrupted"
    resumed = _train(folder / "stopped", optimizer=partitioned())
    assert resumed.run.first_step == 3
    tiny_run.assert_same(resumed.state, _whole(folder).state)
    assert tiny_run.records(folder / "stopped") == tiny_run.records(folder / "whole")


@pytest.mark.parametrize(
    ("optimizer", "schedule", "message"),
    [
        (None, None, "whose optimizer is partition [0-9a-f]{8}, but here it is None"),
        (optax.sgd(0.1), None, "here it is chain [0-9a-f]{8}"),
        (partitioned(slow=2e-3), None, "is partition [0-9a-f]{8}, but here it is partition"),
        (
            partitioned(),
            optax.constant_schedule(1.0),
            "schedule is None, but here it is constant_schedule",
        ),
    ],
)
def test_another_optimiser_is_refused_on_resume(folder, optimizer, schedule, message):
    _whole(folder)
    with pytest.raises(ValueError, match=message) as error:
        _train(folder / "whole", optimizer=optimizer, schedule=schedule)
    assert "\n" not in str(error.value) and "pass the same" in str(error.value)


def test_optimisers_have_one_name_exactly_if_they_have_the_same_parts_and_numbers():
    def name(*parts: optax.GradientTransformation) -> str:
        return part_name("optimizer", optax.chain(*parts))

    clip, decayed = optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)
    falling = optax.exponential_decay(1e-3, 10, 0.5)
    chains = [
        (clip, optax.adam(1e-3)), (clip, optax.adam(2e-3)), (clip, optax.adam(1e-3, b1=0.8)),
        (clip, optax.adam(falling)), (clip, optax.lion(1e-3)), (optax.adam(1e-3), clip),
        (optax.adam(1e-3),), (clip, decayed, optax.adam(1e-3)),
    ]  # fmt: skip
    names = [name(*parts) for parts in chains]
    assert len(set(names)) == len(names)
    again = optax.clip_by_global_norm(1.0), optax.adam(optax.exponential_decay(1e-3, 10, 0.5))
    assert name(*again) == names[3]
    known = part_name("schedule", optax.constant_schedule(0.5))
    assert known != part_name("schedule", optax.constant_schedule(0.25))
    assert known == part_name("schedule", optax.constant_schedule(0.5))


def test_the_name_of_a_schedule_has_the_numbers_in_a_compiled_function_and_no_program(monkeypatch):
    def name(factor: float) -> str:
        inner = jax.jit(optax.constant_schedule(factor))
        return part_name("schedule", lambda step: inner(step))

    before = name(0.5)
    assert name(0.25) != before
    # Another version of JAX writes the same function as another program.
    monkeypatch.setattr(jax, "make_jaxpr", lambda part: lambda *inputs: "another program")
    assert name(0.5) == before


PLAIN = {"model__add_sampler_head": False, "optim__warmup_steps": 2, "train__steps": 3}


@functools.cache
def _plain(folder: Path):
    return _train(folder / "plain", flags=PLAIN)


def _updates(optimizer: optax.GradientTransformation, num_steps: int = 3):
    """What it makes of equal gradients of a matrix and a vector."""
    params = {"blocks": {"mlp": {"up": {"kernel": jnp.ones((1, 2, 3))}}}, "embedding": jnp.ones(4)}
    grads = jax.tree.map(
        lambda leaf: jnp.arange(leaf.size, dtype=float).reshape(leaf.shape), params
    )
    state, found = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(num_steps):
        updates, state = update(grads, state, params)
        found.append(updates)
    return found


def _close(left, right, rtol=1e-5, atol=1e-7):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_schedule_is_a_factor_on_the_peaks_in_place_of_warm_up_and_cosine(name):
    config = configs.OptimConfig(name=name, warmup_steps=1, weight_decay=0.1)
    factor = learning_rate(1.0, config, num_steps=3)
    up = Axes(("layers", "embed", "mlp"), is_matrix=True)
    axes = {"blocks": {"mlp": {"up": {"kernel": up}}}, "embedding": Axes()}
    plain, scaled = (rates_of(config, num_steps=3, schedule=one) for one in (None, factor))
    _close(*(_updates(make_optimizer(config, one, axes=axes)) for one in (plain, scaled)))
    at_2, scaled_at_2 = ([float(rate(2)) for rate in one.values()] for one in (plain, scaled))
    assert at_2 == pytest.approx(scaled_at_2)


def test_a_schedule_multiplies_the_updates_of_an_own_optimiser():
    own = optax.sgd(1.0)
    task = make_task(
        cases.config(), cases.TOKENIZER, cases.mesh(), optimizer=own,
        schedule=lambda step: 0.5**step,
    )  # fmt: skip
    made = task.optimizer((MAIN,))
    assert not task.learning_rates((MAIN,), 0)
    expected = [jax.tree.map(lambda x, n=n: 0.5**n * x, one) for n, one in enumerate(_updates(own))]
    _close(_updates(made), expected)


def test_a_loop_of_ones_own_takes_the_steps_of_the_run(folder):
    """`gradient` and `batches` with the run's key and optimiser give the run's parameters."""
    outcome = _plain(folder)
    with tiny_run.on_devices(1):
        made = problem(_config(folder / "none", **PLAIN))
    assert not (folder / "none").exists()
    optimizer = toy.optimizer(made.config.optim, num_steps=3, network=made.network)
    params = made.init(jax.random.split(jax.random.key(0))[0])
    state, losses = optimizer.init(params), []

    @jax.jit
    def step_of(params, state, batch, step):
        loss, grads = made.gradient(params, batch, outcome.run.noise_key, step)
        alone = made.loss(params, batch, outcome.run.noise_key, step)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (loss, alone)

    for step, batch in enumerate(itertools.islice(made.batches(), 3)):
        params, state, loss = step_of(params, state, batch, step)
        losses.append(loss)
    losses, alone = map(np.array, zip(*losses, strict=True))
    assert alone == pytest.approx(losses, rel=1e-5)
    lines = [r["loss"] for r in tiny_run.records(folder / "plain") if r["kind"] == "train"]
    np.testing.assert_allclose(losses, lines, rtol=1e-5)
    _close(params, outcome.params, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_a_problem_is_zero_where_nothing_trains(folder):
    with tiny_run.on_devices(1):
        made = problem(
            _config(folder / "heads", heads__train_main=False, train__init_from="any model")
        )
    params = made.init(jax.random.key(1))
    batch = next(iter(made.batches()))
    _, grads = jax.jit(made.gradient)(params, batch, jax.random.key(2))
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    has_gradient = {n: any(leaf.any() for leaf in jax.tree.leaves(grads[n])) for n in grads}
    assert has_gradient == dict.fromkeys(params, False) | {"sampler_head": True}


def test_hosts_compare_the_source_code_of_custom_parts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    compared: list[dict] = []
    monkeypatch.setattr(trainer, "check_same_everywhere", compared.append)
    for factor in ("1.0", "0.5"):
        (tmp_path / "factors_here.py").write_text(f"def constant(step):\n    return {factor}\n")
        import factors_here  # type: ignore[import-not-found]

        with tiny_run.on_devices(1):
            flags = tiny_run.flags(tmp_path / "run")
            run = prepare(configs.load(None, flags), schedule=factors_here.constant, report=print)
        run.checkpoints.close()
    name = "source code of schedule"
    before, after = (facts[name] for facts in compared if name in facts)
    assert before != after
    del sys.modules["factors_here"]
