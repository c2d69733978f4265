"""Checkpoints that are either complete or absent, and never silently corrupt.

The `CheckpointManager` of Orbax writes them, asynchronously, to disks and buckets, and deletes the
old ones. A checkpoint is a directory with two items, which Orbax completes together, on a disk by
renaming it and in a bucket with ``commit_success.txt``::

    step_00000250/
      state/               the pytree of arrays (OCDBT)
      manifest/metadata    format, versions, identity of the run, checksums, and the caller's JSON

Orbax loads most files with flipped bits without an error. The manifest therefore has a checksum of
the numbers of every array, which is compared when the arrays are on their devices: every byte is
read once, for any mesh and any number of processes. The manifest itself ends with its CRC32.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dlm_jax.distributed.partitions import map_named
from dlm_jax.distributed.processes import gathered, on_first_process
from dlm_jax.store.files import AnyPath, Damaged, is_remote, located, said, sync
from dlm_jax.store.weights import (
    SUFFIX,
    Leaves,
    Place,
    check_leaves,
    checksums,
    describe,
    load_weights,
    nested,
    path_of_model,
    read_meta,
    without_heads,
)

Report = Callable[[str], None]

FORMAT = 2
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

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order, without a save in progress."""
        return complete_steps(self.directory)

    def listed(self) -> list[int]:
        """As `steps`, with checkpoints on a disk that are not complete: these are damaged, but in a
        bucket unfinished.
        """
        return self.steps() if is_remote(self.directory) else _listed_steps(self.directory)

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
        """
        manifest = _new_manifest(state, meta)
        self.wait()
        if not on_first_process(lambda: self._make_room(step)):
            return False
        with _failures_of_writing(step_path(self.directory, step)):
            if self._manager is None:
                self._manager = _new_manager(self.directory, self._keep)
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
        with _failures_of_writing(step_path(self.directory, step)):
            if jax.process_index() != 0:
                finish()
            on_first_process(finish)

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

    def restore(self, abstract_state: Any, *, report: Report | None = None) -> Restored:
        """Restores the newest usable checkpoint with the structure of ``abstract_state``.

        A damaged checkpoint is reported and skipped, and deleted by the next save.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` or arrays. Their shardings can differ
            from the saved shardings. A leaf without a sharding is restored on the first local
            device.
          report: called on process 0 with one line for each damaged checkpoint that is skipped.
            Default: `warnings.warn`.
        """
        leaves = describe(abstract_state)

        def read(path: Path, manifest: dict[str, Any]) -> Any:
            check_leaves(leaves, manifest["leaves"], f"checkpoint {path}")
            return _read_arrays(path, abstract_state, manifest)

        return self.read(read, report=report)

    def read(
        self, read: Callable[[Path, dict[str, Any]], Any], *, report: Report | None = None
    ) -> Restored:
        """The result of `read` for the newest checkpoint for which it does not raise `Damaged`.

        `read` receives the path and the manifest of a checkpoint; for the rest see `restore`.
        """
        self.wait()
        known = set(self._damaged)
        for number, manifest in on_first_process(lambda: self._manifests()):
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
        """The steps, newest first, with their manifests, or a line if a checkpoint is damaged.

        Raises `ValueError` if there is no checkpoint, or if the checkpoints are of several runs.
        """
        root, runs, manifests = self.directory, {}, []
        for number in reversed(self.listed()):
            manifest: Any = self._damaged.get(number)
            try:
                manifest = manifest or read_manifest(step_path(root, number))
            except Damaged as error:
                manifest = str(error)
            if not isinstance(manifest, str):
                runs.setdefault(manifest["run"], []).insert(0, number)
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
                f"checkpoint or save to another directory"
            )
        for path in list(root.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (match[2] or int(match[1]) not in usable):
                _remove(path)
        self._damaged.clear()
        return True


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        # Orbax would tell JAX's preemption service an old step, from a thread; the run tells it.
        return False


def _new_manager(root: Path, keep: int) -> ocp.CheckpointManager:
    quiet_orbax()
    remote, modes = is_remote(root), ocp.options.AtomicityMode

    def sync_files() -> None:
        if not remote:  # Orbax syncs the arrays only
            for path in root.glob("step_*.orbax-checkpoint-tmp*/**/*"):
                sync(path)

    return _Manager(
        root,
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(),
            "manifest": ocp.JsonCheckpointHandler(),
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
            async_options=ocp.AsyncOptions(
                timeout_secs=_PATIENCE_SECONDS, post_finalization_callback=sync_files
            ),
        ),
    )


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints, in ascending order."""
    last = _COMMITTED if is_remote(root) else "manifest/metadata"
    return [step for step in _listed_steps(root) if (step_path(root, step) / last).exists()]


def _listed_steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir() if is_remote(root) or path.is_dir()]
    matches = map(_NAME.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match and not match[2])


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


def _new_manifest(state: Any, meta: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint of `state`. Every process must call this function.

    The identity of the run is ``run`` in the metadata, or empty if the metadata has no ``run``.
    """
    writers = ("jax", "orbax-checkpoint", "numpy")
    facts = {
        "format": FORMAT,
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in writers),
        "run": meta.get("run", ""),
        "leaves": describe(state),
        "sums": checksums(state),
        "meta": json.loads(json.dumps(meta)),
    }
    return facts | {"crc": _crc_of(facts)}


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises:
      Damaged: the manifest is missing or has changed.
      ValueError: another version wrote the checkpoint.
    """
    file = path / "manifest" / "metadata"
    try:
        facts = json.loads(file.read_bytes())
        is_intact = facts.pop("crc") == _crc_of(facts)
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise Damaged(f"{file} has a wrong checksum")
    if facts["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {facts['format']}, but this program reads {FORMAT}; "
            f"use the program that wrote it (with {facts['versions']})"
        )
    return facts


def _crc_of(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def load_params(
    directory: str | os.PathLike[str],
    abstract_params: Callable[[dict[str, Any]], Any] | None = None,
    *,
    place: Place | None = None,
    report: Report | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The parameters and metadata of the newest usable checkpoint.

    Only the parameters are read (or their moving average, if there is one), not the optimiser
    state. The mesh and the number of processes can differ from those of the run that saved the
    checkpoint.

    Args:
      directory: the directory passed to `Checkpoints`, or its parent.
      abstract_params: maps the metadata to the expected shapes, dtypes and shardings. If it or its
        result is None, the saved nested dict is returned, on the first local device.
      place: sharding and dtype of each parameter. Each device reads only its own shards.
      report: called with one line for each damaged checkpoint that is skipped. Default:
        `warnings.warn`.
    """

    def read(path: Path, manifest: dict[str, Any]) -> Any:
        leaves: Leaves = manifest["leaves"]
        entry = "ema" if any(name.startswith("ema/") for name in leaves) else "params"
        saved = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{entry}/")}
        if not saved:
            raise ValueError(f"checkpoint {path} has no params; pass one written by train.py")

        def stored(name: str, sharding: Any = None) -> jax.ShapeDtypeStruct:
            dtype, shape = saved[name]
            return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)

        abstract = None if abstract_params is None else abstract_params(manifest["meta"])
        wanted = nested({name: stored(name) for name in saved})
        if abstract is not None:
            wanted = {entry: abstract}
            saved = without_heads(saved, wanted)
            check_leaves(describe(wanted), saved, f"checkpoint {path}")
        if place is not None:
            wanted = {entry: map_named(place, wanted[entry])}
        # The checksums are those of the stored dtypes.
        given = map_named(lambda name, leaf: stored(name, leaf.sharding), wanted)
        arrays = _read_arrays(path, given, manifest)
        return jax.tree.map(lambda array, leaf: array.astype(leaf.dtype), arrays, wanted)[entry]

    checkpoints = Checkpoints(_root_of(directory), keep=1)
    _, params, meta = checkpoints.read(read, report=report)
    return params, meta


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
    path = path_of_model(path)

    def abstract(meta: dict[str, Any]) -> Any:
        checked = _checked(meta, path)
        return None if make_abstract is None else make_abstract(checked)

    if Path(path).suffix == SUFFIX:
        return load_weights(path, abstract, place=place)
    return load_params(path, abstract, place=place, report=report)


def load_meta(path: str | os.PathLike[str], *, report: Report | None = None) -> dict[str, Any]:
    """The metadata that `load_any` would return for a path, with the same errors. The arrays are
    not read.
    """
    if Path(path).suffix == SUFFIX:
        return _checked(read_meta(path), path)
    return _checked(Checkpoints(_root_of(path), keep=1).read_meta(report=report), path)


def _checked(meta: dict[str, Any], path: Any) -> dict[str, Any]:
    config, tokenizer = meta.get("config"), meta.get("tokenizer")
    has_model = isinstance(config, dict) and isinstance(config.get("model"), dict)
    if not (has_model and isinstance(tokenizer, dict)):
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
