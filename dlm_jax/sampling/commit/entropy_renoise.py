"""The loop of DiffusionGemma, which keeps tokens with low entropy and renews all others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling import draw
from dlm_jax.sampling.commit.commit_rule import CommitContext, Proposal, RuleMemory, Standing
from dlm_jax.sampling.commit.posterior import Renewing
from dlm_jax.sampling.commit.quotas import entropy
from dlm_jax.sampling.commit.sure import EntropyBound
from dlm_jax.settings import Setting, SettingError, per_row, rule


@rule
class EntropyRenoise(Renewing, EntropyBound):
    """Accepts candidates by the criterion of `EntropyBound` at any open position, and writes new
    noise at the remaining open positions.

    A block ends when its most likely tokens are the same as in the previous step and the mean
    entropy of its open positions is below ``stop_B``, or when it has no steps left. Each position
    is then set to its most likely token, whose log-probability is not recorded (DiffusionGemma,
    ``DiffusionGemmaForBlockDiffusion``). Entropies are computed after temperature, from the
    distribution that tokens are drawn from.
    """

    about = "holes with a small total entropy; all other holes get new noise at every step"

    stop_B: jax.Array = per_row(Setting(
        "renoise_stop", 0.005,
        "order=entropy_renoise: mean entropy in nats, >= 0, below which a block ends if its most "
        "likely tokens are unchanged",
        low=0.0, high=1e6, activates=False,
    ))  # fmt: skip

    @classmethod
    def check(cls, row: Any) -> None:
        if row.fill == "wavefront":
            raise SettingError(
                "fill", row.fill,
                "draws tokens jointly, but order='entropy_renoise' accepts each token by its own "
                "entropy", "use fill='parallel', or order='posterior'",
            )  # fmt: skip
        super().check(row)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        if facts.process is None or facts.process.is_masked:
            raise SettingError(
                "order", cls.name, "writes random tokens, but the model was trained to fill MASK",
                "use order='entropy_bound'",
            )  # fmt: skip

    def start_memory(self, num_rows: int, num_positions: int) -> RuleMemory:
        """The most likely id of each position in the last two steps, and True for rows whose block
        has ended. The ids are -1 for a step that was not taken.
        """
        none_BL = jnp.full((num_rows, num_positions), -1, jnp.int32)
        return RuleMemory((none_BL, none_BL), jnp.zeros(num_rows, bool))

    def observe(
        self,
        kept: Any,
        row_N: jax.Array,
        logits_NV: jax.Array,
        ids_N: jax.Array,
        logprob_N: jax.Array,
    ) -> tuple[Any, jax.Array]:
        before_N, _ = kept
        return (draw.argmax(logits_NV), before_N), self.measure(logits_NV, logprob_N)

    def begin(self, standing: Standing, key_B: jax.Array) -> jax.Array:
        return standing.random_BL

    def select(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        return super().select(context, proposal) & ~self._is_final(context, proposal)[:, None]

    def renewed(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """The most likely tokens where the block ends, and new noise elsewhere."""
        assert context.standing is not None, "the rule renews"
        now_BL, _ = context.memory.places
        is_final_B1 = self._is_final(context, proposal)[:, None]
        return jnp.where(is_final_B1, now_BL, context.standing.random_BL)

    def remember(
        self, context: CommitContext, proposal: Proposal, is_committed_BL: jax.Array
    ) -> Any:
        return self._is_final(context, proposal)

    def finished(self, memory: RuleMemory) -> jax.Array | None:
        return memory.rows

    def _is_final(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """True ``[B]`` for rows whose block ends with this step."""
        (now_BL, before_BL), is_open_BL = context.memory.places, context.is_hole_BL
        repeats_B = jnp.all((now_BL == before_BL) | ~is_open_BL, axis=1)
        entropy_BL = jnp.where(is_open_BL, entropy(proposal.confidence_BL), 0.0)
        mean_B = jnp.sum(entropy_BL, axis=1) / jnp.maximum(jnp.sum(is_open_BL, axis=1), 1)
        is_last_B = context.step_B + 1 >= context.steps_B
        return is_last_B | (repeats_B & (mean_B < self.stop_B))
