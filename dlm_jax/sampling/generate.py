"""Drivers over `advance`: many requests in, finished rows out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.commit import CommitRule
from dlm_jax.sampling.loop import State, start
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
    """

    tokens: np.ndarray
    steps: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32); use a smaller one")
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(
                f"tokens have shape {self.tokens.shape}; give one row that is not empty"
            )


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
    """

    tokens: np.ndarray
    lengths: np.ndarray
    steps: np.ndarray
    forwards: np.ndarray
    status: tuple[Status, ...]
    logprobs: np.ndarray
    committed: np.ndarray


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
    return Generation(
        tokens=rows("tokens", pad_id),
        lengths=rows("lengths"),
        steps=rows("steps"),
        forwards=rows("forwards"),
        status=tuple(status[index] for index in order),
        logprobs=rows("logprobs"),
        committed=rows("committed", -1),
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


def split_rows(params: Params) -> NamedSharding | None:
    """How to split rows over the devices that hold `params`: the axes `data` and `fsdp`.

    None for one device, and for several processes: each of these runs all rows, so that each can
    read the results.
    """
    mesh = getattr(_sharding_of(params), "mesh", None)
    if mesh is None or mesh.size == 1 or mesh.is_multi_process:
        return None
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(axes))


def generate(
    advance: Advance,
    params: Params,
    requests: Sequence[Request],
    *,
    make_chain: Callable[[Sequence[int], int], Chain],
    rule: CommitRule,
    mask_id: int,
    pad_id: int,
    batch_size: int = 64,
    on_commits: Callable[[int], Any] | None = None,
) -> Generation:
    """Denoises all requests, `batch_size` at a time on a canvas that holds the longest.

    A row's tokens depend on its request alone; those of the same program are bit for bit the same
    among any others, and other canvases or numbers of slots change logits by float rounding.

    Args:
      advance: the compiled loop.
      params: parameters of its network.
      requests: the rows.
      make_chain: ``(indices of requests, slots) -> chain`` with their parameters, one row a slot.
      rule: commit rule with scalar choices only.
      mask_id: the id of MASK.
      pad_id: what fills a row beyond its length.
      batch_size: rows that run at once; rounded up to fill the devices that split them.
      on_commits: told how many tokens each call of the loop wrote, for a progress bar.

    Raises:
      ValueError: no requests, or a batch size below 1.
    """
    if not requests:
        raise ValueError("there is nothing to generate; give at least one prompt")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    size = canvas_size(max(request.tokens.size for request in requests))
    slots = slot_count(len(requests), batch_size, _num_shares(advance.program.rows))
    placement = _placement(advance, params)
    parts = []
    for first in range(0, len(requests), slots):
        indices = range(first, min(first + slots, len(requests)))
        group = [requests[index] for index in indices]
        state = _start(
            group, slots, size, chain=make_chain(indices, slots), rule=rule,
            mask_id=mask_id, pad_id=pad_id,
        )  # fmt: skip
        state = jax.device_put(state, placement)
        parts.append(_finish(_run(advance, params, state, on_commits), len(group)))
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


def _num_shares(rows: NamedSharding | None) -> int:
    return 1 if rows is None else math.prod(rows.mesh.shape[axis] for axis in rows.spec[0])


def _placement(advance: Advance, params: Params) -> jax.sharding.Sharding | None:
    """Where the state goes: split as the program says, or to where the parameters are, whole.

    Placed from the start, the state comes back from a call as it went in: no second compilation.
    """
    if advance.program.rows is not None:
        return advance.program.rows
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _sharding_of(params: Params) -> jax.sharding.Sharding | None:
    """That of some parameter; None if there is none on a device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return next((sharding for sharding in shardings if sharding is not None), None)


def _run(
    advance: Advance, params: Params, state: State, on_commits: Callable[[int], Any] | None
) -> State:
    written = 0
    while True:
        state = advance(params, state, _STEPS_PER_CALL)
        if on_commits is not None:
            now = int(np.sum(np.asarray(state.committed_BL) >= 0))
            on_commits(now - written)
            written = now
        if not np.any(np.asarray(state.status_B) == Status.RUNNING):
            return state


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
