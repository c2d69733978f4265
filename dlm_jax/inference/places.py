"""The positions that the host looks at in a step, and what is known of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.inference.candidates import HostSampler
from dlm_jax.sampling.inputs import StepInputs
from dlm_jax.sampling.state import State


class Place(NamedTuple):
    """A position that the host looks at, in a row of the batch, and what is known of that row."""

    slot: int
    name: int
    sampler: HostSampler | None
    index: int
    step: int
    tokens: np.ndarray
    is_hole: np.ndarray
    first: int


def open_places(
    state: State,
    inputs: StepInputs,
    slots: Sequence[int],
    samplers: Mapping[int, HostSampler],
    names: Sequence[int] | None,
    *,
    mask_id: int,
) -> list[Place]:
    """Every open position of the rows at `slots` whose logits are finite."""
    rows = jnp.asarray(slots, jnp.int32)
    canvas = state.canvas
    is_hole_BL = (canvas.tokens_BL == mask_id) & ~canvas.frozen_BL
    is_open, is_hole, tokens, is_frozen, lengths, steps = jax.device_get(
        (
            (inputs.masks.is_open_BL & inputs.is_finite_B[:, None])[rows],
            is_hole_BL[rows],
            canvas.tokens_BL[rows],
            canvas.frozen_BL[rows],
            canvas.length_B[rows],
            state.step_B[rows],
        )
    )
    return [
        Place(
            slot=slot,
            name=slot if names is None else names[slot],
            sampler=samplers.get(slot),
            index=int(index),
            step=int(steps[number]),
            tokens=tokens[number][: lengths[number]],
            is_hole=is_hole[number][: lengths[number]],
            first=int(np.argmin(is_frozen[number])),
        )
        for number, slot in enumerate(slots)
        for index in np.flatnonzero(is_open[number])
    ]
