"""The checkpoints of a run: where they are, how a run continues, and its best model."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.config import Config
from dlm_jax.data import from_json
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.hf import KEPT
from dlm_jax.store import Checkpoints, load_meta
from dlm_jax.store.checkpoints import LocalCheckpoints, complete_steps
from dlm_jax.store.files import Damaged, DirectoryLock, is_remote, located
from dlm_jax.training.checks import CONFIG, check_same_run, growth, make_directory
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import TrainState
from dlm_jax.types import Params


def checkpoints_of(config: Config) -> str:
    """The location of the checkpoints of a run: a directory, or a URL."""
    return config.train.checkpoint_dir or str(Path(config.train.out_dir) / "checkpoints")


def _checkpoints_beside(out_dir: Path) -> str:
    """The ``train.checkpoint_dir`` of the run in `out_dir`; empty if unset or unknown."""
    try:
        return configs.load(str(out_dir / CONFIG)).train.checkpoint_dir
    except ValueError:
        return ""


def config_of_run(out_dir: Path) -> Config:
    """The config of the run in `out_dir` at its last save, for resuming the run.

    The checkpoints are in `out_dir` or in ``train.checkpoint_dir`` of its ``config.toml``.

    Raises:
      ValueError: no usable checkpoint exists.
    """
    try:
        meta = load_meta(_checkpoints_beside(out_dir) or out_dir, report=lambda line: None)
    except ValueError as error:
        started = out_dir / CONFIG
        advice = f"; restart it with --config {started}" if started.is_file() else ""
        raise ValueError(f"--resume {out_dir}: {error}{advice}") from None
    config = configs.from_saved(meta, where=f"--resume {out_dir}")
    train = dataclasses.replace(config.train, out_dir=str(out_dir))
    # Values determined by the text are not part of the config.
    tokenizer, model = from_json(meta["tokenizer"]), config.model
    if model.vocab_size == tokenizer.vocab_size:
        model = dataclasses.replace(model, vocab_size=0)
    if model.start_id == tokenizer.mask_id:
        model = dataclasses.replace(model, start_id=-1)
    return dataclasses.replace(config, train=train, model=model)


FOLDER = "best"
"""Name of the checkpoint directory of the best model, in ``train.checkpoint_dir`` if set and
otherwise in ``train.out_dir``. The directory contains one checkpoint."""


class Best:
    """Saves the parameters with the best evaluation to ``best`` in the directory of a run.

    A resumed run keeps its best model if the evaluations use the same windows. If the run resumes
    from a step before the best evaluation, it repeats the same steps. A new run removes the best
    model of a run that has the same config and no checkpoints. Every process of a run creates one
    instance and calls the same methods in the same order.

    For `meta` see `Run`, and for `check` see `Checkpoints`. The arrays of the saved
    model are not read: damage in them is found when the model is loaded.

    Raises:
      ValueError: `FOLDER` is not a directory or contains the best model of another run.
    """

    def __init__(
        self,
        config: Config,
        meta: dict[str, Any],
        *,
        is_new: bool,
        check: Callable[[], None] = lambda: None,
    ):
        root = located(config.train.checkpoint_dir or config.train.out_dir) / FOLDER
        self._checkpoints = Checkpoints(root, keep=1, check=check)
        self._measured_on = [config.train.eval_windows, config.train.batch_size]
        self._is_stale = False
        try:
            self.figure = self._read(meta, is_new)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Removes the best model of an earlier run that has the same config and no checkpoints."""
        if self._is_stale:
            self._checkpoints.remove_from(0)
            self._is_stale = False

    def offer(self, step: int, figure: float, params: Params, meta: dict[str, Any]) -> bool:
        """Starts a save of the evaluated parameters and `meta` if `figure` at this step is the
        lowest so far, and returns whether it is the lowest. Non-finite values are never the best.
        """
        if not math.isfinite(figure) or (self.figure is not None and figure >= self.figure):
            return False
        self._checkpoints.remove_from(step)
        best = {"best": {"figure": figure, "measured_on": self._measured_on}}
        self._checkpoints.save(step, {"params": params}, meta | best)
        self.figure = figure
        return True

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self) -> None:
        """Stops all threads. A save without a later `wait` can be lost."""
        self._checkpoints.close(together=False)

    def _read(self, meta: dict[str, Any], is_new: bool) -> float | None:
        """The value of the saved model; None if there is no saved model or if other windows were
        used.
        """
        if not on_first_process(self._checkpoints.steps):
            return None
        try:
            found = self._checkpoints.read_meta(report=lambda line: None)
        except ValueError as error:
            # The next evaluation replaces a damaged model, but not one of another version.
            is_damaged = isinstance(error, Damaged)
            if on_first_process(lambda: is_damaged):
                return None
            raise ValueError(f"{error}; or move {self._checkpoints.directory} elsewhere") from None
        if found.get("run", "") != meta["run"]:
            self._check_may_go(meta, found, is_new)
            self._is_stale = True
            return None
        best = found.get("best", {})
        return best.get("figure") if best.get("measured_on") == self._measured_on else None

    def _check_may_go(self, meta: dict[str, Any], found: dict[str, Any], is_new: bool) -> None:
        """Raises ValueError unless this run repeats the run that saved the model."""
        try:
            if not is_new:
                raise ValueError(
                    f"the model belongs to run {found.get('run')}, but this run is {meta['run']}"
                )
            check_same_run(meta, found)
        except ValueError as error:
            raise ValueError(
                f"{self._checkpoints.directory} has the best model of another run ({error}); "
                "move the directory elsewhere, or use another train.out_dir"
            ) from None


