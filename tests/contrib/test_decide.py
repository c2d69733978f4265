"""Decisions: exact probabilities of labels, as enumeration has them, whatever runs beside them."""

import dataclasses

import numpy as np
import pytest
import toy
import toy_model
from oracles.likelihood import order_log_probs

import dlm_jax
from dlm_jax.contrib import decide

MODEL = toy_model.MODEL
TOKENIZER = MODEL.tokenizer
PROMPTS = ["The cat ", "A rat ran", ""]
LABELS = ["sat", "ran", "s", "sa", "a r", "T"]


def _logits(tokens):
    length = len(tokens)
    padded = np.full((1, 64), TOKENIZER.pad_id, np.int32)
    padded[0, :length] = tokens
    found = toy.logits(MODEL.network, MODEL.params, padded, np.array([length], np.int32))
    return np.asarray(found, np.float64)[0, :length]


def _oracle(prompt, label):
    """Log-probability of a label from the logits of the canvas before each token."""
    given, ids = (TOKENIZER.encode(text) for text in (prompt, label))
    # The first permutation is from left to right.
    return order_log_probs(
        _logits, [*given, *ids], mask_id=TOKENIZER.mask_id, given=set(range(len(given)))
    )[0]


def _normalised(scores, temperature=1.0):
    scores = np.array(scores) / temperature
    return np.exp(scores - np.logaddexp.reduce(scores))


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_probabilities_are_those_of_enumeration_with_labels_that_begin_others(temperature):
    found = decide.decide(MODEL, PROMPTS, LABELS, temperature=temperature, batch_size=8)
    for prompt, made in zip(PROMPTS, found, strict=True):
        scores = [_oracle(prompt, label) for label in LABELS]
        np.testing.assert_allclose(made.logprobs, scores, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            made.probabilities, _normalised(scores, temperature), rtol=1e-3, atol=1e-6
        )
        assert made.best == LABELS[int(np.argmax(scores))]


def test_a_length_penalty_divides_by_a_power_of_the_number_of_tokens():
    scores = np.array([_oracle("A ", label) for label in LABELS])
    sizes = np.array([TOKENIZER.encode(label).size for label in LABELS])
    for temperature, penalty in ((1.0, 1.0), (1.7, 0.4)):
        (made,) = decide.decide(
            MODEL, "A ", LABELS, temperature=temperature, length_penalty=penalty, batch_size=8
        )
        want = _normalised(scores / sizes**penalty, temperature)
        np.testing.assert_allclose(made.probabilities, want, rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(made.num_tokens, sizes)
        np.testing.assert_allclose(made.logprobs, scores, rtol=1e-4, atol=1e-4)
    short = [
        decide.decide(MODEL, "A ", ["s", "r"], length_penalty=x, batch_size=8)[0] for x in (0, 2)
    ]
    np.testing.assert_array_equal(short[0].probabilities, short[1].probabilities)


def test_a_prompt_is_the_same_bit_for_bit_beside_others_and_labels_may_be_permuted():
    labels = ["s", "r", "a", " "]
    for prompt in PROMPTS:
        one = decide.decide(MODEL, [prompt, "T", "Th", "The"], labels)[0]
        other = decide.decide(MODEL, ["a", "ran", "sat", prompt], labels)[-1]
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    turned = decide.decide(MODEL, PROMPTS, labels[::-1], batch_size=8)
    for one, other in zip(decide.decide(MODEL, PROMPTS, labels, batch_size=8), turned, strict=True):
        for name in ("logprobs", "probabilities"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name)[::-1], atol=1e-6)


def test_labels_of_one_token_take_one_forward_and_beginnings_are_shared(monkeypatch):
    seen, compiled = [], decide.compiled

    def counted(*args, **options):
        run = compiled(*args, **options)

        def count(params, tokens, length, *rest):
            seen.append(int((length > 1).sum()))
            return run(params, tokens, length, *rest)

        return count

    monkeypatch.setattr(decide, "compiled", counted)
    decide.decide(MODEL, ["The cat ", "A rat ran"], ["s", "r", "a"])
    decide.decide(MODEL, "A ", ["sa", "st", "ra"])
    assert seen == [2, 1 + 2]


def test_a_label_in_a_prompt_sees_the_text_behind_it():
    (made,) = decide.decide(MODEL, "A <slot> sat.", ["cat", "r"], batch_size=8)
    for label, found in zip(made.labels, made.logprobs, strict=True):
        tokens, first = TOKENIZER.encode(f"A {label} sat."), 2
        given = set(range(len(tokens))) - set(range(first, first + len(label)))
        orders = order_log_probs(_logits, [*tokens], mask_id=TOKENIZER.mask_id, given=given)
        assert found == pytest.approx(orders[0], abs=1e-4)


REFUSED = [
    ({"labels": ["a", ""]}, "labels=.* have one that is empty"),
    ({"labels": ["a", "t", "a"]}, "labels='a' has the same tokens as 'a'"),
    ({"labels": ["a"]}, "labels=.* are fewer than two"),
    ({"labels": "at"}, "labels='at' are not a list"),
    ({"labels": ["a", "\u00e9"]}, "labels='\u00e9' cannot be written"),
    ({"prompts": "<slot>" * 2}, "prompt has <slot> twice"),
    ({"prompts": "The " * 9}, "prompt with its labels has 37 tokens"),
    ({"prompts": []}, "prompts are empty"),
    ({"prompts": ["a"], "labels": [["a", "t"]] * 2}, "labels are 2 for 1 prompts"),
    ({"temperature": 0}, "temperature=0 is not in "),
    ({"length_penalty": 2.5}, r"length_penalty=2.5 is not in \[0, 2\]"),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "line"), REFUSED)
def test_bad_input_is_refused_in_a_line_that_names_it(more, line):
    asked = {"prompts": "The ", "labels": ["a", "t"]} | more
    with pytest.raises(ValueError, match=line) as told:
        decide.decide(MODEL, **asked)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("prompt", ["T", "T<slot>."])
def test_labels_follow_the_prefix_of_the_model(monkeypatch, prompt):
    monkeypatch.setattr(dlm_jax.Model, "prefix_ids", (5,))
    model = dataclasses.replace(MODEL)  # without the cached property
    for ids, places in decide._rows(model, prompt, ["a", "r"]):
        assert ids[: places.start].tolist() == [5, *TOKENIZER.encode("T")]


def test_a_prompt_without_text_is_refused_where_the_model_predicts_no_first_token(monkeypatch):
    monkeypatch.setattr(dlm_jax.Model, "first_ids", ())
    network = dataclasses.replace(MODEL.network, predicts_first=False)
    with pytest.raises(ValueError, match="^prompt has no text before the label"):
        decide.decide(dataclasses.replace(MODEL, network=network), "", ["a", "t"])
