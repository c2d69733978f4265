"""The critic head, which detects wrong tokens on a filled canvas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dlm_jax.config import ModelConfig
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import MixedExample
from dlm_jax.diffusion.processes import noise_process
from dlm_jax.distributed.partitions import ROWS
from dlm_jax.heads.head import BuiltInHead, Head, HeadInputs
from dlm_jax.heads.sampler import SAMPLER
from dlm_jax.randomness import key_of
from dlm_jax.sampling.propose import parallel_fill, wavefront_fill
from dlm_jax.sampling.rules import AUTO
from dlm_jax.types import Network, Params, live_positions

CRITIC = "critic_head"


def critic_layers(config: ModelConfig, linear: Callable[..., Any], norm: Any) -> dict[str, Any]:
    """The logit of the probability that a token is wrong, a linear map of its hidden vector."""
    return {"out": linear(config.width, 1, scale=0.0)}


def critic_function(config: ModelConfig, layers_of: Callable[[Params], Any], readout: Any) -> Any:
    """``(params, hidden_ND) -> logit_N``, float32: the logit that the token at a position is wrong,
    from hidden vectors of the filled canvas.
    """

    def critic(params: Params, hidden_ND: jax.Array) -> jax.Array:
        return layers_of(params).out(hidden_ND)[..., 0].astype(jnp.float32)

    return critic


def critic_head(setup: Any) -> Head:
    """The training of the critic.

    The critic reads the shown canvas after the model has filled the supervised holes. The fill uses
    the settings in ``[sample]``. The fill is parallel until training of the sampler head starts.
    After that, it proceeds in waves. The gradient flows into the trunk. With noise other than MASK,
    the fill is always parallel, and the loss includes the noised tokens.
    """
    settings, mask_id = setup.config.heads, setup.mask_id
    is_masked = noise_process(setup.config.objective).is_masked

    def positions(example: MixedExample) -> tuple[jax.Array, jax.Array]:
        return critic_positions(
            example.shown_BL,
            example.batch.length_B,
            example.is_supervised_BL(),
            mask_id=mask_id,
            masked_only=settings.critic_masked_only,
            shows_noise=not is_masked,
        )

    def draw(example: MixedExample, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The seeds of the fill, uint32 ``[B]``, and the number of positions in the loss."""
        _, is_judged_BL = positions(example)
        seed_B = jax.random.bits(key, (example.shown_BL.shape[0],), jnp.uint32)
        return seed_B, jnp.sum(is_judged_BL).astype(jnp.float32)

    def loss(inputs: HeadInputs) -> Loss:
        batch, shown_BL, (seed_B, num_judged) = (
            inputs.example.batch,
            inputs.example.shown_BL,
            inputs.noise,
        )
        is_hole_BL, is_judged_BL = positions(inputs.example)
        candidates_BL = filled(
            setup,
            inputs.network,
            inputs.stage.trains(SAMPLER) and is_masked,
            jax.lax.stop_gradient(inputs.params),
            jax.lax.stop_gradient(inputs.hidden_BLD),
            shown_BL,
            batch.length_B,
            is_hole_BL,
            seed_B,
        )
        is_noised_BL = inputs.example.is_supervised_BL() & (not is_masked)
        targets = critic_targets(
            shown_BL, batch.tokens_BL, candidates_BL, is_hole_BL, is_judged_BL, is_noised_BL
        )
        return critic_loss(inputs.network, inputs.params, targets, batch.length_B, num_judged)

    return Head(
        name=CRITIC,
        draw=draw,
        loss=loss,
        trains_trunk=True,
        start=settings.start_critic_iteration,
        end=settings.end_critic_iteration,
        weight=settings.critic_alpha,
        stream=1,
    )


CRITIC_HEAD = BuiltInHead(
    name=CRITIC,
    make=critic_head,
    layers=critic_layers,
    function=critic_function,
    switch="add_critic_head",
    start="start_critic_iteration",
    sampling=("fill", "sampler_min_neighbors_ratio", "sampler_even_odd"),
)
"""The critic head, which predicts which tokens of a filled canvas are wrong."""


class CriticTargets(NamedTuple):
    """The critic's input canvas and targets.

    Attributes:
      filled_BL: int32 canvas with filled holes.
      is_wrong_BL: True where the filled token differs from the true token.
      is_judged_BL: True at positions in the loss.
    """

    filled_BL: jax.Array
    is_wrong_BL: jax.Array
    is_judged_BL: jax.Array


