"""The resolved inputs of a training run, which networks, objectives and heads are created from."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from dlm_jax.config import Config
from dlm_jax.data.tokenizers import Tokenizer, noise_ids, text_ids


@dataclass(frozen=True)
class Setup:
    """The inputs for creating a network, an objective or a head.

    Attributes:
      config: resolved config with ``model.vocab_size`` set.
      tokenizer: tokenizer of the corpus.
      mesh: devices over which the rows of a batch are sharded.
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
        """Ids that are never written into a hole."""
        return (*self.tokenizer.banned_ids, self.tokenizer.pad_id)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Ids of text tokens, which can replace the true token in a corruption."""
        return text_ids(self.tokenizer)

    @property
    def noise_ids(self) -> tuple[int, ...]:
        """Ids that forward processes other than the masked one can use as noise."""
        return noise_ids(self.tokenizer)
