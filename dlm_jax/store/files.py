"""Files on local disks and in buckets (``gs://``, ``s3://``): atomic writes, checksums and locks.

A path is an `etils.epath.Path`, which is a `pathlib.Path` if it is local. Objects in a bucket
cannot be renamed, so a group of objects becomes valid when its last object is written.

The last key in a JSON line with a checksum is ``crc``: the CRC32, in hex, of the JSON without that
key.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import inspect
import os
import re
import secrets
import shutil
import stat
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

_DRIVERS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_CHUNK = 16 << 20
_STALE_SECONDS = 3600.0


def is_remote(location: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(location)


AnyPath = Path | epath.Path
"""A path on a disk or in a bucket."""


def located(location: str | os.PathLike[str]) -> epath.Path:
    """The path of a location, which is an absolute path or the URL of a bucket.

    For a URL, the fsspec driver for its scheme must be installed.
    """
    text = os.fspath(location)
    if not is_remote(text):
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    scheme = text.split("://", 1)[0]
    if scheme not in _DRIVERS:
        raise ValueError(f"{text} is a URL of an unknown kind; use gs://, s3:// or a local path")
    driver, extra = _DRIVERS[scheme]
    try:
        __import__(driver)
        import fsspec.config
    except ImportError:
        raise ValueError(
            f"{text} needs {driver}, which is not installed; pip install 'dlm_jax[{extra}]'"
        ) from None
    # Other processes write to the same bucket, so listings must not be cached.
    fsspec.config.conf.setdefault(extra, {})["use_listings_cache"] = False
    fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
    return epath.Path(text)


@contextlib.contextmanager
def reachable(what: str, location: str | os.PathLike[str]) -> Iterator[None]:
    """Converts errors from a bucket or disk to a `ValueError` that names the location."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if is_full(error) or not (is_remote(location) or isinstance(error, OSError)):
            raise
        why = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be reached"
        raise ValueError(
            f"{what}={location} {why} ({said(error)}); check the path, the permissions and the "
            "network"
        ) from None


def check_bucket(what: str, location: str | os.PathLike[str]) -> None:
    """Raises ValueError for a URL whose bucket is missing or not writable; no-op for local paths.

    The check writes and deletes an empty object.
    """
    if not is_remote(location):
        return
    path = located(location)
    probe = path / f".probe-{uuid.uuid4().hex}"
    with reachable(what, location):
        probe.write_bytes(b"")
        probe.unlink()


def crc_of(file: IO[bytes], crc: int = 0) -> int:
    """The CRC32 of the rest of a file, given the `crc` of the bytes before it."""
    while chunk := file.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
    return crc


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a pipe, a socket or a device, which may wait or never end."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"{path} is not a regular file; copy its content to a file")


def size_and_crc(path: AnyPath) -> tuple[int, int]:
    """Returns (size in bytes, CRC32) of a file."""
    with path.open("rb") as file:
        crc = crc_of(file)
        return file.tell(), crc


