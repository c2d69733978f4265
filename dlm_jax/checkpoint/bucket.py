"""Checkpoints in buckets, where nothing can be renamed and every process writes its own files.

The layout is that of a local checkpoint (see `store`) but for ``state/``, in which every array is a
zarr array that tensorstore writes and reads: Orbax writes to no ``s3://``. Each process writes the
parts of arrays that its devices hold, reads the files back, and leaves their sizes and CRC32s in
``sums/PROCESS.json``. When process 0 has seen all of these it writes the manifest: the one object
that makes a checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from dlm_jax.checkpoint import manifest
from dlm_jax.checkpoint.files import failures_of_writing
from dlm_jax.storage import AnyPath

_PATIENCE = 1800.0
_POLL = 0.2


class Part(NamedTuple):
    """A piece of an array on the host: where it belongs, and in which file."""

    name: str
    index: tuple[slice, ...]
    value: np.ndarray
    file: str


class OnHost(NamedTuple):
    """A state on its way to a bucket: zarr's metadata by array, and the parts to write here."""

    arrays: dict[str, Any]
    parts: list[Part]


def on_host(state: Any) -> OnHost:
    """What this process writes of a state, copied, so that the state may be donated.

    Every piece of an array is written by one process: that of its first replica.
    """
    specs: dict[str, Any] = {}
    found: list[tuple[str, Any, jax.Array, tuple[int, ...]]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array = _plain(leaf)
        chunk = array.sharding.shard_shape(array.shape)
        specs[name] = {
            "shape": list(array.shape),
            "chunks": [max(1, size) for size in chunk],
            "dtype": _zarr_type(array.dtype),
            "compressor": None,
            "fill_value": None,
        }
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()
                found.append((name, shard.index, shard.data, chunk))
    # Copies: on CPU an array may share its memory with a buffer that is about to be donated.
    parts = [
        Part(name, index, np.array(data), f"state/{name}/{_chunk_key(index, chunk)}")
        for name, index, data, chunk in found
    ]
    return OnHost(specs, parts)


def write(
    step: AnyPath,
    held: OnHost,
    meta: dict[str, Any],
    facts: dict[str, Any],
    check: Callable[[], None],
) -> None:
    """Writes a checkpoint: on every process its own files, on process 0 the manifest at last.

    `check` is called before the manifest is written, and raises if it must not be.

    Raises:
      OSError: the bucket failed, or another process did not write its part.
    """
    is_first = jax.process_index() == 0
    if is_first:
        (step / "meta").mkdir(parents=True, exist_ok=True)
        (step / "meta" / "metadata").write_text(json.dumps(meta))
    with failures_of_writing(step):
        _write_parts(step, held.arrays, held.parts)
        if is_first:
            _commit(step, facts, check)


def _chunk_key(index: tuple[slice, ...], chunk: tuple[int, ...]) -> str:
    starts = [(part.start or 0) // max(1, size) for part, size in zip(index, chunk, strict=True)]
    return ".".join(map(str, starts)) or "0"


def _plain(leaf: Any) -> jax.Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else jax.numpy.asarray(leaf)


def _zarr_type(dtype: Any) -> str:
    return "bfloat16" if dtype == jax.numpy.bfloat16 else np.dtype(dtype).newbyteorder("<").str


def _store_of(step: AnyPath, inside: str) -> dict[str, Any]:
    """Where tensorstore finds a folder of a checkpoint.

    It does not read the environment's endpoint, and it looks for credentials everywhere, aloud.
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


def _write_parts(step: AnyPath, specs: dict[str, Any], parts: list[Part]) -> None:
    """Writes what this process holds, and the sums of its files as they can be read back."""
    first = jax.process_index() == 0
    wanted = set(specs) if first else {part.name for part in parts}
    opened = {name: _opened(step, name, specs[name], create=True) for name in wanted}
    arrays = {name: future.result() for name, future in opened.items()}
    writes = [arrays[part.name][part.index].write(part.value) for part in parts]
    for write in writes:
        write.result()
    files = [part.file for part in parts]
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
    """Writes the manifest, once every process has left its sums.

    Raises:
      OSError: one did not within half an hour.
    """
    files: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + _PATIENCE
    for process in range(jax.process_count()):
        path = step / "sums" / f"{process}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                why = f"did not appear: process {process} has not saved its part"
                raise OSError(errno.ETIMEDOUT, why, str(path))
            time.sleep(_POLL)
        files |= {name: (size, crc) for name, (size, crc) in json.loads(path.read_text()).items()}
    check()
    manifest.put(step, facts, files)


def read_arrays(step: AnyPath, abstract: Any, sharding_of: Callable[[Any], Any]) -> Any:
    """The saved arrays, each laid out as `sharding_of` its abstract leaf says."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    opened = [_opened(step, name, None, create=False) for name in names]
    pending = []
    for (_, leaf), future in zip(leaves, opened, strict=True):
        store = future.result()
        sharding = sharding_of(leaf)
        reads = {
            str(index): store[index].read()
            for index in sharding.addressable_devices_indices_map(store.shape).values()
        }
        pending.append((leaf, store.shape, sharding, reads))
    return jax.tree.unflatten(structure, [_assembled(*one) for one in pending])


def _assembled(leaf: Any, shape: tuple[int, ...], sharding: Any, reads: dict[str, Any]) -> Any:
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: np.asarray(reads[str(index)].result())
    )
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key:
        return jax.random.wrap_key_data(array, impl="threefry2x32")
    return array.astype(leaf.dtype)
