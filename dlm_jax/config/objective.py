"""Configuration of the training objective."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Literal

from dlm_jax.config.fields import field, require, require_fit

PATTERNS = ("random", "sticky", "span")
MISPRINTS = (
    "missing", "wrong", "stray", "transposed", "missing_pair", "wrong_pair", "stray_pair"
)  # fmt: skip
USUAL_MISPRINTS = MISPRINTS[:3]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What a bidirectional model is trained for; a causal one predicts the next token instead."""

    schedule: Literal["linear", "cosine", "polynomial"] = field(
        "linear", "noise schedule of the ELBO: linear, cosine or polynomial"
    )
    schedule_power: float = field(2.0, "polynomial schedule: the share hidden at time t is t^power")
    normaliser: Literal["tokens", "rows", "masked"] = field(
        "tokens",
        "what the ELBO's weighted sum is divided by: tokens (all that are not given), rows (first "
        "each row by its own tokens, then by the rows) or masked (the tokens that are hidden)",
    )
    time_weight: bool = field(
        True, "hidden tokens are weighted as the ELBO weights their time; false: all alike"
    )
    denoising_share: float = field(
        0.0, "share of each batch's rows, and of the loss, that is denoising instead of the ELBO"
    )
    patterns: tuple[str, ...] = field(
        PATTERNS, "denoising: what selects the positions to restore, one a row"
    )
    max_ratio: float = field(
        1.0, "denoising: random and sticky select a share that is uniform up to this one"
    )
    sticky_alone: float = field(0.03, "sticky: chance of a position without selected neighbour")
    sticky_beside: float = field(0.3, "sticky: chance of a position beside a selected one")
    span_count: int = field(3, "span: spans of a row")
    mask_share: float = field(0.8, "denoising: share of the selected positions that show MASK")
    random_share: float = field(0.1, "denoising: share that shows a random token; the rest its own")
    identity_targets: bool = field(
        False, "denoising: ask for every position, not only for the selected ones"
    )
    proofreading_share: float = field(
        0.0,
        "share of each batch's rows, and of the loss, that is misprinted: tokens missing, "
        "stray or wrong",
    )
    misprint_ratio: float = field(
        0.1, "proofreading: a row's share of misprints is uniform up to this one"
    )
    misprint_kinds: tuple[str, ...] = field(
        USUAL_MISPRINTS,
        "proofreading: what happens to a misprinted token, each as often as it is named; missing, "
        "wrong or stray, transposed with the next one, or the same to two: missing_pair, "
        "wrong_pair, stray_pair",
    )
    misprint_masked_rows: float = field(
        0.5, "proofreading: share of its rows that show MASK besides"
    )
    random_length_share: float = field(
        0.0, "share of the batches that are cut to a random length; 0.01 is usual"
    )

    def __post_init__(self) -> None:
        require_fit("objective", self)
        require(
            self.schedule_power > 0,
            f"objective.schedule_power={self.schedule_power} must be > 0; use 2.0",
        )
        for name in (
            "denoising_share", "mask_share", "random_share", "random_length_share",
            "proofreading_share", "misprint_masked_rows",
        ):  # fmt: skip
            value = getattr(self, name)
            require(0 <= value <= 1, f"objective.{name}={value} is not in [0, 1]")
        for name in ("max_ratio", "sticky_beside", "misprint_ratio"):
            value = getattr(self, name)
            require(0 < value <= 1, f"objective.{name}={value} is not in (0, 1]")
        require(
            1e-3 <= self.sticky_alone <= 1,
            f"objective.sticky_alone={self.sticky_alone} is not in [0.001, 1]; use 0.03",
        )
        require(
            self.mask_share + self.random_share <= 1 + 1e-6,
            f"objective.mask_share={self.mask_share} and objective.random_share="
            f"{self.random_share} add up to more than 1; lower one",
        )
        require(
            self.denoising_share + self.proofreading_share <= 1 + 1e-6,
            f"objective.denoising_share={self.denoising_share} and objective.proofreading_share="
            f"{self.proofreading_share} add up to more than 1; lower one",
        )
        require(self.span_count >= 1, f"objective.span_count={self.span_count} must be at least 1")
        _check_names("patterns", self.patterns, PATTERNS)
        _check_names("misprint_kinds", tuple(dict.fromkeys(self.misprint_kinds)), MISPRINTS)


def _check_names(field_name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuses names that are unknown, none, or given twice."""
    for name in set(given) - set(known):
        (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"objective.{field_name} has {name!r}, which is not one of {', '.join(known)}; "
            f"did you mean {near!r}?"
        )
    require(
        len(given) > 0 and len(set(given)) == len(given),
        f"objective.{field_name}={given} names none or one twice; name each once",
    )
