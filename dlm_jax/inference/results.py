"""Finished and running rows without slot padding: as arrays, and as texts that end at stops."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.data import HubTokenizer, Tokenizer
from dlm_jax.inference.host import Written
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request
from dlm_jax.sampling.program import Counters
from dlm_jax.sampling.replay import Trace, joined
from dlm_jax.settings import UNSET, require
from dlm_jax.types import Status, first_eos

_CANVAS_MULTIPLE = 64

MOST_STOPS = 16
"""Maximum number of stop strings, and of stop ids, of a request."""

_LONGEST_STOP = 1024
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of an unfinished character."""


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


class NewText(NamedTuple):
    """New text of a row, the positions of its tokens, and whether it is the last."""

    text: str
    places: range
    is_last: bool


def specials_in(tokenizer: Tokenizer, stop: str) -> list[int]:
    """Returns the special tokens whose names occur in a stop string. They have no text, so a text
    never contains them.
    """
    if not isinstance(tokenizer, HubTokenizer):
        return []
    return [i for i in tokenizer.encode_marked(stop).tolist() if i in tokenizer.textless_ids]


def stops_of(
    tokenizer: Tokenizer, stop: Any, stop_token_ids: Any
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the stop strings and the stop ids of a request.

    Raises:
      ValueError: `stop` is neither a string nor a list of at most `MOST_STOPS` strings, a string is
        empty, too long, or has a special token among text (so that it cannot occur), or
        `stop_token_ids` is not a list of at most `MOST_STOPS` ids of the vocabulary.
    """
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    ids = [] if stop_token_ids is None else stop_token_ids
    is_fine = isinstance(stops, list) and all(isinstance(text, str) for text in stops)
    require(is_fine, "stop", stop, "is not a string or a list of strings", "use strings")
    for name, given in (("stop", stops), ("stop_token_ids", ids)):
        count = len(given) if isinstance(given, list) else 0
        why, remedy = f"has {count} values", f"use at most {MOST_STOPS}"
        require(count <= MOST_STOPS, name, UNSET, why, remedy)
    for text in stops:
        why = f"has a string that is empty or longer than {_LONGEST_STOP}"
        require(1 <= len(text) <= _LONGEST_STOP, "stop", UNSET, why)
        for special in specials_in(tokenizer, text)[:1]:
            assert isinstance(tokenizer, HubTokenizer)
            name = tokenizer.token(special)
            why, remedy = f"has the special token {name!r} among text", f"use {name!r}"
            require(name == text, "stop", text, why, remedy)
    last = tokenizer.vocab_size - 1
    is_fine = isinstance(ids, list) and all(type(id_) is int and 0 <= id_ <= last for id_ in ids)
    why = "is not a list of ids"
    require(is_fine, "stop_token_ids", stop_token_ids, why, f"use 0 to {last}")
    return tuple(stops), tuple(ids)


class TextReader:
    """The text of one row while it is decoded.

    *Settled* tokens no longer change. In rows that rewrite no tokens, these are the tokens before
    the first hole. In rows that remask or resample, they are the tokens of finished blocks. A
    running row with edits has no settled tokens.

    The text ends at the first of the strings in `stops`, which it includes if `keeps_stop`. A
    string that is the name of a special token ends the text at this token, as `stop_ids` do. An
    infill ends at its last token.

    Attributes:
      start: position of the first token that is not given.
      is_infill: whether given tokens follow generated ones.
    """

    def __init__(
        self,
        model: Model,
        request: Request,
        stops: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        *,
        keeps_stop: bool = False,
    ):
        self._tokenizer, self._eos_ids = model.tokenizer, model.eos_ids
        specials = {stop: specials_in(self._tokenizer, stop) for stop in stops}
        self._stops = tuple(stop for stop in stops if not specials[stop])
        self._name_of = {ids[0]: stop for stop, ids in specials.items() if ids}
        self._stop_ids = {*stop_ids, *self._name_of}
        self._sample, self._keeps_stop = request.sample, keeps_stop
        commit = self._sample.table.commit[self._sample.order]
        self._changes = self._sample.refines or commit.rewrites is not None
        is_free = request.is_open(model.tokenizer.mask_id)
        (free,) = np.nonzero(is_free)
        self.start = int(free[0]) if free.size else request.tokens.size
        self.is_infill = bool(free.size) and not is_free[self.start :].all()
        unit, length = model.network.block_length or 1, self._sample.block_length
        self._block_start, self._block_length = self.start // unit * unit, length
        self._num_shown, self._place = 0, self.start

    def pieces(self, row: Row) -> list[NewText]:
        """Returns the settled text since the last call, which can be empty: at most one piece, and
        the last one when the row or its text has ended.
        """
        text, end, is_ended = self._read(row, self._num_settled(row))
        is_last = is_ended or row.status != Status.RUNNING
        if end <= self._place and not is_last:
            return []
        num_shown = len(text) if is_last else self._num_certain(text)
        piece = NewText(text[self._num_shown : num_shown], range(self._place, end), is_last)
        self._num_shown, self._place = max(num_shown, self._num_shown), end
        return [piece]

    def whole(self, row: Row) -> tuple[str, range, bool]:
        """Returns the text of a row, the positions of its tokens, and whether a stop string or EOS
        ended it.
        """
        text, end, is_ended = self._read(row, row.tokens.size)
        return text, range(self.start, end), is_ended

    def filled(self, row: Row) -> list[str]:
        """Returns the generated texts, one for each run of tokens that are not given."""
        is_free = ~row.is_frozen
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False))
        runs = zip(edges[::2], edges[1::2], strict=True)
        return [self._tokenizer.decode(row.tokens[first:end]) for first, end in runs]

    def _num_settled(self, row: Row) -> int:
        if row.status != Status.RUNNING:
            return row.tokens.size
        if self._sample.edits or (self._changes and (self.is_infill or not row.block)):
            return self.start
        if self._changes:
            return min(row.tokens.size, self._block_start + row.block * self._block_length)
        (holes,) = np.nonzero(row.tokens == self._tokenizer.mask_id)
        return int(holes[0]) if holes.size else row.tokens.size

    def _read(self, row: Row, settled: int) -> tuple[str, int, bool]:
        """Returns the text of the settled tokens up to a stop, the end of its tokens, and whether a
        stop or EOS ended it.
        """
        tokens, is_ended, name = row.tokens[:settled], False, ""
        if not self.is_infill:
            ids = {*self._eos_ids, *self._stop_ids}
            eos = int(first_eos(tokens, row.is_frozen[:settled], ids))
            tokens, is_ended = tokens[: eos + 1], eos < tokens.size
        end = last = tokens.size
        if is_ended and (stop_id := int(tokens[-1])) in self._stop_ids:
            last -= not self._keeps_stop
            name = self._name_of.get(stop_id, "") if self._keeps_stop else ""
        text = self._tokenizer.decode(tokens[self.start : last]) + name
        cut = self._cut(text)
        if cut is None:
            return text, end, is_ended

        def has_stop(end: int) -> bool:
            return self._cut(self._tokenizer.decode(tokens[self.start : end])) == cut

        # The shortest run of tokens whose text has the stop string.
        end = self.start + bisect.bisect_left(range(self.start, end), True, key=has_stop)
        return text[:cut], end, True

    def _cut(self, text: str) -> int | None:
        """Returns the index at which a text is cut, before or after its first stop string."""
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if not found:
            return None
        place, stop = min(found, key=lambda one: (one[0], len(one[1])))
        return place + len(stop) if self._keeps_stop else place

    def _num_certain(self, text: str) -> int:
        """Returns the length of the prefix that can be returned before the rest is known."""
        size = len(text.rstrip(_UNFINISHED))
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    size = min(size, len(text) - length)
                    break
        return size
