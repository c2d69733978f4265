"""The shared toy network as a `Model` over the characters of a short text."""

from __future__ import annotations

import toy

from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build

TEXT = "The cat sat. A rat ran."
TOKENIZER = CharacterTokenizer.of(TEXT)
NETWORK = build(toy.config(vocab_size=TOKENIZER.vocab_size))
MODEL = Model(NETWORK, toy.random_params(NETWORK), TOKENIZER, max_length=32)
