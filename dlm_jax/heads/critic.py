"""The critic head, which detects wrong tokens on a filled canvas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dlm_jax.config import Config, ModelConfig, SamplingParams
from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import ROWS
from dlm_jax.objectives.forward_process import noise_process
from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Drawn, Head
from dlm_jax.randomness import key_of
from dlm_jax.sampling.positions import TrunkOutput
from dlm_jax.sampling.propose import Parallel, Wavefront, wavefront_fill
from dlm_jax.sampling.rules import AUTO
from dlm_jax.types import Network, Params, live_positions, packed, unpacked

CRITIC = "critic_head"
READS = ("fill", "sampler_min_neighbors_ratio", "sampler_even_odd")
"""Keys of ``[sample]`` that the critic's training reads."""


def layers(config: ModelConfig, linear: Callable[..., Any], norm: Any) -> dict[str, Any]:
    """The logit that a token is wrong is a linear map of its hidden vector."""
    return {"out": linear(config.width, 1, scale=0.0)}


def function(
    config: ModelConfig, layers_of: Callable[[Params], Any], readout: Any
) -> Callable[[Params, jax.Array], jax.Array]:
    """``(params, hidden_ND) -> logit_N``, float32: the logit that the token at a position is wrong,
    from hidden vectors of the filled canvas.
    """
    return lambda params, hidden_ND: layers_of(params).out(hidden_ND)[..., 0].astype(jnp.float32)


