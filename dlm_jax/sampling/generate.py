"""Drivers over `advance`: many requests in, finished rows out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.candidates import HostSampler, Written
from dlm_jax.sampling.commit import CommitRule
from dlm_jax.sampling.host import HostLoop
from dlm_jax.sampling.loop import State, start
from dlm_jax.sampling.placement import num_shares, placement
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.types import Params, Status

_CANVAS_MULTIPLE = 64
_STEPS_PER_CALL = 8


@dataclass(frozen=True)
class Request:
    """One row to denoise.

    Attributes:
      tokens: int ``[n]``, the whole canvas: given tokens, and MASK at the holes.
      steps: denoising steps allowed, at least 1.
      seed: of the row's randomness, in [0, 2**32).
      host_sampler: chooses the row's tokens among the candidates that its chain leaves.
      read_back: whether `Generation.read_back` tells how each token came about.
    """

    tokens: np.ndarray
    steps: int
    seed: int
    host_sampler: HostSampler | None = None
    read_back: bool = False

    @property
    def needs_host(self) -> bool:
        """Whether the row must be looked at from Python at every step."""
        return self.read_back or self.host_sampler is not None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32); use a smaller one")
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(
                f"tokens have shape {self.tokens.shape}; give one row that is not empty"
            )
        if self.host_sampler is not None and not callable(self.host_sampler):
            raise ValueError(
                f"host_sampler={self.host_sampler!r} is not callable; give a function that takes "
                "Candidates and returns one of their ids"
            )
        if not isinstance(self.read_back, bool):
            raise ValueError(f"read_back={self.read_back!r} is not a bool; use True or False")


@dataclass(frozen=True)
class Generation:
    """Finished rows, in the order of their requests.

    Attributes:
      tokens: int32 ``[R, L]``, PAD from each row's length on.
      lengths: int32 ``[R]``, live tokens, the given ones included.
      steps: int32 ``[R]``, steps taken.
      forwards: int32 ``[R]``, forwards of the trunk the row asked for.
      status: ``[R]``, how each row ended.
      logprobs: float32 ``[R, L]``, log-probability in nats of each generated token under the clean
        logits it was drawn from; 0 at given tokens.
      committed: int32 ``[R, L]``, the step that wrote each token, from 0; -1 at given tokens.
      read_back: what was read back of each row, in the order of the commits; empty where nothing
        was asked.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    steps: np.ndarray
    forwards: np.ndarray
    status: tuple[Status, ...]
    logprobs: np.ndarray
    committed: np.ndarray
    read_back: tuple[tuple[Written, ...], ...]


def merge(parts: Sequence[tuple[Sequence[int], Generation]], *, pad_id: int) -> Generation:
    """One generation of parts made apart, each with the places of its rows in the whole.

    Rows are widened to the longest canvas.
    """
    place = np.concatenate([np.asarray(members, np.int64) for members, _ in parts])
    width = max(part.tokens.shape[1] for _, part in parts)
    order = np.argsort(place)

    def rows(name: str, fill: float = 0) -> np.ndarray:
        columns = [getattr(part, name) for _, part in parts]
        if columns[0].ndim == 2:
            columns = [
                np.pad(c, ((0, 0), (0, width - c.shape[1])), constant_values=fill) for c in columns
            ]
        return np.concatenate(columns)[order]

    status = [status for _, part in parts for status in part.status]
    read_back = [records for _, part in parts for records in part.read_back]
    return Generation(
        tokens=rows("tokens", pad_id),
        lengths=rows("lengths"),
        steps=rows("steps"),
        forwards=rows("forwards"),
        status=tuple(status[index] for index in order),
        logprobs=rows("logprobs"),
        committed=rows("committed", -1),
        read_back=tuple(read_back[index] for index in order),
    )


def cut_at_eos(whole: Generation, *, eos_id: int, pad_id: int) -> Generation:
    """The rows up to their first generated EOS and with it; what stood behind it is PAD."""
    places_1L = np.arange(whole.tokens.shape[1])[None]
    is_end_RL = (whole.tokens == eos_id) & (whole.committed >= 0)
    ends_R = np.where(is_end_RL.any(1), is_end_RL.argmax(1) + 1, whole.lengths)
    is_beyond_RL = places_1L >= ends_R[:, None]
    return dataclasses.replace(
        whole,
        tokens=np.where(is_beyond_RL, pad_id, whole.tokens),
        lengths=ends_R.astype(whole.lengths.dtype),
        logprobs=np.where(is_beyond_RL, 0, whole.logprobs),
        committed=np.where(is_beyond_RL, -1, whole.committed),
    )


