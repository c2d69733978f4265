"""Likelihood of texts at the front door: what is counted, and what it is divided by."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_model
from oracles import likelihood as oracle

from dlm_jax.inference import scoring
from dlm_jax.inference.scoring import score
from dlm_jax.model.transformer import build

MODEL = toy_model.MODEL
TOKENIZER = toy_model.TOKENIZER
CAUSAL_NETWORK = build(
    toy.config(vocab_size=TOKENIZER.vocab_size, attention_type="causal", start_id=TOKENIZER.mask_id)
)
CAUSAL = dataclasses.replace(
    MODEL, network=CAUSAL_NETWORK, params=toy.random_params(CAUSAL_NETWORK), is_causal=True
)
TEXTS = ["The cat sat.", "A rat", "sat"]


def _causal_nll(prompt: str, text: str) -> float:
    """Chain rule over the characters, one forward on the whole row."""
    ids = TOKENIZER.encode(prompt + text)
    logits = toy.logits(
        CAUSAL_NETWORK, CAUSAL.params, jnp.asarray(np.pad(ids, (0, 64 - len(ids))))[None],
        jnp.array([len(ids)]),
    )[0]  # fmt: skip
    logits = np.asarray(logits, np.float64)
    logits[:, TOKENIZER.mask_id] = -np.inf
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -sum(log_p[place, ids[place]] for place in range(len(prompt), len(ids)))


def test_a_causal_model_judges_exactly():
    result = score(CAUSAL, TEXTS)
    assert result.is_exact
    expected = [_causal_nll("", text) for text in TEXTS]
    np.testing.assert_allclose(result.nats, expected, rtol=1e-4)
    assert (result.draw_error == 0).all()
    assert result.tokens.tolist() == result.characters.tolist() == [12, 5, 3]
    bits, _ = result.bits_per_character
    assert bits == pytest.approx(sum(expected) / math.log(2) / 20, rel=1e-4)


def test_a_prompt_is_seen_and_not_counted():
    prompts = ["The cat ", "A ", "The "]
    texts = ["sat.", "rat", "cat sat"]
    result = score(CAUSAL, texts, prompts=prompts)
    expected = [_causal_nll(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    np.testing.assert_allclose(result.nats, expected, rtol=1e-4)
    assert result.tokens.tolist() == [4, 3, 7]
    assert not np.allclose(result.nats, score(CAUSAL, texts).nats)


def test_the_bound_given_a_prompt_agrees_with_enumeration():
    ids = TOKENIZER.encode("rat sat")

    def logits_fn(tokens):
        padded = jnp.asarray(np.pad(tokens, (0, 64 - len(tokens))))[None]
        return toy.logits(MODEL.network, MODEL.params, padded, jnp.array([len(tokens)]))[0, :7]

    exact = oracle.elbo_by_orders(
        logits_fn, ids.tolist(), mask_id=TOKENIZER.mask_id, given=(0, 1, 2, 3)
    )
    result = score(MODEL, ["sat"] * 16, prompts=["rat "] * 16, num_draws=16)
    assert not result.is_exact
    mean, error = result.nats.mean(), result.nats.std() / 4
    assert abs(mean - exact) < 5 * error
    # What the draws claim of their own spread is what the sixteen texts show.
    assert 0.4 < result.draw_error.mean() / result.nats.std() < 2.5


def test_the_error_of_a_single_text_is_that_of_its_draws():
    one = score(MODEL, ["The cat sat."], num_draws=4)
    assert one.nats_per_token[1] == pytest.approx(one.draw_error[0] / 12)
    assert one.bits_per_character[1] == pytest.approx(one.draw_error[0] / 12 / math.log(2))
    assert one.draw_error[0] > 0
    assert math.isnan(score(MODEL, ["The cat sat."]).nats_per_token[1])
    assert score(CAUSAL, ["The cat sat."]).nats_per_token[1] == 0


def test_a_long_text_is_cut_into_windows_that_add_up():
    text = ("The cat sat. A rat ran. " * 4)[:80]
    pieces = [text[start : start + 32] for start in range(0, 80, 32)]
    whole, parts = score(CAUSAL, [text]), score(CAUSAL, pieces)
    np.testing.assert_allclose(whole.nats, [parts.nats.sum()], rtol=1e-5)
    assert whole.tokens.tolist() == [80]


def test_windows_without_a_start_token_score_every_token_but_the_first():
    """A further window begins with the last token of the one before, which is given."""
    shape = {"attention_type": "causal", "logit_alignment": "shifted"}
    network = build(toy.config(vocab_size=TOKENIZER.vocab_size, **shape))
    assert not network.predicts_first
    model = dataclasses.replace(CAUSAL, network=network, params=toy.random_params(network))
    text = ("The cat sat. A rat ran. " * 4)[:80]
    whole = score(model, [text])
    starts = range(0, 79, 31)
    parts = score(
        model,
        [text[start + 1 : start + 32] for start in starts],
        prompts=[text[start] for start in starts],
    )
    assert whole.tokens.tolist() == [79] == [parts.tokens.sum()]
    np.testing.assert_allclose(whole.nats, [parts.nats.sum()], rtol=1e-5)


def test_the_seed_decides_the_masks_and_the_batch_size_does_not_lose_rows():
    first, again, other = (score(MODEL, TEXTS, seed=seed).nats for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_allclose(
        score(CAUSAL, TEXTS, batch_size=2).nats, score(CAUSAL, TEXTS).nats, rtol=1e-5
    )


def test_a_forward_has_as_many_rows_as_there_are_texts(monkeypatch):
    """To the next power of two; a batch of four texts is not one of sixteen."""
    counts, compiled = [], scoring.compiled

    def recorded(*args, **static):
        run = compiled(*args, **static)

        def call(params, batch, *rest):
            counts.append(len(batch.tokens_BL))
            return run(params, batch, *rest)

        return call

    monkeypatch.setattr(scoring, "compiled", recorded)
    for number, expected in ((1, [1]), (4, [4]), (7, [4, 4])):
        counts.clear()
        score(CAUSAL, ["A rat"] * number, batch_size=4)
        assert counts == expected


def test_the_masks_of_a_text_do_not_depend_on_the_batch_size():
    """Equal texts, so that their costs tell their masks apart."""
    texts, prompts = ["The cat sat."] * 4, ["", "A rat ", "", "sat "]
    sizes = (1, 2, 3, 4, 16)
    found = [
        score(MODEL, texts, prompts=prompts, num_draws=2, seed=3, batch_size=size) for size in sizes
    ]
    for result in found[1:]:
        np.testing.assert_allclose(result.nats, found[0].nats, rtol=1e-5)
        np.testing.assert_allclose(result.draw_error, found[0].draw_error, rtol=1e-3)
    assert abs(found[0].nats[0] - found[0].nats[2]) > 1e-2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"texts": []}, "no texts to score"),
        ({"texts": ["a", ""]}, "text 1: the text is empty"),
        ({"texts": ["The"], "prompts": []}, "0 prompts do not match 1 texts"),
        ({"texts": ["Zebra"]}, "'Z' (U+005A)"),
        ({"texts": ["sat " * 7], "prompts": ["The cat "]}, "exceed the model's canvas of 32"),
        ({"texts": ["sat"], "num_draws": 0}, "num_draws=0 is out of range"),
        ({"texts": ["sat"], "batch_size": 0}, "batch_size=0 is out of range"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, said):
    with pytest.raises(ValueError, match=r".") as error:
        score(MODEL, **arguments)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
