"""Remask rules, which turn committed tokens into holes again, and re-noise."""

from collections.abc import Mapping

from dlm_jax.sampling.remask.remask_rule import RemaskContext, RemaskRule
from dlm_jax.sampling.remask.remdm import RemdmCap, RemdmConf, RemdmRescale
from dlm_jax.sampling.remask.renoise import Renoise
from dlm_jax.sampling.remask.scheduled import Scheduled, ScheduledThreshold

REMASK_RULES: Mapping[str, type[RemaskRule]] = {
    rule.name: rule for rule in (Scheduled, ScheduledThreshold, RemdmCap, RemdmRescale, RemdmConf)
}
"""Remask rules, keyed by the value of ``remask``. The value ``none`` selects no rule."""

__all__ = [
    "REMASK_RULES",
    "RemaskContext",
    "RemaskRule",
    "RemdmCap",
    "RemdmConf",
    "RemdmRescale",
    "Renoise",
    "Scheduled",
    "ScheduledThreshold",
]