def local_checkpoints(
    config: Config, checkpoints: Checkpoints, report: Callable[[str], None]
) -> LocalCheckpoints | None:
    """The local checkpoints of a run, closed with its shared checkpoints; None if unset.

    Their directory is named after that of the shared checkpoints, so runs do not share it.
    """
    if not config.train.local_checkpoint_dir:
        return None
    name = hashlib.sha256(str(checkpoints.directory).encode()).hexdigest()[:16]
    index = jax.process_index()

    def report_own(line: str) -> None:
        # The lines of `report` appear on process 0 only.
        report(line) if index == 0 else print(f"process {index}: {line}", file=sys.stderr)

    local = LocalCheckpoints(Path(config.train.local_checkpoint_dir) / name, report_own)
    checkpoints.when_closed.callback(local.close)
    return local


def restore_run(
    task: Task,
    meta: dict[str, Any],
    checkpoints: Checkpoints | None,
    local: LocalCheckpoints | None,
    report: Callable[[str], None],
) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest usable state and metadata of the existing run, whose identity is copied to `meta`.

    A local checkpoint is used unless a shared one is newer. If the arrays of a checkpoint are
    damaged, the next older one is used, local or shared. The result is None if there is none.
    """
    abstract = task.abstract_state()
    while True:
        step = None if local is None else local.newest(abstract)
        shared: dict[str, Any] = {}
        if checkpoints is not None:
            try:
                shared = checkpoints.read_meta(report=report)
            except ValueError as error:
                # The next saves would delete checkpoints of another run or version.
                is_damaged = isinstance(error, Damaged)
                if step is None or not on_first_process(lambda is_=is_damaged: is_):
                    raise
                report(f"{error}; the local checkpoint of step {step} is used")
        if shared:
            check_same_run(meta, shared)
        if step is None and not shared:
            return None
        is_local = step is not None and step >= shared.get("step", 0)
        if local is not None and is_local:
            saved = local.read_meta(step=step)
            try:
                check_same_run(meta, saved)
            except ValueError as error:
                raise ValueError(f"{local.directory}: {error}; or remove the directory") from None
            if shared.get("run", saved["run"]) != saved["run"]:
                raise ValueError(
                    f"{local.directory} has checkpoints of run {saved['run']}, but the checkpoints "
                    f"belong to run {shared['run']}; remove the directory"
                )
        source: Any = local if is_local else checkpoints
        tell = source.report if is_local else report
        chosen = step if is_local else shared["step"]
        try:
            # Without local checkpoints, `restore` itself falls back to older steps.
            wanted = None if local is None else chosen
            step, state, saved = source.restore(abstract, step=wanted, report=tell)
            break
        except Damaged as error:
            if local is None:
                raise
            tell(f"the damaged checkpoint of step {chosen} is not used: {error}")
    check_same_run(meta, saved)
    if is_local:
        report(f"step {step} is restored from train.local_checkpoint_dir")
    meta |= {name: saved[name] for name in ("run", *KEPT) if name in saved}
    if line := growth(task.setup.config, saved, step):
        report(line)
    return state, saved


def lock_existing(lock: DirectoryLock, places: dict[str, Path]) -> None:
    """Locks the existing local directories against changes by other runs."""
    for setting, path in places.items():
        if not is_remote(path) and path.is_dir():
            lock.lock(path, setting)


def acquire(lock: DirectoryLock, places: dict[str, Path], *, is_new: bool) -> None:
    """Creates and locks the directories. Directories that cannot be locked are claimed.

    Raises:
      ValueError: another run owns a directory or has saved a checkpoint since the last check.
    """
    checkpoints = places["train.checkpoint_dir"]

    def check_still_new() -> None:
        if is_new and complete_steps(checkpoints):
            raise ValueError(
                f"train.checkpoint_dir={checkpoints} contains checkpoints of a run that started at "
                "the same time; restart"
            )

    for setting, path in places.items():
        make_directory(setting, path)
    unlocked = [path for setting, path in places.items() if not lock.lock(path, setting)]
    # A claim ends the run that owns the directory, so a rejected run must not claim it.
    check_still_new()
    for path in unlocked:
        lock.claim(path)
    if unlocked:
        check_still_new()
