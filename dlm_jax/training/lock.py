"""One training at a time in a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

FILE = ".lock"


class DirectoryLock:
    """Keeps a directory for one process until it is released, or the process ends in any way.

    The directory itself is locked. Where its file system locks files alone, as network file systems
    do, a file in it is; where it knows no locks at all, nothing is.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def acquire(self, directory: Path) -> None:
        """Nothing, once no other process can.

        Raises:
          ValueError: another process has it.
        """
        for path, how in ((directory, os.O_RDONLY), (directory / FILE, os.O_RDWR | os.O_CREAT)):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, how, 0o644)
                self._descriptors.append(descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.release()
                    raise ValueError(
                        f"train.out_dir={directory} is in use by another training; wait for its "
                        "end, or use another train.out_dir"
                    ) from None
                return

    @property
    def is_held(self) -> bool:
        """Whether something is locked."""
        return bool(self._descriptors)

    def release(self) -> None:
        """Lets others have it; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())
