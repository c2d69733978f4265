"""What training needs to know of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlm_jax.data.mixing import Mixture
from dlm_jax.data.pipeline import RowSource
from dlm_jax.data.rows import DocumentRows
from dlm_jax.data.shards import TokenShards
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

    @property
    def train_path(self) -> Path:
        """Token file of the training text."""
        return _tokens_path(self.train_rows)

    @property
    def val_path(self) -> Path:
        """Token file of the held-out text."""
        return _tokens_path(self.val_rows)


def _tokens_path(rows: RowSource) -> Path:
    if isinstance(rows, TokenShards | Mixture):
        raise ValueError("a sharded corpus has no token file; read its rows")
    return Path(rows.tokens_path if isinstance(rows, DocumentRows) else rows)
