"""What a run that begins with a published model takes from its directory: shape and tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dlm_jax.config import Config, ModelConfig
from dlm_jax.data import Tokenizer
from dlm_jax.published import is_published, read_shape

# Settings that parameters do not depend on: the config's own count.
_FREE = (
    "remat", "compute_dtype", "add_sampler_head", "sampler_context", "sampler_width",
    "sampler_residual", "add_critic_head", "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip
# What turns a causal model into a diffusion one: the config's own count there, too.
_TURNED = ("attention_type", "block_length", "logit_alignment", "start_id")


def adopted(config: Config) -> tuple[Config, Tokenizer | None]:
    """The config with ``[model]`` of the published directory in train.init_from, and its tokenizer.

    Settings of ``[model]`` at their defaults are those of the directory; others must agree with it.
    Whether and how a causal model is turned into a diffusion one is what the config says.

    Returns:
      The config as it is, and None, where train.init_from is no published directory.

    Raises:
      ValueError: the directory cannot be used, or the config asks for another model.
    """
    source = config.train.init_from
    if not source or not is_published(source):
        return config, None
    theirs, tokenizer = read_shape(Path(source))
    default, settings = ModelConfig(), {}
    free = (*_FREE, *(_TURNED if theirs.attention_type == "causal" else ()))
    for field in dataclasses.fields(ModelConfig):
        ours, other = getattr(config.model, field.name), getattr(theirs, field.name)
        settings[field.name] = ours if field.name in free else other
        if field.name not in free and ours not in (other, getattr(default, field.name)):
            raise ValueError(
                f"train.init_from={source} has model.{field.name}={other!r}, and the config asks "
                f"for {ours!r}; leave it out"
            )
    model = ModelConfig(**settings)
    return dataclasses.replace(config, model=model), tokenizer
