"""The whole sampling chain of one position, as a plain walk over named stages.

Order and exceptions are those of the rules in docs/: bans and bias, penalties, DRY, temperature,
top-n-sigma, top-k, typical-p, top-p, min-p, XTC, mirostat. Parameters are a dict with the keys of
`NEUTRAL`; a missing key is neutral, an unknown one an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import mirostat, samplers
from .samplers import Logits

TRUNCATIONS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p")
DEFAULT_ORDER = (
    "bias",
    "penalties",
    "dry",
    "temperature",
    *TRUNCATIONS,
    "xtc",
    "mirostat",
)
NEUTRAL: dict[str, object] = {
    "logit_bias": (),
    "banned": (),
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "penalty_last_n": -1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_breakers": (),
    "temperature": 1.0,
    "dynamic_delta": 0.0,
    "dynamic_exponent": 1.0,
    "top_n_sigma": 0.0,
    "top_k": 0,
    "typical_p": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "mirostat_m": 100,
    "min_keep": 1,
}


def with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters, neutral where not given."""
    unknown = sorted(set(params) - set(NEUTRAL))
    if unknown:
        raise ValueError(f"unknown sampling parameters {unknown}; known are {sorted(NEUTRAL)}")
    return {**NEUTRAL, **params}


def is_skipped(stage: str, params: Mapping[str, Any]) -> bool:
    """True where this row's settings take the stage out of its chain.

    Greedy rows have no temperature, XTC or mirostat; mirostat stands in for the truncations and
    XTC. A greedy row's mirostat is out, so it replaces nothing: the truncations act.
    """
    is_greedy, has_mirostat = params["temperature"] == 0, params["mirostat"] != 0
    if stage in ("temperature", "xtc", "mirostat") and is_greedy:
        return True
    if stage == "mirostat":
        return not has_mirostat
    return stage in (*TRUNCATIONS, "xtc") and has_mirostat and not is_greedy


def apply_stage(
    stage: str,
    x: object,
    params: Mapping[str, Any],
    *,
    context: Sequence[int] = (),
    run: Sequence[int] = (),
    uniform: float = 0.0,
    mu: float | None = None,
) -> Logits:
    """The logits after one named stage; `params` is complete (`with_defaults`)."""
    keep = params["min_keep"]
    if stage == "bias":
        return samplers.ban(samplers.logit_bias(x, params["logit_bias"]), params["banned"])
    if stage == "penalties":
        return samplers.penalties(
            x,
            context,
            repetition=params["repetition_penalty"],
            frequency=params["frequency_penalty"],
            presence=params["presence_penalty"],
            last_n=params["penalty_last_n"],
        )
    if stage == "dry":
        return samplers.dry(
            x,
            run,
            multiplier=params["dry_multiplier"],
            base=params["dry_base"],
            allowed_length=params["dry_allowed_length"],
            breakers=params["dry_breakers"],
        )
    if stage == "temperature":
        return samplers.dynamic_temperature(
            x, params["temperature"], params["dynamic_delta"], params["dynamic_exponent"]
        )
    if stage in TRUNCATIONS:
        return getattr(samplers, stage)(x, params[stage], min_keep=keep)
    if stage == "xtc":
        chance, threshold = params["xtc_probability"], params["xtc_threshold"]
        return samplers.xtc(x, chance, threshold, uniform, min_keep=keep)
    if stage == "mirostat":
        mu = mirostat.start(params["mirostat_tau"]) if mu is None else mu
        if params["mirostat"] == 1:
            return mirostat.v1(x, mu, m=params["mirostat_m"], min_keep=keep)
        if params["mirostat"] == 2:
            return mirostat.v2(x, mu, min_keep=keep)
    raise ValueError(f"stage={stage!r} or its setting is unknown; known stages: {DEFAULT_ORDER}")


def full_chain(
    x: object,
    params: Mapping[str, Any],
    *,
    context: Sequence[int] = (),
    run: Sequence[int] = (),
    uniform: float = 0.0,
    mu: float | None = None,
    order: Sequence[str] = DEFAULT_ORDER,
) -> Logits:
    """The logits to draw from; a greedy row has its one token left.

    `context` is what penalties read (oldest first), `run` what DRY reads (left to right),
    `uniform` the XTC draw in [0, 1), `mu` the mirostat state (its start value by default).
    """
    params = with_defaults(params)
    x = samplers.as_logits(x)
    for stage in order:
        if not is_skipped(stage, params):
            x = apply_stage(stage, x, params, context=context, run=run, uniform=uniform, mu=mu)
    return samplers.keep_only(x, [samplers.greedy(x)]) if params["temperature"] == 0 else x
