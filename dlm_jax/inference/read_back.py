"""What the final logits say about each drawn token, for the caller to read back.

Per position the sampled token, its probability, how many candidates survived the chain, and the
largest of them with their logits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import draw, vocab


class ReadBack(NamedTuple):
    """One position's draw, N times.

    Attributes:
      token_N: int32 ids.
      probability_N: of the token under the softmax of the final logits.
      num_candidates_N: int32, finite logits; more than K means that `top_*` shows a part.
      top_ids_NK: int32, the K largest candidates, largest first; V where there are fewer.
      top_logits_NK: their logits; -inf where there are fewer.
    """

    token_N: Array
    probability_N: Array
    num_candidates_N: Array
    top_ids_NK: Array
    top_logits_NK: Array


def read_back(final_logits_NV: Array, token_N: Array, *, size: int) -> ReadBack:
    """The `ReadBack` of tokens drawn from `final_logits`, with `size` (static) candidates."""
    logits_NV = final_logits_NV.astype(jnp.float32)
    V = logits_NV.shape[1]
    top_NK, ids_NK = vocab.largest(logits_NV, min(size, V))
    count_N, _ = vocab.count_and_entropy(logits_NV)
    return ReadBack(
        token_N=token_N,
        probability_N=jnp.exp(draw.log_prob(logits_NV, token_N)),
        num_candidates_N=count_N.astype(jnp.int32),
        top_ids_NK=jnp.where(top_NK > -jnp.inf, ids_NK, V).astype(jnp.int32),
        top_logits_NK=top_NK,
    )
