"""Configuration of the optimiser."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dlm_jax.config.fields import field, require, require_fit


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: Literal["muon", "adamw"] = field(
        "muon", "muon (Adam for embeddings and norms) or adamw for everything"
    )
    learning_rate: float = field(0.02, "peak learning rate (muon's matrices, or all of adamw)")
    adam_learning_rate: float = field(3e-3, "muon: peak learning rate of what Adam trains")
    final_ratio: float = field(0.0, "last learning rate of the cosine, as a fraction of the peak")
    warmup_steps: int = field(50, "steps of linear warm-up from 0")
    weight_decay: float = field(0.0, "decoupled weight decay of matrices")
    b1: float = field(0.9, "Adam's decay of the mean")
    b2: float = field(0.95, "Adam's decay of the mean square")
    muon_momentum: float = field(0.95, "muon's momentum")
    clip: float = field(1.0, "global gradient norm above which gradients are scaled down")
    ema_decay: float = field(
        0.0, "decay of a moving average of the parameters, which is then what is sampled; 0: none"
    )

    def __post_init__(self) -> None:
        require_fit("optim", self)
        for name in ("learning_rate", "adam_learning_rate", "clip"):
            value = getattr(self, name)
            require(value > 0, f"optim.{name}={value} must be > 0")
        for name in ("b1", "b2", "muon_momentum", "ema_decay"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}={value} must be in [0, 1)")
        require(0 <= self.final_ratio <= 1, f"optim.final_ratio={self.final_ratio} not in [0, 1]")
        require(self.warmup_steps >= 0, f"optim.warmup_steps={self.warmup_steps} must be >= 0")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must be >= 0")
