"""Configuration of how the heads of a model are trained, and when."""

from __future__ import annotations

import dataclasses

from dlm_jax.config.fields import field, require, require_fit


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Training of the sampler head, the critic and one's own heads."""

    start_sampler_iteration: int = field(0, "steps before the sampler head begins to train")
    start_critic_iteration: int = field(0, "steps before the critic begins to train")
    end_critic_iteration: int = field(
        0, "step at which the critic's loss has its full weight; up to its start: from the start on"
    )
    critic_alpha: float = field(0.5, "full weight of the critic's loss, >= 0")
    critic_masked_only: bool = field(
        False, "the critic judges filled holes alone, not the text around them"
    )
    sampler_reveal: float = field(
        0.0, "chance that the sampler head sees the token of a neighbour that is a hole, in [0, 1]"
    )
    train_main: bool = field(
        True, "false: the model itself stays as train.init_from has it, and its heads learn alone"
    )
    learning_rate: float = field(3e-3, "peak learning rate of the heads (AdamW)")
    weight_decay: float = field(0.0, "decoupled weight decay of the heads' matrices")
    warmup_steps: int = field(50, "steps of linear warm-up, counted from each head's own start")
    clip: float = field(1.0, "gradient norm of a head above which its gradient is scaled down")

    def __post_init__(self) -> None:
        require_fit("heads", self)
        for name in (
            "start_sampler_iteration", "start_critic_iteration", "end_critic_iteration",
            "critic_alpha", "weight_decay", "warmup_steps",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, f"heads.{name}={value} must be at least 0")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            require(value > 0, f"heads.{name}={value} must be > 0")
        require(
            0 <= self.sampler_reveal <= 1,
            f"heads.sampler_reveal={self.sampler_reveal} is not in [0, 1]; use 0.5",
        )
