"""Training: tasks, heads, stages, the optimiser, the step, the run and the loop."""

from dlm_jax.data import Setup
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import Batch, Example, MixedExample, Mixture, NetworkObjective
from dlm_jax.heads import Head, HeadInputs
from dlm_jax.training.run import Problem, Run, prepare, problem
from dlm_jax.training.train_loop import Outcome, describe, run_loop, say, train

__all__ = [
    "Batch", "Example", "Head", "HeadInputs", "Loss", "MixedExample", "Mixture",
    "NetworkObjective", "Outcome", "Problem", "Run", "Setup", "describe", "prepare", "problem",
    "run_loop", "say", "train",
]  # fmt: skip
