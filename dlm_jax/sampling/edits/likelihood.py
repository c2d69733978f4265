"""An edit rule that tries its best candidates and takes one that makes the text likelier."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits import scores
from dlm_jax.sampling.edits.moves import Edits
from dlm_jax.sampling.edits.protocol import EditContext, EditRule
from dlm_jax.sampling.edits.rules import DELETE_MARGIN, INSERT_MARGIN
from dlm_jax.settings import Setting, per_row, rule, static
from dlm_jax.types import live_positions

EDIT_TRIALS = Setting(
    "edit_trials", 6,
    "likelihood: edits that are tried before one is made; each costs a forward, or with "
    "edit_hidden=H 2 (2 H + 2) of them",
    low=1, high=64,
)  # fmt: skip
EDIT_GAIN = Setting(
    "edit_gain", 0.0, "likelihood: nats by which an edit must make the text likelier, >= 0",
    low=0.0, high=1e6,
)  # fmt: skip
EDIT_HIDDEN = Setting(
    "edit_hidden", 0,
    "likelihood: tokens on either side of an edit that are hidden while texts are compared; 0 is "
    "none, and compares whole texts",
    low=0, high=16,
)  # fmt: skip
EDIT_TOKEN_GAIN = Setting(
    "edit_token_gain", 0.0,
    "likelihood: nats that a text gains by each token that it has more, or loses by each that goes",
    low=-1e6, high=1e6,
)  # fmt: skip
_NUM_KINDS = 3
_ALL = 1e3
"""Nats that no token is behind another."""


@rule
class Likelihood(EditRule):
    """Tries insertions, replacements and deletions, and makes the one that the model likes best.

    A candidate is the likeliest token of a position, in front of the one that is there or in its
    place, by the lead it has (see `dlm_jax.sampling.edits.scores.leads`), or a token that goes, by
    the lead of its successor in its place. The best of a row are tried, each alone, in one forward;
    the one that makes the sum of the log-probabilities of all tokens largest is made if that is
    more than `gain_B` above the text as it is. So there is one edit of a row in a step at most, and
    what is inserted is no hole. A row at its capacity gains no token. For models trained to
    proofread: of others the likelihood of visible tokens says little.

    With `num_hidden` the texts are compared where they differ alone: the tokens around the edit are
    hidden, and read one after the other, as if the model wrote them between what stands on either
    side. A misprint that was copied into the prediction of its own place is not believed there. So
    a candidate needs no lead, and the margins do not count: the best are tried, by how many nats a
    token is ahead of the one that is there.

    Attributes:
      insert_margin_B: float32, at least 0: what the lead of the likeliest token must exceed.
      delete_margin_B: float32, at least 0: what that of the successor must exceed.
      gain_B: float32, at least 0, in nats.
      token_gain_B: float32, nats by which an insertion counts more and a deletion less. A longer
        text has a smaller probability, whether or not it is right.
      num_trials: candidates of a row and step.
      num_hidden: tokens on either side of an edit that are hidden; see `EditRule.num_hidden`.
    """

    reads_likeliest = True

    insert_margin_B: jax.Array = per_row(INSERT_MARGIN)
    delete_margin_B: jax.Array = per_row(DELETE_MARGIN)
    gain_B: jax.Array = per_row(EDIT_GAIN)
    token_gain_B: jax.Array = per_row(EDIT_TOKEN_GAIN)
    num_trials: int = static(EDIT_TRIALS)
    num_hidden: int = static(EDIT_HIDDEN)

    @classmethod
    def check(cls, row: Any) -> None:
        """Refuses a length target, which this rule knows nothing of."""
        if row.edit and row.length_target_mode != "none":
            raise ValueError(
                f"edit_scoring='likelihood' has no length_target_mode={row.length_target_mode!r}; "
                "use edit_scoring='lead' for it"
            )

    def candidates(self, context: EditContext) -> tuple[Edits, jax.Array]:
        """The best candidates of each row; lower positions first among equal ones.

        Nothing goes that is frozen, a hole, the last of its row, or a space that no edit inserted.
        """
        cells, snapshot, mask_id = context.cells, context.snapshot, context.mask_id
        assert snapshot.best_id_BL is not None
        num_rows, num_positions = cells.tokens_BL.shape
        is_open_BL = live_positions(cells.length_B, num_positions) & context.is_open_BL
        lead_BL, misfit_BL = self._worth(context)
        is_new_BL = is_open_BL & (snapshot.best_id_BL >= 0)
        is_new_BL &= snapshot.best_id_BL != cells.tokens_BL
        is_kept_space_BL = (cells.tokens_BL == context.space_id) & ~cells.inserted_BL
        may_go_BL = is_open_BL & ~cells.frozen_BL & (cells.tokens_BL != mask_id)
        may_go_BL &= ~is_kept_space_BL
        has_room_B1 = (cells.length_B < context.capacity_B)[:, None]
        worth_BLK = jnp.stack([
            jnp.where(is_new_BL & has_room_B1, lead_BL, 0.0),
            jnp.where(is_new_BL & may_go_BL, lead_BL, 0.0),
            jnp.where(may_go_BL, misfit_BL, 0.0),
        ], axis=2)  # fmt: skip
        number = min(self.num_trials, _NUM_KINDS * num_positions)
        worth_BK, place_BK = jax.lax.top_k(worth_BLK.reshape(num_rows, -1), number)
        kind_KB1 = (place_BK % _NUM_KINDS).T[:, :, None]
        is_there_KBL = (place_BK // _NUM_KINDS).T[:, :, None] == jnp.arange(num_positions)[
            None, None
        ]
        is_real_KB = worth_BK.T > 0
        is_there_KBL &= is_real_KB[:, :, None]
        return Edits(
            is_there_KBL & (kind_KB1 != 2),
            is_there_KBL & (kind_KB1 != 0),
            jnp.zeros(is_real_KB.shape, jnp.int32),
            jnp.broadcast_to(snapshot.best_id_BL, is_there_KBL.shape),
        ), is_real_KB

    def _worth(self, context: EditContext) -> tuple[jax.Array, jax.Array]:
        """What speaks for another token at a place, and for the one there to go, if above 0."""
        cells, snapshot, mask_id = context.cells, context.snapshot, context.mask_id
        if not self.num_hidden:
            lead_BL = scores.leads(cells, snapshot, mask_id=mask_id)
            misfit_BL = scores.deletion_scores(
                cells, snapshot, self.delete_margin_B, jnp.zeros_like(self.gain_B), mask_id=mask_id
            )
            return lead_BL - self.insert_margin_B[:, None], misfit_BL
        assert snapshot.best_BL is not None and snapshot.is_due_BL is not None
        is_token_BL = scores.is_token(cells, mask_id=mask_id)
        is_pair_BL = is_token_BL & scores.right_of(is_token_BL)
        is_asked_BL = is_token_BL & ~cells.frozen_BL & ~(is_pair_BL & snapshot.is_due_BL)
        lead_BL = jnp.where(is_asked_BL, snapshot.best_BL - snapshot.own_BL, -_ALL)
        misfit_BL = jnp.where(is_pair_BL, snapshot.right_BL - snapshot.own_BL, -_ALL)
        return lead_BL + _ALL, misfit_BL + _ALL

    def select(self, context: EditContext) -> Edits:
        """The candidate with the largest gain, the first of equal ones, if it is large enough."""
        tried = context.tried
        assert tried is not None
        inserts_KB = jnp.any(tried.edits.insert_gap_BL, axis=2).astype(jnp.float32)
        deletes_KB = jnp.any(tried.edits.delete_BL, axis=2).astype(jnp.float32)
        gain_KB = tried.gain_KB + self.token_gain_B[None] * (inserts_KB - deletes_KB)
        best_B = jnp.argmax(gain_KB, axis=0)
        is_taken_B = jnp.max(gain_KB, axis=0) > self.gain_B
        edits = jax.tree.map(
            lambda x: jnp.take_along_axis(x, best_B.reshape(1, -1, *[1] * (x.ndim - 2)), 0)[0],
            tried.edits,
        )
        return edits._replace(
            insert_gap_BL=edits.insert_gap_BL & is_taken_B[:, None],
            delete_BL=edits.delete_BL & is_taken_B[:, None],
        )
