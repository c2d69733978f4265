"""Decisions: exact probabilities of labels, as enumeration has them, whatever runs beside them."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import toy
import toy_model
from oracles.likelihood import order_log_probs

import dlm_jax
from dlm_jax.contrib.decide import calibration, decisions
from dlm_jax.contrib.decide.decisions import Scale, decide
from dlm_jax.inference import token_logprobs

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


def _oracle(prompt, label, behind="", *, order="left_to_right"):
    """Log-probability of a label from the logits of every canvas of an order."""
    given, ids, rest = (TOKENIZER.encode(text) for text in (prompt, label, behind))
    tokens = [*given, *ids, *rest]
    hidden = range(len(given), len(given) + len(ids))
    orders = order_log_probs(
        _logits, tokens, mask_id=TOKENIZER.mask_id, given=set(range(len(tokens))) - set(hidden)
    )
    # The first permutation is from left to right.
    return (
        orders[0]
        if order == "left_to_right"
        else np.logaddexp.reduce(orders) - math.log(len(orders))
    )


def _normalised(scores, temperature=1.0):
    scores = np.array(scores) / temperature
    return np.exp(scores - np.logaddexp.reduce(scores))


@pytest.mark.parametrize("order", ["left_to_right", "mean"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_probabilities_are_those_of_enumeration_with_labels_that_begin_others(order, temperature):
    for prompt, made in zip(
        PROMPTS,
        decide(MODEL, PROMPTS, LABELS, order=order, temperature=temperature, batch_size=8),
        strict=True,
    ):
        scores = [_oracle(prompt, label, order=order) for label in LABELS]
        np.testing.assert_allclose(made.logprobs, scores, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            list(made.of().values()), _normalised(scores, temperature), rtol=1e-3, atol=1e-6
        )
        assert made.is_exact and made.best[""] == LABELS[int(np.argmax(scores))]
        assert set(made.interval().values()) == {0.0}


def test_a_length_penalty_divides_by_a_power_of_the_number_of_tokens():
    scores = np.array([_oracle("A ", label) for label in LABELS])
    sizes = np.array([TOKENIZER.encode(label).size for label in LABELS])
    for temperature, penalty in ((1.0, 1.0), (1.7, 0.4)):
        (made,) = decide(
            MODEL, "A ", LABELS, temperature=temperature, length_penalty=penalty, batch_size=8
        )
        want = _normalised(scores / sizes**penalty, temperature)
        np.testing.assert_allclose(made.probabilities, want, rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(made.num_tokens, sizes)
        np.testing.assert_allclose(made.logprobs, scores, rtol=1e-4, atol=1e-4)
    short = [decide(MODEL, "A ", ["s", "r"], length_penalty=x, batch_size=8)[0] for x in (0, 2)]
    assert short[0].of() == short[1].of()


def test_the_orders_differ():
    scores = [[_oracle("The ", label, order=order) for label in LABELS] for order in
              decisions.ORDERS]  # fmt: skip
    assert np.abs(np.subtract(*scores)).max() > 0.01


def test_a_prompt_alone_is_the_same_bit_for_bit_as_in_a_batch_and_labels_may_be_permuted():
    labels, prompts = ["s", "r", "a", " "], PROMPTS * 3
    asked = [decisions.question(MODEL, prompt, labels) for prompt in prompts]
    rows = [[one.row([ids]) for ids in one.labels[0]] for one in asked]
    whole = dlm_jax.order_logprobs(MODEL, [row for own in rows for row in own], num_rows=8)
    for place, own in enumerate(rows):
        alone = dlm_jax.order_logprobs(MODEL, own, num_rows=8)
        assert alone.tobytes() == whole[4 * place : 4 * place + 4].tobytes()
    turned = decide(MODEL, PROMPTS, labels[::-1], batch_size=8)
    for one, other in zip(decide(MODEL, PROMPTS, labels, batch_size=8), turned, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs[::-1], atol=1e-6)
        for label, share in one.of().items():
            assert share == pytest.approx(other.of()[label], abs=1e-6)


def test_labels_of_one_token_take_one_forward_and_beginnings_are_shared(monkeypatch):
    seen = []

    def counted(self, *args, **options):
        seen.append(len(self._rows))
        return run(self, *args, **options)

    run = token_logprobs._Canvases.run
    monkeypatch.setattr(token_logprobs._Canvases, "run", counted)
    decide(MODEL, PROMPTS, ["s", "r", "a"], batch_size=8)
    decide(MODEL, "A ", ["sa", "st", "ra"], batch_size=8)
    assert seen == [3, 1 + 2]


def _joint(template, choices):
    """Scores of all combinations, by the canvas of the whole text."""
    scores = {}
    for labels in itertools.product(*choices.values()):
        pieces = decisions.SLOT.split(template)[::2]
        tokens, hidden = list(TOKENIZER.encode(pieces[0])), []
        for label, piece in zip(labels, pieces[1:], strict=True):
            ids = TOKENIZER.encode(label)
            hidden += range(len(tokens), len(tokens) + len(ids))
            tokens += [*ids, *TOKENIZER.encode(piece)]
        total, shown = 0.0, np.array(tokens)
        for count, place in enumerate(hidden):
            canvas = shown.copy()
            canvas[hidden[count:]] = TOKENIZER.mask_id
            logits = _logits(canvas)[place]
            logits[TOKENIZER.mask_id] = -np.inf
            total += logits[tokens[place]] - np.logaddexp.reduce(logits)
        scores[labels] = total
    return scores


TEMPLATE, SLOTS = "A <slot:who> s<slot:what>.", {"what": ["at", "a"], "who": ["cat", "r", "t"]}


def test_slots_are_decided_jointly_with_the_text_between_and_behind_them():
    (made,) = decide(MODEL, TEMPLATE, SLOTS, batch_size=8)
    scores = _joint(TEMPLATE, {"who": SLOTS["who"], "what": SLOTS["what"]})
    assert made.combinations == tuple(scores)
    np.testing.assert_allclose(made.logprobs, list(scores.values()), rtol=1e-4, atol=1e-4)
    shares = dict(zip(scores, _normalised(list(scores.values())), strict=True))
    for slot, place in (("who", 0), ("what", 1)):
        for label, share in made.of(slot).items():
            want = sum(p for labels, p in shares.items() if labels[place] == label)
            assert share == pytest.approx(want, rel=1e-3)


def test_more_combinations_than_the_bound_are_drawn_with_an_interval_that_holds(monkeypatch):
    scale = {"temperature": 1.3, "length_penalty": 0.5}
    (exact,) = decide(MODEL, TEMPLATE, SLOTS, batch_size=8, **scale)
    sizes = dict(zip(exact.combinations, exact.num_tokens, strict=True))
    monkeypatch.setattr(decisions, "MOST_JOINT", 5)
    outside, widths = 0, []
    for seed in range(20):
        (made,) = decide(MODEL, TEMPLATE, SLOTS, batch_size=8, seed=seed, num_draws=300, **scale)
        assert [sizes[labels] for labels in made.combinations] == made.num_tokens.tolist()
        assert not made.is_exact and made.probabilities.sum() == pytest.approx(1.0)
        known = dict(zip(exact.combinations, exact.logprobs, strict=True))
        for labels, told in zip(made.combinations, made.logprobs, strict=True):
            assert told == pytest.approx(known[labels], abs=1e-4)
        share, width = made.of("who")["cat"], made.interval("who")["cat"]
        outside += abs(share - exact.of("who")["cat"]) > width
        widths.append(width)
    assert outside <= 4 and max(widths) < 0.1


def test_a_scale_has_a_mean():
    values = {"a": 1.0, "t": 3.0, "s": 4.0}
    (made,) = decide(MODEL, "A r", list(values), batch_size=8)
    mean, half = made.mean(values=list(values.values()))
    assert mean == pytest.approx(sum(values[k] * p for k, p in made.of().items())) and half == 0
    with pytest.raises(ValueError, match="choices='a' is not a number"):
        made.mean()


REFUSED = [
    ({"choices": ["a", ""]}, "choices=.* contains an empty label; remove it"),
    ({"choices": ["a", "t", "a"]}, "choices=.* contains 'a' twice; keep one"),
    ({"choices": ["a"]}, "choices=.* has fewer than two labels"),
    ({"choices": "at"}, "choices='at' are not a list"),
    ({"choices": ["a", "\u00e9"]}, "choices='\u00e9' cannot be written"),
    ({"choices": {"x": ["a", "t"]}}, "do not agree on the slot 'x'"),
    ({"prompts": "The " * 9}, "prompt with its labels has 37 tokens"),
    ({"prompts": []}, "prompts are empty"),
    ({"order": "best"}, "order='best' is unknown; use left_to_right or mean"),
    ({"order": "mean", "choices": ["a" * 9, "t"]}, "order='mean' is limited to 8 tokens"),
    ({"temperature": 0}, "temperature=0 is not a number in "),
    ({"temperature": 10**400}, r"temperature=10+\.\.\. is not a number in "),
    ({"length_penalty": 2.5}, r"length_penalty=2.5 is not a number in \[0, 2\]"),
    ({"task": "mood", "calibration": {"mood": 2.0}, "length_penalty": 1},
     "length_penalty=1 is set by the task"),
    ({"task": "mood"}, "task='mood' and calibration must be passed together"),
    ({"task": "mood", "calibration": {"x": 1.0}}, "task='mood' has no temperature"),
    ({"num_draws": 1}, "num_draws=1 must be at least 2"),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "line"), REFUSED)
def test_bad_input_is_refused_in_a_line_that_names_it(more, line):
    asked = {"prompts": "The ", "choices": ["a", "t"]} | more
    with pytest.raises(ValueError, match=line) as told:
        decide(MODEL, **asked)
    assert "\n" not in str(told.value)


def _lines(count=300):
    rng = np.random.default_rng(0)
    scores = [3.0 * rng.standard_normal(4) for _ in range(count)]
    right = [int(rng.choice(4, p=_normalised(own, 2.5))) for own in scores]
    return scores, right


def test_the_fitted_temperature_has_the_least_cost_of_a_grid():
    scores, right = _lines()
    fitted = calibration.calibrate(scores, right)

    def cost(temperature):
        return calibration.nll([_normalised(own, temperature) for own in scores], right)

    grid = np.geomspace(0.05, 50, 2000)
    best = min(map(cost, grid))
    assert cost(fitted) <= best + 1e-12
    assert 1.8 < fitted < 3.5 and cost(fitted) < cost(1.0)


def test_the_fitted_scale_has_the_least_cost_of_a_grid():
    scores, right = _lines()
    rng = np.random.default_rng(1)
    sizes = [rng.integers(1, 6, 4) for _ in scores]
    longer = [own * size**0.8 for own, size in zip(scores, sizes, strict=True)]

    def cost(temperature, penalty):
        scale = Scale(temperature, penalty)
        shares = [scale.shares(*own) for own in zip(longer, sizes, strict=True)]
        return calibration.nll(shares, right)

    fitted = calibration.calibrate_lengths(longer, sizes, right)
    best = min(cost(t, p) for t in np.geomspace(1, 6, 15) for p in np.linspace(0, 2, 11))
    assert cost(*fitted) <= best + 1e-6 and cost(*fitted) < cost(
        calibration.calibrate(longer, right), 0.0
    )
    assert 0.5 < fitted.length_penalty < 1.1
    assert calibration.calibrate_lengths(scores, [np.full(4, 3)] * len(scores), right) == (
        calibration.calibrate(scores, right), 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_that_of_its_formula(bins):
    scores, right = _lines()
    shares = [_normalised(own) for own in scores]
    total = 0.0
    for b in range(1, bins + 1):
        inside = [i for i, own in enumerate(shares) if (b - 1) / bins < own.max() <= b / bins]
        if inside:
            accuracy = np.mean([shares[i].argmax() == right[i] for i in inside])
            total += (
                len(inside)
                / len(shares)
                * abs(accuracy - np.mean([shares[i].max() for i in inside]))
            )
    found = calibration.expected_calibration_error(shares, right, num_bins=bins)
    assert found == pytest.approx(total, abs=1e-12) and found > 0.01


def test_a_task_has_its_temperature_in_a_file_of_its_model(tmp_path):
    path = tmp_path / "calibration.json"
    for task, heat in (("mood", 2.0), ("other", 3.0), ("mood", 1.5)):
        calibration.write_calibration(path, MODEL, task, temperature=heat, order="left_to_right")
    assert calibration.read_calibration(path, MODEL) == {"mood": Scale(1.5), "other": Scale(3.0)}
    calibration.write_calibration(
        path, MODEL, "long", temperature=2.0, length_penalty=0.5, order="left_to_right"
    )
    labels = ["a", "t"]
    by_task = decide(MODEL, "A r", labels, task="mood", calibration=path, batch_size=8)
    by_hand = decide(MODEL, "A r", labels, temperature=1.5, batch_size=8)
    assert by_task[0].of() == by_hand[0].of()
    by_task = decide(MODEL, "A r", LABELS, task="long", calibration=path, batch_size=8)
    by_hand = decide(MODEL, "A r", LABELS, temperature=2.0, length_penalty=0.5, batch_size=8)
    assert by_task[0].of() == by_hand[0].of()
    with pytest.raises(ValueError, match="has no temperature for this order"):
        decide(MODEL, "A r", labels, task="mood", calibration=path, order="mean")
    told = json.loads(path.read_text()) | {"vocabulary": "0"}
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match="was fitted to a different model"):
        decide(MODEL, "A r", labels, task="mood", calibration=path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a calibration"):
        decide(MODEL, "A r", labels, task="mood", calibration=path)


def test_labels_follow_the_prefix_of_the_model(monkeypatch):
    monkeypatch.setattr(dlm_jax.Model, "prefix_ids", (5,))
    for prompt, choices, given in (
        ("T", ["a", "r"], [5, *TOKENIZER.encode("T")]),
        ("T<slot:x>.", {"x": ["a", "r"]}, [5, *TOKENIZER.encode("T")]),
        (np.array([3]), ["a", "r"], [3]),
    ):
        model = dataclasses.replace(MODEL)  # without the cached property
        assert decisions.question(model, prompt, choices).parts[0].tolist() == given


def test_a_prompt_without_text_is_refused_where_the_model_predicts_no_first_token(monkeypatch):
    monkeypatch.setattr(dlm_jax.Model, "first_ids", ())
    network = dataclasses.replace(MODEL.network, predicts_first=False)
    with pytest.raises(ValueError, match="^prompt has no text before the first slot"):
        decide(dataclasses.replace(MODEL, network=network), "")
