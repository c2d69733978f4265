"""Training: the trainer, and the records of objectives and heads."""

from dlm_jax.heads import Head
from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Batch, Drawn, Objective
from dlm_jax.training.tasks import Task
from dlm_jax.training.trainer import (
    Outcome,
    Run,
    describe,
    prepare,
    problem,
    run_loop,
    say,
    train,
)

__all__ = [
    "Batch", "Drawn", "Head", "Loss", "Objective", "Outcome", "Run", "Task", "describe", "prepare",
    "problem", "run_loop", "say", "train",
]  # fmt: skip
