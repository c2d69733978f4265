"""How much of a step's time the trunk takes: both measured side by side, for the same rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dlm_jax import devices
from dlm_jax.distributed.rows import num_shares, spans_processes, split_rows
from dlm_jax.inference.generate import all_requests
from dlm_jax.inference.kinds import Kind, slot_count
from dlm_jax.inference.model import Model
from dlm_jax.inference.programs import loop_of
from dlm_jax.inference.request import group
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.slots import Job, Slots
from dlm_jax.model import cpu

_STEPS, _ROUNDS = 8, 5


class StepTime(NamedTuple):
    """What a step of a program takes.

    Attributes:
      rows: slots of the program.
      canvas: positions of each.
      step: seconds of a step.
      trunk: seconds of a forward of the trunk alone, on a canvas of that size.
      forwards: of the trunk in a step.
    """

    rows: int
    canvas: int
    step: float
    trunk: float
    forwards: float

    @property
    def sampling(self) -> float:
        """Share of a step that is not the trunk's; a little below 0 where it is lost in noise."""
        return 1 - self.trunk * self.forwards / self.step


def step_time(
    model: Model,
    prompts: Sequence[str | Mapping[str, Any]],
    *,
    num_samples: int = 1,
    batch_size: int = 64,
    **common: Any,
) -> StepTime:
    """What a step of the rows of such a call takes, of those that most run in one program.

    Their first steps are run several times, in turn with the trunk alone.

    Raises:
      ValueError: as `generate`; or a cache lets steps compute parts of rows, or the devices belong
        to several processes.
    """
    requests = all_requests(model, prompts, num_samples, common)
    groups = group(requests).values()
    members = [requests[place] for place in max(groups, key=len)][:batch_size]
    if members[0].sample.cache != "none":
        raise ValueError(
            f"cache={members[0].sample.cache!r} lets steps compute parts of rows, which no forward "
            "of the trunk alone stands for; use cache='none'"
        )
    split = split_rows(model.params)
    if spans_processes(split):
        raise ValueError("a step is timed in one process; drop the others")
    kind = Kind(members, model.facts, canvas_size(max(request.room for request in members)))
    size = slot_count(len(members), batch_size, num_shares(split))
    loop = loop_of(model, kind, size)
    forwards: list[float] = []

    def steps() -> float:
        slots = Slots(loop, model.params, kind, size)
        slots.put({place: Job(place, request) for place, request in enumerate(members)})
        began = time.perf_counter()
        taken = slots.advance(_STEPS)
        seconds = time.perf_counter() - began
        forwards.append(taken.counted["forwards"] / max(1, int(taken.steps.sum())))
        return seconds / max(1, int(taken.steps.max()))

    tokens_BL = np.full((size, kind.canvas), model.tokenizer.mask_id, np.int32)
    length_B = np.array([(members * size)[slot].tokens.size for slot in range(size)], np.int32)
    if split is not None:
        tokens_BL, length_B = jax.device_put((tokens_BL, length_B), split)
    options = cpu.compiler_options(is_training=False)
    trunk = jax.jit(_trunk_of(model, loop.program.rows), compiler_options=options)

    def one() -> float:
        began = time.perf_counter()
        jax.block_until_ready(trunk(model.params, tokens_BL, length_B))
        return time.perf_counter() - began

    # The first round may compile.
    found = [(steps(), one()) for _ in range(1 + _ROUNDS)][1:]
    step, alone = (statistics.median(times) for times in zip(*found, strict=True))
    return StepTime(size, kind.canvas, step, alone, statistics.median(forwards))


def _trunk_of(model: Model, rows: Any) -> Callable[..., jax.Array]:
    def trunk(params: Any, tokens_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        with devices.used(rows):
            return model.network.trunk(params, tokens_BL, length_B, None)[0]

    return trunk
