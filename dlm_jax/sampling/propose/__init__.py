"""Fill rules, which propose candidates for the open positions of a step."""

from collections.abc import Mapping

from dlm_jax.sampling.propose.constrained import Constrained
from dlm_jax.sampling.propose.fill import (
    FillInput,
    FillOutput,
    FillRule,
    Parallel,
)
from dlm_jax.sampling.propose.wavefront import SamplerReadout, Wavefront, wavefront_fill

FILL_RULES: Mapping[str, type[FillRule]] = {
    rule.name: rule for rule in (Parallel, Wavefront, Constrained)
}
"""Fill rules, keyed by the value of ``fill``."""

__all__ = [
    "FILL_RULES",
    "Constrained",
    "FillInput",
    "FillOutput",
    "FillRule",
    "Parallel",
    "SamplerReadout",
    "Wavefront",
    "wavefront_fill",
]
