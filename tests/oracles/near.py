"""Which keep-or-remove decisions of a sampler are too close to call in float32.

Tolerances: 1e-6 of probability mass, a relative 1e-5 elsewhere. With
`is_exact=True` (the default) both sides are taken to have started from the same logits, so that the
order of tokens is certain, ties go to lower ids, and only computed thresholds are in doubt. With
`is_exact=False` the logits themselves may be off by a relative 1e-5, as in the middle of a chain.
The tables of uncertain orders are V by V: for small vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import chain, mirostat, samplers
from .chain import DEFAULT_ORDER
from .samplers import Logits

MASS_TOLERANCE = 1e-6
RELATIVE_TOLERANCE = 1e-5


class Order:
    """How many candidates, of what mass, may come before each one in a ranking by `key`."""

    def __init__(self, key: np.ndarray, x: Logits, tolerance: np.ndarray | float):
        """Ascending `key`; tokens with equal logits are always ordered by id."""
        ids = np.arange(len(x))
        is_candidate = np.isfinite(x)
        key = np.where(is_candidate, key, 0.0)
        gap = key[:, None] - key[None, :]  # [j, i]: below zero where j comes before i
        same = x[:, None] == x[None, :]
        lower_id = ids[:, None] < ids[None, :]
        surely = np.where(same, lower_id, gap < -np.broadcast_to(tolerance, gap.shape))
        maybe = np.where(same, lower_id, gap <= np.broadcast_to(tolerance, gap.shape))
        both = is_candidate[:, None] & is_candidate[None, :]
        self.surely, self.maybe = surely & both, maybe & both
        self.first_rank, self.last_rank = self.surely.sum(0), self.maybe.sum(0)

    def mass(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest possible mass in front of each candidate."""
        return p @ self.surely, p @ self.maybe


