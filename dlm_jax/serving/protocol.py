"""The fields of requests, and their conversion to rows.

Each field is declared once, in the class of its endpoint or in `SamplingFields`, and described in
docs/serving.md; all other fields are settings (docs/settings.md). `Planner` converts requests to
rows.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pydantic
from pydantic import Field

from dlm_jax import Model, Request, make_requests
from dlm_jax.hf.chat import RESERVED
from dlm_jax.inference.request import (
    check_size,
    pattern_of_format,
    structured,
)
from dlm_jax.inference.results import stops_of
from dlm_jax.sampling.rules import BUILT_IN, with_rules
from dlm_jax.serving import tools
from dlm_jax.serving.answer import Answer
from dlm_jax.settings import UNSET, SettingError, nearest, renamed


class ApiError(Exception):
    """Raised for a rejected or failed request.

    Attributes:
      status: HTTP status.
      message: one line with the problem and the remedy.
      param: the invalid field, if any.
      code: a machine-readable code, if any.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        message = " ".join(message.split())  # a client's own names can contain line ends
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def refused(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param)


def of_fields(error: pydantic.ValidationError) -> ApiError:
    """Converts the last error of pydantic, which is that of the last member of a union."""
    last = error.errors(include_url=False, include_context=False)[-1]
    where = ".".join(str(part)[:60] for part in last["loc"])
    return refused(f"{where}: {last['msg']}", str(last["loc"][0]))


def of_value(error: ValueError, other: str, **names: str) -> ApiError:
    """Converts an error of the library.

    Args:
      error: an error about a setting or about `other`.
      other: the field to report if the error does not name a setting.
      names: the protocol's names of settings other than ``gen_length``.
    """
    line, field = str(error), other
    if isinstance(error, SettingError):
        name = error.others[0] if error.name == "structure" and error.others else error.name
        field = ({"gen_length": "max_tokens"} | names).get(name, name)
        # If there is no value, the message begins with the name.
        line = error.line("" if error.value is UNSET else field)
    return refused(line.replace("gen_length", "max_tokens"), field)


Ids = list[int]


class Fields(pydantic.BaseModel):
    """An object with strictly typed fields; unknown fields are ignored."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Fields):
    """Options of a stream. With `include_usage`, a final event contains the usage."""

    include_usage: bool | None = None


_ALIASES: dict[str, str] = {
    alias: "max_tokens" if name == "gen_length" else name
    for name, setting in BUILT_IN.settings.items()
    for alias in setting.aliases
} | {"gen_length": "max_tokens"}
"""Fields that have the effect of others, keyed by alias."""
_IGNORED = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
}


class SamplingFields(Fields):
    """Fields of all sampling requests. Fields that are not declared are settings, such as
    ``temperature``, or aliases of settings (`dlm_jax.settings.Setting.aliases`).

    Attributes:
      route: path of the endpoint.
      prefix_of_id: prefix of answer ids.
      object: ``object`` field of answers.
      event: ``object`` field of stream events.
      aliases: further names of fields.
    """

    model_config = pydantic.ConfigDict(extra="allow")
    route: ClassVar[str]
    prefix_of_id: ClassVar[str]
    object: ClassVar[str]
    event: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = _ALIASES

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _replace_aliases(cls, given: Any) -> Any:
        fields: dict[str, Any] = {}
        for name, value in given.items():
            if name in _IGNORED:
                continue
            field: Any = name if name in cls.model_fields else cls.aliases.get(name, name)
            if field in fields and value is None:
                continue
            if fields.get(field) is not None:
                raise refused(f"{field} is given under two names; pass one of them", name)
            fields[field] = value
        return fields

    @property
    def settings(self) -> dict[str, Any]:
        """The given fields that the class does not declare."""
        given = self.model_extra or {}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def functions(self) -> dict[str, dict[str, Any] | None]:
        """The functions that the answer can call, with their schemas."""
        return {}

    @property
    def rivals(self) -> int | None:
        """The number of alternatives to return per token; 0 returns only the token itself, and None
        no log-probabilities.
        """
        return getattr(self, "logprobs", None)


class Completion(SamplingFields):
    """A request to ``/v1/completions``."""

    route = "/v1/completions"
    prefix_of_id = "cmpl"
    object = event = "text_completion"

    prompt: str | Ids | list[str] | list[Ids] = ""
    suffix: str | None = None
    draft: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class Part(Fields):
    """A part of a turn."""

    type: Literal["text"]
    text: str


class Called(Fields):
    """A called function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: Called


