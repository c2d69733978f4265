"""Checkpoints that are either complete or absent, and never silently corrupt.

The `CheckpointManager` of Orbax writes them, asynchronously, to disks and buckets, and deletes the
old ones. A checkpoint is a directory with two items, which Orbax completes together, on a disk by
renaming it and in a bucket with ``commit_success.txt``::

    step_00000250/
      state/               the pytree of arrays (OCDBT)
      manifest/metadata    format, versions, identity of the run, checksums, and the caller's JSON
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from dlm_jax.distributed.processes import gathered, on_first_process
from dlm_jax.store.files import AnyPath, Damaged, is_remote, located, said, sync
from dlm_jax.store.weights import (
    SUFFIX,
    Place,
    check_leaves,
    checked_manifest,
    checksums,
    describe,
    new_manifest,
    open_weights,
    path_of_model,
    plan_reading,
    read_tensors,
)

Report = Callable[[str], None]

_COMMITTED = "commit_success.txt"
_NAME = re.compile(r"step_(\d{8,})(\.orbax-checkpoint-tmp.*)?")
_PATIENCE_SECONDS = 1800
_BUCKETS = ("gs://",)
"""The schemes that Orbax writes; other URLs would become directories on a disk."""


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`: step, arrays and metadata."""

    step: int
    state: Any
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training run, newest last. Use this class as a context manager.

    If the program ends without `close` or `wait`, an unfinished save is lost, but never partially
    written. Every process of a multi-process run creates an instance for the same shared directory
    and calls the same methods in the same order.

    Args:
      directory: parent of the ``step_*`` directories; created by the first save.
      keep: number of newest complete checkpoints to keep, at least 1. An older checkpoint is
        deleted once a newer one is complete on disk.

    ``when_closed`` is a stack of callbacks that run after `close`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int):
        self.directory = _checked_root(directory)
        self._keep = keep
        self._damaged: dict[int, str] = {}
        self._manager: ocp.CheckpointManager | None = None
        self._pending: int | None = None
        self.when_closed = contextlib.ExitStack()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        # After an exception, a process does not wait for the others, which may have ended.
        self.close(together=exc_type is None)

    def steps(self, *, complete: bool = True) -> list[int]:
        """Steps of the complete checkpoints, in ascending order, without a save in progress.

        If `complete` is False, also of others on a disk, which are damaged. In a bucket, these are
        unfinished.
        """
        root, is_bucket = self.directory, is_remote(self.directory)
        last = _COMMITTED if is_bucket else "manifest/metadata"
        steps = []
        for path in root.iterdir() if root.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if not match or match[2] or not (is_bucket or path.is_dir()):
                continue
            if (path / last).exists() or not (complete or is_bucket):
                steps.append(int(match[1]))
        return sorted(steps)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Starts to save a checkpoint and returns True, or returns False if a complete checkpoint
        of ``step`` exists.

        The method waits for the previous save. The new save continues in the background, and the
        arrays can be donated after the method returns.

        Args:
          step: not before the newest checkpoint.
          state: any pytree of arrays, including typed keys; global arrays if there are several
            processes.
          meta: a JSON dict, identical on all processes, with the identity of the run as ``run``.

        Raises:
          OSError: this or the previous save failed, for example on a full disk.
          ValueError: a complete checkpoint of a later step exists. `remove_from` deletes it.
        """
        manifest = new_manifest(state, meta)
        self.wait()
        if not on_first_process(lambda: self._make_room(step)):
            return False
        with _failures_of_writing(step_path(self.directory, step)):
            self._manager = self._manager or _Manager(self.directory, self._keep)
            self._manager.reload()
            self._pending = step
            items = {"state": ocp.args.PyTreeSave(state), "manifest": ocp.args.JsonSave(manifest)}
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def wait(self) -> None:
        """Waits until the save in progress is complete and visible to every process.

        Raises:
          OSError: the save failed.
          ValueError: the save failed on process 0; raised on the other processes.
        """
        step, self._pending = self._pending, None
        if step is not None and (manager := self._manager):
            with _failures_of_writing(step_path(self.directory, step)):
                if jax.process_index() != 0:
                    manager.wait_until_finished()
                on_first_process(manager.wait_until_finished)

    def close(self, *, together: bool = True) -> None:
        """Ends all threads, and waits for a save in progress and other processes if `together`."""
        try:
            if together:
                self.wait()
        finally:
            # `wait` raises the first error of a save, and Orbax keeps those of its other items.
            for end in (m.wait_until_finished, m.close, m.close) if (m := self._manager) else ():
                with contextlib.suppress(Exception):
                    end()
            self.when_closed.close()

    def read_meta(self, *, report: Report | None = None) -> dict[str, Any]:
        """The metadata that `restore` would return, with its errors. The arrays are not read."""
        return self.read(lambda path, manifest: None, report=report).meta

    def restore(
        self,
        abstract_state: Any,
        *,
        check: Callable[[dict[str, Any]], None] = lambda meta: None,
        report: Report | None = None,
    ) -> Restored:
        """Restores the newest usable checkpoint with the structure of ``abstract_state``.

        A damaged checkpoint is reported and skipped, and deleted by the next save.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` or arrays. Their shardings can differ
            from the saved shardings. A leaf without a sharding is restored on the first local
            device.
          check: called with the metadata before the arrays are read; raises errors about them.
          report: called on process 0 with one line for each damaged checkpoint that is skipped.
            Default: `warnings.warn`.
        """
        leaves = describe(abstract_state)

        def read(path: Path, manifest: dict[str, Any]) -> Any:
            check(manifest["meta"])
            check_leaves(leaves, manifest["leaves"], f"checkpoint {path}")
            return _read_arrays(path, abstract_state, manifest)

        return self.read(read, report=report)

    def read(
        self, read: Callable[[Path, dict[str, Any]], Any], *, report: Report | None = None
    ) -> Restored:
        """The result of `read` for the newest checkpoint for which it does not raise `Damaged`.

        `read` receives the path and the manifest of a checkpoint; for the rest see `restore`.

        Raises:
          ValueError: there is no usable checkpoint, or the checkpoints are of several runs.
        """
        self.wait()
        known = set(self._damaged)
        for number, manifest in on_first_process(self._manifests):
            try:
                if isinstance(manifest, str):
                    raise Damaged(manifest)
                state = read(step_path(self.directory, number), manifest)
            except Damaged as error:
                self._damaged[number] = str(error)
                continue
            for at in self._damaged.keys() - known if jax.process_index() == 0 else ():
                line = f"damaged checkpoint: {self._damaged[at]}; using step {number} instead"
                (report or warnings.warn)(line)
            return Restored(number, state, manifest["meta"])
        raise Damaged(
            f"no usable checkpoint in {self.directory}: {self._damaged[max(self._damaged)]}; "
            "restart in another directory"
        )

    def remove_from(self, step: int) -> None:
        """Deletes the complete checkpoints of `step` and later steps."""

        def remove() -> None:
            for later in self.steps():
                if later >= step:
                    _remove(step_path(self.directory, later))

        self.wait()
        on_first_process(remove)

    def _manifests(self) -> list[tuple[int, dict[str, Any] | str]]:
        """The steps, newest first, with their manifests, or a line if a checkpoint is damaged."""
        root, runs, manifests = self.directory, {}, []
        for number in reversed(self.steps(complete=False)):
            manifest: Any = self._damaged.get(number)
            if manifest is None:
                try:
                    manifest = read_manifest(step_path(root, number))
                    runs.setdefault(manifest["run"], []).insert(0, number)
                except Damaged as error:
                    manifest = str(error)
            manifests.append((number, manifest))
        if not manifests:
            raise ValueError(
                f"checkpoint directory {root} "
                + ("has no complete checkpoint" if root.exists() else "does not exist")
                + "; pass the directory of a run, or train until a checkpoint is complete"
            )
        if len(runs) > 1:
            several = ", ".join(f"{runs[run]} of run {run or 'unnamed'}" for run in reversed(runs))
            raise ValueError(
                f"{root} contains checkpoints of several runs (steps {several}); move the "
                "checkpoints of all but one run elsewhere"
            )
        return manifests

    def _make_room(self, step: int) -> bool:
        """Removes unfinished and damaged checkpoints; False if that of ``step`` is complete."""
        root = self.directory
        root.mkdir(parents=True, exist_ok=True)
        if not root.exists():  # Orbax lists the directory, and an empty one is none in a bucket
            (root / ".keep").touch()
        usable = [number for number in self.steps() if number not in self._damaged]
        if step in usable:
            return False
        if usable and step < usable[-1]:
            raise ValueError(
                f"step={step} is before step {usable[-1]} in {root}; resume from the newest "
                "checkpoint, or save to another directory"
            )
        for path in list(root.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (match[2] or int(match[1]) not in usable):
                _remove(path)
        self._damaged.clear()
        return True


class _Manager(ocp.CheckpointManager):
    def __init__(self, root: Path, keep: int):
        quiet_orbax()
        remote, modes = is_remote(root), ocp.options.AtomicityMode

        def sync_files() -> None:
            if not remote:  # Orbax syncs the arrays only
                for path in root.glob("step_*.orbax-checkpoint-tmp*/**/*"):
                    sync(path)

        items = {
            "state": ocp.PyTreeCheckpointHandler(),
            "manifest": ocp.JsonCheckpointHandler(),
        }
        mode = modes.COMMIT_FILE if remote else modes.ATOMIC_RENAME
        options = ocp.CheckpointManagerOptions(
            step_prefix="step",
            step_format_fixed_length=8,
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
            async_options=ocp.AsyncOptions(
                timeout_secs=_PATIENCE_SECONDS, post_finalization_callback=sync_files
            ),
        )
        super().__init__(root, item_handlers=items, options=options)

    def reached_preemption(self, step: int) -> bool:
        # Orbax would tell JAX's preemption service an old step, from a thread; the run tells it.
        return False


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def _checked_root(directory: str | os.PathLike[str]) -> Path:
    """The absolute path or URL of a directory; raises `ValueError` for a file or dangling link."""
    path = cast(Path, located(directory))
    if is_remote(path) and not str(path).startswith(_BUCKETS):
        raise ValueError(f"Orbax writes no checkpoints to {path}; use gs://, or mount the bucket")
    if not is_remote(path) and os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is not a directory; pass a directory of checkpoints")
    return path if is_remote(path) else Path(path)


def _remove(path: Path) -> None:
    """Deletes a checkpoint. The file that completes it is deleted first."""
    if is_remote(path):
        (path / _COMMITTED).unlink(missing_ok=True)
        located(path).rmtree(missing_ok=True)
    elif path.is_dir() and not path.is_symlink():
        (path / "manifest" / "metadata").unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_arrays(path: Path, abstract: Any, manifest: dict[str, Any]) -> Any:
    """The arrays of `abstract` from a checkpoint, which may have more.

    Raises `Damaged` on every process if any process cannot read its shards or if the checksum of
    an array differs.
    """
    quiet_orbax()
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None) or first_device, abstract)
    restore_args = jax.tree.map(
        lambda leaf, sharding: ocp.ArrayRestoreArgs(
            sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        abstract,
        shardings,
    )
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    damage, arrays = "", None
    try:
        arrays = ocp.PyTreeCheckpointHandler().restore(located(path / "state"), args=args)
        # Typed keys are restored with an equivalent sharding, but only an equal sharding avoids a
        # recompilation.
        arrays = jax.device_put(arrays, shardings)
    except Exception as error:  # Orbax raises errors of many kinds for damaged files
        cause: Any = error.__cause__ or error
        is_alone = jax.process_count() == 1
        if is_alone and isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):
            raise cause from None
        damage = f"{path / 'state'} cannot be read ({said(cause)})"
    damage = next((line for line in gathered(damage) if line), "")
    if not damage:
        wrong = [n for n, value in checksums(arrays).items() if value != manifest["sums"][n]]
        damage = f"{path / 'state'} has a wrong checksum of {wrong[0]}" if wrong else ""
        if describe(arrays) != describe(abstract):
            damage = f"{path / 'state'} has lost the types of its arrays"
        # A process can have its own copy of the file, or of a replicated array.
        damage = next((line for line in gathered(damage) if line), "")
    if damage:
        raise Damaged(damage)
    return arrays


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises:
      Damaged: the manifest is missing or has changed.
      ValueError: another version wrote the checkpoint.
    """
    file = path / "manifest" / "metadata"
    try:
        return checked_manifest(file.read_bytes(), f"checkpoint {path}")
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror or error})") from error
    except Damaged as error:
        raise Damaged(f"{file}: {error}") from None


def load_params(
    path: str | os.PathLike[str] | None = None,
    make_abstract: Callable[[dict[str, Any]], Any] = lambda meta: None,
    *,
    place: Place | None = None,
    report: Report | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The parameters and metadata of a run, a weights file, or a shipped model.

    Of a run, the parameters of the newest usable checkpoint are read (or their moving average, if
    there is one), without the optimiser state. The mesh and the number of processes can differ from
    those of the run.

    Args:
      path: ``train.out_dir`` of a run, or the directory of its checkpoints; a file from ``python -m
        dlm_jax.export``; or the name of a shipped model (see `dlm_jax.store.weights`).
      make_abstract: maps the metadata to the expected shapes, dtypes and shardings. With None, the
        saved nested dict is returned, on the first local device.
      place: dtype and sharding of each parameter, of which each device reads its own part; by
        default, as stored.
      report: called with one line for each damaged checkpoint that is skipped. Default:
        `warnings.warn`.
    """
    path = path_of_model(path)

    def cast(array: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_on_host = isinstance(array, np.ndarray)
        array = array.astype(leaf.dtype)
        return jax.device_put(array, leaf.sharding) if is_on_host else array

    def read(where: Path, manifest: dict[str, Any]) -> Any:
        abstract = make_abstract(_checked(manifest["meta"], path))
        is_averaged = any(name.startswith("ema/") for name in manifest["leaves"])
        entry, what = "ema" if is_averaged else "params", f"checkpoint {where}"
        given, wanted = plan_reading(manifest, abstract, place, what, under=f"{entry}/")
        arrays = _read_arrays(where, {entry: given}, manifest)[entry]
        return jax.tree.map(cast, arrays, wanted)

    if Path(path).suffix != SUFFIX:
        _, params, meta = Checkpoints(_root_of(path), keep=1).read(read, report=report)
        return params, meta
    with open_weights(path) as (file, manifest):
        abstract = make_abstract(_checked(manifest["meta"], path))
        given, wanted = plan_reading(manifest, abstract, place, f"weights file {path}")
        tensors = read_tensors(file, manifest, given)
    return jax.tree.map(cast, tensors, wanted), manifest["meta"]


def load_meta(path: str | os.PathLike[str], *, report: Report | None = None) -> dict[str, Any]:
    """The metadata that `load_params` would return for a path, with its errors, without arrays."""
    if Path(path).suffix == SUFFIX:
        with open_weights(path) as (_, manifest):
            return _checked(manifest["meta"], path)
    return _checked(Checkpoints(_root_of(path), keep=1).read_meta(report=report), path)


def _root_of(directory: str | os.PathLike[str]) -> Path:
    """The subdirectory ``checkpoints`` if it exists, or else the given directory."""
    root = _checked_root(directory)
    return root / "checkpoints" if (root / "checkpoints").is_dir() else root


def _checked(meta: dict[str, Any], path: Any) -> dict[str, Any]:
    model = meta.get("config", {}).get("model")
    if not (isinstance(model, dict) and isinstance(meta.get("tokenizer"), dict)):
        raise ValueError(
            f"{path} does not describe its [model] and tokenizer; load a model from train.py"
        )
    return meta


@contextlib.contextmanager
def _failures_of_writing(path: AnyPath) -> Iterator[None]:
    """Converts the `ValueError` that tensorstore raises for a failed write to an `OSError`, with
    the errno in its message (default: `errno.EIO`) and `path` as the file name.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno is None):
            raise
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        why = os.strerror(number) if number else f"cannot be written ({said(error)})"
        raise OSError(number or errno.EIO, why, str(path)) from error


@functools.cache
def quiet_orbax() -> None:
    """Hides the logs of Orbax, and errors of reads that end late: its calls raise the first one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    print_error = sys.unraisablehook

    def hook(late: Any) -> None:
        if not re.search("Event loop is closed|TensorStore", str(late.exc_value)):
            print_error(late)

    sys.unraisablehook = hook
