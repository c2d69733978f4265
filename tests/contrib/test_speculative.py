"""Self-speculation: whatever is drafted, the texts are those of one token at a time."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from canvases import FOREVER, Row, holes
from scipy.stats import chi2

from dlm_jax.contrib.speculative import Speculative, _verified
from dlm_jax.inference.request import Request, check_canvas
from dlm_jax.model.transformer import build
from dlm_jax.sampling.commit import Threshold
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.rules import ModelFacts, with_rules
from dlm_jax.sampling.transforms.transform import At
from dlm_jax.types import Status

UNIT, FIRST, ROWS = 4, 2, 4096
SamplingParams = params_of(with_rules((Speculative,)))
ALLOWED = [token for token in range(toy.VOCAB_SIZE) if token not in toy.BANNED]


@functools.cache
def _network():
    network = build(toy.config(attention_type="block_causal", block_length=UNIT))
    return network, toy.random_params(network, scale=0.5)


def _run(temperature, seed=0, steps=3):
    network, params = _network()
    advance = canvases.make_advance(canvases.program(network, chunk=1024))
    rows = [Row(holes(3, FIRST), steps=steps, seed=seed + i, temperature=temperature)
            for i in range(ROWS)]  # fmt: skip
    no = jnp.zeros(ROWS, jnp.int32)
    rule = Threshold(jnp.full(ROWS, 0.9), no > 0, no + 1, no)
    state = canvases.make_state(rows, rule, positions=UNIT, fill=Speculative())
    state = advance(params, state, FOREVER)
    assert np.all(np.asarray(state.status_B) == Status.DONE)
    return np.asarray(state.canvas.tokens_BL), np.asarray(state.step_B), state


def _next(texts):
    """Probabilities ``[N, L, V]`` of each position behind the true tokens before it."""
    network, params = _network()
    clean = jnp.asarray(texts)
    shown = jnp.full_like(clean, toy.MASK)
    length = jnp.full(clean.shape[0], UNIT)
    hidden = jax.jit(functools.partial(network.beside_clean, block_length=1))(
        params, shown, clean, length
    )
    logits = network.readout(params, hidden.reshape(-1, hidden.shape[-1]))
    logits = np.asarray(logits, np.float64).reshape(len(texts), UNIT, -1)
    logits[..., list(toy.BANNED)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _exact():
    """The probability of every text under one token at a time."""
    texts = np.array([(FIRST, *rest) for rest in itertools.product(ALLOWED, repeat=3)], np.int32)
    each = _next(texts)
    places = np.arange(1, UNIT)
    chosen = each[np.arange(len(texts))[:, None], places[None], texts[:, 1:]]
    return {tuple(text): p for text, p in zip(texts.tolist(), chosen.prod(1), strict=True)}


def test_a_draft_or_what_replaces_it_has_the_true_distribution():
    """Of many positions, each with a draft from q; the first rejected one would be replaced."""
    p, q, number = np.array([0.45, 0.3, 0.2, 0.05]), np.array([0.7, 0.05, 0.2, 0.05]), 4096
    draft_BL = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(1, number))

    def rows(probabilities):
        return lambda places_N: jnp.tile(jnp.log(jnp.float32(probabilities)), (places_N.size, 1))

    chain = SimpleNamespace(
        apply=lambda state, logits_NV, at: logits_NV,
        is_greedy=lambda at: jnp.zeros(at.index_N.shape, bool),
    )

    def at(places_N, is_real_N):
        keys_N = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(2), places_N)
        return At(jnp.zeros_like(places_N), places_N, keys_N, is_real_N)

    fill: Any = SimpleNamespace(chain=chain, chain_state=(), at=at, chunk=512, logits=rows(q))
    fill.is_open_BL = draft_BL >= 0
    found = jax.jit(lambda draft_BL: _verified(fill, draft_BL, rows(p)))(draft_BL)
    is_accepted, other = (np.asarray(x)[0] for x in found[:2])
    # A draft is accepted with the probability that both distributions share.
    shared = np.minimum(p, q).sum()
    assert is_accepted.mean() == pytest.approx(shared, abs=4 * (0.25 / number) ** 0.5)
    counts = np.bincount(np.where(is_accepted, np.asarray(draft_BL)[0], other), minlength=4)
    assert chi2.sf(((counts - number * p) ** 2 / (number * p)).sum(), 3) > 1e-4


@pytest.mark.slow
def test_texts_have_the_distribution_of_one_token_at_a_time():
    exact = _exact()
    assert sum(exact.values()) == pytest.approx(1)
    counts = dict.fromkeys(exact, 0)
    all_steps = []
    for seed in range(4):
        tokens, steps, _ = _run(1.0, seed=seed * ROWS)
        all_steps.append(steps)
        for text in tokens.tolist():
            counts[tuple(text)] += 1
    total = 4 * ROWS
    steps = np.concatenate(all_steps)
    assert (steps == 1).any() and (steps > 1).any(), "drafts are accepted, and rejected"
    # Cells of few are put together.
    ordered = sorted(exact, key=exact.__getitem__, reverse=True)
    cells, rest = [], [0.0, 0]
    for text in ordered:
        if exact[text] * total >= 8:
            cells.append((exact[text] * total, counts[text]))
        else:
            rest = [rest[0] + exact[text] * total, rest[1] + counts[text]]
    cells.append(tuple(rest))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    assert len(cells) > 30
    assert chi2.sf(statistic, len(cells) - 1) > 1e-4


@pytest.mark.slow
def test_greedy_texts_are_those_of_one_token_at_a_time():
    tokens, steps, state = _run(0.0)
    text = [FIRST, toy.MASK, toy.MASK, toy.MASK]
    for place in range(1, UNIT):
        text[place] = int(_next(np.array([text], np.int32))[0, place].argmax())
    assert (tokens == np.array(text)).all()
    # A step asks for the draft's forward and for the one that verifies it.
    assert (np.asarray(state.counters.forwards) == 2 * steps).all()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"order": "random"}, "order='random' is not supported with fill='speculative'"),
        ({"order": "threshold", "guidance": 1.0}, "guidance=1.0 is not supported with"),
        (
            {"order": "threshold", "repetition_penalty": 1.2},
            "repetition_penalty=1.2 depends on the tokens",
        ),
        ({"order": "threshold", "cache": "exact"}, "cache='exact' is not supported with"),
        ({"order": "threshold", "threshold_least": 2}, "use threshold_least=1"),
        ({"order": "threshold", "structure": "a+"}, "structure='a+' is not supported with"),
        ({"order": "threshold", "threshold": 1.0, "threshold_above": True}, "use threshold=0.9"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes, line):
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        SamplingParams(fill="speculative", **changes)
    assert line in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "holes", "block_length", "needed"), [(2, 6, 4, 8), (2, 3, 2, 4), (4, 4, 4, 4)]
)
def test_fewer_steps_than_verify_every_token_are_refused(given, holes, block_length, needed):
    facts = ModelFacts(vocab_size=toy.VOCAB_SIZE, block_length=UNIT)
    tokens = np.array([FIRST] * given + [toy.MASK] * holes)

    def check(steps):
        sample = SamplingParams(
            fill="speculative", order="threshold", steps=steps, block_length=block_length
        )
        check_canvas(Request(tokens, sample), facts, mask_id=toy.MASK)

    check(needed)
    with pytest.raises(ValueError, match=rf"^steps={needed - 1} is less than the {needed} [^\n]+$"):
        check(needed - 1)