class Message(Fields):
    """A chat turn. Assistant turns can have calls instead of text; tool turns contain the results
    of calls.
    """

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.tool_calls and self.role == "assistant"):
            raise refused(
                "messages: content is missing; pass content, or tool_calls of an assistant",
                "messages",
            )
        try:
            self.turn  # noqa: B018
        except ValueError as error:
            raise refused(f"messages: {error}", "messages") from None
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def turn(self) -> dict[str, Any]:
        """The turn for the chat template, with the arguments of calls as objects."""
        told: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.role == "tool":
            told |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            told["tool_calls"] = [one.model_dump() for one in self.tool_calls]
            for call in told["tool_calls"]:
                arguments = tools.arguments_of(call["function"]["arguments"])
                call["function"]["arguments"] = arguments
        return told


class Function(Fields):
    """A function that the model can call."""

    name: str = Field(pattern=f"^{tools.NAME.pattern}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class OneTool(Fields):
    type: Literal["function"]
    function: FunctionName


class Chat(SamplingFields):
    """A request to ``/v1/chat/completions``."""

    model_config = pydantic.ConfigDict(extra="allow")
    route = "/v1/chat/completions"
    prefix_of_id = "chatcmpl"
    object, event = "chat.completion", "chat.completion.chunk"
    aliases = _ALIASES | {"max_completion_tokens": "max_tokens"}

    messages: list[Message] = Field(min_length=1)
    draft: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def functions(self) -> dict[str, dict[str, Any] | None]:
        for name in ("tool_choice", "parallel_tool_calls"):
            if self.tools is None and getattr(self, name) not in (None, "none"):
                raise refused(f"{name} has no effect without tools; pass tools or remove it", name)
        given = [one.function for one in self.tools or ()]
        known = {one.name: one.parameters for one in given}
        if len(known) < len(given):
            raise refused("tools contains a function twice; remove one of them", "tools")
        if isinstance(self.tool_choice, OneTool):
            name = self.tool_choice.function.name
            if name not in known:
                raise refused(f"tool_choice={name[:64]!r} is not one of the tools", "tool_choice")
            return {name: known[name]}
        return {} if self.tool_choice == "none" else known

    @property
    def rivals(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Infill(SamplingFields):
    """A request to ``/v1/infill``: a text with gaps, such as ``<hole:8>``."""

    route = "/v1/infill"
    prefix_of_id = object = event = "infill"

    template: str
    logprobs: int | None = Field(None, ge=0, le=20)


@dataclass(frozen=True)
class Options:
    """Options of a server.

    Attributes:
      name: name under which the model is served.
      max_rows: maximum number of rows per request, over all prompts.
      max_waiting: maximum number of rows that wait for a slot.
      max_seconds: maximum duration of a request in seconds, including waiting.
      max_steps: maximum number of steps per row.
      key: API key that requests must contain; None if no key is required.
      defaults: default settings of requests.
      length: default number of new tokens in completions and infills.
      warms_up: whether programs for common requests are compiled at startup.
      hosts: values of ``Host``, without the port, that requests must have; empty allows any.
    """

    name: str
    max_rows: int = 128
    max_waiting: int = 1024
    max_seconds: float = 600.0
    max_steps: int = 4096
    key: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    length: int = 16
    warms_up: bool = False
    hosts: tuple[str, ...] = ()


class Planner:
    """Converts requests to rows for one model."""

    def __init__(self, model: Model, options: Options):
        self.model, self.name, self._options = model, options.name, options
        self._length = options.length
        self._defaults = dict(options.defaults)
        rules = self._defaults.pop("rules", ())
        self._rules = {"rules": rules} if rules else {}
        self._table = with_rules(rules)
        self._known: dict[Any, Any] = {}

    def answer(self, asked: SamplingFields) -> Answer:
        """Returns the rows of a request.

        Raises:
          ApiError: the request is invalid.
        """
        self.check_model(asked.model)
        if isinstance(asked, Chat):
            return self._chat(asked)
        if isinstance(asked, Infill):
            return self._infill(asked)
        assert isinstance(asked, Completion)
        return self._completion(asked)

    def _completion(self, asked: Completion) -> Answer:
        prompts = _prompts(asked.prompt)
        if asked.suffix is not None and asked.draft is not None:
            raise refused("suffix and draft cannot be combined; pass only one of them", "suffix")
        if asked.suffix is not None and asked.stop_token_ids:
            raise refused(
                "stop_token_ids has no effect with a suffix; remove one", "stop_token_ids"
            )
        length = asked.max_tokens
        contents: list[dict[str, Any]] = []
        for prompt in prompts:
            ids = self._prompt_ids(prompt) if isinstance(prompt, str) else prompt
            if length is None and asked.draft is None:
                length = max(1, min(self._length, self._room(asked) - len(ids)))
            if asked.suffix is not None:
                contents.append(self._gap(ids, asked.suffix, length or self._length))
            else:
                contents.append(_start(ids, asked.draft))
        return self._answer(asked, "prompt", contents, length)

    def _chat(self, asked: Chat) -> Answer:
        if asked.top_logprobs and not asked.logprobs:
            raise refused("top_logprobs has no effect without logprobs=true", "top_logprobs")
        content = _start(self._chat_ids(asked), asked.draft)
        return self._answer(asked, "messages", [content], asked.max_tokens)

    def _infill(self, asked: Infill) -> Answer:
        for name in ("stop", "stop_token_ids"):
            if getattr(asked, name):
                raise refused(f"{name} has no effect on an infill; remove it", name)
        return self._answer(asked, "template", [{"template": asked.template}], asked.max_tokens)

    def usual(self) -> Iterator[Request]:
        """Yields requests with defaults for each canvas length: without and with a response format,
        and with log-probabilities.
        """
        longest = self.model.max_length
        lengths = {min(2**power, longest) for power in range(6, longest.bit_length() + 1)}
        for own in ({}, {"response_format": {"type": "json_object"}}, {"logprobs": 1}):
            for length in sorted(lengths | {longest}):
                asked = Completion.model_validate(own | {"max_tokens": length})
                with contextlib.suppress(ApiError):  # refused by the model or a limit
                    yield from self.answer(asked).requests

    def _chat_ids(self, asked: Chat) -> list[int]:
        """Returns the ids of a conversation up to the start of the answer."""
        if self.model.chat is None:
            raise refused(
                "the model has no chat template; use /v1/completions or pass one to the server",
                "messages",
            )
        more = dict(asked.chat_template_kwargs or {})
        for name in sorted(RESERVED & more.keys()):
            raise refused(
                f"chat_template_kwargs contains {name}, which the server sets; remove it",
                "chat_template_kwargs",
            )
        if asked.tools:
            more["tools"] = [one.model_dump(exclude_none=True) for one in asked.tools]
        size = sum(len(one.text) for one in asked.messages)
        try:
            check_size("messages", size, self.model.max_length)
            return self.model.chat.ids([one.turn for one in asked.messages], **more).tolist()
        except ValueError as error:
            raise refused(str(error), "messages") from None

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for an unknown model."""
        if name is not None and name != self.name:
            message = f"model {name[:100]!r} is not served; use {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _answer(
        self,
        asked: SamplingFields,
        content: str,
        contents: list[dict[str, Any]],
        length: int | None,
    ) -> Answer:
        """Returns the rows that begin with these contents, which the field `content` gave."""
        settings = self._settings(asked, length)
        try:
            stops, stop_ids = stops_of(self.model.tokenizer, asked.stop, asked.stop_token_ids)
        except ValueError as error:
            raise of_value(error, "stop") from None
        shape, pattern = self._pattern(asked, settings)
        if pattern is not None:
            if stops or stop_ids:
                name = "stop" if stops else "stop_token_ids"
                raise refused(f"{name} can truncate a structure; remove {name} or {shape}", name)
            try:
                common = self._defaults | self._rules | {"max_length": self._room(asked)}
                settings = structured(self.model, common, settings | {"structure": pattern})
            except ValueError as error:
                raise of_value(error, shape, structure=shape) from None
        count = asked.n or 1
        if count * len(contents) > self._options.max_rows:
            raise refused(
                f"{count} rows of {len(contents)} prompts exceed {self._options.max_rows}; "
                "send several requests",
                "n" if count > 1 else "prompt",
            )
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        common = {"seed": seed, "max_length": self._room(asked), "read_back": bool(asked.rivals)}
        common |= self._rules | self._defaults
        requests: list[Request] = []
        for place, own in enumerate(contents):
            try:
                requests += make_requests(
                    self.model, own | settings, common, place * count, count, known=self._known
                )
            except ValueError as error:
                if asked.rivals and getattr(error, "name", "") == "fill":
                    raise refused(f"logprobs: {error}", "logprobs") from None
                names = {"tokens": content, "prompt": content, "structure": shape}
                raise of_value(error, content, **names) from None
            steps, most = requests[-1].sample.steps, self._options.max_steps
            if steps > most:
                raise refused(f"steps={steps} exceeds {most}; use fewer steps", "steps")
        return Answer(asked, self.name, self.model.tokenizer, requests, stops, stop_ids, seed)

    def _settings(self, asked: SamplingFields, length: int | None) -> dict[str, Any]:
        """Returns the given settings by name; `make_requests` checks their values."""
        given, known = asked.settings, self._table.request_settings
        if length is not None:
            given["gen_length"] = length
        for name, value in given.items():
            if name not in known:
                names = (*type(asked).model_fields, *known)
                advice = renamed(name, self._table.settings) or nearest(name, names)
                raise refused(f"{name[:60]!r} is not a field of {asked.route}; {advice}", name[:60])
            if isinstance(value, list) and not known[name].is_list:
                raise refused(f"{name} is a list; a request has one value", name)
        return given

    def _pattern(self, asked: SamplingFields, settings: dict[str, Any]) -> tuple[str, str | None]:
        """Returns the field that gives the answer its structure, and its regular expression."""
        functions, form = asked.functions, asked.response_format
        values = {
            "tools": functions,
            "response_format": form if form != {"type": "text"} else None,
            "structure": settings.get("structure"),
        }
        given = [name for name, value in values.items() if value]
        if len(given) > 1:
            raise refused(f"{given[1]} and {given[0]} cannot be combined; remove one", given[1])
        shape = given[0] if given else "structure"
        try:
            if functions:
                assert isinstance(asked, Chat)
                return shape, tools.pattern_of(
                    functions,
                    is_parallel=bool(asked.parallel_tool_calls),
                    may_talk=asked.tool_choice in (None, "auto"),
                )
            if form is not None:
                return shape, pattern_of_format(form)
            if given:
                return shape, settings["structure"]
        except ValueError as error:
            raise of_value(error, shape) from None
        return shape, None

    def _room(self, asked: SamplingFields) -> int:
        most = self.model.max_length
        if asked.max_length is not None and asked.max_length > most:
            raise refused(f"max_length={asked.max_length} exceeds the canvas, {most}", "max_length")
        return asked.max_length or most

    def _gap(self, ids: Sequence[int], suffix: str, length: int) -> dict[str, Any]:
        """The tokens of a canvas with one gap of `length` tokens between `ids` and `suffix`."""
        mask_id = self.model.tokenizer.mask_id
        if mask_id in ids:
            raise refused(f"prompt contains MASK ({mask_id}); use /v1/infill", "prompt")
        behind = np.asarray(self._encoded(suffix, "suffix"), np.int64)
        if length > self.model.max_length:
            raise refused(f"max_tokens={length} exceeds the canvas", "max_tokens")
        tokens = np.concatenate([np.asarray(ids, np.int64), np.full(length, mask_id), behind])
        return {"tokens": tokens, "infill": True}

    def _prompt_ids(self, text: str) -> Sequence[int]:
        """Encodes a text at the start of a row, with the ids that the tokenizer puts there."""
        return [*self.model.prefix_ids, *self._encoded(text, "prompt")]

    def _encoded(self, text: str, name: str) -> Sequence[int]:
        """Encodes the text that a client passed in the field `name`."""
        try:
            check_size(name, len(text), self.model.max_length)
            return self.model.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise refused(f"{name}: {error}", name) from None


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused("prompt is an empty list; pass a string", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if any(isinstance(one, list) and not one for one in prompt):
        raise refused("prompt has an empty list of ids; pass at least one id", "prompt")
    return prompt


def _start(ids: Sequence[int], draft: str | None) -> dict[str, Any]:
    """The content of a row that begins with these ids."""
    content: dict[str, Any] = {"tokens": ids} if len(ids) else {"prompt": ""}
    return content if draft is None else content | {"draft": draft}
