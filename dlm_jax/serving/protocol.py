"""What may be asked: the fields of the protocol, beside which every setting stands by its name."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

MOST_STOPS = 16
_LONGEST_STOP = 1024

Ids = list[int]
Stop = str | list[str]


class Fields(pydantic.BaseModel):
    """An object whose fields have the types that they say, with no others beside them."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Fields):
    """What a stream tells beside the text.

    Attributes:
      include_usage: whether an event with the usage comes before the end.
    """

    include_usage: bool | None = None


class JsonSchema(Fields):
    """A schema with the name that the protocol wants it to have.

    Attributes:
      name: of it.
      schema_: JSON schema.
      description: of what it is for; not read.
      strict: not read; the answer always follows the schema.
    """

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """What the answer must look like.

    Attributes:
      type: which of the others tells.
      json_schema: of ``type="json_schema"``.
      regex: of ``type="regex"``, which the whole answer matches.
    """

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Sampled(pydantic.BaseModel):
    """What all requests for a text share; other names are settings (docs/settings.md).

    Attributes:
      model: name of the model; any request may leave it out.
      max_tokens: new tokens.
      max_length: tokens that a row may hold with its prompt.
      n: rows of each prompt.
      seed: of the first row; by default one that nobody knows before.
      stop: texts that end the answer, which does not hold them.
      stream: whether the answer comes in events.
      stream_options: of a stream.
      response_format: what the answer must look like.
      diffusing: whether a stream shows the whole canvas as it is denoised.
      read_back: how many of each position's candidates to tell of, with their logits.
      user: who asks; not read.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    diffusing: bool | None = None
    read_back: int | None = Field(None, ge=1, le=64)
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer.

        Raises:
          ValueError: there are too many, or one is empty or too long.
        """
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(found) > MOST_STOPS:
            raise ValueError(f"stop has {len(found)} texts; use {MOST_STOPS} at most")
        if any(not 1 <= len(text) <= _LONGEST_STOP for text in found):
            raise ValueError(f"stop has a text that is empty or longer than {_LONGEST_STOP}")
        return found


class Completion(Sampled):
    """Of ``/v1/completions``.

    Attributes:
      prompt: a text, several, ids, or several lists of ids.
      suffix: text behind what is written.
      draft: text behind the prompt, to be refined.
      echo: whether the answer begins with the prompt.
      logprobs: how many of each token's rivals to tell of; 0: of the token alone.
    """

    prompt: str | Ids | list[str] | list[Ids] = ""
    suffix: str | None = None
    draft: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class Part(Fields):
    """A part of a turn.

    Attributes:
      type: of it; there are only texts.
      text: it.
    """

    type: Literal["text"]
    text: str


class Message(Fields):
    """A turn of a conversation.

    Attributes:
      role: whose turn it is.
      content: what was said.
      name: not read.
    """

    role: str
    content: str | list[Part]
    name: str | None = None

    @property
    def text(self) -> str:
        """What was said, its parts behind each other."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Chat(Sampled):
    """Of ``/v1/chat/completions``.

    Attributes:
      messages: the turns so far.
      max_completion_tokens: the newer name of `max_tokens`.
      draft: of the answer, to be refined.
      logprobs: whether to tell how likely each token was.
      top_logprobs: how many of its rivals to tell of.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    draft: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class Infill(Sampled):
    """Of ``/v1/infill``: a prefix and a suffix, or a template.

    Attributes:
      prefix: text before the gap.
      suffix: text behind it.
      template: text with gaps, each written ``<hole:8>``, or ``<hole>`` for `max_tokens`.
      logprobs: as of `Completion`.
    """

    prefix: str | None = None
    suffix: str | None = None
    template: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class Tokenize(Fields):
    """Of ``/tokenize``.

    Attributes:
      model: name of the model.
      prompt: a text.
      messages: a conversation, in place of `prompt`.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
