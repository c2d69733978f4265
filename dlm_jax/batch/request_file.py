"""Reads a file of requests, one JSON object per line; the result of an invalid line is an error.

Every line has a unique id. A line without an id gets the id ``line NUMBER``, which no other line
may use. A line with several samples has one result per sample, identified by the line's id and the
sample number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

Id = str | int
Key = Id | tuple[Id, int]
"""The key of a result: the line's id, with the sample number if there are several samples."""

Place = tuple[int, int, int]

_BOM = b"\xef\xbb\xbf"
_MOST_SAMPLES = 1 << 20
_LONGEST_LINE = 1 << 24
_CHUNK = 1 << 16
_CONTENTS = ("prompt", "template", "tokens")


class _Typed(msgspec.Struct):
    """The settings of a line whose types do not depend on the rules."""

    prompt: str | UnsetType = UNSET
    template: str | UnsetType = UNSET
    draft: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    gen_length: int | UnsetType = UNSET
    max_length: int | UnsetType = UNSET
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST_SAMPLES)] = 1
    seed: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET


_HTTP = ("stop", "stop_token_ids", "response_format")
_OTHERS = (name for name in _Typed.__struct_fields__ if name not in _CONTENTS)
_KEYS = ("id", *_CONTENTS, *_OTHERS, "host_sampler", "read_back", *_HTTP)
_REMEDIES = {
    "str": "a string; write it in quotes",
    "array": "a list; for example, write [1, 2, 3]",
    "int": "an integer; write one without quotes, such as 7",
}


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


class KeyTable(Set[Key]):
    """A set of keys, each with three integers, in a private file that the system removes."""

    def __init__(self) -> None:
        self._count = 0
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute("PRAGMA cache_size = -32768")  # KiB
        self._file.execute("PRAGMA journal_mode = OFF")
        self._file.execute(
            "CREATE TABLE keys (key TEXT PRIMARY KEY, a INTEGER, b INTEGER, c INTEGER) "
            "WITHOUT ROWID"
        )
        self._file.execute("BEGIN")

    def add(self, key: Key, place: Place = (0, 0, 0)) -> bool:
        """Adds a key, unless it is in the table. Returns whether it was added."""
        added = self._file.execute(
            "INSERT OR IGNORE INTO keys VALUES (?, ?, ?, ?)", (json.dumps(key), *place)
        )
        self._count += added.rowcount
        return added.rowcount > 0

    def place(self, key: Key) -> Place | None:
        """Returns the integers of a key; None if it is not in the table."""
        found = self._file.execute("SELECT a, b, c FROM keys WHERE key = ?", (json.dumps(key),))
        return found.fetchone()

    def __contains__(self, key: object) -> bool:
        return self.place(key) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        for (text,) in self._file.execute("SELECT key FROM keys"):
            key = json.loads(text)
            yield tuple(key) if isinstance(key, list) else key


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """A file of requests, open for reading. Raises ValueError if it cannot be opened or read."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; pass a file of requests, one JSON object "
            "per line"
        ) from None


class RequestFile:
    """The non-blank lines of a file of requests, in order, with unique ids.

    Each iteration reads the file again, one line at a time, and raises ValueError if the file has
    changed.

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

    def __init__(
        self, path: str | os.PathLike[str], *, known: Collection[str], num_samples: int = 1
    ) -> None:
        self._path, self._num_samples = Path(path), num_samples
        self._names = (*_KEYS, *sorted(set(known) - set(_KEYS)))
        kind = "pass a file of requests, one JSON object per line"
        if not os.path.isfile(path):
            why = "is not a file" if os.path.exists(path) else "does not exist"
            raise ValueError(f"{path} {why}; {kind}")
        self._state = os.stat(path)
        with self._reading():
            pass

    def __iter__(self) -> Iterator[Line]:
        ids, extra = KeyTable(), 0
        with self._reading() as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            for number, (raw, size) in enumerate(_raw_lines(file), 1):
                if raw is not None:
                    line = replace(self._read(raw, size, number, ids), extra=extra)
                    yield line
                    # An unreadable line counts as `num_samples` rows, so that fixing it does not
                    # renumber other rows.
                    is_bad = line.error is not None
                    extra += (self._num_samples if is_bad else line.num_samples) - 1

    def _read(self, raw: bytes, size: int, number: int, ids: KeyTable) -> Line:
        """Parses one line. `ids` has the line number of each id, and is updated."""
        where, id_ = f"{self._path.name} line {number}", f"line {number}"
        try:
            if size > _LONGEST_LINE:
                raise ValueError(f"{where} has {size} bytes; use at most {_LONGEST_LINE}")
            request = _parse(raw, where)
            given = request.pop("id", id_)
            _check_id(given, id_, where)
            # The default id is reserved for this line.
            if given != id_ and not ids.add(given, (number, 0, 0)):
                first, *_ = ids.place(given) or (0,)
                raise ValueError(
                    f"{where}: id={_show(given)} is already used by line {first}; use unique ids"
                )
            id_ = given
            _check(request, where, self._names)
        except ValueError as error:
            return Line(number, id_, {}, str(error))
        return Line(number, id_, request, num_samples=request.pop("n", self._num_samples))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[IO[bytes]]:
        with opened(self._path) as file:
            yield file
            now = os.fstat(file.fileno())
        before = self._state
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        ):
            raise ValueError(
                f"{self._path} has changed during the run; restore it and run again, or choose "
                "another --output for the new file"
            )


