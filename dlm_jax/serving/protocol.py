"""The request fields, their conversion to rows, and the objects in responses.

Each field is declared once, in the class of its endpoint or in `SamplingFields`; the fields of
settings are generated (docs/settings.md). `Planner` converts requests to rows, and `Answer` creates
the objects in responses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import pydantic
from pydantic import Field

from dlm_jax.config import layered
from dlm_jax.data import Tokenizer, bytes_of
from dlm_jax.hf.chat import RESERVED
from dlm_jax.inference import token_logprobs
from dlm_jax.inference.candidates import Written
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import NewText, TextReader, stops_of
from dlm_jax.inference.request import (
    Request,
    check_size,
    make_requests,
    pattern_of_format,
    settings_of_call,
    structured,
)
from dlm_jax.inference.results import Row
from dlm_jax.sampling.params import PRESETS
from dlm_jax.sampling.rules import BUILT_IN, with_rules
from dlm_jax.serving import tools
from dlm_jax.serving.parts import text_parts
from dlm_jax.settings import FINITE, UNSET, Setting, SettingError, nearest, renamed

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


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
        kind = _TYPES.get(HTTPStatus(self.status), kind)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def refused(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param)


def stopping() -> ApiError:
    """Returns the error for a request that is still running at the end of the grace period."""
    return ApiError(503, "the server is shutting down; try again later", code="stopping")


def of_fields(error: pydantic.ValidationError, given: Any) -> ApiError:
    """Converts the error of pydantic that lies deepest in a request to an ApiError."""
    errors = error.errors(include_url=False, include_context=False)
    deepest = max(errors, key=lambda one: len(_path(given, one)))
    name, *rest = _path(given, deepest) or [deepest["loc"][0]]
    inner = [f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in rest]
    field, param = f"{str(name)[:60]}{''.join(inner)}", str(name) or None
    if deepest["type"] == "extra_forbidden":
        return refused(f"{field} is not a field; remove it", param)
    return refused(f"{field}: {deepest['msg']}", param)


def _path(given: Any, error: Any) -> list[str | int]:
    """Returns the location of an error without the names of union members, which pydantic adds."""
    path: list[str | int] = []
    for part in error["loc"]:
        try:
            given = given[part]
        except (LookupError, TypeError):
            if error["type"] != "missing" or part is not error["loc"][-1]:
                continue
        path.append(part)
    return path


def of_value(
    error: ValueError, other: str, named: Mapping[str, str] = {}, **names: str
) -> ApiError:
    """Converts an error of the library to an ApiError.

    Args:
      error: an error about a setting or about `other`.
      other: the field to report if the error does not name a setting.
      named: maps this server's field names to the client's.
      names: maps names of settings other than ``gen_length`` to the protocol's.
    """
    if not isinstance(error, SettingError):
        return refused(_in_fields(str(error)), other)
    names = {"gen_length": "max_tokens"} | names
    name = error.others[0] if error.name == "structure" and error.others else error.name
    field = names.get(name, name)
    field = named.get(field, field)
    # If there is no value, the message begins with the name.
    return refused(_in_fields(error.line("" if error.value is UNSET else field)), field)


def _in_fields(message: str) -> str:
    """Joins a message of the library into one line and replaces ``gen_length`` with the protocol's
    name.
    """
    return " ".join(message.split()).replace("gen_length", "max_tokens")


Ids = list[int]
Stop = str | list[str]


class Fields(pydantic.BaseModel):
    """An object with strictly typed fields; unknown fields are rejected unless they are null."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}


