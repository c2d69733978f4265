"""What the model says of texts with an edit, beside what it says of the text as it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.draw import log_prob
from dlm_jax.sampling.edits.moves import Cells, Edits, moved_cells, position_map_of
from dlm_jax.sampling.edits.protocol import EditContext, EditRule, Tried
from dlm_jax.sampling.edits.scores import LEAST
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.protocol import gather
from dlm_jax.types import Params, live_positions


def tried(
    program: Program, params: Params, context: EditContext, rule: EditRule
) -> tuple[Tried, jax.Array]:
    """The candidates of a rule with their gains, and the texts that were read of each row for that.

    Those of all rows are read at once, if any row has a candidate.
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
        if rule.num_hidden:
            return _gain_of_spans(program, params, edits, texts, rule.num_hidden)
        is_asked_KBL = _is_token(texts, program.mask_id)
        score_KB = _likelihood(program, params, texts, texts.tokens_BL, is_asked_KBL)
        return score_KB[1:] - score_KB[:1]

    no_gain_KB = jnp.zeros(is_real_KB.shape, jnp.float32)
    gain_KB = jax.lax.cond(jnp.any(is_asking_B), score, lambda: no_gain_KB)
    num_trials = is_real_KB.shape[0]
    num_texts = 2 * num_trials * _span(rule.num_hidden) if rule.num_hidden else num_trials + 1
    return Tried(edits, is_real_KB, jnp.where(is_real_KB, gain_KB, -jnp.inf)), (
        is_asking_B * num_texts
    )


def _span(num_hidden: int) -> int:
    """Tokens of the longest span: those on either side, a new one, and the one behind it."""
    return 2 * num_hidden + 2


def _gain_of_spans(
    program: Program, params: Params, edits: Edits, texts: Cells, num_hidden: int
) -> jax.Array:
    """float32 ``[K, B]``: how much likelier the tokens around each edit are than those it replaces.

    Those of a span are read from left to right: each is predicted while it and what follows in its
    span are hidden, so that their sum is the log-probability of the span together. Two texts for
    each candidate and token: with the edit, and without.
    """
    is_there_KBL = edits.insert_gap_BL | edits.delete_BL
    place_KB = jnp.argmax(is_there_KBL, axis=2)
    # From the place of the edit on: the new token, and the one that was there unless it went.
    num_new_KB = jnp.any(edits.insert_gap_BL, axis=2) + 1 - jnp.any(edits.delete_BL, axis=2)
    number = place_KB.shape[0]

    def beside(with_edit: jax.Array, without: jax.Array) -> jax.Array:
        return jnp.concatenate([with_edit, without])

    pairs = jax.tree.map(
        lambda leaf: beside(leaf[1:], jnp.broadcast_to(leaf[:1], leaf[1:].shape)), texts
    )
    begin_KB = beside(place_KB - num_hidden, place_KB - num_hidden)
    end_KB = beside(num_new_KB, jnp.ones_like(num_new_KB)) + beside(place_KB, place_KB) + num_hidden
    index_11L = jnp.arange(is_there_KBL.shape[2])[None, None]
    is_token_KBL = _is_token(pairs, program.mask_id) & (index_11L < end_KB[:, :, None])

    def one(sum_KB: jax.Array, turn: jax.Array) -> tuple[jax.Array, None]:
        at_KB1 = (begin_KB + turn)[:, :, None]
        shown_KBL = jnp.where(
            is_token_KBL & (index_11L >= at_KB1), program.mask_id, pairs.tokens_BL
        )
        is_asked_KBL = is_token_KBL & (index_11L == at_KB1)
        return sum_KB + _likelihood(program, params, pairs, shown_KBL, is_asked_KBL), None

    none_KB = jnp.zeros(begin_KB.shape, jnp.float32)
    sum_KB, _ = jax.lax.scan(one, none_KB, jnp.arange(_span(num_hidden)))
    return sum_KB[:number] - sum_KB[number:]


def _is_token(texts: Cells, mask_id: int) -> jax.Array:
    """True ``[K, B, L]`` at the tokens of texts, which are no holes."""
    num_positions = texts.tokens_BL.shape[2]
    is_live_KBL = jax.vmap(lambda length_B: live_positions(length_B, num_positions))(texts.length_B)
    return is_live_KBL & (texts.tokens_BL != mask_id)


def _likelihood(
    program: Program,
    params: Params,
    texts: Cells,
    shown_KBL: jax.Array,
    is_asked_KBL: jax.Array,
) -> jax.Array:
    """float32 ``[K, B]``: the sum of the log-probabilities of the tokens that are asked for."""
    num_texts, num_rows, num_positions = shown_KBL.shape
    # Rows come first, so that each device keeps its own.
    shown_TL, tokens_TL, is_asked_TL = (
        jnp.moveaxis(x_KBL, 0, 1).reshape(-1, num_positions)
        for x_KBL in (shown_KBL, texts.tokens_BL, is_asked_KBL)
    )
    hidden_TLD, _ = program.network.trunk(params, shown_TL, texts.length_B.T.reshape(-1), None)

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
        logprob_N = jnp.maximum(log_prob(logits_NV, tokens_P[places_N]), LEAST)
        target_N = jnp.where(is_real_N, places_N, found_P.size)
        return first + chunk, found_P.at[target_N].set(logprob_N, mode="drop")

    start = (jnp.zeros((), jnp.int32), jnp.zeros(tokens_P.size, jnp.float32))
    _, found_P = jax.lax.while_loop(lambda carry: carry[0] < num_asked, one_chunk, start)
    return found_P.reshape(tokens_TL.shape).sum(axis=1)
