"""Requests of the protocol as rows of the engine, resolved and checked before anything runs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, make_requests
from dlm_jax.inference.structure import regex_of_objects, regex_of_schema
from dlm_jax.serving.errors import ApiError, of_value, refused
from dlm_jax.serving.plan import Kind, Limits, Plan
from dlm_jax.serving.protocol import (
    Chat,
    Completion,
    Infill,
    Message,
    ResponseFormat,
    Sampled,
)
from dlm_jax.settings import nearest

SHORT = 16
"""New tokens of completions and infills by default."""

_TOLD = (
    "prefix",
    "suffix",
    "template",
    "prompt",
    "messages",
    "draft",
    "seed",
    "max_length",
    "tokens",
)
_GIVEN: dict[Kind, str] = {"completion": "prompt", "chat": "messages", "infill": "prefix"}
"""The field that holds what is given."""
_REMEMBERED = 1024


class Planner:
    """Makes plans for one model.

    Args:
      model: that runs them.
      name: what requests may call it.
      limits: of each request.
      defaults: settings that count where a request gives none.
      length: new tokens of completions and infills that give none.
    """

    def __init__(
        self, model: Model, name: str, limits: Limits, defaults: Mapping[str, Any] | None = None,
        length: int = SHORT,
    ):  # fmt: skip
        self.model, self.name, self.limits = model, name, limits
        self._length = length
        self._defaults = dict(defaults or {})
        self._settings = model.sample.table.settings
        self._known: dict[Any, Any] = {}

    def completion(self, asked: Completion) -> Plan:
        """Of ``/v1/completions``."""
        prompts = _prompts(asked.prompt)
        if asked.suffix is not None and asked.draft is not None:
            raise refused("suffix and draft exclude each other; give one of them", "suffix")
        if asked.echo and asked.suffix is not None:
            raise refused("echo means nothing with a suffix; drop one", "echo")
        length = asked.max_tokens
        contents = []
        for prompt in prompts:
            ids = self._encoded(prompt, "prompt") if isinstance(prompt, str) else prompt
            if length is None and asked.draft is None:
                length = max(1, min(self._length, self._room(asked) - len(ids)))
            if asked.suffix is not None:
                contents.append(self._gap(ids, asked.suffix, length or self._length, "prompt"))
            else:
                contents.append({"tokens": ids} if len(ids) else {"prompt": ""})
        if asked.draft is not None:
            contents = [content | {"draft": asked.draft} for content in contents]
        echoes = [p if isinstance(p, str) else self._text(p) for p in prompts if asked.echo]
        return self._plan(
            "completion", asked, contents, length=length, rivals=asked.logprobs, echoes=echoes
        )

    def chat(self, asked: Chat) -> Plan:
        """Of ``/v1/chat/completions``."""
        asked_lengths = (asked.max_tokens, asked.max_completion_tokens)
        lengths = {length for length in asked_lengths if length is not None}
        if len(lengths) > 1:
            raise refused(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )
        if asked.top_logprobs and not asked.logprobs:
            raise refused("top_logprobs means nothing without logprobs=true", "top_logprobs")
        content: dict[str, Any] = {"tokens": self.turns(asked.messages)}
        content |= {} if asked.draft is None else {"draft": asked.draft}
        rivals = (asked.top_logprobs or 0) if asked.logprobs else None
        return self._plan(
            "chat", asked, [content], length=min(lengths, default=None), rivals=rivals
        )

    def infill(self, asked: Infill) -> Plan:
        """Of ``/v1/infill``."""
        if (asked.template is None) == (asked.prefix is None and asked.suffix is None):
            raise refused("give prefix and suffix, or a template with <hole:8>", "template")
        if asked.template is not None:
            content: dict[str, Any] = {"template": asked.template}
        else:
            prefix = self._encoded(asked.prefix or "", "prefix")
            content = self._gap(
                prefix, asked.suffix or "", asked.max_tokens or self._length, "prefix"
            )
        return self._plan(
            "infill", asked, [content], length=asked.max_tokens, rivals=asked.logprobs
        )

    def usual(self) -> Iterator[Request]:
        """Requests of the length of each canvas, with and without a format, else by default."""
        longest = self.model.max_length
        lengths = {min(2**power, longest) for power in range(6, longest.bit_length() + 1)}
        for length in sorted(lengths | {longest}):
            for form in (None, ResponseFormat(type="json_object")):
                asked = Completion.model_validate({"max_tokens": length, "response_format": form})
                with contextlib.suppress(ApiError):  # the model, or a limit, does not allow it
                    yield from self.completion(asked).requests

    def turns(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the answer begins."""
        if self.model.chat is None:
            raise refused(
                "the model has no chat template; ask /v1/completions, or give the server one",
                "messages",
            )
        try:
            said = [{"role": one.role, "content": one.text} for one in messages]
            return self.model.chat.ids(said).tolist()
        except ValueError as error:
            raise refused(str(error), "messages") from None

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for a model that is not here."""
        if name is not None and name != self.name:
            raise ApiError(
                400, f"model {name[:100]!r} is not here; use {self.name!r}", "model",
                "model_not_found",
            )  # fmt: skip

    def _plan(
        self,
        kind: Kind,
        asked: Sampled,
        contents: list[dict[str, Any]],
        *,
        length: int | None,
        rivals: int | None,
        echoes: Sequence[str] = (),
    ) -> Plan:
        self.check_model(asked.model)
        self._check_stream(asked)
        settings = self._own_settings(asked, length)
        if (rivals or asked.read_back) and "fill" not in settings:
            settings["fill"] = "parallel"
        structure = self._structure(asked)
        if structure:
            settings = self._token_a_step(asked, settings) | settings | structure
        count = asked.n or 1
        if count * len(contents) > self.limits.rows:
            name = "n" if count > 1 else "prompt"
            raise refused(
                f"{count} rows of {len(contents)} prompts are more than {self.limits.rows}; "
                "ask for them in several requests", name,
            )  # fmt: skip
        try:
            stops = asked.stops
        except ValueError as error:
            raise refused(str(error), "stop") from None
        if structure and stops:
            raise refused("stop could cut a structure; drop it, or response_format", "stop")
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        reads = bool(rivals or asked.read_back)
        common = {"seed": seed, "max_length": self._room(asked), "read_back": reads}
        requests: list[Request] = []
        for place, content in enumerate(contents):
            requests += self._rows(
                _GIVEN[kind], content | settings, common,
                (place * count, count, len(contents) * count),
            )  # fmt: skip
        return Plan(
            kind, tuple(requests), stops, bool(asked.stream), self._has_usage(asked),
            bool(asked.diffusing), tuple(text for text in echoes for _ in range(count)), rivals,
            count, seed, asked.read_back or 0,
        )  # fmt: skip

    def _rows(
        self, given: str, own: dict[str, Any], common: dict[str, Any], place: tuple[int, int, int]
    ) -> list[Request]:
        content = "template" if "template" in own else given
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        try:
            made = make_requests(self.model, own, common, *place, known=self._known)
        except ValueError as error:
            names = {"gen_length": "max_tokens", "tokens": content, "prompt": content}
            found = of_value(error, names, {*self._settings, *_TOLD}, content)
            if found.param == "structure":
                found.param = "response_format"
                for name in ("order", "max_tokens"):
                    if f"{name}=" in found.message:
                        found.param = name
            raise found from None
        if made[0].sample.steps > self.limits.steps:
            raise refused(
                f"steps={made[0].sample.steps} is more than {self.limits.steps}; use fewer", "steps"
            )
        return made

    def _own_settings(self, asked: Sampled, length: int | None) -> dict[str, Any]:
        """The settings that a request gives by name, each checked alone."""
        given = {name: value for name, value in (asked.model_extra or {}).items()
                 if value is not None}  # fmt: skip
        if length is not None:
            if given.get("gen_length", length) != length:
                raise refused(
                    "gen_length is another name of max_tokens; give one of them", "gen_length"
                )
            given["gen_length"] = length
        for name, value in given.items():
            if name not in self._settings:
                known = (*type(asked).model_fields, *self._settings)
                raise refused(
                    f"{name[:60]!r} is not a field; {nearest(name[:60], known, value)}", name[:60]
                )
            try:
                self._settings[name].checked(value)
            except ValueError as error:
                raise of_value(error, {"gen_length": "max_tokens"}, self._settings, name) from None
        return self._defaults | given

    def _token_a_step(self, asked: Sampled, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that a structure can be held with, where the request gives none."""
        model, size = self.model, asked.max_tokens or self._room(asked)
        block = settings.get("block_length", model.sample.block_length)
        block = block or model.network.block_length
        steps = (size // block + 2) * block if block else size
        needed = {"order": "left_to_right", "schedule": "linear", "ignore_eos": False}
        return needed | {"steps": steps}

    def _structure(self, asked: Sampled) -> dict[str, Any]:
        """The settings that hold an answer to its format."""
        form = asked.response_format
        if form is None or form.type == "text":
            return {}
        if "structure" in (asked.model_extra or {}):
            raise refused("structure is another name of response_format; give one", "structure")
        missing = {"json_schema": form.json_schema, "regex": form.regex}
        if missing.get(form.type, "") is None:
            raise refused(f"response_format lacks {form.type}; give it", "response_format")
        try:
            if form.json_schema is not None:
                pattern = regex_of_schema(form.json_schema.schema_)
            else:
                pattern = form.regex or regex_of_objects()
            return {"structure": self.model.structures.automaton(pattern)}
        except ValueError as error:
            raise refused(str(error), "response_format") from None

    def _check_stream(self, asked: Sampled) -> None:
        for name in ("diffusing", "stream_options"):
            if getattr(asked, name) and not asked.stream:
                raise refused(f"{name} means nothing without stream=true", name)
        if asked.read_back and asked.diffusing:
            raise refused("read_back and diffusing do not go together; drop one",
                          "read_back")  # fmt: skip

    def _has_usage(self, asked: Sampled) -> bool:
        return asked.stream_options is not None and bool(asked.stream_options.include_usage)

    def _room(self, asked: Sampled) -> int:
        if asked.max_length is not None and asked.max_length > self.model.max_length:
            raise refused(
                f"max_length={asked.max_length} is more than {self.model.max_length}, the canvas "
                "of the model", "max_length",
            )  # fmt: skip
        return asked.max_length or self.model.max_length

    def _gap(self, ids: Sequence[int], suffix: str, length: int, name: str) -> dict[str, Any]:
        """A canvas with one gap."""
        mask_id = self.model.tokenizer.mask_id
        if mask_id in ids:
            raise refused(f"{name} holds MASK ({mask_id}); use a template", name)
        behind = self._encoded(suffix, "suffix")
        if length > self.model.max_length:
            raise refused(f"max_tokens={length} is more than the canvas holds", "max_tokens")
        tokens = np.concatenate([np.asarray(ids, np.int64), np.full(length, mask_id), behind])
        return {"tokens": tokens, "infill": True}

    def _encoded(self, text: str, name: str) -> Sequence[int]:
        try:
            return self.model.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise refused(f"{name}: {error}", name) from None

    def _text(self, ids: Sequence[int]) -> str:
        try:
            return self.model.tokenizer.decode(ids)
        except (ValueError, IndexError) as error:
            raise refused(f"prompt: {error}", "prompt") from None


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a request, each a text or ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused("prompt is an empty list; give a text", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if any(isinstance(one, list) and not one for one in prompt):
        raise refused("prompt has an empty list of ids; give at least one", "prompt")
    return prompt
