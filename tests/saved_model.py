"""The shared toy model in a checkpoint, as a run would have left it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import toy
import toy_model

import dlm_jax.config as configs
from dlm_jax.checkpoint import Checkpoints
from dlm_jax.config import Config, DataConfig, SampleConfig

CONFIG = Config(
    model=toy.config(vocab_size=toy_model.TOKENIZER.vocab_size),
    data=DataConfig(seq_len=toy_model.MODEL.max_length),
    sample=SampleConfig(steps=6, temperature=0.8),
)


def save(run_dir: Path, **model_changes) -> Path:
    """The directory, with one checkpoint; `model_changes` make its config lie about its shape."""
    model = dataclasses.replace(CONFIG.model, **model_changes)
    meta = {
        "config": configs.to_dict(dataclasses.replace(CONFIG, model=model)),
        "tokenizer": toy_model.TOKENIZER.to_json(),
        "corpus": {"name": "toy", "sha256": "0"},
    }
    with Checkpoints(run_dir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(7, {"params": toy_model.MODEL.params}, meta)
    return run_dir
