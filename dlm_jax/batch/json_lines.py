"""Files of requests and of results, one JSON object per line. Memory does not grow with a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dlm_jax.store.files import Damaged, refuse_failures, replacing

Id = str | int
Key = Id | tuple[Id, int]
"""The key of a result: the line's id, with the sample number if there are several samples."""

_BOM = b"\xef\xbb\xbf"
_MOST_SAMPLES = 1 << 20


class KeyTable:
    """A set of keys, each with two integers, in a private file that the system removes."""

    def __init__(self) -> None:
        self._count = 0
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute("PRAGMA cache_size = -32768")  # KiB
        self._file.execute("PRAGMA journal_mode = OFF")
        columns = "key TEXT PRIMARY KEY, a INTEGER, b INTEGER"
        self._file.execute(f"CREATE TABLE keys ({columns}) WITHOUT ROWID")
        self._file.execute("BEGIN")

    def add(self, key: Key, place: tuple[int, int] = (0, 0)) -> bool:
        """Adds a key, unless it is in the table. Returns whether it was added."""
        row = json.dumps(key), *place
        added = self._file.execute("INSERT OR IGNORE INTO keys VALUES (?, ?, ?)", row).rowcount
        self._count += added
        return added > 0

    def place(self, key: Key) -> tuple[int, int] | None:
        """Returns the integers of a key; None if it is not in the table."""
        query = "SELECT a, b FROM keys WHERE key = ?"
        return self._file.execute(query, (json.dumps(key),)).fetchone()

    def __contains__(self, key: Key) -> bool:
        return self.place(key) is not None

    def __len__(self) -> int:
        return self._count


