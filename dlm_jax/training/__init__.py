"""Training: tasks, heads, stages, the optimiser, the step and the trainer."""

from dlm_jax.data import Setup
from dlm_jax.heads import Head
from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Batch, Drawn, Mixture, Objective
from dlm_jax.training.custom_loop import Problem, problem
from dlm_jax.training.trainer import Outcome, Run, describe, prepare, run_loop, say, train

__all__ = [
    "Batch", "Drawn", "Head", "Loss", "Mixture", "Objective", "Outcome", "Problem", "Run", "Setup",
    "describe", "prepare", "problem", "run_loop", "say", "train",
]  # fmt: skip
