"""Mirostat: truncations that steer the surprise of a row's tokens towards a target."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.transform import At, Context, Pointwise, is_greedy
from dlm_jax.sampling.transforms.truncate import MIN_KEEP, keep_above, keep_largest
from dlm_jax.settings import Setting, fact, per_row, rule

_NUM_FITTED = 100


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
        version_N, mu_N = self.version_B[at.row_N], state[at.row_N]
        min_keep_N = self.min_keep_B[at.row_N]

        def first(logits_NV: Array) -> Array:
            V = logits_NV.shape[1]
            k_N = jnp.clip(jnp.maximum(self._count(logits_NV, mu_N), min_keep_N), 1, V)
            return keep_largest(logits_NV, jnp.where(version_N == 1, k_N, V))

        def second(logits_NV: Array) -> Array:
            max_N, total_N = vocab.exp_sum(logits_NV)
            floor_N = max_N + jnp.log(total_N) - mu_N * math.log(2.0)
            return keep_above(logits_NV, floor_N, min_keep_N, version_N == 2)

        for version, truncate in ((1, first), (2, second)):
            is_any = ((version_N == version) & at.is_real_N).any()
            logits_NV = jax.lax.cond(is_any, truncate, lambda x: x, logits_NV)
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
