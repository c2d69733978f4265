"""The sampler head, which predicts tokens in holes from hidden vectors and neighbours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.config import Config, HeadsConfig, ModelConfig
from dlm_jax.objectives.forward_process import noise_process
from dlm_jax.objectives.losses import Loss, cross_entropy
from dlm_jax.objectives.objective import Drawn, Head
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.types import Network, Params, live_positions, text_starts

SAMPLER = "sampler_head"


def layers(config: ModelConfig, linear: Callable[..., Any], norm: Any) -> dict[str, Any]:
    """A two-layer MLP over a position's hidden vector and the embeddings of its neighbours.

    The LM head maps the MLP's features to logits. The input includes ``model.sampler_context``
    neighbours on each side, by default one. With ``model.sampler_residual``, the second layer has
    no SiLU and is initialised to zero, and its output is added to the hidden vector. The layers
    are created by ``linear(fan_in, fan_out, scale=..., axes=...)`` and ``norm(size)``.
    """
    width = config.width
    num_inputs, scale = 1 + 2 * config.sampler_context, 0.0 if config.sampler_residual else 1.0
    return {
        "inner": linear(num_inputs * width, width, scale=1.0, axes=("embed", "mlp")),
        "inner_norm": norm(width),
        "out": linear(width, width, scale=scale, axes=("mlp", "embed")),
        "out_norm": norm(width),
    }


def function(
    config: ModelConfig, layers_of: Callable[[Params], Any], readout: Any
) -> SamplerReadout:
    """The logits of the head; the nearest neighbour comes first, and missing ones are zero.

    ``layers_of(params)`` has the layers as attributes, and ``readout`` is `Network.readout`.
    """

    def features(layers: Any, inner_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        x_ND = layers.inner_norm(jax.nn.silu(inner_NH))
        if config.sampler_residual:
            return layers.out_norm(hidden_ND + layers.out(x_ND))
        return layers.out_norm(jax.nn.silu(layers.out(x_ND)))

    def whole(
        params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
    ) -> jax.Array:
        layers, num = layers_of(params), hidden_ND.shape[0]
        parts = (left_NCD.reshape(num, -1), hidden_ND, right_NCD.reshape(num, -1))
        together = jnp.concatenate([x.astype(hidden_ND.dtype) for x in parts], axis=1)
        return readout(params, features(layers, layers.inner(together), hidden_ND))

    def sides(params: Params, vector_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The first layer is linear, so each vector's contribution can be computed once.
        kernel = layers_of(params).inner.kernel[...].astype(vector_VD.dtype)
        num, width = vector_VD.shape
        reach = (kernel.shape[0] // width - 1) // 2
        parts = kernel.reshape(1 + 2 * reach, width, -1)

        def table(parts_CDH: jax.Array) -> jax.Array:
            flat = vector_VD @ jnp.moveaxis(parts_CDH, 0, 1).reshape(width, -1)
            return flat.reshape(num, reach, -1)

        return table(parts[:reach]), table(parts[reach + 1 :])

    def from_sides(params: Params, sides_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        layers, width = layers_of(params), hidden_ND.shape[1]
        kernel = layers.inner.kernel[...].astype(hidden_ND.dtype)
        first = (kernel.shape[0] - width) // 2
        own_NH = hidden_ND @ kernel[first : first + width]
        inner_NH = own_NH + sides_NH.astype(hidden_ND.dtype)
        return readout(params, features(layers, inner_NH, hidden_ND))

    return SamplerReadout(whole, config.sampler_context, sides, from_sides)


def make_head(config: Config, *, mask_id: int, banned_ids: tuple[int, ...]) -> Head:
    """The training of the sampler head, by the mean cross-entropy over supervised positions, in
    nats and unweighted. Only the parameters of this head get a gradient.

    Without revealed neighbours (``heads.sampler_reveal=0``), the head sees what the trunk sees, and
    fills no better than the LM head (benchmarks/results/sampler_head.md, "as described"), and
    making it warns.
    """
    settings, process = config.heads, noise_process(config.objective)
    if settings.sampler_reveal == 0:
        warnings.warn(
            "heads.sampler_reveal=0 trains a sampler head that fills no better than the LM "
            f"head; use {HeadsConfig.sampler_reveal}",
            stacklevel=3,
        )

    def draw(drawn: Drawn, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The revealed positions, and the number of supervised positions."""
        is_revealed_BL = jax.random.uniform(key, drawn.shown_BL.shape) < settings.sampler_reveal
        return is_revealed_BL, jnp.sum(drawn.is_supervised_BL()).astype(jnp.float32)

    def loss(network: Network, params: Params, drawn: Drawn) -> Loss:
        fixed, hidden_BLD = jax.lax.stop_gradient((params, drawn.hidden_BLD))
        params = fixed | {SAMPLER: params[SAMPLER]}
        drawn = drawn._replace(hidden_BLD=hidden_BLD)
        is_revealed_BL, num_supervised = drawn.noise
        is_supervised_BL = drawn.is_supervised_BL()
        inputs = prepare_sampler_inputs(
            network,
            params,
            drawn,
            is_revealed_BL,
            mask_id=mask_id,
            is_noised_BL=None if process.is_masked else is_supervised_BL,
        )
        nll_BL = cross_entropy(
            network,
            params,
            inputs,
            drawn.batch.tokens_BL,
            mask_id=mask_id,
            is_read_BL=is_supervised_BL,
            readout=network.heads["sampler"].readout,
        )
        return Loss(jnp.sum(jnp.where(is_supervised_BL, nll_BL, 0.0)), num_supervised)

    return Head(draw=draw, loss=loss, start=settings.start_sampler_iteration)


