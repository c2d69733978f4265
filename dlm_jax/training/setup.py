"""What a run has resolved before its network, objective and heads are made."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from dlm_jax.config import Config
from dlm_jax.data import Tokenizer, text_ids


@dataclass(frozen=True)
class Setup:
    """What a network, an objective or a head may be made from.

    Attributes:
      config: resolved: ``model.vocab_size`` is set.
      tokenizer: of the corpus.
      mesh: devices that split the rows of a batch.
    """

    config: Config
    tokenizer: Tokenizer
    mesh: Mesh

    @property
    def mask_id(self) -> int:
        """The id of MASK."""
        return self.tokenizer.mask_id

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that a hole is never filled with."""
        return (*self.tokenizer.banned_ids, self.tokenizer.pad_id)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Ids that stand for text: what a corruption may show instead of the true token."""
        return text_ids(self.tokenizer)
