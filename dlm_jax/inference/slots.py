"""The slots of a program: a batch of rows as arrays."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import OwnRows, placement, split_rows
from dlm_jax.inference.host import HostLoop, moved
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, columns
from dlm_jax.inference.results import Row
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.program import Counters, Program, RowParams
from dlm_jax.sampling.replay import trace_of
from dlm_jax.sampling.rules import ModelFacts, Rules
from dlm_jax.sampling.state import State
from dlm_jax.types import Params, Status

_FEW = 4  # traces that are copied one by one


@dataclass(eq=False, kw_only=True)
class Entry:
    """A submitted request, which waits, or runs in `slot`."""

    number: int
    request: Request
    queue: Any = None
    is_watched: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    slot: int | None = None
    read_back: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return (time.perf_counter() if self.started is None else self.started) - self.submitted


class Bucket:
    """Requests with the same static settings, canvas length, and list widths.

    The parameters of all requests are packed into the same shapes, so a slot can run another
    request without recompilation. The longest list of each setting, such as a bias, in the example
    `requests` determines these shapes. Buckets with equal ``key`` run in the same program.
    ``num_traced`` is the number of steps recorded per row: a power of two, or 0 without traces.
    """

    def __init__(self, requests: Sequence[Request], facts: ModelFacts, canvas: int):
        self.static, self.canvas, self._facts = requests[0].static, canvas, facts
        steps = max(request.sample.steps for request in requests)
        self.num_traced = 1 << (steps - 1).bit_length() if self.static.is_traced else 0
        self._shapes = self._pack_shapes(requests)
        self._widest = self._widest_of(requests, self._shapes)
        # Settings can hold an automaton of 16 MiB, which must not outlive their requests.
        self._fits = WeakKeyDictionary[Any, bool]((request.sample, True) for request in requests)
        self.key: Hashable = (self.static, canvas, self._shapes, self.num_traced)

    @property
    def example(self) -> Request:
        """A request of the bucket."""
        return self._widest[0]

    def holds(self, request: Request) -> bool:
        """Returns whether a request with these static settings fits the canvas and list widths."""
        is_long = 0 < self.num_traced < request.sample.steps
        if request.room > self.canvas or is_long:
            return False
        if request.sample not in self._fits:
            shapes = self._pack_shapes([request, *self._widest])
            self._fits[request.sample] = shapes == self._shapes
        return self._fits[request.sample]

    def pack(self, requests: Sequence[Request]) -> tuple[RowParams, Rules]:
        """Packs the parameters of the requests into host arrays, one row per request, or one row of
        arbitrary parameters for an empty sequence.
        """
        packed = columns([*requests, *self._widest], self._facts)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: max(1, len(requests))], packed)

    def _pack_shapes(self, requests: Sequence[Request]) -> Hashable:
        """Returns a hashable description of the packed arrays without their numbers of rows.

        Raises:
          TypeError: a field of a rule is not an array.
        """
        leaves, tree = jax.tree.flatten_with_path(columns(requests, self._facts))
        for path, leaf in leaves:
            if not hasattr(leaf, "shape"):
                field = jax.tree_util.keystr(path[-1:], simple=True)
                raise TypeError(
                    f"field {field!r} of a rule is {leaf!r}, not an array with one value per row; "
                    f"declare it with per_row, and set it in `columns` if the rule overrides it"
                )
        return tree, tuple((leaf.shape[1:], np.dtype(leaf.dtype).name) for _, leaf in leaves)

    def _widest_of(self, requests: Sequence[Request], shapes: Hashable) -> Sequence[Request]:
        """Returns a subset of the requests that packs into the same shapes."""
        if len(requests) == 1 or self._pack_shapes(requests[:1]) == shapes:
            return requests[:1]
        middle = len(requests) // 2
        parts = [(part, self._pack_shapes(part)) for part in (requests[:middle], requests[middle:])]
        parts = [(part, found) for part, found in parts if found == shapes][:1] or parts
        return [request for part, found in parts for request in self._widest_of(part, found)]


def slot_count(rows: int, batch_size: int) -> int:
    """Returns the static number of slots for `rows` waiting rows, a power of two up to
    `batch_size`.
    """
    return min(batch_size, 1 << (rows - 1).bit_length())


class CompiledLoop:
    """The compiled functions of one program. The programs live as long as this object.

    Attributes:
      steps: runs steps of all rows; a `HostLoop` for host samplers and read-back.
      lock: held while the functions are compiled in advance.
      begin: `start` as one compiled call, three times as fast as separate operations.
      refill: returns the state with new rows where ``is_new_B``; donates the state.
      move: returns the state with the rows at ``index_B``, in this order; slots where ``is_held_B``
        is False become idle.
    """

    def __init__(self, steps: Advance | HostLoop):
        self.steps, self.program, self.lock = steps, steps.program, threading.Lock()
        program = self.program
        mask_id, num_traced = program.mask_id, program.num_traced

        # JAX caches compiled code for the lifetime of a function, so each loop has new functions.
        def begin(arguments: dict[str, Any]) -> State:
            return start(**arguments, mask_id=mask_id, num_traced=num_traced)

        def refill(state: State, arguments: dict[str, Any], is_new_B: jax.Array) -> State:
            new, cache, signal_BLD = begin(arguments), state.cache, state.signal_BLD
            # The cache and the signal of the old rows are no longer read.
            state = state._replace(signal_BLD=None)
            if cache is not None:
                state = state._replace(cache=cache._replace(kv_cache=(), uncond_kv_cache=()))

            def merge(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(is_new_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            state = jax.tree.map(merge, new, state)._replace(signal_BLD=signal_BLD)
            if cache is None or state.cache is None:
                return state
            return state._replace(cache=cache._replace(valid_B=state.cache.valid_B))

        def move(state: State, index_B: jax.Array, is_held_B: jax.Array) -> State:
            state = jax.tree.map(lambda leaf: leaf[index_B], state)
            status_B = jnp.where(is_held_B, state.status_B, Status.DONE)
            return state._replace(status_B=status_B.astype(jnp.int32))

        self.begin, self.refill = jax.jit(begin), jax.jit(refill, donate_argnums=0)
        self.move = jax.jit(move)


def compiled_loop(model: Model, bucket: Bucket, num_slots: int) -> CompiledLoop:
    """Returns the loop for requests of a bucket with this number of slots.

    All engines of the process share the 64 most recently used loops.
    """
    static = bucket.static
    rows = None if static.needs_host else split_rows(model.params)
    program = model.program(static.is_guided, rows=rows, num_traced=bucket.num_traced)
    kind = HostLoop if static.needs_host else Advance
    return _compiled_loop(program, kind, model.compiler_options, (bucket.key, num_slots))


@functools.lru_cache(maxsize=64)
def _compiled_loop(
    program: Program, kind: type[Advance | HostLoop], options: tuple[str, ...], shapes: Hashable
) -> CompiledLoop:
    # A loop runs arrays of one shape only, so that its programs are freed with it.
    given = compiler.options("sample", program.rows, options)
    return CompiledLoop(kind(program, compiler_options=given))


class Slots:
    """A fixed number of rows of one program. Each row runs a request or is idle.

    Within a program, the tokens of a row are bitwise identical in any slot and with any neighbours.
    If the devices of the parameters belong to several processes, the slots are divided equally
    among the processes, and all processes must call `put` and `advance` together.
    """

    def __init__(self, model: Model, bucket: Bucket, num_slots: int, *, max_candidates: int = 64):
        self.loop = compiled_loop(model, bucket, num_slots)
        self.bucket, self.num_slots = bucket, num_slots
        self._model, self._max_candidates = model, max_candidates
        self._local = OwnRows(placement(self.loop.program.rows, model.params), num_slots)
        self._state: State | None = None
        self._steps = np.zeros(self._local.count, np.int32)
        self._counters = np.zeros((len(Counters._fields), self._local.count), np.int32)

    def put(self, changes: Mapping[int, Entry | None]) -> None:
        """Assigns requests to slots; None clears a slot."""
        new = {slot: entry for slot, entry in changes.items() if entry is not None}
        slots = list(changes)
        self._steps[slots] = self._counters[:, slots] = 0
        arguments = self._arguments(new)
        if self._state is None:
            # Each process packs only its own rows; `place` then combines the rows of all processes.
            state = with_cache(self.loop.program, self._model.params, self.loop.begin(arguments))
            self._state = self._local.place(state)
        else:
            is_new = np.zeros(self._local.count, bool)
            is_new[slots] = True
            arguments, is_new_B = self._local.passed((arguments, is_new))
            self._state = self.loop.refill(self._state, arguments, is_new_B)
        now = time.perf_counter()
        for entry in new.values():
            entry.started = now

    def advance(
        self, running: Mapping[int, Entry], num_steps: int, num_ends: int | None = None
    ) -> tuple[list[Entry], np.ndarray, Counters]:
        """Runs up to `num_steps` steps of every row; a `HostLoop` runs one step.

        The call returns early when `num_ends` rows have ended. A row whose host sampler fails ends
        with `Status.FAILED` and keeps the state before this step.

        Returns:
          The requests in `running` (by slot) whose rows have ended, the number of steps that the
          row in each slot took, and the counters of these steps, summed over the rows.
        """
        state, steps = self._state, self.loop.steps
        assert state is not None
        if isinstance(steps, Advance):
            limits = [limit for limit in (num_steps, num_ends) if limit is not None]
            if self._local.share[1] > 1:
                # A NumPy number is replicated, whereas a JAX array would be on one device.
                limits = [np.int32(limit) for limit in limits]
            self._state = steps(self._params_for(state), state, *limits)
        else:
            self._state = self._step_on_host(steps, state, running)
        state = self._state
        step_B, counters, status_B = self._local.fetch(
            (state.step_B, state.counters, state.status_B)
        )
        step_B, counters = np.array(step_B), np.stack(counters)
        taken_B, counted = step_B - self._steps, (counters - self._counters).sum(1)
        self._steps, self._counters = step_B, counters
        ended = [running[slot] for slot in sorted(running) if status_B[slot] != Status.RUNNING]
        return ended, taken_B, Counters(*counted.tolist())

    def resized(self, num_slots: int, moves: Sequence[int]) -> Slots:
        """Moves the rows in the slots `moves` to the first of `num_slots` slots, in this order.

        The old `Slots` object must not be used afterwards.
        """
        limit = self._max_candidates
        new = Slots(self._model, self.bucket, num_slots, max_candidates=limit)
        index = np.zeros(num_slots, np.int32)
        index[: len(moves)] = moves
        if self._state is not None:
            is_held = np.arange(num_slots) < len(moves)
            state = new.loop.move(self._state, jnp.asarray(index), jnp.asarray(is_held))
            new._state = new._local.place(state)
        # Slots without a row hold a copy of the first slot, whose steps do not count again.
        own = index[: new._local.count]
        new._steps, new._counters = self._steps[own], self._counters[:, own]
        return new

    def rows(self, entries: Sequence[Entry]) -> list[Row]:
        """Returns the current rows of requests in these slots."""
        state = self._state
        if not entries or state is None:
            return []
        canvas = state.canvas
        arrays = {
            "tokens": canvas.tokens_BL,
            "is_frozen": canvas.frozen_BL,
            "logprobs": state.logprob_BL,
            "committed": state.committed_BL,
        }
        if state.edits is not None:
            arrays["origin"] = state.edits.origin_BL
        numbers = canvas.length_B, state.step_B, state.block.index_B, state.status_B
        arrays, numbers, counters = self._local.fetch((arrays, numbers, state.counters))
        slots = [entry.slot for entry in entries if entry.slot is not None]
        traces = self._traces(state, slots, numbers[3])
        now, rows = time.perf_counter(), []
        for slot, entry in zip(slots, entries, strict=True):
            length, steps, block, status = (int(number_B[slot]) for number_B in numbers)
            own = {name: array_BL[slot, :length].copy() for name, array_BL in arrays.items()}
            own["committed"] = np.maximum(own["committed"], -1)
            assert entry.started is not None
            rows.append(
                Row(
                    number=entry.number,
                    **own,
                    steps=steps,
                    block=block,
                    status=Status.FAILED if entry.error else Status(status),
                    counters=Counters(*(int(count_B[slot]) for count_B in counters)),
                    read_back=tuple(entry.read_back),
                    error=entry.error,
                    waited=entry.waited,
                    seconds=now - entry.started,
                    trace=traces.get(slot),
                )
            )
        return rows

    def _traces(self, state: State, slots: Sequence[int], status: np.ndarray) -> dict[int, Any]:
        """Returns the traces of the slots whose rows have ended."""
        ended = [slot for slot in slots if status[slot] != Status.RUNNING]
        if state.records is None or not ended:
            return {}
        whole = trace_of(self.loop.program, state)
        whole = self._local.fetch(whole) if self._local.share[1] > 1 else whole
        if len(ended) <= _FEW:
            # Only the traces of the ended rows are copied, because most rows still run.
            return {slot: jax.device_get(whole.rows(np.array([slot]))) for slot in ended}
        whole = jax.device_get(whole)
        return {slot: jax.tree.map(np.copy, whole.rows(slice(slot, slot + 1))) for slot in ended}

    def _params_for(self, state: State) -> Params:
        """Returns the parameters for the loop, in the cache layout if the loop has a cache."""
        return self._model.params if state.cache is None else self._model.params_for_cache

    def _arguments(self, new: Mapping[int, Entry]) -> dict[str, Any]:
        """Returns the arguments of `start` as host arrays. Slots without a new request are idle."""
        num_slots, size = self._local.count, self.bucket.canvas
        tokens = np.full((num_slots, size), self.loop.program.pad_id, np.int32)
        is_frozen = np.ones((num_slots, size), bool)
        length = np.zeros(num_slots, np.int32)
        places = np.zeros(num_slots, int)
        for place, (slot, entry) in enumerate(new.items()):
            request, places[slot] = entry.request, place
            length[slot] = n = request.tokens.size
            tokens[slot, :n] = request.tokens
            if request.is_draft is not None:
                is_frozen[slot, :n] = ~request.is_draft
        # Idle slots have the parameters of an arbitrary request and a length of 0.
        packed = self.bucket.pack([entry.request for entry in new.values()])
        row, rules = jax.tree.map(lambda leaf: leaf[places], packed)
        arrays = {"tokens_BL": tokens, "length_B": length, "frozen_BL": is_frozen}
        return arrays | {"row": row, "rules": rules}

    def _step_on_host(self, loop: HostLoop, state: State, running: Mapping[int, Entry]) -> State:
        samplers = {slot: entry.request.host_sampler for slot, entry in running.items()}
        failed: dict[int, Exception] = {}
        state, written = loop.step(
            self._params_for(state),
            state,
            {slot: sampler for slot, sampler in samplers.items() if sampler is not None},
            read_back=[slot for slot in sorted(running) if running[slot].request.read_back],
            max_candidates=self._max_candidates,
            names={slot: entry.number for slot, entry in running.items()},
            failed=failed,
        )
        for slot, error in failed.items():
            running[slot].error = error
        entries = {entry.number: entry for entry in running.values()}
        for record in written:
            entries[record.candidates.row].read_back.append(record)
        if state.edits is not None:
            origin_BL, length_B = jax.device_get((state.edits.origin_BL, state.canvas.length_B))
            for slot, entry in running.items():
                entry.read_back = moved(entry.read_back, origin_BL[slot, : length_B[slot]])
        return state
