"""The Transformer, and the function that builds the network of a config."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.model.block import Block
from dlm_jax.model.cached import RowTrunk
from dlm_jax.model.diffusion_gemma import DiffusionGemma
from dlm_jax.model.moe import MoeTransformer
from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class Transformer(RowTrunk):
    """A Transformer with the same MLP in all layers."""

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        return Block(self.config, rngs=rngs) if name == "blocks" else super().make(name, rngs)

    def __call__(self, params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        (blocks,) = self.layers(params)
        angles = self.angles(tokens_BL.shape[1])
        x_BLD = self.embed(params, self.inputs(tokens_BL))
        x_BLD = blocks.scan(Block.__call__, x_BLD, length_B, angles)
        return self.outputs(params, x_BLD)


@functools.cache
def build(config: ModelConfig) -> Network:
    """Builds the network of `config` as pure functions; calls with equal configs return the same
    `Network`.
    """
    if config.vocab_size < 1:
        raise ValueError("model.vocab_size=0 is unresolved; set it to the tokenizer's vocabulary")
    if config.has_start and config.start_id < 0:
        raise ValueError("model.start_id=-1 is unresolved; set it to the tokenizer's MASK")
    if config.attention_type == "canvas":
        return DiffusionGemma(config).functions()
    if config.experts or config.dense_layers:
        return MoeTransformer(config).functions()
    return Transformer(config).functions()
