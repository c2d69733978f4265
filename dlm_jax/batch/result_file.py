"""Files of results on disk: lines, run record, lock and atomic replacement.

A results file with lines has a companion ``FILE.run``, which contains the fingerprint of the run
and a flag that is set once the results of all processes have been merged. A file with lines but no
companion is treated as another program's file; an empty file belongs to no run. The lines and the
run record have checksums.

Results are appended, so that they survive interruption, and are sorted by request at the end.

A single process writes ``out.jsonl``; process 1 of 3 writes ``out.jsonl.part-01-of-03`` in the same
directory. The last process to finish merges the parts. The processes need not communicate: the
merged file appears atomically, and the parts are removed only afterwards. If a part is missing, its
lines are already in the merged file. Concurrent merges write the same content.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_jax.batch.request_file import Key, check_process, require
from dlm_jax.store.files import Damaged, refused_unless_full, replacing, with_crc, without_crc

Rows = dict[Key, bytes]
"""Lines by result key."""


def result_key(result: Any) -> Key | None:
    """The key of a result, from ``id`` and, if present, ``sample``; None for other values."""
    key = result.get("id") if isinstance(result, Mapping) else None
    if not isinstance(key, str | int) or isinstance(key, bool):
        return None
    sample = result.get("sample")
    return key if sample is None else (key, sample) if type(sample) is int else None


def shown(key: Key) -> str:
    return f"id={key[0]!r} sample={key[1]}" if isinstance(key, tuple) else f"id={key!r}"


def line_of(result: Mapping[str, Any]) -> bytes:
    """The line for a result, with checksum and newline."""
    # Lone surrogates are escaped, so that no text can stop a run.
    text = json.dumps(dict(result), ensure_ascii=False)
    return with_crc(text.encode("utf-8", "backslashreplace")) + b"\n"


def run_path(file: Path) -> Path:
    """The path of the run record of a results file."""
    return file.with_name(f"{file.name}.run")


def run_of(file: Path) -> dict[str, Any]:
    """The run record of a file; empty if missing, unreadable or damaged."""
    try:
        record = json.loads(without_crc(run_path(file).read_bytes().removesuffix(b"\n")))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def owned(file: Path, fingerprint: str) -> bytes:
    """The content of a file that belongs to this run; empty if the file is empty or absent."""
    # Try twice, because another process may write its first line between reading the record and the
    # file. The record is read before the file, because they are removed in the reverse order.
    for _ in range(2):
        is_ours = run_of(file).get("fingerprint") == fingerprint
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read: {error.strerror}; choose another --output"
            ) from None
        if is_ours or not content:
            return content
    raise ValueError(f"{file} belongs to another run: remove it or choose another --output")


def load_lines(file: Path, fingerprint: str) -> tuple[Rows, int]:
    """The complete lines, indexed by key (the first of duplicates), and the byte offset of their
    end.
    """
    content = owned(file, fingerprint)
    *lines, _ = content.split(b"\n")
    rows: Rows = {}
    for number, line in enumerate(lines, 1):
        try:
            key = result_key(json.loads(without_crc(line).decode("utf-8")))
        except Damaged as error:
            raise ValueError(
                f"{file} line {number} is damaged: {error}; remove that line or the file"
            ) from None
        except (ValueError, RecursionError):
            key = None
        if key is None:
            raise ValueError(f"{file} line {number} is not a result; remove that line or the file")
        rows.setdefault(key, line + b"\n")
    return rows, content.rfind(b"\n") + 1


def replace_lines(target: Path, content: bytes, temporary: Path) -> None:
    """Replaces `target` atomically, even if power is lost.

    `temporary` is a path in the same directory that no other process uses.
    """
    with replacing(target, temporary) as file:
        file.write(content)


def append_line(writer: io.FileIO, line: bytes) -> None:
    """Writes the whole line, or nothing if there is an error or Ctrl-C."""
    end = os.fstat(writer.fileno()).st_size
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[writer.write(rest) :]
    except BaseException:
        # Remove a partial line, so that the next line does not continue it.
        writer.truncate(end)
        raise


def open_locked(file: Path) -> io.FileIO:
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


def fingerprint(
    requests: str | os.PathLike[str], *, model: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """A fingerprint (64 hex digits) of requests, model and settings.

    Args:
      requests: the file of requests; the fingerprint depends on its bytes, not on its name.
      model: a description of the model as JSON values.
      settings: everything else that the results depend on; the order does not matter.
    """
    described = json.dumps([model, settings], sort_keys=True).encode()
    content = hashlib.sha256(Path(requests).read_bytes()).digest()
    return hashlib.sha256(content + described).hexdigest()


class Results:
    """The results of one process: those already on disk and those that it writes.

    `done` has the keys of finished results. Once `write` has returned, the result survives a crash
    of the process; once `close` has returned, it survives a power failure.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: str,
        index: int = 0,
        count: int = 1,
    ) -> None:
        """Opens this process's file and removes a partial last line.

        The results of all `count` processes are merged into `path`.
        """
        check_process(index, count)
        self.path = Path(os.path.realpath(path))
        is_special = os.path.exists(path) and not os.path.isfile(path)
        require(not is_special, f"{path} is not a file; choose another --output")
        self.done: set[Key] = set()
        self._fingerprint, self._count = fingerprint, count
        self._file = self._part(index) if count > 1 else self.path
        self._writer: io.FileIO | None = None
        self._is_closed = False
        is_merged = self._check_others()
        # If the run is already complete, no empty part is created.
        if count == 1 or not is_merged:
            self._open()
        # Load this after opening, because a merge may have removed the part.
        self.done |= self._load(self.path).keys()

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
        key = result_key(result)
        if key is None:
            raise ValueError(f"result {str(result)[:60]} has no id; use a string or an integer")
        require(
            key not in self.done,
            f"the result of {shown(key)} exists already; write it once",
        )
        require(not self._is_closed, f"{self._file} is closed; open the results again")
        line = line_of(result)
        try:
            append_line(self._writer or self._open(), line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file)) from None
        self.done.add(key)

    def finish(self, order: Sequence[Key]) -> bool:
        """Merges the parts into `path` in the given order; returns False while results are missing.

        Call this method when this process has written all its results. The last process merges the
        parts. If the results are complete, this method closes them. `order` has the keys of the
        results of all processes.
        """
        rows: Rows = {}
        parts = [self._part(index) for index in range(self._count)] if self._count > 1 else []
        # Read the merged file last, because it contains every part that a concurrent merge removed.
        for file in (*parts, self.path):
            rows = self._load(file) | rows
        lost = next(iter(self.done - rows.keys()), None)
        if lost is not None:
            raise ValueError(
                f"{self._file} has lost the result of {shown(lost)}; run again to repeat it"
            )
        if not rows.keys() >= set(order):
            return False
        strange = next(iter(rows.keys() - set(order)), None)
        if strange is not None:
            raise ValueError(
                f"{self.path} has a result of {shown(strange)}, which no request has; remove "
                "its line"
            )
        content = b"".join(rows[key] for key in order)
        self.close()
        # Write the record first, because a merged file without a record belongs to no run.
        self._record(self.path, is_complete=True)
        if not self.path.exists() or self.path.read_bytes() != content:
            replace_lines(self.path, content, self._temporary)
        self._tidy()
        return True

    def close(self) -> None:
        """Syncs the file to disk and closes it; a second call has no effect."""
        self._is_closed = True
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with writer:
                os.fsync(writer.fileno())

    @property
    def _temporary(self) -> Path:
        # Named after this process's file, so that no other process uses the same name.
        return self._file.with_name(f"{self._file.name}.writing")

    def _part(self, index: int) -> Path:
        name = f"{self.path.name}.part-{index:02d}-of-{self._count:02d}"
        return self.path.with_name(name)

    def _parts(self) -> dict[Path, int]:
        """The process count of each part, including parts of other runs or without results."""
        pattern = re.compile(re.escape(self.path.name) + r"\.part-\d+-of-(\d+)")
        names = os.listdir(self.path.parent) if self.path.parent.is_dir() else []
        found = (pattern.fullmatch(name.removesuffix(".run")) for name in sorted(names))
        return {self.path.with_name(match[0]): int(match[1]) for match in found if match}

    def _check_others(self) -> bool:
        """Returns whether the results are already merged; ValueError for another run or process
        count.
        """
        rows = self._load(self.path)
        if rows and run_of(self.path).get("complete") is True:
            return True
        counts = {file: count for file, count in self._parts().items() if file.exists()}
        if rows:
            counts[self.path] = 1
        for file, count in counts.items():
            owned(file, self._fingerprint)
            require(
                count == self._count,
                f"{file} belongs to a run with count={count} processes, not {self._count}; "
                f"continue with {count}, or remove it or choose another --output",
            )
        return False

    def _open(self) -> io.FileIO:
        """Opens and locks this process's file, without a partial last line."""
        writer = None
        try:
            writer = open_locked(self._file)
            rows, end = load_lines(self._file, self._fingerprint)
            if end < os.fstat(writer.fileno()).st_size:
                writer.truncate(end)
            if not end:
                self._record(self._file, is_complete=False)
        except BaseException:
            if writer is not None:
                writer.close()
            with refused_unless_full(self._file, "choose another --output"):
                raise
        self.done |= rows.keys()
        self._writer = writer
        return writer

    def _load(self, file: Path) -> Rows:
        return load_lines(file, self._fingerprint)[0]

    def _record(self, file: Path, *, is_complete: bool) -> None:
        """Writes the run record of a file, unless it is up to date."""
        record = {"fingerprint": self._fingerprint, "complete": is_complete}
        if run_of(file) != record:
            replace_lines(run_path(file), line_of(record), self._temporary)

    def _tidy(self) -> None:
        """Removes the parts of this run, but not those of other runs."""
        for part in self._parts():
            if run_of(part).get("fingerprint") == self._fingerprint:
                part.unlink(missing_ok=True)
                run_path(part).unlink(missing_ok=True)
        self._temporary.unlink(missing_ok=True)
