"""Reads a published model from a directory in Hub layout; code in the directory never runs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlm_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, SampleConfig
from dlm_jax.data import HubTokenizer
from dlm_jax.model.transformer import build
from dlm_jax.published.chat import ChatTemplate
from dlm_jax.published.families import family_of
from dlm_jax.published.family import Family, FileFields, pieces_of, read_json
from dlm_jax.published.special import read_chat, read_settings, read_tokenizer
from dlm_jax.published.tensors import Finish, Place, Shards, check_tensors, read_params
from dlm_jax.randomness import key_of
from dlm_jax.types import Params

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Published:
    """The content of a published directory."""

    family: Family
    config: Config
    params: Params
    tokenizer: HubTokenizer
    chat: ChatTemplate | None
    presets: Mapping[str, Mapping[str, Any]]
    more_eos_ids: tuple[int, ...]
    settings: Mapping[str, Any]


def is_published(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a directory with a config.json."""
    return (Path(path) / CONFIG).is_file()


def read_published(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    place: Place | None = None,
    finish: Finish = lambda path, parameter: parameter,
) -> Published:
    """Loads the model in a directory, tensor by tensor.

    Args:
      path: directory with config.json, safetensors and a tokenizer.
      dtype: dtype of parameters and computation, ``float32`` or ``bfloat16``; None means the stored
        dtype.
      place: maps a parameter's path and shape to its sharding; None means the default device.
      finish: converts each parameter to its final form as it is loaded.
    """
    directory = Path(path)
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} is unknown; use 'float32' or 'bfloat16'")
    family, model, longest = read_model(directory)
    length = min(family.trained_length or longest, longest)
    own = family.recommended
    said = read_settings(directory, length, lambda said: {} if own is None else own(said, model))
    shards = Shards(directory, family.name_of)
    tokenizer, more_eos = read_tokenizer(
        directory, family, family.said(read_json(directory / CONFIG)), vocab_size=model.vocab_size
    )
    if model.attention_type == "causal":
        begins = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        model = dataclasses.replace(model, start_id=begins)
    chat = read_chat(directory, tokenizer)
    abstract = jax.eval_shape(build(model).init, key_of(0))
    sources = family.sources(model)
    pieces = pieces_of(sources, abstract, layers=model.layers)
    redundant = (str(sources["head/kernel"]),) if model.tied_head else ()
    check_tensors(shards, pieces, redundant=redundant, where=str(directory))
    stored = shards.entries[pieces["embedding"][0].tensor].dtype.name
    model = dataclasses.replace(
        model, compute_dtype="bfloat16" if (dtype or stored) == "bfloat16" else "float32"
    )
    params = read_params(
        shards, pieces, abstract, dtype=None if dtype is None else np.dtype(jax.numpy.dtype(dtype)),
        place=place or (lambda path, shape: None), finish=finish,
    )  # fmt: skip
    presets = {name: _fitted(preset, model) for name, preset in family.presets.items()}
    config = Config(
        model=model, data=DataConfig(seq_len=length),
        objective=ObjectiveConfig(process=family.process),
        sample=_recommended(implied_sample(family, model, length), said),
    )  # fmt: skip
    return Published(family, config, params, tokenizer, chat, presets, more_eos, said)


def read_shape(directory: Path) -> tuple[ModelConfig, HubTokenizer]:
    """A directory's model config and tokenizer, without weights."""
    family, model, _ = read_model(directory)
    said = family.said(read_json(directory / CONFIG))
    return model, read_tokenizer(directory, family, said, vocab_size=model.vocab_size)[0]


def read_model(directory: Path) -> tuple[Family, ModelConfig, int]:
    """A directory's family, model config, and maximum number of tokens per row."""
    where = directory / CONFIG
    said = read_json(where)
    family = family_of(said, str(where))
    said = family.said(said)
    fields = FileFields(said, str(where))
    longest = fields.take(family.max_length, int, 4096)
    try:
        model = family.read(fields)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(where)) else f"{where}: {text}") from None
    fields.finish(family.idle)
    return family, model, longest


def _fitted(preset: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The preset; if it has `threshold_alone`, its block lengths are adapted to the model."""
    settings, unit = dict(preset), model.block_length
    if settings.get("threshold_alone"):
        size = math.gcd(settings["block_length"], unit)
        settings |= {"threshold_alone": unit, "block_length": size}
    return settings


def _recommended(implied: SampleConfig, said: Mapping[str, Any]) -> SampleConfig:
    """A directory's settings; a length without steps keeps the number of tokens per step."""
    if "temperature" in said:
        said = {"temperature_end": -1.0} | dict(said)
    sample = dataclasses.replace(implied, **said)
    if "gen_length" in said and "steps" not in said:
        tokens = implied.gen_length or implied.steps
        steps = -(-implied.steps * sample.gen_length // tokens)
        sample = dataclasses.replace(sample, steps=max(steps, 1))
    return sample


def implied_sample(family: Family, model: ModelConfig, length: int) -> SampleConfig:
    """The first preset of a family, adapted to a canvas of `length` tokens."""
    settings = _fitted(next(iter(family.presets.values()), {}), model)
    if settings.get("gen_length", 0) > length:
        settings |= {"gen_length": length, "steps": length}
    return SampleConfig(**settings)
