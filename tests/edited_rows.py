"""Prompts whose rows are edited in different ways, and the model that edits them."""

import dataclasses

import toy_model

from dlm_jax.config import SamplingParams

TOKENIZER = toy_model.TOKENIZER
SAMPLE = SamplingParams(
    steps=6, temperature=0.8, chain=("temperature",), schedule="all", ignore_eos=True,
    resample=True, edit=True, insert_ratio_start=0.2, delete_ratio_start=0.3, delete_margin=0.0,
)  # fmt: skip
MODEL = dataclasses.replace(toy_model.MODEL, sample=SAMPLE)
# They run in one program, on four slots.
PROMPTS = [
    {"prompt": "The ", "draft": "cat sat. A rat", "seed": 1, "max_length": 18,
     "insert_ratio_start": 0.5},
    {"prompt": "A ", "draft": "rat ran. The cat sat", "seed": 2, "max_length": 23,
     "overflow": "refuse", "insert_ratio_start": 0.5},
    {"gen_length": 18, "seed": 3, "resample": False, "edit_token": "mask", "block_length": 7},
    {"prompt": "A ", "draft": "cat. ", "gen_length": 4, "seed": 4, "insert_ratio_start": 0.0,
     "length_target_mode": "to_max_new", "max_new_tokens": 15, "block_length": 5, "steps": 9},
]  # fmt: skip
