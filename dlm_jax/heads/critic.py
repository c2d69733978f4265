"""The critic head: which tokens of a filled canvas are wrong."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dlm_jax.diffusion.heads import critic_loss, critic_positions, critic_targets
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.mixture import MixedExample
from dlm_jax.distributed.partitions import ROWS
from dlm_jax.heads.head import Head, HeadInputs, Setup
from dlm_jax.heads.sampler import SAMPLER
from dlm_jax.randomness import key_of
from dlm_jax.sampling.commit.commit_rule import preferences
from dlm_jax.sampling.commit.quotas import sampled
from dlm_jax.sampling.positions import TrunkOutput, chunk_size
from dlm_jax.sampling.propose import CandidateWriter, FillRule, Parallel, Reader, Wanted, Wavefront
from dlm_jax.sampling.transforms import Chain, Context, LogitBias
from dlm_jax.types import Network, Params, live_positions

CRITIC = "critic_head"


def critic_head(setup: Setup) -> Head | None:
    """The record of the critic; None for a model without one.

    Its canvas is the shown one with the supervised holes filled by the model itself, in waves once
    the sampler head trains, as ``[sample]`` recommends them. The gradient flows into the trunk.
    """
    if not setup.config.model.add_critic_head:
        return None
    settings = setup.config.heads
    positions = functools.partial(
        _positions, mask_id=setup.mask_id, masked_only=settings.critic_masked_only
    )
    filler = Filler(
        mask_id=setup.mask_id,
        banned_ids=setup.banned_ids,
        min_neighbors_ratio=setup.config.sample.sampler_min_neighbors_ratio,
        is_alternating=setup.config.sample.sampler_even_odd,
        mesh=setup.mesh,
    )
    return Head(
        name=CRITIC,
        draw=functools.partial(_draw, positions=positions),
        loss=functools.partial(_loss, positions=positions, filler=filler),
        trains_trunk=True,
        start=settings.start_critic_iteration,
        end=settings.end_critic_iteration,
        weight=settings.critic_alpha,
        stream=1,
    )


def _positions(
    example: MixedExample, *, mask_id: int, masked_only: bool
) -> tuple[jax.Array, jax.Array]:
    return critic_positions(
        example.shown_BL, example.batch.length_B, example.is_supervised_BL(),
        mask_id=mask_id, masked_only=masked_only,
    )  # fmt: skip


def _draw(example: MixedExample, key: jax.Array, *, positions: Any) -> tuple[jax.Array, jax.Array]:
    """(uint32 seeds ``[B]`` of the draws that fill the canvas, number of judged positions)."""
    _, is_judged_BL = positions(example)
    seed_B = jax.random.bits(key, (example.shown_BL.shape[0],), jnp.uint32)
    return seed_B, jnp.sum(is_judged_BL).astype(jnp.float32)


def _loss(inputs: HeadInputs, *, positions: Any, filler: Filler) -> Loss:
    network, params, example = inputs.network, inputs.params, inputs.example
    batch, shown_BL, (seed_B, num_judged) = example.batch, example.shown_BL, inputs.noise
    is_hole_BL, is_judged_BL = positions(example)
    candidates_BL = filler(
        network, jax.lax.stop_gradient(params), jax.lax.stop_gradient(inputs.hidden_BLD),
        shown_BL, batch.length_B, is_hole_BL, seed_B,
        in_waves=inputs.stage.trains(SAMPLER),
    )  # fmt: skip
    targets = critic_targets(shown_BL, batch.tokens_BL, candidates_BL, is_hole_BL, is_judged_BL)
    return critic_loss(network, params, targets, batch.length_B, num_judged)


@dataclass(frozen=True)
class Filler:
    """Fills the holes of a batch once, as sampling does: training's only use of sampling.

    Attributes:
      mask_id: the id of MASK.
      banned_ids: ids that no hole is filled with.
      min_neighbors_ratio: share of a row's holes that begin a wavefront where none has a filled
        neighbour.
      is_alternating: whether odd positions of a wave wait for its even ones.
      mesh: devices that split the rows of a batch; each fills its own.
    """

    mask_id: int
    banned_ids: tuple[int, ...]
    min_neighbors_ratio: float
    is_alternating: bool
    mesh: Mesh

    def __call__(
        self, network: Network, params: Params, *rows: jax.Array, in_waves: bool
    ) -> jax.Array:
        """Tokens ``[B, L]`` for the holes, in waves with the sampler head or else in parallel.

        `rows` are hidden vectors, shown tokens, lengths, holes, and one seed a row.
        """
        fill = functools.partial(self._fill_rows, network, in_waves)
        if self.mesh.size > 1:
            split_rows = P(tuple(axis for axis in ROWS if axis in self.mesh.axis_names))
            fill = jax.shard_map(
                fill,
                mesh=self.mesh,
                in_specs=(P(), *[split_rows] * len(rows)),
                out_specs=split_rows,
                check_vma=False,
            )
        return fill(params, *rows)

    def _fill_rows(
        self, network: Network, in_waves: bool, params: Params, *rows: jax.Array
    ) -> jax.Array:
        hidden_BLD, shown_BL, length_B, is_hole_BL, seed_B = rows
        num_rows, num_positions = shown_BL.shape
        is_visible_BL = live_positions(length_B, num_positions) & (shown_BL != self.mask_id)
        context = Context(shown_BL, jnp.zeros_like(shown_BL), is_visible_BL, length_B)
        chain = _bans(self.banned_ids, num_rows)
        key_B = jax.vmap(key_of)(seed_B)
        writer = CandidateWriter(
            chain, chain.prepare(chain.init(num_rows), context), key_B, None, num_positions,
            sampled, "inverse_cdf", self.banned_ids,
        )  # fmt: skip
        chunk = chunk_size(network.vocab_size)
        reader = Reader(network, params, TrunkOutput(hidden_BLD), chunk)
        preference_BL = preferences(key_B, jnp.zeros(num_rows, bool), num_positions)
        wanted = Wanted(is_hole_BL, is_visible_BL, shown_BL, length_B, preference_BL=preference_BL)
        return self._rule(in_waves, num_rows).propose(reader, writer, wanted).proposal.tokens_BL

    def _rule(self, in_waves: bool, num_rows: int) -> FillRule:
        if not in_waves:
            return Parallel()
        never_B, one_B = jnp.zeros(num_rows, bool), jnp.ones(num_rows)
        is_alternating_B = jnp.full(num_rows, self.is_alternating)
        return Wavefront(
            ratio_B=one_B * self.min_neighbors_ratio, density_power_B=0 * one_B,
            is_spread_B=never_B, is_alternating_B=is_alternating_B, temperature_B=one_B,
            is_one_sided_B=never_B,
        )  # fmt: skip


def _bans(ids: tuple[int, ...], num_rows: int) -> Chain:
    """A chain that bans `ids` and does nothing else."""
    shape = (num_rows, len(ids))
    ids_BK = jnp.broadcast_to(jnp.array(ids, jnp.int32), shape)
    return Chain((LogitBias(ids_BK, jnp.full(shape, -jnp.inf)),), ("logit_bias",))
