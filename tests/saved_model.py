"""The shared toy model in a checkpoint, as a run would have left it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import toy
import toy_model

import dlm_jax.config as configs
from dlm_jax.config import Config, DataConfig, SamplingParams
from dlm_jax.store import Checkpoints

CONFIG = Config(
    model=toy.config(vocab_size=toy_model.TOKENIZER.vocab_size),
    data=DataConfig(seq_len=toy_model.MODEL.max_length),
    sample=SamplingParams(steps=6, temperature=0.8),
)


def save(
    run_dir: Path, *, sha256: str = "0", data: dict[str, Any] | None = None, **model_changes
) -> Path:
    """The directory, with one checkpoint.

    `data` changes what its config says of its text, `model_changes` make it lie about its shape.
    """
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, **model_changes),
        data=dataclasses.replace(CONFIG.data, **(data or {})),
    )
    meta = {
        "config": configs.to_dict(config),
        "tokenizer": toy_model.TOKENIZER.to_json(),
        "corpus": {"name": "toy", "sha256": sha256},
    }
    with Checkpoints(run_dir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(7, {"params": toy_model.MODEL.params}, meta)
    return run_dir