class StreamOptions(Fields):
    """Options of a stream. With `include_usage`, a final event contains the usage.
    `include_obfuscation` is ignored.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    """A JSON schema, which is always enforced. The protocol's other fields are ignored."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The format of the answer. The regular expression `regex` matches the whole answer."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Conversation(Fields):
    """Options of the chat template, as in vLLM and SGLang.

    Attributes:
      add_generation_prompt: whether the header of the answer is appended to the turns; true by
        default.
      continue_final_message: whether the answer continues the last turn.
      chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_ALIASES: dict[str, str] = {
    alias: "max_tokens" if name == "gen_length" else name
    for name, setting in BUILT_IN.settings.items()
    for alias in setting.aliases
}
"""Fields that have the effect of others, keyed by alias."""
_FORMATS: dict[str, str] = dict.fromkeys(
    ("guided_json", "guided_choice", "json_schema", "regex", "structured_outputs", "grammar"),
    "use response_format with a schema or a regex",
)
"""Advice about fields of other servers."""


def _field_of(setting: Setting) -> Any:
    """The optional field for a setting. Its schema has type, range and help; the record of the
    settings checks the value.
    """
    schema = pydantic.TypeAdapter(setting.annotation).json_schema()
    if setting.kind in (int, float):
        limits = {"minimum": setting.low, "maximum": setting.high}
        schema |= {name: limit for name, limit in limits.items() if abs(limit) < FINITE}
    note = {"description": setting.help, "default": None}
    return Annotated[
        Any, pydantic.WithJsonSchema({"anyOf": [schema, {"type": "null"}]} | note)
    ], None


SettingFields = pydantic.create_model(
    "SettingFields",
    **{name: _field_of(setting) for name, setting in BUILT_IN.request_settings.items()},
)
"""One field per setting (docs/settings.md), such as ``temperature`` and ``top_p``."""


class SamplingFields(SettingFields):
    """Fields of all sampling requests, and of the settings. Custom rules can declare others.

    An alias of a setting (`dlm_jax.settings.Setting.aliases`) has the effect of the setting.

    Attributes:
      route: path of the endpoint.
      content: name of the endpoint's input field.
      prefix_of_id: prefix of answer ids.
      object: ``object`` field of answers.
      event: ``object`` field of stream events.
      model: name of the model; optional.
      max_tokens: number of new tokens.
      max_length: maximum number of tokens per row, including the prompt.
      n: number of rows per prompt.
      seed: seed of the first row; random by default.
      stop: strings that end the answer and are excluded from it. The name of a special token is
        that token.
      stop_token_ids: ids that end the answer and are excluded from it.
      include_stop_str_in_output: whether the answer includes the stop string that ended it.
      return_token_ids: whether the answer contains the ids of its tokens and of the prompt.
      stream: whether the answer is a stream of events.
      stream_options: options of a stream.
      response_format: format of the answer.
      diffusing: whether a stream shows the whole canvas during denoising.
      read_back: number of candidates per position to return, with their logits.
      user, store, metadata, service_tier, safety_identifier, prompt_cache_key: ignored.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())
    route: ClassVar[str]
    content: ClassVar[str]
    prefix_of_id: ClassVar[str]
    object: ClassVar[str]
    event: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: Stop | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    diffusing: bool | None = None
    read_back: int | None = Field(None, ge=1, le=64)
    user: str | None = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _replace_aliases(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        fields: dict[str, Any] = {}
        for name, value in given.items():
            field: Any = name if name in cls.model_fields else _ALIASES.get(name, name)
            if field in fields and value is None:
                continue
            if fields.get(field) is not None:
                raise refused(f"{field} is given under two names; pass one of them", name)
            fields[field] = value
        return fields

    @property
    def named(self) -> Mapping[str, str]:
        """The names that the endpoint has for fields of this class, by field."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """The given settings and fields that the class does not declare."""
        declared = {name: getattr(self, name) for name in SettingFields.model_fields}
        given = declared | (self.model_extra or {})
        return {name: value for name, value in given.items() if value is not None}

    @property
    def has_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def rivals(self) -> int | None:
        """The number of alternatives to return per token; None without log-probabilities."""
        return getattr(self, "logprobs", None)


class Completion(SamplingFields):
    """A request to ``/v1/completions``.

    Attributes:
      prompt: a string, several strings, ids, or several lists of ids.
      suffix: text after the gap.
      draft: text to refine after the prompt.
      echo: whether the answer begins with the prompt.
      logprobs: number of alternatives to return per token; 0 returns only the token itself. With
        `echo`, the tokens of the prompt have the values of `token_logprobs.token_logprobs`.
      max_tokens: number of new tokens; 0 with `echo` returns only the prompt.
    """

    route = "/v1/completions"
    content, prefix_of_id = "prompt", "cmpl"
    object = event = "text_completion"

    prompt: str | Ids | list[str] | list[Ids] = ""
    suffix: str | None = None
    draft: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0)


class Part(Fields):
    """A part of a turn; `cache_control` is ignored."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class Called(Fields):
    """A called function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call in an earlier answer; `index`, its place in a stream, is ignored."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None


class Message(Fields):
    """A chat turn. Assistant turns can have calls instead of text; tool turns contain the results
    of calls.

    Clients also send the other fields of an earlier answer: they must be null, or are ignored
    (`reasoning`, `reasoning_content`, `annotations` and `cache_control`).
    """

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.tool_calls and self.role == "assistant"):
            raise refused(
                "messages: content is missing; pass content, or tool_calls of an assistant",
                "messages",
            )
        if self.tool_calls and self.role != "assistant":
            raise refused(
                "messages: only assistant turns can have tool_calls; remove them", "messages"
            )
        try:
            for call in self.tool_calls or ():
                tools.arguments_of(call.function.arguments)
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
        for name in ("name", "tool_call_id") if self.role == "tool" else ():
            told |= {} if getattr(self, name) is None else {name: getattr(self, name)}
        if self.tool_calls:
            told["tool_calls"] = [
                {
                    "id": one.id,
                    "type": one.type,
                    "function": {
                        "name": one.function.name,
                        "arguments": tools.arguments_of(one.function.arguments),
                    },
                }
                for one in self.tool_calls
            ]
        return told


class Function(Fields):
    """A function that the model can call. `strict` is ignored, because calls always match the
    schema.
    """

    name: str = Field(pattern=f"^{tools.NAME.pattern}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A function that the model can call; `cache_control` is ignored."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None


class FunctionName(Fields):
    name: str


class OneTool(Fields):
    type: Literal["function"]
    function: FunctionName


class Chat(SamplingFields, Conversation):
    """A request to ``/v1/chat/completions``.

    Attributes:
      messages: the turns so far.
      max_completion_tokens: newer name of `max_tokens`.
      draft: draft of the answer to refine.
      logprobs: whether the log-probabilities of tokens are returned.
      top_logprobs: number of alternatives to return per token.
      tools: functions that the model can call, with JSON schemas of their arguments.
      tool_choice: ``none``, ``auto`` (the default: text or a call), ``required`` or one function.
      parallel_tool_calls: whether an answer can have several calls; false by default.
    """

    model_config = SamplingFields.model_config
    route = "/v1/chat/completions"
    content, prefix_of_id = "messages", "chatcmpl"
    object, event = "chat.completion", "chat.completion.chunk"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    draft: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def functions(self) -> dict[str, dict[str, Any] | None]:
        """The functions that the answer can call, with their schemas."""
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


class TurnPart(Fields):
    """Text of a turn, written by a client or by this server."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Turn(Fields):
    """A turn of ``/v1/responses``, written by a client or by this server; `phase` is ignored."""

    type: Literal["message"] = "message"
    role: str
    content: str | list[TurnPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(Fields):
    """`ResponseFormat` in the form of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    regex: str | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Fields):
    format: TextFormat | None = None


class Responses(SamplingFields, Conversation):
    """A request to ``/v1/responses``; nothing is stored.

    Attributes:
      input: a string or the turns so far.
      instructions: text of a system turn before the input.
      max_output_tokens: this endpoint's name for `max_tokens`.
      text: format of the answer.
      metadata: data that is copied to the answer.
      store: must be false, because responses are never stored.
      background: must be false.
      truncation: must be ``disabled``, because prompts are never truncated.
    """

    model_config = SamplingFields.model_config
    route = "/v1/responses"
    content, prefix_of_id = "input", "resp"
    object = event = "response"

    input: str | list[Turn]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    @pydantic.model_validator(mode="after")
    def _has_format(self) -> Self:
        form = None if self.text is None else self.text.format
        if form is not None and self.response_format is not None:
            raise refused("response_format is another name of text; pass only one of them", "text")
        if form is not None:
            schema = None if form.schema_ is None else JsonSchema(schema=form.schema_)
            self.response_format = ResponseFormat(
                type=form.type, json_schema=schema, regex=form.regex
            )
        return self

    @property
    def named(self) -> Mapping[str, str]:
        names = {"max_tokens": "max_output_tokens", "messages": "input"}
        return names if self.text is None else names | {"response_format": "text"}

    @property
    def turns(self) -> list[Message]:
        """The turns of the conversation, in the form of `Chat.messages`."""
        given = [Turn(role="user", content=self.input)] if isinstance(self.input, str) else []
        given = given or [turn for turn in self.input if isinstance(turn, Turn)]
        turns = [] if self.instructions is None else [("system", self.instructions)]
        for turn in given:
            content = turn.content
            text = content if isinstance(content, str) else "".join(one.text for one in content)
            turns.append((turn.role, text))
        return [Message(role=role, content=text) for role, text in turns]


class Infill(SamplingFields):
    """A request to ``/v1/infill``: a prefix and a suffix, or a template.

    Attributes:
      prefix: text before the gap.
      suffix: text after the gap.
      template: text with gaps, written ``<hole:8>``, or ``<hole>`` for a gap of `max_tokens`
        tokens.
      logprobs: as in `Completion`.
    """

    route = "/v1/infill"
    content = "prefix"
    prefix_of_id = object = event = "infill"

    prefix: str | None = None
    suffix: str | None = None
    template: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class Detokenize(Fields):
    """A request to ``/detokenize``."""

    model: str | None = None
    tokens: Ids


class Tokenize(Conversation):
    """A request to ``/tokenize``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
      rows: maximum number of rows per request, over all prompts.
      waiting: maximum number of rows that wait for a slot.
      body: maximum size of a request in bytes.
      seconds: maximum duration of a request in seconds, including waiting.
      steps: maximum number of steps per row.
    """

    rows: int = 128
    waiting: int = 1024
    body: int = 1 << 20
    seconds: float = 600.0
    steps: int = 4096


SHORT = 16
"""Default number of new tokens in completions and infills."""

_REMEMBERED = 1024


class Planner:
    """Converts requests to rows for one model.

    `length` is the default number of new tokens in completions and infills.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        limits: Limits,
        defaults: Mapping[str, Any] | None = None,
        length: int = SHORT,
    ):
        self.model, self.name, self.limits = model, name, limits
        self._length = length
        self._defaults = dict(defaults or {})
        rules = self._defaults.pop("rules", ())
        self._rules = {"rules": rules} if rules else {}
        self._table = with_rules(rules)
        self._settings = self._table.request_settings
        self._known: dict[Any, Any] = {}
        self._patterns: dict[bytes, str] = {}  # of earlier requests, by shape

    def answer(self, asked: SamplingFields) -> Answer:
        makers: dict[type[Any], Callable[[Any], Answer]] = {
            Completion: self._completion,
            Chat: self._chat,
            Responses: self._response,
            Infill: self._infill,
        }
        try:
            self.check_model(asked.model)
            return makers[type(asked)](asked)
        except ApiError as error:
            error.param = asked.named.get(error.param or "", error.param)
            raise

    def _completion(self, asked: Completion) -> Answer:
        prompts = _prompts(asked.prompt)
        if asked.suffix is not None and asked.draft is not None:
            raise refused("suffix and draft cannot be combined; pass only one of them", "suffix")
        if asked.echo and asked.suffix is not None:
            raise refused("echo has no effect with a suffix; remove one", "echo")
        if asked.suffix is not None and asked.stop_token_ids:
            raise refused(
                "stop_token_ids has no effect with a suffix; remove one", "stop_token_ids"
            )
        if asked.max_tokens == 0:
            return self._echo(asked, prompts)
        length = asked.max_tokens
        contents = []
        for prompt in prompts:
            ids = self.prompt_ids(prompt, "prompt") if isinstance(prompt, str) else prompt
            if length is None and asked.draft is None:
                length = max(1, min(self._length, self._room(asked) - len(ids)))
            if asked.suffix is not None:
                contents.append(self._gap(ids, asked.suffix, length or self._length, "prompt"))
            else:
                contents.append({"tokens": ids} if len(ids) else {"prompt": ""})
        if asked.draft is not None:
            contents = [content | {"draft": asked.draft} for content in contents]
        echoes = [p if isinstance(p, str) else self.text(p) for p in prompts if asked.echo]
        return self._answer(asked, contents, length, echoes)

    def _echo(self, asked: Completion, prompts: Sequence[str | list[int]]) -> Answer:
        """Returns an answer that has only the prompts, in rows without holes."""
        if not asked.echo:
            raise refused("max_tokens=0 requires echo; use at least 1", "max_tokens")
        for name in ("draft", "diffusing", "read_back", "response_format", "structure"):
            if getattr(asked, name, None):
                raise refused(f"{name} has no effect with max_tokens=0; remove it", name)
        answer = self._answer(asked, [{"prompt": ""}] * len(prompts), 1)
        rows, count = [], asked.n or 1
        for prompt in prompts:
            ids = self.encoded(prompt, "prompt") if isinstance(prompt, str) else prompt
            if not 1 <= len(ids) <= self._room(asked):
                raise refused(
                    f"prompt has {len(ids)} tokens; use 1 to {self._room(asked)}", "prompt"
                )
            if (mask_id := self.model.tokenizer.mask_id) in ids:
                raise refused(f"prompt contains MASK ({mask_id}), which is a hole", "prompt")
            answer.echoes = [*answer.echoes, *[self.text(ids)] * count]
            rows += [np.asarray(ids, np.int32)] * count
        answer.requests = [
            replace(request, tokens=tokens)
            for request, tokens in zip(answer.requests, rows, strict=True)
        ]
        return answer

    def score_prompts(self, answer: Answer, goes_on: Callable[[], bool]) -> None:
        """Sets the log-probabilities of the prompts of an answer that echoes them.

        `goes_on` is as in `token_logprobs.token_logprobs`.
        """
        count = answer.asked.n or 1
        texts = [answer.prompt(index) for index in range(0, len(answer.requests), count)]
        try:
            found = token_logprobs.token_logprobs(
                self.model,
                [ids for ids in texts if ids.size],
                num_top=max(1, answer.asked.rivals or 0),
                goes_on=goes_on,
            )
        except ValueError as error:
            raise refused(f"logprobs with echo: {error}", "logprobs") from None
        first = 0 if self.model.network.predicts_first else 1
        if any(not np.isfinite(one.logprobs[first:]).all() for one in found):
            raise ApiError(500, "the model's logits are not finite", code="non_finite")
        answer.scores = {one.ids.tobytes(): one for one in found}

    def _chat(self, asked: Chat) -> Answer:
        length = _one_length(asked, "max_completion_tokens")
        if asked.top_logprobs and not asked.logprobs:
            raise refused("top_logprobs has no effect without logprobs=true", "top_logprobs")
        self._check_size(sum(len(one.text) for one in asked.messages), "messages")
        content: dict[str, Any] = {"tokens": self.chat_ids(asked.messages, asked)}
        content |= {} if asked.draft is None else {"draft": asked.draft}
        return self._answer(asked, [content], length)

    def _response(self, asked: Responses) -> Answer:
        for name in ("diffusing", "read_back", "return_token_ids"):
            if getattr(asked, name):
                raise refused(f"{name} is not available here; use /v1/chat/completions", name)
        if asked.n not in (None, 1):
            raise refused(f"n={asked.n}: a response has a single text; send several requests", "n")
        length = _one_length(asked, "max_output_tokens")
        if self.model.chat is None and isinstance(asked.input, str) and asked.instructions is None:
            ids = self.prompt_ids(asked.input, "input")
            content: dict[str, Any] = {"tokens": ids} if len(ids) else {"prompt": ""}
        else:
            self._check_size(sum(len(one.text) for one in asked.turns), "messages")
            content = {"tokens": self.chat_ids(asked.turns, asked)}
        return self._answer(asked, [content], length)

    def _infill(self, asked: Infill) -> Answer:
        if (asked.template is None) == (asked.prefix is None and asked.suffix is None):
            raise refused("pass prefix and suffix, or a template with <hole:8>", "template")
        for name in ("stop", "stop_token_ids"):
            if getattr(asked, name):
                raise refused(f"{name} has no effect on an infill; remove it", name)
        if asked.template is not None:
            content: dict[str, Any] = {"template": asked.template}
        else:
            prefix = self.prompt_ids(asked.prefix or "", "prefix")
            length = asked.max_tokens or self._length
            content = self._gap(prefix, asked.suffix or "", length, "prefix")
        return self._answer(asked, [content], asked.max_tokens)

    def usual(self) -> Iterator[Request]:
        """Yields requests with defaults for each canvas length: without and with a response format,
        and with log-probabilities.
        """
        longest = self.model.max_length
        lengths = {min(2**power, longest) for power in range(6, longest.bit_length() + 1)}
        for own in ({}, {"response_format": ResponseFormat(type="json_object")}, {"logprobs": 1}):
            for length in sorted(lengths | {longest}):
                asked = Completion.model_validate(own | {"max_tokens": length})
                with contextlib.suppress(ApiError):  # refused by the model or a limit
                    yield from self.answer(asked).requests

    def shape(self, asked: SamplingFields) -> bytes | None:
        """Returns a key for the fields that determine a request's structure; None without one."""
        form = asked.response_format
        structure = asked.settings.get("structure", self._defaults.get("structure"))
        chat = asked if isinstance(asked, Chat) and asked.tools is not None else None
        if form is None and chat is None and not structure:
            return None
        calls = chat and chat.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"})
        told = [None if form is None else form.model_dump(), structure, calls]
        return hashlib.sha256(json.dumps(told, default=str).encode()).digest()

    def is_compiled(self, asked: SamplingFields) -> bool:
        """Returns whether a request's structure is known from an earlier request."""
        pattern = self._patterns.get(self.shape(asked) or b"")
        return pattern is not None and self.model.structures.is_compiled(pattern)

    def chat_ids(self, messages: Sequence[Message], asked: Conversation) -> list[int]:
        """Returns the ids of a conversation up to the start of the answer."""
        if self.model.chat is None:
            raise refused(
                "the model has no chat template; use /v1/completions or pass one to the server",
                "messages",
            )
        continues = bool(asked.continue_final_message)
        if continues and asked.add_generation_prompt:
            raise refused(
                "continue_final_message and add_generation_prompt cannot be combined; "
                "pass only one of them",
                "continue_final_message",
            )
        begins = not continues and asked.add_generation_prompt is not False
        more = asked.chat_template_kwargs or {}
        offered = asked.tools if isinstance(asked, Chat) else None
        if offered and "tools" in more:
            raise refused(
                "chat_template_kwargs also sets tools; remove one", "chat_template_kwargs"
            )
        for name in sorted(RESERVED & more.keys()):
            raise refused(
                f"chat_template_kwargs contains {name}, which the server sets; remove it",
                "chat_template_kwargs",
            )
        if offered:
            more = more | {
                "tools": [
                    one.model_dump(exclude={"cache_control"}, exclude_none=True) for one in offered
                ]
            }
        said = [one.turn for one in messages]
        try:
            return self.model.chat.ids(
                said, begins_answer=begins, continues=continues, **more
            ).tolist()
        except ValueError as error:
            raise refused(str(error), "messages") from None

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for an unknown model."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model {name[:100]!r} is not served; use {self.name!r}",
                "model",
                "model_not_found",
            )

    def _answer(
        self,
        asked: SamplingFields,
        contents: list[dict[str, Any]],
        length: int | None,
        echoes: Sequence[str] = (),
    ) -> Answer:
        if asked.diffusing and not asked.stream:
            raise refused("diffusing requires stream=true", "diffusing")
        if asked.read_back and asked.diffusing:
            raise refused("read_back and diffusing cannot be combined; remove one", "read_back")
        settings = self._own_settings(asked, length)
        reads = "read_back" if asked.read_back else "logprobs" if asked.rivals else ""
        text = settings.get("structure", self._defaults.get("structure"))
        shape = "structure" if text or "structure" in settings else "response_format"
        shape = "tools" if isinstance(asked, Chat) and asked.functions else shape
        try:
            pattern = self._pattern(asked)
            structure = None if pattern is None else self.model.structures.automaton(pattern)
        except ValueError as error:
            raise of_value(error, shape, asked.named, structure=shape) from None
        if shape == "tools" and asked.diffusing:
            raise refused("tools and diffusing cannot be combined; remove one", "diffusing")
        if structure is not None:
            length = asked.max_tokens or self._room(asked)
            try:
                known = layered(self._defaults, settings, table=self._table)
                settings = structured(self.model, known | self._rules, length) | {
                    "structure": structure
                }
            except ValueError as error:
                raise of_value(error, shape, asked.named) from None
        count = asked.n or 1
        if count * len(contents) > self.limits.rows:
            name = "n" if count > 1 else "prompt"
            raise refused(
                f"{count} rows of {len(contents)} prompts exceed {self.limits.rows}; "
                "send several requests",
                name,
            )
        stops, stop_ids = self._stops(asked)
        if structure is not None and (stops or stop_ids):
            name = "stop" if stops else "stop_token_ids"
            raise refused(f"{name} can truncate a structure; remove {name} or {shape}", name)
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        common = {"seed": seed, "max_length": self._room(asked), "read_back": bool(reads)}
        common |= self._rules | self._defaults
        if reads:
            settings = self._same_fill(settings)
        requests: list[Request] = []
        for place, content in enumerate(contents):
            requests += self._rows(
                asked,
                content | settings,
                common,
                (place * count, count, len(contents) * count),
                shape,
                reads,
            )
        text, key = pattern or text, self.shape(asked)
        if isinstance(text, str) and text and key is not None:
            if len(self._patterns) > _REMEMBERED:
                self._patterns.clear()
            self._patterns[key] = text
        kind = ResponseAnswer if isinstance(asked, Responses) else Answer
        return kind(
            asked,
            self.name,
            self.model.tokenizer,
            requests,
            stops,
            stop_ids,
            seed,
            [text for text in echoes for _ in range(count)],
        )

    def _rows(
        self,
        asked: SamplingFields,
        own: dict[str, Any],
        common: dict[str, Any],
        place: tuple[int, int, int],
        shape: str,
        reads: str,
    ) -> list[Request]:
        content = "template" if "template" in own else asked.content
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        try:
            made = make_requests(self.model, own, common, *place, known=self._known)
        except ValueError as error:
            if reads and getattr(error, "name", "") == "fill":
                raise refused(f"{reads}: {error}", reads) from None
            names = {"tokens": content, "prompt": content, "structure": shape}
            raise of_value(error, content, asked.named, **names) from None
        if made[0].sample.steps > self.limits.steps:
            raise refused(
                f"steps={made[0].sample.steps} exceeds {self.limits.steps}; use fewer steps",
                "steps",
            )
        return made

    def _same_fill(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings with the fill and order of a request without candidates, so that
        reading candidates does not change the text.
        """
        try:
            known = layered(self._defaults, settings, table=self._table)
            sample = settings_of_call(self.model, known | self._rules)
        except ValueError:
            return settings  # `make_requests` reports the error
        pinned = {"fill": sample.fill}
        if sample.order != settings.get("order", self.model.sample.order):
            pinned["order"] = sample.order
        return settings | pinned

    def _stops(self, asked: SamplingFields) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Returns the stop strings and the stop ids of a request."""
        try:
            return stops_of(self.model.tokenizer, asked.stop, asked.stop_token_ids)
        except ValueError as error:
            raise of_value(error, "stop", asked.named) from None

    def _own_settings(self, asked: SamplingFields, length: int | None) -> dict[str, Any]:
        """Returns the given settings by name; `make_requests` checks their values."""
        given = asked.settings
        if length is not None:
            if given.get("gen_length", length) != length:
                raise refused(
                    "gen_length is another name of max_tokens; pass only one of them", "gen_length"
                )
            given["gen_length"] = length
        for name, value in given.items():
            if name not in self._settings:
                raise self._unknown(asked, name[:60])
            if isinstance(value, list) and not self._settings[name].is_list:
                raise refused(f"{name} is a list; a request has one value", name)
        return given

    def _unknown(self, asked: SamplingFields, name: str) -> ApiError:
        """Returns the error for a name that is neither a setting nor a field of the endpoint."""
        known = (*type(asked).model_fields, *self._settings)
        bodies = (Completion, Chat, Responses, Infill)
        others = [one.route for one in bodies if name in one.model_fields]
        if others:
            where = " and ".join(others)
            return refused(f"{name!r} is a field of {where}, not of {asked.route}; remove it", name)
        advice = _FORMATS.get(name) or renamed(name, known, self._table.settings)
        advice = advice or nearest(name, known)
        return refused(f"{name!r} is not a field; {advice}", name)

    def _pattern(self, asked: SamplingFields) -> str | None:
        """Returns a regular expression for the answer: for calls, calls or text with ``auto``, or a
        response format.
        """
        form, structure = asked.response_format, asked.settings.get("structure")
        has_structure = structure is not None
        shaped = form is not None and form.type != "text"
        if isinstance(asked, Chat) and (functions := asked.functions):
            if shaped or has_structure:
                name = "response_format" if shaped else "structure"
                raise refused(f"{name} and tools cannot be combined; use tool_choice=none", name)
            return tools.pattern_of(
                functions,
                is_parallel=bool(asked.parallel_tool_calls),
                may_talk=asked.tool_choice in (None, "auto"),
            )
        if form is None or not shaped:
            return BUILT_IN.settings["structure"].checked(structure) if structure else None
        if has_structure:
            raise refused(
                "structure is another name of response_format; pass only one of them", "structure"
            )
        schema = None if form.json_schema is None else {"schema": form.json_schema.schema_}
        return pattern_of_format({"type": form.type, "json_schema": schema, "regex": form.regex})

    def _room(self, asked: SamplingFields) -> int:
        if asked.max_length is not None and asked.max_length > self.model.max_length:
            raise refused(
                f"max_length={asked.max_length} exceeds {self.model.max_length}, the canvas of "
                f"the model",
                "max_length",
            )
        return asked.max_length or self.model.max_length

    def _gap(self, ids: Sequence[int], suffix: str, length: int, name: str) -> dict[str, Any]:
        """Returns the tokens of a canvas with one gap of `length` tokens between `ids` and
        `suffix`.
        """
        mask_id = self.model.tokenizer.mask_id
        if mask_id in ids:
            raise refused(f"{name} contains MASK ({mask_id}); use a template", name)
        behind = np.asarray(self._fitting(suffix, "suffix"), np.int64)
        if length > self.model.max_length:
            raise refused(f"max_tokens={length} exceeds the canvas", "max_tokens")
        tokens = np.concatenate([np.asarray(ids, np.int64), np.full(length, mask_id), behind])
        return {"tokens": tokens, "infill": True}

    def prompt_ids(self, text: str, name: str) -> Sequence[int]:
        """Encodes a text at the start of a row, with the ids that the tokenizer puts there."""
        return [*self.model.prefix_ids, *self._fitting(text, name)]

    def _fitting(self, text: str, name: str) -> Sequence[int]:
        """Encodes a text that must fit the canvas."""
        self._check_size(len(text), name)
        return self.encoded(text, name)

    def _check_size(self, size: int, name: str) -> None:
        try:
            check_size(name, size, self.model.max_length)
        except ValueError as error:
            raise refused(str(error), name) from None

    def encoded(self, text: str, name: str) -> Sequence[int]:
        """Encodes the text that a client passed in the field `name`."""
        try:
            return self.model.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise refused(f"{name}: {error}", name) from None

    def text(self, ids: Sequence[int], name: str = "prompt") -> str:
        """Decodes the ids that a client passed in the field `name`."""
        try:
            return self.model.tokenizer.decode(ids)
        except (ValueError, IndexError, OverflowError) as error:
            raise refused(f"{name}: {error}", name) from None

    def props(self, slots: int) -> dict[str, Any]:
        """Returns the response body of ``/props``: the model and its defaults."""
        model = self.model
        sample = settings_of_call(model, self._defaults | self._rules)
        shown = {name: getattr(sample, name, None) for name in self._settings}
        plain = (bool, int, float, str, list, tuple, type(None))
        return {
            "model": self.name,
            "family": model.family,
            "heads": list(model.heads),
            "max_model_len": model.max_length,
            "vocab_size": model.tokenizer.vocab_size,
            "total_slots": slots,
            "presets": sorted({**PRESETS, **model.presets}),
            "chat_template": None if model.chat is None else model.chat.source,
            "default_generation_settings": {
                name: value for name, value in shown.items() if isinstance(value, plain)
            },
        }


def _one_length(asked: SamplingFields, other: str) -> int | None:
    """Returns the number of new tokens from `max_tokens` or the endpoint's alias for it."""
    lengths = {asked.max_tokens, getattr(asked, other)} - {None}
    if len(lengths) > 1:
        raise refused(f"max_tokens and {other} differ; pass only one of them", "max_tokens")
    return min(lengths, default=None)


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

    `requests` has one row per choice, grouped by prompt, and `echoes` the text at the start of each
    choice. `seed` is that of the first row. `created` is in seconds since 1970. ``[DONE]`` ends a
    stream of the answer if `ends_with_done`. `scores` has the log-probabilities of echoed prompts.
    """

    ends_with_done: ClassVar[bool] = True
    asked: SamplingFields
    model: str
    tokenizer: Tokenizer
    requests: Sequence[Request]
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    seed: int
    echoes: Sequence[str] = ()
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    scores: Mapping[bytes, token_logprobs.TokenLogprobs] = field(default_factory=dict)
    _calls: dict[int, tools.Calls] = field(default_factory=dict)
    _ends: dict[int, _TextEnd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.asked.prefix_of_id}-{uuid.uuid4().hex}"

    def reader(self, model: Model, request: Request) -> TextReader:
        """Returns a reader for the text of a choice."""
        keeps_stop = bool(self.asked.include_stop_str_in_output)
        return TextReader(model, request, self.stops, self.stop_ids, keeps_stop=keeps_stop)

    @property
    def scores_prompts(self) -> bool:
        return bool(self.echoes) and self.asked.rivals is not None

    def prompt(self, index: int) -> np.ndarray:
        """Returns the ids of a choice's prompt, the tokens before its first hole."""
        (free,) = np.nonzero(self.requests[index].is_open(self.tokenizer.mask_id))
        return self.requests[index].tokens[: free[0] if free.size else None]

    def whole(self, done: Sequence[Done]) -> dict[str, Any]:
        choices = [self._choice(index, one) for index, one in enumerate(done)]
        told = self._head(self.asked.object) | {"choices": choices, "usage": self.usage(done)}
        return told | (self._prompt_ids(0) if self._is_chat else {})

    def begin(self) -> list[dict[str, Any]]:
        """Returns the first events: the role of each choice in a chat."""
        delta = {"role": "assistant", "content": ""}
        choices = range(len(self.requests) if self._is_chat else 0)
        ids = self._prompt_ids(0) if self._is_chat else {}
        return [self._event(index, delta, None, None) | ids for index in choices]

    def echo(self, index: int, row: Row) -> list[dict[str, Any]]:
        """Returns the event that echoes the prompt of a choice, if requested."""
        is_told = self.echoes and self.echoes[index] and not self.asked.diffusing
        if not is_told:
            return []
        event = self._event(index, self.echoes[index], None, self._logprobs(index, row, range(0)))
        event["choices"][0] |= self._read_back(row, range(0)) | self._ids(row, range(0))
        return [event]

    def grown(
        self, index: int, row: Row, reader: TextReader, pieces: Sequence[NewText], done: Done | None
    ) -> list[dict[str, Any]]:
        """Returns the new events of a choice. A canvas event replaces the previous one."""
        reason = None if done is None else done.finish_reason
        if self.asked.diffusing:
            return [self._canvas(index, row, reader, done)]
        events = []
        for one in pieces:
            if one.text or one.is_last or self.asked.return_token_ids:
                told = reason if one.is_last else None
                events.append(self._piece(index, one.text, row, one.places, told))
            if one.places.start == reader.start and events and not self._is_chat:
                events[-1]["choices"][0] |= self._prompt_ids(index)
        return events

    def _piece(
        self, index: int, text: str, row: Row, places: range, reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, row, places)
        parts: list[dict[str, Any]] = []
        if self._may_call:
            calls = self._calls.setdefault(index, tools.Calls())
            text, parts = calls.grown(text)
            reason = "tool_calls" if reason is not None and calls.whole else reason
        delta: Any = text if not self._is_chat else {"content": text} if text else {}
        if parts:
            delta["tool_calls"] = parts
        event = self._event(index, delta, reason, logprobs)
        event["choices"][0] |= self._read_back(row, places) | self._ids(row, places)
        return event

    def _ids(self, row: Row, places: range) -> dict[str, Any]:
        """Returns the ids of the tokens at `places`, if requested."""
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": row.tokens[places.start : places.stop].tolist()}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """Returns the ids of a choice's prompt (the tokens before its first hole), if requested."""
        if not self.asked.return_token_ids or self.is_infill:
            return {}
        return {"prompt_token_ids": self.prompt(index).tolist()}

    def _canvas(
        self, index: int, row: Row, reader: TextReader, done: Done | None
    ) -> dict[str, Any]:
        """Returns an event with the whole canvas of a choice. It replaces the previous event.

        The last event contains only the text of the answer.
        """
        parts = text_parts(
            self.tokenizer, row, reader.start, None if done is None else done.places.stop
        )
        holes = sum(len(text) for text, step in parts if step is None)
        text = "".join(text for text, _ in parts)
        if done is not None:
            text, holes, rest = done.text, 0, len(done.text)
            for place, (part, step) in enumerate(parts):
                parts[place] = (part[:rest], step)
                rest -= len(parts[place][0])
        delta: Any = text if not self._is_chat else {"content": text}
        event = self._event(index, delta, None if done is None else done.finish_reason, None)
        shown = [list(one) for one in parts if one[0]]
        return event | {"diffusing": {"step": row.steps, "holes": holes, "parts": shown}}

    def end(self, done: Sequence[Done]) -> list[dict[str, Any]]:
        told = self._head(self.asked.event) | {"choices": [], "usage": self.usage(done)}
        return [told] if self.asked.has_usage else []

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

    @property
    def is_infill(self) -> bool:
        return isinstance(self.asked, Infill)

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.asked, Chat)

    @property
    def _may_call(self) -> bool:
        return isinstance(self.asked, Chat) and bool(self.asked.functions)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, index: int, delta: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        choice["delta" if self._is_chat else "text"] = delta
        return self._head(self.asked.event) | {"choices": [choice]}

    def _choice(self, index: int, done: Done) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": done.finish_reason,
            "logprobs": self._logprobs(index, done.row, done.places),
        } | self._read_back(done.row, done.places)
        is_infill = self.is_infill
        choice |= self._ids(done.row, range(done.row.tokens.size) if is_infill else done.places)
        choice |= {} if self._is_chat else self._prompt_ids(index)
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": done.text}
            if self._may_call:
                calls = tools.Calls()
                calls.grown(done.text)
                if calls.whole:
                    choice["finish_reason"] = "tool_calls"
                    message |= {"content": None, "tool_calls": calls.whole}
            return choice | {"message": message}
        if is_infill:
            return choice | {"text": done.infilled, "infills": list(done.filled)}
        echo = self.echoes[index] if self.echoes else ""
        return choice | {"text": echo + done.text}

    def _read_back(self, row: Row, places: range) -> dict[str, Any]:
        """Returns the candidates of the tokens at `places` in commit order, if requested."""
        if not self.asked.read_back:
            return {}
        return {"read_back": [self._record(one) for one in row.read_back if one.place in places]}

    def _record(self, written: Written) -> dict[str, Any]:
        """Returns a written token and the candidates after the chain, most likely first."""
        told = written.to_json(self.asked.read_back or 0)
        texts = [self.tokenizer.decode([id_]) for id_ in told["ids"]]
        return told | {"text": self.tokenizer.decode([written.token]), "texts": texts}

    def _logprobs(self, index: int, row: Row, places: range) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens at `places` that were written and, if
        requested, of their alternatives. With an echo, the tokens of the prompt come first.
        """
        if self.asked.rivals is None:
            return None
        records = {record.place: record.candidates for record in row.read_back}
        told = [] if index in self._ends else self._echoed(index)
        end = self._end_of(index, row, places)
        for place in places:
            id_, tops = int(row.tokens[place]), []
            if not row.is_frozen[place]:
                if place in records and self.asked.rivals:
                    found = records[place]
                    tops = list(zip(found.ids.tolist(), found.clean_logprobs.tolist(), strict=True))
                told.append(self._told(id_, float(row.logprobs[place]), tops, end))
            end.add(id_)
        if self._is_chat:
            return {"content": [one[0] for one in told], "refusal": None}
        return self._table(told)

    def _echoed(self, index: int) -> list[tuple[dict[str, Any], int]]:
        """Returns the tokens of an echoed prompt with their log-probabilities and offsets."""
        if not self.scores_prompts or not self.prompt(index).size:
            return []
        scores, end = self.scores[self.prompt(index).tobytes()], _TextEnd(self.tokenizer)
        told = []
        for id_, logprob, ids, tops in zip(*(one.tolist() for one in scores), strict=True):
            if math.isnan(logprob):  # the first token, which nothing predicts
                text, data = end.piece(id_)
                one = {"token": text, "logprob": None, "bytes": list(data), "top_logprobs": None}
                told.append((one, end.size))
            else:
                pairs = list(zip(ids, tops, strict=True)) if self.asked.rivals else []
                told.append(self._told(id_, logprob, pairs, end))
            end.add(id_)
        return told

    def _end_of(self, index: int, row: Row, places: range) -> _TextEnd:
        """Returns the end of the text of a choice, behind its echo or the text before its gap."""
        if index not in self._ends:
            text = self.echoes[index] if self.echoes else ""
            if self.is_infill and not self.asked.stream:
                text = self.tokenizer.decode(row.tokens[: places.start])
            self._ends[index] = _TextEnd(self.tokenizer, len(text))
        return self._ends[index]

    def _told(
        self, id_: int, logprob: float, tops: list[tuple[int, float]], end: _TextEnd
    ) -> tuple[dict[str, Any], int]:
        """Returns a token at the end of a text with its alternatives, most likely first, and its
        offset.
        """
        # The alternatives and the token itself are from one distribution, and so are equal values.
        logprob = dict(tops).get(id_, logprob)
        shown = sorted(tops, key=lambda one: -one[1])[: self.asked.rivals]
        token = self._token(id_, logprob, end)
        return token | {"top_logprobs": [self._token(*one, end) for one in shown]}, end.size

    def _token(self, id_: int, logprob: float, end: _TextEnd) -> dict[str, Any]:
        text, data = end.piece(id_)
        number = logprob if math.isfinite(logprob) else _LEAST
        return {"token": text, "logprob": number, "bytes": list(data)}

    def _table(self, told: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any]:
        """Returns log-probabilities as parallel lists, as in ``/v1/completions``."""
        tokens = [one for one, _ in told]
        tops = []
        for one in tokens:
            if one["logprob"] is None:
                tops.append(None)
                continue
            # The token itself is always present. Of others with one text, the most likely one is.
            shown = {top["token"]: top["logprob"] for top in reversed(one["top_logprobs"])}
            tops.append(shown | {one["token"]: one["logprob"]})
        return {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": tops if self.asked.rivals else None,
            "text_offset": [offset for _, offset in told],
        }


class _TextEnd:
    """The end of a text to which tokens are added.

    Tokens are decoded behind the previous ones, because a character can have several tokens, and
    some tokenizers decode the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 0):
        self._tokenizer, self._size = tokenizer, size
        self._before: list[int] = []
        self._new: list[int] = []
        self._known = ""  # the text of both

    @property
    def size(self) -> int:
        """The offset at which the text of the next token begins."""
        return self._size

    def piece(self, id_: int) -> tuple[str, bytes]:
        """Returns the text that a token would add, and its bytes. A part of a character has the
        text U+FFFD and its own part of the character's bytes.
        """
        data = bytes_of(self._tokenizer, id_)
        if data is not None:
            return data.decode("utf-8", errors="replace"), data
        whole = self._tokenizer.decode([*self._before, *self._new, id_])
        text = whole[len(self._known) :]
        return text, text.encode("utf-8", errors="replace")

    def add(self, id_: int) -> None:
        self._new.append(id_)
        whole = self._tokenizer.decode([*self._before, *self._new])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and len(self._new) <= _MOST_PARTS:
            self._known = whole
            return
        self._size += len(whole) - len(self._tokenizer.decode(self._before))
        self._before, self._new = self._new, []
        self._known = self._tokenizer.decode(self._before)