def prepare_sampler_inputs(
    network: Network,
    params: Params,
    drawn: Drawn,
    is_revealed_BL: jax.Array,
    *,
    mask_id: int,
    is_noised_BL: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inputs of the sampler head at every position of a batch.

    They are the embeddings of the ``C`` positions to the left, nearest first, ``[B, L, C, D]``, the
    trunk's hidden vectors, and the embeddings to the right. Missing neighbours are zero vectors.

    Neighbours are tokens on the shown canvas. MASK, PAD and positions outside the row do not count
    as neighbours. A revealed position is a hole that shows its true token to its neighbours, as if
    a wave had filled it. Where `is_noised_BL` is True, a token may be noise, which is treated like
    a hole. In a block-causal model, neighbours in earlier blocks are their true tokens, and those
    in later blocks are missing, as when the block is sampled.
    """
    (tokens_BL, length_B, _), shown_BL = drawn.batch, drawn.shown_BL
    num_positions, size = shown_BL.shape[1], network.block_length
    place_1L = jnp.arange(num_positions)[None]
    is_live_BL = live_positions(length_B, num_positions)
    is_hole_BL = shown_BL == mask_id
    if is_noised_BL is not None:
        is_hole_BL |= is_noised_BL
    is_seen_BL = (~is_hole_BL | is_revealed_BL) & is_live_BL
    ids_BL = jnp.where(is_hole_BL, tokens_BL, shown_BL)
    vector_BLD = network.embed(params, ids_BL)
    vector_BLD = jnp.where(is_seen_BL[:, :, None], vector_BLD, 0.0)
    if size:
        clean_BLD = jnp.where(is_live_BL[:, :, None], network.embed(params, tokens_BL), 0.0)

    def beside(offset: int) -> jax.Array:
        index_1L = place_1L + offset
        is_inside_BL = (index_1L >= 0) & (index_1L < num_positions)
        if length_B.ndim == 2:
            start_BL = text_starts(length_B, num_positions)
            is_inside_BL &= start_BL == jnp.roll(start_BL, -offset, axis=1)
        beside_BLD = jnp.roll(vector_BLD, -offset, axis=1)
        if size:
            later_1L1 = (index_1L // size - place_1L // size)[:, :, None]
            beside_BLD = jnp.where(later_1L1 > 0, 0.0, beside_BLD)
            beside_BLD = jnp.where(later_1L1 < 0, jnp.roll(clean_BLD, -offset, axis=1), beside_BLD)
        return jnp.where(is_inside_BL[:, :, None], beside_BLD, 0.0)

    reach = range(1, network.heads["sampler"].context + 1)
    left_BLCD = jnp.stack([beside(-offset) for offset in reach], axis=2)
    right_BLCD = jnp.stack([beside(offset) for offset in reach], axis=2)
    return left_BLCD, drawn.hidden_BLD, right_BLCD
