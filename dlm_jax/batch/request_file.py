"""Reads a file of requests, one JSON object per line; the result of an invalid line is an error.

Every line has a unique id. A line without an id gets the id ``line NUMBER``, which no other line
may use. A line with several samples has one result per sample, identified by the line's id and the
sample number.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

Id = str | int
Key = Id | tuple[Id, int]
"""The key of a result: the line's id, with the sample number if there are several samples."""

_BOM = b"\xef\xbb\xbf"
_CONTENTS = ("prompt", "template", "tokens")
_TEXTS = ("prompt", "template", "draft")
_INTEGERS = ("gen_length", "max_length", "n", "seed", "steps")
_HTTP = ("stop", "stop_token_ids", "response_format")
_KEYS = ("id", *_CONTENTS, "draft", *_INTEGERS, "host_sampler", "read_back", *_HTTP)
_MOST_SAMPLES = 1 << 20
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Line:
    """One line of a file of requests: its settings, or the reason why it cannot run.

    `settings` has every key except the id and ``n``, or is empty if there is an error. A line with
    an error counts as one sample. Such a line keeps its id, unless the id is invalid or the line
    cannot be read.

    Attributes:
      number: line number, from 1; blank lines are counted.
      num_samples: number of rows that the line requests.
      extra: number of rows that preceding lines have in excess of one per line.
    """

    number: int
    id: Id
    settings: dict[str, Any]
    error: str | None = None
    num_samples: int = 1
    extra: int = 0

    @property
    def first(self) -> int:
        """Index of the line's first row in the file, from 0; blank lines count as rows."""
        return self.number - 1 + self.extra

    @property
    def keys(self) -> tuple[Key, ...]:
        if self.num_samples == 1:
            return (self.id,)
        return tuple((self.id, sample) for sample in range(self.num_samples))


def read_requests(
    path: str | os.PathLike[str], *, known: Collection[str], num_samples: int = 1
) -> list[Line]:
    """The non-blank lines of a file, in order, with unique ids.

    A line has at most one of ``prompt``, ``template`` (texts) and ``tokens`` (integers). ``draft``
    is a string; ``gen_length``, ``max_length``, ``n`` (samples), ``seed`` and ``steps`` are
    integers. ``stop``, ``stop_token_ids`` and ``response_format`` are those of the server. Other
    settings are not checked.

    Args:
      path: a UTF-8 file, with or without a byte order mark.
      known: names of additional settings that a request may have, besides ``host_sampler`` and
        ``read_back``.
      num_samples: number of rows for a line without ``n``.
    """
    file = Path(path)
    names = (*_KEYS, *sorted(set(known) - set(_KEYS)))
    first: dict[Id, int] = {}
    lines: list[Line] = []
    extra = 0
    for number, raw in enumerate(_content(file).split(b"\n"), 1):
        if not raw.strip():
            continue
        line = _read(raw, number, f"{file.name} line {number}", names, first, num_samples)
        lines.append(replace(line, extra=extra))
        # An unreadable line counts as `num_samples` rows, so that fixing it does not renumber other
        # rows.
        extra += (num_samples if line.error is not None else line.num_samples) - 1
    return lines


def share(lines: Sequence[Line], index: int, count: int) -> list[Line]:
    """The lines that process `index` of `count` runs: line numbers equal to `index` mod `count`."""
    check_process(index, count)
    return [line for line in lines if line.number % count == index]


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_process(index: int, count: int) -> None:
    """Raises ValueError unless `index` and `count` are integers and 0 <= `index` < `count`."""
    for name, value in (("index", index), ("count", count)):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        require(is_integer, f"{name}={value!r} of the processes is not an integer")
    require(count >= 1, f"count={count} processes are too few; use at least 1")
    require(
        0 <= index < count,
        f"index={index} is not a process of count={count}; use 0 to {count - 1}",
    )


def _content(file: Path) -> bytes:
    kind = "a file of requests, one JSON object per line"
    require(os.path.exists(file), f"{file} does not exist; pass {kind}")
    require(os.path.isfile(file), f"{file} is not a file; pass {kind}")
    try:
        return file.read_bytes().removeprefix(_BOM)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; pass {kind}") from None


