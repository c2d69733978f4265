"""Noise rules, which can change every token of a block until the block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.randomness import salted
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import DrawnTokens, OrderRule, Proposal, WithState, uniform
from dlm_jax.sampling.commit.orders import (
    ENTROPY_BOUND,
    NoiseSchedule,
    certainty,
    entropy,
    within_entropy,
)
from dlm_jax.settings import ABOVE_ZERO, Setting, fact, per_row, require, require_values, rule

_KIND_SALT, _NOISE_SALT = 0x6B696E64, 0x6D61736B


class NoiseContext(NamedTuple):
    """The current block of each row at the start of a step, and uniform noise for the canvas.

    Attributes:
      tokens_BL: int32 canvas.
      is_open_BL: True at the unfrozen positions of the block in running rows.
      step_B: int32, number of steps taken in the block.
      steps_B: int32, total number of steps for the block, at least 1.
      key_B: random key of each row for this step, used only by the rule.
      is_noise_BL: True at tokens whose ids are noise ids of the row. The noise ids of a row are all
        ids that can be written in the row.
      random_BL: int32, one of the row's noise ids per position, drawn uniformly for this step.
      num_ids_B: int32, number of noise ids of the row.
      mask_id: the id of MASK.
      preference_BL: uint32, priority of each position when scores are tied; see `preferences`.
    """

    tokens_BL: jax.Array
    is_open_BL: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    key_B: jax.Array
    is_noise_BL: jax.Array
    random_BL: jax.Array
    num_ids_B: jax.Array
    mask_id: int
    preference_BL: jax.Array | None = None


class NoiseUpdate(NamedTuple):
    """What a step writes: `tokens_BL` at the open positions, but candidates where `is_candidate_BL`
    is True. `is_final_B` is True for rows whose block ends; None if all steps are taken.
    """

    tokens_BL: jax.Array
    is_candidate_BL: jax.Array
    is_final_B: jax.Array | None = None


class NoiseRule(OrderRule, ABC):
    """Writes every open position of a block in each step. Only `update` is required."""

    @classmethod
    def check(cls, row: Any) -> None:
        why = f"is not supported with order={cls.name!r}, which can change any token"
        supported: dict[str, tuple[Any, ...]] = {
            "fill": ("parallel", "auto"),
            "remask": ("none",),
            "cache": ("none", "exact"),
            "guidance": (0.0,),
            "structure": ("",),
            "edit": (False,),
            "renoise_start": (0.0,),
            "renoise_end": (0.0,),
        }
        require_values(row, supported, why)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        why = f"is not supported with order={cls.name!r}, which can change any token"
        has_canvas = row.cache == "none" or facts.canvas_length
        require(has_canvas, "cache", row.cache, why, "use cache='none'")

    def begin(self, context: NoiseContext) -> jax.Array:
        """Tokens ``[B, L]`` for the holes of rows before their first step; by default random."""
        return context.random_BL

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        """The score of the current tokens `drawn` of N positions, float32 ``[N]``, and the new
        state of the positions. By default, the score is the log-probability of the token.

        `logits_NV` are those that candidates are drawn from, after all transforms. Greedy rows draw
        their argmax with certainty.
        """
        return drawn.logprob_N, state_N

    @abstractmethod
    def update(
        self, state: Any, context: NoiseContext, proposal: Proposal
    ) -> tuple[NoiseUpdate, Any]:
        """What the step writes, and the new state."""


class NoiseProcess(Protocol):
    """The forward process used in training; hashable.

    Attributes:
      is_masked: True if MASK is the only noise.
    """

    @property
    def is_masked(self) -> bool: ...

    def shares(self, level: jax.Array, /) -> Any:
        """Fractions of ``clean``, ``mask`` and ``text`` tokens at noise levels in [0, 1]."""
        ...


@rule
class Posterior(NoiseRule):
    """Reverses a forward process with noise other than MASK. Every token can change.

    Step i of S goes from time ``t = a (1 - i/S)`` to ``s = a (1 - (i + 1)/S)``, where ``a`` is 1,
    or lower to keep more of a draft. At each open position, ``z_s`` is drawn from ``q(z_s | z_t,
    x)``, with the model's predicted distribution in place of x (Schiff et al. 2024, UDLM, equation
    15; von Rutte et al. 2025, GIDD, section 3.3).

    Let ``r = alpha_t / alpha_s``, and let ``c(k)`` be the probability of noise ``k`` as defined in
    `dlm_jax.objectives.forward_process`. The current token z stays with weight ``r (alpha_s p(z) +
    c_s(z))`` and is replaced with weight ``c_t(z) - r c_s(z)``. The replacement is drawn from the
    model with probability ``alpha_s``, and otherwise from the noise.
    """

    about = "reverse steps of the noise process; any token can change until the end"

    start_B: jax.Array = per_row(
        Setting(
            "posterior_start",
            1.0,
            "order=posterior: time of the first step, in (0, 1]; below 1, a draft keeps most of "
            "its tokens",
            low=ABOVE_ZERO,
            high=1.0,
            activates=False,
            is_preset=True,
        )
    )
    process: NoiseProcess = fact("process")
    schedule: NoiseSchedule = fact("noise")

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        """The probability, which is read as a weight and never compared."""
        return jnp.exp(drawn.logprob_N), state_N

    def begin(self, context: NoiseContext) -> jax.Array:
        """Noise of level 1 for every position."""
        return self._noise(context, jnp.ones_like(self.start_B))

    def update(
        self, state: Any, context: NoiseContext, proposal: Proposal
    ) -> tuple[NoiseUpdate, Any]:
        """The candidate, new noise or the current token."""
        own_BL, is_mask_BL = proposal.confidence_BL, context.tokens_BL == context.mask_id

        # The share of the current token in the noise: 0 for tokens that are not noise.
        def of_current(mask_B1: jax.Array, text_B1: jax.Array) -> jax.Array:
            number_B1 = jnp.maximum(context.num_ids_B, 1)[:, None]
            text_BL = jnp.where(context.is_noise_BL, text_B1 / number_B1, 0.0)
            return jnp.where(is_mask_BL, mask_B1, text_BL)

        # Noise levels at the start and at the end of the step.
        steps_B = context.steps_B.astype(jnp.float32)
        t_B = self.start_B * (1.0 - context.step_B / steps_B)
        s_B = self.start_B * jnp.maximum(1.0 - (context.step_B + 1) / steps_B, 0.0)
        t_B, s_B = self.schedule.masked_ratio(t_B), self.schedule.masked_ratio(s_B)

        # Unnormalised probabilities of a clean token, of new noise and of the current token.
        now, then = (
            jax.tree.map(lambda share_B: share_B[:, None], self.process.shares(level_B))
            for level_B in (t_B, s_B)
        )
        ratio_B1 = now.clean / jnp.maximum(then.clean, 1e-9)
        fresh_BL = of_current(
            jnp.maximum(now.mask - ratio_B1 * then.mask, 0.0),
            jnp.maximum(now.text - ratio_B1 * then.text, 0.0),
        )
        stay_BL = ratio_B1 * (then.clean * own_BL + of_current(then.mask, then.text))
        clean_BL, noise_BL = fresh_BL * then.clean, fresh_BL * (1.0 - then.clean)

        upto_BL = clean_BL + noise_BL
        drawn_BL = uniform(salted(context.key_B, _KIND_SALT), own_BL.shape[1])
        place_BL = drawn_BL * (upto_BL + stay_BL)
        is_clean_BL = place_BL < clean_BL
        is_noise_BL = ~is_clean_BL & (place_BL < upto_BL)
        tokens_BL = jnp.where(is_noise_BL, self._noise(context, s_B), context.tokens_BL)
        return NoiseUpdate(tokens_BL, is_clean_BL), state

    def _noise(self, context: NoiseContext, level_B: jax.Array) -> jax.Array:
        """Noise ``[B, L]`` at a level: MASK, or random ids that can be written in the row."""
        shares, num_positions = self.process.shares(level_B), context.tokens_BL.shape[1]
        chance_B1 = (shares.mask / jnp.maximum(shares.mask + shares.text, 1e-9))[:, None]
        is_mask_BL = uniform(salted(context.key_B, _NOISE_SALT), num_positions) < chance_B1
        return jnp.where(is_mask_BL, context.mask_id, context.random_BL)


@rule
class EntropyRenoise(NoiseRule):
    """Accepts candidates by the criterion of `EntropyBound` at any open position, and writes new
    noise at the remaining open positions.

    A block ends when its most likely tokens are the same as in the previous step and the mean
    entropy of its open positions is below ``stop_B``, or when it has no steps left. Each position
    is then set to its most likely token, whose log-probability is not recorded (DiffusionGemma,
    ``DiffusionGemmaForBlockDiffusion``). Entropies are computed after temperature, from the
    distribution that tokens are drawn from.
    """

    about = "holes with a small total entropy; all other holes get new noise at every step"

    bound_B: jax.Array = per_row(ENTROPY_BOUND)
    stop_B: jax.Array = per_row(
        Setting(
            "renoise_stop",
            0.005,
            "order=entropy_renoise: mean entropy in nats, >= 0, below which a block ends if its "
            "most likely tokens are unchanged",
            low=0.0,
            high=1e6,
            activates=False,
            is_preset=True,
        )
    )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        is_noisy = facts.process is not None and not facts.process.is_masked
        why = "writes random tokens, but the model was trained to fill MASK"
        require(is_noisy, "order", cls.name, why, "use order='entropy_bound'")

    def init(self, num_rows: int, num_positions: int) -> Any:
        """The most likely id of each position in the last two steps; -1 for a step that was not
        taken.
        """
        none_BL = jnp.full((num_rows, num_positions), -1, jnp.int32)
        return none_BL, none_BL

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        before_N, _ = state_N
        return certainty(logits_NV, drawn.logprob_N), (vocab.argmax(logits_NV), before_N)

    def update(
        self, state: Any, context: NoiseContext, proposal: Proposal
    ) -> tuple[NoiseUpdate, Any]:
        """The most likely tokens where the block ends, and otherwise candidates and new noise."""
        now_BL, before_BL = state
        is_open_BL, score_BL = context.is_open_BL, proposal.confidence_BL
        repeats_B = jnp.all((now_BL == before_BL) | ~is_open_BL, axis=1)
        entropy_BL = jnp.where(is_open_BL, entropy(score_BL), 0.0)
        mean_B = jnp.sum(entropy_BL, axis=1) / jnp.maximum(jnp.sum(is_open_BL, axis=1), 1)
        is_last_B = context.step_B + 1 >= context.steps_B
        is_final_B = is_last_B | (repeats_B & (mean_B < self.stop_B))
        is_in_BL = within_entropy(score_BL, is_open_BL, self.bound_B, context.preference_BL)
        tokens_BL = jnp.where(is_final_B[:, None], now_BL, context.random_BL)
        return NoiseUpdate(tokens_BL, is_in_BL & ~is_final_B[:, None], is_final_B), state


NOISE_RULES: Mapping[str, type[NoiseRule]] = {
    rule.name: rule for rule in (Posterior, EntropyRenoise)
}
"""Noise rules, keyed by the value of ``order``."""
