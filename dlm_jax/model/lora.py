"""Low-rank adapters for the matrices of the blocks (LoRA, Hu et al. 2021).

A target ``W`` becomes ``W + (alpha / rank) A B`` at run time, with ``A [in, rank]`` random and ``B
[rank, out]`` initially zero. The adapters are the parameters under ``adapters``; all others are
frozen. The target ``mask`` is a vector that is added to the embedding of the last id, which is MASK
in a model that was converted from a causal one and had none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.config import ModelConfig
from dlm_jax.types import Params

GROUP = "adapters"
MASK_ROW = "mask"
_SALT = 0x6C6F7261
STACKS = ("dense_blocks", "blocks", "full_blocks")
"""Top-level names of the stacks of blocks, in order."""


def with_adapters(key: jax.Array, params: Params, axes: Params, config: ModelConfig) -> Params:
    """Adds new adapters to the parameters if ``lora_rank`` is not 0. `axes` are their `Axes`."""
    if not config.lora_rank:
        return params
    made: dict[str, Any] = {}
    key = jax.random.fold_in(key, _SALT)
    for stack in STACKS:
        for part, maps in params.get(stack, {}).items():
            for name, linear in maps.items() if isinstance(maps, dict) else ():
                if name not in config.lora_targets or not isinstance(linear, dict):
                    continue
                if "kernel" in linear and axes[stack][part][name]["kernel"].is_matrix:
                    key, own = jax.random.split(key)
                    *lead, fan_in, fan_out = linear["kernel"].shape
                    drawn = jax.random.normal(own, (*lead, fan_in, config.lora_rank), jnp.float32)
                    zeros = jnp.zeros((*lead, config.lora_rank, fan_out), jnp.float32)
                    pair = {"a": drawn * fan_in**-0.5, "b": zeros}
                    made.setdefault(stack, {}).setdefault(part, {})[name] = pair
    found = {name for parts in made.values() for maps in parts.values() for name in maps}
    if MASK_ROW in config.lora_targets:
        made[MASK_ROW], found = {"row": jnp.zeros(config.width, jnp.float32)}, {*found, MASK_ROW}
    if missing := set(config.lora_targets) - found:
        raise ValueError(
            f"model.lora_targets contains {sorted(missing)[0]!r}, which is not a matrix of the "
            "blocks of this model; use query, key, value, out, gate, up, down or mask"
        )
    return params | {GROUP: made}


def stacks_of(params: Params) -> dict[str, Params]:
    """The stacks of blocks in the order of `STACKS`, each with its adapters under ``adapters``."""
    own = params.get(GROUP, {})
    return {
        name: params[name] | ({GROUP: own[name]} if name in own else {})
        for name in STACKS
        if name in params
    }


def applied(block: Params, config: ModelConfig) -> Params:
    """The parameters of a block or a stack of blocks, with the adapters added to the matrices.

    The matrices are frozen: their gradient is zero.
    """
    if GROUP not in block:
        return block
    scale = config.lora_alpha / config.lora_rank
    held = jax.lax.stop_gradient({name: part for name, part in block.items() if name != GROUP})
    for part, maps in block[GROUP].items():
        for name, pair in maps.items():
            kernel = held[part][name]["kernel"]
            added = (scale * pair["a"]) @ pair["b"]
            linear = held[part][name] | {"kernel": kernel + added.astype(kernel.dtype)}
            held[part] = held[part] | {name: linear}
    return held


def merged(params: Params, config: ModelConfig) -> Params:
    """The parameters of an equivalent model without adapters."""
    if GROUP not in params:
        return params
    whole = {name: tree for name, tree in params.items() if name not in (GROUP, *STACKS)}
    if MASK_ROW in params[GROUP]:
        row = params[GROUP][MASK_ROW]["row"]
        table = jnp.asarray(whole["embedding"])
        whole["embedding"] = table.at[-1].add(row.astype(table.dtype))
    return whole | {name: applied(blocks, config) for name, blocks in stacks_of(params).items()}
