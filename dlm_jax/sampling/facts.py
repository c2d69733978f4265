"""What the rules of a step may know of a model."""

from __future__ import annotations

from typing import NamedTuple

from dlm_jax.sampling.commit.ancestral import NoiseSchedule


class ModelFacts(NamedTuple):
    """What rules may know of a model.

    Attributes:
      vocab_size: number of logits.
      banned_ids: ids never proposed: MASK, PAD, BOS, padding of the vocabulary.
      eos_ids: ids that end a generation. When there are none, ``ignore_eos`` warns and is off.
      space_id: the id of the space; -1 for a vocabulary without one.
      noise: the noise schedule the model was trained with; None if it has none.
      has_sampler: whether it has a sampler head.
      has_critic: whether it has a critic head.
      has_cache: whether its network offers the trunk in pieces.
      is_causal: whether it is autoregressive.
      block_length: positions of a block of a block-causal model; 0 for any other.
    """

    vocab_size: int
    banned_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    space_id: int = -1
    noise: NoiseSchedule | None = None
    has_sampler: bool = False
    has_critic: bool = False
    has_cache: bool = False
    is_causal: bool = False
    block_length: int = 0
