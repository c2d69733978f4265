"""The loop of DiffusionGemma: tokens with low entropy stay, and the others are new noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling import draw
from dlm_jax.sampling.commit.commit_rule import Proposal
from dlm_jax.sampling.commit.quotas import certainty, entropy
from dlm_jax.sampling.commit.sure import ENTROPY_BOUND, within_entropy
from dlm_jax.sampling.noise.noise_rule import NoiseContext, NoiseRule, NoiseUpdate
from dlm_jax.settings import Setting, SettingError, per_row, rule


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
    def check(cls, row: Any) -> None:
        if row.fill == "wavefront":
            raise SettingError(
                "fill",
                row.fill,
                "draws tokens jointly, but order='entropy_renoise' accepts each token by its own "
                "entropy",
                "use fill='parallel', or order='posterior'",
            )
        super().check(row)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        if facts.process is None or facts.process.is_masked:
            raise SettingError(
                "order",
                cls.name,
                "writes random tokens, but the model was trained to fill MASK",
                "use order='entropy_bound'",
            )

    def init(self, num_rows: int, num_positions: int) -> Any:
        """The most likely id of each position in the last two steps; -1 for a step that was not
        taken.
        """
        none_BL = jnp.full((num_rows, num_positions), -1, jnp.int32)
        return none_BL, none_BL

    def score(
        self, state_N: Any, logits_NV: jax.Array, logprob_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        before_N, _ = state_N
        return certainty(logits_NV, logprob_N), (draw.argmax(logits_NV), before_N)

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
        tokens_BL = jnp.where(is_final_B[:, None], now_BL, context.noise.random_BL)
        return NoiseUpdate(tokens_BL, is_in_BL & ~is_final_B[:, None], is_final_B), state
