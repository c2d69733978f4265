"""Finished and running rows without slot padding, and rows assembled into arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_jax.inference.host import Written
from dlm_jax.inference.model import Model
from dlm_jax.sampling.program import Counters
from dlm_jax.sampling.replay import Trace, joined
from dlm_jax.types import Status, first_eos

_CANVAS_MULTIPLE = 64


@dataclass(frozen=True)
class Row:
    """The current state of one row, without the padding of its slot.

    Attributes:
      tokens: int32 ``[n]``, MASK at holes.
      is_frozen: True at given tokens.
      logprobs: float32 ``[n]``, as in `Texts`; 0 at holes.
      committed: int32 ``[n]``, as in `Texts`; -1 at holes.
      steps: number of steps taken so far.
      block: index of the current block, starting at 0; blocks with nothing to write are not
        counted.
      status: status of the row.
      counters: counters of the row.
      origin: int32 ``[n]``, index of each position before the last call of the loop; -1 for new
        positions. None without edits.
      read_back: read-back records of the tokens, in commit order.
      error: exception of the host sampler or the program, or None.
      waited: seconds that the row waited for a slot.
      seconds: seconds spent in a slot.
      trace: trace of the ended row, or None.
      number: number of the row's request in its engine.
    """

    tokens: np.ndarray
    is_frozen: np.ndarray
    logprobs: np.ndarray
    committed: np.ndarray
    steps: int
    block: int
    status: Status
    counters: Counters = Counters()
    origin: np.ndarray | None = None
    read_back: tuple[Written, ...] = ()
    error: Exception | None = None
    waited: float = 0.0
    seconds: float = 0.0
    trace: Trace | None = None
    number: int = 0

    @property
    def num_generated(self) -> int:
        return int((self.committed >= 0).sum())

    def upto_eos(self, eos_ids: Sequence[int]) -> Row:
        """Truncates the row after its first generated EOS that no given token follows."""
        return self.first(int(first_eos(self.tokens, self.is_frozen, eos_ids)) + 1)

    def first(self, n: int) -> Row:
        """Returns the row with its first n positions."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[:n],
            is_frozen=self.is_frozen[:n],
            logprobs=self.logprobs[:n],
            committed=self.committed[:n],
            origin=None if self.origin is None else self.origin[:n],
            read_back=tuple(r for r in self.read_back if r.place < n),
        )


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Finished rows, in the order of their requests. Rows end with the first generated EOS.

    Attributes:
      texts: prompt and continuation of each row.
      tokens: int32 ``[R, L]``, PAD beyond the length of each row.
      lengths: int32 ``[R]``, number of live tokens in each row, including given tokens.
      steps: int32 ``[R]``, number of steps taken.
      counters: counters of each row, int32 ``[R]`` each.
      status: ``[R]``, final status of each row.
      logprobs: float32 ``[R, L]``, log-probability in nats of each generated token under the clean
        logits from which it was drawn; 0 at given tokens. For unchanged draft tokens, it is the
        log-probability under the second-to-last forward pass.
      committed: int32 ``[R, L]``, index of the step that wrote each token, starting at 0; -1 at
        given tokens, draft tokens, and tokens written by an edit or re-noising.
      read_back: read-back records of each row in commit order; empty if not requested.
      seconds: float64 ``[R]``, seconds that each row spent in a slot.
      trace: all draws of the rows with ``trace=True``; None otherwise.
      programs: slots and canvas length of each program that has run.
    """

    texts: tuple[str, ...]
    tokens: np.ndarray
    lengths: np.ndarray
    steps: np.ndarray
    counters: Counters
    status: tuple[Status, ...]
    logprobs: np.ndarray
    committed: np.ndarray
    read_back: tuple[tuple[Written, ...], ...]
    seconds: np.ndarray
    trace: Trace | None = None
    programs: tuple[str, ...] = ()

    @property
    def forwards(self) -> np.ndarray:
        """int32 ``[R]``, number of forward passes of the trunk for each row."""
        return self.counters.forwards


def texts_of(model: Model, rows: Mapping[int, Row], programs: tuple[str, ...] = ()) -> Texts:
    """Returns the texts of finished rows by index, such as the last rows of `stream`."""
    ordered = [rows[index] for index in sorted(rows)]
    width = canvas_size(max(row.tokens.size for row in ordered))

    def table(name: str, fill: float, dtype: Any) -> np.ndarray:
        whole = np.full((len(ordered), width), fill, dtype)
        for number, row in enumerate(ordered):
            values = getattr(row, name)
            whole[number, : values.size] = values
        return whole

    trace = None
    if all(row.trace is not None for row in ordered):
        trace = joined([row.trace for row in ordered if row.trace is not None]).trimmed()
        trace = dataclasses.replace(trace, vocabulary=model.vocabulary)
    return Texts(
        texts=tuple(model.tokenizer.decode(row.tokens) for row in ordered),
        tokens=table("tokens", model.tokenizer.pad_id, np.int32),
        lengths=np.array([row.tokens.size for row in ordered], np.int32),
        steps=np.array([row.steps for row in ordered], np.int32),
        counters=Counters(*np.array([row.counters for row in ordered], np.int32).T),
        status=tuple(row.status for row in ordered),
        logprobs=table("logprobs", 0, np.float32),
        committed=table("committed", -1, np.int32),
        read_back=tuple(row.read_back for row in ordered),
        seconds=np.array([row.seconds for row in ordered]),
        trace=trace,
        programs=programs,
    )


def canvas_size(length: int, *, is_shared: bool = False) -> int:
    """Returns the static canvas length for `length` tokens: the next multiple of 64, so that few
    programs are compiled.

    If `is_shared` (for requests of any length), the canvas length is a power of two, so that even
    fewer programs are compiled.
    """
    if is_shared:
        return max(_CANVAS_MULTIPLE, 1 << (length - 1).bit_length())
    return -(-length // _CANVAS_MULTIPLE) * _CANVAS_MULTIPLE
