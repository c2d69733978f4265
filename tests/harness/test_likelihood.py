"""Likelihoods of the harness: bounds, the same in any batch and order, as a plain loop has them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_model

from dlm_jax.harness.lm import DlmJax, Pair, masks_of, pair_of, windows_of
from dlm_jax.model.transformer import build
from dlm_jax.objectives.likelihood import bound_at, causal_nll
from dlm_jax.objectives.objective import Batch

MODEL = toy_model.MODEL
REQUESTS = [
    ("The cat", " sat"),
    ("The cat ", "ran."),
    ("", "A rat"),
    ("A", " "),
    ("The", " cat sat. A"),
]
PAIRS = [pair_of(MODEL, *request) for request in REQUESTS]


def _bits(values):
    return np.asarray(values, np.float64).tobytes()


def test_any_order_gives_the_same_bits_as_a_request_alone():
    scorer = DlmJax(model=MODEL, draws=6)
    found = scorer.nats(PAIRS)
    assert _bits(scorer.nats(PAIRS[::-1])[::-1]) == _bits(found)
    assert _bits([scorer.nats([pair])[0] for pair in PAIRS]) == _bits(found)
    assert (DlmJax(model=MODEL, draws=6, seed=1).nats(PAIRS) != found)[:3].all()


@pytest.mark.slow
def test_costs_are_those_of_a_plain_loop():
    found = DlmJax(model=MODEL, draws=6).nats(PAIRS)
    for pair, nats in zip(PAIRS, found, strict=True):
        tokens = jnp.asarray(pair.ids)[None]
        batch = Batch(tokens, jnp.array([pair.ids.size]), jnp.array([pair.given]))
        costs = [
            bound_at(MODEL.network, MODEL.params, batch, jnp.asarray(mask)[None],
                     mask_id=MODEL.tokenizer.mask_id)[0, 0]
            for mask in masks_of(pair, 6, 0)
        ]  # fmt: skip
        np.testing.assert_allclose(nats, np.mean(costs), rtol=1e-4)


@pytest.mark.parametrize("draws", [1, 4, 5])
def test_masks_hide_each_number_of_tokens_as_often_and_come_in_opposites(draws):
    pair = Pair(np.arange(9, dtype=np.int32) % 5, 4)
    counts = np.zeros(6)
    for seed in range(400):
        masks = masks_of(pair, draws, seed)
        assert masks.shape == (draws, 9) and not masks[:, :4].any()
        for first, second in zip(masks[::2], masks[1::2], strict=False):
            assert first.sum() + second.sum() == 6 and (first | second)[4:].all()
        for mask in masks:
            counts[mask.sum()] += 1
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / counts.sum(), 0.2, atol=0.06)


def test_masks_of_blocks_are_drawn_for_each_block():
    pair = Pair(np.arange(10, dtype=np.int32), 1)
    masks = masks_of(pair, 8, 0, 4)
    for block in ((1, 4), (4, 8), (8, 10)):
        assert masks[:, block[0] : block[1]].any(axis=1).all()


def test_the_mean_over_all_masks_is_the_bound():
    """Over many seeds the mean goes to the average over all orders, which is enumerated here."""
    pair = pair_of(MODEL, "The", " ca")
    free = range(pair.given, pair.ids.size)
    tokens = jnp.asarray(pair.ids)[None]
    batch = Batch(tokens, jnp.array([pair.ids.size]), jnp.array([pair.given]))
    exact = 0.0
    for count in range(1, 4):
        sets = list(itertools.combinations(free, count))
        for chosen in sets:
            mask = np.isin(np.arange(pair.ids.size), chosen)[None]
            cost = bound_at(MODEL.network, MODEL.params, batch, jnp.asarray(mask),
                            mask_id=MODEL.tokenizer.mask_id)  # fmt: skip
            exact += float(cost[0, 0]) / len(sets) / 3
    found = DlmJax(model=MODEL, draws=512).nats([pair])[0]
    assert abs(found - exact) < 0.05 * exact


def test_causal_models_are_exact():
    tokenizer = MODEL.tokenizer
    network = build(
        toy.config(
            vocab_size=tokenizer.vocab_size, attention_type="causal", start_id=tokenizer.mask_id
        )
    )
    model = dataclasses.replace(
        MODEL, network=network, params=toy.random_params(network), is_causal=True
    )
    found = DlmJax(model=model, draws=1).nats(PAIRS)
    exact_nll = jax.jit(functools.partial(causal_nll, network, mask_id=tokenizer.mask_id))
    for pair, nats in zip(PAIRS, found, strict=True):
        batch = Batch(jnp.asarray(pair.ids)[None], jnp.array([pair.ids.size]),
                      jnp.array([pair.given]))  # fmt: skip
        exact = exact_nll(model.params, batch)
        np.testing.assert_allclose(nats, float(exact.sum()), rtol=1e-4)


def test_what_is_greedy_is_what_the_model_writes():
    import dlm_jax

    result = dlm_jax.generate(
        MODEL, ["The "], gen_length=4, steps=4, order="low_confidence", temperature=0.0,
        chain=("bias", "temperature"), logit_bias={MODEL.tokenizer.eos_id: -np.inf},
    )  # fmt: skip
    written = result.texts[0][4:]
    ids = np.concatenate([MODEL.tokenizer.encode("The "), MODEL.tokenizer.encode(written)])
    other = ids.copy()
    other[-1] = (other[-1] + 1) % 5
    pairs = [Pair(ids.astype(np.int32), 4), Pair(other.astype(np.int32), 4)]
    scorer = DlmJax(model=MODEL, draws=1)
    nats, found = scorer.nats_and_greedy(pairs)
    # Where EOS is likelier than any text the harness's answer is no text's.
    assert found[1] is False
    assert found == [scorer.nats_and_greedy([pair])[1][0] for pair in pairs]
    assert _bits(nats) == _bits(scorer.nats(pairs))


def test_windows_score_each_token_once_and_the_last_sees_all_it_can():
    text = "The cat sat. A rat ran. " * 4
    windows = windows_of(MODEL, text.strip())
    ids = MODEL.tokenizer.encode(text.strip())
    scored = np.concatenate([pair.ids[pair.given :] for pair in windows])
    assert scored.tolist() == ids.tolist()
    assert all(pair.ids.size == MODEL.max_length for pair in windows)


def test_spaces_move_to_the_continuation_and_contexts_are_cut_from_the_left():
    assert pair_of(MODEL, "The ", "cat").given == 3
    pair = pair_of(MODEL, "The cat sat. " * 9, "A rat")
    assert pair.ids.size == MODEL.max_length and pair.ids.size - pair.given == 6


def test_a_continuation_leaves_room_for_a_token_before_it_if_the_first_is_not_predicted():
    size = MODEL.max_length
    network = dataclasses.replace(MODEL.network, predicts_first=False)
    model = dataclasses.replace(MODEL, network=network, is_causal=True)
    pair = pair_of(model, "The", "A" * size)
    assert (pair.ids.size, pair.given) == (size + 1, 1)  # the last token is not read
    with pytest.raises(ValueError, match="exceeds the model's canvas"):
        pair_of(model, "The", "A" * (size + 1))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pair_of(MODEL, "A", ""), "no token"),
        (lambda: pair_of(MODEL, "A", "A" * 99), "exceeds the model's canvas"),
        (lambda: windows_of(MODEL, ""), "empty"),
    ],
)
def test_what_cannot_be_scored_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()
