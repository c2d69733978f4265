"""Forward processes: the bound of each against enumeration of its chain."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage_cases
from oracles.processes import Enumerated

from dlm_jax.config import Config, ObjectiveConfig
from dlm_jax.objectives import losses
from dlm_jax.objectives.corruption import COSINE, LINEAR
from dlm_jax.objectives.forward_process import (
    PROCESSES,
    Process,
    divergence,
    noised_at,
    process_costs,
    process_elbo,
)
from dlm_jax.objectives.likelihood import costs
from dlm_jax.objectives.objective import Batch, Drawn
from dlm_jax.training.tasks import make_objectives
from dlm_jax.types import Network

V, MASK, LENGTH = 5, 4, 2
NOISE_IDS = (0, 1, 2)
IDS = {"mask_id": MASK, "noise_ids": NOISE_IDS}
# Id 3 is text that is no noise, such as BOS in the middle of a text.
TEXTS = ((0, 1), (2, 2), (1, 3))
FIRST = 1e-3


def table(length: int = LENGTH) -> np.ndarray:
    logits = np.random.default_rng(0).standard_normal((V**length, length, V))
    return logits.astype(np.float32)


def network(length: int = LENGTH) -> Network:
    def trunk(params, tokens_BL, length_B, cache):
        digits = V ** jnp.arange(length - 1, -1, -1)
        return params["table"][tokens_BL @ digits], cache

    return Network(
        init=lambda key: {"table": jnp.asarray(table(length))}, trunk=trunk,
        embed=lambda params, ids: ids, readout=lambda params, hidden: hidden, vocab_size=V,
    )  # fmt: skip


NETWORK, PARAMS = network(), {"table": jnp.asarray(table())}
INSTANCES = {n: dataclasses.replace(one, **IDS) for n, one in PROCESSES.items()}
NOISY = ("uniform", "mixed")


def batch_of(tokens) -> Batch:
    tokens = jnp.asarray(tokens, jnp.int32)
    rows, length = tokens.shape
    return Batch(tokens, jnp.full(rows, length), jnp.zeros(rows, jnp.int32))


def nodes(first: float, last: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Levels and weights of an integral whose ends may have roots."""
    x, w = np.polynomial.legendre.leggauss(24)
    angle, w = 0.25 * np.pi * (x + 1), 0.25 * np.pi * w
    span = last - first
    return first + span * np.sin(angle) ** 2, w * span * np.sin(2 * angle)


@functools.cache
def _costs(process: Process, length: int = LENGTH):
    return jax.jit(functools.partial(process_costs, process, network(length)))


def enumerated(process: Process, params, text, levels, speeds, is_first, length: int = LENGTH):
    """The code's costs of all canvases at all levels, ``[levels, V^L]``."""
    oracle = Enumerated(table(length), process.name, MASK, NOISE_IDS)
    states = np.array(oracle.states, np.int32)
    shown = jnp.asarray(np.tile(states, (len(levels), 1)))
    batch = batch_of(np.tile(np.array(text, np.int32), (len(shown), 1)))
    level, speed = (np.repeat(np.asarray(x, np.float32), len(states)) for x in (levels, speeds))
    noise = process.noise(
        batch.tokens_BL, shown, jnp.asarray(level), jnp.asarray(speed),
        jnp.full(len(shown), is_first),
    )  # fmt: skip
    found = _costs(process, length)(params, Drawn(batch, shown, noise.weight, jnp.ones(()), noise))
    return np.asarray(found, np.float64).sum(1).reshape(len(levels), -1)


