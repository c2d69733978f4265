"""Training: tasks, heads, stages, the optimiser, the step, the run and the loop."""

from dlm_jax.data import Setup
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import Batch, Drawn, Mixture, Objective
from dlm_jax.heads import Head
from dlm_jax.training.run import Problem, Run, prepare, problem
from dlm_jax.training.train_loop import Outcome, describe, run_loop, say, train

__all__ = [
    "Batch", "Drawn", "Head", "Loss", "Mixture", "Objective", "Outcome", "Problem", "Run", "Setup",
    "describe", "prepare", "problem", "run_loop", "say", "train",
]  # fmt: skip
