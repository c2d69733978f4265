"""What the studies of the sampler head compare: fills and texts are what they are called."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dlm_jax
from benchmarks import head_rivals, sampler_head, second_judge, which_process
from benchmarks.processes import Counts
from dlm_jax.inference.request import settings_of_call

TEXT = "The quick brown fox jumps over a lazy dog, and then\nanother one comes along slowly. " * 40


@pytest.fixture(scope="module")
def shipped():
    return dlm_jax.load()


@pytest.mark.parametrize("kinds", [sampler_head.KINDS, head_rivals.QUOTAS])
def test_a_fill_is_what_it_is_called_whatever_the_model_recommends(shipped, kinds):
    assert shipped.config.sample.fill == "wavefront"
    for name, settings in kinds.items():
        settled = settings_of_call(shipped, sampler_head.BASE | {"steps": 8} | settings)
        assert settled.fill == ("parallel" if name == "parallel" else "wavefront")
        assert settled.order == ("random_filled" if "all filled" in name else "random")


def test_pieces_begin_with_a_word_and_no_two_seeds_have_one_in_common():
    found = [second_judge._pieces(TEXT, seed) for seed in second_judge.SEEDS]
    varied = "".join(f"w{number} " for number in range(3000))
    pieces = [piece for seed in second_judge.SEEDS for piece in second_judge._pieces(varied, seed)]
    assert len(set(pieces)) == len(pieces) == 96
    for piece in (*sum(found, []), *pieces):
        assert len(piece) == 256 and re.match(r"\s\w", piece)


def test_shuffled_text_has_the_same_words_and_signs_and_another_order():
    text = TEXT[:200]
    shuffled = second_judge._shuffled(text, np.random.default_rng(0))
    words, others = re.findall(r"\w+", text), re.findall(r"\w+", shuffled)
    assert sorted(words) == sorted(others) and words != others and words[-1] == others[-1]
    assert re.sub(r"\w+", "", text) == re.sub(r"\w+", "", shuffled)


@pytest.mark.parametrize("share", second_judge.SPOILT)
def test_spoilt_text_has_the_share_of_other_tokens_that_it_is_named_for(share):
    tokenizer = SimpleNamespace(
        encode=lambda text: [ord(sign) for sign in text],
        decode=lambda ids: "".join(chr(token) for token in ids),
    )
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    rng = np.random.default_rng(1)
    spoilt = second_judge._spoilt(model, TEXT[:256], share, [ord("#")], rng)
    assert spoilt.count("#") == round(share * 256) and len(spoilt) == 256
    kept = [a == b for a, b in zip(spoilt, TEXT, strict=False) if a != "#"]
    assert all(kept)


def test_agreement_is_one_of_the_same_order_and_minus_one_of_the_reverse():
    values = np.array([0.1, 5.0, 2.0, 2.5])
    assert second_judge.agreement(values, np.exp(values)) == pytest.approx(1.0)
    assert second_judge.agreement(values, -(values**3)) == pytest.approx(-1.0)


def test_the_temperature_of_equal_entropy_can_be_reached_by_every_process():
    entropies = {
        "masked": {1.0: 4.8, 0.8: 4.4, 0.6: 4.1},
        "uniform": {1.0: 4.3, 0.8: 4.1, 0.6: 4.0},
        "mixed": {1.0: 4.6, 0.8: 4.2, 0.6: 3.9},
        "other": {1.0: 5.0, 0.8: 4.9, 0.6: 4.7},
    }
    found = {name: which_process.equal_entropy(name, entropies) for name in entropies}
    assert found == {"masked": 0.8, "uniform": 1.0, "mixed": 0.8, "other": 0.6}


def test_repair_settings_are_selected_by_wrong_tokens_and_by_repairs():
    tuned = [(Counts(100, 10, 0, 0), "idle"), (Counts(100, 10, 5, 3), "careful"),
             (Counts(100, 10, 8, 30), "bold")]  # fmt: skip
    found = which_process.selected(tuned)
    assert found == {"fewest wrong": "careful", "most repaired": "bold"}