def share(lines: Iterable[Line], index: int, count: int) -> Iterator[Line]:
    """The lines that process `index` of `count` runs: line numbers equal to `index` mod `count`."""
    check_process(index, count)
    return (line for line in lines if line.number % count == index)


def check_process(index: int, count: int) -> None:
    """Raises ValueError unless `index` and `count` are integers and 0 <= `index` < `count`."""
    for name, value in (("index", index), ("count", count)):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer:
            raise ValueError(f"{name}={value!r} of the processes is not an integer")
    if count < 1:
        raise ValueError(f"count={count} processes are too few; use at least 1")
    if not 0 <= index < count:
        raise ValueError(f"index={index} is not a process of count={count}; use 0 to {count - 1}")


def _raw_lines(file: IO[bytes]) -> Iterator[tuple[bytes | None, int]]:
    """Yields each line and its size in bytes, without its end; None for a blank line. Of a line
    that is too long, only the beginning is yielded.
    """
    while raw := file.readline(_LONGEST_LINE + 2):
        size, part, is_blank = len(raw), raw, raw.isspace()
        while not part.endswith(b"\n") and (part := file.readline(_CHUNK)):
            size, is_blank = size + len(part), is_blank and part.isspace()
        yield None if is_blank else raw.removesuffix(b"\n"), size - part.endswith(b"\n")


def _parse(raw: bytes, where: str) -> dict[str, Any]:
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
    settings: dict[str, Any] = {}
    for name, value in pairs:
        if name in settings:
            raise ValueError(f"{_show(name)} is given twice")
        settings[name] = value
    return settings


def _check_id(given: Any, default: str, where: str) -> None:
    """Raises ValueError for an invalid id."""
    if isinstance(given, str):
        _check_text(f"{where}: id", given)
        if given != default and re.fullmatch("line [1-9][0-9]*", given):
            raise ValueError(
                f"{where}: id={_show(given)} is reserved for that line; use another id"
            )
    elif type(given) is not int:
        raise ValueError(f"{where}: id={_show(given)} must be a string or an integer")


def _check(request: dict[str, Any], where: str, names: tuple[str, ...]) -> None:
    """Raises ValueError for a setting that is unknown, contradictory or of the wrong type."""
    for name in request:
        if name not in names:
            short = name if len(name) <= 60 else f"{name[:60]}..."
            raise ValueError(f"{where}: {short!r} is not a setting; {_nearest(short, names)}")
    contents = [name for name in _CONTENTS if name in request]
    if len(contents) > 1:
        raise ValueError(f"{where} has {' and '.join(contents)}; keep one of them")
    try:
        typed = msgspec.convert(request, _Typed)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_explain(str(error), request)}") from None
    for name in ("prompt", "template", "draft"):
        if isinstance(text := getattr(typed, name), str):
            _check_text(f"{where}: {name}", text)


def _explain(message: str, request: dict[str, Any]) -> str:
    """The message of msgspec in the words of this module, with the value."""
    parts = re.fullmatch(r"Expected `(\w+)`(.*) - at `\$\.(\w+)(?:\[(\d+)\])?`", message)
    if parts is None:
        return message
    kind, bound, name, index = parts.groups()
    if bound.startswith((" >=", " <=")):
        return f"{name}={request[name]} samples must be 1 to {_MOST_SAMPLES}"
    if index is not None:
        return f"{name}[{index}]={_show(request[name][int(index)])} is not {_REMEDIES[kind]}"
    return f"{name}={_show(request[name])} is not {_REMEDIES[kind]}"


@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    # Imported here, so that handling results does not import JAX.
    from dlm_jax.config import SamplingParams
    from dlm_jax.settings import nearest, renamed

    return renamed(name, known, SamplingParams.declared) or nearest(name, known)


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