def make_head(config: Config, *, mask_id: int, banned_ids: tuple[int, ...]) -> Head:
    """The training of the critic, by the mean binary cross-entropy (nats) over judged positions.

    The critic reads the shown canvas after the model has filled the supervised holes (`fill_holes`)
    and the gradient flows into the trunk. With noise other than MASK, the loss includes the noised
    tokens.
    """
    settings, shows_noise = config.heads, not noise_process(config.objective).is_masked
    start, end = settings.start_critic_iteration, settings.end_critic_iteration
    positions = functools.partial(
        critic_positions,
        mask_id=mask_id,
        masked_only=settings.critic_masked_only,
        shows_noise=shows_noise,
    )

    def draw(drawn: Drawn, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The seeds of the fill, uint32 ``[B]``, and the number of positions in the loss."""
        _, is_judged_BL = positions(drawn)
        seed_B = jax.random.bits(key, (drawn.shown_BL.shape[0],), jnp.uint32)
        return seed_B, jnp.sum(is_judged_BL).astype(jnp.float32)

    def loss(network: Network, params: Params, drawn: Drawn) -> Loss:
        length_B, (seed_B, num_judged) = drawn.batch.length_B, drawn.noise
        is_hole_BL, is_judged_BL = positions(drawn)
        fixed, hidden_BLD = jax.lax.stop_gradient((params, drawn.hidden_BLD))
        candidates_BL = fill_holes(
            network,
            fixed,
            hidden_BLD,
            drawn.shown_BL,
            length_B,
            is_hole_BL,
            seed_B,
            sample=config.sample,
            mask_id=mask_id,
            banned_ids=banned_ids,
            in_waves="sampler" in network.heads and not shows_noise,
        )
        filled_BL, is_wrong_BL = critic_targets(
            drawn, candidates_BL, is_hole_BL, shows_noise=shows_noise
        )
        # Another forward pass of the trunk, into which the gradient flows.
        filled_hidden_BLD, _ = network.trunk(params, filled_BL, length_B, None)
        flat_PD = filled_hidden_BLD.reshape(-1, filled_hidden_BLD.shape[-1])
        logit_BL = network.heads["critic"](params, flat_PD).reshape(filled_BL.shape)
        # -log sigmoid(x) for wrong tokens, and -log sigmoid(-x) for correct ones.
        loss_BL = jax.nn.softplus(jnp.where(is_wrong_BL, -logit_BL, logit_BL))
        return Loss(jnp.sum(jnp.where(is_judged_BL, loss_BL, 0.0)), num_judged)

    def weight(step: jax.Array) -> jax.Array:
        """0 at the start, ``critic_alpha`` from the end on, and linear in between."""
        step, full = step.astype(jnp.float32), settings.critic_alpha
        if end <= start:
            return jnp.where(step >= start, full, 0.0)
        return full * jnp.clip((step - start) / (end - start), 0.0, 1.0)

    return Head(draw=draw, loss=loss, trains_trunk=True, start=start, weight=weight)


def critic_positions(
    drawn: Drawn, *, mask_id: int, masked_only: bool, shows_noise: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Two masks ``[B, L]``: the holes to fill, and the positions in the loss.

    The loss covers the supervised holes and, if the canvas `shows_noise`, the other supervised
    positions. Unless `masked_only`, it also covers the live unsupervised positions, which contain
    the true text.
    """
    is_mask_BL, is_supervised_BL = drawn.shown_BL == mask_id, drawn.is_supervised_BL()
    is_live_BL = live_positions(drawn.batch.length_B, is_mask_BL.shape[1])
    is_hole_BL = is_mask_BL & is_supervised_BL
    is_judged_BL = is_supervised_BL if shows_noise else is_hole_BL
    if not masked_only:
        is_judged_BL |= is_live_BL & ~is_supervised_BL & ~is_mask_BL
    return is_hole_BL, is_judged_BL


def critic_targets(
    drawn: Drawn, candidates_BL: jax.Array, is_hole_BL: jax.Array, *, shows_noise: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The canvas with its holes filled by the candidates, and the positions of wrong tokens: holes,
    and other supervised positions if the canvas `shows_noise`.
    """
    filled_BL = jnp.where(is_hole_BL, candidates_BL, drawn.shown_BL)
    may_be_wrong_BL = is_hole_BL | drawn.is_supervised_BL() if shows_noise else is_hole_BL
    return filled_BL, may_be_wrong_BL & (filled_BL != drawn.batch.tokens_BL)


def fill_holes(
    network: Network,
    params: Params,
    *rows: jax.Array,
    sample: SamplingParams,
    mask_id: int,
    banned_ids: tuple[int, ...],
    in_waves: bool,
) -> jax.Array:
    """Tokens ``[B, L]`` for the holes of a batch, generated with the settings in ``[sample]``.

    The sampler head fills the holes `in_waves`; otherwise, the fill is parallel. Each device fills
    its own rows, and each text of a packed row as a row of its own. `rows` are the hidden vectors,
    shown tokens, lengths, holes, and one seed per row or text.
    """

    def fill_rows(params: Params, *rows: jax.Array) -> jax.Array:
        hidden_BLD, shown_BL, length, is_hole_BL, seed_B = rows
        output, length_B = TrunkOutput(hidden_BLD), length.reshape(-1)
        if length.ndim == 2:
            index_BL = jnp.arange(shown_BL.size).reshape(shown_BL.shape)
            shown_BL, is_hole_BL, index_BL = (
                unpacked(x_BL, length) for x_BL in (shown_BL, is_hole_BL, index_BL)
            )
            # The hidden vectors stay where they are.
            begin_B = jnp.arange(length.size) * shown_BL.shape[1]
            output = output._replace(at_BL=index_BL - begin_B[:, None])
        canvas = params, output, shown_BL, jax.vmap(key_of)(seed_B.reshape(-1))
        # As in sampling.
        is_even_first = sample.sampler_even_odd or sample.fill == AUTO
        waves = Wavefront(sample.sampler_min_neighbors_ratio, is_alternating_B=is_even_first)
        fill = wavefront_fill(
            *canvas,
            rule=waves if in_waves else Parallel(),
            network=network,
            is_open_BL=is_hole_BL,
            length_B=length_B,
            is_seen_BL=live_positions(length_B, shown_BL.shape[1]) & (shown_BL != mask_id),
            banned_ids=banned_ids,
        )
        tokens_BL = fill.proposal.tokens_BL
        return packed(tokens_BL, length) if length.ndim == 2 else tokens_BL

    if (mesh := mesh_in_use()) is not None:
        split_rows = P(tuple(axis for axis in ROWS if axis in mesh.axis_names))
        specs = P(), *[split_rows] * len(rows)
        fill_rows = jax.shard_map(fill_rows, in_specs=specs, out_specs=split_rows, check_vma=False)
    return fill_rows(params, *rows)
