"""The static part of the denoising loop, without its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.sampling.draw import METHODS
from dlm_jax.settings import nearest
from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class Program:
    """The static part of a loop.

    Attributes:
      network: the model as pure functions.
      mask_id: the id of MASK.
      chunk: positions of one readout; trades memory (``chunk * V`` float32 logits at a time)
        against launches.
      rows: sharding of the rows over devices, which then read out and draw for their own rows only;
        None: not sharded. The number of slots must divide evenly.
      draw: method of the draw, one of `dlm_jax.sampling.draw.METHODS`.
      is_guided: whether rows may use guidance; otherwise their scale is ignored.
      eos_ids: ids that end a generation.
      banned_ids: ids that a fill cannot begin with, regardless of the row's chain, and that
        re-noise never writes.
      pad_id: the id of PAD, which edits write after the end of a row.
      space_id: the id of the space; -1 for a vocabulary without one.
      num_traced: steps of a row that are recorded; 0: none are.
    """

    network: Network
    mask_id: int
    chunk: int
    rows: NamedSharding | None = None
    draw: str = "inverse_cdf"
    is_guided: bool = False
    eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    pad_id: int = 0
    space_id: int = -1
    num_traced: int = 0

    def __post_init__(self) -> None:
        if self.draw not in METHODS:
            raise ValueError(
                f"draw={self.draw!r} is not a way to draw; {nearest(self.draw, METHODS)}"
            )

    def by_rows(self, fn: Callable[[Params, Any], Any]) -> Callable[[Params, Any], Any]:
        """``fn(params, rows)`` of a pytree of rows; each device runs its own if they are split.

        Without this, the compiler runs gathers of rows on every device for all rows, each with a
        sum over devices.
        """
        if self.rows is None:
            return fn
        split = self.rows.spec
        return jax.shard_map(
            fn,
            mesh=self.rows.mesh,
            in_specs=(PartitionSpec(), split),
            out_specs=split,
            check_vma=False,
        )
