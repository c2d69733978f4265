"""Mirostat: truncations that steer the surprise of a row's tokens towards a target."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms import resident
from dlm_jax.sampling.transforms.transform import At, Context, Pointwise, is_greedy
from dlm_jax.sampling.transforms.truncate import MIN_KEEP, TopK, keep_above
from dlm_jax.sampling.vocab import Logits
from dlm_jax.settings import Setting, fact, per_row, pytree, rule

_NUM_FITTED = 100


@pytree
class _MaxSurprise(Pointwise):
    """Drops tokens whose surprise in bits is above mu, at positions where it is on."""

    name = "max_surprise"
    mu_B: Array
    min_keep_B: Array
    is_on_B: Array

    def is_active(self) -> Array:
        return self.is_on_B

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        max_N, total_N = vocab.exp_sum(vocab.fixed(logits_NV))
        floor_N = max_N + jnp.log(total_N) - self.mu_B * math.log(2.0)
        return keep_above(logits_NV, floor_N, self.min_keep_B, self.is_on_B)


@rule
class Mirostat(Pointwise):
    """A truncation by mu, a number in bits that each row adapts.

    After each step with commits, mu is corrected by the mean surprise of the committed tokens:
    `mu -= eta * (surprise - tau)`. The surprise of a token is measured after truncation and
    renormalisation. Source: Basu et al. 2021, "Mirostat".

    Version 1 is a top-k with k computed from mu and from the slope over the 100 most likely tokens:
    `t_i = ln((i+2)/(i+1))`, `b_i = ln(p_i/p_{i+1})`, `s = sum(t b)/sum(t t)`, `eps = s - 1`,
    `k = floor(((eps * 2**mu) / (1 - V**-eps))**(1/s))`, at least 1. Version 2 drops the tokens
    whose surprise `-log2 p` is above mu, but never the most likely token.
    """

    version_B: Array = per_row(
        Setting("mirostat", 0, "version of Mirostat, replaces truncations and XTC; 0: off", 0, 2)
    )
    tau_B: Array = per_row(
        Setting(
            "mirostat_tau",
            5.0,
            "target surprise of Mirostat in bits",
            low=0.0,
            high=1e6,
            activates=False,
            aliases=("mirostat_ent",),
        )
    )
    eta_B: Array = per_row(
        Setting(
            "mirostat_eta",
            0.1,
            "learning rate of Mirostat",
            low=0.0,
            high=1e6,
            activates=False,
            aliases=("mirostat_lr",),
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)
    vocab_size: int = fact("vocab_size")

    @classmethod
    def yields(cls, row: Any) -> bool:
        return is_greedy(row)

    def init(self, context: Context) -> Array:
        """The initial mu of each row, `2 tau`."""
        return 2.0 * self.tau_B

    def update(self, state: Array, is_committed_BL: Array, proposal: Any) -> Array:
        """The value of mu after the commits of a step; unchanged in rows without commits."""
        surprise_BL = -proposal.final_logprob_BL / math.log(2.0)
        count_B = is_committed_BL.sum(-1)
        total_B = jnp.where(is_committed_BL, surprise_BL, 0.0).sum(-1)
        error_B = total_B / jnp.maximum(count_B, 1) - self.tau_B
        return jnp.where(self.is_active() & (count_B > 0), state - self.eta_B * error_B, state)

    def apply(self, state: Array, logits_NV: Array, at: At) -> Array:
        own, mu_N = self.gather(at), state[at.row_N]

        def count(logits_NV: Array) -> Array:
            k_N = jnp.maximum(self._count(logits_NV, mu_N), own.min_keep_B)
            return jnp.where(own.version_B == 1, jnp.clip(k_N, 1, logits_NV.shape[1]), 0.0)

        none_N = jnp.zeros(mu_N.shape, jnp.float32)
        is_first = ((own.version_B == 1) & at.is_real_N).any()
        k_N = jax.lax.cond(is_first, count, lambda x: none_N, logits_NV)
        first = TopK(k_N, jnp.ones_like(own.min_keep_B))
        for t in first, _MaxSurprise(mu_N, own.min_keep_B, own.version_B == 2):

            def apply(x_NV: Array, t: Pointwise = t) -> Array:
                return resident.change_all([t], at.is_real_N, x_NV)

            is_any = (t.is_active() & at.is_real_N).any()
            logits_NV = jax.lax.cond(is_any, apply, lambda x: x, logits_NV)
        return logits_NV

    def _count(self, logits_NV: Array, mu_N: Array) -> Array:
        """The number of candidates that version 1 keeps at each position; all if only one is
        left.
        """
        size = min(_NUM_FITTED, logits_NV.shape[1])
        top_NK, _ = vocab.largest(logits_NV, size)
        is_pair_NK = top_NK[:, 1:] > -jnp.inf
        # Denormals that compare as equal can still differ.
        lead_NK = jnp.maximum(top_NK[:, :-1] - top_NK[:, 1:], 0.0)
        ratio_NK = jnp.where(is_pair_NK, lead_NK, 0.0)
        step_1K = jnp.log1p(1.0 / jnp.arange(1.0, size))[None]
        squares_N = jnp.where(is_pair_NK, step_1K**2, 0.0).sum(-1)
        slope_N = (step_1K * ratio_NK).sum(-1) / jnp.where(squares_N > 0, squares_N, 1.0)
        excess_N = slope_N - 1.0
        log_v = math.log(max(self.vocab_size, 2))
        is_flat_N = jnp.abs(excess_N) < 1e-5
        safe_N = jnp.where(is_flat_N, 1.0, excess_N)
        # the quotient tends to 1 / ln V where the slope tends to 1
        quotient_N = jnp.where(is_flat_N, 1.0 / log_v, safe_N / -jnp.expm1(-safe_N * log_v))
        log_k_N = (jnp.log(quotient_N) + mu_N * math.log(2.0)) / slope_N
        k_N = jnp.floor(jnp.exp(jnp.nan_to_num(log_k_N, nan=0.0)))
        return jnp.where(squares_N > 0, k_N, logits_NV.shape[1])
