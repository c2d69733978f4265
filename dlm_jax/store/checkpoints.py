"""Checkpoints that are either complete or absent, and never silently corrupt.

A checkpoint is a directory that is renamed to its final name when all its files are on disk::

    step_00000250/
      state/         the pytree of arrays (Orbax, OCDBT)
      meta/          the caller's JSON: config, tokenizer, data position, ...
      manifest.json  format, library versions, the identity of the run, shape and dtype of every
                     array, and the size and CRC32 of every file

Orbax loads most files with flipped bits without an error. Therefore, `restore` verifies the
manifest first and falls back to an earlier checkpoint if the newest one is damaged. Only this file
uses Orbax. It uses the asynchronous checkpointer but not the manager of Orbax, which ignores
checksums when it prunes checkpoints.

In a bucket, files cannot be renamed, and every process writes its own files. The folder ``state/``
in a bucket contains a zarr array for each array. Tensorstore writes and reads these arrays, because
Orbax does not support ``s3://``. Each process writes the shards of its devices, reads the files
back, and writes their sizes and CRC32s to ``sums/PROCESS.json``. When these files exist for all
processes, process 0 writes the manifest, which completes the checkpoint.

`LocalCheckpoints` are on a disk of each host, for a restart without the shared directory or bucket.
Every process saves the shards of its own devices in its own directory, without waiting for the
others. In their format, ``state/`` is one file with the bytes of all shards. A local checkpoint is
restored if every process has the shards of its devices; after a change of the mesh or the hosts, no
local checkpoint fits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.distributed.processes import gathered, on_first_process
from dlm_jax.store import files
from dlm_jax.store.checkpoint_files import (
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
    nested,
    newest_usable,
    plain,
    prune,
    step_path,
    without_custom_heads,
)
from dlm_jax.store.files import AnyPath, is_remote, sync
from dlm_jax.store.weights import SUFFIX, load_weights, path_of_model, read_meta

_PATIENCE = 1800.0
_POLL = 0.2


Piece = tuple[str, tuple[int, ...]]
"""A shard: the name of its array, and the first index and the end of the shard on each axis."""


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(index, shape, strict=True)
    return tuple(bound for part, size in pairs for bound in part.indices(size)[:2])


def _own_shards(state: Any, *, replicas: bool) -> dict[Piece, np.ndarray]:
    """Copies of the different shards on the devices of this process.

    Without `replicas`, a shard is only in the process that has its first replica.
    """
    found: dict[Piece, Any] = {}
    for name, leaf in named_leaves(state):
        array = plain(leaf)
        for shard in array.addressable_shards:
            if replicas or shard.replica_id == 0:
                found[name, _bounds(shard.index, array.shape)] = shard.data
    for data in found.values():
        data.copy_to_host_async()
    # On a CPU, an array may share memory with a buffer that is donated later, so it is copied.
    return {piece: np.array(data) for piece, data in found.items()}


def _zarr_specs(state: Any) -> dict[str, Any]:
    """Zarr metadata of each array."""
    return {
        name: {
            "shape": list(array.shape),
            "chunks": [max(1, size) for size in array.sharding.shard_shape(array.shape)],
            "dtype": _zarr_type(array.dtype),
            "compressor": None,
            "fill_value": None,
        }
        for name, array in named_leaves(jax.tree.map(plain, state))
    }


def _file_of(name: str, bounds: tuple[int, ...], chunks: list[int]) -> str:
    starts = [first // size for first, size in zip(bounds[::2], chunks, strict=True)]
    return f"state/{name}/{'.'.join(map(str, starts)) or '0'}"


def _zarr_type(dtype: Any) -> str:
    return "bfloat16" if dtype == jax.numpy.bfloat16 else np.dtype(dtype).newbyteorder("<").str


def _store_of(step: AnyPath, inside: str) -> dict[str, Any]:
    """The tensorstore spec of a folder in a checkpoint.

    Endpoint and credentials are passed explicitly, because tensorstore ignores the endpoint in the
    environment and logs its search for credentials.
    """
    scheme, _, rest = str(step).partition("://")
    name, _, path = rest.partition("/")
    path = f"{path}/{inside}" if path else inside
    if scheme == "gs":
        return {"driver": "gcs", "bucket": name, "path": path}
    spec: dict[str, Any] = {"driver": "s3", "bucket": name, "path": path}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _opened(step: AnyPath, name: str, metadata: Any | None, *, create: bool) -> Any:
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": _store_of(step, f"state/{name}/")}
    if metadata is not None:
        spec["metadata"] = metadata
    return ts.open(ts.Spec(spec), open=True, create=create)


def _write_shards(step: AnyPath, specs: dict[str, Any], shards: dict[Piece, np.ndarray]) -> None:
    """Writes the shards of this process, reads the files back, and writes their checksums."""
    first = jax.process_index() == 0
    wanted = set(specs) if first else {name for name, _ in shards}
    opened = {name: _opened(step, name, specs[name], create=True) for name in wanted}
    arrays = {name: future.result() for name, future in opened.items()}
    writes = [
        arrays[name][tuple(map(slice, bounds[::2], bounds[1::2]))].write(value)
        for (name, bounds), value in shards.items()
    ]
    for write in writes:
        write.result()
    files = [_file_of(name, bounds, specs[name]["chunks"]) for name, bounds in shards]
    files += [f"state/{name}/.zarray" for name in specs] if first else []
    files += ["meta/metadata"] if first else []
    store = ts.KvStore.open(ts.KvStore.Spec(_store_of(step, ""))).result()
    sums = {}
    for name, read in [(name, store.read(name)) for name in files]:
        value = read.result().value
        sums[name] = (len(value), zlib.crc32(value))
    (step / "sums").mkdir(parents=True, exist_ok=True)
    (step / "sums" / f"{jax.process_index()}.json").write_text(json.dumps(sums))


def _commit(step: AnyPath, facts: dict[str, Any], check: Callable[[], None]) -> None:
    """Writes the manifest when the checksums of every process are present and valid.

    Raises:
      OSError: a process did not finish within half an hour.
    """
    sums: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + _PATIENCE
    for process in range(jax.process_count()):
        path = step / "sums" / f"{process}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                why = f"did not appear: process {process} has not saved its shards"
                raise OSError(errno.ETIMEDOUT, why, str(path))
            time.sleep(_POLL)
        sums |= json.loads(path.read_text())
    check()
    files.put_manifest(step, facts, sums)


def read_arrays(step: AnyPath, abstract: Any, sharding_of: Callable[[Any], Any]) -> Any:
    """The saved arrays. `sharding_of` maps each abstract leaf to the sharding of its array."""
    leaves = named_leaves(abstract)
    opened = [_opened(step, name, None, create=False) for name, _ in leaves]
    pending = []
    for (_, leaf), future in zip(leaves, opened, strict=True):
        store = future.result()
        sharding = sharding_of(leaf)
        reads = {
            str(index): store[index].read()
            for index in sharding.addressable_devices_indices_map(store.shape).values()
        }
        pending.append((leaf, store.shape, sharding, reads))
    return jax.tree.unflatten(
        jax.tree.structure(abstract),
        [
            _assembled(leaf, shape, sharding, lambda index, reads=reads: reads[str(index)].result())
            for leaf, shape, sharding, reads in pending
        ],
    )


def _assembled(
    leaf: Any, shape: tuple[int, ...], sharding: Any, shard_at: Callable[[Any], Any]
) -> jax.Array:
    """The array of numbers in these shards, as the dtype of `leaf` or as its typed keys."""
    array = jax.make_array_from_callback(shape, sharding, lambda at: np.asarray(shard_at(at)))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl="threefry2x32")
    return array.astype(leaf.dtype)


def quiet_orbax() -> None:
    """Limits the logs of Orbax to warnings."""
    # Orbax logs every save at INFO through absl. Orbax also logs errors in its threads with a
    # traceback, although the call that waits for the save raises the same errors.
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_not_raised_too not in logger.filters:
            logger.addFilter(_is_not_raised_too)


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        return not record.exc_info or "Error writing" not in str(record.exc_info[1])
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


Report = Callable[[str], None]


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`: step, arrays and metadata."""

    step: int
    state: Any
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training run, newest last. Use this class as a context manager.

    If the program ends without `close` or `wait`, an unfinished save is lost, but never partially
    written. Every process of a multi-process run creates an instance for the same shared directory
    and calls the same methods in the same order. Process 0 verifies, renames and prunes
    checkpoints.

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
        leaves = describe(state, "state")
        check_saveable(step, state, meta)
        self.wait()
        if not on_first_process(lambda: self._make_room(step)):
            return False
        self._checked.clear()
        if is_remote(self.directory):
            self._pending = self._finisher.submit(
                self._finish_in_bucket,
                step,
                facts_of(leaves, meta),
                meta,
                _zarr_specs(state),
                _own_shards(state, replicas=False),
            )
            return True
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with failures_of_writing(step_path(self.directory, step)):
            self._writer.save(self._written(step), args=args, force=True)
        self._pending = self._finisher.submit(self._finish, step, facts_of(leaves, meta))
        return True

    def wait(self) -> None:
        """Waits until the save in progress is complete and visible to every process.

        Raises:
          OSError: the save failed.
          ValueError: the save failed on process 0; raised on the other processes.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            if jax.process_index() != 0:
                pending.result()
            on_first_process(pending.result)

    def close(self, *, together: bool = True) -> None:
        """Ends all threads, and waits for a save in progress and other processes if `together`."""
        try:
            if together:
                self.wait()
        finally:
            self._finisher.shutdown()
            self._writer.close()
            self.when_closed.close()

    def read_meta(self, *, report: Report | None = None) -> dict[str, Any]:
        """The metadata of the newest usable checkpoint, with the errors of `restore`."""
        self.wait()
        return _read_meta(_newest(self.directory, None, None, report, self._checked)[1])

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
        self.wait()
        leaves = describe(abstract_state, "abstract_state")
        found, path = _newest(self.directory, step, leaves, report, self._checked)
        state = _read_arrays(path, abstract_state, partial=False)
        return Restored(found, state, _read_meta(path))

    def _written(self, step: int) -> Path:
        path = step_path(self.directory, step)
        return path.with_name(f"{path.name}.writing")

    def _make_room(self, step: int) -> bool:
        self._check()
        return make_room(self.directory, step, self._checked)

    def _finish_in_bucket(
        self,
        step: int,
        facts: dict[str, Any],
        meta: dict[str, Any],
        arrays: dict[str, Any],
        shards: dict[Piece, np.ndarray],
    ) -> None:
        """Writes a checkpoint to a bucket: every process writes its own files, and then process 0
        writes the manifest.
        """
        path, is_first = step_path(self.directory, step), jax.process_index() == 0
        if is_first:
            (path / "meta").mkdir(parents=True, exist_ok=True)
            (path / "meta" / "metadata").write_text(json.dumps(meta))
        with failures_of_writing(path):
            _write_shards(path, arrays, shards)
            if is_first:
                _commit(path, facts, self._check)
        if is_first:
            prune(self.directory, keep=self._keep)

    def _finish(self, step: int, facts: dict[str, Any]) -> None:
        # On process 0, Orbax returns only when every process has written its shards.
        with failures_of_writing(step_path(self.directory, step)):
            self._writer.wait_until_finished()
        if jax.process_index() == 0:
            files.write_manifest(self._written(step), facts)
            self._check()
            self._written(step).rename(step_path(self.directory, step))
            sync(self.directory)
            prune(self.directory, keep=self._keep)


def _root_of(directory: str | os.PathLike[str]) -> Path:
    """The subdirectory ``checkpoints`` if it exists, or else the given directory."""
    root = checkpoint_root(directory)
    return root / "checkpoints" if (root / "checkpoints").is_dir() else root


def _newest(
    root: Path,
    step: int | None,
    leaves: Leaves | None,
    report: Report | None,
    checked: dict[int, bool],
) -> tuple[int, Path]:
    """The checkpoint to restore, selected by process 0; see `newest_usable`."""
    quiet_orbax()
    found = on_first_process(
        lambda: newest_usable(root, step, leaves, report or warnings.warn, checked)
    )
    return found, step_path(root, found)


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
    path = _newest(_root_of(directory), step, None, report, {})[1]
    meta = _read_meta(path)
    leaves = files.read_manifest(path)["leaves"]
    entry = "ema" if any(name.startswith("ema/") for name in leaves) else "params"
    saved = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{entry}/")}
    if not saved:
        raise ValueError(f"checkpoint {path} has no params; pass one written by train.py")
    if abstract_params is None:
        wanted = nested(
            {
                name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
                for name, (dtype, shape) in saved.items()
            }
        )
    else:
        wanted = {entry: abstract_params(meta)}
        leaves = describe(wanted, "abstract_params")
        check_same_leaves(leaves, without_custom_heads(saved, leaves, meta), path)
    if place is not None:
        wanted = {entry: map_named(place, wanted[entry])}
    return _read_arrays(path, wanted, partial=True)[entry], meta


def _read_arrays(path: Path, abstract: Any, *, partial: bool) -> Any:
    def sharding_of(leaf: Any) -> jax.sharding.Sharding:
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return getattr(leaf, "sharding", None) or first_device

    def restore_arg(leaf: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(
            sharding=sharding_of(leaf), global_shape=leaf.shape, dtype=leaf.dtype
        )

    if is_remote(path):
        return read_arrays(path, abstract, sharding_of)
    args = ocp.args.PyTreeRestore(
        abstract, restore_args=jax.tree.map(restore_arg, abstract), partial_restore=partial
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(path / "state", args=args)
    # Typed keys are restored with an equivalent sharding, but only an equal sharding avoids a
    # recompilation.
    return jax.device_put(arrays, jax.tree.map(sharding_of, abstract))


def _read_meta(path: Path) -> dict[str, Any]:
    return json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))


def load_any(
    path: str | os.PathLike[str] | None,
    make_abstract: Callable[[dict[str, Any]], Any] | None = None,
    *,
    place: Place | None = None,
    report: Callable[[str], None] | None = None,
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


def load_meta(
    path: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The metadata that `load_any` would return for a path, with the same errors."""
    if Path(path).suffix == SUFFIX:
        return _checked(read_meta(path), path)
    return _checked(_read_meta(_newest(_root_of(path), None, None, report, {})[1]), path)


