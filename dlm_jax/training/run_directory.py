"""One training at a time in a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import secrets
from pathlib import Path

import dlm_jax.config as configs
from dlm_jax.config import Config
from dlm_jax.data import from_json
from dlm_jax.store import load_meta
from dlm_jax.store.files import AnyPath, is_remote
from dlm_jax.training.metrics import replace_text

FILE = ".lock"


class DirectoryLock:
    """Reserves directories for one process until it releases them or ends.

    `lock` locks the directory itself, or the file ``.lock`` in it where the file system locks files
    only, as network file systems do. A bucket, and a file system without locks, has neither:
    there the process writes a claim to that file. The process that claims last has the directory,
    and `check` raises in the process that claimed before, if that still runs.
    """

    def __init__(self) -> None:
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._claims: dict[AnyPath, str] = {}

    def lock(self, directory: AnyPath, setting: str) -> bool:
        """Locks a directory, and changes nothing else there; a locked directory stays locked.

        Args:
          directory: an existing directory, or a path in a bucket.
          setting: name of the setting that gives it, for the message.

        Returns:
          False where nothing can be locked.

        Raises:
          ValueError: another process has locked it.
        """
        if is_remote(directory):
            return False
        found = os.stat(directory)
        place = (found.st_dev, found.st_ino)
        if place in self._descriptors.values():
            return True
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
                return True
        return False

    def claim(self, directory: AnyPath) -> None:
        """Claims an existing directory, or a path in a bucket, where nothing can be locked."""
        if not is_remote(directory):
            directory = Path(os.path.realpath(directory))
        path = directory / FILE
        if path not in self._claims:
            claim = secrets.token_hex(8)
            path.write_text(claim)
            self._claims[path] = claim

    def check(self) -> None:
        """Raises OSError if another process has claimed a directory since."""
        for path, claim in self._claims.items():
            if _read(path) != claim:
                raise OSError(errno.EBUSY, "taken over by another training", str(path.parent))

    def release(self) -> None:
        """Releases all directories; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[0])
        while self._claims:
            path, claim = self._claims.popitem()
            with contextlib.suppress(OSError):
                if _read(path) == claim:
                    path.unlink()


def _read(path: AnyPath) -> str:
    """The claim in a file; empty if a process that claimed later has released it."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


NAME = "config.toml"


def checkpoints_of(config: Config) -> str:
    """Where the checkpoints of a run lie: a directory, or a URL."""
    return config.train.checkpoint_dir or str(Path(config.train.out_dir) / "checkpoints")


def write_config(config: Config, out_dir: Path) -> None:
    """Writes ``config.toml``, which people and ``--config`` read; one that is the same stays.

    To go on, a run reads its checkpoints, whose checksums tell damage.
    """
    header = (
        "What this run was asked for.\n"
        "To go on: python train.py --resume DIRECTORY\n"
        "To train the same anew: python train.py --config THIS_FILE --train.out_dir ELSEWHERE"
    )
    text, path = configs.to_toml(config, header=header), out_dir / NAME
    try:
        is_there = path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        replace_text(path, text)


def _checkpoints_beside(out_dir: Path) -> str:
    """The ``train.checkpoint_dir`` of the run in `out_dir`; empty if it is not set or not known."""
    try:
        return configs.load(str(out_dir / NAME)).train.checkpoint_dir
    except ValueError:
        return ""


def config_of_run(out_dir: Path) -> Config:
    """What the run in `out_dir` was asked for when it saved last, to be continued there.

    Its checkpoints lie there, or where its ``config.toml`` says (``train.checkpoint_dir``).

    Raises:
      ValueError: nothing usable is there.
    """
    try:
        meta = load_meta(_checkpoints_beside(out_dir) or out_dir, report=lambda line: None)
    except ValueError as error:
        started = out_dir / NAME
        advice = f"; start it again with --config {started}" if started.is_file() else ""
        raise ValueError(f"--resume {out_dir}: {error}{advice}") from None
    config = configs.from_dict(meta["config"], where=f"--resume {out_dir}")
    train = dataclasses.replace(config.train, out_dir=str(out_dir))
    # What follows from the text is not asked for.
    tokenizer, model = from_json(meta["tokenizer"]), config.model
    if model.vocab_size == tokenizer.vocab_size:
        model = dataclasses.replace(model, vocab_size=0)
    if model.start_id == tokenizer.mask_id:
        model = dataclasses.replace(model, start_id=-1)
    return dataclasses.replace(config, train=train, model=model)
