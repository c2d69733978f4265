"""One file of results on disk: its lines, the run it belongs to, its lock, and how it is replaced.

Beside a file with lines lies ``FILE.run``, which holds the fingerprint of its run, and whether the
results of all processes were once merged into the file. A file with lines but without it is a
stranger's; an empty file belongs to no run. Lines and record have checksums (`checksums`).
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm_jax.batch.requests import Key
from dlm_jax.checksums import Damaged, with_crc, without_crc
from dlm_jax.storage import replacing

Rows = dict[Key, bytes]
"""Lines by the key of their result."""


def result_key(result: Any) -> Key | None:
    """What identifies a result, by its ``id`` and its ``sample`` if it has one; None: no result."""
    key = result.get("id") if isinstance(result, Mapping) else None
    if not isinstance(key, str | int) or isinstance(key, bool):
        return None
    sample = result.get("sample")
    return key if sample is None else (key, sample) if type(sample) is int else None


def shown(key: Key) -> str:
    """A key as errors name it."""
    return f"id={key[0]!r} sample={key[1]}" if isinstance(key, tuple) else f"id={key!r}"


def line_of(result: Mapping[str, Any]) -> bytes:
    """The line of a result, with its checksum and line end."""
    # A lone surrogate becomes its JSON escape, so that no text can stop a run.
    text = json.dumps(dict(result), ensure_ascii=False)
    return with_crc(text.encode("utf-8", "backslashreplace")) + b"\n"


def run_path(file: Path) -> Path:
    """Where it is said of which run a file is."""
    return file.with_name(f"{file.name}.run")


def run_of(file: Path) -> dict[str, Any]:
    """What is said beside a file; nothing if that is missing, unreadable or damaged."""
    try:
        record = json.loads(without_crc(run_path(file).read_bytes().removesuffix(b"\n")))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def owned(file: Path, fingerprint: str) -> bytes:
    """What is in a file of this run; nothing if it is empty or there is none.

    Raises:
      ValueError: it is of another run, or cannot be read.
    """
    # Twice, because another process may write its first line between the two readings. First the
    # `.run`, then the file, because they are removed the other way round.
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


def load(file: Path, fingerprint: str) -> tuple[Rows, int]:
    """Whole lines by key, the first where a key has two, and the byte where they end.

    Raises:
      ValueError: the file is of another run, or cannot be read, or a whole line is no result.
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
            raise ValueError(f"{file} line {number} is no result; remove that line or the file")
        rows.setdefault(key, line + b"\n")
    return rows, content.rfind(b"\n") + 1


def replace(target: Path, content: bytes, temporary: Path) -> None:
    """Writes `target` so that it is the old one or the new one, power cut or not.

    Args:
      target: the file to write.
      content: all of it.
      temporary: a path beside it that no other process writes at the same time.
    """
    with replacing(target, temporary) as file:
        file.write(content)


def append(writer: io.FileIO, line: bytes) -> None:
    """Hands the line to the operating system, whole; on any error, Ctrl-C too, nothing of it."""
    end = os.fstat(writer.fileno()).st_size
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[writer.write(rest) :]
    except BaseException:
        # The next line must not continue half of this one.
        writer.truncate(end)
        raise


def open_locked(file: Path) -> io.FileIO:
    """The file, opened to append to, which no other process can open so until it is closed.

    Raises:
      ValueError: another process has it open.
      OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = io.FileIO(file, "a")
    try:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error is that of a file system without locks, which is written without one.
        if isinstance(error, BlockingIOError):
            writer.close()
            raise ValueError(
                f"{file} is being written by another process; "
                "wait for its end or choose another --output"
            ) from None
    return writer
