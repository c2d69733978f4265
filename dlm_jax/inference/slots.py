"""Slots: rows of one compiled program that take another request when they have ended one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.distributed.rows import OwnRows, placement
from dlm_jax.inference.candidates import Written, moved
from dlm_jax.inference.host import HostLoop
from dlm_jax.inference.kinds import Kind
from dlm_jax.inference.layout import Layout, layout_of
from dlm_jax.inference.memory import require_working_room
from dlm_jax.inference.refill import begin, refill, rows_moved
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row
from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.forward import Ready, with_cache
from dlm_jax.sampling.row import Counters
from dlm_jax.sampling.state import State
from dlm_jax.types import Params, Status


class Job(NamedTuple):
    """What a slot runs.

    Attributes:
      name: what to call it, to host samplers and in errors.
      request: it.
      waited: seconds before it came into a slot.
    """

    name: int
    request: Request
    waited: float = 0.0


class Taken(NamedTuple):
    """What a call of the loop did.

    Attributes:
      ended: the slots whose rows have ended.
      steps: int32 ``[B]``, steps that each slot's row took.
      counted: what the rows have counted, added up: those of `_TOLD`.
    """

    ended: tuple[int, ...]
    steps: np.ndarray
    counted: dict[str, int]


_TOLD = ("forwards", "waves", "bootstrapped", "filled")
"""What is told of rows while they run, of all that they count."""


class Slots:
    """A fixed number of rows of one program, each with a request or idle.

    A row's tokens depend on its request alone: in the same program they are bit for bit the same in
    any slot, among any others, and alone. Nothing compiles when a slot takes another request.

    Args:
      loop: the compiled loop, or the one of single steps that host samplers and read-back need.
      params: parameters of its network.
      kind: of the requests that it may run.
      num_slots: rows that run at once; the devices that split them must divide it. If the devices
        belong to several processes, each has an equal share of the slots, and all must call `put`
        and `advance` together.
      max_candidates: how many of a position's candidates come to the host at most.

    Raises:
      ValueError: a compiled loop for rows that need the host.
    """

    def __init__(
        self,
        loop: Advance | HostLoop,
        params: Params,
        kind: Kind,
        num_slots: int,
        *,
        max_candidates: int = 64,
    ):
        if kind.static.needs_host and not isinstance(loop, HostLoop):
            raise ValueError("rows that need the host run in a HostLoop; make one")
        self.loop, self.kind = loop, kind
        self._params, self._max_candidates = params, max_candidates
        self._own = OwnRows(placement(loop.program.rows, params), num_slots)
        self._num_slots, num_own = num_slots, self._own.count
        self._state: State | None = None
        self._layout: Layout | None = None
        self._jobs: list[Job | None] = [None] * num_own
        self._began = [0.0] * num_own
        self._read_back: list[list[Written]] = [[] for _ in range(num_own)]
        self._failed: dict[int, Exception] = {}
        self._steps = np.zeros(num_own, np.int32)
        self._counted = np.zeros((len(_TOLD), num_own), np.int32)

    @property
    def num_slots(self) -> int:
        """Rows that run at once, those of other processes too."""
        return self._num_slots

    @property
    def held(self) -> tuple[int, ...]:
        """The slots that have a request."""
        return tuple(slot for slot, job in enumerate(self._jobs) if job is not None)

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that have none."""
        return tuple(slot for slot, job in enumerate(self._jobs) if job is None)

    def put(self, new: Mapping[int, Job | None]) -> None:
        """Gives slots other requests, or takes what they run away, for None."""
        for slot, job in new.items():
            self._jobs[slot], self._read_back[slot] = job, []
            self._steps[slot] = self._counted[:, slot] = 0
            self._failed.pop(slot, None)
        arguments = self._arguments({slot: job for slot, job in new.items() if job is not None})
        mask_id = self.loop.program.mask_id
        if self._state is None:
            # Of its own rows alone, and then placed with those of the others.
            state = begin(arguments, mask_id=mask_id)
            state = with_cache(self.loop.program, self._params, state)
            self._state = state = self._own.place(state)
            require_working_room(self.loop, self._params_read(state), state)
        else:
            is_new = np.zeros(len(self._jobs), bool)
            is_new[list(new)] = True
            arguments, is_new_B = self._own.passed((arguments, is_new))
            self._state = refill(self._state, arguments, is_new_B, mask_id=mask_id)
        now = time.perf_counter()
        for slot in new:
            self._began[slot] = now

    def advance(self, num_steps: int, num_ends: int | None = None) -> Taken:
        """Takes up to `num_steps` steps of every row; a `HostLoop` takes one.

        It comes back sooner when `num_ends` rows have ended. A row that a host sampler fails ends
        with `Status.FAILED`: as it stood before that step, or after it where `accept` failed.
        """
        state = self._state
        assert state is not None
        if isinstance(self.loop, Advance):
            limits = [limit for limit in (num_steps, num_ends) if limit is not None]
            if self._own.share[1] > 1:
                # A number of the host is the same on every device; an array lies on one of them.
                limits = [np.int32(limit) for limit in limits]
            state = self.loop(self._params_read(state), state, *limits)
        else:
            state = self._step_on_host(self.loop, state)
        self._state = state
        counters = [getattr(state.counters, name) for name in _TOLD]
        steps, counted, status = self._own.fetch((state.step_B, counters, state.status_B))
        taken, more = steps - self._steps, np.stack(counted) - self._counted
        self._steps, self._counted = np.array(steps), np.stack(counted)
        has_ended = (status != Status.RUNNING).tolist()
        ended = tuple(slot for slot in self.held if has_ended[slot])
        return Taken(ended, taken, dict(zip(_TOLD, more.sum(1).tolist(), strict=True)))

    def take_out(self, slots: Iterable[int]) -> None:
        """Forgets the requests of slots whose rows have ended."""
        for slot in slots:
            self._jobs[slot], self._read_back[slot] = None, []

    def resized(self, loop: Advance | HostLoop, num_slots: int) -> Slots:
        """The rows that run here in another number of slots, which holds them all.

        Do not use these slots again.
        """
        made = Slots(loop, self._params, self.kind, num_slots, max_candidates=self._max_candidates)
        made._layout = self._layout
        held = self.held
        index = np.zeros(num_slots, np.int32)
        index[: len(held)] = held
        if self._state is not None:
            is_held = np.arange(num_slots) < len(held)
            state = rows_moved(self._state, jnp.asarray(index), jnp.asarray(is_held))
            made._state = made._own.place(state)
        for place, slot in enumerate(held):
            made._jobs[place], made._began[place] = self._jobs[slot], self._began[slot]
            made._read_back[place] = self._read_back[slot]
            if slot in self._failed:
                made._failed[place] = self._failed[slot]
            made._steps[place] = self._steps[slot]
            made._counted[:, place] = self._counted[:, slot]
        return made

    def num_committed(self) -> int:
        """Tokens that the running rows have written."""
        if self._state is None:
            return 0
        return int((self._own.fetch(self._state.committed_BL)[list(self.held)] >= 0).sum())

    def job(self, slot: int) -> Job:
        """What a slot runs."""
        job = self._jobs[slot]
        assert job is not None
        return job

    def rows(self, slots: Sequence[int]) -> dict[int, Row]:
        """The rows of these slots as they stand now."""
        if not slots:
            return {}
        state = self._state
        assert state is not None
        edits = state.edits
        tokens, frozen, logprobs, committed, length, steps, block, status, origin, counters = (
            self._own.fetch(
                (
                    state.canvas.tokens_BL, state.canvas.frozen_BL, state.logprob_BL,
                    state.committed_BL, state.canvas.length_B, state.step_B, state.block.index_B,
                    state.status_B, None if edits is None else edits.origin_BL, state.counters,
                )
            )
        )  # fmt: skip
        now = time.perf_counter()
        rows = {}
        for slot in slots:
            n, error = int(length[slot]), self._failed.get(slot)
            rows[slot] = Row(
                tokens=tokens[slot, :n].copy(),
                is_frozen=frozen[slot, :n].copy(),
                logprobs=logprobs[slot, :n].copy(),
                committed=np.maximum(committed[slot, :n], -1),
                steps=int(steps[slot]),
                block=int(block[slot]),
                status=Status(int(status[slot])) if error is None else Status.FAILED,
                counters=Counters(*(int(count_B[slot]) for count_B in counters)),
                origin=None if origin is None else origin[slot, :n].copy(),
                read_back=tuple(self._read_back[slot]),
                error=error,
                waited=self.job(slot).waited,
                seconds=now - self._began[slot],
            )
        return rows

    def _params_read(self, state: State) -> Any:
        """The parameters as the loop takes them, laid out if it has a cache."""
        if state.cache is None:
            return self._params
        self._layout = self._layout or layout_of(self.loop.program, self._params)
        ready = self._layout.ready
        return Ready(ready) if isinstance(self.loop, Advance) else ready

    def _arguments(self, new: Mapping[int, Job]) -> dict[str, Any]:
        """Arguments of `start` with these at their slots, and idle ones besides: host arrays."""
        num_slots, size = len(self._jobs), self.kind.canvas
        tokens = np.full((num_slots, size), self.loop.program.pad_id, np.int32)
        is_frozen = np.ones((num_slots, size), bool)
        length = np.zeros(num_slots, np.int32)
        for slot, job in new.items():
            request = job.request
            length[slot] = n = request.tokens.size
            tokens[slot, :n] = request.tokens
            if request.is_draft is not None:
                is_frozen[slot, :n] = ~request.is_draft
        # Idle slots have the parameters of some request, and no position.
        packed = self.kind.pack([job.request for job in new.values()])
        index = {slot: place for place, slot in enumerate(new)}
        places = np.array([index.get(slot, 0) for slot in range(num_slots)])
        row, rules = jax.tree.map(lambda leaf: leaf[places], packed)
        arrays = {"tokens_BL": tokens, "length_B": length, "frozen_BL": is_frozen}
        return arrays | {"row": row, "rules": rules}

    def _step_on_host(self, loop: HostLoop, state: State) -> State:
        held = [(slot, self.job(slot)) for slot in self.held]
        requests = [(slot, job.request) for slot, job in held]
        state, written = loop.step(
            self._params_read(state),
            state,
            {slot: r.host_sampler for slot, r in requests if r.host_sampler is not None},
            read_back=[slot for slot, r in requests if r.read_back],
            max_candidates=self._max_candidates,
            names=[-1 if job is None else job.name for job in self._jobs],
            failed=self._failed,
        )
        slots = {job.name: slot for slot, job in held}
        for record in written:
            self._read_back[slots[record.candidates.row]].append(record)
        if state.edits is not None:
            origin_BL, length_B = jax.device_get((state.edits.origin_BL, state.canvas.length_B))
            for slot in self.held:
                origin_L = origin_BL[slot, : length_B[slot]]
                self._read_back[slot] = moved(self._read_back[slot], origin_L)
        return state
