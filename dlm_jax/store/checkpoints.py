"""Checkpoints that are either complete or absent, and never silently corrupt.

The `CheckpointManager` of Orbax writes them, asynchronously, to disks and buckets, and deletes the
old ones. A checkpoint is a directory with two items, which Orbax completes together::

    step_00000250/
      state/               the pytree of arrays (OCDBT)
      manifest/metadata    format, versions, identity of the run, checksums, and the caller's JSON

On a disk, Orbax completes a checkpoint by renaming it; in a bucket, with ``commit_success.txt``.
The manifest detects damage, because Orbax loads flipped bits; see `dlm_jax.store.manifest`. Only
this file uses Orbax.

`LocalCheckpoints` are on a disk of each host, for a restart without the shared directory or bucket.
The emergency manager of Orbax restores from another slice only, so a manager for each process
saves the shards of its devices there. If a host or the mesh has changed, so that a process lacks
shards, the checksums differ and no local checkpoint is used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.distributed.processes import gathered, on_first_process
from dlm_jax.store.files import AnyPath, Damaged, is_remote, located, remove_tree, said, sync
from dlm_jax.store.manifest import (
    Leaves,
    Place,
    check_not_quantised,
    check_same_leaves,
    checksums,
    describe,
    nested,
    new_manifest,
    read_manifest,
    without_custom_heads,
)
from dlm_jax.store.weights import SUFFIX, load_weights, path_of_model, read_meta

Report = Callable[[str], None]

_COMMITTED = "commit_success.txt"
_DELETED = ".deleted"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER_NAME = re.compile(rf"step_\d{{8,}}\.orbax-checkpoint-tmp.*|\{_DELETED}")
_PATIENCE_SECONDS = 1800


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
      check: called on process 0 before files in the directory are removed or a checkpoint is
        completed. `check` raises an error if another process has claimed the directory.

    ``when_closed`` is a stack of callbacks that run after `close`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int,
        check: Callable[[], None] = lambda: None,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep} leaves no checkpoint to resume from; use 1 or more")
        self.directory = _checked_root(directory)
        self._keep = keep
        self._check = check
        self._damaged: dict[int, str] = {}
        self._manager: ocp.CheckpointManager | None = None
        self._pending: int | None = None
        self.when_closed = contextlib.ExitStack()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        # After an exception, a process does not wait for the others, which may have ended.
        self.close(together=exc_type is None)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order, without a save in progress."""
        return complete_steps(self.directory)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Starts to save a checkpoint and returns True, or returns False if a complete checkpoint
        of ``step`` exists.

        The method waits for the previous save. The new save continues in the background, and the
        arrays can be donated after the method returns.

        Args:
          step: at least 0, and not before the newest checkpoint.
          state: any pytree of arrays, including typed keys; global arrays if there are several
            processes.
          meta: a JSON dict, identical on all processes, with the identity of the run as ``run``.

        Raises:
          OSError: this or the previous save failed, for example on a full disk.
        """
        _check_saveable(step, state, meta)
        self.wait()
        manifest = new_manifest(state, meta)
        if not self._on_writer(lambda: self._make_room(step)):
            return False
        with _failures_of_writing(step_path(self.directory, step)):
            if self._manager is None:
                self._manager = self._new_manager()
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
        if step is None or self._manager is None:
            return
        finish = self._manager.wait_until_finished

        def finish_and_clear() -> None:
            finish()
            if not is_remote(self.directory):
                sync(self.directory)
                remove_tree(self.directory / _DELETED)

        with _failures_of_writing(step_path(self.directory, step)):
            if jax.process_index() != 0:
                finish()
            self._on_writer(finish_and_clear)

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

    def read_meta(self, *, step: int | None = None, report: Report | None = None) -> dict[str, Any]:
        """The metadata that `restore` would return, with its errors. The arrays are not read."""
        return self.read(lambda path, manifest: None, step=step, report=report).meta

    def restore(
        self, abstract_state: Any, *, step: int | None = None, report: Report | None = None
    ) -> Restored:
        """Restores the newest usable checkpoint, or the one at ``step``, with the structure of
        ``abstract_state``.

        Unless ``step`` is given, a damaged checkpoint is reported and skipped, and the previous
        checkpoint is used.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` or arrays. Their shardings can differ
            from the saved shardings. A leaf without a sharding is restored on the first local
            device.
          step: step of the checkpoint to restore; None for the newest usable one.
          report: called on process 0 with one line for each damaged checkpoint that is skipped.
            Default: `warnings.warn`.
        """
        leaves = describe(abstract_state, "abstract_state")

        def read(path: Path, manifest: dict[str, Any]) -> Any:
            check_same_leaves(leaves, manifest["leaves"], path)
            return _read_arrays(path, abstract_state, manifest, self._handler())

        return self.read(read, step=step, report=report)

    def read(
        self,
        read: Callable[[Path, dict[str, Any]], Any],
        *,
        step: int | None = None,
        report: Report | None = None,
    ) -> Restored:
        """The result of `read` for the newest checkpoint for which it does not raise `Damaged`.

        `read` receives the path and the manifest of a checkpoint; for the rest see `restore`.
        """
        self.wait()
        candidates, skipped = self._candidates(step)
        for found, manifest in candidates:
            try:
                state = read(step_path(self.directory, found), manifest)
            except Damaged as error:
                self._damaged[found] = str(error)
                skipped.append(str(error))
                continue
            if jax.process_index() == 0:
                for reason in skipped:
                    line = f"damaged checkpoint: {reason}; using step {found} instead"
                    (report or warnings.warn)(line)
            return Restored(found, state, manifest["meta"])
        raise _none_usable(self.directory, skipped, step)

    def remove_from(self, step: int) -> None:
        """Deletes the complete checkpoints of `step` and later steps."""

        def remove() -> None:
            self._check()
            for later in self.steps():
                if later >= step:
                    _remove(step_path(self.directory, later))

        self.wait()
        self._on_writer(remove)

    def _candidates(self, step: int | None) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
        """The intact manifests, newest first, and lines about the others; see `_readable`."""
        return on_first_process(lambda: _readable(self.directory, step, self._damaged))

    def _on_writer(self, decide: Callable[[], Any]) -> Any:
        return on_first_process(decide)

    def _handler(self) -> Any:
        return ocp.PyTreeCheckpointHandler()

    def _new_manager(self) -> ocp.CheckpointManager:
        return _manager(
            self.directory,
            keep=self._keep,
            handler=self._handler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=_PATIENCE_SECONDS, post_finalization_callback=self._before_rename
            ),
        )

    def _before_rename(self) -> None:
        self._check()
        if not is_remote(self.directory):  # Orbax syncs the arrays only
            for path in self.directory.glob("step_*.orbax-checkpoint-tmp*/**/*"):
                sync(path)

    def _make_room(self, step: int) -> bool:
        """Removes leftovers and sets damaged checkpoints aside before the save of ``step``.

        Returns False if the checkpoint is already complete.
        """
        self._check()
        root, remote = self.directory, is_remote(self.directory)
        root.mkdir(parents=True, exist_ok=True)
        if not root.exists():  # Orbax lists the directory, and an empty one is none in a bucket
            (root / ".keep").touch()
        usable = [s for s in self.steps() if s not in self._damaged]
        if step in usable:
            return False
        if usable and step < usable[-1]:
            raise ValueError(
                f"step={step} is before step {usable[-1]} in {root}; resume from the newest "
                f"checkpoint or save to another directory"
            )
        for path in list(root.iterdir()):
            match = _STEP_NAME.fullmatch(path.name)
            is_unusable = match is not None and int(match[1]) not in usable
            if _LEFTOVER_NAME.fullmatch(path.name) or (is_unusable and remote):
                _remove(path)
            elif is_unusable:
                aside = path.with_name(f"{path.name}.damaged")
                remove_tree(aside)
                path.rename(aside)
        self._damaged.clear()
        return True


class LocalCheckpoints(Checkpoints):
    """The checkpoints of each process on a disk of its host.

    Args:
      directory: directory of the run on a disk of this host.
      report: called with one line if a save fails, which does not end the run, or if a checkpoint
        is not usable.

    ``directory`` is the parent of the ``step_*`` directories of this process. Hosts that are killed
    during a save have the checkpoint before it in common.
    """

    def __init__(self, directory: str | os.PathLike[str], report: Report):
        index, count = jax.process_index(), jax.process_count()
        super().__init__(Path(directory).absolute() / f"process_{index}_of_{count}", keep=2)
        self.report = report

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        try:
            return super().save(step, state, meta)
        except (OSError, ValueError) as error:
            self.report(f"warning: no local checkpoint ({error}); training continues")
            return False

    def wait(self) -> None:
        """Waits until the save in progress is complete, and reports its failure."""
        try:
            super().wait()
        except (OSError, ValueError) as error:
            self.report(f"warning: no local checkpoint ({error}); training continues")

    def newest(self, abstract_state: Any) -> int | None:
        """The newest step that every process can restore; None if there is none.

        All processes must call this method at the same point.
        """
        leaves = describe(abstract_state, "state")
        usable = set()
        for step in set(self.steps()) - set(self._damaged):
            path = step_path(self.directory, step)
            try:
                manifest = read_manifest(path)
                check_same_leaves(leaves, manifest["leaves"], path)
                usable.add((step, manifest["run"]))
            except ValueError as error:
                self.report(f"the local checkpoint of step {step} is not used: {error}")
        common = set.intersection(*gathered(usable))
        return max((step for step, _ in common), default=None)

    def _candidates(self, step: int | None) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
        return _readable(self.directory, step, self._damaged)

    def _on_writer(self, decide: Callable[[], Any]) -> Any:
        return decide()

    def _handler(self) -> Any:
        every_shard = ocp.type_handlers.ArrayHandler(
            primary_host=None, replica_id=None, use_replica_parallel=False
        )
        return ocp.PyTreeCheckpointHandler(
            multiprocessing_options=_alone(),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, every_shard)
            ),
        )

    def _new_manager(self) -> ocp.CheckpointManager:
        return _manager(
            self.directory,
            keep=self._keep,
            handler=self._handler(),
            multiprocessing_options=_alone(),
            enable_per_process_directory_creation=True,
        )


def _alone() -> Any:
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"local_{me}"
    )


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        # Orbax would tell JAX's preemption service an old step, from a thread; the run tells it.
        return False


def _manager(root: Path, *, keep: int, handler: Any, **options: Any) -> ocp.CheckpointManager:
    quiet_orbax()
    processes = options.setdefault("multiprocessing_options", ocp.options.MultiprocessingOptions())
    remote = is_remote(root)
    modes = ocp.options.AtomicityMode
    return _Manager(
        root,
        item_handlers={
            "state": handler,
            "manifest": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        },
        options=ocp.CheckpointManagerOptions(
            step_prefix="step",
            step_format_fixed_length=8,
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            atomicity_options=ocp.options.AtomicityOptions(
                mode=modes.COMMIT_FILE if remote else modes.ATOMIC_RENAME
            ),
            # A rename removes a checkpoint at once, and only a link if it is one.
            todelete_subdir=None if remote else _DELETED,
            **options,
        ),
    )


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints, in ascending order."""
    last = _COMMITTED if is_remote(root) else "manifest/metadata"
    return [
        step
        for step in _listed_steps(root)
        if any((step_path(root, step) / name).exists() for name in (last, "manifest.json"))
    ]


def _listed_steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    remote = is_remote(root)
    matches = (
        _STEP_NAME.fullmatch(path.name) for path in root.iterdir() if remote or path.is_dir()
    )
    return sorted(int(match[1]) for match in matches if match)


def _checked_root(directory: str | os.PathLike[str]) -> Path:
    """The absolute path or URL of a directory; raises `ValueError` for a file or dangling link."""
    path = located(directory)
    if is_remote(path):
        if str(path).startswith("s3://"):
            _let_orbax_reach_s3()
        return cast(Path, path)
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        raise ValueError(f"{path} is {what}, not a checkpoint directory; pass a directory")
    return path


def _remove(path: Path) -> None:
    """Deletes a checkpoint. In a bucket, its last object is deleted first."""
    if not is_remote(path):
        remove_tree(path)
        return
    (path / _COMMITTED).unlink(missing_ok=True)
    located(path).rmtree(missing_ok=True)


def _check_saveable(step: int, state: Any, meta: dict[str, Any]) -> None:
    describe(state, "state")
    check_not_quantised(state)
    if step < 0:
        raise ValueError(f"step={step} cannot be saved; steps start at 0")
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta is not JSON ({error}); use only dicts, lists, strings and numbers"
        ) from error
    if jax.process_count() > 1:
        for name, leaf in named_leaves(state):
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                raise ValueError(
                    f"state {name} is in one process only; create the state under "
                    "jit with shardings over the whole mesh"
                )


def _readable(
    root: Path, step: int | None, damaged: dict[int, str]
) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """The manifests of the checkpoints that may be usable, newest first, and the damage of others.

    Raises `ValueError` if there is none, or if the checkpoints belong to several runs.
    """
    # A checkpoint that is not complete is unfinished in a bucket, but damaged on a disk.
    listed = complete_steps(root) if is_remote(root) else _listed_steps(root)
    if not listed:
        raise ValueError(_why_empty(root))
    if step is not None and step not in listed:
        raise ValueError(f"no checkpoint of step={step} in {root}; existing steps are {listed}")
    found: list[tuple[int, dict[str, Any]]] = []
    skipped: list[str] = []
    runs: dict[str, list[int]] = {}
    for candidate in reversed(listed) if step is None else [step]:
        if candidate in damaged:
            continue
        try:
            manifest = read_manifest(step_path(root, candidate))
        except Damaged as error:
            damaged[candidate] = str(error)
            skipped.append(str(error))
            continue
        found.append((candidate, manifest))
        runs.setdefault(manifest["run"], []).insert(0, candidate)
    if len(runs) > 1:
        several = ", ".join(
            f"{of} of run {run or 'unnamed'}"
            for run, of in sorted(runs.items(), key=lambda item: item[1])
        )
        raise ValueError(
            f"{root} contains checkpoints of several runs (steps {several}); move the checkpoints "
            f"of all but one run elsewhere"
        )
    if not found:
        raise _none_usable(root, skipped, step)
    # Damage older than the newest usable checkpoint does no harm.
    newest = found[0][0]
    return found, [damaged[s] for s in reversed(listed) if s > newest and damaged.get(s) in skipped]


def _none_usable(root: Path, reasons: list[str], step: int | None) -> Damaged:
    why = reasons[0] if reasons else "all are damaged"
    remedy = "restart in another directory" if step is None else "try another step"
    return Damaged(f"no usable checkpoint in {root}: {why}; {remedy}")


def _why_empty(root: Path) -> str:
    if not root.exists():
        return f"checkpoint directory {root} does not exist; check the path"
    if _STEP_NAME.fullmatch(root.name):
        return f"{root} is a single checkpoint; pass its parent directory, {root.parent}"
    names = [path.name for path in root.iterdir()]
    if any(_LEFTOVER_NAME.fullmatch(name) for name in names):
        return f"{root} has only an unfinished checkpoint; train until a checkpoint is complete"
    if not names:
        return f"checkpoint directory {root} is empty; train until a checkpoint is written"
    return f"{root} is not a checkpoint directory (no step_* in it); check the path"


def _read_arrays(path: Path, abstract: Any, manifest: dict[str, Any], handler: Any = None) -> Any:
    """The arrays of `abstract` from a checkpoint, which may have more.

    Raises `Damaged` on every process if any process cannot read its shards or if the checksum of
    an array differs.
    """
    quiet_orbax()

    def sharding_of(leaf: Any) -> jax.sharding.Sharding:
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return getattr(leaf, "sharding", None) or first_device

    def restore_arg(leaf: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(
            sharding=sharding_of(leaf), global_shape=leaf.shape, dtype=leaf.dtype
        )

    args = ocp.args.PyTreeRestore(
        abstract, restore_args=jax.tree.map(restore_arg, abstract), partial_restore=True
    )
    damage, arrays, is_alone = "", None, jax.process_count() == 1
    # A bucket can fail once. Several processes must read equally often.
    for is_last in (False, True) if is_alone and is_remote(path) else (True,):
        try:
            reader = handler or ocp.PyTreeCheckpointHandler()
            arrays = reader.restore(located(path / "state"), args=args)
            # Typed keys are restored with an equivalent sharding, but only an equal sharding avoids
            # a recompilation.
            arrays = jax.device_put(arrays, jax.tree.map(sharding_of, abstract))
            break
        except Exception as error:  # Orbax raises errors of many kinds for damaged files
            cause: Any = error.__cause__ or error
            if is_alone and isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):
                raise cause from None
            damage = f"{path / 'state'} cannot be read ({said(cause)})" if is_last else ""
    damage = next((line for line in gathered(damage) if line), "")
    if not damage:
        wrong = [n for n, value in checksums(arrays).items() if value != manifest["sums"][n]]
        damage = f"{path / 'state'} has a wrong checksum of {wrong[0]}" if wrong else ""
        # A process can have its own copy of the file, or of a replicated array.
        damage = next((line for line in gathered(damage) if line), "")
    if damage:
        raise Damaged(damage)
    return arrays


def load_params(
    directory: str | os.PathLike[str],
    abstract_params: Callable[[dict[str, Any]], Any] | None = None,
    *,
    step: int | None = None,
    place: Place | None = None,
    report: Report | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The parameters and metadata of the newest usable checkpoint, or of the one at ``step``.

    Only the parameters are read (or their moving average, if there is one), not the optimiser
    state. The mesh and the number of processes can differ from those of the run that saved the
    checkpoint.

    Args:
      directory: the directory passed to `Checkpoints`, or its parent.
      abstract_params: maps the metadata to the expected shapes, dtypes and shardings. If None, the
        saved nested dict is returned, on the first local device.
      step: step of the checkpoint to load, without a fallback; None for the newest usable one.
      place: sharding and dtype of each parameter. Each device reads only its own shards.
      report: called with one line for each damaged checkpoint that is skipped. Default:
        `warnings.warn`.
    """

    def read(path: Path, manifest: dict[str, Any]) -> Any:
        return _read_params(path, manifest, abstract_params, place)

    _, params, meta = Checkpoints(_root_of(directory), keep=1).read(read, step=step, report=report)
    return params, meta


def _read_params(
    path: Path,
    manifest: dict[str, Any],
    abstract_params: Callable[[dict[str, Any]], Any] | None,
    place: Place | None,
) -> Any:
    leaves: Leaves = manifest["leaves"]
    entry = "ema" if any(name.startswith("ema/") for name in leaves) else "params"
    saved = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{entry}/")}
    if not saved:
        raise ValueError(f"checkpoint {path} has no params; pass one written by train.py")

    def stored(name: str, sharding: Any = None) -> jax.ShapeDtypeStruct:
        dtype, shape = saved[name]
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)

    if abstract_params is None:
        wanted = nested({name: stored(name) for name in saved})
    else:
        wanted = {entry: abstract_params(manifest["meta"])}
        expected = describe(wanted, "abstract_params")
        check_same_leaves(expected, without_custom_heads(saved, expected, manifest["meta"]), path)
    if place is not None:
        wanted = {entry: map_named(place, wanted[entry])}
    if all(leaf.dtype == stored(name).dtype for name, leaf in named_leaves(wanted)):
        return _read_arrays(path, wanted, manifest)[entry]

    def cast_from(name: str, leaf: Any) -> jax.Array:
        # One array at a time, because the checksum is that of the stored dtype.
        one = nested({name: stored(name, leaf.sharding)})
        ((_, array),) = named_leaves(_read_arrays(path, one, manifest))
        return array.astype(leaf.dtype)

    return map_named(cast_from, wanted)[entry]


def _root_of(directory: str | os.PathLike[str]) -> Path:
    """The subdirectory ``checkpoints`` if it exists, or else the given directory."""
    root = _checked_root(directory)
    return root / "checkpoints" if (root / "checkpoints").is_dir() else root


def load_any(
    path: str | os.PathLike[str] | None,
    make_abstract: Callable[[dict[str, Any]], Any] | None = None,
    *,
    place: Place | None = None,
    report: Report | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns (parameters, metadata) of a run, a weights file, or a shipped model.

    Args:
      path: ``train.out_dir`` of a run, or the directory of its checkpoints; a file from ``python -m
        dlm_jax.export``; or the name of a shipped model (see `dlm_jax.store.weights`).
      make_abstract: maps the metadata to the expected shapes, as in `load_params`.
      place: sharding and dtype of each parameter. By default, parameters are loaded to the first
        local device in the stored dtype, or in float32 from a file.
      report: called with one line for each damaged checkpoint that is skipped.
    """
    found = path_of_model(path)

    def abstract(meta: dict[str, Any]) -> Any:
        assert make_abstract is not None
        return make_abstract(_checked(meta, found))

    wanted = None if make_abstract is None else abstract
    if Path(found).suffix == SUFFIX:
        params, meta = load_weights(found, wanted, place=place)
    else:
        params, meta = load_params(found, wanted, place=place, report=report)
    return params, _checked(meta, found)


def load_meta(path: str | os.PathLike[str], *, report: Report | None = None) -> dict[str, Any]:
    """The metadata that `load_any` would return for a path, with the same errors. The arrays are
    not read.
    """
    if Path(path).suffix == SUFFIX:
        return _checked(read_meta(path), path)
    return _checked(Checkpoints(_root_of(path), keep=1).read_meta(report=report), path)


def _checked(meta: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    for name in ("config", "tokenizer"):
        if not isinstance(meta.get(name), dict):
            raise ValueError(f"{path} does not describe its {name}; load a model from train.py")
    if not isinstance(meta["config"].get("model"), dict):
        raise ValueError(f"{path} has a config without [model]; load a model from train.py")
    return meta


@contextlib.contextmanager
def _failures_of_writing(path: AnyPath) -> Iterator[None]:
    """Converts the `ValueError` that tensorstore raises for a failed write to an `OSError`.

    The errno is read from the message, or `errno.EIO` if the message has none. The file name is
    `path`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except ValueError as error:
        match = re.search(r"os_error_code='(\d+)'", str(error))
        if match is not None:
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise OSError(errno.EIO, f"cannot be written ({said(error)})", str(path)) from error


@functools.cache
def _let_orbax_reach_s3() -> None:
    """Adds ``s3://`` to the schemes for which Orbax makes specs of tensorstore.

    Orbax 0.12.8 has ``gs://`` only and would write arrays to the directory ``s3:`` on a disk.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils as specs

        normal, is_gcs = specs._normalize_path, specs._use_gcs_driver
        spec_of = gcs_utils.get_kvstore_for_gcs
        specs._normalize_path = lambda path: normal(path).replace("s3:/", "s3://")
        specs._use_gcs_driver = lambda path: path.startswith("s3://") or is_gcs(path)
        gcs_utils.get_kvstore_for_gcs = lambda path: (
            _s3_spec(path) if path.startswith("s3://") else spec_of(path)
        )
        is_s3 = specs.build_kvstore_tspec("s3://bucket/path")["base"]["driver"] == "s3"
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        is_s3 = False
    if not is_s3:
        raise ValueError(
            f"s3:// does not work with orbax-checkpoint {ocp.__version__}; use version 0.12.8, or "
            "mount the bucket"
        )


def _s3_spec(url: str) -> dict[str, Any]:
    """The tensorstore spec of a path in S3.

    Endpoint and credentials are passed explicitly, because tensorstore ignores the endpoint in the
    environment and logs its search for credentials.
    """
    bucket, _, path = url.removeprefix("s3://").partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def quiet_orbax() -> None:
    """Limits the logs of Orbax to warnings."""
    # Orbax logs every save at INFO through absl. Orbax also logs errors in its threads and of
    # parallel reads and writes, although its calls raise the first of the same errors.
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_not_raised_too not in logger.filters:
            logger.addFilter(_is_not_raised_too)
    _ignore_late_reads()


@functools.cache
def _ignore_late_reads() -> None:
    """Hides the errors of reads that end after Orbax has raised the error of another one."""
    print_error = sys.unraisablehook

    def hook(late: Any) -> None:
        text = str(late.exc_value)
        if text != "Event loop is closed" and "TensorStore" not in text:
            print_error(late)

    sys.unraisablehook = hook


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        ours = "orbax|TensorStore|Error (opening|reading|writing)"
        return re.search(ours, record.getMessage()) is None
    if record.getMessage().startswith(("Waiting for previous save", "Global object size")):
        return False
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
