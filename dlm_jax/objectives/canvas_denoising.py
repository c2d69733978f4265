"""The objective of networks with canvases: a clean text, followed by one noised canvas.

The recipe is that of DiffusionGemma's fine-tuning: plain cross-entropy on the canvas, next-token
cross-entropy on the text, and self-conditioning in half of the rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.objectives.corruption import Schedule, stratified_times
from dlm_jax.objectives.forward_process import Process
from dlm_jax.objectives.losses import Loss, cross_entropy
from dlm_jax.objectives.objective import Batch, Drawn, Objective
from dlm_jax.types import Network, Params

_MAX_LOGITS = 2**24
"""Logits that are computed at once for the self-conditioning signal."""


def canvas_denoising(
    process: Process,
    *,
    schedule: Schedule,
    canvas_length: int,
    text_weight: float,
    conditioned_share: float,
) -> Objective:
    """Cross-entropy of the true tokens of a canvas, plus that of the next token of the text.

    The free tokens of a row are divided into canvases from the first one on. One of them, drawn
    uniformly, is noised at a low-discrepancy time, and the tokens after it are dropped. Both parts
    of the loss are means over their tokens, and the second has the weight `text_weight`.

    In a fraction `conditioned_share` of the rows, the network also reads its own prediction for the
    same canvas, through which no gradient flows. A network without `Network.signal` ignores it.
    """

    def draw(batch: Batch, key: jax.Array) -> Drawn:
        """Rows that end with their canvas, of which all tokens before it are given.

        ``noise`` has the text positions whose next token is predicted, their number in the whole
        batch, and the rows that are self-conditioned.
        """
        time_key, place_key, noise_key, row_key = jax.random.split(key, 4)
        num_rows, num_positions = batch.tokens_BL.shape
        free_B = jnp.maximum(batch.length_B - batch.given_B, 0)
        count_B = -(-free_B // canvas_length)
        number_B = jnp.floor(jax.random.uniform(place_key, (num_rows,)) * count_B)
        start_B = batch.given_B + canvas_length * number_B.astype(jnp.int32)
        end_B = jnp.minimum(batch.length_B, start_B + canvas_length)
        is_before_BL = jnp.arange(num_positions)[None] + 1 < start_B[:, None]
        is_text_BL = is_before_BL & jnp.roll(batch.is_free_BL(), -1, axis=1)
        rows = Batch(batch.tokens_BL, end_B, start_B)
        is_canvas_BL = rows.is_free_BL()
        level_B = schedule.masked_ratio(stratified_times(time_key, num_rows))
        shown_BL = process.sample(noise_key, batch.tokens_BL, level_B, is_canvas_BL)
        is_conditioned_B = jax.random.bernoulli(row_key, conditioned_share, (num_rows,))
        weight_BL = is_canvas_BL.astype(jnp.float32)
        num_text = jnp.sum(is_text_BL).astype(jnp.float32)
        noise = is_text_BL, num_text, is_conditioned_B
        return Drawn(rows, shown_BL, weight_BL, jnp.sum(weight_BL), noise)

    def loss(network: Network, params: Params, drawn: Drawn) -> Loss:
        assert network.behind is not None, "the network has canvases"
        tokens_BL, length_B, start_B = drawn.batch
        is_text_BL, num_text, is_conditioned_B = drawn.noise
        is_canvas_BL, rows = drawn.is_supervised_BL(), (drawn.shown_BL, length_B, start_B)
        signal_BLD = None
        if conditioned_share > 0 and network.signal is not None:
            held = jax.lax.stop_gradient(params)
            first_BLD = network.behind(held, *rows)
            signal_BLD = _signal_of(network, held, first_BLD, mask_id=process.mask_id)
            signal_BLD = jnp.where(is_conditioned_B[:, None, None], signal_BLD, 0)
        nats_BL = cross_entropy(
            network,
            params,
            network.behind(params, *rows, signal_BLD),
            jnp.where(is_text_BL, jnp.roll(tokens_BL, -1, axis=1), tokens_BL),
            mask_id=process.mask_id,
            is_read_BL=is_canvas_BL | is_text_BL,
        )
        of_canvas, of_text = (
            jnp.sum(jnp.where(is_in_BL, nats_BL, 0.0)) for is_in_BL in (is_canvas_BL, is_text_BL)
        )
        # The second sum is rescaled to the weight of the first, so that both are means.
        scale = text_weight * drawn.total / jnp.maximum(num_text, 1.0)
        figures = {"canvas": (of_canvas, drawn.total), "next_token": (of_text, num_text)}
        return Loss(of_canvas + scale * of_text, drawn.total, figures)

    return Objective(draw, loss)


def _signal_of(
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
