"""The mixture of objectives that a config asks for."""

from __future__ import annotations

import functools

from dlm_jax.config import ModelConfig, ObjectiveConfig
from dlm_jax.data import Tokenizer
from dlm_jax.diffusion.corruption import SCHEDULES
from dlm_jax.diffusion.objectives import (
    Corruption,
    Mixture,
    Objective,
    denoising,
    elbo,
    next_token,
    proofreading,
)


def make_mixture(config: ObjectiveConfig, model: ModelConfig, tokenizer: Tokenizer) -> Mixture:
    """The objectives as `config` mixes them, or the next token for a causal model."""
    if model.attention_type == "causal":
        return Mixture({"next_token": lambda batch, key: next_token(batch)}, {"next_token": 1.0})
    mask_id = tokenizer.mask_id
    never = {*tokenizer.banned_ids, mask_id, tokenizer.pad_id, tokenizer.eos_id}
    random_ids = tuple(token for token in range(tokenizer.vocab_size) if token not in never)
    corruption = Corruption(**{name: getattr(config, name) for name in Corruption._fields})
    schedule = SCHEDULES[config.schedule](config.schedule_power)
    objectives: dict[str, Objective] = {
        "elbo": functools.partial(elbo, schedule=schedule, mask_id=mask_id),
        "denoising": functools.partial(
            denoising, corruption=corruption, mask_id=mask_id, random_ids=random_ids
        ),
        "proofreading": functools.partial(
            proofreading, max_ratio=config.misprint_ratio, mask_id=mask_id
        ),
    }
    shares = {
        "elbo": 1.0 - config.denoising_share - config.proofreading_share,
        "denoising": config.denoising_share,
        "proofreading": config.proofreading_share,
    }
    used = [name for name, share in shares.items() if share > 1e-6]
    return Mixture(
        {name: objectives[name] for name in used},
        {name: shares[name] for name in used},
        random_length_share=config.random_length_share,
    )
