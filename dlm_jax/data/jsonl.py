"""Documents in JSON lines: texts, and pairs of a prompt and its response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from dlm_jax.data.tokenizers import utf8


class Line(NamedTuple):
    """One line of a file: where it stands, what is to be learnt, and the prompt if it has one."""

    name: str
    text: str
    prompt: str | None


def read_jsonl(name: str, content: str) -> Iterator[Line]:
    """The lines of `content`, in their order; blank ones are passed over.

    A line is an object ``{"prompt": TEXT, "response": TEXT}`` or ``{"text": TEXT}``. A prompt may
    be empty, what is to be learnt may not.

    Args:
      name: of the file; a line's name is ``NAME line NUMBER``, counted from 1.
      content: the whole file.

    Raises:
      ValueError: a line is not JSON, not an object, has other fields or other values than texts,
        a lone surrogate, or an empty text or response; the message names file, line and remedy.
    """
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield parse_line(f"{name} line {number}", line)


def parse_line(where: str, line: str) -> Line:
    """The document of one line; `where` is its name. Errors as of `read_jsonl`."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at column {error.colno}; write one object per line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON that can be read ({error}); correct it") from None
    fields = '{"prompt": ..., "response": ...} or {"text": ...}'
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {_kind(data)}, not an object; write {fields}")
    answer = "text" if data.keys() == {"text"} else "response"
    if data.keys() not in ({"text"}, {"prompt", "response"}):
        found = ", ".join(data)[:100] or "none"
        raise ValueError(f"{where} has the fields {found}; write {fields}")
    for field, value in data.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field} is {_kind(value)}; write a text in quotes")
        try:
            utf8(value)
        except ValueError as error:
            raise ValueError(f"{where}: {field}: {error}") from None
    if not data[answer]:
        raise ValueError(f"{where}: {answer} is empty; write one or delete the line")
    return Line(where, data[answer], data.get("prompt"))


def _kind(value: Any) -> str:
    """What JSON calls `value`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return {str: "a text", list: "a list", dict: "an object"}.get(type(value), "a number")
