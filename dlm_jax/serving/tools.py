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
_DECODER = json.JSONDecoder()
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
    """Reads the calls in a streamed text, each when it is complete.

    Attributes:
      whole: the calls so far, in the form of a message's ``tool_calls``.
    """

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        self._rest, self._is_talk = "", False

    def grown(self, piece: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text and the calls in the next piece of the answer.

        A call that the last piece does not complete is a text if it is the only one.
        """
        self._rest += piece
        first = len(self.whole)
        self._is_talk |= not self.whole and bool(self._rest) and self._rest[0] != "{"
        while not self._is_talk and (head := _HEAD.match(self._rest)):
            try:
                _, end = _DECODER.raw_decode(self._rest, head.end())
            except ValueError:  # it is not complete
                break
            function = {"name": head[1], "arguments": self._rest[head.end() : end]}
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            self.whole.append(call | {"function": function})
            self._rest = self._rest[end:]
        if self._is_talk or (is_last and not self.whole):
            text, self._rest = self._rest, ""
            return text, []
        return "", [{"index": n, **call} for n, call in enumerate(self.whole) if n >= first]


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of an earlier call into an object for the chat template."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"arguments={text[:60]!r} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"arguments={text[:60]!r} is not an object")
    return found
