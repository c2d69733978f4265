"""Paths on local disks and in buckets (``gs://``, ``s3://``), and refusals that name what is amiss.

A path is an `etils.epath.Path`: a `pathlib.Path` for a local one. What a bucket lacks is a rename:
whatever must appear at once there appears with the one object that is written last.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

_DRIVERS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_CHUNK = 1 << 20
_STALE_SECONDS = 3600.0


def is_remote(location: str | os.PathLike[str]) -> bool:
    """Whether a location is a URL."""
    return "://" in os.fspath(location)


AnyPath = Path | epath.Path
"""A path on a disk or in a bucket."""


def located(location: str | os.PathLike[str]) -> epath.Path:
    """The path of a location: absolute, or a URL of a bucket whose driver is installed.

    Raises:
      ValueError: a URL of another kind, or one whose driver is missing.
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
    # Others write into the same bucket: what a listing once said is not to be believed again.
    fsspec.config.conf.setdefault(extra, {})["use_listings_cache"] = False
    fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
    return epath.Path(text)


@contextlib.contextmanager
def reachable(what: str, location: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the errors of a bucket or disk raised inside into one `ValueError` that names it.

    Args:
      what: names the location in the message, such as ``train.out_dir``.
      location: a path or URL.
    """
    try:
        yield
    except PermissionError as error:
        raise ValueError(
            f"{what}={location} is not allowed ({_said(error)}); check who may read and write there"
        ) from None
    except FileNotFoundError as error:
        raise ValueError(
            f"{what}={location} is not there ({_said(error)}); check the bucket and the path"
        ) from None
    except ValueError:
        raise
    except Exception as error:
        if is_full(error) or not (is_remote(location) or isinstance(error, OSError)):
            raise
        raise ValueError(
            f"{what}={location} cannot be reached ({_said(error)}); check the network, the "
            "credentials and the endpoint"
        ) from None


def check_bucket(what: str, location: str | os.PathLike[str]) -> None:
    """Refuses a URL whose bucket is not there or may not be written; nothing for a local path.

    One empty object is written beside what will be there, and deleted.

    Raises:
      ValueError: the bucket is missing, closed or out of reach; the line names `what`.
    """
    if not is_remote(location):
        return
    path = located(location)
    probe = path / f".probe-{uuid.uuid4().hex}"
    with reachable(what, location):
        probe.write_bytes(b"")
        probe.unlink()


def files_under(directory: epath.Path) -> list[epath.Path]:
    """All files under a directory or a prefix, sorted."""
    found: list[epath.Path] = []
    for path in directory.iterdir():
        found += files_under(path) if path.is_dir() else [path]
    return sorted(found)


def size_and_crc(path: AnyPath) -> tuple[int, int]:
    """(bytes, CRC32) of a file, read in parts."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def copy_whole(source: epath.Path, target: epath.Path) -> None:
    """Copies a file so that a local `target` is either absent or whole."""
    with source.open("rb") as read, replacing(target) as written:
        shutil.copyfileobj(read, written, _CHUNK)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], temporary: Path | None = None) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path`, whole and on disk, when the block ends.

    After any error, kill or power cut a local `path` is as it was, or new. A link stays, and what
    it points to is replaced.

    Args:
      path: of the file, or a URL.
      temporary: where it is written, beside `path`: the caller's alone, who removes what a kill
        left there. By default a new name; leftovers of kills go when they are an hour old.

    Raises:
      OSError: it cannot be written; with the name of `path`.
    """
    if is_remote(path):
        with located(path).open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = temporary or target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
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
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(path: Path) -> None:
    """Removes what killed writers of `path` left; for one who knows that no other writes it."""
    for leftover in _leftovers(Path(os.path.realpath(path))):
        leftover.unlink(missing_ok=True)


def _leftovers(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.writing"))


def sync(path: str | os.PathLike[str]) -> None:
    """Nothing, once the file, or the directory's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Removes a local directory, file, or link (but not what it points to), if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room for what is written, or is broken: no other name would help."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full


@contextlib.contextmanager
def refused_unless_full(what: object, remedy: str) -> Iterator[None]:
    """Turns the `OSError` of what cannot be written into a `ValueError` with the remedy.

    One of a full disk (`is_full`) stays: it says nothing against the name.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise OSError(error.errno, f"{error.strerror}; {remedy}", str(what)) from error
        raise ValueError(f"{what} cannot be written: {error.strerror}; {remedy}") from error


def _said(error: Any) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
