# ruff: noqa: F401
"""The denoising loop and its rules. This package never imports the model.

The names below are what the built-in rules are written with, for rules outside of this package. A
rule that uses a setting of a built-in rule must use the same `Setting`, such as `THRESHOLD`.
"""

from dlm_jax.randomness import key_of, salted
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
from dlm_jax.sampling.positions import (
    NEVER,
    at_places,
    choose,
    fold,
    logits,
    place_of_largest,
    put,
    steps_needed,
)
from dlm_jax.sampling.propose.constrained import Seen
from dlm_jax.sampling.propose.wavefront import (
    GIVEN,
    SAMPLER_TEMPERATURE,
    grown_logits,
    head_chunk,
)
from dlm_jax.types import left_of, right_of
