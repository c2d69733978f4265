"""Loads a published model's weights from safetensors files into device arrays, and writes them.

Files are mapped into memory and read one tensor at a time; nothing is unpickled.

A stacked parameter is allocated on its devices and filled layer by layer in place, so that host
memory contains at most one tensor besides mapped pages, which are released.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.hf.family import TensorPart, read_json, tensor_shapes
from dlm_jax.settings import brief
from dlm_jax.types import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of stored weights, by their names in files."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLocation(NamedTuple):
    """The location of a tensor; `start` is the position of its first byte in the file."""

    file: Path
    dtype: np.dtype
    start: int
    shape: tuple[int, ...]


class Tensors(Protocol):
    """Stored tensors, keyed by name."""

    @property
    def entries(self) -> Mapping[str, TensorLocation]: ...

    def read(self, name: str) -> np.ndarray: ...


class Shards:
    """The tensors of a directory, keyed by name; `read` returns a tensor without copying it.

    `name_of` maps a stored name to the usual name, or to '' if the tensor is omitted.
    """

    def __init__(self, directory: Path, name_of: Callable[[str], str] = str):
        self.entries: dict[str, TensorLocation] = {}
        for file, names in _files(directory).items():
            entries = _header(file)
            for verb, others, does in (
                ("lacks", set(names) - set(entries), "lists"),
                ("holds", set(entries) - set(names or entries), "does not list"),
            ):
                if others:
                    raise ValueError(
                        f"{file} {verb} the tensor {min(others)!r}, which {INDEX} {does}; download "
                        "both again"
                    )
            for name in names or entries:
                if usual := name_of(name):
                    self.entries[usual] = entries[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor as a view of its file; deleting the view releases the mapped pages."""
        file, dtype, start, shape = self.entries[name]
        return np.memmap(file, dtype, "r", start, shape)


def _files(directory: Path) -> dict[Path, list[str]]:
    """The weights files, and the tensors that each must contain; an empty list means any."""
    if not (directory / INDEX).exists():
        if (directory / SINGLE).exists():
            return {directory / SINGLE: []}
        raise ValueError(
            f"{directory} has neither {SINGLE} nor {INDEX}; use a directory with safetensors "
            f"weights (other formats contain code, which is never run)"
        )
    index = read_json(directory / INDEX)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{directory / INDEX} has no field 'weight_map'; download it again")
    files: dict[Path, list[str]] = {}
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith("safetensors"):
            raise ValueError(
                f"{directory / INDEX}: weight_map refers to {file!r}, which is not a safetensors "
                "file of this directory"
            )
        files.setdefault(directory / file, []).append(name)
    return files


def _header(file: Path) -> dict[str, TensorLocation]:
    """The locations of the tensors in a file; safetensors checks that they cover it."""
    if not file.exists():
        raise ValueError(f"{file} does not exist; download the whole directory")
    entries = {}
    try:
        with file.open("rb") as raw, safe_open(file, "np") as stream:
            start = 8 + int.from_bytes(raw.read(8), "little")
            for name in stream.offset_keys():
                tensor = stream.get_slice(name)
                kind, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if kind not in DTYPES:
                    raise ValueError(
                        f"{file}: the tensor {name!r} has dtype {kind}; only {', '.join(DTYPES)} "
                        "are read"
                    )
                entries[name] = TensorLocation(file, DTYPES[kind], start, shape)
                start += math.prod(shape) * DTYPES[kind].itemsize
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{file} is truncated or not a safetensors file ({reason}); download it again"
        ) from None
    return entries


# Memory alignment that XLA requires to use a NumPy array on the CPU without a copy.
_ALIGNMENT = 64
_ROWS = 512
_THREADS = min(8, os.cpu_count() or 1)

Place = Callable[[str, tuple[int, ...]], Sharding | None]
"""Maps the path and shape of a parameter to its sharding; None means the default device."""

Finish = Callable[[str, Any], Any]
"""Maps the path and value (or abstract shape) of a parameter to the final form of the parameter."""


