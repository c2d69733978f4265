"""Combinations of commit rules and remask rules, and rows that use all they offer."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import canvases
import jax.numpy as jnp
import numpy as np
import toy
from canvases import Row
from jax.sharding import NamedSharding

from dlm_jax.config import SamplingParams
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.objectives.forward_process import PROCESSES
from dlm_jax.sampling.loop import Advance
from dlm_jax.sampling.noise import NoiseRule
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts, RuleTable
from dlm_jax.sampling.state import visible_context
from dlm_jax.sampling.transforms import chain
from dlm_jax.settings import Setting
from dlm_jax.types import Params


def choices(name: str) -> tuple[str, ...]:
    """What a setting may be."""
    return tuple(BUILT_IN.settings[name].choices or ())


ORDERS, REMASKS = choices("order"), choices("remask")
SCHEDULES, CONFIDENCES = choices("schedule"), choices("confidence")
FACTS = ModelFacts(
    vocab_size=toy.VOCAB_SIZE,
    banned_ids=toy.BANNED,
    eos_ids=(toy.EOS,),
    space_id=toy.SPACE,
    noise=LINEAR,
    heads=("sampler", "critic"),
    has_cache=True,
    process=PROCESSES["uniform"],
    shows_maps=True,
)

CASES: dict[str, dict[str, str]] = {
    f"{order}-{remask}": {
        "order": order,
        "remask": remask,
        "schedule": SCHEDULES[(i + j) % len(SCHEDULES)],
        "confidence": CONFIDENCES[(i + j) % len(CONFIDENCES)],
    }
    for i, order in enumerate(ORDERS)
    for j, remask in enumerate(REMASKS)
    if j == 0 or ((i % 3 or i // 3 % 2) and not issubclass(BUILT_IN.commit[order], NoiseRule))
}
"""Every order without remasking and with one of the remask rules, which take turns."""

HEADS: dict[str, dict[str, str]] = {
    f"{order}-{remask}-{fill}-{by}": {
        "order": order, "remask": remask, "schedule": schedule, "fill": fill, "remask_by": by,
    }
    for order, remask, schedule, fill, by in (
        ("random", "none", "linear", "wavefront", "confidence"),
        ("low_confidence", "scheduled", "all", "wavefront", "critic"),
        ("left_to_right", "scheduled", "linear", "wavefront", "critic"),
        ("ancestral", "scheduled", "linear", "wavefront", "confidence"),
        ("threshold", "scheduled", "linear", "parallel", "critic"),
        ("entropy_bound", "scheduled", "all", "wavefront", "confidence"),
        ("random_filled", "none", "linear", "wavefront", "confidence"),
    )
}  # fmt: skip
"""What a model with a sampler head and a critic can do."""

EDITS: dict[str, dict[str, Any]] = {
    f"{order}-{remask}-{fill}-edit": {
        "order": order, "remask": remask, "schedule": schedule, "fill": fill, "edit": True,
        "renoise_start": renoise, "edit_schedule": edit_schedule, "resample": remask == "none",
        "edit_scoring": scoring, "edit_trials": 3,
    }
    for order, remask, schedule, fill, renoise, edit_schedule, scoring in (
        ("random", "scheduled", "linear", "parallel", 0.2, "cosine", "uncertainty"),
        ("low_confidence", "none", "all", "wavefront", 0.0, "linear", "uncertainty"),
        ("left_to_right", "scheduled", "linear", "parallel", 0.0, "cosine", "uncertainty"),
        ("margin", "none", "all", "parallel", 0.3, "linear", "uncertainty"),
        ("ancestral", "none", "linear", "wavefront", 0.0, "cosine", "uncertainty"),
        ("threshold", "scheduled", "linear", "parallel", 0.1, "cosine", "uncertainty"),
        ("entropy_bound", "none", "all", "parallel", 0.0, "cosine", "uncertainty"),
        ("left_to_right", "none", "all", "parallel", 0.0, "cosine", "likelihood"),
    )
}  # fmt: skip
"""Rows whose length changes, with every other setting of edits and re-noise."""

CASES |= HEADS | EDITS

OTHERS: dict[str, dict[str, Any]] = {}
"""Cases of rules outside of the package, whose names have the form of those above."""

TABLES: dict[str, RuleTable] = {}
"""The tables of these cases."""

OWN = "own-own"
"""The rules and the transform that docs/own_rules.md defines outside the package."""

FEW = [
    name if name in CASES else f"{order}-none"
    for i, order in enumerate(ORDERS)
    for name in [f"{order}-{REMASKS[i % len(REMASKS)]}"]
]
"""Each order and each remask rule at least once."""

FEW += [*list(HEADS)[:2], *list(EDITS)[:3]]

SLOW = {"margin", "entropy_bound"}
"""Orders that only the slow suite runs: each of their abilities is also one of another order."""

QUICK = [name for name in FEW if name.split("-")[0] not in SLOW]
"""Those of the default suite, which a new order is in."""


def rows(seed: int = 0, *, resamples: bool = False) -> list[Row]:
    """Rows that differ in everything, blocks, guidance and drafts included.

    `resamples` lets some resample, and grow.
    """
    rng = np.random.default_rng(100 + seed)
    found = []
    for index, row in enumerate(canvases.mixed_rows(seed)):
        is_draft = None
        if index % 4 == 3:
            is_draft = tuple((rng.random(len(row.tokens)) < 0.4).tolist())
        found.append(
            dataclasses.replace(
                row,
                steps=int(rng.integers(8, 14)),
                block_length=(0, 7, 4, 11)[index % 4],
                guidance=(0.0, 0.0, 1.5)[index % 3],
                stop_at_eos=index % 5 == 2,
                is_draft=is_draft,
                resample=resamples and index % 3 == 1,
                capacity=len(row.tokens) + index % 5 if resamples else 0,
                max_new_tokens=(0, 9)[index % 2],
            )
        )
    return found


@functools.cache
def own() -> dict[str, Any]:
    """The definitions of the example in docs/own_rules.md."""
    text = (Path(__file__).parent.parent / "docs/own_rules.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Softened" in b]
    scope: dict[str, Any] = {"__name__": "own_rules"}
    exec(compile(block.split("model = dlm_jax.load")[0], "docs/own_rules.md", "exec"), scope)
    return scope


def has_edits(name: str) -> bool:
    """True for a case whose rows change in length."""
    return name.endswith("-edit")


def _table(name: str) -> RuleTable:
    return TABLES.get(name, BUILT_IN)


def _case(name: str) -> dict[str, Any]:
    return CASES.get(name) or OTHERS.get(name, {})


def samples(name: str, count: int, seed: int = 0) -> list[SamplingParams]:
    """Settings of that many rows, whose numbers differ."""
    rng, table = np.random.default_rng(200 + seed), _table(name)
    made = params_of(table)
    return [
        made(**_others(np.random.default_rng([500 + seed, index]), index, table) | dict(
            **_case(name) | (_edits(rng, index) if has_edits(name) else {}) | _limits(name),
            threshold=float(rng.uniform(0.1, 0.4)),
            entropy_bound=float(rng.uniform(0.5, 4.0)),
            **_posterior(np.random.default_rng([300 + seed, index]), index),
            **_decoders(np.random.default_rng([300 + seed, index]), index, table),
            remask_start=float(rng.uniform(0.3, 0.9)),
            remask_end=float(rng.uniform(0.0, 0.3)),
            sampler_min_neighbors_ratio=(0.01, 0.3, 1.0)[index % 3],
            sampler_even_odd=index % 4 > 1,
            sampler_one_sided=index % 3 == 1,
            sampler_temperature=(1.0, 0.6)[index % 2],
        ))
        for index in range(count)
    ]  # fmt: skip


def _others(rng: np.random.Generator, index: int, table: RuleTable = BUILT_IN) -> dict[str, Any]:
    """A value near the default of each per-row setting of the commit rules."""
    return {
        field.metadata["setting"].name: _near(field.metadata["setting"], rng, index)
        for rule in table.commit.values()
        for field in dataclasses.fields(rule)  # type: ignore[arg-type]
        if "column" in field.metadata and not field.metadata["setting"].is_list
    }


def _near(setting: Setting, rng: np.random.Generator, index: int) -> Any:
    if setting.choices is not None:
        return list(setting.choices)[index % len(setting.choices)]
    if setting.kind is bool:
        return index % 2 == 1
    low, high, default = setting.low, setting.high, setting.default
    if setting.kind is int:
        return int(min(max(default - 1 + index % 3, low), high))
    width = abs(default) / 2 or 0.5
    return float(rng.uniform(max(default - width, low), min(default + width, high)))


def _posterior(rng: np.random.Generator, index: int) -> dict[str, Any]:
    return {
        "posterior_start": float(rng.uniform(0.4, 1.0)),
    }


COMMON_IDS = ((1, 0.3), (4, 0.1))


def _decoders(rng: np.random.Generator, index: int, table: RuleTable) -> dict[str, Any]:
    """Settings of the published decoders, far from the defaults where rows of the toy need it."""
    found = {
        "klass_divergence": float(rng.uniform(0.01, 1.0)),
        "klass_steps": index % 3,
        "credit_weight": float(rng.uniform(0.0, 2.0)),
        "credit_decay": float(rng.uniform(0.0, 1.0)),
        "credit_power": float(rng.uniform(0.0, 1.0)),
        "dilated_base": 2 + index % 3,
        "frechet_margin": float(rng.uniform(-0.8, 0.3)),
        "hierarchy_floor": float(rng.uniform(0.0, 0.3)),
        "leap_threshold": float(rng.uniform(0.1, 0.3)),
        "leap_radius": index % 4,
        "position_decay": float(rng.uniform(0.0, 0.5)),
        "information_limit": (10.0, 0.3)[index % 2],
        "common_ids": COMMON_IDS,
        "prophet_gap": float(rng.uniform(0.3, 2.0)),
        "slow_threshold": float(rng.uniform(0.1, 0.3)),
        "slow_steps": 1 + index % 4,
        "slow_spread": float(rng.uniform(0.0, 3.0)),
        "verify_threshold": (0.0, 0.2, 0.4)[index % 3],
        "remask_eta": (0.0, 0.3, 0.8)[index % 3],
        "induced_threshold": float(rng.uniform(0.1, 0.3)),
        "apart_threshold": float(rng.uniform(0.1, 0.3)),
        "dependence": float(rng.uniform(0.0, 0.2)),
        "sink": float(rng.uniform(0.0, 0.3)),
    }
    return {name: value for name, value in found.items() if name in table.settings}


def _limits(name: str) -> dict[str, Any]:
    """What a rule that tries its edits knows nothing of."""
    is_tried = _case(name).get("edit_scoring") == "likelihood"
    return {"length_target_mode": "none"} if is_tried else {}


def _edits(rng: np.random.Generator, index: int) -> dict[str, Any]:
    """Settings of edits and re-noise of one row; every seventh has none."""
    if index % 7 == 6:
        ratios = dict.fromkeys(("insert_ratio_start", "delete_ratio_start"), 0.0)
        return ratios | {"renoise_start": 0.0}
    return {
        "insert_ratio_start": float(rng.uniform(0.1, 0.5)),
        "insert_ratio_end": float(rng.uniform(0.0, 0.2)),
        "delete_ratio_start": float(rng.uniform(0.1, 0.5)),
        "delete_margin": (0.0, 0.02)[index % 2],
        "delete_lambda": float(rng.uniform(0.0, 1.0)),
        "cooldown_distance": index % 3,
        "edit_token": ("space", "mask")[index % 2],
        "overflow": ("trim", "refuse")[index // 2 % 2],
        "length_target_mode": ("none", "to_max_new")[(0, 0, 1, 0, 1, 1, 0, 1)[index % 8]],
        "renoise": ("space", "mask", "random")[index % 3],
    }


def program(name: str, *, rows: NamedSharding | None = None) -> Program:
    """What is compiled in: guided, and with blocks that end at EOS."""
    network = toy.network_with_heads() if _has_heads(name) else None
    return canvases.program(network, rows=rows, is_guided=True)


def params(name: str) -> Params:
    """Parameters of the case's network."""
    return toy.params_with_heads() if _has_heads(name) else toy.params()