def copy_whole(source: epath.Path, target: epath.Path) -> None:
    """Copies a file to `target` atomically; each is a local path or in a bucket."""
    with source.open("rb") as read, replacing(target) as written:
        shutil.copyfileobj(read, written, _CHUNK)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a new file that replaces `path` atomically when the block ends, after a sync to disk.

    After an error, a kill or a power failure, the file has either its old or its new content, also
    in a bucket. If `path` is a link, the link is kept and its target is replaced. The temporary
    files of killed processes are removed after an hour.

    Raises:
      OSError: the file cannot be written; the error names `path`. An `OSError` from the block that
        names another file is unchanged.
    """
    if is_remote(path):
        file = _object(path)
        try:
            yield file
        except BaseException:
            # Closing would complete the object.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        for leftover in _leftovers(target):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    leftover.unlink()
        with temporary.open("wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync(target.parent)
    except OSError as error:
        is_of_another = error.filename not in (None, *map(os.fspath, (temporary, target.parent)))
        if error.errno is None or is_of_another:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _object(url: str | os.PathLike[str]) -> Any:
    """A new object in a bucket, which appears when it is closed, unless it is discarded."""
    from fsspec.core import url_to_fs

    located(url)  # checks the driver
    system, path = url_to_fs(os.fspath(url))
    return system.open(path, "wb")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces the file with `content` atomically; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def remove_leftovers(path: Path) -> None:
    """Removes the temporary files of killed processes, if no other process is writing `path`."""
    for leftover in _leftovers(Path(os.path.realpath(path))):
        leftover.unlink(missing_ok=True)


def _leftovers(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.writing"))


def sync(path: str | os.PathLike[str]) -> None:
    """Syncs a file or directory to disk.

    A directory is not synced on file systems that do not support it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not is_directory or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Removes a local directory, file, or link (but not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Returns whether an error is due to a full or broken disk rather than a bad file name."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full


@contextlib.contextmanager
def refused_unless_full(what: object, remedy: str) -> Iterator[None]:
    """Converts the `OSError` of a failed write to a `ValueError` with the remedy.

    If the disk is full (`is_full`), the error remains an `OSError`, because another name would not
    help.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise OSError(error.errno, f"{error.strerror}; {remedy}", str(what)) from error
        raise ValueError(f"{what} cannot be written: {error.strerror}; {remedy}") from error


def said(error: Exception) -> str:
    """The message of an error on one line of at most 200 characters, or the name of its type."""
    return " ".join(str(error).split())[:200] or type(error).__name__


_ENDING = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
_ENDING_BYTES = len(', "crc": "00000000"}')


class Damaged(ValueError):
    """Raised if a line or file has changed since it was written."""


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


def source_digest(code: object) -> str | None:
    """A digest of the source file of a function, class or module, as 16 hex digits.

    The digest covers the whole module, because a function may call other functions in it, but does
    not cover imported modules. The result is None if there is no source file.
    """
    try:
        file = inspect.getsourcefile(code)  # type: ignore[arg-type]
        content = None if file is None else Path(file).read_bytes()
    except (OSError, TypeError):
        return None
    return None if content is None else hashlib.sha256(content).hexdigest()[:16]


NO_SOURCE = "without source"
"""Replaces the digest for code without a source file; changes to such code are not detected."""


def own_source(code: Any) -> str:
    """The name of custom code, with a digest of its source or `NO_SOURCE`."""
    while isinstance(code, functools.partial):
        code = code.func
    code = code if hasattr(code, "__qualname__") else type(code)
    return f"{code.__module__}.{code.__qualname__} {source_digest(code) or NO_SOURCE}"


@functools.cache
def program_facts() -> dict[str, str]:
    """The version of the package, and a digest of all its source files, as 16 hex digits."""
    package, root = __name__.partition(".")[0], Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)} ".encode() + content)
    version = sys.modules[package].__version__
    return {f"version of {package}": version, f"source code of {package}": digest.hexdigest()[:16]}


def write_line(path: AnyPath, line: str) -> None:
    """Atomically writes a line and, as a second line, its CRC32 in hex."""
    write_whole(path, _with_crc(line).encode())


def read_line(path: AnyPath) -> str:
    """The line that `write_line` wrote; raises `Damaged` if the file has changed."""
    text = path.read_bytes().decode(errors="replace")
    line = text.partition("\n")[0]
    if text != _with_crc(line):
        raise Damaged(f"{path} has a wrong checksum")
    return line


def _with_crc(line: str) -> str:
    return f"{line}\n{zlib.crc32(line.encode()):08x}\n"


LOCK = ".lock"
"""The lock file in a reserved directory."""


class DirectoryLock:
    """Reserves directories for one process until the process releases them or ends.

    `lock` locks the directory itself, or the file `LOCK` in it if only files can be locked, as on
    network file systems. In a bucket, or on a file system without locks, the process writes a claim
    to that file. The process with the last claim owns the directory, and `check` raises an error in
    processes with earlier claims.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._claims: dict[AnyPath, str] = {}

    def lock(self, directory: AnyPath, setting: str) -> bool:
        """Locks a directory, or a path in a bucket, and returns whether it is locked; False on a
        file system without locks and in a bucket. A second call has no effect.

        Raises ValueError with the name of the setting if another process has locked the directory.
        """
        if is_remote(directory):
            return False
        status = os.stat(directory)
        place = (status.st_dev, status.st_ino)
        if place in self._descriptors.values():
            return True
        for path, how in ((directory, os.O_RDONLY), (directory / LOCK, os.O_RDWR | os.O_CREAT)):
            try:
                descriptor = os.open(path, how, 0o644)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptors[descriptor] = place
                return True
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    raise ValueError(
                        f"{setting}={directory} is in use by another run; wait until it ends, or "
                        f"use another {setting}"
                    ) from None
        return False

    def claim(self, directory: AnyPath) -> None:
        """Claims an existing directory, or a path in a bucket, that cannot be locked."""
        if not is_remote(directory):
            directory = Path(os.path.realpath(directory))
        path = directory / LOCK
        if path not in self._claims:
            claim = secrets.token_hex(8)
            path.write_text(claim)
            self._claims[path] = claim

    def check(self) -> None:
        """Raises OSError if another process has since claimed a directory."""
        for path, claim in self._claims.items():
            if _claim_in(path) != claim:
                raise OSError(errno.EBUSY, "taken over by another run", str(path.parent))

    def release(self) -> None:
        """Releases all directories; a second call has no effect."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[0])
        while self._claims:
            path, claim = self._claims.popitem()
            with contextlib.suppress(OSError):
                if _claim_in(path) == claim:
                    path.unlink()


def _claim_in(path: AnyPath) -> str:
    """The claim in a file; empty if a process with a later claim has removed the file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
