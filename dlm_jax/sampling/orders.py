"""Commit rules that write a quota of holes: the surest first, at random, or from left to right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit import CommitRule, Proposal, Quota, View, linear_quota, most

Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""``(clean logits [N, V], log-prob. of the candidate [N]) -> float32 [N]``: higher is surer."""


def sampled(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Probability of the candidate (LLaDA, Nie et al. 2025, algorithm 5)."""
    return jnp.exp(logprob_N)


def maximum(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Largest probability (`seeds/diffusion_generation.md`, step 3)."""
    return jnp.exp(jnp.max(logits_NV, axis=1) - jax.nn.logsumexp(logits_NV, axis=1))


def certainty(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Minus the entropy, in nats (Dream, Ye et al. 2025: ``entropy``)."""
    return -vocab.count_and_entropy(logits_NV)[1]


def margin(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Lead of the most probable token over the second (Kim et al. 2025, ``topk_margin``)."""
    best_NK, _ = vocab.largest(logits_NV, min(2, logits_NV.shape[1]))
    total_N1 = jax.nn.logsumexp(logits_NV, axis=1, keepdims=True)
    share_NK = jnp.exp(best_NK - total_N1)
    return share_NK[:, 0] - (share_NK[:, 1] if share_NK.shape[1] > 1 else 0.0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["quota", "confidence"]
)
@dataclass(frozen=True)
class SurestFirst:
    """Commits each row's quota of most confident candidates and leaves the rest in doubt.

    With the clean probability of the drawn token this is LLaDA's ``low_confidence`` remasking
    (`seeds/diffusion_generation.md`, step 4).
    """

    quota: Quota = linear_quota
    confidence: Measure = sampled

    def eligible(self, view: View) -> jax.Array:
        """Every hole: all must be proposed before they can be compared."""
        return view.is_hole_BL

    def measure(self, logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
        """What `confidence` says."""
        return self.confidence(logits_NV, logprob_N)

    def select(self, view: View, proposal: Proposal) -> jax.Array:
        """The quota's most confident holes."""
        return most(proposal.confidence_BL, view.is_hole_BL, self.quota(view))


class ChosenBefore:
    """A rule that needs no logits to choose, so that it commits all that it made eligible."""

    def measure(self, logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
        """Probability of the candidate."""
        return jnp.exp(logprob_N)

    def select(self, view: View, proposal: Proposal) -> jax.Array:
        """All that were eligible."""
        return view.is_hole_BL


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["quota"])
@dataclass(frozen=True)
class RandomOrder(ChosenBefore):
    """Commits a uniformly random quota of each row's holes, chosen before the logits are known."""

    quota: Quota = linear_quota

    def eligible(self, view: View) -> jax.Array:
        """A random quota of the holes; only their logits are needed."""
        score_BL = uniform(view.key_B, view.is_hole_BL.shape[1])
        return most(score_BL, view.is_hole_BL, self.quota(view))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["quota"])
@dataclass(frozen=True)
class LeftToRight(ChosenBefore):
    """Commits each row's quota of leftmost holes; only their logits are needed."""

    quota: Quota = linear_quota

    def eligible(self, view: View) -> jax.Array:
        """The leftmost holes."""
        rank_BL = jnp.cumsum(view.is_hole_BL, axis=1)
        return view.is_hole_BL & (rank_BL <= self.quota(view)[:, None])


def uniform(key_B: jax.Array, num_positions: int) -> jax.Array:
    """A uniform number for each position, ``[B, L]``, from each row's key alone."""
    return jax.vmap(lambda key: jax.random.uniform(key, (num_positions,)))(key_B)


ORDERS: dict[str, Callable[[Quota], CommitRule]] = {
    "low_confidence": SurestFirst,
    "random": RandomOrder,
    "left_to_right": LeftToRight,
    "entropy": functools.partial(SurestFirst, confidence=certainty),
    "margin": functools.partial(SurestFirst, confidence=margin),
}
"""Rules that commit a quota, by their name in a config."""
