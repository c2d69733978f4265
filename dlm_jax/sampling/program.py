"""The static part of the denoising loop, without its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class Program:
    """The static part of a loop.

    Attributes:
      network: the model as pure functions.
      mask_id: the id of MASK.
      chunk: number of positions per readout. Larger chunks need more memory (``chunk * V`` float32
        logits) but fewer kernel launches.
      rows: sharding of the rows over devices, which must divide their number; None if not sharded.
      is_guided: False if the guidance scale of every row is ignored.
      eos_ids: ids that end a generation.
      banned_ids: ids that re-noise never writes, and that starting positions of waves and
        ``FillOutput.best_BL`` ignore regardless of the row's chain.
      pad_id: the id of PAD, which edits write after the end of a row.
      space_id: the id of the space; -1 for a vocabulary without one.
      num_traced: maximum number of recorded steps per row; 0 disables traces.
    """

    network: Network
    mask_id: int
    chunk: int
    rows: NamedSharding | None = None
    is_guided: bool = False
    eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    pad_id: int = 0
    space_id: int = -1
    num_traced: int = 0

    def by_rows(self, fn: Callable[[Params, Any], Any]) -> Callable[[Params, Any], Any]:
        """Wraps ``fn(params, rows)``, where `rows` is a pytree of rows, so that each device
        computes only its own rows. Otherwise, the compiler would gather all rows on every device.
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
