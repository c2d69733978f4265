"""A record of every file in a directory, by which later damage is noticed.

``manifest.json`` has two lines: a JSON object (``facts``: whatever the writer wants to keep beside
the sums; ``files``: relative path -> [size in bytes, CRC32]) and the CRC32 of that line in hex.
"""

from __future__ import annotations

import concurrent.futures
import json
import zlib
from pathlib import Path
from typing import Any

from dlm_jax.storage import AnyPath, is_remote, replacing, size_and_crc, sync

_READERS = 32
NAME = "manifest.json"
SET_ASIDE = "manifest.json.damaged"
"""What the manifest of a damaged checkpoint in a bucket is called, where nothing can be renamed."""


class Damaged(ValueError):
    """The files are not, or not all, what was written."""


def write(directory: Path, facts: dict[str, Any]) -> None:
    """Nothing, once ``directory``'s files and a manifest of them are on disk, power cut or not."""
    files: dict[str, tuple[int, int]] = {}
    folders = [directory]
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            folders.append(path)
        else:
            files[path.relative_to(directory).as_posix()] = size_and_crc(path)
            sync(path)
    line = json.dumps({"facts": facts, "files": files})
    with replacing(directory / NAME) as file:
        file.write(_with_crc(line).encode())
    for folder in folders:
        sync(folder)


def put(directory: AnyPath, facts: dict[str, Any], files: dict[str, tuple[int, int]]) -> None:
    """Nothing, once the manifest of `files`, sizes and CRC32s by relative path, is in a bucket."""
    line = json.dumps({"facts": facts, "files": files})
    (directory / NAME).write_text(_with_crc(line))


def read(directory: Path) -> dict[str, Any]:
    """The facts that were given to `write`; raises `Damaged` if the manifest is not as written."""
    return _read(directory)["facts"]


def verify(directory: Path) -> None:
    """Nothing if all files are as written; else `Damaged`, naming the first that is not.

    Every single-bit flip, every burst of up to 32 bits, and every missing or shortened file is
    found; files added later are ignored. Reads all bytes (about 1-2 GB/s from memory).
    """
    files = _read(directory)["files"].items()
    if not is_remote(directory):
        for name, expected in files:
            _verify_file(directory / name, *expected)
        return
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(lambda file: _verify_file(directory / file[0], *file[1]), files):
            pass


def _verify_file(path: Path, size: int, crc: int) -> None:
    try:
        found = path.stat().st_size if not is_remote(path) else size
        if found != size:
            raise Damaged(f"{path} has {found} bytes instead of {size}")
        if size_and_crc(path) != (size, crc):
            raise Damaged(f"{path} has a wrong checksum")
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error


def _read(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} has a wrong checksum") from error
    line = text.partition("\n")[0]
    if text != _with_crc(line):
        raise Damaged(f"{path} has a wrong checksum")
    return json.loads(line)


def _with_crc(line: str) -> str:
    return f"{line}\n{zlib.crc32(line.encode()):08x}\n"