def _has_heads(name: str) -> bool:
    return name in HEADS or "wavefront" in name


@functools.cache
def advance(name: str) -> Advance:
    """The compiled loop of a case, the same for cases of the same network."""
    return canvases.make_advance(program(name))


def make_state(
    name: str,
    slots: Sequence[tuple[Row, SamplingParams] | None],
    *,
    positions: int = canvases.POSITIONS,
):
    """The state before the first step, one slot per row; None is an idle slot."""
    table = _table(name)
    # The static settings of a program are those of its first slot, also of an idle one.
    static = {"common_ids": COMMON_IDS} if "common_ids" in table.settings else {}
    idle = params_of(table)(**_case(name), **static)
    settings = [slot[1] if slot else idle for slot in slots]
    rows = [slot and slot[0] for slot in slots]
    if name != OWN:
        packed = table.pack(settings, FACTS)
        return canvases.make_state(
            rows, packed.commit, remask=packed.remask, fill=packed.fill, edit=packed.edit,
            renoise=packed.renoise, positions=positions,
        )  # fmt: skip
    defined = own()
    rule = defined["FewSurest"](
        jnp.array([max(1, int(4 * s.threshold)) for s in settings], jnp.int32)
    )
    remask = defined["Doubtful"](jnp.array([s.remask_end for s in settings], jnp.float32))
    state = canvases.make_state(rows, rule, remask=remask, positions=positions)
    softened = defined["Softened"](jnp.array([s.remask_start for s in settings], jnp.float32))
    chained = chain(state.rules.chain, softened)
    rules = state.rules._replace(chain=chained)
    chain_state = chained.start(visible_context(state, mask_id=toy.MASK))
    return state._replace(rules=rules, chain_state=chain_state)
