"""Staged training of a model and its heads: which of them train when, and for what loss.

A stage is the set of groups that train. It is compiled in, so that what does not train costs
nothing; the critic's weight alone changes inside a stage (`seeds/sampler_head.md` 3.1, DESIGN 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dlm_jax.config import HeadsConfig, ModelConfig
from dlm_jax.diffusion import heads as head_losses
from dlm_jax.diffusion.losses import Loss, losses
from dlm_jax.diffusion.objectives import Batch, Example, Mixture
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.orders import sampled
from dlm_jax.sampling.propose import chunk_size, propose_parallel
from dlm_jax.sampling.transforms import Chain, LogitBias
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.sampling.wavefront import Wavefront, propose_wavefront
from dlm_jax.types import Network, Params, live_positions

MAIN = "main"
SAMPLER = "sampler_head"
CRITIC = "critic_head"
HEADS = (SAMPLER, CRITIC)

_SALT = 0x68656164


@dataclass(frozen=True)
class Stage:
    """The groups of parameters that train: ``main``, ``sampler_head``, ``critic_head``."""

    groups: frozenset[str]

    @property
    def trains_main(self) -> bool:
        """Whether the model itself trains."""
        return MAIN in self.groups

    @property
    def trains_sampler(self) -> bool:
        """Whether the sampler head does."""
        return SAMPLER in self.groups

    @property
    def trains_critic(self) -> bool:
        """Whether the critic does."""
        return CRITIC in self.groups

    def __str__(self) -> str:
        return " + ".join(name for name in (MAIN, *HEADS) if name in self.groups) or "nothing"


def stage_at(step: int, model: ModelConfig, heads: HeadsConfig) -> Stage:
    """The stage of a step, from 0: a critic trains where it counts for something."""
    groups = {MAIN} if heads.train_main else set()
    if model.add_sampler_head and step >= heads.start_sampler_iteration:
        groups.add(SAMPLER)
    # At the first step of a ramp the weight is 0; asked even so, the critic's pass through the
    # trunk would change how the rest is rounded.
    is_ramp = heads.end_critic_iteration > heads.start_critic_iteration
    first = heads.start_critic_iteration + is_ramp
    if model.add_critic_head and step >= first and heads.critic_alpha > 0:
        groups.add(CRITIC)
    return Stage(frozenset(groups))


def critic_weight(step: jax.Array, heads: HeadsConfig) -> jax.Array:
    """What the critic's loss counts for at a step: 0 up to the start, in full from the end on.

    Linear between. An end that is not behind the start means in full from the start on.
    """
    start, end = heads.start_critic_iteration, heads.end_critic_iteration
    step = step.astype(jnp.float32)
    if end <= start:
        return jnp.where(step >= start, heads.critic_alpha, 0.0)
    return heads.critic_alpha * jnp.clip((step - start) / (end - start), 0.0, 1.0)


def group_of(name: str) -> str:
    """The group of the parameters under that top-level name."""
    return name if name in HEADS else MAIN


def split(params: Params, stage: Stage) -> tuple[Params, Params]:
    """(parameters that train in a stage, the others), each with its top-level names."""
    trained = {name: tree for name, tree in params.items() if group_of(name) in stage.groups}
    return trained, {name: tree for name, tree in params.items() if name not in trained}


class Extras(NamedTuple):
    """What the heads need of a batch beside its `Example`.

    Attributes:
      is_revealed_BL: True where a hole shows its true token to its neighbours.
      seed_B: uint32, of the draws that fill the critic's canvas.
      num_supervised: float32 scalar, positions that the sampler head answers for.
      num_asked: float32 scalar, positions that the critic does.
    """

    is_revealed_BL: jax.Array
    seed_B: jax.Array
    num_supervised: jax.Array
    num_asked: jax.Array


class Part(NamedTuple):
    """A batch with all of its noise, or some rows of it."""

    example: Example
    extras: Extras

    def rows_alone(self) -> Part:
        """What can be cut by rows: all but the totals of the whole batch."""
        none = jnp.zeros((0,))
        return Part(
            self.example._replace(totals={}),
            self.extras._replace(num_supervised=none, num_asked=none),
        )

    def with_totals_of(self, whole: Part) -> Part:
        """These rows, with the totals of the batch that they were cut from."""
        extras = self.extras._replace(
            num_supervised=whole.extras.num_supervised, num_asked=whole.extras.num_asked
        )
        return Part(self.example._replace(totals=whole.example.totals), extras)


def supervised(example: Example) -> jax.Array:
    """True ``[B, L]`` where some objective asks for the token."""
    return jnp.any(jnp.stack([w > 0 for w in example.weights.values()]), axis=0)


@dataclass(frozen=True)
class StagedLoss:
    """The loss of a stage, as pure functions of a batch.

    Attributes:
      network: the model and its heads.
      mixture: objectives of the model itself.
      stage: what trains.
      heads: how.
      mask_id: the id of MASK.
      banned_ids: ids that no hole of the critic's canvas is filled with.
      mesh: devices that split the rows of a batch.
    """

    network: Network
    mixture: Mixture
    stage: Stage
    heads: HeadsConfig
    mask_id: int
    banned_ids: tuple[int, ...]
    mesh: Mesh

    def split(self, params: Params) -> tuple[Params, Params]:
        """(parameters that train, the others), each with its top-level names."""
        return split(params, self.stage)

    def alpha(self, step: jax.Array) -> jax.Array:
        """What the critic's loss counts for at a step."""
        return critic_weight(step, self.heads)

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array) -> Part:
        """The batch with the noise of a step: from the run's key and the step alone.

        The heads have noise of their own, so that the model sees the same without them.
        """
        example = self.mixture.example(batch, jax.random.fold_in(key, step))
        reveal_key, seed_key = jax.random.split(
            jax.random.fold_in(jax.random.fold_in(key, _SALT), step)
        )
        shown_BL = example.shown_BL
        chance_BL = jax.random.uniform(reveal_key, shown_BL.shape)
        is_supervised_BL = supervised(example)
        _, is_asked_BL = self._critic_positions(example, is_supervised_BL)
        extras = Extras(
            is_revealed_BL=chance_BL < self.heads.sampler_reveal,
            seed_B=jax.random.bits(seed_key, (shown_BL.shape[0],), jnp.uint32),
            num_supervised=jnp.sum(is_supervised_BL).astype(jnp.float32),
            num_asked=jnp.sum(is_asked_BL).astype(jnp.float32),
        )
        return Part(example, extras)

    def __call__(
        self, params: Params, part: Part, alpha: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what is minimised, each loss apart) of one part of a batch, in nats per token.

        The losses apart are those of the objectives, ``sampler`` and ``critic``, as far as they
        train; `alpha` is what the critic's counts for.
        """
        network, stage, (example, extras) = self.network, self.stage, part
        hidden_BLD, _ = network.trunk(params, example.shown_BL, example.batch.length_B, None)
        # The heads read what the trunk wrote: nothing of theirs may be fused into it, or it would
        # be rounded otherwise with heads than without.
        hidden_BLD = jax.lax.optimization_barrier(hidden_BLD)
        means: dict[str, jax.Array] = {}
        total = jnp.zeros(())
        if stage.trains_main:
            found = losses(network, params, example, hidden_BLD, mask_id=self.mask_id)
            means = {name: _mean(loss) for name, loss in found.items()}
            total = sum((self.mixture.shares[name] * means[name] for name in means), total)
        if stage.trains_sampler:
            means["sampler"] = _mean(self._sampler_loss(params, example, extras, hidden_BLD))
            total = total + means["sampler"]
        if stage.trains_critic:
            means["critic"] = _mean(self._critic_loss(params, example, extras, hidden_BLD))
            total = total + alpha * means["critic"]
        return total, means

    def _sampler_loss(
        self, params: Params, example: Example, extras: Extras, hidden_BLD: jax.Array
    ) -> Loss:
        inputs = head_losses.prepare_sampler_inputs(
            self.network, params, example.shown_BL, example.batch.tokens_BL, hidden_BLD,
            example.batch.length_B, extras.is_revealed_BL, mask_id=self.mask_id,
        )  # fmt: skip
        return head_losses.sampler_loss(
            self.network, params, inputs, example.batch.tokens_BL, supervised(example),
            extras.num_supervised, mask_id=self.mask_id,
        )  # fmt: skip

    def _critic_positions(
        self, example: Example, is_supervised_BL: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return head_losses.critic_positions(
            example.shown_BL, example.batch.length_B, is_supervised_BL,
            mask_id=self.mask_id, masked_only=self.heads.critic_masked_only,
        )  # fmt: skip

    def _critic_loss(
        self, params: Params, example: Example, extras: Extras, hidden_BLD: jax.Array
    ) -> Loss:
        batch, shown_BL = example.batch, example.shown_BL
        is_hole_BL, is_asked_BL = self._critic_positions(example, supervised(example))
        candidates_BL = self._fill(
            jax.lax.stop_gradient(params), jax.lax.stop_gradient(hidden_BLD),
            shown_BL, batch.length_B, is_hole_BL, extras.seed_B,
        )  # fmt: skip
        task = head_losses.critic_task(
            shown_BL, batch.tokens_BL, candidates_BL, is_hole_BL, is_asked_BL
        )
        return head_losses.critic_loss(self.network, params, task, batch.length_B, extras.num_asked)

    def _fill(self, params: Params, *rows: jax.Array) -> jax.Array:
        """Tokens for the holes: in waves if the sampler head trains, else in parallel.

        Each device fills its own rows.
        """
        fill = self._fill_rows
        if self.mesh.size > 1:
            split_rows = P(("data", "fsdp"))
            fill = jax.shard_map(
                fill,
                mesh=self.mesh,
                in_specs=(P(), *[split_rows] * len(rows)),
                out_specs=split_rows,
                check_vma=False,
            )
        return fill(params, *rows)

    def _fill_rows(
        self,
        params: Params,
        hidden_BLD: jax.Array,
        shown_BL: jax.Array,
        length_B: jax.Array,
        is_hole_BL: jax.Array,
        seed_B: jax.Array,
    ) -> jax.Array:
        num_rows, num_positions = shown_BL.shape
        is_visible_BL = live_positions(length_B, num_positions) & (shown_BL != self.mask_id)
        context = Context(shown_BL, jnp.zeros_like(shown_BL), is_visible_BL, length_B)
        chain = bans(self.banned_ids, num_rows)
        given: tuple[Any, ...] = (
            self.network, params, Sight(hidden_BLD), is_hole_BL, chain, chain.init(num_rows),
            context, jax.vmap(jax.random.key)(seed_B),
        )  # fmt: skip
        how: dict[str, Any] = {"measure": sampled, "chunk": chunk_size(self.network.vocab_size)}
        if not self.stage.trains_sampler:
            return propose_parallel(*given, **how).proposal.tokens_BL
        never_B, one_B = jnp.zeros(num_rows, bool), jnp.ones(num_rows)
        fill = Wavefront(one_B * self.heads.sampler_min_neighbors_ratio, never_B, never_B, one_B)
        filled = propose_wavefront(*given, **how, fill=fill, banned_ids=self.banned_ids)
        return filled.proposal.tokens_BL


def bans(ids: tuple[int, ...], num_rows: int) -> Chain:
    """A chain that bans `ids` and does nothing else."""
    shape = (num_rows, len(ids))
    ids_BK = jnp.broadcast_to(jnp.array(ids, jnp.int32), shape)
    return Chain((LogitBias(ids_BK, jnp.full(shape, -jnp.inf)),), ("logit_bias",))


def _mean(loss: Loss) -> jax.Array:
    return loss.sum / jnp.maximum(loss.weight, 1.0)
