"""Checkpoints that are complete or absent, and never silently wrong.

A checkpoint is one directory that appears by a single rename, once everything in it is on disk::

    step_00000250/
      state/         the pytree of arrays (Orbax, OCDBT)
      meta/          the caller's JSON: config, tokenizer, data position, ...
      manifest.json  format, library versions, the identity of the run, shape and dtype of every
                     array, and the size and CRC32 of every file

Orbax alone loads most bit-flipped files without noticing, so restoring checks the manifest first
and falls back to the checkpoint before a damaged one. Everything that touches Orbax is in this
file; it uses the asynchronous checkpointer without the manager, whose pruning knows no checksums.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from dlm_jax.checkpoint import bucket, manifest
from dlm_jax.checkpoint.files import (
    Leaves,
    Place,
    check_same_leaves,
    check_saveable,
    checkpoint_root,
    complete_steps,
    describe,
    facts_of,
    failures_of_writing,
    make_room,
    map_with_names,
    nested,
    newest_usable,
    prune,
    step_path,
)
from dlm_jax.checkpoint.quiet import quiet_orbax
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.storage import is_remote

PyTree = Any
Report = Callable[[str], None]


class Restored(NamedTuple):
    """What `Checkpoints.restore` gave back: the step saved, the arrays, the JSON beside them."""

    step: int
    state: PyTree
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training run, newest last; use it as a context manager.

    A save under way when the program ends without `close` or `wait` is lost (not half-written).
    Every process of a multi-process run makes one on the same shared directory and calls the same
    methods in the same order. Process 0 checks, sums up, renames and prunes.

    Args:
      directory: where the ``step_*`` directories live; made by the first save.
      keep: how many of the newest complete checkpoints to retain, at least 1. An older one goes
        only after the newer one is complete on disk.
      check: called on process 0 before anything in the directory is removed, and before a
        checkpoint appears there; raises if another process has taken the directory over.

    ``when_closed`` is a stack of what is called once all is closed.

    Raises:
      ValueError: ``keep`` below 1, or a ``directory`` that is a file or a URL of an unknown kind.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int,
        check: Callable[[], None] = lambda: None,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint to resume from; use 1 or more")
        self.directory = checkpoint_root(directory)
        self._keep = keep
        self._check = check
        self._checked: dict[int, bool] = {}
        self._pending: concurrent.futures.Future[None] | None = None
        self.when_closed = contextlib.ExitStack()
        self._finisher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        quiet_orbax()
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self._close(together=exc_type is None)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending; without the one being written."""
        return complete_steps(self.directory)

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> bool:
        """True if a checkpoint of ``step`` was begun, False if a complete one is there already.

        The arrays may be donated as soon as this returns; writing goes on in the background and
        counts only when it is complete. Waits for the save before.

        Args:
          step: at least 0, and not behind the newest checkpoint.
          state: any pytree of arrays, typed keys included; global arrays if there are several
            processes.
          meta: a JSON dict, equal on all processes; its ``run`` is the identity of the run.

        Raises:
          ValueError: one of the arguments is not as above; nothing was written.
          OSError: this save or the one before it failed, for example on a full disk.
        """
        leaves = describe(state, "state")
        check_saveable(step, state, meta)
        self.wait()
        if not on_first_process(lambda: self._make_room(step)):
            return False
        self._checked.clear()
        if is_remote(self.directory):
            held = bucket.on_host(state)
            self._pending = self._finisher.submit(
                self._finish_in_bucket, step, facts_of(leaves, meta), meta, held
            )
            return True
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with failures_of_writing(step_path(self.directory, step)):
            self._writer.save(self._written(step), args=args, force=True)
        self._pending = self._finisher.submit(self._finish, step, facts_of(leaves, meta))
        return True

    def wait(self) -> None:
        """Nothing, once the save under way is complete and visible to every process.

        Raises:
          OSError: it failed (`ValueError` on the other processes if it did so on process 0).
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            if jax.process_index() != 0:
                pending.result()
            on_first_process(pending.result)

    def close(self) -> None:
        """Nothing, after the save under way is complete and all threads have ended."""
        self._close(together=True)

    def abandon(self) -> None:
        """Nothing, after all threads have ended; it does not wait for other processes."""
        self._close(together=False)

    def read_meta(self, *, step: int | None = None, report: Report | None = None) -> dict[str, Any]:
        """The JSON of the checkpoint that `restore` would give; the same arguments and errors."""
        self.wait()
        return _read_meta(self._usable(step, None, report)[1])

    def restore(
        self, abstract_state: PyTree, *, step: int | None = None, report: Report | None = None
    ) -> Restored:
        """The newest usable checkpoint (or that of ``step``), laid out as ``abstract_state`` says.

        A damaged checkpoint is reported and the one before it is used, unless ``step`` is given.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` or arrays. Their shardings need not
            be those of the processes that saved; a leaf without one goes to the first local device.
          step: exactly this checkpoint.
          report: receives one line about each damaged checkpoint passed over, once, on
            process 0; default `warnings.warn`.

        Raises:
          ValueError: nothing usable is there, or it holds another architecture; the line names the
            directory or the first parameter that differs, and the remedy.
        """
        self.wait()
        leaves = describe(abstract_state, "abstract_state")
        found, path = self._usable(step, leaves, report)
        state = _read_arrays(path, abstract_state, partial=False)
        return Restored(found, state, _read_meta(path))

    def _usable(
        self, step: int | None, leaves: Leaves | None, report: Report | None
    ) -> tuple[int, Path]:
        found = on_first_process(
            lambda: newest_usable(
                self.directory, step, leaves, report or warnings.warn, self._checked
            )
        )
        return found, step_path(self.directory, found)

    def _written(self, step: int) -> Path:
        path = step_path(self.directory, step)
        return path.with_name(f"{path.name}.writing")

    def _make_room(self, step: int) -> bool:
        self._check()
        return make_room(self.directory, step, self._checked)

    def _finish_in_bucket(
        self, step: int, facts: dict[str, Any], meta: dict[str, Any], held: bucket.OnHost
    ) -> None:
        bucket.write(step_path(self.directory, step), held, meta, facts, self._check)
        if jax.process_index() == 0:
            prune(self.directory, keep=self._keep)

    def _finish(self, step: int, facts: dict[str, Any]) -> None:
        # On process 0 Orbax returns only when every process has written its part.
        with failures_of_writing(step_path(self.directory, step)):
            self._writer.wait_until_finished()
        if jax.process_index() == 0:
            manifest.write(self._written(step), facts)
            self._check()
            self._written(step).rename(step_path(self.directory, step))
            manifest.sync(self.directory)
            prune(self.directory, keep=self._keep)

    def _close(self, *, together: bool) -> None:
        try:
            if together:
                self.wait()
        finally:
            # A process that leaves on an exception does not wait for others: they may never come.
            self._finisher.shutdown()
            self._writer.close()
            self.when_closed.close()


def load_params(
    directory: str | os.PathLike[str],
    abstract_params: Callable[[dict[str, Any]], PyTree] | None = None,
    *,
    step: int | None = None,
    place: Place | None = None,
    report: Report | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """The parameters and the JSON of the newest usable checkpoint (or that of ``step``).

    Only the parameters are read (their moving average where the state has one), not the
    optimiser's moments. The mesh and the number of processes may differ from those that saved.

    Args:
      directory: the one given to `Checkpoints`, or the one that holds it as ``checkpoints``.
      abstract_params: builds from the JSON the shapes, dtypes and shardings that are wanted; the
        checkpoint must agree. Without it: the nested dict that was saved, on the first local
        device.
      step: exactly this checkpoint, without falling back.
      place: where each parameter goes, and as what; only the parts of a device are read onto it.
      report: receives one line about each damaged checkpoint passed over; default
        `warnings.warn`.

    Raises:
      ValueError: nothing usable is there, or it differs from ``abstract_params``.
    """
    quiet_orbax()
    root = checkpoint_root(directory)
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    found = on_first_process(lambda: newest_usable(root, step, None, report or warnings.warn, {}))
    path = step_path(root, found)
    meta = _read_meta(path)
    leaves = manifest.read(path)["leaves"]
    entry = "ema" if any(name.startswith("ema/") for name in leaves) else "params"
    saved = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{entry}/")}
    if not saved:
        raise ValueError(f"checkpoint {path} holds no params; pass one that train.py wrote")
    if abstract_params is None:
        wanted = nested(saved)
    else:
        wanted = {entry: abstract_params(meta)}
        check_same_leaves(describe(wanted, "abstract_params"), saved, path)
    if place is not None:
        wanted = {entry: map_with_names(place, wanted[entry])}
    return _read_arrays(path, wanted, partial=True)[entry], meta


def _read_arrays(path: Path, abstract: PyTree, *, partial: bool) -> PyTree:
    def sharding_of(leaf: Any) -> jax.sharding.Sharding:
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return getattr(leaf, "sharding", None) or first_device

    def restore_arg(leaf: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(
            sharding=sharding_of(leaf), global_shape=leaf.shape, dtype=leaf.dtype
        )

    if is_remote(path):
        return bucket.read_arrays(path, abstract, sharding_of)
    args = ocp.args.PyTreeRestore(
        abstract, restore_args=jax.tree.map(restore_arg, abstract), partial_restore=partial
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(path / "state", args=args)
    # Typed keys come back with an equivalent sharding, and only an equal one avoids a recompile.
    return jax.device_put(arrays, jax.tree.map(sharding_of, abstract))


def _read_meta(path: Path) -> dict[str, Any]:
    if is_remote(path):
        return json.loads((path / "meta" / "metadata").read_text())
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(path / "meta", args=ocp.args.JsonRestore())
