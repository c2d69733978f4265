"""Policy optimisation: `train_policy` trains a model on rewards for its own samples."""

from dlm_jax.contrib.rl.optimise import Reward, train_policy
from dlm_jax.contrib.rl.policy import (
    Estimator,
    PolicySettings,
    Rollout,
    policy_loss,
    token_log_probs,
)

__all__ = [
    "Estimator",
    "PolicySettings",
    "Reward",
    "Rollout",
    "policy_loss",
    "token_log_probs",
    "train_policy",
]
