"""Edit rules, which select the insertions and deletions of a step, their state, and what they read:
the log-probabilities of the step's forward pass, and those of edited texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import StepRule
from dlm_jax.sampling.edits.moves import Edits, moved, position_map_of
from dlm_jax.sampling.positions import TrunkOutput, at_places, fold, hidden, logits, put
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.vocab import log_prob
from dlm_jax.types import Canvas, Params, live_positions, right_of

_CHUNK = 2048
LEAST = -100.0
"""Log-probability in nats that is assigned to impossible tokens. The value is finite, so that texts
that share such a token can be compared."""


class EditState(NamedTuple):
    """The state of the edits in each row.

    Attributes:
      inserted_BL: True at inserted positions, including overwritten ones.
      mark_BL: True at the marks of the last step's edits.
      origin_BL: int32, index of each position at the last call to `Advance`; -1 if the position is
        new.
      capacity_B: int32, maximum number of live positions.
      target_B: int32, target length.
      warms_B: True for rows whose draft is scored and edited before the first step.
    """

    inserted_BL: jax.Array
    mark_BL: jax.Array
    origin_BL: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    warms_B: jax.Array


def start_edits(rule: EditRule, canvas: Canvas, row: RowParams, *, mask_id: int) -> EditState:
    """The state before the first step of rows with these parameters."""
    tokens_BL, length_B, frozen_BL = canvas
    num_positions = tokens_BL.shape[1]
    is_free_BL = live_positions(length_B, num_positions) & ~frozen_BL
    free_B = jnp.sum(is_free_BL, axis=1)
    new_B = jnp.where(row.max_new_B > 0, row.max_new_B, free_B)
    capacity_B = jnp.maximum(row.capacity_B, length_B)
    has_draft_B = jnp.any(is_free_BL & (tokens_BL != mask_id), axis=1)
    none_BL = jnp.zeros(tokens_BL.shape, bool)
    return EditState(
        inserted_BL=none_BL,
        mark_BL=none_BL,
        origin_BL=places(tokens_BL),
        capacity_B=jnp.minimum(capacity_B, num_positions).astype(jnp.int32),
        target_B=(length_B - free_B + new_B).astype(jnp.int32),
        warms_B=rule.is_active() & has_draft_B,
    )


def places(x_BL: jax.Array) -> jax.Array:
    """int32 ``[B, L]``, the index of each position."""
    return jnp.broadcast_to(jnp.arange(x_BL.shape[1], dtype=jnp.int32), x_BL.shape)


class EditContext(NamedTuple):
    """The canvas after the commits of a step, and the predictions of the step's forward pass for it
    at temperature 1, in nats; these are undefined at holes.

    Attributes:
      tokens_BL: int32; MASK at holes, PAD after the end of the row.
      frozen_BL: True at given tokens (which can move but never change) and beyond the length.
      inserted_BL: True at inserted positions, including overwritten ones.
      mark_BL: True at the marks of the last step's edits, for the cooldown.
      length_B: int32, number of live positions in each row.
      own_BL: float32 log-probability of the token at each position.
      right_BL: float32 log-probability, at each position, of the token to its right.
      is_open_BL: True where edits can delete the token or insert a token before it; only in the
        current block, in rows with edits.
      step_B: int32, index of the next step.
      steps_B: int32, total number of steps of the row.
      capacity_B: int32, maximum number of live positions; at least the row's length and at most
        ``L``.
      target_B: int32, ``initial_length + max_new_tokens``, where the initial length is the number
        of frozen tokens; at most the capacity.
      mask_id: the id of MASK.
      space_id: the id of the space; -1 for a vocabulary without one.
      preference_BL: uint32, priority of each position when scores are tied.
      best_id_BL: int32, most likely id other than the current one, -1 if it is banned; None if the
        rule does not need it. At positions drawn in this step, the current id is not excluded.
      best_BL: float32 log-probability of that id, or of the current token if the id is banned.
      gain: ``(edits, is_real_KB) -> gain_KB``, the gain in nats of K trial edits per row, with a
        leading axis ``[K, ...]``, each made alone: the sum of the log-probabilities of all tokens
        in the edited text, each predicted from the whole text, minus the same sum for the current
        text; -inf for trials that are not real. It takes K + 1 forward passes, which the rule
        reports in `Edits.forwards_B`.
    """

    tokens_BL: jax.Array
    frozen_BL: jax.Array
    inserted_BL: jax.Array
    mark_BL: jax.Array
    length_B: jax.Array
    own_BL: jax.Array
    right_BL: jax.Array
    is_open_BL: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    mask_id: int
    space_id: int
    preference_BL: jax.Array | None = None
    best_id_BL: jax.Array | None = None
    best_BL: jax.Array | None = None
    gain: Callable[[Edits, jax.Array], jax.Array] | None = None

    @property
    def is_live_BL(self) -> jax.Array:
        return live_positions(self.length_B, self.tokens_BL.shape[1])

    @property
    def is_token_BL(self) -> jax.Array:
        """True at live positions that are not holes."""
        return self.is_live_BL & (self.frozen_BL | (self.tokens_BL != self.mask_id))

    @property
    def is_removable_BL(self) -> jax.Array:
        """True at tokens that can be edited, are not given, and are no space of the text itself."""
        is_own_space_BL = (self.tokens_BL == self.space_id) & ~self.inserted_BL
        is_open_BL = self.is_live_BL & self.is_open_BL
        return is_open_BL & ~self.frozen_BL & (self.tokens_BL != self.mask_id) & ~is_own_space_BL


class EditRule(StepRule, ABC):
    """Selects the edits between two steps. Only `select` is required.

    It can need ``likeliest``, that is, ``best_id_BL`` and ``best_BL`` of the context.
    """

    def score(self, context: EditContext) -> Any:
        """The scores of the edits, in any form."""
        return ()

    @abstractmethod
    def select(self, context: EditContext, scores: Any) -> Edits:
        """The edits of each row, in terms of old positions, given the result of `score`. Only open
        positions can be edited.
        """


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


def gain_of_edits(
    program: Program, params: Params, context: EditContext, edits: Edits, is_real_KB: jax.Array
) -> jax.Array:
    """float32 ``[K, B]``; see `EditContext.gain`. All rows are scored together if any row has a
    trial. Holes add 0 to the log-probability of a text.
    """
    num_positions = context.tokens_BL.shape[1]

    def edit(*one: jax.Array) -> tuple[jax.Array, jax.Array]:
        edits = Edits(*one)
        position_map = position_map_of(
            edits, context.frozen_BL, context.length_B, context.capacity_B
        )
        tokens_BL = moved(position_map, context.tokens_BL, edits.token, program.pad_id)
        return tokens_BL, position_map.length_B

    def sums(params: Params, texts: tuple[jax.Array, ...]) -> jax.Array:
        hidden_TLD, tokens_TL, is_scored_TL = texts

        def score(sum_TL: jax.Array, places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            logits_NV = logits(program.network, params, at_places(hidden_TLD, places_N))
            logprob_N = jnp.maximum(log_prob(logits_NV, at_places(tokens_TL, places_N)), LEAST)
            return put(sum_TL, places_N, is_real_N, logprob_N)

        none_TL = jnp.zeros(tokens_TL.shape, jnp.float32)
        return fold(is_scored_TL, program.chunk, score, none_TL).sum(axis=1)

    def gain() -> jax.Array:
        tokens_KBL, length_KB = jax.vmap(edit)(*edits[:3])
        tokens_KBL = jnp.concatenate([context.tokens_BL[None], tokens_KBL])
        length_KB = jnp.concatenate([context.length_B[None], length_KB])
        # The rows come first in the merged axis, so each device scores its own rows.
        tokens_TL = jnp.moveaxis(tokens_KBL, 0, 1).reshape(-1, num_positions)
        length_T = length_KB.T.reshape(-1)
        is_scored_TL = live_positions(length_T, num_positions) & (tokens_TL != program.mask_id)
        hidden_TLD = hidden(program.network, params, tokens_TL, length_T)
        sum_T = program.by_rows(sums)(params, (hidden_TLD, tokens_TL, is_scored_TL))
        logprob_KB = sum_T.reshape(length_KB.shape[::-1]).T
        return logprob_KB[1:] - logprob_KB[:1]

    no_gain_KB = jnp.zeros(is_real_KB.shape, jnp.float32)
    gain_KB = jax.lax.cond(jnp.any(is_real_KB), gain, lambda: no_gain_KB)
    return jnp.where(is_real_KB, gain_KB, -jnp.inf)
