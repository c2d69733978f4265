"""Loads a published model's weights from safetensors files into device arrays, and writes them.

Files are mapped into memory and copied tensor by tensor into the parameters; nothing is unpickled.
Host memory contains at most one device's shard of one parameter, besides mapped pages.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.hf.family import read_json
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


class TensorPart(NamedTuple):
    """The part of a parameter that one tensor contains.

    Attributes:
      tensor: name of the tensor.
      part: index into the tensor: (rows,), or (expert, rows) if the tensor contains all experts.
      shape: stored shape of this part.
      place: index into the parameter: (layer,), (layer, expert), or () for the whole parameter.
      is_transposed: whether the two axes are swapped: linear maps are stored as ``[out, in]`` and
        loaded as ``[in, out]``.
    """

    tensor: str
    part: tuple[int | slice, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]
    is_transposed: bool


def pieces_of(
    tensors: Mapping[str, str], abstract: Params, *, layers: Mapping[str, tuple[int, ...]]
) -> dict[str, list[TensorPart]]:
    """The pieces of every parameter, by the parameter's path (``blocks/mlp/up/kernel``).

    Args:
      tensors: the tensor of each parameter, as in `Family.tensors`.
      abstract: the parameters, or their shapes.
      layers: the layer indices of each stack of blocks.
    """
    order = {path: at for at, path in enumerate(tensors)}
    pieces: dict[str, list[TensorPart]] = {}
    row_of: dict[tuple[str, int], int] = {}
    rows = []
    for path, leaf in named_leaves(abstract):
        name = path.removeprefix("dense_").removeprefix("full_")
        if name not in tensors:
            raise ValueError(
                f"this family has no tensor for {path}; disable the feature that needs it"
            )
        pieces[path] = []
        rows.append((order[name], path, leaf, tensors[name]))
    for _, path, leaf, name in sorted(rows, key=lambda row: row[0]):
        is_of_experts = path.rpartition("/")[2].startswith("expert_")
        is_transposed = path.endswith("/kernel") or is_of_experts
        holds_all_experts = is_of_experts and "{e}" not in name
        depth = ("{i}" in name) + is_of_experts
        shape = leaf.shape[depth:][::-1] if is_transposed else leaf.shape[depth:]
        numbers = layers.get(path.partition("/")[0], ())
        for place in np.ndindex(*leaf.shape[:depth]):
            layer, expert = (*place, 0, 0)[:2]
            tensor = name.format(i=numbers[layer] if numbers else layer, e=expert)
            first = row_of.get((tensor, expert), 0)
            row_of[tensor, expert] = end = first + shape[0]
            part = (expert,) * holds_all_experts + (slice(first, end),)
            pieces[path].append(TensorPart(tensor, part, shape, place, is_transposed))
    return pieces


def tensor_shapes(pieces: Mapping[str, list[TensorPart]]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, derived from its pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in (piece for parts in pieces.values() for piece in parts):
        ends = [at.stop if isinstance(at, slice) else at + 1 for at in piece.part]
        known = shapes.get(piece.tensor, (0,) * len(ends))
        ends = [max(pair) for pair in zip(ends, known, strict=False)]
        shapes[piece.tensor] = (*ends, *piece.shape[1:])
    return shapes


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
        files, where = {SINGLE}, None
        if (directory / INDEX).exists():
            where = read_json(directory / INDEX).get("weight_map")
            if not isinstance(where, dict) or not where:
                raise ValueError(f"{directory / INDEX} has no weight_map; download it again")
            files = set(map(str, where.values()))
        elif not (directory / SINGLE).exists():
            raise ValueError(
                f"{directory} has neither {SINGLE} nor {INDEX}; use a directory with safetensors "
                "weights (other formats contain code, which is never run)"
            )
        self.entries: dict[str, TensorLocation] = {}
        for file in sorted(files):
            if Path(file).name != file:
                raise ValueError(
                    f"{directory / INDEX}: weight_map refers to {file!r}, which is not a file of "
                    "this directory"
                )
            for name, entry in _header(directory / file).items():
                if where is not None and where.get(name) != file:
                    raise ValueError(
                        f"{directory / file} has the tensor {name!r}, which {INDEX} does not list "
                        "there; download both again"
                    )
                if usual := name_of(name):
                    self.entries[usual] = entry

    def read(self, name: str) -> np.ndarray:
        """The tensor as a view of its file; deleting the view releases the mapped pages."""
        file, dtype, start, shape = self.entries[name]
        return np.memmap(file, dtype, "r", start, shape)


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


class WithMaskRow:
    """Stored tensors, whose `tables` have one more row for MASK, the mean of the others."""

    def __init__(self, tensors: Tensors, tables: Sequence[str]):
        self.entries, self._tensors, self._tables = tensors.entries, tensors, tables
        # Every device reads its part of a table.
        self._extended = functools.lru_cache(maxsize=1)(self._extend)

    def read(self, name: str) -> np.ndarray:
        return self._extended(name) if name in self._tables else self._tensors.read(name)

    def _extend(self, name: str) -> np.ndarray:
        table = np.asarray(self._tensors.read(name), np.float32)
        return np.concatenate([table, np.asarray(jnp.mean(table, axis=0, keepdims=True))])


# Memory alignment that XLA requires to use a NumPy array on the CPU without a copy.
_ALIGNMENT = 64
_ROWS = 512
_THREADS = min(8, os.cpu_count() or 1)

Place = Callable[[str, tuple[int, ...]], Sharding | None]
"""Maps the path and shape of a parameter to its sharding; None means the default device."""


def check_tensors(
    tensors: Tensors,
    pieces: Mapping[str, list[TensorPart]],
    *,
    where: str,
    unused: Collection[str] = (),
) -> None:
    """Raises ValueError for missing or unexpected tensors and wrong shapes; `unused` may be there.

    `where` is the name of the directory.
    """
    shapes, stored = tensor_shapes(pieces), tensors.entries
    surplus = stored.keys() - shapes.keys() - set(unused)
    surplus = {name for name in surplus if not name.endswith("rotary_emb.inv_freq")}
    for verb, names in (("lacks", shapes.keys() - stored.keys()), ("holds", surplus)):
        if names:
            raise ValueError(f"{where} {verb} the tensor {min(names)!r}, unlike its config")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ValueError(
                f"{where}: the tensor {name!r} has shape {brief(stored[name].shape)}, but the "
                f"config requires {shape}"
            )


def read_params(
    tensors: Tensors,
    pieces: Mapping[str, list[TensorPart]],
    abstract: Params,
    *,
    dtype: np.dtype | None,
    place: Place | None,
) -> Params:
    """Loads the parameters in `dtype`, with shardings from `place`. The dtype None is that of a
    parameter's tensors, or float32 if they differ.
    """

    def read(path: str, leaf: Any) -> Any:
        parts, kind = pieces[path], dtype
        if kind is None:
            kinds = {tensors.entries[piece.tensor].dtype for piece in parts}
            kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

        def shard(index: Any) -> np.ndarray:
            spans = [at.indices(size) for at, size in zip(index, leaf.shape, strict=True)]
            return _read_shard(tensors, parts, [slice(*span[:2]) for span in spans], kind)

        sharding = None if place is None else place(path, leaf.shape)
        if sharding is None:
            parameter = jax.device_put(shard((slice(None),) * leaf.ndim))
        else:
            indices = sharding.addressable_devices_indices_map(leaf.shape)
            parts_of_devices = [
                jax.block_until_ready(jax.device_put(shard(index), device, may_alias=False))
                for device, index in indices.items()
            ]
            parameter = jax.make_array_from_single_device_arrays(
                leaf.shape, sharding, parts_of_devices
            )
        return jax.block_until_ready(parameter)

    return map_named(read, abstract)


def _read_shard(
    tensors: Tensors, parts: list[TensorPart], spans: list[slice], dtype: np.dtype
) -> np.ndarray:
    """The part of a parameter in `spans`; several threads copy its pieces to their positions."""
    shape = [span.stop - span.start for span in spans]
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    whole = memory[first : first + size].view(dtype).reshape(shape)
    depth = len(parts[0].place)
    inner = tuple(spans[depth:])

    def fill(piece: TensorPart) -> None:
        place = [at - span.start for at, span in zip(piece.place, spans, strict=False)]
        if all(0 <= at < end for at, end in zip(place, shape, strict=False)):
            stored = tensors.read(piece.tensor)[piece.part]
            stored = stored[inner[::-1] if piece.is_transposed else inner]
            _copy(stored.astype(dtype, copy=False), whole[tuple(place)], piece.is_transposed)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fill, parts))
    return whole


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


def write_weights(
    directory: Path, params: Params, pieces: Mapping[str, list[TensorPart]], max_bytes: int
) -> None:
    """Writes safetensors files of at most `max_bytes` bytes each, or of one tensor."""
    values = dict(named_leaves(params))
    parts: dict[str, list[tuple[TensorPart, Any]]] = {}
    for path, of_path in pieces.items():
        for piece in of_path:
            parts.setdefault(piece.tensor, []).append((piece, values[path]))
    shapes = tensor_shapes(pieces)
    sizes = {
        name: math.prod(shape) * parts[name][0][1].dtype.itemsize for name, shape in shapes.items()
    }
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
        tensors = {}
        for name in names:
            tensors[name] = np.empty(shapes[name], parts[name][0][1].dtype)
            for piece, value in parts[name]:
                value = np.asarray(value[piece.place] if piece.place else value)
                tensors[name][piece.part] = value.T if piece.is_transposed else value
        # `save_file` would create a file that other users cannot read.
        (directory / file).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
        where |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
