"""Reverse steps of forward processes, against the enumerated law of their chains."""

import dataclasses
import functools

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from canvases import make_advance
from oracles.processes import Enumerated
from scipy.stats import chisquare

import dlm_jax
from dlm_jax.config import Config, ObjectiveConfig, SamplingParams
from dlm_jax.data import text_ids
from dlm_jax.inference.model import Model
from dlm_jax.objectives.forward_process import PROCESSES
from dlm_jax.sampling.commit.commit_rule import Proposal
from dlm_jax.sampling.loop import start
from dlm_jax.sampling.noise import NoiseContext
from dlm_jax.sampling.program import RowParams
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.types import Status

ROWS, MASK = 6_000, enumerable.MASK
STATES = (*enumerable.LETTERS, MASK)


@functools.cache
def oracle(name: str, temperature: float) -> Enumerated:
    table = np.asarray(enumerable.PARAMS["table"], np.float64)[..., np.array(STATES)]
    return Enumerated(table / temperature, name, len(STATES) - 1, enumerable.LETTERS)


def written(name: str, canvas: tuple[int, ...], **settings) -> np.ndarray:
    """How often each canvas of letters and MASK is the last one, ``[27]``."""
    model = enumerable.MODEL
    facts = dataclasses.replace(model.facts, process=PROCESSES[name])
    advance = make_advance(model.program())
    sample = SamplingParams(
        **{"order": "posterior", "ignore_eos": True, "chain": ("temperature",)} | settings
    )
    packed = RowParams.pack([sample], facts), BUILT_IN.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROWS, *x.shape[1:])), packed)
    state = start(
        jnp.tile(jnp.array([canvas], jnp.int32), (ROWS, 1)),
        jnp.full(ROWS, len(canvas)),
        dataclasses.replace(
            row, seed_B=jnp.arange(ROWS, dtype=jnp.uint32), stops_at_eos_B=jnp.zeros(ROWS, bool)
        ),
        rules,
        mask_id=MASK,
        frozen_BL=jnp.zeros((ROWS, len(canvas)), bool),
    )
    state = advance(model.params, state, 1000)
    assert (np.asarray(state.status_B) == Status.DONE).all()
    assert (np.asarray(state.step_B) == sample.steps).all()
    return np.bincount(np.asarray(enumerable.code(state.canvas.tokens_BL)), minlength=27)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    is_text = law > 1e-12
    assert counts[~is_text].sum() == 0
    return chisquare(counts[is_text], law[is_text] / law.sum() * counts.sum()).pvalue


@pytest.mark.parametrize(
    "name",
    [
        name if name == "uniform" else pytest.param(name, marks=pytest.mark.slow)
        for name in PROCESSES
    ],
)
def test_texts_follow_the_law_of_the_enumerated_chain(name):
    empty = (MASK,) * enumerable.LENGTH
    for steps, temperature in ((2, 1.0), (4, 0.7), (8, 1.0), (64, 1.0)):
        law = oracle(name, temperature).law(np.linspace(1.0, 0.0, steps + 1))
        counts = written(name, empty, steps=steps, temperature=temperature)
        assert p_value(counts, law) > 1e-3
        if steps == 2:
            # The test would tell: the law of one step is another.
            assert p_value(counts, oracle(name, 1.0).law(np.linspace(1.0, 0.0, 2))) < 1e-3


@pytest.mark.parametrize("name", ["uniform", "mixed"])
def test_a_draft_is_where_the_chain_begins(name):
    """What stays of it tells more of the reverse step than texts from noise do."""
    draft, chain = (1, 0, 1), oracle(name, 1.0)
    start_law = np.eye(27)[chain.states.index(draft)]
    for steps in (1, 2, 8):
        law = chain.law(np.linspace(0.4, 0.0, steps + 1), start_law)
        counts = written(name, draft, steps=steps, posterior_start=0.4)
        assert p_value(counts, law) > 1e-3


def _rule_and_context(settings: list[dict], places: int = 3, *, process="uniform", **context):
    """A rule with a row for each of the settings, and a step of these rows."""
    facts = dataclasses.replace(enumerable.MODEL.facts, process=PROCESSES[process])
    rows = [SamplingParams(ignore_eos=True, **one) for one in settings]
    shape = (len(rows), places)
    tokens_BL = jnp.zeros(shape, jnp.int32)
    keys_B = jax.vmap(jax.random.key)(jnp.arange(len(rows)))
    fields = {
        "is_open_BL": jnp.ones(shape, bool),
        "key_B": keys_B,
        "tokens_BL": tokens_BL,
        "is_noise_BL": tokens_BL < 0,
        "random_BL": tokens_BL,
        "num_ids_B": tokens_BL[:, 0],
        "mask_id": MASK,
    }
    return BUILT_IN.pack(rows, facts).commit, NoiseContext(**fields | context)


