"""Configuration of the training run."""

from __future__ import annotations

import dataclasses
import difflib

from dlm_jax.config.fields import field, require, require_fit

TRACKERS = ("tensorboard", "wandb")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training run: how long, how often it logs, evaluates and saves, and where it writes."""

    out_dir: str = field("runs/default", "where checkpoints, metrics and plots are written")
    init_from: str = field(
        "",
        "run, weights file or model that ships, whose parameters the model begins with; empty: "
        "fresh ones",
    )
    steps: int = field(1000, "optimiser steps")
    batch_size: int = field(32, "rows of one step, over all devices and processes")
    accumulate: int = field(
        1, "parts of a batch that run one after the other, to save memory; the result is the same"
    )
    seed: int = field(0, "of the parameters, the data order and the noise")
    log_every: int = field(10, "steps between two lines of metrics")
    eval_every: int = field(250, "steps between evaluations on held-out text; 0: only at the end")
    eval_windows: int = field(256, "held-out windows of one evaluation, at most")
    sample_every: int = field(0, "steps between samples shown while training; 0: only at the end")
    trackers: tuple[str, ...] = field(
        ("tensorboard",),
        "what else shows the metrics: tensorboard (event files in out_dir) and wandb, if installed",
    )
    checkpoint_dir: str = field(
        "", "where checkpoints go, a directory or a URL (gs://, s3://); empty: out_dir/checkpoints"
    )
    checkpoint_every: int = field(250, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = field(2, "newest checkpoints to keep")

    def __post_init__(self) -> None:
        require_fit("train", self)
        for name in (
            "steps", "batch_size", "accumulate", "log_every", "eval_windows", "keep_checkpoints"
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"train.{name}={value} must be at least 1")
        require(
            self.batch_size % self.accumulate == 0,
            f"train.accumulate={self.accumulate} does not divide train.batch_size="
            f"{self.batch_size}; use a divisor",
        )
        for name in ("seed", "eval_every", "sample_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value} must be at least 0")
        for name in self.trackers:
            near = difflib.get_close_matches(name, TRACKERS, n=1, cutoff=0.0)
            require(
                name in TRACKERS,
                f"train.trackers={name!r} is unknown; did you mean {''.join(near)!r}?",
            )
        require(self.out_dir != "", "train.out_dir is empty; name a directory")
