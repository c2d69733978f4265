"""Reverses a forward process with noise other than MASK. Every token can change.

Step i of S goes from time ``t = a (1 - i/S)`` to ``s = a (1 - (i + 1)/S)``, where ``a`` is 1, or
lower to keep more of a draft. At each open position, ``z_s`` is drawn from ``q(z_s | z_t, x)``,
with the model's predicted distribution in place of x (Schiff et al. 2024, UDLM, equation 15; von
Rutte et al. 2025, GIDD, section 3.3).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.randomness import salted
from dlm_jax.sampling.commit.ancestral import NoiseSchedule
from dlm_jax.sampling.commit.commit_rule import Proposal, uniform
from dlm_jax.sampling.noise.noise_rule import NoiseContext, NoiseRule, NoiseUpdate, NoisyCanvas
from dlm_jax.settings import (
    ABOVE_ZERO,
    Setting,
    SettingError,
    fact,
    per_row,
    require_head,
    rule,
    static,
)

_KIND_SALT, _NOISE_SALT, _WRONG_SALT = 0x6B696E64, 0x6D61736B, 0x77726F6E


class NoiseProcess(Protocol):
    """The forward process used in training; hashable.

    Attributes:
      is_masked: True if MASK is the only noise.
    """

    is_masked: ClassVar[bool]

    def shares(self, level: jax.Array, /) -> Any:
        """Fractions of ``clean``, ``mask`` and ``text`` tokens at noise levels in [0, 1]."""
        ...


class Chances(NamedTuple):
    """Unnormalised probabilities of the three outcomes at a position, float32 ``[B, L]``.

    Attributes:
      data: weight of a token drawn from the model's distribution.
      noise: weight of new noise.
      stay: weight of the current token.
    """

    data: jax.Array
    noise: jax.Array
    stay: jax.Array


@rule
class Posterior(NoiseRule):
    """Samples the outcome of a reverse step at each open position: the token, a candidate or noise.

    Let ``r = alpha_t / alpha_s``, and let ``c(k)`` be the probability of noise ``k`` as defined in
    `dlm_jax.diffusion.processes`. The current token z stays with weight ``r (alpha_s p(z) +
    c_s(z))`` and is replaced with weight ``c_t(z) - r c_s(z)``. The replacement is drawn from the
    model with probability ``alpha_s``, and otherwise from the noise.

    These are the weights of ``q(z_s | z_t, x)``, averaged over a token x whose posterior is derived
    from p. Two options draw x first and use the weights for this x, where p(z) is 1 if x is z, and
    otherwise 0. With a fill in waves, the candidates are a joint draw of x. With the critic, which
    predicts the probability w that z is wrong, x is the candidate with probability ``min(1, w /
    (1 - p(z)))``, and otherwise z. If w is at most ``1 - p(z)``, x differs from z with probability
    w. If the critic is exact, outcomes have the same distribution as without it.
    """

    about = "reverse steps of the noise process; any token can change until the end"
    fills = (*NoiseRule.fills, "wavefront")

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
    needs: tuple[str, ...] = static(
        Setting(
            "renew_by",
            "probability",
            "order=posterior: source of the probability that a token is wrong: the network's "
            "probability of the token (probability), or the critic head (critic), which costs a "
            "forward pass if the canvas has MASK",
            choices={"probability": (), "critic": ("head:critic",)},
            activates=False,
            is_preset=True,
        )
    )
    schedule: NoiseSchedule = fact("noise")

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        asks, in_waves = row.renew_by == "critic", row.fill == "wavefront"
        only_masks = facts.process is None or facts.process.is_masked
        if asks:
            require_head("critic", facts, "renew_by", "critic", "use renew_by='probability'")
        for is_refused, name, why, remedy in (
            (
                asks and only_masks,
                "renew_by",
                "has no effect, because the only noise is MASK",
                "use renew_by='probability'",
            ),
            (
                asks and in_waves,
                "renew_by",
                "is not supported with fill='wavefront', which draws wrong tokens jointly",
                "use fill='parallel'",
            ),
            (asks and row.cache != "none", "renew_by", "reads whole rows", "use cache='none'"),
            (
                in_waves and only_masks,
                "fill",
                "is not supported with order='posterior' if the only noise is MASK",
                "use order='ancestral'",
            ),
        ):
            if is_refused:
                raise SettingError(name, getattr(row, name), why, remedy)

    def score(
        self, state_N: Any, logits_NV: jax.Array, logprob_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The probability, which is read as a weight and never compared."""
        return jnp.exp(logprob_N), state_N

    def begin(self, noise: NoisyCanvas, key_B: jax.Array) -> jax.Array:
        """Noise of level 1 for every position."""
        return self._noise(noise, key_B, jnp.ones_like(self.start_B))

    def update(
        self, state: Any, context: NoiseContext, proposal: Proposal
    ) -> tuple[NoiseUpdate, Any]:
        """The candidate, new noise or the current token, as `_outcome` selects."""
        kind_BL, is_candidate_BL = self._outcome(context, proposal)
        noise_BL = self._noise(context.noise, context.key_B, self._levels(context)[1])
        tokens_BL = jnp.where(kind_BL == 1, noise_BL, context.noise.tokens_BL)
        return NoiseUpdate(tokens_BL, (kind_BL == 0) & is_candidate_BL), state

    def chances(self, context: NoiseContext, own_BL: jax.Array) -> Chances:
        """Computes the `Chances` of a reverse step from the model's probability of the current
        token.
        """
        noise = context.noise
        now, then = (self._shares(level_B) for level_B in self._levels(context))
        ratio_B1 = now.clean / jnp.maximum(then.clean, 1e-9)
        fresh_BL = of_current(
            noise,
            jnp.maximum(now.mask - ratio_B1 * then.mask, 0.0),
            jnp.maximum(now.text - ratio_B1 * then.text, 0.0),
        )
        kept_BL = then.clean * own_BL + of_current(noise, then.mask, then.text)
        return Chances(fresh_BL * then.clean, fresh_BL * (1.0 - then.clean), ratio_B1 * kept_BL)

    def _shares(self, level_B: jax.Array) -> Any:
        return jax.tree.map(lambda share_B: share_B[:, None], self.process.shares(level_B))

    def _levels(self, context: NoiseContext) -> tuple[jax.Array, jax.Array]:
        """Noise levels at the start and at the end of the step, ``[B]`` each."""
        steps_B = context.steps_B.astype(jnp.float32)
        t_B = self.start_B * (1.0 - context.step_B / steps_B)
        s_B = self.start_B * jnp.maximum(1.0 - (context.step_B + 1) / steps_B, 0.0)
        return self.schedule.masked_ratio(t_B), self.schedule.masked_ratio(s_B)

    def _outcome(self, context: NoiseContext, proposal: Proposal) -> tuple[jax.Array, jax.Array]:
        """The outcome ``[B, L]``: 0 for the clean token, 1 for new noise, 2 for the current token;
        and True where the clean token is the candidate, not the current token.
        """
        own_BL = proposal.confidence_BL
        is_candidate_BL = jnp.ones(own_BL.shape, bool)
        if context.wrong_BL is not None:
            drawn_BL = uniform(salted(context.key_B, _WRONG_SALT), own_BL.shape[1])
            is_candidate_BL = drawn_BL * (1.0 - own_BL) < context.wrong_BL
            is_candidate_BL |= context.noise.is_mask_BL
            is_same_BL = proposal.tokens_BL == context.noise.tokens_BL
            own_BL = (is_same_BL | ~is_candidate_BL).astype(jnp.float32)
        chances = self.chances(context, own_BL)
        upto_BL = chances.data + chances.noise
        drawn_BL = uniform(salted(context.key_B, _KIND_SALT), upto_BL.shape[1])
        place_BL = drawn_BL * (upto_BL + chances.stay)
        kind_BL = jnp.where(place_BL < chances.data, 0, jnp.where(place_BL < upto_BL, 1, 2))
        return kind_BL, is_candidate_BL

    def _noise(self, noise: NoisyCanvas, key_B: jax.Array, level_B: jax.Array) -> jax.Array:
        """Noise ``[B, L]`` at a level: MASK, or random ids that can be written in the row."""
        shares = self.process.shares(level_B)
        chance_B1 = (shares.mask / jnp.maximum(shares.mask + shares.text, 1e-9))[:, None]
        is_mask_BL = uniform(salted(key_B, _NOISE_SALT), noise.tokens_BL.shape[1]) < chance_B1
        return jnp.where(is_mask_BL, noise.mask_id, noise.random_BL)


def of_current(noise: NoisyCanvas, mask_B1: jax.Array, text_B1: jax.Array) -> jax.Array:
    """The share of each current token in the noise, ``[B, L]``; 0 for tokens that are not noise."""
    number_B1 = jnp.maximum(noise.num_ids_B, 1)[:, None]
    text_BL = jnp.where(noise.is_noise_BL, text_B1 / number_B1, 0.0)
    return jnp.where(noise.is_mask_BL, mask_B1, text_BL)
