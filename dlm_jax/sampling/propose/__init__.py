"""Fills: how a step finds candidates for its open positions."""

from collections.abc import Mapping

from dlm_jax.sampling.propose.fill import (
    CandidateWriter,
    Filled,
    FillRule,
    Parallel,
    Reader,
    Wanted,
)
from dlm_jax.sampling.propose.speculative import Speculative
from dlm_jax.sampling.propose.wavefront import Wavefront

FILL_RULES: Mapping[str, type[FillRule]] = {
    rule.name: rule for rule in (Parallel, Wavefront, Speculative)
}
"""Fills by the setting ``fill``."""

__all__ = [
    "FILL_RULES",
    "CandidateWriter",
    "FillRule",
    "Filled",
    "Parallel",
    "Reader",
    "Speculative",
    "Wanted",
    "Wavefront",
]
