"""/v1/decide: what `dlm_jax.decide` says, over HTTP, and what it refuses."""

import pytest
from serving_cases import MODEL, post, serving

import dlm_jax
from dlm_jax.serving.protocol import Limits

LABELS = ["sat", "ran", "sa"]


@pytest.fixture(scope="module")
def running():
    calibration = {"left_to_right": {"mood": 2.0}, "mean": {}}
    with serving(calibration=calibration, limits=Limits(rows=4, steps=40)) as server:
        yield server


def _ask(running, **asked):
    return post(running, "/v1/decide", asked)


def test_decisions_are_those_of_the_library(running):
    prompts = ["The cat ", "A rat "]
    for more in ({}, {"temperature": 1.5, "length_penalty": 1.0}, {"order": "mean"}):
        told = _ask(running, model="toy", prompt=prompts, choices=LABELS, **more).json()
        for made, want in zip(
            told["decisions"], dlm_jax.decide(MODEL, prompts, LABELS, **more), strict=True
        ):
            assert made["probabilities"] == pytest.approx(want.of()) and made["is_exact"]
            assert made["choice"] == want.best[""]
        assert told["object"] == "decision" and told["usage"]["prompt_tokens"] == 14
    by_task = _ask(running, prompt="The ", choices=LABELS, task="mood").json()["decisions"][0]
    (by_hand,) = dlm_jax.decide(MODEL, "The ", LABELS, temperature=2.0)
    assert by_task["probabilities"] == pytest.approx(by_hand.of())


def test_slots_have_names_and_a_joint_answer(running):
    asked = {"prompt": "A <slot:who> s<slot:what>.",
             "choices": {"who": ["cat", "r"], "what": ["at", "a"]}}  # fmt: skip
    (told,) = _ask(running, **asked).json()["decisions"]
    (want,) = dlm_jax.decide(MODEL, asked["prompt"], asked["choices"])
    assert {name: one["choice"] for name, one in told["slots"].items()} == want.best
    assert told["joint"][0] == {
        "choice": want.best, "probability": pytest.approx(want.probabilities.max())
    }  # fmt: skip
    assert sum(one["probability"] for one in told["joint"]) == pytest.approx(1.0)


def test_a_chat_decides_behind_its_header(running):
    said = [{"role": "user", "content": "The cat "}]
    (told,) = _ask(running, messages=said, choices=LABELS).json()["decisions"]
    (same,) = _ask(running, prompt="The cat ", choices=LABELS).json()["decisions"]
    assert told == same


REFUSED = [
    ({"choices": ["a", ""]}, "choices"),
    ({"choices": ["a", "a"]}, "choices"),
    ({"choices": ["a"]}, "choices"),
    ({"choices": "ab"}, "choices"),
    ({"choices": {"who": ["a", "t"]}}, "choices"),
    ({"choices": ["a", "\u00e9"]}, "choices"),
    ({}, "choices"),  # yes and no, which the tokenizer cannot write
    ({"order": "best"}, "order"),
    ({"temperature": 0.0}, "temperature"),
    ({"length_penalty": -1.0}, "length_penalty"),
    ({"task": "mod"}, "task"),
    ({"task": "mood", "length_penalty": 0.5}, "length_penalty"),
    ({"task": "mood", "temperature": 2.0}, "temperature"),
    ({"task": "mood", "order": "mean"}, "task"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["The "] * 5}, "prompt"),
    ({"prompt": "The " * 9}, "prompt"),
    ({"messages": [{"role": "user", "content": "A"}]}, "prompt"),
    ({"num_draws": 1}, "num_draws"),
    ({"topk": 3}, "topk"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_bad_fields_are_refused_by_name_in_one_line(running, more, param):
    asked = {"prompt": "The "} | ({"choices": ["a", "t"]} if more else {}) | more
    found = _ask(running, **asked)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == param and "\n" not in error["message"]
