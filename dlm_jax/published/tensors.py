"""Loads a published model's weights from safetensors files into device arrays, and writes them.

Files are mapped into memory and read one tensor at a time; nothing is unpickled.

A stacked parameter is allocated on its devices and filled layer by layer in place, so that host
memory contains at most one tensor besides mapped pages, which are released.
"""

from __future__ import annotations

import concurrent.futures
import functools
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
from jax.sharding import Sharding

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.published.family import TensorPart, read_json, tensor_shapes, without_twins
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

_LONGEST_HEADER = 100_000_000
_MOST_AXES = 8


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
            found = _header(file)
            for name in names or found:
                if name not in found:
                    raise ValueError(
                        f"{file} lacks the tensor {name!r}, which {INDEX} lists; download "
                        "both again"
                    )
                if usual := name_of(name):
                    self.entries[usual] = found[name]
            surplus = sorted(set(found) - set(names or found))
            if surplus:
                raise ValueError(
                    f"{file} holds the tensor {surplus[0]!r}, which {INDEX} does not list; "
                    "download both again"
                )

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
    """The locations of the tensors in a file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            raw = json.loads(stream.read(length), object_pairs_hook=without_twins)
            if not isinstance(raw, dict):
                raise ValueError("its header is not an object")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; download the whole directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a safetensors file ({error}); download it again") from None
    raw.pop("__metadata__", None)
    begin, end = 8 + length, 8 + length
    found, places = {}, []
    for name, said in raw.items():
        found[name], last = _entry(file, name, said, begin)
        places.append((found[name].start, last, name))
    for first, last, name in sorted(places):
        if first != end:
            raise ValueError(
                f"{file}: the tensor {name!r} begins at byte {first:,}, but the previous one ends "
                f"at {end:,}; download it again"
            )
        end = last
    if end != size:
        what = "truncated" if size < end else "too long"
        raise ValueError(f"{file} is {what}: {size:,} bytes of {end:,}; download it again")
    return found


def _entry(file: Path, name: str, said: Any, begin: int) -> tuple[TensorLocation, int]:
    """The location of a tensor, and the position after its last byte."""
    try:
        first, last = said["data_offsets"]
        shape, kind = tuple(said["shape"]), said["dtype"]
        numbers = (first, last, *shape)
        if len(shape) > _MOST_AXES or any(type(n) is not int or n < 0 for n in numbers):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file}: its header does not describe {name!r}; download it again"
        ) from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(
            f"{file}: the tensor {name!r} has dtype {str(kind)[:60]}; only {', '.join(DTYPES)} are "
            "read"
        )
    if last - first != math.prod(shape) * DTYPES[kind].itemsize:
        raise ValueError(
            f"{file}: the size of the tensor {name!r} does not match its shape {shape}"
        )
    return TensorLocation(file, DTYPES[kind], begin + first, shape), begin + last


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
    wanted = tensor_shapes(pieces)
    missing = sorted(set(wanted) - set(shards.entries))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"{where} lacks the tensor {missing[0]!r}{more}, which {config} implies")
    idle = ("rotary_emb.inv_freq",)
    surplus = sorted(
        name
        for name in set(shards.entries) - set(wanted) - set(redundant)
        if not name.endswith(idle)
    )
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise ValueError(f"{where} holds the tensor {surplus[0]!r}{more}, which {config} excludes")
    for name, shape in wanted.items():
        if shards.entries[name].shape != shape:
            raise ValueError(
                f"{where}: the tensor {name!r} has shape {shards.entries[name].shape}, but "
                f"{config} requires {shape}"
            )
    for name, other in redundant.items():
        if name in shards.entries and not _are_equal(shards.read(name), shards.read(other)):
            raise ValueError(
                f"{where}: config.json ties the tensor {name!r} to {other!r}, but they differ; "
                "untie them in a copy of config.json to use the tensor, or remove it"
            )


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether two matrices have the same values, compared in parts to save memory."""
    parts = range(0, len(first), _ROWS)
    return first.shape == second.shape and all(
        np.array_equal(
            np.asarray(first[row : row + _ROWS], np.float32),
            np.asarray(second[row : row + _ROWS], np.float32),
            equal_nan=True,
        )
        for row in parts
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
    """Loads the parameters in `dtype` (None: as stored), with shardings from `place`.

    Each parameter is replaced by the result of `finish` before the next parameter is read. Before
    any parameter is read, `finish` is called with the shapes of all parameters.
    """

    def read(path: str, leaf: Any) -> Any:
        return jax.block_until_ready(finish(path, stored(path, leaf)))

    def stored(path: str, leaf: Any) -> jax.Array:
        parts = pieces[path]
        kind = _stored_dtype(shards, parts) if dtype is None else dtype
        sharding = place(path, leaf.shape)
        if sharding is None and jax.default_backend() == "cpu":
            return _on_host(shards, parts, leaf.shape, kind)
        if len(parts) == 1 and parts[0].place == ():
            return _put(shards, parts[0], leaf.shape, kind, sharding)
        return _stacked(shards, parts, leaf.shape, kind, sharding)

    map_named(finish, abstract)
    return map_named(read, abstract)


def _stored_dtype(shards: Tensors, parts: list[TensorPart]) -> np.dtype:
    """The dtype of a parameter's tensors, or float32 if they differ."""
    kinds = {shards.entries[piece.tensor].dtype for piece in parts}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


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
    depth = len(parts[0].place)
    inner = None if sharding is None else _without_axes(sharding, depth, len(shape))
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
        made = jnp.array(part(...), copy=True)
    else:
        made = jax.make_array_from_callback(shape, sharding, part)
    return made.block_until_ready()


def _without_axes(sharding: Sharding, count: int, ndim: int) -> Sharding:
    """The sharding of an array without its first `count` axes."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*spec[count:]), memory_kind=sharding.memory_kind
    )


def write_weights(
    directory: Path, params: Params, pieces: Mapping[str, list[TensorPart]], max_bytes: int
) -> None:
    """Writes safetensors files of at most `max_bytes` bytes each, or of one tensor."""
    values = dict(named_leaves(params))
    shapes = tensor_shapes(pieces)
    parts: dict[str, list[tuple[TensorPart, Any]]] = {name: [] for name in shapes}
    for path, own in pieces.items():
        if values[path].dtype not in _NAMES:
            raise ValueError(
                f"parameter {path} is {values[path].dtype}; only {', '.join(DTYPES)} are written"
            )
        for piece in own:
            parts[piece.tensor].append((piece, values[path]))
    sizes = {
        name: math.prod(shape) * parts[name][0][1].dtype.itemsize for name, shape in shapes.items()
    }
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = max_bytes
    for name, shape in shapes.items():
        if sizes[name] > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = shape
        room -= sizes[name]
    if len(shards) == 1:
        _write_file(directory / SINGLE, shapes, parts)
        return
    where = {}
    for number, own in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, own, parts)
        where |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, list[tuple[TensorPart, Any]]],
) -> None:
    """Writes a safetensors file, one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        dtype = np.dtype(parts[name][0][1].dtype)
        size = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            whole = np.empty(shape, parts[name][0][1].dtype)
            for piece, value in parts[name]:
                value = np.asarray(value[piece.place] if piece.place else value)
                whole[piece.part] = value.T if piece.is_transposed else value
            stream.write(whole.tobytes())
