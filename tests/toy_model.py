"""The shared toy network as a `Model` over the characters of a short text."""

from __future__ import annotations

import toy

from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build

TEXT = "The cat sat. A rat ran."


def of(text: str) -> Model:
    """The network as a model over the characters of a text."""
    tokenizer = CharacterTokenizer.of(text)
    network = build(toy.config(vocab_size=tokenizer.vocab_size))
    return Model(network, toy.random_params(network), tokenizer, max_length=32)


MODEL = of(TEXT)
NETWORK, TOKENIZER = MODEL.network, MODEL.tokenizer