def canvas_size(length: int) -> int:
    """Static canvas that holds `length` tokens: the next multiple of 64, so that few compile."""
    return -(-length // _CANVAS_MULTIPLE) * _CANVAS_MULTIPLE


def slot_count(rows: int, batch_size: int, shares: int = 1) -> int:
    """Static number of slots for `rows` waiting rows: a power of two, `batch_size` at most.

    Rounded up to a multiple of `shares`, the parts into which devices split them.
    """
    slots = min(batch_size, 1 << (rows - 1).bit_length())
    return -(-slots // shares) * shares


def generate(
    loop: Advance | HostLoop,
    params: Params,
    requests: Sequence[Request],
    *,
    make_chain: Callable[[Sequence[int], int], Chain],
    rule: CommitRule,
    mask_id: int,
    pad_id: int,
    batch_size: int = 64,
    max_candidates: int = 64,
    names: Sequence[int] | None = None,
    on_commits: Callable[[int], Any] | None = None,
) -> Generation:
    """Denoises all requests, `batch_size` at a time on a canvas that holds the longest.

    A row's tokens depend on its request alone; those of the same program are bit for bit the same
    among any others, and other canvases or numbers of slots change logits by float rounding.

    Args:
      loop: the compiled loop, or the one of single steps that host samplers and read-back need.
      params: parameters of its network.
      requests: the rows.
      make_chain: ``(indices of requests, slots) -> chain`` with their parameters, one row a slot.
      rule: commit rule with scalar choices only.
      mask_id: the id of MASK.
      pad_id: what fills a row beyond its length.
      batch_size: rows that run at once; rounded up to fill the devices that split them.
      max_candidates: how many of a position's candidates come to the host at most.
      names: what to call each row to host samplers and in errors, if not by its place.
      on_commits: told how many tokens each call of the loop wrote, for a progress bar.

    Raises:
      ValueError: no requests, a batch size below 1, a compiled loop for a row that needs the host,
        or what a host sampler refused.
    """
    if not requests:
        raise ValueError("there is nothing to generate; give at least one prompt")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    names = range(len(requests)) if names is None else names
    for name, request in zip(names, requests, strict=True):
        if request.needs_host and not isinstance(loop, HostLoop):
            raise ValueError(f"row {name} needs the host; run it in a HostLoop")
    size = canvas_size(max(request.tokens.size for request in requests))
    slots = slot_count(len(requests), batch_size, num_shares(loop.program.rows))
    home = placement(loop.program.rows, params)
    parts, read_back = [], []
    for first in range(0, len(requests), slots):
        indices = range(first, min(first + slots, len(requests)))
        group = [requests[index] for index in indices]
        state = _start(
            group, slots, size, chain=make_chain(indices, slots), rule=rule,
            mask_id=mask_id, pad_id=pad_id,
        )  # fmt: skip
        take_steps = _driver(
            loop, params, group, [names[index] for index in indices], max_candidates
        )
        state, written = _run(take_steps, jax.device_put(state, home), on_commits)
        parts.append(_finish(state, len(group)))
        by_name = {names[index]: [] for index in indices}
        for record in written:
            by_name[record.candidates.row].append(record)
        read_back.extend(map(tuple, by_name.values()))
    columns = zip(*parts, strict=True)
    tokens, lengths, steps, forwards, status, logprobs, committed = map(np.concatenate, columns)
    return Generation(
        tokens=tokens,
        lengths=lengths,
        steps=steps,
        forwards=forwards,
        status=tuple(Status(int(s)) for s in status),
        logprobs=logprobs,
        committed=committed,
        read_back=tuple(read_back),
    )


def _start(
    group: Sequence[Request], slots: int, size: int, *, mask_id: int, pad_id: int, **slot_functions
) -> State:
    tokens = np.full((slots, size), pad_id, np.int32)
    length, seeds, steps = np.zeros(slots, np.int32), np.zeros(slots, np.uint32), np.ones(slots)
    for row, request in enumerate(group):
        tokens[row, : request.tokens.size] = request.tokens
        length[row], seeds[row] = request.tokens.size, request.seed
        steps[row] = request.steps
    return start(
        jnp.asarray(tokens),
        jnp.asarray(length),
        seeds_B=jnp.asarray(seeds),
        steps_B=jnp.asarray(steps, jnp.int32),
        mask_id=mask_id,
        **slot_functions,
    )


_TakeSteps = Callable[[State], tuple[State, list[Written]]]


def _driver(
    loop: Advance | HostLoop,
    params: Params,
    group: Sequence[Request],
    names: Sequence[int],
    max_candidates: int,
) -> _TakeSteps:
    """A few steps of the loop, and what was read back in them."""
    if isinstance(loop, Advance):
        return lambda state: (loop(params, state, _STEPS_PER_CALL), [])
    samplers = {
        slot: request.host_sampler
        for slot, request in enumerate(group)
        if request.host_sampler is not None
    }
    asked = [slot for slot, request in enumerate(group) if request.read_back]
    return lambda state: loop.step(
        params, state, samplers, read_back=asked, max_candidates=max_candidates, names=names
    )


def _run(
    take_steps: _TakeSteps, state: State, on_commits: Callable[[int], Any] | None
) -> tuple[State, list[Written]]:
    written, read_back = 0, []
    while True:
        state, found = take_steps(state)
        read_back += found
        if on_commits is not None:
            now = int(np.sum(np.asarray(state.committed_BL) >= 0))
            on_commits(now - written)
            written = now
        if not np.any(np.asarray(state.status_B) == Status.RUNNING):
            return state, read_back


def _finish(state: State, rows: int) -> tuple[np.ndarray, ...]:
    arrays = (
        state.canvas.tokens_BL,
        state.canvas.length_B,
        state.step_B,
        state.forwards_B,
        state.status_B,
        state.logprob_BL,
        state.committed_BL,
    )
    return tuple(np.asarray(array)[:rows] for array in arrays)
