"""Chat templates, which convert a conversation to the text format of a model.

Templates are Jinja programs in a model's directory. As in transformers, they run in Jinja's
immutable sandbox, without access to Python attributes, files or modules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dlm_jax.data import HubTokenizer, Tokenizer
from dlm_jax.data.tokenizers import pattern_of

_SPECIALS = ("bos_token", "eos_token", "pad_token", "mask_token")

RESERVED = frozenset(
    ("messages", "add_generation_prompt", "begins_answer", "continues", *_SPECIALS)
)
"""Template variables that `ChatTemplate` sets, and arguments of `ChatTemplate.text`."""

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation: ``{"role": "user", "content": "..."}``, plus template-specific keys."""

# As in transformers. A template that strips its contents strips the space behind the tag.
_CONTINUED, _SPACE = "CONTINUE_FINAL_MESSAGE_TAG", "\u2003"

# Digits, which templates copy unchanged. They begin with their only 1, so that they do not overlap.
_QUOTE = "1748329688888"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its tokenizer.

    Attributes:
      source: the Jinja template.
      tokenizer: tokenizer of the conversations. One that is not a `HubTokenizer` encodes the text
        of a conversation without special tokens, and has no `turns`.
    """

    source: str
    tokenizer: Tokenizer

    def text(
        self,
        messages: Messages,
        /,
        *,
        begins_answer: bool = True,
        continues: bool = False,
        **more: Any,
    ) -> str:
        """The conversation as text, up to the start of the model's answer.

        Args:
          messages: turns, each with ``role`` and ``content``.
          begins_answer: whether to append the header of the answer.
          continues: whether the answer continues the last turn, so that the text ends with the
            content of this turn (Hugging Face's ``continue_final_message``).
          **more: additional template variables, such as ``enable_thinking``.

        Raises:
          ValueError: the template is broken or rejects the messages.
        """
        return self._render(_variables(messages, begins_answer, more), continues)

    def ids(
        self,
        messages: Messages,
        /,
        *,
        begins_answer: bool = True,
        continues: bool = False,
        **more: Any,
    ) -> np.ndarray:
        """The token ids of `text` with the same arguments, int32 ``[n]``.

        Only the template writes special tokens: in `messages` and `more`, the names of special
        tokens and of the template's markers are encoded as characters. In the model's own turns,
        markers other than those around a turn are tokens.
        """
        values = _variables(messages, begins_answer, more)
        text = self._render(values, continues)
        if not isinstance(self.tokenizer, HubTokenizer):
            return self.tokenizer.encode(text)
        # Names that the messages contain are quoted by digits after their first character.
        try:
            quoted = _quote(values | {"messages": None}, self._markers)
            quoted["messages"] = [
                # The model itself writes markers within its turns.
                _quote(turn, self._names if turn["role"] == "assistant" else self._markers)
                for turn in values["messages"]
            ]
        except RecursionError:
            raise ValueError("the messages are nested too deeply") from None
        if quoted == values:
            return self._hub.encode_marked(text)
        written = self._render(quoted, continues)
        if written.replace(_QUOTE, "") != text:
            names = sorted(name for name in self._markers if name in str(values))
            raise ValueError(
                f"the chat template reads {', '.join(names)} in the messages, which cannot be "
                "encoded as text then; remove them from the messages"
            )
        return self._hub.encode_marked(written, quote=_QUOTE)

    def turns(self, messages: Messages, /) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Training examples: for each turn of the assistant, the ids before it and its ids, int32.

        The ids before a turn are those of `ids` with the messages before it, which a chat sends.
        The turn ends with the last special token that the template writes in it, such as
        ``<|im_end|>``; a line break after it is not part of the turn, because a generation ends
        there.

        Raises:
          ValueError: the ids with a turn do not begin with the ids before it.
        """
        special = {*self._hub.textless_ids, *map(self._hub.id_of, self._names)}
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            given = self.ids(messages[:place])
            whole = self.ids(messages[: place + 1], begins_answer=False)
            if not np.array_equal(whole[: given.size], given):
                raise ValueError(
                    f"message {place + 1}: the chat template writes other tokens before this "
                    "answer than a chat sends; use a template that writes the same"
                )
            turn = whole[given.size :]
            last = max((i for i, id_ in enumerate(turn.tolist()) if id_ in special), default=-1)
            is_end = last >= 0 and not self._hub.decode(turn[last + 1 :]).strip()
            yield given, turn[: last + 1] if is_end else turn

    def specials(self) -> dict[str, str]:
        """The texts of BOS, EOS, PAD and MASK for the template; '' for a missing token."""
        if not isinstance(self.tokenizer, HubTokenizer):
            return dict.fromkeys(_SPECIALS, "")
        one = self._hub
        ids = (one.bos_id, one.eos_id, one.pad_id, one.mask_id)
        names = ("" if id_ is None else one.token(id_) for id_ in ids)
        return dict(zip(_SPECIALS, names, strict=True))

    @property
    def _hub(self) -> HubTokenizer:
        assert isinstance(self.tokenizer, HubTokenizer)
        return self.tokenizer

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        """Names that no turn writes: special tokens, and markers around a turn, which some files do
        not declare special.
        """
        return self._hub.special_names | self._written(["user"], False)

    @functools.cached_property
    def _markers(self) -> frozenset[str]:
        """`_names`, and markers that the template writes around turns of other roles."""
        others = self._written(["user", "assistant", "user"], True)
        return self._names | others | self._written(["system", "user"], True)

    def _written(self, roles: list[str], begins_answer: bool) -> frozenset[str]:
        """The markers in a conversation of these roles; empty if the template rejects it."""
        turns = [{"role": role, "content": "a"} for role in roles]
        try:
            return self._hub.markers_in(self.text(turns, begins_answer=begins_answer))
        except ValueError:
            return frozenset()

    def _render(self, values: dict[str, Any], continues: bool) -> str:
        if continues:
            *others, last = values["messages"] or [{}]
            content = last.get("content")
            if not isinstance(content, str):
                raise ValueError("the last message has no text to continue; add one")
            last = last | {"content": content + _CONTINUED + _SPACE}
            text = self._render(values | {"messages": [*others, last]}, False)
            before, tag, after = text.rpartition(_CONTINUED)
            if not tag:
                raise ValueError(
                    "the chat template omits the content of the last message; remove that message"
                )
            if after.startswith(_SPACE):
                return before
            # The template strips contents.
            kept = content.lstrip()
            return before[: len(before) - len(kept) + len(kept.rstrip())]
        compiled = _compiled(self.source)
        try:
            return compiled.render(self.specials() | values)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error)[:2000].split()) or type(error).__name__
            raise ValueError(f"chat_template rejects the messages ({reason})") from None


def _variables(messages: Messages, begins_answer: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template that depend on a conversation."""
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"messages[{place}]={message!r} lacks role or content; provide both")
    return {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "strftime_now": datetime.now().strftime,
        **more,
        "add_generation_prompt": begins_answer,
    }


def _quote(value: Any, names: frozenset[str]) -> Any:
    """A value in which `_QUOTE` follows the first character of each of the names."""
    if isinstance(value, str):
        return pattern_of(names).sub(lambda name: name[0][0] + _QUOTE + name[0][1:], value)
    if isinstance(value, Mapping):
        return {_quote(key, names): _quote(one, names) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_quote(one, names) for one in value]
    return value


def saved_chat(meta: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in the metadata of a checkpoint or a weights file, or None."""
    source = meta.get("chat_template")
    if not source or not isinstance(tokenizer, HubTokenizer):
        return None
    return ChatTemplate(source, tokenizer)


def check_template(source: str, where: str) -> None:
    """Raises ValueError, which begins with `where`, for a template that cannot be compiled."""
    try:
        _compiled(source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class _Generation(Extension):
    """``{% generation %}``, by which transformers marks answers; the mark has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    """The template, with the extensions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"chat_template is broken ({' '.join(str(error).split())})") from None