_MOST_PARTS = 4
"""Maximum number of tokens of a character, which has at most 4 bytes in UTF-8."""


@dataclass
class ResponseAnswer(Answer):
    """The response object and the events of ``/v1/responses``. A response is one message with one
    text.
    """

    ends_with_done = False
    _count: int = 0

    def whole(self, done: Sequence[Done]) -> dict[str, Any]:
        (one,) = done
        is_stopped = one.is_stopped
        why = None if is_stopped else {"reason": "max_output_tokens"}
        status = "completed" if is_stopped else "incomplete"
        found = self.usage(done)
        usage = {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
            "forwards": found["forwards"],
            "seed": found["seed"],
        }
        item = self._item(status, [self._part(one.text)])
        return self._response(status, [item]) | {"usage": usage, "incomplete_details": why}

    def begin(self) -> list[dict[str, Any]]:
        told = self._response("in_progress", [])
        return [
            self._numbered("response.created", response=told),
            self._numbered("response.in_progress", response=told),
            self._numbered(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            ),
            self._of_part("response.content_part.added", part=self._part("")),
        ]

    def grown(
        self, index: int, row: Row, reader: TextReader, pieces: Sequence[NewText], done: Done | None
    ) -> list[dict[str, Any]]:
        return [
            self._of_part("response.output_text.delta", delta=one.text, logprobs=[])
            for one in pieces
            if one.text
        ]

    def end(self, done: Sequence[Done]) -> list[dict[str, Any]]:
        told = self.whole(done)
        (item,) = told["output"]
        (part,) = item["content"]
        return [
            self._of_part("response.output_text.done", text=part["text"], logprobs=[]),
            self._of_part("response.content_part.done", part=part),
            self._numbered("response.output_item.done", output_index=0, item=item),
            self._numbered(f"response.{told['status']}", response=told),
        ]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self.asked
        assert isinstance(asked, Responses)
        form = None if asked.text is None else asked.text.format
        shown = (
            {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        )
        return {
            "id": self.id,
            "object": self.asked.object,
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "model": self.model,
            "output": output,
            "max_output_tokens": asked.max_output_tokens or asked.max_tokens,
            "temperature": asked.settings.get("temperature"),
            "top_p": asked.settings.get("top_p"),
            "text": {"format": shown},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "user": asked.user,
            "usage": None,
        }

    @property
    def _item_id(self) -> str:
        return f"msg-{self.id.partition('-')[2]}"

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item_id, "type": "message", "role": "assistant"}
        return head | {"status": status, "content": parts}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._numbered(kind, item_id=self._item_id, output_index=0, content_index=0, **more)

    def _numbered(self, kind: str, **more: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1} | more
