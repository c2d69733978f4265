"""A config with all that its corpus and the model that it begins with decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dlm_jax.config import Config
from dlm_jax.data import Corpus, load_corpus
from dlm_jax.training.adopt import adopted
from dlm_jax.training.vocabulary import tokenizer_of


def load_resolved(config: Config, *, report: Callable[[str], None]) -> tuple[Config, Corpus]:
    """The config with what it adopts and the vocabulary of its corpus, and that corpus.

    Raises:
      ValueError: the corpus or its tokenizer is refused, or ``model.vocab_size`` is too small.
    """
    config, adopted_tokenizer = adopted(config)
    tokenizer = adopted_tokenizer or tokenizer_of(config, report=report)
    data = config.data
    corpus = load_corpus(
        data.source,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        held_out=data.held_out,
        cache_dir=data.cache_dir or None,
        layout=data.layout,
        tail=data.tail,
        weights=data.weights,
    )
    return _with_vocabulary(config, corpus), corpus


def _with_vocabulary(config: Config, corpus: Corpus) -> Config:
    needed = corpus.tokenizer.vocab_size
    size = config.model.vocab_size or needed
    if size < needed:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {needed}; use 0 or {needed}"
        )
    start = config.model.start_id
    if config.model.attention_type == "causal" and start < 0:
        start = corpus.tokenizer.mask_id
    model = dataclasses.replace(config.model, vocab_size=size, start_id=start)
    return dataclasses.replace(config, model=model)