@dataclass(frozen=True)
class Line:
    """One line of a file of requests: its settings without id and ``n``, or the reason why it
    cannot run. A line with an error counts as one sample, and keeps its id if that is valid.

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

    def key(self, sample: int) -> Key:
        return self.id if self.num_samples == 1 else (self.id, sample)

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(map(self.key, range(self.num_samples)))


class RequestFile:
    """The non-blank lines of a file of requests, in order, with unique ids.

    Each iteration reads the file again, one line at a time, and raises ValueError if the file has
    changed. A line without an id gets the id ``line NUMBER``, which no other line may use. A line
    with ``n`` samples has one result per sample. Other settings are checked when the line runs.

    Args:
      path: a UTF-8 file, with or without a byte order mark.
      num_samples: number of rows for a line without ``n``.
    """

    def __init__(self, path: str | os.PathLike[str], *, num_samples: int = 1) -> None:
        self._path, self._num_samples = Path(path), num_samples
        with _opened(path) as file:
            self._state = _state_of(file)

    def __iter__(self) -> Iterator[Line]:
        ids, extra = KeyTable(), 0
        with _opened(self._path) as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            for number, raw in enumerate(file, 1):
                if raw.isspace():
                    continue
                line = replace(self._read(raw.removesuffix(b"\n"), number, ids), extra=extra)
                yield line
                # An unreadable line counts as `num_samples` rows, so that fixing it does not
                # renumber other rows.
                extra += (self._num_samples if line.error else line.num_samples) - 1
            if _state_of(file) != self._state:
                raise ValueError(
                    f"{self._path} has changed during the run; restore it and run again, or "
                    "choose another --output for the new file"
                )

    def _read(self, raw: bytes, number: int, ids: KeyTable) -> Line:
        """Parses one line. `ids` has the line number of each id, and is updated."""
        id_ = f"line {number}"
        try:
            request = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
            if not isinstance(request, dict):
                raise ValueError(f'{_show(request)} is not an object; write {{"prompt": ...}}')
            given = request.pop("id", id_)
            if type(given) not in (str, int):
                raise ValueError(f"id={_show(given)} must be a string or an integer")
            if given != id_:
                if isinstance(given, str) and re.fullmatch("line [1-9][0-9]*", given):
                    raise ValueError(f"id={_show(given)} is reserved for that line; use another id")
                str(given).encode()
                if not ids.add(given, (number, 0)):
                    first, _ = ids.place(given) or (0, 0)
                    raise ValueError(
                        f"id={_show(given)} is already used by line {first}; use unique ids"
                    )
            id_ = given
            count = request.pop("n", self._num_samples)
            if type(count) is not int or not 1 <= count <= _MOST_SAMPLES:
                raise ValueError(f"n={_show(count)} must be an integer from 1 to {_MOST_SAMPLES}")
            for value in request.values():
                if isinstance(value, str):
                    value.encode()
        except json.JSONDecodeError as error:
            why = f"is not JSON: {error.msg} at column {error.colno}; write one object per line"
        except (ValueError, RecursionError) as error:
            why = str(error)
        else:
            return Line(number, id_, request, num_samples=count)
        return Line(number, id_, {}, f"{self._path.name} line {number}: {why}")


def share(lines: Iterable[Line], index: int, count: int) -> Iterator[Line]:
    """The lines that process `index` of `count` runs: line numbers equal to `index` mod `count`."""
    return (line for line in lines if line.number % count == index)


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
      done: the keys of finished results.
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
        self.done, self.plan = KeyTable(), dict(plan or {})
        self._writer: io.FileIO | None = None
        record_path = self.path.with_name(f"{self.path.name}.run")
        with (
            contextlib.ExitStack() as undo,
            refuse_failures(str(self.path), "choose another --output"),
        ):
            writer = undo.enter_context(_open_locked(self.path))
            if os.fstat(writer.fileno()).st_size:
                try:
                    record = json.loads(without_crc(record_path.read_bytes().removesuffix(b"\n")))
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
        """Appends one result and adds its key to `done`; on an error, nothing is written.

        Args:
          result: a JSON object with an ``id`` and, if the line has several samples, a ``sample``.
              Its key must not be in `done` yet.
        """
        key, writer = result_key(result), self._writer
        if key is None or key in self.done:
            why = "has no id" if key is None else "exists already"
            raise ValueError(f"result {str(result)[:60]} {why}; write each result once")
        if writer is None:
            raise ValueError(f"{self.path} is closed; open the results again")
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
        self.done.add(key, (end, end + len(line)))

    def finish(self, order: Iterable[Key]) -> None:
        """Closes the file and sorts its lines. `order` has all keys and is iterated twice.

        Raises:
          ValueError: a result is missing.
        """
        self.close()
        is_sorted, end = True, 0
        for key in order:
            place = self.done.place(key)
            if place is None:
                raise ValueError(f"{self.path} lacks the result of {key!r}; run again to repeat it")
            is_sorted &= place[0] == end
            end = place[1]
        if not is_sorted or end != self.path.stat().st_size:
            with self.path.open("rb") as source, replacing(self.path) as target:
                for key in order:
                    start, end = self.done.place(key) or (0, 0)
                    source.seek(start)
                    target.write(source.read(end - start))

    def close(self) -> None:
        """Syncs the file to disk and closes it; a second call has no effect."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with writer, refuse_failures(str(self.path), "choose another --output"):
                os.fsync(writer.fileno())

    def _scan(self) -> int:
        """Adds the keys of the complete lines to `done`, and returns the end of the last one."""
        end = 0
        with self.path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if not line.endswith(b"\n"):
                    break
                key, why = None, "is not a result"
                try:
                    key = result_key(json.loads(without_crc(line[:-1]).decode("utf-8")))
                except Damaged as error:
                    why = f"is damaged: {error}"
                except (ValueError, RecursionError):
                    pass
                if key is None:
                    raise ValueError(
                        f"{self.path} line {number} {why}; remove that line or the file"
                    )
                self.done.add(key, (end, end + len(line)))
                end += len(line)
        return end


def result_key(result: Any) -> Key | None:
    """The key of a result, from ``id`` and, if present, ``sample``; None for other values."""
    key = result.get("id") if isinstance(result, Mapping) else None
    if not isinstance(key, str | int) or isinstance(key, bool):
        return None
    sample = result.get("sample")
    return key if sample is None else (key, sample) if type(sample) is int else None


def _line_of(result: Mapping[str, Any]) -> bytes:
    """The line for a result, with checksum and newline."""
    # Lone surrogates are escaped, so that no text can stop a run.
    text = json.dumps(dict(result), ensure_ascii=False)
    return with_crc(text.encode("utf-8", "backslashreplace")) + b"\n"


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


def with_crc(line: bytes) -> bytes:
    """The JSON line of a non-empty object with its checksum added, without a newline."""
    return b'%s, "crc": "%08x"}' % (line[:-1], zlib.crc32(line))


def without_crc(line: bytes) -> bytes:
    """The line without its checksum.

    Raises `Damaged` if the checksum is missing or wrong. Every single-bit flip and every error
    burst of up to 32 bits is detected.
    """
    ending = _ENDING.fullmatch(line[-_ENDING_BYTES:])
    if ending is None:
        raise Damaged("it has no checksum")
    plain = line[:-_ENDING_BYTES] + b"}"
    if zlib.crc32(plain) != int(ending[1], 16):
        raise Damaged("its checksum is wrong")
    return plain
