"""Files of requests and of results, one JSON object per line. Memory does not grow with a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dlm_jax.store.files import Damaged, refuse_failures, replacing

_BOM = b"\xef\xbb\xbf"
_PLACE = struct.Struct("<qq")


class ResultPlaces:
    """The first and last byte of the result of each line, in a file that the system removes."""

    def __init__(self) -> None:
        self._file, name = tempfile.mkstemp()
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)

    def add(self, number: int, start: int, end: int) -> None:
        os.pwrite(self._file, _PLACE.pack(start, end), _PLACE.size * number)

    def place(self, number: int) -> tuple[int, int] | None:
        """Returns the place of the result of a line; None if there is none."""
        data = os.pread(self._file, _PLACE.size, _PLACE.size * number)
        start, end = _PLACE.unpack(data) if data else (0, 0)
        return (start, end) if end else None

    def __contains__(self, number: int) -> bool:
        return self.place(number) is not None


@dataclass(frozen=True)
class Line:
    """One line of a file of requests: its settings without the id, or the reason why it cannot run.

    `number` is the line number, from 1; blank lines are counted. `id` is a JSON value.
    """

    number: int
    settings: dict[str, Any] = field(default_factory=dict)
    id: Any = None
    error: str | None = None

    @property
    def names(self) -> dict[str, Any]:
        """What the result says of the line: its number and, if there is one, its id."""
        return {"line": self.number} | ({} if self.id is None else {"id": self.id})


class RequestFile:
    """The non-blank lines of a file of requests, in order.

    Each iteration reads the file again, one line at a time, and raises ValueError if the file has
    changed. The settings are checked when the line runs.

    Args:
      path: a UTF-8 file, with or without a byte order mark.
      index: the process whose lines are read: those with numbers equal to `index` mod `count`.
      count: number of processes that share the lines.
    """

    def __init__(self, path: str | os.PathLike[str], *, index: int = 0, count: int = 1) -> None:
        self._path, self._index, self._count = Path(path), index, count
        with _opened(path) as file:
            self._state = _state_of(file)

    def __iter__(self) -> Iterator[Line]:
        with _opened(self._path) as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            for number, raw in enumerate(file, 1):
                if number % self._count == self._index and not raw.isspace():
                    yield self._read(raw.removesuffix(b"\n"), number)
            if _state_of(file) != self._state:
                raise ValueError(
                    f"{self._path} has changed during the run; restore it and run again, or "
                    "choose another --output for the new file"
                )

    def _read(self, raw: bytes, number: int) -> Line:
        try:
            request = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
            if not isinstance(request, dict):
                raise ValueError(f'{_show(request)} is not an object; write {{"prompt": ...}}')
            json.dumps(request, ensure_ascii=False).encode()  # lone surrogates
            id_ = request.pop("id", None)
        except json.JSONDecodeError as error:
            why = f"is not JSON: {error.msg} at column {error.colno}; write one object per line"
        except (ValueError, RecursionError) as error:
            why = str(error)
        else:
            return Line(number, request, id_)
        return Line(number, error=f"{self._path.name} line {number}: {why}")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; pass a file of requests, one JSON object "
            "per line"
        ) from None


def _state_of(file: IO[bytes]) -> tuple[int, int, int]:
    state = os.fstat(file.fileno())
    return state.st_ino, state.st_size, state.st_mtime_ns


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these pairs; ValueError for a duplicate key."""
    settings: dict[str, Any] = {}
    for name, value in pairs:
        if name in settings:
            raise ValueError(f"{_show(name)} is given twice")
        settings[name] = value
    return settings


