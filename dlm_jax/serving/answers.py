"""Answers of the protocol: choices, their log-probabilities, and what they took."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlm_jax.data import Tokenizer
from dlm_jax.inference.candidates import Written
from dlm_jax.inference.results import Row
from dlm_jax.serving.plan import Plan

_LEAST = -9999.0
_OBJECTS = {"completion": "text_completion", "chat": "chat.completion", "infill": "infill"}
_PREFIXES = {"completion": "cmpl", "chat": "chatcmpl", "infill": "infill"}


class Done(NamedTuple):
    """A choice that has been written.

    Attributes:
      text: of it.
      row: as it came out of the engine.
      places: of its tokens in the row.
      is_stopped: whether EOS or a stop ended it, or all gaps are filled.
      filled: of an infill, the text of each gap.
      infilled: of an infill, the whole text.
      prompt_tokens: that were given.
    """

    text: str
    row: Row
    places: range
    is_stopped: bool
    filled: tuple[str, ...] = ()
    infilled: str = ""
    prompt_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return "stop" if self.is_stopped else "length"


@dataclass
class Answer:
    """The objects of one answer.

    Attributes:
      plan: what was asked.
      model: its name.
      tokenizer: of the model.
      id: of the answer.
      created: seconds since 1970.
    """

    plan: Plan
    model: str
    tokenizer: Tokenizer
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{_PREFIXES[self.plan.kind]}-{uuid.uuid4().hex}"

    def whole(self, done: Sequence[Done]) -> dict[str, Any]:
        """The answer that comes in one piece."""
        choices = [self._choice(index, one) for index, one in enumerate(done)]
        return self._head(self._object) | {"choices": choices, "usage": self.usage(done)}

    def first(self, index: int) -> dict[str, Any]:
        """The event that begins a choice of a chat."""
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def piece(
        self, index: int, text: str, row: Row, places: range, reason: str | None
    ) -> dict[str, Any]:
        """An event with a piece of a choice."""
        logprobs = self._logprobs(row, places)
        delta: Any = text if self.plan.kind != "chat" else {"content": text} if text else {}
        event = self._event(index, delta, reason, logprobs)
        event["choices"][0] |= self._read_back(row, places)
        return event

    def canvas(self, index: int, row: Row, text: str, reason: str | None) -> dict[str, Any]:
        """An event with the whole canvas of a choice, in place of the one before.

        With a `reason` it is the last one, whose text is the answer: what stands behind its end,
        holes too, is no part of it.
        """
        delta: Any = text if self.plan.kind != "chat" else {"content": text}
        event = self._event(index, delta, reason, None)
        holes = 0 if reason else int((row.tokens == self.tokenizer.mask_id).sum())
        return event | {"diffusing": {"step": row.steps, "holes": holes}}

    def last(self, done: Sequence[Done]) -> dict[str, Any]:
        """The event with the usage."""
        return self._head(self._event_object) | {"choices": [], "usage": self.usage(done)}

    def usage(self, done: Sequence[Done]) -> dict[str, Any]:
        """What an answer took; beyond the protocol, forwards of the model and the first seed."""
        prompts = sum(one.prompt_tokens for one in done[:: self.plan.per_prompt])
        written = sum(len(one.places) for one in done)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "forwards": sum(int(one.row.counters.forwards) for one in done),
            "seed": self.plan.seed,
        }

    @property
    def _object(self) -> str:
        return _OBJECTS[self.plan.kind]

    @property
    def _event_object(self) -> str:
        return "chat.completion.chunk" if self.plan.kind == "chat" else self._object

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, index: int, delta: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        choice["delta" if self.plan.kind == "chat" else "text"] = delta
        return self._head(self._event_object) | {"choices": [choice]}

    def _choice(self, index: int, done: Done) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": done.finish_reason,
            "logprobs": self._logprobs(done.row, done.places),
        } | self._read_back(done.row, done.places)
        if self.plan.kind == "chat":
            return choice | {"message": {"role": "assistant", "content": done.text}}
        if self.plan.kind == "infill":
            return choice | {"text": done.infilled, "infills": list(done.filled)}
        echo = self.plan.echoes[index] if self.plan.echoes else ""
        return choice | {"text": echo + done.text}

    def _read_back(self, row: Row, places: range) -> dict[str, Any]:
        """How the tokens there came about, in the order in which they were written, if asked."""
        if not self.plan.read_back:
            return {}
        return {"read_back": [self._record(one) for one in row.read_back if one.place in places]}

    def _record(self, written: Written) -> dict[str, Any]:
        """A position that was written: what its row's chain left there, the likeliest first."""
        told = written.to_json(self.plan.read_back)
        texts = [self.tokenizer.decode([id_]) for id_ in told["ids"]]
        return told | {"text": self.tokenizer.decode([written.token]), "texts": texts}

    def _logprobs(self, row: Row, places: range) -> dict[str, Any] | None:
        """The log-probability of each token that was written, and of its rivals if asked."""
        if self.plan.rivals is None:
            return None
        written = [place for place in places if not row.is_frozen[place]]
        rivals = {record.place: record.candidates for record in row.read_back}
        told = []
        for place in written:
            top = []
            if place in rivals and self.plan.rivals:
                shown = rivals[place]
                pairs = zip(shown.ids.tolist(), shown.logprobs.tolist(), strict=True)
                top = [self._token(id_, p) for id_, p in list(pairs)[: self.plan.rivals]]
            token = self._token(int(row.tokens[place]), float(row.logprobs[place]))
            told.append(token | {"top_logprobs": top})
        if self.plan.kind == "chat":
            return {"content": told, "refusal": None}
        return self._table(told)

    def _token(self, id_: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([id_])
        number = logprob if math.isfinite(logprob) else _LEAST
        data = list(text.encode("utf-8", errors="replace"))
        return {"token": text, "logprob": number, "bytes": data}

    def _table(self, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Log-probabilities as ``/v1/completions`` tells them: a list for each thing."""
        offsets, end = [], 0
        for one in told:
            offsets.append(end)
            end += len(one["token"])
        tops = [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in told]
        return {
            "tokens": [one["token"] for one in told],
            "token_logprobs": [one["logprob"] for one in told],
            "top_logprobs": tops if self.plan.rivals else None,
            "text_offset": offsets,
        }
