"""Edit rules, which select the insertions and deletions of a step, and the state of edits."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits.moves import Cells, Edits
from dlm_jax.sampling.row import RowParams
from dlm_jax.settings import Rule, SettingError
from dlm_jax.types import Canvas, live_positions


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


class Snapshot(NamedTuple):
    """Predictions of the last forward pass at temperature 1. Values are undefined at holes.

    Attributes:
      own_BL: float32 log-probability in nats of the token at each position.
      right_BL: float32 log-probability, at each position, of the token to its right.
      best_BL: float32 log-probability of the most likely token other than the current one. (At
          positions drawn in this step, the current token is not excluded.) If the most likely token
          is banned, this is the log-probability of the current token. None if no rule reads it.
      is_due_BL: True where the token of `best_BL` equals the token to the right; None if no rule
          reads it.
      best_id_BL: int32, id of the token of `best_BL`, -1 if it is banned; None if no rule reads it.
    """

    own_BL: jax.Array
    right_BL: jax.Array
    best_BL: jax.Array | None = None
    is_due_BL: jax.Array | None = None
    best_id_BL: jax.Array | None = None


class Tried(NamedTuple):
    """K trial edits per row, with the likelihood gain of each.

    Attributes:
      edits: edits with a leading axis, ``[K, B, L]`` and ``[K, B]``.
      is_real_KB: True for trials that exist.
      gain_KB: float32 gain in nats. The gain is the sum of the log-probabilities of all tokens in
          the edited text, each predicted from the whole text, minus the same sum for the current
          text.
    """

    edits: Edits
    is_real_KB: jax.Array
    gain_KB: jax.Array


class EditContext(NamedTuple):
    """The canvas after the commits of a step, as passed to an edit rule.

    Attributes:
      cells: the canvas.
      snapshot: predictions of the last forward pass for this canvas.
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
      preference_BL: uint32, priority of each position when scores are tied; see
        `dlm_jax.sampling.commit.commit_rule.preferences`.
      tried: results of the rule's trial edits; None if the rule has none.
    """

    cells: Cells
    snapshot: Snapshot
    is_open_BL: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    mask_id: int
    space_id: int
    preference_BL: jax.Array | None = None
    tried: Tried | None = None


class EditRule(Rule):
    """Selects the edits between two steps. Only `select` is required."""

    required: ClassVar[tuple[str, ...]] = ("select",)

    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs that the rule reads: ``likeliest``, that is, ``best_BL``, ``is_due_BL`` and
    ``best_id_BL`` of the snapshot."""

    num_trials: int = 0
    """Number K of trial edits per row for `select`; static. The K edited texts and the current text
    are scored, and each scored text requires a forward pass over the row."""

    @classmethod
    def inserts(cls, row: Any) -> bool:
        """True if a row with these settings can grow."""
        return row.edit

    @classmethod
    def deletes(cls, row: Any) -> bool:
        """True if a row with these settings can shrink."""
        return row.edit

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """True if the length of a row with these settings can change."""
        return cls.inserts(row) or cls.deletes(row)

    @classmethod
    def check_trace(cls, row: Any) -> None:
        raise SettingError(
            "edit", True, "has no trace, because edits are not random draws", "use edit=False"
        )

    def is_active(self) -> jax.Array:
        """bool ``[B]``, True for rows whose length can change; all rows by default."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    def inserted_id(self, *, mask_id: int, space_id: int) -> jax.Array | int:
        """The inserted id (MASK or the space), for all rows or as int32 ``[B]``."""
        return mask_id

    def candidates(self, context: EditContext) -> tuple[Edits, jax.Array]:
        """The trial edits, ``[K, B, L]``, and bool ``[K, B]``, True where a trial exists."""
        raise NotImplementedError

    def select(self, context: EditContext) -> Edits:
        """The edits of each row, in terms of old positions. Only open positions can be edited."""
        raise NotImplementedError
