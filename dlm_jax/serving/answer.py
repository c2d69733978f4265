"""The objects and events of answers."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlm_jax import Model, Request, Row
from dlm_jax.data import Tokenizer
from dlm_jax.inference.results import NewText, TextReader
from dlm_jax.serving.tools import Calls

_LEAST = -9999.0


class Done(NamedTuple):
    """A finished choice. For an infill, it includes the text in each gap and the whole text."""

    text: str
    row: Row
    places: range
    is_stopped: bool
    filled: tuple[str, ...] = ()
    infilled: str = ""
    prompt_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        """The number of tokens that were not given."""
        return int((~self.row.is_frozen[self.places.start : self.places.stop]).sum())

    @property
    def finish_reason(self) -> str:
        return "stop" if self.is_stopped else "length"


@dataclass
class Answer:
    """The rows to run for a request and the objects that form the answer.

    `requests` has one row per choice, grouped by prompt. `seed` is that of the first row.
    """

    asked: Any
    model: str
    tokenizer: Tokenizer
    requests: Sequence[Request]
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    seed: int
    _calls: dict[int, Calls] = field(default_factory=dict)
    _ends: dict[int, _TextEnd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"{self.asked.prefix_of_id}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._is_chat = self.asked.prefix_of_id == "chatcmpl"
        self.is_infill = self.asked.prefix_of_id == "infill"
        self._may_call = bool(self.asked.functions)

    def reader(self, model: Model, request: Request) -> TextReader:
        """Returns a reader for the text of a choice."""
        keeps_stop = bool(self.asked.include_stop_str_in_output)
        return TextReader(model, request, self.stops, self.stop_ids, keeps_stop=keeps_stop)

    def whole(self, done: Sequence[Done]) -> dict[str, Any]:
        choices = [self._choice(index, one) for index, one in enumerate(done)]
        return self._head(self.asked.object) | {"choices": choices, "usage": self.usage(done)}

    def begin(self) -> list[dict[str, Any]]:
        """Returns the first events: the role of each choice in a chat."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, delta, None) for index in range(len(self.requests))]

    def grown(
        self, index: int, row: Row, pieces: Sequence[NewText], done: Done | None
    ) -> list[dict[str, Any]]:
        """Returns the events of new text of a choice."""
        events = []
        for one in pieces:
            if not one.text and not one.is_last:
                continue
            reason = done.finish_reason if done is not None and one.is_last else None
            logprobs = self._logprobs(index, row, one.places)
            text, parts = one.text, []
            if self._may_call:
                calls = self._calls.setdefault(index, Calls())
                text, parts = calls.grown(text, is_last=one.is_last)
                reason = "tool_calls" if reason is not None and calls.whole else reason
            delta: Any = text if not self._is_chat else {"content": text} if text else {}
            if parts:
                delta["tool_calls"] = parts
            events.append(self._event(index, delta, reason, logprobs))
        return events

    def end(self, done: Sequence[Done]) -> list[dict[str, Any]]:
        """Returns the event with the usage, if requested."""
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._head(self.asked.event) | {"choices": [], "usage": self.usage(done)}]

    def usage(self, done: Sequence[Done]) -> dict[str, Any]:
        """Returns the usage of an answer. The fields ``forwards`` and ``seed`` (that of the first
        row) extend OpenAI's protocol.
        """
        prompts = sum(one.prompt_tokens for one in done[:: self.asked.n or 1])
        written = sum(one.completion_tokens for one in done)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "forwards": sum(int(one.row.counters.forwards) for one in done),
            "seed": self.seed,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(
        self, index: int, delta: Any, reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        choice["delta" if self._is_chat else "text"] = delta
        return self._head(self.asked.event) | {"choices": [choice]}

    def _choice(self, index: int, done: Done) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": done.finish_reason}
        choice["logprobs"] = self._logprobs(index, done.row, done.places)
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": done.text}
            if self._may_call:
                calls = Calls()
                calls.grown(done.text, is_last=True)
                if calls.whole:
                    choice["finish_reason"] = "tool_calls"
                    message |= {"content": None, "tool_calls": calls.whole}
            return choice | {"message": message}
        if self.is_infill:
            return choice | {"text": done.infilled, "infills": list(done.filled)}
        return choice | {"text": done.text}

    def _logprobs(self, index: int, row: Row, places: range) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens at `places` that were written and, if
        requested, of their alternatives.
        """
        if self.asked.rivals is None:
            return None
        records = {record.place: record.candidates for record in row.read_back}
        told = []
        end = self._ends.setdefault(index, _TextEnd(self.tokenizer))
        for place in places:
            id_, tops = int(row.tokens[place]), []
            if not row.is_frozen[place]:
                if place in records and self.asked.rivals:
                    found = records[place]
                    tops = list(zip(found.ids.tolist(), found.clean_logprobs.tolist(), strict=True))
                told.append(self._told(id_, float(row.logprobs[place]), tops, end))
            end.add(id_)
        if self._is_chat:
            return {"content": told, "refusal": None}
        return self._table(told)

    def _told(
        self, id_: int, logprob: float, tops: list[tuple[int, float]], end: _TextEnd
    ) -> dict[str, Any]:
        """Returns a token at the end of a text with its alternatives, most likely first."""
        # The alternatives and the token itself are from one distribution, and so are equal values.
        logprob = dict(tops).get(id_, logprob)
        shown = sorted(tops, key=lambda one: -one[1])[: self.asked.rivals]
        token = self._token(id_, logprob, end)
        return token | {"top_logprobs": [self._token(*one, end) for one in shown]}

    def _token(self, id_: int, logprob: float, end: _TextEnd) -> dict[str, Any]:
        text, data = end.piece(id_)
        number = logprob if math.isfinite(logprob) else _LEAST
        return {"token": text, "logprob": number, "bytes": list(data)}

    def _table(self, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns log-probabilities as parallel lists, as in ``/v1/completions``."""
        tops = []
        for one in tokens:
            # The token itself is always present. Of others with one text, the most likely one is.
            shown = {top["token"]: top["logprob"] for top in reversed(one["top_logprobs"])}
            tops.append(shown | {one["token"]: one["logprob"]})
        return {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": tops if self.asked.rivals else None,
        }


class _TextEnd:
    """The end of a text to which tokens are added.

    Tokens are decoded behind the previous ones, because a character can have several tokens, and
    some tokenizers decode the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._new: list[int] = []
        self._known = ""  # the text of both

    def piece(self, id_: int) -> tuple[str, bytes]:
        """Returns the text that a token would add, and its bytes. A part of a character has the
        text U+FFFD and its own part of the character's bytes.
        """
        data = self._tokenizer.bytes_of(id_)
        if data is not None:
            return data.decode("utf-8", errors="replace"), data
        whole = self._tokenizer.decode([*self._before, *self._new, id_])
        text = whole[len(self._known) :]
        return text, text.encode("utf-8", errors="replace")

    def add(self, id_: int) -> None:
        self._new.append(id_)
        whole = self._tokenizer.decode([*self._before, *self._new])
        # A character has at most 4 bytes in UTF-8, and so at most 4 tokens.
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and len(self._new) <= 4:
            self._known = whole
            return
        self._before, self._new = self._new, []
        self._known = self._tokenizer.decode(self._before)
