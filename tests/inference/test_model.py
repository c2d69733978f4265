"""A model's facts: the ids that end a generation, of which there may be several."""

import dataclasses

import numpy as np
import toy_model

import dlm_jax
from dlm_jax.config import SamplingParams

TOKENIZER = toy_model.TOKENIZER
DOT, SPACE = (int(TOKENIZER.encode(text)[0]) for text in (".", " "))
SAMPLE = SamplingParams(gen_length=8, steps=8, order="left_to_right", chain=("bias",))
MODEL = dataclasses.replace(toy_model.MODEL, sample=SAMPLE, more_eos_ids=(DOT, SPACE, DOT))
ENDS = (TOKENIZER.eos_id, DOT, SPACE)


def test_the_tokenizers_own_comes_first_and_each_once():
    assert MODEL.eos_ids == MODEL.facts.eos_ids == MODEL.program().eos_ids == ENDS
    assert toy_model.MODEL.eos_ids == ENDS[:1]


def test_a_text_ends_at_the_first_of_any_of_them():
    prompts = [{"prompt": "A r", "logit_bias": {end: 1e9}, "seed": 1} for end in ENDS]
    made = dlm_jax.generate(MODEL, prompts)
    assert made.texts == ("A r", "A r.", "A r ")
    assert made.lengths.tolist() == [4] * 3
    # The given space of the prompt ends nothing, and to another model it is a token like others.
    plain = dataclasses.replace(MODEL, more_eos_ids=())
    assert dlm_jax.generate(plain, prompts).lengths.tolist() == [4, 11, 11]


def test_ignore_eos_bans_them_all():
    even = {end: 1000.0 for end in ENDS}
    made = dlm_jax.generate(MODEL, ["A r"], num_samples=4, logit_bias=even, ignore_eos=True)
    assert made.lengths.tolist() == [11] * 4
    assert not np.isin(made.tokens[:, 3:11], ENDS).any()
