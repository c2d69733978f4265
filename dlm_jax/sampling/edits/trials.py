"""What the model says of texts with an edit, beside what it says of the text as it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.draw import log_prob
from dlm_jax.sampling.edits.moves import Cells, Edits, moved_cells, position_map_of
from dlm_jax.sampling.edits.protocol import EditContext, EditRule, Tried
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.protocol import gather
from dlm_jax.types import Params, live_positions

_LEAST = -100.0
"""Nats that an impossible token counts, so that texts which share one can be compared."""


def tried(
    program: Program, params: Params, context: EditContext, rule: EditRule
) -> tuple[Tried, jax.Array]:
    """The candidates of a rule with their gains, and the forwards that each row asked for.

    The texts of all rows run in one forward of ``B (K + 1)`` rows, if any row has a candidate.
    """
    edits, is_real_KB = rule.candidates(context)
    is_asking_B = jnp.any(is_real_KB, axis=0)
    as_it_is = jax.tree.map(jnp.zeros_like, context.cells.tokens_BL)
    none = Edits(as_it_is > 0, as_it_is > 0, as_it_is[:, 0], as_it_is)
    all_of_them = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), none, edits)

    def text(edits: Edits) -> Cells:
        position_map = position_map_of(edits, context.cells, context.capacity_B)
        assert edits.token_BL is not None
        return moved_cells(position_map, context.cells, edits.token_BL, pad_id=program.pad_id)

    def score() -> jax.Array:
        texts = jax.vmap(text)(all_of_them)
        return _likelihood(program, params, texts.tokens_BL, texts.length_B)

    score_KB = jax.lax.cond(
        jnp.any(is_asking_B), score, lambda: jnp.zeros(all_of_them.refused_B.shape, jnp.float32)
    )
    gain_KB = jnp.where(is_real_KB, score_KB[1:] - score_KB[:1], -jnp.inf)
    return Tried(edits, is_real_KB, gain_KB), is_asking_B * (1 + is_real_KB.shape[0])


def _likelihood(
    program: Program, params: Params, tokens_KBL: jax.Array, length_KB: jax.Array
) -> jax.Array:
    """float32 ``[K, B]``: the sum of the log-probabilities of the tokens, without the holes."""
    num_texts, num_rows, num_positions = tokens_KBL.shape
    # Rows come first, so that each device keeps its own.
    tokens_TL = jnp.moveaxis(tokens_KBL, 0, 1).reshape(-1, num_positions)
    length_T = length_KB.T.reshape(-1)
    hidden_TLD, _ = program.network.trunk(params, tokens_TL, length_T, None)
    is_asked_TL = live_positions(length_T, num_positions) & (tokens_TL != program.mask_id)

    def of_rows(params: Params, texts: tuple[Any, ...]) -> jax.Array:
        return _sums(program, params, *texts)

    sum_T = program.by_rows(of_rows)(params, (hidden_TLD, tokens_TL, is_asked_TL))
    return sum_T.reshape(num_rows, num_texts).T


def _sums(
    program: Program,
    params: Params,
    hidden_TLD: jax.Array,
    tokens_TL: jax.Array,
    is_asked_TL: jax.Array,
) -> jax.Array:
    chunk = min(program.chunk, tokens_TL.size)
    flat, num_asked = gather(is_asked_TL, chunk)
    hidden_PD = hidden_TLD.reshape(-1, hidden_TLD.shape[-1])
    tokens_P = tokens_TL.reshape(-1)

    def one_chunk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, found_P = carry
        places_N = jax.lax.dynamic_slice(flat, (first,), (chunk,))
        is_real_N = first + jnp.arange(chunk) < num_asked
        logits_NV = program.network.readout(params, hidden_PD[places_N])
        logprob_N = jnp.maximum(log_prob(logits_NV, tokens_P[places_N]), _LEAST)
        target_N = jnp.where(is_real_N, places_N, found_P.size)
        return first + chunk, found_P.at[target_N].set(logprob_N, mode="drop")

    start = (jnp.zeros((), jnp.int32), jnp.zeros(tokens_P.size, jnp.float32))
    _, found_P = jax.lax.while_loop(lambda carry: carry[0] < num_asked, one_chunk, start)
    return found_P.reshape(tokens_TL.shape).sum(axis=1)
