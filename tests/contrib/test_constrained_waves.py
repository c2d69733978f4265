"""Constrained waves: the law of the sampler head times the trunk's chance of a match."""

import constrained_cases as constrained
import numpy as np
import pytest
import toy
from sampling.propose import test_constrained as cases

from dlm_jax.contrib import constrained_waves, decoders
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import settings_of_call
from dlm_jax.model.transformer import build

HEADED = build(toy.config(
    vocab_size=cases.TOKENIZER.vocab_size, add_sampler_head=True, sampler_context=2
))  # fmt: skip
MODEL = Model(
    HEADED, toy.random_params(HEADED), cases.TOKENIZER, max_length=64, sample=cases.MODEL.sample
)
WAVES = {"fill": "constrained_waves", "rules": constrained_waves}


@pytest.mark.slow
@pytest.mark.parametrize("case", constrained.WAVES)
def test_waves_follow_the_head_times_the_trunks_chance_of_a_match(case):
    pattern, canvas, settings = constrained.WAVES[case]
    logits_LV, head = constrained.logits_of(case), constrained.head_of(case)
    law = constrained.waves_law(pattern, canvas, logits_LV, head, **settings)
    drawn_NL = constrained.draws(
        pattern, canvas, logits_LV, cases.TEXTS, head=head, steps=1, **settings
    )
    assert constrained.p_value(drawn_NL, law) > 1e-3
    heat = settings.get("temperature", 1.0)
    without = constrained.law(pattern, canvas, logits_LV, temperature=heat)
    assert constrained.p_value(drawn_NL, without) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", constrained.WAVES)
def test_greedy_waves_take_the_best_token_with_its_best_completion(case):
    pattern, canvas, settings = constrained.WAVES[case]
    for seed in range(3):
        logits_LV = 3 * np.random.default_rng(seed).normal(size=(7, constrained.LETTERS.vocab_size))
        own = settings | {"temperature": 0.0}
        law = constrained.waves_law(pattern, canvas, logits_LV, constrained.head_of(case), **own)
        drawn_NL = constrained.draws(
            pattern, canvas, logits_LV, 1, head=constrained.head_of(case), steps=1, **own
        )
        assert {tuple(text) for text in drawn_NL.tolist()} == {max(law, key=law.__getitem__)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"order": "random_filled"}, {"order": "threshold", "block_length": 7}]
)
def test_every_text_of_waves_matches_in_any_number_of_steps(settings):
    cases._check_texts(MODEL, settings | WAVES)


@pytest.mark.slow
def test_waves_beside_a_structure_are_those_of_the_wavefront_fill():
    plain = [{"prompt": "ab", "seed": seed} for seed in range(5)]
    mixed = [one | {"structure": cases.PATTERNS[0]} for one in plain] + plain
    some = {"gen_length": 40, "batch_size": 20}
    together, _ = cases._texts(mixed, MODEL, **WAVES, **some)
    assert together[5:] == cases._texts(plain, MODEL, fill="wavefront", **some)[0]
    assert together[5:] != cases._texts(plain, MODEL, fill="parallel", **some)[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fill": "constrained_waves"}, "requires a sampler head"),
        ({"fill": "constrained", "order": "dawn"}, "order='dawn' stores candidates"),
        ({"fill": "constrained_waves", "order": "klass"}, "order='klass' stores values of the LM"),
    ],
)
def test_what_cannot_be_held_is_refused(settings, told):
    rules = [constrained_waves, decoders]
    with pytest.raises(ValueError, match=told):
        cases._texts(["ab"], structure="a+", rules=rules, **settings)


def test_read_back_is_refused_by_name():
    asked = WAVES | {"structure": "[a-z]{4}", "read_back": True}
    with pytest.raises(ValueError, match="^fill='constrained_waves' draws tokens .* read-back"):
        settings_of_call(MODEL, asked)
