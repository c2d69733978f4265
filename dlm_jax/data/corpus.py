"""What training needs to know of its text."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_jax.data.pipeline import RowSource
from dlm_jax.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """What training needs to know of its text.

    Attributes:
      name: the source, for messages.
      tokenizer: made from the text, or the one given.
      train_rows: what `train_batches` takes: a token file, or rows of documents.
      val_rows: the held-out text, for `validation_windows`.
      sha256: of the whole text in UTF-8 (documents: of a JSON line ``[prompt, text]`` for each;
        shards: of their index); record it beside results.
      num_train_characters: characters of training text, prompts left out.
      num_val_characters: characters of held-out text, prompts left out; nats per token times
        `num_val_tokens` over this and ln 2 is bits per character.
      num_train_tokens: tokens to be learnt from, prompts left out, tails (see `load_corpus`) not.
      num_val_tokens: the same of the held-out text.
    """

    name: str
    tokenizer: Tokenizer
    train_rows: RowSource
    val_rows: RowSource
    sha256: str
    num_train_characters: int
    num_val_characters: int
    num_train_tokens: int
    num_val_tokens: int
