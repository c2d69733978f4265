"""Function calls in answers: the pattern that allows calls, and a parser.

A call is a JSON object, ``{"name": "f", "arguments": {...}}``, on a separate line. A text that does
not begin with a brace is not a call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from dlm_jax.structured import regex_of_schema

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of a function name, as in OpenAI's protocol."""

_HEAD = re.compile(r'[\s}]*\{"name": ?"([A-Za-z0-9_-]{1,64})", ?"arguments": ?')
_TEXT = r"(?:[^{][\s\S]*)?"


def pattern_of(
    functions: Mapping[str, Mapping[str, Any] | None], *, is_parallel: bool, may_talk: bool
) -> str:
    """Returns a regular expression for answers that call these functions.

    Args:
      functions: JSON schemas of the arguments by function name; None for a function without a
        schema.
      is_parallel: whether several calls are allowed.
      may_talk: whether texts that do not begin with a brace are also allowed.

    Raises:
      ValueError: a schema cannot be used; the message contains the name of the function.
    """
    calls = []
    for name, schema in functions.items():
        if schema and schema.get("type", "object") != "object":
            raise ValueError(f"tools: function {name!r}: parameters are not an object schema")
        try:
            arguments = r"\{\}" if not schema else regex_of_schema(schema)
        except ValueError as error:
            raise ValueError(f"tools: function {name!r}: {error}") from None
        calls.append(rf'\{{"name": ?"{re.escape(name)}", ?"arguments": ?(?:{arguments})\}}')
    one = f"(?:{'|'.join(calls)})"
    several = rf"{one}(?:\n{one})*" if is_parallel else one
    return f"(?:{several}|{_TEXT})" if may_talk else several


class Calls:
    """Parses the calls in a streamed text into pieces of ``tool_calls``.

    Attributes:
      whole: the calls so far, in the form of a message's ``tool_calls``.
    """

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        self._rest, self._is_talk = "", False
        self._depth, self._in_string, self._is_escaped, self._is_open = 0, False, False, False

    def grown(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text and the parts of calls in the next piece of the answer."""
        if self._is_talk:
            return piece, []
        self._rest += piece
        if not self.whole and self._rest and self._rest[0] != "{":
            self._is_talk = True
            return self._rest, []
        parts: dict[int, dict[str, Any]] = {}
        while self._is_open or (head := _HEAD.match(self._rest)):
            if not self._is_open:
                assert head is not None
                self._begin(head[1], parts)
                self._rest = self._rest[head.end() :]
            taken, is_whole = self._arguments()
            self._add(taken, parts)
            if not is_whole:
                break
        return "", list(parts.values())

    def _begin(self, name: str, parts: dict[int, dict[str, Any]]) -> None:
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self.whole.append(call | {"function": {"name": name, "arguments": ""}})
        self._is_open, self._depth = True, 0
        index = len(self.whole) - 1
        parts[index] = {"index": index, **call, "function": {"name": name, "arguments": ""}}

    def _add(self, taken: str, parts: dict[int, dict[str, Any]]) -> None:
        index = len(self.whole) - 1
        if not self.whole[index]["function"]["arguments"]:
            taken = taken.lstrip()
        self.whole[index]["function"]["arguments"] += taken
        if taken:
            part = parts.setdefault(index, {"index": index, "function": {"arguments": ""}})
            part["function"]["arguments"] += taken

    def _arguments(self) -> tuple[str, bool]:
        """Returns the arguments of a call in the remaining text and whether they are complete."""
        for place, c in enumerate(self._rest):
            if self._in_string:
                ends = c == '"' and not self._is_escaped
                self._is_escaped = c == "\\" and not self._is_escaped
                self._in_string = not ends
                continue
            self._in_string = c == '"'
            self._depth += (c in "{[") - (c in "}]")
            if self._depth == 0 and c in "}]":
                taken, self._rest = self._rest[: place + 1], self._rest[place + 1 :]
                self._is_open = False
                return taken, True
        taken, self._rest = self._rest, ""
        return taken, False


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of an earlier call into an object for the chat template."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"arguments={text[:60]!r} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"arguments={text[:60]!r} is not an object")
    return found