def _read(
    raw: bytes,
    number: int,
    where: str,
    names: tuple[str, ...],
    first: dict[Id, int],
    num_samples: int,
) -> Line:
    """Parses one line; `first` maps each id to the line that uses it, and is updated."""
    own = f"line {number}"
    try:
        request = _parse(raw, where)
        id_ = _id(request.pop("id", own), own, where, first)
    except ValueError as error:
        return Line(number, own, {}, str(error))
    first[id_] = number
    try:
        _check(request, where, names)
    except ValueError as error:
        return Line(number, id_, {}, str(error))
    return Line(number, id_, request, num_samples=request.pop("n", num_samples))


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > _LONGEST_LINE:
        raise ValueError(f"{where} has {len(raw)} bytes; use at most {_LONGEST_LINE}")
    try:
        request = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {raw[error.start]:#04x} at column {error.start + 1} "
            "(in bytes); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at column {error.colno}; write one object per line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable JSON ({error}); correct it") from None
    if not isinstance(request, dict):
        raise ValueError(f'{where}: {_show(request)} is not an object; write {{"prompt": ...}}')
    return request


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these pairs; ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{_show(twice)} is given twice")
    return found


def _id(given: Any, own: str, where: str, first: dict[Id, int]) -> Id:
    """The id; ValueError if it is invalid or already used."""
    if isinstance(given, str):
        _check_text(f"{where}: id", given)
    elif type(given) is not int:
        raise ValueError(f"{where}: id={_show(given)} must be a string or an integer")
    if given in first:
        raise ValueError(
            f"{where}: id={_show(given)} is already used by line {first[given]}; use unique ids"
        )
    if isinstance(given, str) and given != own and re.fullmatch("line [1-9][0-9]*", given):
        raise ValueError(f"{where}: id={_show(given)} is reserved for that line; use another id")
    return given


def _check(request: dict[str, Any], where: str, names: tuple[str, ...]) -> None:
    """Raises ValueError for a setting that is unknown, contradictory or of the wrong type."""
    for name in request:
        if name not in names:
            short = name if len(name) <= 60 else f"{name[:60]}..."
            raise ValueError(f"{where}: {short!r} is not a setting; {_nearest(short, names)}")
    contents = [name for name in _CONTENTS if name in request]
    if len(contents) > 1:
        raise ValueError(f"{where} has {' and '.join(contents)}; keep one of them")
    for name in _TEXTS:
        if name in request:
            _check_kind(f"{where}: {name}", request[name], str, "a string", "write it in quotes")
            _check_text(f"{where}: {name}", request[name])
    for name in _INTEGERS:
        if name in request:
            _check_integer(f"{where}: {name}", request[name])
    if not 1 <= request.get("n", 1) <= _MOST_SAMPLES:
        raise ValueError(f"{where}: n={request['n']} samples must be 1 to {_MOST_SAMPLES}")
    if "tokens" in request:
        tokens = request["tokens"]
        _check_kind(f"{where}: tokens", tokens, list, "a list", "for example, write [1, 2, 3]")
        for index, token in enumerate(tokens):
            _check_integer(f"{where}: tokens[{index}]", token)


@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    # Imported here, so that handling results does not import JAX.
    from dlm_jax.config import SampleConfig
    from dlm_jax.settings import nearest, renamed

    return renamed(name, known, SampleConfig.declared) or nearest(name, known)


def _check_integer(where: str, value: Any) -> None:
    _check_kind(where, value, int, "an integer", "write one without quotes, such as 7")


def _check_kind(where: str, value: Any, wanted: type, kind: str, remedy: str) -> None:
    # `isinstance` would accept bool for int.
    if type(value) is not wanted:
        raise ValueError(f"{where}={_show(value)} is not {kind}; {remedy}")


def _check_text(where: str, text: str) -> None:
    """Raises ValueError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has a lone surrogate (U+{ord(text[error.start]):04X}) at position "
            f"{error.start}, which is not a character; remove it"
        ) from None


def _show(value: Any) -> str:
    """The value as JSON, shortened for an error message."""
    if isinstance(value, list | dict):
        return "[...]" if isinstance(value, list) else "{...}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
