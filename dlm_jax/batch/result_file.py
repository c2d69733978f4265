"""Files of results on disk: lines, run record, lock and atomic replacement.

A results file with lines has a companion ``FILE.run``, which contains the fingerprint of the run,
what determines its programs, and a flag that is set once the results of all processes have been
merged. A file with lines but no companion is treated as another program's file; an empty file
belongs to no run. The lines and the run record have checksums.

Results are appended, so that they survive interruption, and are sorted by request at the end.

A single process writes ``out.jsonl``; process 1 of 3 writes ``out.jsonl.part-01-of-03`` in the same
directory. The last process to finish merges the parts. The processes need not communicate: the
merged file appears atomically, and the parts are removed only afterwards. If a part is missing, its
lines are already in the merged file. Concurrent merges write the same content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dlm_jax.batch.request_file import Key, KeyTable, check_process, opened
from dlm_jax.store.files import Damaged, refused_unless_full, replacing, with_crc, without_crc


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


def open_owned(file: Path, fingerprint: str) -> IO[bytes] | None:
    """Opens a file that belongs to this run or is empty; None if it is absent."""
    # Try twice, because another process may write its first line between reading the record and the
    # file. The record is read before the file, because they are removed in the reverse order.
    for _ in range(2):
        is_ours = run_of(file).get("fingerprint") == fingerprint
        try:
            handle = file.open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read: {error.strerror}; choose another --output"
            ) from None
        if is_ours or not os.fstat(handle.fileno()).st_size:
            return handle
        handle.close()
    raise ValueError(f"{file} belongs to another run: remove it or choose another --output")


def scan_lines(handle: IO[bytes], file: Path) -> Iterator[tuple[Key, int, int]]:
    """Yields the key, offset and size of each complete line that the file has now."""
    end, offset = os.fstat(handle.fileno()).st_size, 0
    for number, line in enumerate(handle, 1):
        if not line.endswith(b"\n") or offset + len(line) > end:
            return
        try:
            key = result_key(json.loads(without_crc(line[:-1]).decode("utf-8")))
        except Damaged as error:
            raise ValueError(
                f"{file} line {number} is damaged: {error}; remove that line or the file"
            ) from None
        except (ValueError, RecursionError):
            key = None
        if key is None:
            raise ValueError(f"{file} line {number} is not a result; remove that line or the file")
        yield key, offset, len(line)
        offset += len(line)


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
    with opened(requests) as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(content + described).hexdigest()


class Results:
    """The results of one process: those already on disk and those that it writes.

    Once `write` has returned, the result survives a crash of the process; once `close` has
    returned, it survives a power failure. Memory does not grow with the number of results.

    Attributes:
      path: the file into which the results of all processes are merged.
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
        """Opens this process's file and removes a partial last line.

        The results of all `count` processes are merged into `path`. `plan` is recorded, so that a
        run that continues one with results uses the same programs.
        """
        check_process(index, count)
        self.path = Path(os.path.realpath(path))
        is_special = os.path.exists(path) and not os.path.isfile(path)
        if is_special:
            raise ValueError(f"{path} is not a file; choose another --output")
        self.done = KeyTable()
        self._fingerprint, self._count = fingerprint, count
        self._file = self._part(index) if count > 1 else self.path
        self._writer: io.FileIO | None = None
        self._is_closed = False
        self.plan = dict(plan or {})
        for file in {self.path, self._file}:
            record = run_of(file)
            has_results = os.path.exists(file) and os.path.getsize(file) > 0
            if has_results and record.get("fingerprint") == fingerprint:
                self.plan |= record.get("plan", {})
        is_merged = self._check_others()
        # If the run is already complete, no empty part is created.
        if count == 1 or not is_merged:
            self._open()
        if count > 1:
            # Scan this after opening, because a merge may have removed the part.
            self._scan(self.path)

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
        if key in self.done:
            raise ValueError(f"the result of {shown(key)} exists already; write it once")
        if self._is_closed:
            raise ValueError(f"{self._file} is closed; open the results again")
        line = line_of(result)
        try:
            append_line(self._writer or self._open(), line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file)) from None
        self.done.add(key)

    def finish(self, order: Iterable[Key]) -> bool:
        """Merges the parts into `path` in the given order; returns False while results are missing.

        Call this method when this process has written all its results. The last process merges the
        parts. If the results are complete, this method closes them. `order` has the keys of the
        results of all processes and is iterated twice.
        """
        places, handles = KeyTable(), list[IO[bytes]]()
        parts = [self._part(index) for index in range(self._count)] if self._count > 1 else []
        with contextlib.ExitStack() as stack:
            # Read the merged file last, because it has every part that a concurrent merge removed.
            for file in (*parts, self.path):
                handle = open_owned(file, self._fingerprint)
                if handle is None:
                    continue
                handles.append(stack.enter_context(handle))
                for key, offset, size in scan_lines(handle, file):
                    places.add(key, (len(handles) - 1, offset, size))
            lost = next((key for key in self.done if key not in places), None)
            if lost is not None:
                raise ValueError(
                    f"{self._file} has lost the result of {shown(lost)}; run again to repeat it"
                )
            # Without parts, the lines can be in their order already.
            is_sorted, end, count = len(handles) == 1 and self.path.exists(), 0, 0
            for key in order:
                place = places.place(key)
                if place is None:
                    return False
                is_sorted &= place[1] == end
                end, count = end + place[2], count + 1
            if count < len(places):
                strange = next(iter(set(places) - set(order)))
                raise ValueError(
                    f"{self.path} has a result of {shown(strange)}, which no request has; remove "
                    "its line"
                )
            self.close()
            # Write the record first, because a merged file without a record belongs to no run.
            self._record(self.path, is_complete=True)
            if not is_sorted or self.path.stat().st_size != end:
                with replacing(self.path, self._temporary) as merged:
                    for key in order:
                        number, offset, size = places.place(key) or (0, 0, 0)
                        handles[number].seek(offset)
                        merged.write(handles[number].read(size))
        self._remove_parts()
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
        counts = {file: count for file, count in self._parts().items() if file.exists()}
        merged = open_owned(self.path, self._fingerprint)
        if merged is not None:
            with merged:
                has_rows = any(True for _ in scan_lines(merged, self.path))
            if has_rows and run_of(self.path).get("complete") is True:
                return True
            if has_rows:
                counts[self.path] = 1
        for file, count in counts.items():
            with contextlib.ExitStack() as stack:
                if (handle := open_owned(file, self._fingerprint)) is not None:
                    stack.enter_context(handle)
            if count != self._count:
                raise ValueError(
                    f"{file} belongs to a run with count={count} processes, not {self._count}; "
                    f"continue with {count}, or remove it or choose another --output"
                )
        return False

    def _open(self) -> io.FileIO:
        """Opens and locks this process's file, without a partial last line."""
        writer = None
        try:
            writer = open_locked(self._file)
            end = self._scan(self._file)
            if end < os.fstat(writer.fileno()).st_size:
                writer.truncate(end)
            if not end:
                self._record(self._file, is_complete=False)
        except BaseException:
            if writer is not None:
                writer.close()
            with refused_unless_full(self._file, "choose another --output"):
                raise
        self._writer = writer
        return writer

    def _scan(self, file: Path) -> int:
        """Adds the keys of a file to `done` and returns the offset of the end of its lines."""
        end, handle = 0, open_owned(file, self._fingerprint)
        if handle is not None:
            with handle:
                for key, offset, size in scan_lines(handle, file):
                    self.done.add(key)
                    end = offset + size
        return end

    def _record(self, file: Path, *, is_complete: bool) -> None:
        """Writes the run record of a file, unless it is up to date."""
        record: dict[str, Any] = {"fingerprint": self._fingerprint, "complete": is_complete}
        record |= {"plan": self.plan} if self.plan else {}
        if run_of(file) != record:
            with replacing(run_path(file), self._temporary) as record_file:
                record_file.write(line_of(record))

    def _remove_parts(self) -> None:
        """Removes the parts of this run, but not those of other runs."""
        for part in self._parts():
            if run_of(part).get("fingerprint") == self._fingerprint:
                part.unlink(missing_ok=True)
                run_path(part).unlink(missing_ok=True)
        self._temporary.unlink(missing_ok=True)
