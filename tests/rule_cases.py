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

from dlm_jax.config import SampleConfig
from dlm_jax.config.generation import CONFIDENCES, ORDERS, REMASKS, SCHEDULES
from dlm_jax.diffusion.corruption import LinearSchedule
from dlm_jax.sampling.advance import Advance, make_advance
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.rules import pack_fill, pack_rules
from dlm_jax.sampling.transforms import chain
from dlm_jax.types import Params

CASES: dict[str, dict[str, str]] = {
    f"{order}-{remask}": {
        "order": order,
        "remask": remask,
        "schedule": SCHEDULES[(i + j) % len(SCHEDULES)],
        "confidence": CONFIDENCES[(i + j) % len(CONFIDENCES)],
    }
    for i, order in enumerate(ORDERS)
    for j, remask in enumerate(REMASKS)
}
"""Every order with every remask rule; schedules and confidences in turn."""

HEADS: dict[str, dict[str, str]] = {
    f"{order}-{remask}-{fill}-{by}": {
        "order": order, "remask": remask, "schedule": schedule, "fill": fill, "remask_by": by,
    }
    for order, remask, schedule, fill, by in (
        ("random", "none", "linear", "wavefront", "confidence"),
        ("low_confidence", "scheduled", "all", "wavefront", "critic"),
        ("left_to_right", "scheduled_threshold", "linear", "wavefront", "critic"),
        ("ancestral", "remdm_cap", "linear", "wavefront", "confidence"),
        ("threshold", "scheduled", "linear", "parallel", "critic"),
        ("entropy_bound", "scheduled", "all", "wavefront", "confidence"),
    )
}  # fmt: skip
"""What a model with a sampler head and a critic can do."""

CASES |= HEADS

OWN = "own-own"
"""The rules and the transform that docs/generation.md defines outside the package."""

FEW = [f"{order}-{REMASKS[i % len(REMASKS)]}" for i, order in enumerate(ORDERS)]
"""Each order and each remask rule at least once."""

FEW += list(HEADS)[:2]


def rows(seed: int = 0) -> list[Row]:
    """Rows that differ in everything, blocks, guidance and drafts included."""
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
            )
        )
    return found


@functools.cache
def own() -> dict[str, Any]:
    """The definitions of the example in docs/generation.md."""
    text = (Path(__file__).parent.parent / "docs/generation.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Softened" in b]
    scope: dict[str, Any] = {"__name__": "own_rules"}
    exec(compile(block.split("model = dlm_jax.load")[0], "docs/generation.md", "exec"), scope)
    return scope


def samples(name: str, count: int, seed: int = 0) -> list[SampleConfig]:
    """Settings of that many rows, whose numbers differ."""
    rng = np.random.default_rng(200 + seed)
    return [
        SampleConfig(
            **CASES.get(name, {}),
            threshold=float(rng.uniform(0.1, 0.4)),
            factor=float(rng.uniform(1.0, 2.0)),
            entropy_bound=float(rng.uniform(0.5, 4.0)),
            remask_start=float(rng.uniform(0.3, 0.9)),
            remask_end=float(rng.uniform(0.0, 0.3)),
            remask_randomness=float(rng.uniform(0.0, 0.5)),
            remask_eta=(0.0, 0.3, 0.8)[index % 3],
            sampler_min_neighbors_ratio=(0.01, 0.3, 1.0)[index % 3],
            sampler_spread_seeds=index % 2 == 1,
            sampler_even_odd=index % 4 > 1,
            sampler_temperature=(1.0, 0.6)[index % 2],
        )
        for index in range(count)
    ]


def program(name: str, *, rows: NamedSharding | None = None) -> Program:
    """What is compiled in: guided, and with blocks that end at EOS."""
    network = toy.network_with_heads() if name in HEADS else None
    return canvases.program(network, rows=rows, is_guided=True)


def params(name: str) -> Params:
    """Parameters of the case's network."""
    return toy.params_with_heads() if name in HEADS else toy.params()


@functools.cache
def advance(name: str) -> Advance:
    """The compiled loop of a case, the same for cases of the same network."""
    return make_advance(program(name))


def make_state(
    name: str,
    slots: Sequence[tuple[Row, SampleConfig] | None],
    *,
    positions: int = canvases.POSITIONS,
):
    """The state before the first step, one slot per row; None is an idle slot."""
    settings = [slot[1] if slot else SampleConfig(**CASES.get(name, {})) for slot in slots]
    rows = [slot and slot[0] for slot in slots]
    if name != OWN:
        rule, remask = pack_rules(settings, LinearSchedule())
        fill = pack_fill(settings)
        return canvases.make_state(rows, rule, remask=remask, fill=fill, positions=positions)
    defined = own()
    rule = defined["FewSurest"](jnp.array([int(4 * s.factor) for s in settings], jnp.int32))
    remask = defined["Doubtful"](jnp.array([s.remask_end for s in settings], jnp.float32))
    state = canvases.make_state(rows, rule, remask=remask, positions=positions)
    softened = defined["Softened"](jnp.array([s.remask_eta for s in settings], jnp.float32))
    chained = chain(state.chain, softened)
    return state._replace(chain=chained, chain_state=chained.init(len(rows)))