class CertainOrder(Order):
    """The `Order` of descending logits, in which none is in doubt: by one sort."""

    def __init__(self, x: Logits):
        candidates = np.flatnonzero(np.isfinite(x))
        self.sequence = candidates[np.argsort(-x[candidates], kind="stable")]
        self.first_rank = np.zeros(len(x), int)
        self.first_rank[self.sequence] = np.arange(len(self.sequence))
        self.last_rank = self.first_rank

    def mass(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = np.zeros(len(p))
        ranked = p[self.sequence]
        before[self.sequence] = np.cumsum(ranked) - ranked
        return before, before


def _order_by_logit(x: Logits, is_exact: bool) -> Order:
    if is_exact:
        return CertainOrder(x)
    size = np.maximum(1.0, np.abs(np.where(np.isfinite(x), x, 0.0)))
    tolerance = RELATIVE_TOLERANCE * np.maximum(size[:, None], size[None, :])
    return Order(-x, x, tolerance)


def _mass_doubt(order: Order, x: Logits, q: float) -> np.ndarray:
    tolerance = max(MASS_TOLERANCE, RELATIVE_TOLERANCE * q)
    least, most = order.mass(samplers.distribution(x))
    return (least <= q + tolerance) & (most >= q - tolerance)


def _cut_doubt(x: Logits, cut: float) -> np.ndarray:
    scale = max(1.0, abs(float(x.max())), abs(cut))
    return np.abs(x - cut) <= RELATIVE_TOLERANCE * scale


def _typical_order(x: Logits) -> Order:
    log_p = samplers.log_distribution(x)
    finite = np.where(np.isfinite(log_p), log_p, 0.0)
    entropy = -float((np.exp(log_p) * finite).sum())
    key = np.abs(-finite - entropy)
    scale = np.maximum(max(1.0, abs(float(x.max()))), key)
    return Order(key, x, RELATIVE_TOLERANCE * np.maximum(scale[:, None], scale[None, :]))


def _mirostat_v1_doubt(order: Order, x: Logits, mu: float, m: int) -> np.ndarray:
    ks = []
    # Differences of neighbouring logits lose digits where the logits themselves are large.
    off = RELATIVE_TOLERANCE + MASS_TOLERANCE * float(np.abs(x[np.isfinite(x)]).max())
    for slope_shift in (-off, 0.0, off):
        for mu_scale in (1 - RELATIVE_TOLERANCE, 1.0, 1 + RELATIVE_TOLERANCE):
            k = mirostat.v1_k(x, mu * mu_scale, m=m, slope_shift=slope_shift)
            ks += [k * (1 - RELATIVE_TOLERANCE), k * (1 + RELATIVE_TOLERANCE)]
    low, high = (max(1.0, math.floor(k) if math.isfinite(k) else k) for k in (min(ks), max(ks)))
    return (order.first_rank < high) & (order.last_rank >= low)


def _xtc_doubt(x: Logits, params: Mapping[str, Any], uniform: float, is_exact: bool) -> np.ndarray:
    chance, threshold, keep = params["xtc_probability"], params["xtc_threshold"], params["min_keep"]
    p = samplers.distribution(x)
    tolerance = max(MASS_TOLERANCE, RELATIVE_TOLERANCE * threshold)
    near = p[np.isfinite(x) & (np.abs(p - threshold) <= tolerance)]
    cuts = {threshold, threshold - tolerance, threshold + tolerance, *near.tolist()}
    cuts = {min(cut, 0.5) for cut in cuts} if threshold <= 0.5 else cuts
    is_close = 0 < chance < 1 and abs(uniform - chance) <= RELATIVE_TOLERANCE * chance
    draws = (-1.0, 2.0) if is_close else (uniform,)
    results = [samplers.xtc(x, chance, c, u, min_keep=keep) for c in sorted(cuts) for u in draws]
    kept = np.isfinite(np.stack(results))
    doubt: np.ndarray = np.asarray(kept.any(0) & ~kept.all(0))
    for cut, row in zip([c for c in sorted(cuts) for _ in draws], kept, strict=True):
        if is_exact or row.sum() == np.isfinite(x).sum():
            continue
        # The survivor is the least of the choices: a nearly equal one may take its place.
        choices = np.isfinite(x) & (p >= cut)
        rivals = choices & _cut_doubt(x, float(x[choices].min()))
        if len(set(x[rivals].tolist())) > 1:
            doubt |= rivals
    return doubt


def undecided(
    stage: str,
    x: object,
    params: Mapping[str, Any],
    *,
    uniform: float = 0.0,
    mu: float | None = None,
    is_exact: bool = True,
) -> set[int]:
    """Ids that a correct float32 version of this stage may keep or remove, as it happens.

    `stage` is a name of `chain.DEFAULT_ORDER`; `params` a dict as for `chain.full_chain`. Stages
    that remove nothing have no such ids. The first `min_keep` candidates are always decided.
    """
    params, x = chain.with_defaults(params), samplers.as_logits(x)
    keep, order = params["min_keep"], _order_by_logit(x, is_exact)
    none = np.zeros(len(x), bool)
    doubt = none
    if stage == "top_k" and params["top_k"] > 0:
        k = max(params["top_k"], keep)
        doubt = (order.first_rank < k) & (order.last_rank >= k)
    elif stage == "top_p" and params["top_p"] < 1:
        doubt = _mass_doubt(order, x, params["top_p"])
    elif stage == "typical_p" and params["typical_p"] < 1:
        order = _typical_order(x)
        doubt = _mass_doubt(order, x, params["typical_p"])
    elif stage == "min_p" and params["min_p"] > 0:
        doubt = _cut_doubt(x, float(x.max()) + math.log(params["min_p"]))
    elif stage == "top_n_sigma" and params["top_n_sigma"] > 0:
        cut = float(x.max() - params["top_n_sigma"] * x[np.isfinite(x)].std())
        doubt = _cut_doubt(x, cut)
    elif stage == "xtc":
        return _ids(_xtc_doubt(x, params, uniform, is_exact))
    elif stage == "mirostat" and params["mirostat"]:
        mu = mirostat.start(params["mirostat_tau"]) if mu is None else mu
        if params["mirostat"] == 1:
            doubt = _mirostat_v1_doubt(order, x, mu, params["mirostat_m"])
        else:
            doubt = _cut_doubt(
                x, float(x.max() - samplers.log_distribution(x).max()) - mu * math.log(2)
            )
    return _ids(doubt & np.isfinite(x) & ~(order.last_rank < max(1, keep)))


def _ids(flags: np.ndarray) -> set[int]:
    return set(np.flatnonzero(flags).tolist())


def undecided_in_chain(
    x: object,
    params: Mapping[str, Any],
    *,
    context: Sequence[int] = (),
    run: Sequence[int] = (),
    uniform: float = 0.0,
    mu: float | None = None,
    order: Sequence[str] = DEFAULT_ORDER,
) -> set[int]:
    """Ids whose presence at the end of `chain.full_chain` may differ in float32.

    Each doubtful stage is followed with its doubtful ids all kept and all removed, because they
    change the mass that later stages see.
    """
    params = chain.with_defaults(params)
    paths = [samplers.as_logits(x)]
    for stage in order:
        if chain.is_skipped(stage, params):
            continue
        branches: dict[bytes, Logits] = {}
        for path in paths:
            doubt = sorted(undecided(stage, path, params, uniform=uniform, mu=mu, is_exact=False))
            out = chain.apply_stage(
                stage, path, params, context=context, run=run, uniform=uniform, mu=mu
            )
            for variant in (out, *_variants(path, out, doubt)):
                branches[variant.tobytes()] = variant
        paths = list(branches.values())
    if params["temperature"] == 0:
        paths = [_with_only_near_maxima(path) for path in paths]
        maxima = _ids(np.asarray(np.isfinite(np.stack(paths)).any(0)))
        return maxima if len(maxima) > 1 else set()
    kept = np.isfinite(np.stack(paths))
    return _ids(np.asarray(kept.any(0) & ~kept.all(0)))


def _variants(before: Logits, after: Logits, doubt: list[int]) -> list[Logits]:
    """The doubtful ids all kept, all removed or, where that leaves nothing, each kept alone."""
    with_all, with_none = after.copy(), after.copy()
    with_all[doubt], with_none[doubt] = before[doubt], -np.inf
    if np.isfinite(with_none).any():
        return [with_all, with_none]
    return [with_all, *(samplers.keep_only(before, [token]) for token in doubt)]


def _with_only_near_maxima(x: Logits) -> Logits:
    return np.where(_order_by_logit(x, is_exact=False).first_rank == 0, x, -np.inf)
