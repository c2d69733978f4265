"""The one small model that the tests share, so that it compiles once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import ModelConfig, OptimConfig
from dlm_jax.distributed.partitions import axes_of, named_leaves
from dlm_jax.model.transformer import build
from dlm_jax.training.optimisers import make_optimizer, rates_of
from dlm_jax.types import Network, Params

VOCAB_SIZE = 12
MASK, PAD, BOS, EOS = 8, 9, 10, 11
BANNED = (MASK, PAD, BOS)
SPACE = 7
SHAPE = {"depth": 2, "width": 16, "heads": 2, "vocab_size": VOCAB_SIZE}


def config(**changes) -> ModelConfig:
    return ModelConfig(**(SHAPE | changes))


def network() -> Network:
    return build(config())


def matrices(network: Network) -> set[str]:
    """The paths of the matrices that a network declares."""
    return {path for path, axes in named_leaves(axes_of(network)) if axes.is_matrix}


def optimizer(config: OptimConfig, *, num_steps: int, network: Network | None = None, **changes):
    """The optimiser of the main group of a run."""
    rates = rates_of(config, num_steps=num_steps, **changes)
    return make_optimizer(config, rates, axes=axes_of(network or build(ModelConfig(**SHAPE))))


def random_params(network: Network, seed: int = 0, scale: float = 0.3) -> Params:
    """Parameters as after training: no projection is zero, so that everything matters."""
    params = jax.jit(network.init)(jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [
        leaf + jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves
    ]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def params() -> Params:
    return random_params(network())


@functools.cache
def network_with_heads() -> Network:
    """The shared model with a sampler head of two neighbours a side, and a critic."""
    return build(config(add_sampler_head=True, sampler_context=2, add_critic_head=True))


@functools.cache
def params_with_heads() -> Params:
    return random_params(network_with_heads())


@functools.partial(jax.jit, static_argnums=0)
def logits(network: Network, params: Params, tokens_BL: jax.Array, length_B: jax.Array):
    """All logits ``[B, L, V]``, which only a test can afford."""
    hidden_BLD, _ = network.trunk(params, tokens_BL, length_B, None)
    flat = network.readout(params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1]))
    return flat.reshape(*tokens_BL.shape, -1)


def row_logits(tokens_L, length: int | None = None):
    """Logits ``[L, V]`` of the shared model for one row."""
    tokens = jnp.asarray(tokens_L)[None]
    return logits(network(), params(), tokens, jnp.array([length or tokens.shape[1]]))[0]