def critic_positions(
    shown_BL: jax.Array,
    length_B: jax.Array,
    is_supervised_BL: jax.Array,
    *,
    mask_id: int,
    masked_only: bool,
    shows_noise: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Two masks ``[B, L]``: the holes to fill, and the positions in the loss.

    The loss covers the supervised holes and, if the canvas `shows_noise`, the other supervised
    positions. Unless `masked_only`, it also covers the live unsupervised positions, which contain
    the true text.
    """
    is_live_BL = jnp.arange(shown_BL.shape[1])[None] < length_B[:, None]
    is_hole_BL = (shown_BL == mask_id) & is_supervised_BL
    is_plain_BL = is_live_BL & ~is_supervised_BL & (shown_BL != mask_id)
    is_asked_BL = is_supervised_BL if shows_noise else is_hole_BL
    return is_hole_BL, is_asked_BL if masked_only else is_asked_BL | is_plain_BL


def critic_targets(
    shown_BL: jax.Array,
    tokens_BL: jax.Array,
    candidates_BL: jax.Array,
    is_hole_BL: jax.Array,
    is_judged_BL: jax.Array,
    is_noised_BL: jax.Array | bool = False,
) -> CriticTargets:
    """The canvas with its holes filled by the candidates, and the positions of wrong tokens: holes,
    and positions that can show noise.
    """
    filled_BL = jnp.where(is_hole_BL, candidates_BL, shown_BL)
    is_wrong_BL = (is_hole_BL | is_noised_BL) & (filled_BL != tokens_BL)
    return jax.lax.stop_gradient(CriticTargets(filled_BL, is_wrong_BL, is_judged_BL))


def critic_loss(
    network: Network, params: Params, targets: CriticTargets, length_B: jax.Array, total: jax.Array
) -> Loss:
    """Binary cross-entropy (nats) over the positions in the loss, after an additional forward pass
    of the trunk.

    Gradients flow into the trunk. `total` is the number of positions in the loss, summed over the
    whole batch.
    """
    hidden_BLD, _ = network.trunk(params, targets.filled_BL, length_B, None)
    logit_P = network.heads["critic"](params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1]))
    logit_BL = logit_P.reshape(targets.filled_BL.shape)
    # -log sigmoid(x) for wrong tokens, and -log sigmoid(-x) for correct ones.
    loss_BL = jax.nn.softplus(jnp.where(targets.is_wrong_BL, -logit_BL, logit_BL))
    return Loss(jnp.sum(jnp.where(targets.is_judged_BL, loss_BL, 0.0)), total)


def filled(
    setup: Any, network: Network, in_waves: bool, params: Params, *rows: jax.Array
) -> jax.Array:
    """Tokens ``[B, L]`` for the holes of a batch, generated as in sampling.

    If `in_waves`, the sampler head fills the holes in waves. Otherwise the fill is parallel. Each
    device fills its own rows. `rows` are the hidden vectors, shown tokens, lengths, holes, and one
    seed per row.
    """
    fill = functools.partial(_fill_rows, setup, network, in_waves)
    mesh: Mesh = setup.mesh
    if mesh.size > 1:
        split_rows = P(tuple(axis for axis in ROWS if axis in mesh.axis_names))
        fill = jax.shard_map(
            fill,
            mesh=mesh,
            in_specs=(P(), *[split_rows] * len(rows)),
            out_specs=split_rows,
            check_vma=False,
        )
    return fill(params, *rows)


def _fill_rows(
    setup: Any, network: Network, in_waves: bool, params: Params, *rows: jax.Array
) -> jax.Array:
    hidden_BLD, shown_BL, length_B, is_hole_BL, seed_B = rows
    shared: dict[str, Any] = {
        "network": network,
        "is_open_BL": is_hole_BL,
        "length_B": length_B,
        "banned_ids": setup.banned_ids,
    }
    canvas = params, hidden_BLD, shown_BL, jax.vmap(key_of)(seed_B)
    if not in_waves:
        return parallel_fill(*canvas, **shared).proposal.tokens_BL
    is_live_BL, recommended = live_positions(length_B, shown_BL.shape[1]), setup.config.sample
    fill = wavefront_fill(
        *canvas,
        is_seen_BL=is_live_BL & (shown_BL != setup.mask_id),
        ratio=recommended.sampler_min_neighbors_ratio,
        is_alternating=recommended.sampler_even_odd or recommended.fill == AUTO,  # as in sampling
        **shared,
    )
    return fill.proposal.tokens_BL
