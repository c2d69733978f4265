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

    Six for each parameter of a matrix and token, and twelve for each feature of a layer and pair of
    positions that see each other, half of the pairs in a causal model (PaLM, Chowdhery et al. 2022,
    appendix B). A tied embedding table counts once, as the LM head.

    Args:
      params: arrays or their shapes.
      config: of the model.
      num_rows: rows of a step.
      num_positions: tokens of a row.
    """
    in_products = sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if _multiplies(path, leaf, config)
    )
    pairs = num_positions / 2 if config.attention_type == "causal" else num_positions
    per_token = 6 * in_products + 12 * config.depth * config.width * pairs
    return float(num_rows * num_positions * per_token)


def _multiplies(path: tuple[Any, ...], leaf: Any, config: ModelConfig) -> bool:
    is_table = path_name(path).endswith("embedding")
    return len(leaf.shape) >= 2 and (config.tied_head or not is_table)