def test_a_block_ends_where_its_likeliest_tokens_repeat_and_the_mean_entropy_is_low():
    """Of 8 positions, 4 are open; the bound is 0.1 nats."""
    now = np.array([[1, 2, 3, 4, 5, 5, 5, 5]] * 5)
    before = now.copy()
    before[1, 2] = 0  # an open position that changed
    before[2, 6] = 0  # a closed one
    entropy = np.full((5, 8), 9.0)
    entropy[:, :4] = [[0.3, 0.01, 0.01, 0.01]]
    entropy[3, 0] = 0.5  # a mean of 0.13, but of 0.07 over 8 positions
    entropy[4, :4] = 0.11
    rule, context = _rule_and_context(
        [{"order": "entropy_renoise", "steps": 9, "renoise_stop": 0.1}] * 5, places=8,
        step_B=jnp.full(5, 2), steps_B=jnp.full(5, 9),
        is_open_BL=jnp.broadcast_to(jnp.arange(8) < 4, (5, 8)),
    )  # fmt: skip
    zeros_BL = jnp.zeros((5, 8))
    proposal = Proposal(jnp.asarray(now), zeros_BL, zeros_BL, -jnp.log(jnp.asarray(entropy)))
    state = jnp.asarray(now), jnp.asarray(before)
    assert np.asarray(rule.update(state, context, proposal)[0].is_final_B).tolist() == [
        True,
        False,
        True,
        False,
        False,
    ]
    last = context._replace(step_B=jnp.full(5, 8))
    assert np.asarray(rule.update(state, last, proposal)[0].is_final_B).all()


def accepted(entropy: np.ndarray, bound: float) -> list[int]:
    """Positions in rising order of entropy while the sum of those before is at most the bound."""
    order = [int(i) for i in np.argsort(entropy)]
    return [i for n, i in enumerate(order) if sum(entropy[j] for j in order[:n]) <= bound]


def entropy_law(bound: float, steps: int) -> np.ndarray:
    """The law of accepting, renoising and taking the likeliest tokens at the end, ``[27]``."""
    chain = oracle("uniform", 1.0)
    letters = [n for n, z in enumerate(chain.states) if max(z) < 2]
    now = np.zeros(27)
    now[letters] = 1 / len(letters)
    uniform = np.array([0.5, 0.5, 0.0])
    for step in range(steps):
        after = np.zeros(27)
        for n in letters:
            p = chain.p[n]
            entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0), axis=1)
            own = [p[i] if i in accepted(entropy, bound) else uniform for i in range(3)]
            if step == steps - 1:
                own = [np.eye(3)[p[i].argmax()] for i in range(3)]
            after += now[n] * np.einsum("i,j,k->ijk", *own).reshape(-1)
        now = after
    return now


@pytest.mark.parametrize(("bound", "steps"), [(0.0, 2), (0.7, 3), (9.0, 4)])
def test_candidates_of_little_entropy_stay_and_the_rest_is_new_noise(bound, steps):
    counts = written(
        "uniform", (MASK,) * 3, steps=steps, order="entropy_renoise", entropy_bound=bound,
        renoise_stop=0.0,
    )  # fmt: skip
    assert p_value(counts, entropy_law(bound, steps)) > 1e-3
    assert p_value(counts, entropy_law(bound, 1)) < 1e-3


def model_of(process: str) -> Model:
    config = Config(objective=ObjectiveConfig(process=process))
    return dataclasses.replace(toy_model.MODEL, config=config)


@pytest.mark.parametrize("order", ["posterior", "entropy_renoise"])
def test_noise_of_no_step_is_an_id_that_a_row_bans(order):
    model, banned = model_of("uniform"), {3, 5}
    shown = dlm_jax.stream(
        model, ["The "], num_samples=32, order=order, steps=4, gen_length=8, max_length=16,
        ignore_eos=True, fill="parallel", entropy_bound=0.0,
        logit_bias={str(id): -float("inf") for id in banned},
    )  # fmt: skip
    given = model.tokenizer.encode("The ").tolist()
    seen = set()
    for rows in list(shown)[1:]:
        for row in rows.values():
            assert row.tokens[: len(given)].tolist() == given
            seen |= set(row.tokens[len(given) :].tolist())
    assert seen == set(text_ids(model.tokenizer)) - banned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "random"}, "order='random' fills holes, but the model was trained with"),
        ({"order": "threshold"}, "use order='posterior'"),
        ({"remask": "scheduled"}, "remask='scheduled' is not supported with order='posterior'"),
        ({"cache": "dual"}, "cache='dual' is not supported with"),
        ({"cache": "exact"}, "cache='exact' is not supported with"),
        ({"fill": "constrained"}, "fill='constrained' is not supported with"),
        ({"fill": "wavefront"}, "fill='wavefront' is not supported with"),
        ({"guidance": 1.0}, "guidance=1.0 is not supported with"),
        ({"edit": True}, "edit=True is not supported with"),
        ({"renoise_start": 0.5}, "renoise_start=0.5 is not supported with"),
        ({"structure": "[a-c]+"}, "is not supported with"),
        ({"read_back": True}, "order='posterior' writes tokens on the device"),
        ({"trace": True}, "order='posterior' has no trace"),
        ({"posterior_start": 0.0}, "posterior_start=0.0 is outside (0, 1]"),
    ],
)
def test_what_needs_holes_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as caught:
        dlm_jax.generate(model_of("uniform"), ["The "], steps=2, max_length=16, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_random_tokens_are_refused_for_a_model_that_fills_mask():
    with pytest.raises(ValueError, match="order='entropy_renoise' writes random tokens"):
        dlm_jax.generate(toy_model.MODEL, ["The "], order="entropy_renoise", max_length=16)
