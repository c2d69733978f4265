"""One training at a time in a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets

from dlm_jax.storage import AnyPath, is_remote

FILE = ".lock"


class DirectoryLock:
    """Keeps directories for one process until it releases them, or ends in any way.

    A directory itself is locked. Where its file system locks files alone, as network file systems
    do, a file in it is. In a bucket, and where the file system knows no locks, that file holds a
    claim: who claims last has the directory, and `check` ends the one before, which may be dead.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._claims: dict[AnyPath, str] = {}

    def acquire(self, directory: AnyPath, setting: str) -> None:
        """Nothing, once no other process can; a directory that is held already stays held.

        Args:
          directory: that is there, or in a bucket.
          setting: the name of the setting that names it, for the message.

        Raises:
          ValueError: another process has it.
        """
        if is_remote(directory):
            self._claim(directory / FILE)
            return
        found = os.stat(directory)
        place = (found.st_dev, found.st_ino)
        if place in self._descriptors.values() or directory / FILE in self._claims:
            return
        for path, how in ((directory, os.O_RDONLY), (directory / FILE, os.O_RDWR | os.O_CREAT)):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, how, 0o644)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                    raise ValueError(
                        f"{setting}={directory} is in use by another training; wait for its end, "
                        f"or use another {setting}"
                    ) from None
                except OSError:
                    os.close(descriptor)
                    raise
                self._descriptors[descriptor] = place
                return
        self._claim(directory / FILE)

    def check(self) -> None:
        """Raises OSError if another process has claimed a directory since."""
        for path, claim in self._claims.items():
            if path.read_text() != claim:
                raise OSError(errno.EBUSY, "taken over by another training", str(path.parent))

    @property
    def is_held(self) -> bool:
        """Whether something is locked or claimed."""
        return bool(self._descriptors or self._claims)

    def release(self) -> None:
        """Lets others have them; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[0])
        while self._claims:
            path, claim = self._claims.popitem()
            with contextlib.suppress(OSError):
                if path.read_text() == claim:
                    path.unlink()

    def _claim(self, path: AnyPath) -> None:
        claim = secrets.token_hex(8)
        path.write_text(claim)
        self._claims[path] = claim
