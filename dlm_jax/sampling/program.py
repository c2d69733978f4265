"""What a loop is compiled for, the settings and counters of its rows, and ratios that change over
a row's steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.settings import Rule, Setting, fact, per_row, require, rule
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


STEPS = Setting(
    "steps", 128, "denoising steps per sample", 1, aliases=("num_steps", "diffusion_steps")
)
TIES = Setting(
    "ties",
    "key",
    "positions that tie within float rounding: in random order (key), or lower ones first (lower)",
    choices={"key": "key", "lower": "lower"},
    is_preset=True,
)


@rule
class RowParams(Rule):
    """Per-row parameters of the loop, ``[B]`` each. The defaults disable optional features.

    In a block-causal model, blocks start at multiples of ``block_unit``. The caller sets which rows
    end at their EOS (None: all); the seeds, uint32; and the capacities, int32: the maximum number
    of live positions, which edits read.
    """

    steps_B: jax.Array = per_row(STEPS)
    block_length_B: jax.Array = per_row(
        Setting("block_length", 0, "tokens per block; blocks are finished in order; 0: one", 0)
    )
    guidance_B: jax.Array = per_row(
        Setting(
            "guidance",
            0.0,
            "classifier-free guidance towards the given tokens; above 0, it costs a forward pass",
            low=0.0,
            high=1e6,
            aliases=("cfg_scale",),
        )
    )
    resamples_B: jax.Array = per_row(
        Setting("resample", False, "treat every token that is not given as a hole at every step")
    )
    max_new_B: jax.Array = per_row(
        Setting("max_new_tokens", 0, "length_target_mode: 0: the initial number", 0, 2**20 - 1)
    )
    ties_B: jax.Array = per_row(TIES)
    block_unit: int = fact("block_length", 0)
    stops_at_eos_B: Any = None
    seed_B: Any = None
    capacity_B: Any = None


ROW_SETTINGS = RowParams.settings()


def check_space(name: str, row: Any, facts: Any, does: str) -> None:
    """Raises `SettingError` for the value ``space`` of a setting if no space can be written."""
    remedy, why = f"use {name}='mask'", "requires a space token, which the tokenizer lacks"
    require(facts.space_id >= 0, name, "space", why, remedy)
    is_banned = (facts.space_id, -math.inf) in row.logit_bias
    require(not is_banned, name, "space", f"{does} spaces, which logit_bias bans", remedy)


class Counters(NamedTuple):
    """Counters of each row: int32 ``[B]`` in the state, plain numbers in results."""

    # A forward pass over a block counts like a forward pass over a whole row.
    forwards: Annotated[Any, "Forward passes of the model."] = 0
    positions: Annotated[Any, "Live positions computed by forward passes with a cache."] = 0
    waves: Annotated[Any, "Waves of wavefront fills."] = 0
    bootstrapped: Annotated[Any, "Positions drawn by the LM head in wavefront fills."] = 0
    filled: Annotated[Any, "Candidates drawn."] = 0
    insertions: Annotated[Any, "Tokens inserted by edits."] = 0
    deletions: Annotated[Any, "Tokens deleted by edits."] = 0
    lost: Annotated[Any, "Insertions rejected, or tokens dropped, for lack of space."] = 0

    @classmethod
    def helps(cls) -> dict[str, str]:
        """The help text of each counter."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: hints[name].__metadata__[0] for name in cls._fields}

    def plus(self, more: Counters) -> Counters:
        """The sum of these counters and `more`."""
        return Counters(*(old + new for old, new in zip(self, more, strict=True)))


SCHEDULES = {"linear": "linear", "cosine": "cosine"}
"""Schedules, as the choices of a setting."""


def ratio_at(
    start_B: jax.Array, end_B: jax.Array, step_B: jax.Array, steps_B: jax.Array, *, schedule: str
) -> jax.Array:
    """float32 ``[B]`` ratio that changes from `start_B` at the first step to `end_B` at the last.

    With ``t = step / (steps - 1)``, the linear schedule is ``start + (end - start) t``, and the
    cosine schedule is ``end + (start - end) (1 + cos(pi t)) / 2``. With a single step, the ratio is
    `start_B`.
    """
    share_B = jnp.minimum(step_B.astype(jnp.float32) / jnp.maximum(steps_B - 1, 1), 1.0)
    if schedule == "linear":
        ratio_B = start_B + (end_B - start_B) * share_B
    else:
        ratio_B = end_B + (start_B - end_B) * 0.5 * (1.0 + jnp.cos(jnp.pi * share_B))
    return jnp.where(steps_B <= 1, start_B, ratio_B)
