"""Files on local disks and in buckets (``gs://``, ``s3://``): atomic writes, checksums and locks.

A path is an `etils.epath.Path`, which is a `pathlib.Path` if it is local.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
import os
import secrets
import shutil
import stat
import sys
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from etils import epath

_DRIVERS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_CHUNK = 16 << 20


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


def is_full(error: BaseException) -> bool:
    """Returns whether an error is due to a full or broken disk rather than a bad file name."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full


@contextlib.contextmanager
def refuse_failures(what: str, remedy: str) -> Iterator[None]:
    """Converts errors of a disk or a bucket to a `ValueError` with the remedy.

    If the disk is full (`is_full`), the error remains an `OSError`, because another name would not
    help.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and is_full(error):
            raise OSError(error.errno, f"{error.strerror}; {remedy}", what) from error
        if not (isinstance(error, OSError) or is_remote(what)):
            raise
        raise ValueError(f"{what} cannot be read or written ({said(error)}); {remedy}") from error


def check_bucket(what: str, location: str | os.PathLike[str]) -> None:
    """Raises ValueError for a URL whose bucket is missing or not writable."""
    if is_remote(location):
        probe = located(location) / f".probe-{uuid.uuid4().hex}"
        with refuse_failures(f"{what}={location}", "check the URL and the permissions"):
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


def copy_whole(source: epath.Path, target: epath.Path) -> None:
    """Copies a file from or to a bucket; the copy appears when it is complete."""
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(source.open("rb"))
        opened = target.open("wb") if is_remote(target) else replacing(target)
        shutil.copyfileobj(read, stack.enter_context(opened), _CHUNK)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a new local file that replaces `path` atomically when the block ends, after a sync.

    After an error, a kill or a power failure, the file has either its old or its new content. If
    `path` is a link, the link is kept and its target is replaced.

    Raises:
      OSError: the file cannot be written; the error names `path`. An `OSError` from the block that
        names another file is unchanged.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
    try:
        with temporary.open("wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync(target.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, os.fspath(temporary)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces the file with `content` atomically; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def sync(path: str | os.PathLike[str]) -> None:
    """Syncs a file or directory to disk; not every file system can sync directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def said(error: Exception) -> str:
    """The message of an error on one line of at most 200 characters, or the name of its type."""
    return " ".join(str(error).split())[:200] or type(error).__name__


class Damaged(ValueError):
    """Raised if a line or file has changed since it was written."""


NO_SOURCE = "without source"
"""Replaces the digest for code without a source file; changes to such code are not detected."""


def own_source(code: Any) -> str:
    """The name of custom code, with a digest of the file that defines it or `NO_SOURCE`."""
    while isinstance(code, functools.partial):
        code = code.func
    code = code if hasattr(code, "__qualname__") else type(code)
    try:
        content = Path(inspect.getsourcefile(code) or "").read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
    except (OSError, TypeError):
        digest = NO_SOURCE
    return f"{code.__module__}.{code.__qualname__} {digest}"


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


LOCK = ".lock"
"""The lock file in a directory that cannot be locked itself."""


class DirectoryLock:
    """Reserves local directories for this process until it releases them or ends."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int], int] = {}

    def lock_all(self, places: Mapping[str, AnyPath], *, create: bool = False) -> None:
        """Locks the directories, by their settings; `create` makes those that do not exist.

        A directory is locked itself, or the file `LOCK` in it where only files can be locked, as on
        network file systems. Nothing is locked in a bucket or on a file system without locks.

        Raises:
          ValueError: a directory cannot be created, or another process has locked it.
        """
        for setting, directory in places.items():
            if is_remote(directory):
                continue
            if create:
                with refuse_failures(f"{setting}={directory}", "choose another directory"):
                    os.makedirs(directory, exist_ok=True)
            if os.path.isdir(directory):
                self._lock(directory, setting)

    def _lock(self, directory: AnyPath, setting: str) -> None:
        status = os.stat(directory)
        place = (status.st_dev, status.st_ino)
        ways = ((directory, os.O_RDONLY), (directory / LOCK, os.O_RDWR | os.O_CREAT))
        for path, how in ways if place not in self._descriptors else ():
            try:
                descriptor = os.open(path, how, 0o644)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptors[place] = descriptor
                return
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    raise ValueError(
                        f"{setting}={directory} is in use by another run; wait until it ends, or "
                        f"use another {setting}"
                    ) from None

    def release(self) -> None:
        """Releases all directories; a second call has no effect."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
