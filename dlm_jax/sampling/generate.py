"""Many requests in, finished rows out: `Slots` driven to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.candidates import Written
from dlm_jax.sampling.host import HostLoop
from dlm_jax.sampling.placement import num_shares
from dlm_jax.sampling.request import Request
from dlm_jax.sampling.rules import Functions
from dlm_jax.sampling.slots import Row, Slots
from dlm_jax.types import Params, Status

_CANVAS_MULTIPLE = 64


class Scores(NamedTuple):
    """How each token came about, ``[R, L]`` each.

    Attributes:
      logprobs: float32, see `Generation`.
      committed: int32, see `Generation`.
    """

    logprobs: np.ndarray
    committed: np.ndarray


@dataclass(frozen=True)
class Generation:
    """Finished rows, in the order of their requests.

    Attributes:
      tokens: int32 ``[R, L]``, PAD from each row's length on.
      lengths: int32 ``[R]``, live tokens, the given ones included.
      steps: int32 ``[R]``, steps taken.
      forwards: int32 ``[R]``, forwards of the trunk the row asked for.
      waves: int32 ``[R]``, waves of the sampler head's fills; 0 for a parallel one.
      seeds: int32 ``[R]``, positions that the LM head seeded in those fills.
      filled: int32 ``[R]``, candidates drawn in all steps.
      status: ``[R]``, how each row ended.
      logprobs: float32 ``[R, L]``, log-probability in nats of each generated token under the clean
        logits it was drawn from; 0 at given tokens. At tokens of a draft that stayed, that under
        the forward before the last.
      committed: int32 ``[R, L]``, the step that wrote each token, from 0; -1 at given tokens, those
        of a draft, and those that an edit put there.
      insertions: int32 ``[R]``, tokens that edits inserted; all that follow are 0 without edits.
      deletions: int32 ``[R]``, tokens that they deleted.
      lost: int32 ``[R]``, insertions that found no room, and tokens that insertions pushed out.
      read_back: what was read back of each row, in the order of the commits; empty where nothing
        was asked.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    steps: np.ndarray
    forwards: np.ndarray
    waves: np.ndarray
    seeds: np.ndarray
    filled: np.ndarray
    status: tuple[Status, ...]
    logprobs: np.ndarray
    committed: np.ndarray
    insertions: np.ndarray
    deletions: np.ndarray
    lost: np.ndarray
    read_back: tuple[tuple[Written, ...], ...]

    @property
    def scores(self) -> Scores:
        """Log-probability of each token, and the step that wrote it."""
        return Scores(self.logprobs, self.committed)


def assemble(rows: Sequence[Row], *, pad_id: int) -> Generation:
    """The rows side by side, padded to a canvas that holds the longest."""
    width = canvas_size(max(row.tokens.size for row in rows))

    def table(name: str, fill: float, dtype: Any) -> np.ndarray:
        whole = np.full((len(rows), width), fill, dtype)
        for number, row in enumerate(rows):
            values = getattr(row, name)
            whole[number, : values.size] = values
        return whole

    return Generation(
        tokens=table("tokens", pad_id, np.int32),
        lengths=np.array([row.tokens.size for row in rows], np.int32),
        **{
            name: np.array([getattr(row, name) for row in rows], np.int32)
            for name in (
                "steps",
                "forwards",
                "waves",
                "seeds",
                "filled",
                "insertions",
                "deletions",
                "lost",
            )  # fmt: skip
        },
        status=tuple(row.status for row in rows),
        logprobs=table("logprobs", 0, np.float32),
        committed=table("committed", -1, np.int32),
        read_back=tuple(row.read_back for row in rows),
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


def make_slots(
    loop: Advance | HostLoop,
    params: Params,
    requests: Sequence[Request],
    functions: Functions,
    *,
    pad_id: int,
    batch_size: int = 64,
    canvas: int | None = None,
    max_candidates: int = 64,
    names: Sequence[int] | None = None,
) -> Slots:
    """Slots that can run any of the requests, none of which waits yet.

    Args:
      loop: the compiled loop, or the one of single steps that host samplers and read-back need.
      params: parameters of its network.
      requests: the rows.
      functions: slot functions with the parameters of every request.
      pad_id: what fills a row beyond its length.
      batch_size: rows that run at once; rounded up to fill the devices that split them.
      canvas: positions; as the longest request needs if not given.
      max_candidates: how many of a position's candidates come to the host at most.
      names: what to call each row to host samplers and in errors, if not by its place.

    Raises:
      ValueError: no requests, a batch size below 1, fewer steps than blocks, a compiled loop for a
        row that needs the host, edits in a loop of single steps, or a canvas that is too short.
    """
    if not requests:
        raise ValueError("there is nothing to generate; give at least one prompt")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    for name, request in zip(names or range(len(requests)), requests, strict=True):
        request.check_steps(mask_id=loop.program.mask_id)
        if request.needs_host and not isinstance(loop, HostLoop):
            raise ValueError(f"row {name} needs the host; run it in a HostLoop")
    if isinstance(loop, HostLoop) and (functions.editor or functions.renoise):
        raise ValueError("a HostLoop neither edits nor re-noises; leave that out, or use Advance")
    if canvas is not None and canvas < max(request.room for request in requests):
        raise ValueError(f"canvas={canvas} is less than a request may fill; raise it")
    return Slots(
        loop,
        params,
        requests,
        functions,
        num_slots=slot_count(len(requests), batch_size, num_shares(loop.program.rows)),
        canvas=canvas or canvas_size(max(request.room for request in requests)),
        pad_id=pad_id,
        names=names,
        max_candidates=max_candidates,
    )


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
            # Remasking takes tokens back; a bar does not run backwards.
            on_commits(max(0, now - told))
            told = max(now, told)
        yield from rows.items()


def _num_committed(row: Row) -> int:
    return int(np.sum(row.committed >= 0))


def generate(
    loop: Advance | HostLoop,
    params: Params,
    requests: Sequence[Request],
    functions: Functions,
    *,
    pad_id: int,
    on_commits: Callable[[int], Any] | None = None,
    **options: Any,
) -> Generation:
    """Denoises all requests on a canvas that holds the longest; a slot that ends takes the next.

    A row's tokens depend on its request alone; those of the same program are bit for bit the same
    among any others, and other canvases or numbers of slots change logits by float rounding.

    The arguments are those of `make_slots`, and `on_commits` is told how many tokens each call of
    the loop wrote, for a progress bar.

    Raises:
      ValueError: as `make_slots`, or what a host sampler refused.
    """
    slots = make_slots(loop, params, requests, functions, pad_id=pad_id, **options)
    slots.submit(range(len(requests)))
    rows = dict(finish(slots, on_commits))
    return assemble([rows[index] for index in range(len(requests))], pad_id=pad_id)