def _show(value: Any) -> str:
    """The value as JSON, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def fingerprint(
    requests: str | os.PathLike[str], *, model: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """A fingerprint (64 hex digits) of the content of a file of requests, of the JSON values that
    describe the model, and of all settings on which the results depend, in any order.
    """
    described = json.dumps([model, settings], sort_keys=True).encode()
    with _opened(requests) as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(content + described).hexdigest()


class Results:
    """A file of results, which survives kills: those already in it and those that are written.

    A companion ``FILE.run`` contains the fingerprint of the run and what determines its programs.
    A file with lines of another run is refused. All lines have checksums. Results are appended in
    any order, and `finish` sorts them. Once `write` has returned, the result survives a crash of
    the process; once `close` has returned, it survives a power failure.

    Attributes:
      path: the file. Process 1 of 3 writes ``out.jsonl.part-01-of-03``.
      done: the numbers of the lines with a result, and where the results are.
      plan: what determines the programs of the run; that of the earlier run if it has results.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str,
        index: int = 0,
        count: int = 1,
        plan: Mapping[str, int] | None = None,
    ) -> None:
        """Opens and locks this process's file and removes a partial last line."""
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{path} is not a file; choose another --output")
        if not 0 <= index < count:
            raise ValueError(f"index={index} is not a process of count={count}; use 0 to count - 1")
        self.path = Path(os.path.realpath(path))
        if count > 1:
            self.path = self.path.with_name(f"{self.path.name}.part-{index:02d}-of-{count:02d}")
        self.done, self.plan = ResultPlaces(), dict(plan or {})
        self._writer: io.FileIO | None = None
        record_path = self.path.with_name(f"{self.path.name}.run")
        with (
            contextlib.ExitStack() as undo,
            refuse_failures(str(self.path), "choose another --output"),
        ):
            writer = undo.enter_context(_open_locked(self.path))
            if os.fstat(writer.fileno()).st_size:
                try:
                    record = _result_of(record_path.read_bytes().removesuffix(b"\n"))
                except (OSError, ValueError):
                    record = None
                if not isinstance(record, dict) or record.get("fingerprint") != fingerprint:
                    raise ValueError(
                        f"{self.path} belongs to another run: remove it or choose another --output"
                    )
                self.plan |= record.get("plan", {})
            end = self._scan()
            writer.truncate(end)
            if not end:
                with replacing(record_path) as file:
                    file.write(_line_of({"fingerprint": fingerprint, "plan": self.plan}))
            undo.pop_all()
            self._writer = writer

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends the result of a line that is not in `done` yet: a JSON object with its number as
        ``line``. On an error, nothing is written.
        """
        number, writer = _number_of(result), self._writer
        if number is None or number in self.done:
            why = "has no line" if number is None else "exists already"
            raise ValueError(f"result {str(result)[:60]} {why}; write each result once")
        assert writer is not None, "the results are closed"
        end = os.fstat(writer.fileno()).st_size
        line = _line_of(result)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[writer.write(rest) :]
        except BaseException as error:
            # Remove a partial line, so that the next line does not continue it.
            writer.truncate(end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise
        self.done.add(number, end, end + len(line))

    def finish(self, lines: Iterable[Line]) -> None:
        """Closes the file and sorts its results as the lines, which are iterated twice.

        Raises:
          ValueError: a result is missing.
        """
        self.close()
        is_sorted, end = True, 0
        for line in lines:
            place = self.done.place(line.number)
            if place is None:
                why = f"lacks the result of line {line.number}; run again to repeat it"
                raise ValueError(f"{self.path} {why}")
            is_sorted &= place[0] == end
            end = place[1]
        if not is_sorted or end != self.path.stat().st_size:
            with self.path.open("rb") as source, replacing(self.path) as target:
                for line in lines:
                    start, end = self.done.place(line.number) or (0, 0)
                    source.seek(start)
                    target.write(source.read(end - start))

    def close(self) -> None:
        """Syncs the file to disk and closes it; a second call has no effect."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with writer, refuse_failures(str(self.path), "choose another --output"):
                os.fsync(writer.fileno())

    def _scan(self) -> int:
        """Adds the complete results to `done`, and returns the end of the last one."""
        end = 0
        with self.path.open("rb") as handle:
            for place, line in enumerate(handle, 1):
                if not line.endswith(b"\n"):
                    break
                number, why = None, "is not a result"
                try:
                    number = _number_of(_result_of(line[:-1]))
                except Damaged as error:
                    why = f"is damaged: {error}"
                except (ValueError, RecursionError):
                    pass
                if number is None:
                    raise ValueError(
                        f"{self.path} line {place} {why}; remove that line or the file"
                    )
                if number not in self.done:
                    self.done.add(number, end, end + len(line))
                end += len(line)
        return end


def _number_of(result: Any) -> int | None:
    """The line number of a result; None for other values."""
    number = result.get("line") if isinstance(result, Mapping) else None
    return number if type(number) is int and number > 0 else None


def _open_locked(file: Path) -> io.FileIO:
    """Opens the file for appending, locked against other processes until closed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = io.FileIO(file, "a")
    try:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error means that the file system has no locks; write without a lock.
        if isinstance(error, BlockingIOError):
            writer.close()
            raise ValueError(
                f"{file} is being written by another process; "
                "wait until it ends or choose another --output"
            ) from None
    return writer


_ENDING = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
_ENDING_BYTES = len(', "crc": "00000000"}')


def _line_of(result: Mapping[str, Any]) -> bytes:
    """The line for a result, whose last key is a checksum, with a newline."""
    # Lone surrogates are escaped, so that no text can stop a run.
    text = json.dumps(dict(result), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return b'%s, "crc": "%08x"}\n' % (text[:-1], zlib.crc32(text))


def _result_of(line: bytes) -> Any:
    """The result in a line without its newline, and without its checksum.

    Raises `Damaged` if the checksum is missing or wrong. Every single-bit flip and every error
    burst of up to 32 bits is detected.
    """
    ending = _ENDING.fullmatch(line[-_ENDING_BYTES:])
    if ending is None:
        raise Damaged("it has no checksum")
    text = line[:-_ENDING_BYTES] + b"}"
    if zlib.crc32(text) != int(ending[1], 16):
        raise Damaged("its checksum is wrong")
    return json.loads(text.decode("utf-8"))
