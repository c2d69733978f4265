"""Checkpoints on a disk of each host, for a restart without the shared directory or bucket.

Every process saves the shards of its own devices in its own directory, without waiting for the
others. The format is that of a shared checkpoint (see `dlm_jax.store.checkpoints`), except that
``state/`` holds one file with the bytes of all shards. A checkpoint is restored if every process
has the shards of its devices; after a change of the mesh or the hosts, no local checkpoint fits.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.distributed.partitions import path_name
from dlm_jax.distributed.processes import gathered
from dlm_jax.store import files
from dlm_jax.store.checkpoint_files import (
    check_saveable,
    complete_steps,
    describe,
    facts_of,
    make_room,
    newest_usable,
    plain,
    prune,
    remove,
    step_path,
)

_KEEP = 2  # Hosts that are killed during a save have the checkpoint before it in common.

Piece = tuple[str, tuple[int, ...]]
"""A shard: the name of its array, and the first index and the end of the shard on each axis."""


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
        facts, shards = facts_of(describe(state, "state"), meta), _own_shards(state)
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

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which the run repeats."""
        for later in complete_steps(self.directory):
            if later > step:
                remove(step_path(self.directory, later))

    def read_meta(self, step: int) -> dict[str, Any]:
        return json.loads((step_path(self.directory, step) / "meta").read_text(encoding="utf-8"))

    def restore(self, abstract_state: Any, step: int) -> Any:
        """The state of a step that `newest` returned for the same abstract state."""
        path = step_path(self.directory, step)
        places = self._places(path)
        content = np.memmap(path / "state", np.uint8, "r")

        def restored(keys: Any, leaf: Any) -> jax.Array:
            data = jax.eval_shape(plain, leaf)
            shape = leaf.sharding.shard_shape(data.shape)

            def shard(index: Any) -> np.ndarray:
                first, size = places[path_name(keys), _bounds(index, data.shape)]
                return np.array(content[first : first + size].view(data.dtype).reshape(shape))

            array = jax.make_array_from_callback(data.shape, leaf.sharding, shard)
            if data.dtype == leaf.dtype:
                return array
            return jax.random.wrap_key_data(array, impl="threefry2x32")

        return jax.tree_util.tree_map_with_path(restored, abstract_state)

    def _fits(self, step: int, abstract_state: Any) -> bool:
        """Whether the checkpoint is intact and has all shards of the devices of this process."""
        try:
            newest_usable(self.directory, step, describe(abstract_state, "state"), self._report, {})
            places = self._places(step_path(self.directory, step))
        except ValueError as error:
            self._report(f"the local checkpoint of step {step} is not used: {error}")
            return False
        return all(
            (path_name(keys), bounds) in places
            for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract_state)[0]
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


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(index, shape, strict=True)
    return tuple(bound for part, size in pairs for bound in part.indices(size)[:2])


def _own_bounds(leaf: Any) -> set[tuple[int, ...]]:
    """The shards of an abstract array on the devices of this process."""
    shape = jax.eval_shape(plain, leaf).shape
    indices = leaf.sharding.addressable_devices_indices_map(shape).values()
    return {_bounds(index, shape) for index in indices}


def _own_shards(state: Any) -> dict[Piece, np.ndarray]:
    """Copies of the different shards on the devices of this process."""
    found: dict[Piece, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        array = plain(leaf)
        for shard in array.addressable_shards:
            found[path_name(keys), _bounds(shard.index, array.shape)] = shard.data
    for data in found.values():
        data.copy_to_host_async()
    # On a CPU, an array may share memory with a buffer that is donated later, so it is copied.
    return {piece: np.array(data) for piece, data in found.items()}
