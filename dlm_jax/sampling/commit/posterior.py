"""Reverses a forward process with noise other than MASK. Every token can change.

Step i of S goes from time ``t = a (1 - i/S)`` to ``s = a (1 - (i + 1)/S)``, where ``a`` is 1, or
lower to keep more of a draft. At each open position, ``z_s`` is drawn from ``q(z_s | z_t, x)``,
with the model's predicted distribution in place of x (Schiff et al. 2024, UDLM, equation 15; von
Rutte et al. 2025, GIDD, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.ancestral import NoiseSchedule
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    Proposal,
    Standing,
    uniform,
)
from dlm_jax.settings import ABOVE_ZERO, Setting, SettingError, fact, per_row, rule

POSTERIOR_START = Setting(
    "posterior_start", 1.0,
    "order=posterior: time of the first step, in (0, 1]; below 1, a draft keeps most of its tokens",
    low=ABOVE_ZERO, high=1.0, activates=False,
)  # fmt: skip

_NEEDS: dict[str, tuple[Any, ...]] = {
    "fill": ("parallel", "auto"), "remask": ("none",), "cache": ("none", "exact"),
    "guidance": (0.0,), "structure": ("",),
}  # fmt: skip
_KIND_SALT, _NOISE_SALT = 0x6B696E64, 0x6D61736B


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


class Renewing(CommitRule):
    """A rule that can change every token of a block until the block ends."""

    renews = True

    @classmethod
    def check(cls, row: Any) -> None:
        for name, fine in _NEEDS.items():
            given = getattr(row, name)
            if given not in fine:
                raise SettingError(
                    name, given,
                    f"is not supported with order={cls.name!r}, which can change any token",
                    f"use {name}={fine[0]!r}",
                )  # fmt: skip
        for name, is_on in (("edit", row.edits), ("renoise_start", row.renoises)):
            if is_on:
                raise SettingError(
                    name, getattr(row, name), f"is not supported with order={cls.name!r}",
                    "leave it at its default",
                )  # fmt: skip

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if row.cache != "none" and not facts.canvas_length:
            raise SettingError(
                "cache", row.cache,
                f"is not supported with order={cls.name!r}, which can change any token",
                "use cache='none'",
            )  # fmt: skip

    @classmethod
    def check_trace(cls, row: Any) -> None:
        raise SettingError(
            "order", cls.name, "has no trace: it also writes tokens that are not candidates",
            "leave trace out",
        )  # fmt: skip

    def weighed(self, logits_NV: jax.Array, filtered: Callable[[], jax.Array]) -> jax.Array | None:
        """The logits that candidates are drawn from."""
        return filtered()


@rule
class Posterior(Renewing):
    """Samples every open position from the reverse step of the process, with three outcomes.

    Let ``r = alpha_t / alpha_s``, and let ``c(k)`` be the probability of noise ``k`` as defined in
    `dlm_jax.diffusion.processes`. The current token z stays with weight ``r (alpha_s p(z) +
    c_s(z))`` and is replaced with weight ``c_t(z) - r c_s(z)``. The replacement is drawn from the
    model with probability ``alpha_s``, and otherwise from the noise.
    """

    about = "reverse steps of the noise process; any token can change until the end"

    start_B: jax.Array = per_row(POSTERIOR_START)
    process: NoiseProcess = fact("process")
    schedule: NoiseSchedule = fact("noise")

    def begin(self, standing: Standing, key_B: jax.Array) -> jax.Array:
        """Noise of level 1 for every position."""
        return self._noise(standing, key_B, jnp.ones_like(self.start_B))

    def select(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        kind_BL = self._kind(context, proposal)
        return context.is_hole_BL & (kind_BL == 0)

    def renewed(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """New noise where `_kind` selects it, and the current token elsewhere."""
        standing = context.standing
        assert standing is not None, "the rule renews"
        kind_BL = self._kind(context, proposal)
        noise_BL = self._noise(standing, context.key_B, self._levels(context)[1])
        return jnp.where(kind_BL == 1, noise_BL, standing.tokens_BL)

    def chances(self, context: CommitContext, own_BL: jax.Array) -> Chances:
        """Computes the `Chances` from the model's probability of the current token."""
        standing = context.standing
        assert standing is not None, "the rule renews"
        now, then = (
            jax.tree.map(lambda x_B: x_B[:, None], self.process.shares(v_B))
            for v_B in self._levels(context)
        )
        ratio_B1 = now.clean / jnp.maximum(then.clean, 1e-9)
        number_B1 = jnp.maximum(standing.num_ids_B, 1)[:, None]

        def of_shown(mask_B1: jax.Array, text_B1: jax.Array) -> jax.Array:
            text_BL = jnp.where(standing.is_noise_BL, text_B1 / number_B1, 0.0)
            return jnp.where(standing.is_mask_BL, mask_B1, text_BL)

        fresh_BL = of_shown(
            jnp.maximum(now.mask - ratio_B1 * then.mask, 0.0),
            jnp.maximum(now.text - ratio_B1 * then.text, 0.0),
        )
        kept_BL = then.clean * own_BL + of_shown(then.mask, then.text)
        return Chances(fresh_BL * then.clean, fresh_BL * (1.0 - then.clean), ratio_B1 * kept_BL)

    def _levels(self, context: CommitContext) -> tuple[jax.Array, jax.Array]:
        """Noise levels at the start and at the end of the step, ``[B]`` each."""
        steps_B = context.steps_B.astype(jnp.float32)
        t_B = self.start_B * (1.0 - context.step_B / steps_B)
        s_B = self.start_B * jnp.maximum(1.0 - (context.step_B + 1) / steps_B, 0.0)
        return self.schedule.masked_ratio(t_B), self.schedule.masked_ratio(s_B)

    def _kind(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """The outcome ``[B, L]``: 0 for the candidate, 1 for new noise, 2 for the current token."""
        chances = self.chances(context, proposal.confidence_BL)
        upto_BL = chances.data + chances.noise
        drawn_BL = uniform(_salted(context.key_B, _KIND_SALT), upto_BL.shape[1])
        place_BL = drawn_BL * (upto_BL + chances.stay)
        return jnp.where(place_BL < chances.data, 0, jnp.where(place_BL < upto_BL, 1, 2))

    def _noise(self, standing: Standing, key_B: jax.Array, level_B: jax.Array) -> jax.Array:
        """Noise ``[B, L]`` at a level: MASK, or random ids that can be written in the row."""
        shares = self.process.shares(level_B)
        chance_B1 = (shares.mask / jnp.maximum(shares.mask + shares.text, 1e-9))[:, None]
        is_mask_BL = uniform(_salted(key_B, _NOISE_SALT), standing.tokens_BL.shape[1]) < chance_B1
        return jnp.where(is_mask_BL, standing.mask_id, standing.random_BL)


def _salted(key_B: jax.Array, salt: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, salt))(key_B)
