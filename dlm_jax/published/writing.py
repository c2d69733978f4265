"""A model written as a published directory, which its family's own programs read back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.config import Config
from dlm_jax.data import HubTokenizer
from dlm_jax.published.chat import ChatTemplate
from dlm_jax.published.families import family_for
from dlm_jax.published.family import Family
from dlm_jax.published.loading import implied_sample
from dlm_jax.published.names import Piece, leaves, pieces_of, shape_of
from dlm_jax.published.shards import DTYPES, INDEX, SINGLE
from dlm_jax.published.special import settings_fields, write_tokenizer
from dlm_jax.storage import refused_unless_full
from dlm_jax.types import Params

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_published(
    path: str | os.PathLike[str],
    config: Config,
    params: Params,
    tokenizer: Any,
    *,
    family: str | None = None,
    chat: ChatTemplate | None = None,
    more_eos_ids: tuple[int, ...] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Names of the files written; the directory appears whole, in one move.

    Numbers are stored as the parameters hold them.

    Args:
      path: a directory that does not exist.
      config: of the model, whose recommended settings go to generation_config.json.
      params: its parameters; heads beside the LM head are left out, as no family has them.
      tokenizer: a `HubTokenizer`.
      family: as which it is written; None: the first that says all of its settings.
      chat: its chat template.
      more_eos_ids: ids that end a generation beside that of the tokenizer.
      max_shard_bytes: of one file of weights.

    Raises:
      ValueError: no family describes the model, its tokenizer is of another kind, or the directory
        exists or cannot be written.
      OSError: the disk is full.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists; name a directory that does not")
    if not isinstance(tokenizer, HubTokenizer):
        raise ValueError(
            "the model's tokenizer is none of a published model; train with one that is, by "
            "train.init_from"
        )
    found = family_for(config.model, family)
    kept = {name: tree for name, tree in params.items() if not name.endswith("_head")}
    abstract = jax.eval_shape(lambda: kept)
    pieces = pieces_of(
        found.sources(config.model), abstract, dense_layers=config.model.dense_layers
    )
    fields = _config_fields(found, config, tokenizer, dtype=str(kept["embedding"].dtype))
    length = min(found.trained_length or config.data.seq_len, config.data.seq_len)
    settings = settings_fields(config.sample, implied_sample(found, config.model, length))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with refused_unless_full(target, "name another"):
            temporary.mkdir(parents=True)
            text = json.dumps(fields, indent=2, sort_keys=True)
            (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
            write_tokenizer(temporary, tokenizer, chat, more_eos=more_eos_ids, settings=settings)
            _write_weights(temporary, kept, pieces, max_shard_bytes)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file.name for file in target.iterdir())


def _config_fields(
    family: Family, config: Config, tokenizer: HubTokenizer, *, dtype: str
) -> dict[str, Any]:
    """What config.json says."""
    fields = family.write(config.model) | {
        "architectures": [family.architectures[0]], "model_type": family.model_type,
        family.max_length: config.data.seq_len, "mask_token_id": tokenizer.mask_id,
        "pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype, "use_cache": False,
    }  # fmt: skip
    if tokenizer.bos_id is not None:
        fields["bos_token_id"] = tokenizer.bos_id
    return fields


def _write_weights(
    directory: Path, params: Params, pieces: Mapping[str, list[Piece]], max_bytes: int
) -> None:
    values = dict(leaves(params))
    plan = _plan(values, pieces)
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, (shape, dtype, _) in plan.items():
        size = int(np.prod(shape)) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        _write_file(directory / SINGLE, {name: plan[name] for name in plan}, values)
        return
    where = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, {name: plan[name] for name in names}, values)
        where |= dict.fromkeys(names, file)
    total = sum(int(np.prod(s)) * d.itemsize for s, d, _ in plan.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


_Plan = dict[str, tuple[tuple[int, ...], np.dtype, list[tuple[str, Piece]]]]


def _plan(values: Mapping[str, Any], pieces: Mapping[str, list[Piece]]) -> _Plan:
    """Of each tensor its shape, its dtype, and the pieces that it is made of."""
    plan: _Plan = {}
    for path, parts in pieces.items():
        dtype = np.dtype(values[path].dtype)
        if dtype not in _NAMES:
            raise ValueError(f"parameter {path} is {dtype}; only {', '.join(DTYPES)} are written")
        for piece in parts:
            shape = shape_of(piece, values[path].shape)
            rows = piece.rows[1] if piece.rows else shape[0]
            before = plan.get(piece.tensor, ((0,), dtype, []))
            whole = (max(rows, before[0][0]), *shape[1:])
            plan[piece.tensor] = (whole, dtype, [*before[2], (path, piece)])
    return plan


def _write_file(file: Path, plan: _Plan, values: Mapping[str, Any]) -> None:
    """Writes a safetensors file, one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype, _) in plan.items():
        size = int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape),
                        "data_offsets": [end, end + size]}  # fmt: skip
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape, dtype, parts in plan.values():
            for value in _values(shape, dtype, parts, values):
                stream.write(np.ascontiguousarray(value).tobytes())


def _values(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: list[tuple[str, Piece]],
    values: Mapping[str, Any],
) -> Iterator[np.ndarray]:
    whole = np.empty(shape, dtype)
    for path, piece in parts:
        value = np.asarray(values[path][piece.place] if piece.place else values[path])
        rows = slice(None) if piece.rows is None else slice(*piece.rows)
        whole[rows] = value.T if piece.is_transposed else value
    yield whole
