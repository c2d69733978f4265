"""Slots: rows of one compiled program that take the next request when they have finished one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.distributed.rows import num_shares, placement
from dlm_jax.inference.candidates import Written, moved
from dlm_jax.inference.checks import check_canvas
from dlm_jax.inference.host import HostLoop
from dlm_jax.inference.request import Request, pack
from dlm_jax.inference.results import Row, canvas_size
from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.row import Counters, RowParams
from dlm_jax.sampling.rules import ModelFacts, Rules
from dlm_jax.sampling.state import State, start
from dlm_jax.types import Params, Status

STEPS_PER_CALL = 8
_IDLE_SHARE = 16


class Occupancy(NamedTuple):
    """Steps of slots while requests waited: those that a row took, and all."""

    taken: int
    offered: int


class Slots:
    """A fixed number of rows of one program on one canvas, and the requests that wait for them.

    A row's tokens depend on its request alone: those of the same program are bit for bit the same
    in any slot, among any others, and alone. All requests, waiting ones too, are packed
    at once, so nothing compiles when a slot is refilled.

    Args:
      loop: the compiled loop, or the one of single steps that host samplers and read-back need.
      params: parameters of its network.
      requests: all that may be run, which agree in what is static; none of them waits yet.
      facts: what their rules may know of the model.
      pad_id: what fills a row beyond its length.
      batch_size: rows that run at once; rounded up to fill the devices that split them.
      canvas: positions; as the longest request needs if not given.
      names: what to call each request to host samplers and in errors, if not by its place.
      max_candidates: how many of a position's candidates come to the host at most.

    Attributes:
      loop: the compiled loop.
      occupancy: how busy the slots were while requests waited.

    Raises:
      ValueError: no requests, a batch size below 1, fewer steps than blocks, a compiled loop for a
        row that needs the host, or a canvas that is too short.
    """

    def __init__(
        self,
        loop: Advance | HostLoop,
        params: Params,
        requests: Sequence[Request],
        facts: ModelFacts,
        *,
        pad_id: int,
        batch_size: int = 64,
        canvas: int | None = None,
        names: Sequence[int] | None = None,
        max_candidates: int = 64,
    ):
        if not requests:
            raise ValueError("there is nothing to generate; give at least one prompt")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._names = list(range(len(requests)) if names is None else names)
        for name, request in zip(self._names, requests, strict=True):
            check_canvas(request, facts, mask_id=loop.program.mask_id)
            if request.needs_host and not isinstance(loop, HostLoop):
                raise ValueError(f"row {name} needs the host; run it in a HostLoop")
        longest = max(request.room for request in requests)
        canvas = canvas_size(longest) if canvas is None else canvas
        if canvas < longest:
            raise ValueError(f"canvas={canvas} is less than a request may fill; raise it")
        num_slots = slot_count(len(requests), batch_size, num_shares(loop.program.rows))
        self.occupancy = Occupancy(0, 0)
        self.loop, self._params, self._requests = loop, params, requests
        self._packed: tuple[RowParams, Rules] = jax.tree.map(np.asarray, pack(requests, facts))
        self._canvas, self._pad_id, self._max_candidates = canvas, pad_id, max_candidates
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
        if isinstance(self.loop, Advance):
            limits = [max(1, len(self._owners) // _IDLE_SHARE)] if self._waiting else []
            self._state = self.loop(self._params, state, num_steps, *limits)
        else:
            self._state = self._step_on_host(self.loop, state)
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
        mask_id = self.loop.program.mask_id
        if self._state is None:
            state = start(**arguments, mask_id=mask_id)
            state = with_cache(self.loop.program, self._params, state)
            self._state = jax.device_put(state, self._home)
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
        length = np.zeros(num_slots, np.int32)
        for slot, index in new.items():
            request = self._requests[index]
            length[slot] = n = request.tokens.size
            tokens[slot, :n] = request.tokens
            if request.is_draft is not None:
                is_frozen[slot, :n] = ~request.is_draft
        # Idle slots have the parameters of some request, and no position.
        any_one = next(iter(new.values()))
        places = np.array([new.get(slot, any_one) for slot in range(num_slots)])
        row, rules = jax.tree.map(lambda leaf: jnp.asarray(leaf[places]), self._packed)
        arrays = {"tokens_BL": tokens, "length_B": length, "frozen_BL": is_frozen}
        return jax.tree.map(jnp.asarray, arrays) | {"row": row, "rules": rules}

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
        if state.edits is not None:
            origin_BL, length_B = jax.device_get((state.edits.origin_BL, state.canvas.length_B))
            for slot, records in self._read_back.items():
                self._read_back[slot] = moved(records, origin_BL[slot, : length_B[slot]])
        return state

    def _rows(self, slots: Sequence[int]) -> dict[int, Row]:
        if not slots:
            return {}
        state = self._state
        assert state is not None
        edits = state.edits
        tokens, frozen, logprobs, committed, length, steps, block, status, origin, counters = (
            jax.device_get(
                (
                    state.canvas.tokens_BL, state.canvas.frozen_BL, state.logprob_BL,
                    state.committed_BL, state.canvas.length_B, state.step_B, state.block.index_B,
                    state.status_B, None if edits is None else edits.origin_BL, state.counters,
                )
            )
        )  # fmt: skip
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
                block=int(block[slot]),
                status=Status(int(status[slot])),
                counters=Counters(*(int(count_B[slot]) for count_B in counters)),
                origin=None if origin is None else origin[slot, :n].copy(),
                read_back=tuple(self._read_back[slot]),
            )
        return rows


def _start_some(
    state: State, arguments: dict[str, Any], is_new_B: jax.Array, *, mask_id: int
) -> State:
    """The state with new rows where `is_new_B`; what is kept of the old ones is no longer read."""
    new, cache = start(**arguments, mask_id=mask_id), state.cache
    if cache is not None:
        state = state._replace(cache=cache._replace(kept=(), bare=()))

    def merge(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    state = jax.tree.map(merge, new, state)
    if cache is None or state.cache is None:
        return state
    return state._replace(cache=state.cache._replace(kept=cache.kept, bare=cache.bare))


_refill = jax.jit(_start_some, static_argnames="mask_id", donate_argnums=0)


def slot_count(rows: int, batch_size: int, shares: int = 1) -> int:
    """Static number of slots for `rows` waiting rows: a power of two, `batch_size` at most.

    Rounded up to a multiple of `shares`, the parts into which devices split them.
    """
    slots = min(batch_size, 1 << (rows - 1).bit_length())
    return -(-slots // shares) * shares


def finish(
    slots: Slots, on_commits: Callable[[int], Any] | None = None
) -> Iterator[tuple[int, Row]]:
    """Rows with the places of their requests, as they end, until nothing waits.

    `on_commits` is told how many tokens each call of the loop wrote, for a progress bar.
    """
    told = ended = 0
    while slots.is_busy:
        rows = slots.advance()
        if on_commits is not None:
            ended += sum(map(_num_committed, rows.values()))
            now = ended + sum(map(_num_committed, slots.rows().values()))
            # Remasking lowers the number; a bar does not run backwards.
            on_commits(max(0, now - told))
            told = max(now, told)
        yield from rows.items()


def _num_committed(row: Row) -> int:
    return int(np.sum(row.committed >= 0))
