"""Scores of insertions and deletions at each position, from the last forward pass.

The scores require no training and use two logits per position, gathered after the last commit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dlm_jax.sampling.edits.edit_rule import EditContext
from dlm_jax.sampling.positions import TrunkOutput, at_places, fold, put
from dlm_jax.sampling.program import Program
from dlm_jax.types import Params, right_of

_CHUNK = 2048


def read_logprobs(
    program: Program,
    params: Params,
    output: TrunkOutput,
    total_BL: jax.Array,
    best_id_BL: jax.Array | None,
    tokens_BL: jax.Array,
    is_read_BL: jax.Array,
) -> jax.Array:
    """float32 ``[2, B, L]`` or ``[3, B, L]``: log-probabilities in nats, at temperature 1, of the
    token at each position, of its right neighbour, and of the most likely id, if it is given.

    If the network supports it (`Network.logits_of`), only these logits are computed from the output
    matrix, because the log-normaliser `total_BL` is already known. Each device reads its own rows.
    `best_id_BL` is -1 where the id is banned; the third entry is then that of the token.
    """
    network = program.network

    def read(params: Params, rows: tuple[Any, ...]) -> jax.Array:
        output, total_BL, best_id_BL, tokens_BL, is_read_BL = rows
        # The last position has no right neighbour. Its entry is never read.
        ids = [tokens_BL, right_of(tokens_BL)]
        if best_id_BL is not None:
            ids.append(jnp.where(best_id_BL < 0, tokens_BL, best_id_BL))
        ids_BLK = jnp.stack(ids, axis=2)

        def logprob(old_BLK: jax.Array, places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            ids_NK, logits_of = at_places(ids_BLK, places_N), network.logits_of
            if logits_of is None:
                logits_NV = output.logits(network, params, places_N)
                logits_NK = jnp.take_along_axis(logits_NV, ids_NK, axis=1)
            else:
                logits_NK = output.read(lambda x_ND: logits_of(params, x_ND, ids_NK), places_N)
            total_N1 = at_places(total_BL, places_N)[:, None]
            return put(old_BLK, places_N, is_real_N, jnp.minimum(logits_NK - total_N1, 0.0))

        chunk = program.chunk if network.logits_of is None else _CHUNK
        return fold(is_read_BL, chunk, logprob, jnp.zeros(ids_BLK.shape, jnp.float32))

    rows = output, total_BL, best_id_BL, tokens_BL, is_read_BL
    return jnp.moveaxis(program.by_rows(read)(params, rows), 2, 0)


def token_uncertainty(logprob: ArrayLike, is_scored: ArrayLike) -> jax.Array:
    """The probability in [0, 1] that each token is another one, ``1 - p``; 0 where not scored.

    Args:
      logprob: float32 ``[..., L]``, log-probability in nats of the token at each position, at
        temperature 1. Values where `is_scored` is False are ignored.
      is_scored: bool ``[..., L]``, True at tokens that can be wrong: not at holes, given tokens and
        positions beyond the row.

    Source: variable-length refinement, ``uncertainty_from_logprobs``. Given tokens have
    uncertainty 0, because no token needs to be inserted between them.
    """
    # 1 - exp(x) would be 0 in float32 for nearly certain tokens, so that no score would exceed 0.
    return jnp.where(is_scored, -jnp.expm1(logprob), 0.0)


def gap_scores(uncertainty: ArrayLike) -> jax.Array:
    """The score in [0, 1] of an insertion into each gap, ``[..., L]``: at g + 1, the larger of the
    uncertainties ``[..., L]`` at g and g + 1. The score at position 0 is 0.

    A gap between given tokens or holes has score 0. An insertion directly after the prompt is
    allowed, because it changes no given token.

    Source: variable-length refinement, ``score_gaps_for_insertion``, which has entry g for the gap.
    """
    value = jnp.asarray(uncertainty)
    score = jnp.maximum(value[..., :-1], value[..., 1:])
    return jnp.pad(score, [*[(0, 0)] * (value.ndim - 1), (1, 0)])


def may_be_led(context: EditContext) -> jax.Array:
    """True at generated tokens where the most likely other token is not the right neighbour."""
    assert context.best_id_BL is not None
    is_token_BL, is_due_BL = context.is_token_BL, context.best_id_BL == right_of(context.tokens_BL)
    goes_next_BL = right_of(is_token_BL) & is_due_BL
    return is_token_BL & ~context.frozen_BL & ~goes_next_BL


def deletion_scores(
    logprob: ArrayLike,
    right_logprob: ArrayLike,
    is_token: ArrayLike,
    *,
    margin: ArrayLike,
    lookahead: ArrayLike,
) -> jax.Array:
    """The score of deleting each token, ``[..., L]``, at least 0: how much better the suffix fits
    one position to the left.

    The score at i is ``max(0, D1 - margin) + lookahead max(0, D2 - margin)``, where D1 is ``p(i,
    x_i+1) - p(i, x_i)`` and D2 is the value of D1 at i + 1. Differences that involve a hole or a
    position beyond the row are 0. The last token has no right neighbour and score 0.

    Args:
      logprob: float32 ``[..., L]``, log-probability in nats, at temperature 1, of the token at each
        position.
      right_logprob: float32 ``[..., L]``, log-probability at each position of the token to its
        right. Values of both arrays where `is_token` is False are ignored.
      is_token: bool ``[..., L]``, True at live positions that are not holes.
      margin: ``[...]``, differences of at most the margin do not count, >= 0.
      lookahead: ``[...]``, the weight of the second difference, >= 0.

    Source: variable-length refinement, ``deletion_scores_from_probs``, with ``lam`` as `lookahead`.
    ``probs[0, 1:-1, n]`` there is an outer product; here, each position reads its own distribution.
    """
    margin, lookahead = (jnp.asarray(value)[..., None] for value in (margin, lookahead))
    gain = jnp.maximum(fit_of_next(logprob, right_logprob, is_token) - margin, 0.0)
    return gain + lookahead * right_of(gain)


def fit_of_next(logprob: ArrayLike, right_logprob: ArrayLike, is_token: ArrayLike) -> jax.Array:
    """``[..., L]`` in [-1, 1]: D1, as defined in `deletion_scores`; -1 where D1 involves a hole."""
    is_pair = jnp.asarray(is_token) & right_of(jnp.asarray(is_token))
    return jnp.where(is_pair, jnp.exp(right_logprob) - jnp.exp(logprob), -1.0)
