"""A model written as the directory that its family's own programs read."""

from __future__ import annotations

import dataclasses
import os

from dlm_jax.inference.model import Model
from dlm_jax.model.lora import merged
from dlm_jax.published import write_published


def export(
    model: Model,
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes a published directory (config.json, safetensors, tokenizer); the names of its files.

    `dlm_jax.load` and the family's own programs read it. Numbers are stored as the model holds
    them, with adapters merged into the matrices; heads beside the LM head are left out. What the
    model recommends is in generation_config.json. The directory appears whole, in one move.

    Args:
      model: from `dlm_jax.load`: a published model, or a run that began with one.
      path: a directory that does not exist.
      family: as which it is written (`docs/published.md`); None: as what it was loaded, or else the
        first family that says all of its settings.
      max_shard_bytes: of one file of weights.

    Raises:
      ValueError: no family describes the model, its tokenizer is of another kind, or the directory
        exists or cannot be written.
    """
    if model.config is None:
        raise ValueError("the model is a network of your own, which no published family describes")
    config = model.config
    params = merged(model.params, config.model)
    bare = dataclasses.replace(
        config, model=dataclasses.replace(config.model, lora_rank=0), sample=model.sample
    )
    return write_published(
        path, bare, params, model.tokenizer, family=family or model.family or None,
        chat=model.chat, more_eos_ids=model.more_eos_ids, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
