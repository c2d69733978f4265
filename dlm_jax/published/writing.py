"""Writes a model as a published directory that the family's own programs can read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.config import Config, SampleConfig
from dlm_jax.data import HubTokenizer
from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.published.chat import ChatTemplate
from dlm_jax.published.directory import implied_sample
from dlm_jax.published.families import family_for
from dlm_jax.published.family import Family, TensorPart, pieces_of, tensor_shapes
from dlm_jax.published.special import settings_fields, write_tokenizer
from dlm_jax.published.tensors import DTYPES, INDEX, SINGLE
from dlm_jax.store.files import refused_unless_full
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
    """Writes the directory in one atomic move and returns the names of its files.

    Tensors are stored in the dtypes of the parameters.

    Args:
      path: a directory that does not exist yet.
      config: the model's config; its recommended settings are written to generation_config.json.
      params: the model's parameters; heads other than the LM head are not written.
      tokenizer: a `HubTokenizer`.
      family: target family; None means the first family that can express all settings.
      chat: the model's chat template.
      more_eos_ids: ids that end a generation, besides the tokenizer's EOS.
      max_shard_bytes: maximum size of a weights file in bytes.

    Raises:
      OSError: the disk is full.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists already; choose a new directory")
    if not isinstance(tokenizer, HubTokenizer):
        raise ValueError(
            "the tokenizer of the model is not from a published model; use train.init_from to "
            "train with such a tokenizer"
        )
    found = family_for(config.model, family)
    kept = {name: tree for name, tree in params.items() if not name.endswith("_head")}
    abstract = jax.eval_shape(lambda: kept)
    pieces = pieces_of(found.sources(config.model), abstract, layers=config.model.layers)
    fields = _config_fields(found, config, tokenizer, dtype=str(kept["embedding"].dtype))
    length = min(found.trained_length or config.data.seq_len, config.data.seq_len)
    settings = _settings(found, config, implied_sample(found, config.model, length))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with refused_unless_full(target, "name another"):
            temporary.mkdir(parents=True)
            text = json.dumps(fields, indent=2, sort_keys=True)
            (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
            write_tokenizer(
                temporary, tokenizer, chat, more_eos=more_eos_ids, settings=settings,
                says_mask=found.generates_from_mask,
            )  # fmt: skip
            _write_weights(temporary, kept, pieces, max_shard_bytes)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file.name for file in target.iterdir())


def _settings(family: Family, config: Config, implied: SampleConfig) -> dict[str, Any]:
    """The fields of generation_config.json for the settings, including those of the family."""
    sample, own = config.sample, {}
    if family.spoken is not None and family.recommended is not None and sample != implied:
        own = family.spoken(sample, config.model)
        length = own.get("max_new_tokens", implied.gen_length)
        given = family.recommended(own, config.model)
        implied = dataclasses.replace(implied, gen_length=length, **given)
    return settings_fields(sample, implied) | own


def _config_fields(
    family: Family, config: Config, tokenizer: HubTokenizer, *, dtype: str
) -> dict[str, Any]:
    fields = family.write(config.model) | {
        family.max_length: config.data.seq_len, "mask_token_id": tokenizer.mask_id,
        "pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype, "use_cache": False,
    }  # fmt: skip
    if tokenizer.bos_id is not None:
        fields["bos_token_id"] = tokenizer.bos_id
    whole = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    if not family.within:
        return fields | whole
    outer = {name: fields[name] for name in family.outside}
    inner = {name: value for name, value in fields.items() if name not in outer}
    return outer | whole | {family.within: inner}


def _write_weights(
    directory: Path, params: Params, pieces: Mapping[str, list[TensorPart]], max_bytes: int
) -> None:
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
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape),
                        "data_offsets": [end, end + size]}  # fmt: skip
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
