"""What is compiled into the denoising loop, and what a step has seen before it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from dlm_jax.config.sampling import nearest
from dlm_jax.sampling.commit import Proposal, View
from dlm_jax.sampling.draw import METHODS
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.propose import Filled
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.types import Network


@dataclass(frozen=True)
class Program:
    """What is compiled in.

    Attributes:
      network: the model as pure functions.
      mask_id: the id of MASK.
      chunk: positions of one readout; trades memory (``chunk * V`` float32 logits at a time)
        against launches.
      rows: how the rows of the state are split over devices, which then read out and draw for
        their own rows alone; None: not at all. The number of slots must divide evenly.
      draw: how a token is drawn, of `dlm_jax.sampling.draw.METHODS`.
      is_guided: whether rows may ask for guidance; otherwise their scale is not looked at.
      eos_id: the id that ends a generation; -1 for none.
      banned_ids: ids that a fill cannot begin with, whatever a row's chain allows, and re-noise
        never writes.
      pad_id: the id of PAD, which edits leave behind the end of a row.
      space_id: the id of the space; -1 for a vocabulary without one.
    """

    network: Network
    mask_id: int
    chunk: int
    rows: NamedSharding | None = None
    draw: str = "inverse_cdf"
    is_guided: bool = False
    eos_id: int = -1
    banned_ids: tuple[int, ...] = ()
    pad_id: int = 0
    space_id: int = -1

    def __post_init__(self) -> None:
        if self.draw not in METHODS:
            raise ValueError(
                f"draw={self.draw!r} is not a way to draw; {nearest(self.draw, METHODS)}"
            )


class Look(NamedTuple):
    """A step up to its proposal: what it saw, and what it would write.

    Attributes:
      view: what the commit rule knows.
      is_open_BL: True at the positions that have a candidate.
      is_read_BL: True at a draft's tokens that the proposal scores as they stand; None where no
        remask rule could read it.
      sight: what the trunk returned.
      context: the visible tokens.
      draw_key_B: the step's key of each row, for draws.
      remask_key_B: likewise, for the remask rule.
      filled: the candidates, and how the fill went.
      is_stepping_B: True for rows that take the step: others have ended, or are only looked at.
      may_edit_BL: True where the step's edits may happen; None in a program without edits.
    """

    view: View
    is_open_BL: jax.Array
    is_read_BL: jax.Array | None
    sight: Sight
    context: Context
    draw_key_B: jax.Array
    remask_key_B: jax.Array
    filled: Filled
    is_stepping_B: jax.Array
    may_edit_BL: jax.Array | None = None

    @property
    def proposal(self) -> Proposal:
        """The candidates."""
        return self.filled.proposal

    @property
    def is_finite_B(self) -> jax.Array:
        """False for rows whose logits cannot be drawn from."""
        return self.filled.is_finite_B