def _checked(meta: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    for name in ("config", "tokenizer"):
        if not isinstance(meta.get(name), dict):
            raise ValueError(f"{path} does not describe its {name}; load a model from train.py")
    if not isinstance(meta["config"].get("model"), dict):
        raise ValueError(f"{path} has a config without [model]; load a model from train.py")
    return meta


_KEEP = 2  # Hosts that are killed during a save have the checkpoint before it in common.


class LocalCheckpoints:
    """The local checkpoints of one process.

    Args:
      directory: directory of the run on a disk of this host.
      report: called with one line if a save fails, which does not end the run, or if a checkpoint
        is not usable.

    ``directory`` is the parent of the ``step_*`` directories of this process.
    """

    def __init__(self, directory: str | os.PathLike[str], report: Callable[[str], None]):
        index, count = jax.process_index(), jax.process_count()
        self.directory = Path(directory).absolute() / f"process_{index}_of_{count}"
        self._report = report
        self._pending: concurrent.futures.Future[None] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="local")

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts to save a checkpoint, after the previous one is complete.

        The arrays may be donated once the method has returned.
        """
        check_saveable(step, state, meta)
        self.wait()
        facts, shards = facts_of(describe(state, "state"), meta), _own_shards(state, replicas=True)
        self._pending = self._writer.submit(self._write, step, facts, meta, shards)

    def wait(self) -> None:
        """Waits until the save in progress is complete, and reports its failure."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except (OSError, ValueError) as error:
            self._report(f"warning: no local checkpoint ({error}); training continues")

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def newest(self, abstract_state: Any) -> int | None:
        """The newest step that every process can restore; None if there is none.

        All processes must call this method at the same point.
        """
        usable = {
            (step, self.read_meta(step)["run"])
            for step in complete_steps(self.directory)
            if self._fits(step, abstract_state)
        }
        common = set.intersection(*gathered(usable))
        return max((step for step, _ in common), default=None)

    def read_meta(self, step: int) -> dict[str, Any]:
        return json.loads((step_path(self.directory, step) / "meta").read_text(encoding="utf-8"))

    def restore(self, abstract_state: Any, step: int) -> Any:
        """The state of a step that `newest` returned for the same abstract state."""
        path = step_path(self.directory, step)
        places = self._places(path)
        content = np.memmap(path / "state", np.uint8, "r")

        def restored(name: str, leaf: Any) -> jax.Array:
            data = jax.eval_shape(plain, leaf)
            shape = leaf.sharding.shard_shape(data.shape)

            def shard(index: Any) -> np.ndarray:
                first, size = places[name, _bounds(index, data.shape)]
                return np.array(content[first : first + size].view(data.dtype).reshape(shape))

            return _assembled(leaf, data.shape, leaf.sharding, shard)

        return map_named(restored, abstract_state)

    def _fits(self, step: int, abstract_state: Any) -> bool:
        """Whether the checkpoint is intact and has all shards of the devices of this process."""
        try:
            newest_usable(self.directory, step, describe(abstract_state, "state"), self._report, {})
            places = self._places(step_path(self.directory, step))
        except ValueError as error:
            self._report(f"the local checkpoint of step {step} is not used: {error}")
            return False
        return all(
            (name, bounds) in places
            for name, leaf in named_leaves(abstract_state)
            for bounds in _own_bounds(leaf)
        )

    def _places(self, path: Path) -> dict[Piece, tuple[int, int]]:
        """First byte and number of bytes of each shard."""
        found, first = {}, 0
        for name, bounds, size in json.loads((path / "shards").read_text()):
            found[name, tuple(bounds)] = (first, size)
            first += size
        return found

    def _write(
        self, step: int, facts: dict[str, Any], meta: dict[str, Any], shards: dict[Piece, Any]
    ) -> None:
        if not make_room(self.directory, step, {}):
            return
        path = step_path(self.directory, step)
        writing = path.with_name(f"{path.name}.writing")
        writing.mkdir()
        with (writing / "state").open("wb") as file:
            for shard in shards.values():
                file.write(shard.tobytes())
        table = [[name, bounds, shard.nbytes] for (name, bounds), shard in shards.items()]
        (writing / "shards").write_text(json.dumps(table))
        (writing / "meta").write_text(json.dumps(meta), encoding="utf-8")
        files.write_manifest(writing, facts)
        writing.rename(path)
        files.sync(self.directory)
        prune(self.directory, keep=_KEEP)


def _own_bounds(leaf: Any) -> set[tuple[int, ...]]:
    """The shards of an abstract array on the devices of this process."""
    shape = jax.eval_shape(plain, leaf).shape
    indices = leaf.sharding.addressable_devices_indices_map(shape).values()
    return {_bounds(index, shape) for index in indices}
