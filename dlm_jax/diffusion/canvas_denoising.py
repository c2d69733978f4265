"""The objective of networks with canvases: a clean text, followed by one noised canvas.

The recipe is that of DiffusionGemma's fine-tuning: plain cross-entropy on the canvas, next-token
cross-entropy on the text, and self-conditioning in half of the rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.corruption import Schedule, stratified_times
from dlm_jax.diffusion.losses import Loss, cross_entropy
from dlm_jax.diffusion.objectives import Batch, NetworkObjective
from dlm_jax.diffusion.processes import Process
from dlm_jax.types import Network, Params

_MAX_LOGITS = 2**24
"""Logits that are computed at once for the self-conditioning signal."""


class NoisedCanvas(NamedTuple):
    """Rows that end with a noised canvas.

    Attributes:
      tokens_BL: int32, the true rows.
      shown_BL: int32, the rows with the canvas noised.
      length_B: int32, end of the canvas.
      start_B: int32, start of the canvas.
      is_canvas_BL: True at the positions of the canvas.
      is_text_BL: True at text positions whose next token is a predicted text token.
      is_conditioned_B: True for rows that are self-conditioned.
      num_canvas: float32 scalar, number of canvas positions in the whole batch.
      num_text: float32 scalar, number of predicted text tokens in the whole batch.
    """

    tokens_BL: jax.Array
    shown_BL: jax.Array
    length_B: jax.Array
    start_B: jax.Array
    is_canvas_BL: jax.Array
    is_text_BL: jax.Array
    is_conditioned_B: jax.Array
    num_canvas: jax.Array
    num_text: jax.Array


def canvas_denoising(
    process: Process,
    *,
    schedule: Schedule,
    canvas_length: int,
    text_weight: float,
    conditioned_share: float,
    mask_id: int,
    noise_ids: tuple[int, ...],
) -> NetworkObjective:
    """Cross-entropy of the true tokens of a canvas, plus that of the next token of the text.

    The free tokens of a row are divided into canvases from the first one on. One of them, drawn
    uniformly, is noised at a low-discrepancy time, and the tokens after it are dropped. Both parts
    of the loss are means over their tokens, and the second has the weight `text_weight`.

    In a fraction `conditioned_share` of the rows, the network also reads its own prediction for the
    same canvas, through which no gradient flows. A network without `Network.signal` ignores it.
    """
    ids = {"mask_id": mask_id, "noise_ids": noise_ids}
    draw = functools.partial(
        drawn,
        process=process,
        schedule=schedule,
        canvas_length=canvas_length,
        conditioned_share=conditioned_share,
        **ids,
    )
    loss = functools.partial(
        canvas_loss, text_weight=text_weight, mask_id=mask_id, is_conditioned=conditioned_share > 0
    )
    return NetworkObjective(draw, loss)


def drawn(
    batch: Batch,
    key: jax.Array,
    *,
    process: Process,
    schedule: Schedule,
    canvas_length: int,
    conditioned_share: float,
    **ids: Any,
) -> NoisedCanvas:
    """The batch with one noised canvas in each row; see `canvas_denoising`."""
    time_key, place_key, noise_key, row_key = jax.random.split(key, 4)
    num_rows, num_positions = batch.tokens_BL.shape
    free_B = jnp.maximum(batch.length_B - batch.given_B, 0)
    count_B = -(-free_B // canvas_length)
    number_B = jnp.floor(jax.random.uniform(place_key, (num_rows,)) * count_B)
    start_B = batch.given_B + canvas_length * number_B.astype(jnp.int32)
    length_B = jnp.minimum(batch.length_B, start_B + canvas_length)
    place_1L, is_free_BL = jnp.arange(num_positions)[None], batch.is_free_BL()
    is_before_BL = place_1L + 1 < start_B[:, None]
    is_text_BL = is_before_BL & jnp.roll(is_free_BL, -1, axis=1)
    is_canvas_BL = is_free_BL & (place_1L >= start_B[:, None]) & (place_1L < length_B[:, None])
    level_B = schedule.masked_ratio(stratified_times(time_key, num_rows))
    shown_BL = process.sample(noise_key, batch.tokens_BL, level_B, is_canvas_BL, **ids)
    return NoisedCanvas(
        batch.tokens_BL,
        shown_BL,
        length_B,
        start_B,
        is_canvas_BL,
        is_text_BL,
        jax.random.bernoulli(row_key, conditioned_share, (num_rows,)),
        jnp.sum(is_canvas_BL).astype(jnp.float32),
        jnp.sum(is_text_BL).astype(jnp.float32),
    )


def canvas_loss(
    network: Network,
    params: Params,
    noised: NoisedCanvas,
    *,
    text_weight: float,
    mask_id: int,
    is_conditioned: bool,
) -> Loss:
    """The loss of `canvas_denoising`. If `is_conditioned`, rows may be self-conditioned."""
    assert network.behind is not None, "the network has canvases"
    rows = noised.shown_BL, noised.length_B, noised.start_B
    signal_BLD = None
    if is_conditioned and network.signal is not None:
        held = jax.lax.stop_gradient(params)
        first_BLD = network.behind(held, *rows)
        signal_BLD = predicted(network, held, first_BLD, mask_id=mask_id)
        signal_BLD = jnp.where(noised.is_conditioned_B[:, None, None], signal_BLD, 0)
    hidden_BLD = network.behind(params, *rows, signal_BLD)
    next_BL = jnp.roll(noised.tokens_BL, -1, axis=1)
    nats_BL = cross_entropy(
        network,
        params,
        hidden_BLD,
        jnp.where(noised.is_text_BL, next_BL, noised.tokens_BL),
        mask_id=mask_id,
        is_read_BL=noised.is_canvas_BL | noised.is_text_BL,
    )
    of_canvas, of_text = (
        jnp.sum(jnp.where(is_in_BL, nats_BL, 0.0))
        for is_in_BL in (noised.is_canvas_BL, noised.is_text_BL)
    )
    # The second sum is rescaled to the weight of the first, so that both are means.
    scale = text_weight * noised.num_canvas / jnp.maximum(noised.num_text, 1.0)
    figures = {"canvas": (of_canvas, noised.num_canvas), "next_token": (of_text, noised.num_text)}
    return Loss(of_canvas + scale * of_text, noised.num_canvas, figures)


def predicted(
    network: Network, params: Params, hidden_BLD: jax.Array, *, mask_id: int
) -> jax.Array:
    """The self-conditioning signal of every position ``[B, L, D]``, a few positions at a time."""
    signal = network.signal
    assert signal is not None, "the network is self-conditioned"

    def of_position(hidden_BD: jax.Array) -> jax.Array:
        logits_BV = network.readout(params, hidden_BD)
        return signal(params, logits_BV.at[:, mask_id].set(-jnp.inf))

    hidden_LBD = jnp.moveaxis(hidden_BLD, 1, 0)
    size = max(1, _MAX_LOGITS // (network.vocab_size * hidden_BLD.shape[0]))
    return jnp.moveaxis(jax.lax.map(of_position, hidden_LBD, batch_size=size), 0, 1)
