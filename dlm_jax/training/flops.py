"""The work that a model needs, however a program goes about it."""

from __future__ import annotations

import math
from typing import Any

import jax

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.sharding import path_name
from dlm_jax.types import Params


def model_flops(params: Params, config: ModelConfig, *, num_rows: int, num_positions: int) -> float:
    """FLOP of one training step: forward and backward of the model, without recomputation.

    Six for each parameter of a matrix and token that meet, and twelve for each feature of a layer's
    heads and pair of positions that see each other, half of the pairs in a causal model (PaLM,
    Chowdhery et al. 2022, appendix B). A tied embedding table counts once, as the LM head.

    Args:
      params: arrays or their shapes.
      config: of the model.
      num_rows: rows of a step.
      num_positions: tokens of a row.
    """
    in_products = sum(
        math.prod(leaf.shape) * _share_met(path, leaf, config)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    )
    inner = config.heads * config.size_of_head(config.width, config.heads)
    pairs = num_positions / 2 if config.attention_type == "causal" else num_positions
    per_token = 6 * in_products + 12 * config.depth * inner * pairs
    return float(num_rows * num_positions * per_token)


def _share_met(path: tuple[Any, ...], leaf: Any, config: ModelConfig) -> float:
    """The share of a parameter that a token is multiplied with: of experts, those it is sent to."""
    last = path_name(path).split("/")[-1]
    if last.startswith("expert_"):
        return config.experts_per_token / config.experts
    return float(last == "kernel" or (last == "embedding" and config.tied_head))
