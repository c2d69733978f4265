"""Streams the settled text of a row, truncated at stop strings."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.data import HubTokenizer, Tokenizer
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row
from dlm_jax.settings import UNSET, require
from dlm_jax.types import Status, first_eos

MOST_STOPS = 16
"""Maximum number of stop strings, and of stop ids, of a request."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of an unfinished character."""

_LONGEST_STOP = 1024


class NewText(NamedTuple):
    """New text of a row.

    Attributes:
      text: new text.
      places: positions of the tokens of this piece in the row.
      is_last: whether this is the last piece.
    """

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
        self._mask_id = model.tokenizer.mask_id
        specials = {stop: specials_in(self._tokenizer, stop) for stop in stops}
        self._stops = tuple(stop for stop in stops if not specials[stop])
        self._name_of = {ids[0]: stop for stop, ids in specials.items() if ids}
        self._stop_ids = {*stop_ids, *self._name_of}
        self._sample, self._keeps_stop = request.sample, keeps_stop
        commit = self._sample.table.commit[self._sample.order]
        self._changes = self._sample.refines or commit.rewrites is not None
        is_free = request.is_open(self._mask_id)
        (free,) = np.nonzero(is_free)
        self.start = int(free[0]) if free.size else request.tokens.size
        self.is_infill = bool(free.size) and not is_free[self.start :].all()
        # The end of the first block, and the length of all blocks; 0 if there is a single block.
        unit, self._length = model.network.block_length or 1, self._sample.block_length
        self._first_end = self.start // unit * unit + self._length
        self._num_shown, self._place = 0, self.start

    def _num_settled(self, row: Row) -> int:
        if row.status != Status.RUNNING:
            return row.tokens.size
        if self._sample.edits or (self._changes and (self.is_infill or not row.block)):
            return self.start
        if self._changes:
            return min(row.tokens.size, self._first_end + (row.block - 1) * self._length)
        (holes,) = np.nonzero(row.tokens == self._mask_id)
        return int(holes[0]) if holes.size else row.tokens.size

    def pieces(self, row: Row) -> list[NewText]:
        """Returns the new text since the last call, one piece for each finished block.

        Without blocks, settled text is returned as it is written.
        """
        settled = self._num_settled(row)
        tokens, is_ended = self._upto_end(row, settled)
        text = self._text(tokens, is_ended=is_ended)
        cut = self._stop(text)
        is_over = row.status != Status.RUNNING or is_ended or cut is not None
        end = tokens.size if is_over else settled
        ends = list(range(self._first_end, end + 1, self._length)) if self._length else []
        if is_over or not self._length:
            ends.append(end)
        ends = sorted({end for end in ends if end > self._place})
        if is_over and not ends:
            ends = [self._place]
        pieces = []
        for end in ends:
            is_last = is_over and end == ends[-1]
            upto = text if is_last else self._tokenizer.decode(tokens[self.start : end])
            upto = upto[:cut] if cut is not None else upto
            # The cut can be in an earlier block. Text after the cut is not returned.
            is_last = is_last or (cut is not None and len(upto) == cut)
            num_shown = len(upto) if is_last else self._num_certain(upto)
            places = range(self._place, self._covering(tokens, end, cut) if is_last else end)
            pieces.append(NewText(upto[self._num_shown : num_shown], places, is_last))
            self._num_shown, self._place = max(num_shown, self._num_shown), places.stop
            if is_last:
                break
        return pieces

    def whole(self, row: Row) -> tuple[str, range, bool]:
        """Returns the text of a row, the positions of its tokens, and whether a stop string or EOS
        ended it.
        """
        tokens, is_ended = self._upto_end(row, row.tokens.size)
        text = self._text(tokens, is_ended=is_ended)
        cut = self._stop(text)
        end = self._covering(tokens, tokens.size, cut)
        return text[:cut], range(self.start, end), is_ended or cut is not None

    def filled(self, row: Row) -> list[str]:
        """Returns the generated texts, one for each run of tokens that are not given."""
        is_free = ~row.is_frozen
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False))
        runs = zip(edges[::2], edges[1::2], strict=True)
        return [self._tokenizer.decode(row.tokens[first:end]) for first, end in runs]

    def _upto_end(self, row: Row, settled: int) -> tuple[np.ndarray, bool]:
        """Returns the settled tokens up to the first EOS or stop id, and whether there is one."""
        tokens, ids = row.tokens[:settled], {*self._eos_ids, *self._stop_ids}
        if self.is_infill:
            return tokens, False
        end = int(first_eos(tokens, row.is_frozen[:settled], ids))
        return tokens[: end + 1], end < tokens.size

    def _text(self, tokens: np.ndarray, *, is_ended: bool) -> str:
        """Returns the text of a row up to its end, which is excluded if it is a stop."""
        if not is_ended or (last := int(tokens[-1])) not in self._stop_ids:
            return self._tokenizer.decode(tokens[self.start :])
        if not self._keeps_stop:
            return self._tokenizer.decode(tokens[self.start : -1])
        return self._tokenizer.decode(tokens[self.start :]) + self._name_of.get(last, "")

    def _stop(self, text: str) -> int | None:
        """Returns the index at which a text is cut, before or after its first stop string."""
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if not found:
            return None
        place, stop = min(found, key=lambda one: (one[0], len(one[1])))
        return place + len(stop) if self._keeps_stop else place

    def _num_certain(self, text: str) -> int:
        """Returns the length of the prefix that can be returned before the rest is known."""
        size = len(text.rstrip(UNFINISHED))
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    size = min(size, len(text) - length)
                    break
        return size

    def _covering(self, tokens: np.ndarray, end: int, cut: int | None) -> int:
        """Returns the end of the shortest run of tokens that contains the stop string at `cut`."""
        if cut is None:
            return end

        def is_covered(last: int) -> bool:
            return self._stop(self._tokenizer.decode(tokens[self.start : last])) == cut

        return self.start + bisect.bisect_left(range(self.start, end), True, key=is_covered)