def check_tensors(
    shards: Tensors,
    pieces: Mapping[str, list[TensorPart]],
    *,
    redundant: Mapping[str, str] = {},
    where: str,
    config: str = "config.json",
) -> None:
    """Raises ValueError for missing or unexpected tensors and wrong shapes. `config` is the name of
    the file that determines them.

    `redundant` tensors may be present and are ignored, but must equal the tensors that they map to.
    """
    shapes, stored = tensor_shapes(pieces), shards.entries
    surplus = set(stored) - set(shapes) - set(redundant)
    surplus = {name for name in surplus if not name.endswith("rotary_emb.inv_freq")}
    for verb, names, does in (
        ("lacks", set(shapes) - set(stored), "implies"),
        ("holds", surplus, "excludes"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{where} {verb} the tensor {min(names)!r}{more}, which {config} {does}"
            )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ValueError(
                f"{where}: the tensor {name!r} has shape {brief(stored[name].shape)}, but {config} "
                f"requires {shape}"
            )
    for name, other in redundant.items():
        if name in stored and not (
            stored[name].shape == stored[other].shape
            and _are_equal(shards.read(name), shards.read(other))
        ):
            raise ValueError(
                f"{where}: config.json ties the tensor {name!r} to {other!r}, but they differ; "
                "untie them in a copy of config.json to use the tensor, or remove it"
            )


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether two matrices have the same values, compared in parts to save memory."""
    parts = (slice(row, row + _ROWS) for row in range(0, len(first), _ROWS))
    return all(
        np.array_equal(first[at].astype(np.float32), second[at].astype(np.float32), equal_nan=True)
        for at in parts
    )


def read_params(
    shards: Tensors,
    pieces: Mapping[str, list[TensorPart]],
    abstract: Params,
    *,
    dtype: np.dtype | None,
    place: Place,
    finish: Finish,
) -> Params:
    """Loads the parameters in `dtype`, with shardings from `place`. The dtype None is that of a
    parameter's tensors, or float32 if they differ.

    Each parameter is replaced by the result of `finish` before the next parameter is read. Before
    any parameter is read, `finish` is called with the shapes of all parameters.
    """

    def read(path: str, leaf: Any) -> Any:
        parts, kind = pieces[path], dtype
        if kind is None:
            kinds = {shards.entries[piece.tensor].dtype for piece in parts}
            kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
        sharding = place(path, leaf.shape)
        if sharding is None and jax.default_backend() == "cpu":
            parameter = _on_host(shards, parts, leaf.shape, kind)
        elif parts[0].place == ():
            parameter = _put(shards, parts[0], leaf.shape, kind, sharding)
        else:
            parameter = _stacked(shards, parts, leaf.shape, kind, sharding)
        return jax.block_until_ready(finish(path, parameter))

    map_named(finish, abstract)
    return map_named(read, abstract)


def _on_host(
    shards: Tensors, parts: list[TensorPart], shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """A parameter on the CPU; several threads copy its pieces directly to their final positions."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    whole = memory[first : first + size].view(dtype).reshape(shape)

    def fill(piece: TensorPart) -> None:
        stored = shards.read(piece.tensor)[piece.part]
        _copy(stored.astype(dtype, copy=False), whole[piece.place], piece.is_transposed)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(fill, piece) for piece in parts]:
            done.result()
    # The memory is not modified later, so the array can alias it.
    return jax.device_put(whole)


def _copy(stored: np.ndarray, target: np.ndarray, is_transposed: bool) -> None:
    # NumPy copies native dtypes much faster than bfloat16.
    bits = {2: np.uint16, 4: np.uint32}[stored.dtype.itemsize]
    stored, target = stored.view(bits), target.view(bits)
    if not is_transposed:
        np.copyto(target, stored)
        return
    # A transposing transfer by the backend is 1.5 times as fast as a transposition by NumPy in
    # squares that fit in the cache. Slices of rows require no additional memory.
    (device,) = jax.local_devices(backend="cpu")[:1]
    for row in range(0, stored.shape[0], _ROWS):
        turned = jax.device_put(stored[row : row + _ROWS].T, device)
        np.copyto(target[:, row : row + _ROWS], np.asarray(turned))


def _stacked(
    shards: Tensors,
    parts: list[TensorPart],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    depth, inner = len(parts[0].place), sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*sharding.spec[depth:])
        inner = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    for piece in parts:
        part = _put(shards, piece, shape[depth:], dtype, inner)
        stack = _writer(sharding)(stack, part, np.array(piece.place, np.int32))
    return stack


@functools.cache
def _writer(sharding: Sharding | None) -> Callable[..., jax.Array]:
    def write(stack: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
        start = (*place, *(0,) * part.ndim)
        return jax.lax.dynamic_update_slice(
            stack, part.reshape((1,) * len(place) + part.shape), start
        )

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _put(
    shards: Tensors,
    piece: TensorPart,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    """One piece as a device array, transposed if the parameter is stored transposed."""
    stored = shards.read(piece.tensor)[piece.part]
    view = stored.T if piece.is_transposed else stored

    def part(index: Any) -> np.ndarray:
        return view[index].astype(dtype, copy=False)

    if sharding is None:
        array = jnp.array(part(...), copy=True)
    else:
        array = jax.make_array_from_callback(shape, sharding, part)
    return array.block_until_ready()


def write_weights(
    directory: Path, params: Params, pieces: Mapping[str, list[TensorPart]], max_bytes: int
) -> None:
    """Writes safetensors files of at most `max_bytes` bytes each, or of one tensor."""
    values = dict(named_leaves(params))
    shapes = tensor_shapes(pieces)
    parts: dict[str, list[tuple[TensorPart, Any]]] = {name: [] for name in shapes}
    for path, of_path in pieces.items():
        if values[path].dtype not in _NAMES:
            raise ValueError(
                f"parameter {path} is {values[path].dtype}; only {', '.join(DTYPES)} are written"
            )
        for piece in of_path:
            parts[piece.tensor].append((piece, values[path]))
    dtypes = {name: np.dtype(first[0][1].dtype) for name, first in parts.items()}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    where = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        where |= dict.fromkeys(names, file)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = [0, *itertools.accumulate(sizes[name] for name in names)]
        for name, span in zip(names, itertools.pairwise(ends), strict=True):
            kind = _NAMES[dtypes[name]]
            header[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                # One tensor at a time, so that the host's memory holds no whole file.
                whole = np.empty(shapes[name], dtypes[name])
                for piece, value in parts[name]:
                    value = np.asarray(value[piece.place] if piece.place else value)
                    whole[piece.part] = value.T if piece.is_transposed else value
                stream.write(whole.tobytes())
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
