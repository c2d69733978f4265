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
    """The static part of a loop."""

    network: Network
    mask_id: int
    # Number of positions per readout, whose logits are in memory together.
    chunk: int
    # Sharding of the rows over devices, which must divide their number; None if not sharded.
    rows: NamedSharding | None = None
    is_guided: bool = False  # False ignores the guidance scales
    eos_ids: tuple[int, ...] = ()  # ids that end a generation
    # Ids that re-noise never writes, and that starting positions of waves and `FillOutput.best_BL`
    # ignore, whatever the row's chain.
    banned_ids: tuple[int, ...] = ()
    pad_id: int = 0
    space_id: int = -1  # -1 for a vocabulary without a space
    num_traced: int = 0  # maximum number of recorded steps per row; 0 disables traces

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
