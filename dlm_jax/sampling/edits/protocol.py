"""What an edit rule is: it chooses the gaps that get a token and the tokens that go."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits.moves import Cells, Edits
from dlm_jax.sampling.edits.scores import Snapshot
from dlm_jax.settings import Rule


class EditContext(NamedTuple):
    """What an edit rule may know, after a step's commits.

    Attributes:
      cells: the canvas.
      snapshot: what the last forward said of it.
      is_open_BL: True where tokens may go, or be put in front of what is there; in rows that are
        edited now, in the block.
      step_B: int32, number of the step that comes next.
      steps_B: int32, steps of the row.
      capacity_B: int32, most live positions, from the row's length to ``L``.
      target_B: int32, ``initial_length + max_new_tokens``, where the initial length is the number
        of frozen tokens; more than the capacity is the capacity.
      mask_id: the id of MASK.
      space_id: the id of the space; -1 for a vocabulary without one.
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


class EditRule(Rule):
    """Chooses the edits between two steps; only `select` is required."""

    required: ClassVar[tuple[str, ...]] = ("select",)

    reads_likeliest: ClassVar[bool] = False
    """Whether `select` reads ``snapshot.best_BL`` and ``snapshot.is_due_BL``."""

    @classmethod
    def inserts(cls, row: Any) -> bool:
        """Whether a row with these settings may gain tokens."""
        return row.edit

    @classmethod
    def deletes(cls, row: Any) -> bool:
        """Whether a row with these settings may lose tokens."""
        return row.edit

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Whether the length of a row with these settings may change."""
        return cls.inserts(row) or cls.deletes(row)

    def is_active(self) -> jax.Array:
        """True ``[B]`` for rows whose length may change: by default, all of them."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    def inserted_id(self, *, mask_id: int, space_id: int) -> jax.Array | int:
        """What is inserted, MASK or the space; for all rows, or int32 ``[B]``."""
        return mask_id

    def select(self, context: EditContext) -> Edits:
        """The edits of each row, at old positions; none where they are not open."""
        raise NotImplementedError
