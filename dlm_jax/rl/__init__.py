"""Policy optimisation: samples, rewards, and one file for each loss."""

from __future__ import annotations

from dlm_jax.data import Setup
from dlm_jax.diffusion.objectives import NetworkObjective
from dlm_jax.rl.coupled_grpo import coupled_grpo
from dlm_jax.rl.diffu_grpo import diffu_grpo
from dlm_jax.rl.policy import Estimator, Rollout, policy_objective, token_log_probs
from dlm_jax.rl.rollouts import RewardError, Rollouts, reward_line
from dlm_jax.rl.sequence_elbo import sequence_elbo
from dlm_jax.rl.spg import spg
from dlm_jax.rl.trace_rl import trace_rl

__all__ = [
    "ESTIMATORS", "Estimator", "RewardError", "Rollout", "Rollouts", "objective_of",
    "policy_objective", "reward_line", "token_log_probs",
]  # fmt: skip

ESTIMATORS = {
    "diffu_grpo": lambda setup: diffu_grpo(setup.config.rl, mask_id=setup.mask_id),
    "coupled_grpo": lambda setup: coupled_grpo(setup.config.rl, mask_id=setup.mask_id),
    "elbo": lambda setup: sequence_elbo(setup.config.rl, mask_id=setup.mask_id),
    "spg": lambda setup: spg(setup.config.rl, mask_id=setup.mask_id),
    "trace": lambda setup: trace_rl(setup.config.rl, setup.config.sample),
}
"""Functions ``(setup) -> Estimator`` by ``rl.loss``."""


def objective_of(setup: Setup) -> NetworkObjective:
    """The objective that ``[rl]`` configures."""
    settings = setup.config.rl
    return policy_objective(ESTIMATORS[settings.loss](setup), settings)