def bound(process: Process, params, text, length: int = LENGTH, p=None) -> float:
    """The code's bound: the mean over all noised canvases, integrated over levels."""
    oracle = Enumerated(table(length) if p is None else p, process.name, MASK, NOISE_IDS)
    levels, weights = nodes(FIRST)
    found = enumerated(process, params, text, levels, np.ones_like(levels), False, length)
    chances = np.array([oracle.shown(text, v) for v in levels])
    last = enumerated(process, params, text, [FIRST], [1.0], True, length)[0]
    first = oracle.shown(text, FIRST)
    return float((weights[:, None] * np.where(chances > 0, chances * found, 0)).sum()) + float(
        np.where(first > 0, first * last, 0).sum()
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", PROCESSES)
def test_the_bound_is_that_of_the_enumerated_chain(name, text):
    oracle = Enumerated(table(), name, MASK, NOISE_IDS)
    expected = oracle.bound(text, *nodes(FIRST)) + oracle.last(text, FIRST)
    assert bound(INSTANCES[name], PARAMS, text) == pytest.approx(expected, abs=1e-5)
    # Many steps of the chain come to the same.
    far, near = (
        abs(oracle.discrete_bound(text, np.linspace(1.0, 0.0, steps + 1)) - expected)
        for steps in (64, 256)
    )
    assert near < 0.3 * far + 1e-4 and near < 0.02


@pytest.mark.parametrize("name", PROCESSES)
def test_no_bound_is_below_the_true_nll(name):
    oracle = Enumerated(table(), name, MASK, NOISE_IDS)
    law = oracle.law(np.linspace(1.0, 0.0, 401))
    assert law.sum() == pytest.approx(1)
    for text in TEXTS:
        nll = -math.log(law[oracle.states.index(text)])
        assert bound(INSTANCES[name], PARAMS, text) > nll - 1e-3


@pytest.mark.parametrize("name", NOISY)
def test_the_objective_and_the_likelihood_are_unbiased(name):
    process, text, rows = INSTANCES[name], TEXTS[0], 40_000
    expected = bound(process, PARAMS, text)
    batch = batch_of([text] * rows)
    for schedule in (LINEAR, COSINE):
        objective = process_elbo(process, schedule=schedule)
        noised = objective.draw(batch, jax.random.key(3))
        row_costs = np.asarray(_costs(process)(PARAMS, noised), np.float64).sum(1)
        loss = jax.jit(functools.partial(objective.loss, NETWORK))(PARAMS, noised)
        assert float(loss.sum / loss.weight) * LENGTH == pytest.approx(row_costs.mean(), rel=1e-4)
        error = row_costs.std() / math.sqrt(rows)
        assert abs(row_costs.mean() - expected) < 4 * error < 0.15 * expected
    found = costs(
        NETWORK, PARAMS, batch, jnp.arange(rows), jax.random.key(0), is_causal=False, eos_id=1,
        process=process, mask_id=MASK,
    )  # fmt: skip
    nats = np.asarray(found.nats_B, np.float64)
    assert abs(nats.mean() - expected) < 4 * nats.std() / math.sqrt(rows)
    assert 0 < float(jnp.mean(found.text_nats_B)) < nats.mean()
    alone = costs(
        NETWORK, PARAMS, batch_of([text]), jnp.array([7]), jax.random.key(0), is_causal=False,
        eos_id=1, process=process, mask_id=MASK,
    )  # fmt: skip
    assert float(alone.nats_B[0]) == pytest.approx(nats[7], rel=1e-5)


@pytest.mark.parametrize("name", NOISY)
def test_a_readout_of_the_wanted_positions_alone_is_the_same(name, monkeypatch):
    """As accelerators read out, with padding behind the last position."""
    batch = batch_of([TEXTS[0], TEXTS[2], TEXTS[1]])._replace(given_B=jnp.array([1, 0, 1]))
    objective = process_elbo(INSTANCES[name], schedule=LINEAR)
    noised = objective.draw(batch, jax.random.key(2))

    def loss(table):
        return objective.loss(NETWORK, {"table": table}, noised).sum

    expected = jax.jit(jax.value_and_grad(loss))(PARAMS["table"])
    monkeypatch.setattr(losses, "platform", lambda: "gpu")
    # Another function, because jax.jit caches by function.
    found = jax.jit(jax.value_and_grad(lambda table: loss(table)))(PARAMS["table"])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_masked_bound_is_the_weighted_cross_entropy():
    """The general formula at its corner: -alpha' / (1 - alpha) times the cross-entropy at MASK."""
    level = jnp.array([0.2, 0.9, 0.5, 0.5])
    clean, shown = jnp.array([0, 2, 1, 3]), jnp.array([MASK, MASK, 1, MASK])
    noise = INSTANCES["masked"].noise(
        clean[:, None], shown[:, None], level, jnp.ones(4), jnp.zeros(4, bool)
    )
    logits = jnp.asarray(table()[:4, 0]).at[:, MASK].set(-jnp.inf)
    flat = jax.tree.map(lambda x: x[:, 0], noise)
    term = flat.weight * divergence(logits, clean, shown, flat, noise_ids=NOISE_IDS)
    nll = -jax.nn.log_softmax(logits)[jnp.arange(4), clean]
    np.testing.assert_allclose(term, jnp.where(shown == MASK, nll / level, 0.0), rtol=1e-5)


@pytest.mark.parametrize("name", PROCESSES)
def test_noise_has_its_shares_and_given_tokens_have_none(name):
    process, rows = INSTANCES[name], 60_000
    batch = batch_of([(0, 1, 2, 3)] * rows)._replace(
        given_B=jnp.full(rows, 1), length_B=jnp.full(rows, 3)
    )
    level = 0.6
    noised = noised_at(process, batch, jax.random.key(0), jnp.full(rows, level), schedule=LINEAR)
    shown = np.asarray(noised.shown_BL)
    assert (shown[:, 0] == 0).all() and (shown[:, 3] == 3).all()
    assert (np.asarray(noised.noise.weight)[:, [0, 3]] == 0).all()
    oracle = Enumerated(table(1), name, MASK, NOISE_IDS)
    for place in (1, 2):
        expected = oracle.marginal(oracle.one_hot(place), level)
        counts = np.bincount(shown[:, place], minlength=V)
        assert (counts[expected == 0] == 0).all()
        error = np.sqrt(expected * (1 - expected) / rows)
        assert (abs(counts / rows - expected) < 4 * error + 1e-9).all()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"process": "unifrm"}, "objective.process='unifrm' is not one of"),
        (
            {"process": "uniform", "denoising_share": 0.5},
            "objective.denoising_share=0.5 requires objective.process='masked'",
        ),
    ],
)
def test_what_a_process_does_not_support_is_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        make_objectives(Config(objective=ObjectiveConfig(**objective)), stage_cases.TOKENIZER)
