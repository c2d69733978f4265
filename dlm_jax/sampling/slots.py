"""Slots: rows of one compiled program that take the next request when they have finished one."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.candidates import Written
from dlm_jax.sampling.host import HostLoop
from dlm_jax.sampling.placement import placement
from dlm_jax.sampling.request import Request
from dlm_jax.sampling.rules import Functions
from dlm_jax.sampling.state import State, start
from dlm_jax.types import Params, Status

STEPS_PER_CALL = 8
_IDLE_SHARE = 16


@dataclass(frozen=True)
class Row:
    """One row as it stands, without the padding of its slot.

    Attributes:
      tokens: int32 ``[n]``, MASK at holes.
      is_frozen: True at given tokens.
      logprobs: float32 ``[n]``, log-probability in nats of each generated token under the clean
        logits it was drawn from; 0 at given tokens and holes.
      committed: int32 ``[n]``, the step that wrote each token, from 0; -1 at given tokens, holes,
        tokens of a draft, and those that an edit or re-noise put there.
      steps: taken so far.
      forwards: of the trunk, that the row has asked for.
      waves: of the sampler head's fills; 0 where all candidates were drawn in parallel.
      seeds: positions that the LM head seeded in those fills.
      filled: candidates drawn in all steps.
      insertions: tokens that edits inserted so far.
      deletions: tokens that they deleted.
      lost: insertions that found no room, and tokens that insertions pushed out.
      origin: int32 ``[n]``, where each position stood before the last call of `Slots.advance`; -1:
        it was not there. None without edits.
      block: number of the block it works on, from 0, among those that have work.
      status: how it stands.
      read_back: what was read back of it, in the order of the commits.
    """

    tokens: np.ndarray
    is_frozen: np.ndarray
    logprobs: np.ndarray
    committed: np.ndarray
    steps: int
    forwards: int
    block: int
    status: Status
    waves: int = 0
    seeds: int = 0
    filled: int = 0
    insertions: int = 0
    deletions: int = 0
    lost: int = 0
    origin: np.ndarray | None = None
    read_back: tuple[Written, ...] = ()

    def upto_eos(self, eos_id: int) -> Row:
        """The row up to its first generated EOS and with it; whole if given tokens follow it."""
        (ends,) = np.nonzero((self.tokens == eos_id) & ~self.is_frozen)
        if not ends.size or self.is_frozen[ends[0] :].any():
            return self
        n = int(ends[0]) + 1
        return dataclasses.replace(
            self,
            tokens=self.tokens[:n],
            is_frozen=self.is_frozen[:n],
            logprobs=self.logprobs[:n],
            committed=self.committed[:n],
            origin=None if self.origin is None else self.origin[:n],
            read_back=tuple(r for r in self.read_back if r.candidates.index < n),
        )


class Occupancy(NamedTuple):
    """Steps of slots while requests waited: those that a row took, and all."""

    taken: int
    offered: int


class Slots:
    """A fixed number of rows of one program on one canvas, and the requests that wait for them.

    A row's tokens depend on its request alone: those of the same program are bit for bit the same
    in any slot, among any others, and alone. All requests, waiting ones too, share the shapes of
    `functions`, so nothing compiles when a slot is refilled.

    Args:
      loop: the compiled loop, or the one of single steps that host samplers and read-back need.
      params: parameters of its network.
      requests: all that may be run.
      functions: slot functions with the parameters of every request, in the same order.
      num_slots: rows that run at once, a multiple of what the devices split.
      canvas: positions of the canvas.
      pad_id: what fills a row beyond its length.
      names: what to call each request to host samplers and in errors, if not by its place.
      max_candidates: how many of a position's candidates come to the host at most.
    """

    def __init__(
        self,
        loop: Advance | HostLoop,
        params: Params,
        requests: Sequence[Request],
        functions: Functions,
        *,
        num_slots: int,
        canvas: int,
        pad_id: int,
        names: Sequence[int] | None = None,
        max_candidates: int = 64,
    ):
        self.occupancy = Occupancy(0, 0)
        self._loop, self._params, self._requests = loop, params, requests
        self._functions = jax.tree.map(np.asarray, functions)
        self._canvas, self._pad_id, self._max_candidates = canvas, pad_id, max_candidates
        self._names = list(range(len(requests)) if names is None else names)
        self._home = placement(loop.program.rows, params)
        self._waiting: deque[int] = deque()
        self._owners: list[int | None] = [None] * num_slots
        self._state: State | None = None
        self._read_back: dict[int, list[Written]] = {}

    @property
    def num_slots(self) -> int:
        """Rows that run at once."""
        return len(self._owners)

    @property
    def is_busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._waiting) or any(owner is not None for owner in self._owners)

    def submit(self, indices: Iterable[int]) -> None:
        """Lets the requests of these places wait for a slot."""
        self._waiting.extend(indices)

    def advance(self, num_steps: int = STEPS_PER_CALL) -> dict[int, Row]:
        """Fills the free slots, takes up to `num_steps` steps, and returns the rows that ended.

        Keys are the places of their requests. It comes back sooner when some slots are free while
        requests wait. Rows of a `HostLoop` take one step.

        Raises:
          ValueError: what a host sampler refused.
        """
        self.fill()
        state = self._state
        assert state is not None
        # A copy: the state is donated below, and a view would look into what becomes of it.
        before = np.array(state.step_B)
        if isinstance(self._loop, Advance):
            limits = [max(1, len(self._owners) // _IDLE_SHARE)] if self._waiting else []
            self._state = self._loop(self._params, state, num_steps, *limits)
        else:
            self._state = self._step_on_host(self._loop, state)
        taken = np.asarray(self._state.step_B) - before
        if self._waiting:
            offered = len(self._owners) * int(taken.max())
            old = self.occupancy
            self.occupancy = Occupancy(old.taken + int(taken.sum()), old.offered + offered)
        has_ended = np.asarray(self._state.status_B) != Status.RUNNING
        ended = [slot for slot, owner in self._held() if has_ended[slot]]
        found = self._rows(ended)
        for slot in ended:
            self._read_back.pop(slot, None)
            self._owners[slot] = None
        return found

    def rows(self) -> dict[int, Row]:
        """Every row that runs, as it stands now, by the place of its request."""
        return self._rows([slot for slot, _ in self._held()])

    def _held(self) -> list[tuple[int, int]]:
        return [(slot, owner) for slot, owner in enumerate(self._owners) if owner is not None]

    def fill(self) -> None:
        """Puts waiting requests into the free slots; `advance` begins with it."""
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        new = [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        if not new:
            return
        for slot, index in new:
            self._owners[slot] = index
            self._read_back[slot] = []
        arguments = self._arguments(dict(new))
        mask_id = self._loop.program.mask_id
        if self._state is None:
            self._state = jax.device_put(start(**arguments, mask_id=mask_id), self._home)
            return
        is_new = np.zeros(len(self._owners), bool)
        is_new[[slot for slot, _ in new]] = True
        arguments = jax.device_put(arguments, self._home)
        self._state = _refill(self._state, arguments, jnp.asarray(is_new), mask_id=mask_id)

    def _arguments(self, new: dict[int, int]) -> dict[str, Any]:
        """Arguments of `start` with the requests in `new` at their slots, and idle ones besides."""
        num_slots, size = len(self._owners), self._canvas
        tokens = np.full((num_slots, size), self._pad_id, np.int32)
        is_frozen = np.ones((num_slots, size), bool)
        columns = {
            "length_B": np.zeros(num_slots, np.int32),
            "seeds_B": np.zeros(num_slots, np.uint32),
            "steps_B": np.ones(num_slots, np.int32),
            "block_length_B": np.zeros(num_slots, np.int32),
            "guidance_B": np.zeros(num_slots, np.float32),
            "stops_at_eos_B": np.zeros(num_slots, bool),
            "resamples_B": np.zeros(num_slots, bool),
            "capacity_B": np.zeros(num_slots, np.int32),
            "max_new_B": np.zeros(num_slots, np.int32),
        }
        for slot, index in new.items():
            request = self._requests[index]
            length = request.tokens.size
            tokens[slot, :length] = request.tokens
            if request.is_draft is not None:
                is_frozen[slot, :length] = ~request.is_draft
            values = (length, request.seed, request.steps, request.block_length,
                      request.guidance, request.stop_at_eos, request.resample, request.capacity,
                      request.max_new_tokens)  # fmt: skip
            for column, value in zip(columns.values(), values, strict=True):
                column[slot] = value
        any_one = next(iter(new.values()))
        places = np.array([new.get(slot, any_one) for slot in range(num_slots)])
        functions = jax.tree.map(lambda leaf: jnp.asarray(leaf[places]), self._functions)
        arrays = {"tokens_BL": tokens, "frozen_BL": is_frozen} | columns
        return jax.tree.map(jnp.asarray, arrays) | functions._asdict()

    def _step_on_host(self, loop: HostLoop, state: State) -> State:
        held = [(slot, self._requests[owner]) for slot, owner in self._held()]
        state, written = loop.step(
            self._params,
            state,
            {slot: r.host_sampler for slot, r in held if r.host_sampler is not None},
            read_back=[slot for slot, r in held if r.read_back],
            max_candidates=self._max_candidates,
            names=[-1 if owner is None else self._names[owner] for owner in self._owners],
        )
        slots = {self._names[owner]: slot for slot, owner in self._held()}
        for record in written:
            self._read_back[slots[record.candidates.row]].append(record)
        return state

    def _rows(self, slots: Sequence[int]) -> dict[int, Row]:
        if not slots:
            return {}
        state = self._state
        assert state is not None
        tokens, frozen, logprobs, committed, length, steps, forwards, block, status = (
            np.asarray(array)
            for array in (
                state.canvas.tokens_BL, state.canvas.frozen_BL, state.logprob_BL,
                state.committed_BL, state.canvas.length_B, state.step_B, state.forwards_B,
                state.block.index_B, state.status_B,
            )
        )  # fmt: skip
        counts = {"waves": state.waves_B, "seeds": state.seeds_B, "filled": state.filled_B}
        edited = state.edited
        if edited is not None:
            counts |= {"insertions": edited.insertions_B, "deletions": edited.deletions_B,
                       "lost": edited.lost_B}  # fmt: skip
        counts = {name: np.asarray(count_B) for name, count_B in counts.items()}
        origin = None if edited is None else np.asarray(edited.origin_BL)
        rows = {}
        for slot in slots:
            owner, n = self._owners[slot], int(length[slot])
            assert owner is not None
            rows[owner] = Row(
                tokens=tokens[slot, :n].copy(),
                is_frozen=frozen[slot, :n].copy(),
                logprobs=logprobs[slot, :n].copy(),
                committed=np.maximum(committed[slot, :n], -1),
                steps=int(steps[slot]),
                forwards=int(forwards[slot]),
                block=int(block[slot]),
                status=Status(int(status[slot])),
                **{name: int(count[slot]) for name, count in counts.items()},
                origin=None if origin is None else origin[slot, :n].copy(),
                read_back=tuple(self._read_back[slot]),
            )
        return rows


def _start_some(
    state: State, arguments: dict[str, Any], is_new_B: jax.Array, *, mask_id: int
) -> State:
    """The state with new rows where `is_new_B`."""

    def merge(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(merge, start(**arguments, mask_id=mask_id), state)


_refill = jax.jit(_start_some, static_argnames="mask_id", donate_argnums=0)
