"""Functions and settings that the built-in rules share, for rules outside of this package.

The public names of `dlm_jax` are the base classes of rules, their arguments, and the declarations
of settings. This module has what rules are written with. Passes over the vocabulary are in
`dlm_jax.sampling.vocab` and `dlm_jax.sampling.draw`. A rule that uses a setting of a built-in rule
must use the same `Setting`, such as `THRESHOLD`.
"""

from dlm_jax.randomness import key_of, salted
from dlm_jax.sampling.blocks import choose, steps_needed
from dlm_jax.sampling.commit.commit_rule import exceeds, log_each, log_odds, log_odds_of, reaches
from dlm_jax.sampling.commit.orders import (
    CONFIDENCE,
    SCHEDULE,
    THRESHOLD,
    THRESHOLD_LEAST,
    Confident,
    Measure,
    NoiseSchedule,
    Quota,
    QuotaRule,
    linear_quota,
    maximum,
    visible_shares,
)
from dlm_jax.sampling.edits.scores import may_be_led
from dlm_jax.sampling.positions import NEVER, at_places, fold, logits, place_of_largest, put
from dlm_jax.sampling.propose.constrained import Seen
from dlm_jax.sampling.propose.wavefront import (
    GIVEN,
    SAMPLER_TEMPERATURE,
    grown_logits,
    head_chunk,
)
from dlm_jax.types import left_of, right_of

__all__ = [
    "CONFIDENCE",
    "Confident",
    "GIVEN",
    "Measure",
    "NEVER",
    "NoiseSchedule",
    "Quota",
    "QuotaRule",
    "SAMPLER_TEMPERATURE",
    "SCHEDULE",
    "Seen",
    "THRESHOLD",
    "THRESHOLD_LEAST",
    "at_places",
    "choose",
    "exceeds",
    "fold",
    "grown_logits",
    "head_chunk",
    "key_of",
    "left_of",
    "linear_quota",
    "log_each",
    "log_odds",
    "log_odds_of",
    "logits",
    "maximum",
    "may_be_led",
    "place_of_largest",
    "put",
    "reaches",
    "right_of",
    "salted",
    "steps_needed",
    "visible_shares",
]
