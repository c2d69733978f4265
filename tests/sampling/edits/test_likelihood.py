"""Edits that are tried: against a plain loop over lists that tries them one text at a time."""

import dataclasses
import math
from typing import Any

import canvases
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from canvases import FOREVER, POSITIONS, ROWS, Row

from dlm_jax.config import SamplingParams
from dlm_jax.sampling.commit import RandomOrder
from dlm_jax.sampling.commit.orders import whole_quota
from dlm_jax.sampling.edits import Likelihood
from dlm_jax.sampling.state import State
from dlm_jax.types import Status

ALL = RandomOrder(whole_quota)
TRIALS = 4
SCARCE = 3
"""A token that every other row bans."""
CLEAR = 1e-4
"""What float32 can tell apart: a lead below this decides nothing."""


def _rule(**columns) -> Likelihood:
    sample = SamplingParams(edit=True, edit_scoring="likelihood", edit_trials=TRIALS)
    rule = Likelihood.pack([sample] * ROWS, None)
    return dataclasses.replace(rule, **{k: jnp.asarray(v) for k, v in columns.items()})


def _drafts(seed: int, **changes) -> list[Row]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 16, ROWS)
    given = {"steps": 4, "temperature": 0.0, "capacity": POSITIONS} | changes
    return [
        Row(
            tokens=tuple(rng.integers(0, 8, length).tolist()),
            is_draft=tuple(place >= index % 3 for place in range(length)),
            seed=index,
            # Half of them draw every token again at every step.
            resample=index % 2 == 1,
            **given,
        )
        for index, length in enumerate(lengths)
    ]


def _banned(index: int) -> tuple[int, ...]:
    return (*toy.BANNED, SCARCE) if index % 2 else toy.BANNED


def _state(rows: list[Row], rule: Likelihood) -> State:
    state = canvases.make_state(rows, ALL, edit=rule, banned=(*toy.BANNED, toy.PAD))
    ids = jnp.array([[*_banned(index), toy.PAD][:4] for index in range(ROWS)], jnp.int32)
    bans, *others = state.rules.chain.transforms
    transforms = (dataclasses.replace(bans, ids_BK=ids), *others)
    chain = dataclasses.replace(state.rules.chain, transforms=transforms)
    return state._replace(rules=state.rules._replace(chain=chain))


def _log_softmax(tokens: list[int]) -> np.ndarray:
    canvas = np.full(POSITIONS, toy.PAD)
    canvas[: len(tokens)] = tokens
    x = np.asarray(toy.row_logits(canvas, len(tokens)), np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _likelihood(tokens: list[int]) -> float:
    logp = _log_softmax(tokens)
    return sum(logp[i, token] for i, token in enumerate(tokens))


Edit = tuple[str, int]
Cell = tuple[int, bool, bool]
"""Token, frozen, inserted."""


def _made(cells: list[Cell], edit: Edit, token: int) -> list[Cell]:
    kind, at = edit
    new = [(token, False, True)]
    if kind == "insert":
        return cells[:at] + new + cells[at:]
    return cells[:at] + (new if kind == "replace" else []) + cells[at + 1 :]


def _candidates(
    cells: list[Cell],
    logp: np.ndarray,
    has_room: bool,
    *,
    is_drawn: bool,
    banned: tuple[int, ...],
) -> tuple[list[tuple[float, Edit]], np.ndarray, float]:
    """The best few with their leads, the likeliest other token of each position, and how clear the
    choice was."""
    other = logp.copy()
    if not is_drawn:
        other[range(len(cells)), [cell[0] for cell in cells]] = -np.inf
    best = other.argmax(-1)
    found, may_go = [], [not c[1] and (c[0] != toy.SPACE or c[2]) for c in cells]
    for at, (token, frozen, _) in enumerate(cells):
        if frozen:
            continue
        following = cells[at + 1][0] if at + 1 < len(cells) else None
        lead = logp[at, best[at]] - logp[at, token]
        is_new = best[at] not in (*banned, token)
        if is_new and has_room:
            found.append((lead, at, 1, "insert"))
        if is_new and may_go[at] and best[at] != following:
            found.append((lead, at, 2, "replace"))
        is_same = following == token and may_go[at + 1] and at + 2 < len(cells)
        if following is not None and may_go[at] and not is_same:
            found.append((logp[at, following] - logp[at, token], at, 0, "delete"))
    found = sorted(found, key=lambda f: (-f[0], *f[1:3]))
    worths = [f[0] for f in found]
    gaps = [a - b for a, b in zip(worths[TRIALS - 1 : TRIALS], worths[TRIALS:], strict=False)]
    # Deletion, insertion and replacement at one place may be equal, and then come in that order.
    closest = min((g for g in gaps if g > 0), default=math.inf)
    chosen = [(worth, (kind, at)) for worth, at, _, kind in found[:TRIALS]]
    return chosen, best, closest


def _plain(
    row: Row,
    needed: float,
    lead_gain: float,
    banned: tuple[int, ...],
) -> tuple[list[int], int, float]:
    """Tokens at the end, forwards, and the smallest lead of a choice."""
    cells: list[Cell] = [(t, not d, False) for t, d in zip(row.tokens, row.is_draft, strict=True)]
    closest, forwards = math.inf, row.steps + 1
    for step in range(-1, row.steps):
        logp = _log_softmax([cell[0] for cell in cells])
        if step >= 0 and row.resample:
            allowed = logp.copy()
            allowed[:, list(banned)] = -np.inf
            best = allowed.argmax(-1)
            cells = [c if c[1] else (int(best[i]), *c[1:]) for i, c in enumerate(cells)]
        if step == row.steps - 1:
            break
        found, best, near = _candidates(
            cells, logp, len(cells) < row.capacity, is_drawn=step >= 0 and row.resample,
            banned=banned,
        )  # fmt: skip
        closest = min(closest, near)
        if not found:
            continue
        forwards += 1 + TRIALS
        texts = [_made(cells, edit, int(best[edit[1]])) for _, edit in found]
        before = [cell[0] for cell in cells]
        gains = [
            _likelihood([cell[0] for cell in text]) - _likelihood(before) + lead_gain * lead
            for text, (lead, edit) in zip(texts, found, strict=True)
        ]
        order = sorted(gains, reverse=True)
        closest = min([closest, abs(order[0] - needed), *-np.diff(order[:2])])
        if max(gains) > needed:
            cells = texts[int(np.argmax(gains))]
    return [cell[0] for cell in cells], forwards, closest


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
def test_the_loop_equals_a_plain_one_that_tries_each_edit_on_a_list(seed):
    rows = [
        dataclasses.replace(row, capacity=len(row.tokens) if index == 5 else POSITIONS)
        for index, row in enumerate(_drafts(seed))
    ]
    gains = np.resize(np.array([0.0, 0.0, 0.7, 0.2], np.float32), ROWS)
    lead_gains = np.resize(np.array([0.0, 0.25, 1.5, 0.0, 0.5], np.float32), ROWS)
    rule = _rule(gain_B=gains, lead_gain_B=lead_gains)
    state = _state(rows, rule)
    state = canvases.shared_advance()(toy.params(), state, FOREVER)
    compared, changed = 0, 0
    for index, (row, result) in enumerate(zip(rows, canvases.results(state), strict=True)):
        want, forwards, closest = _plain(
            row,
            gains[index],
            lead_gains[index],
            _banned(index),
        )
        assert Status(result.status) is Status.DONE
        if closest > CLEAR:
            assert (list(result.tokens), result.forwards) == (want, forwards)
            compared += 1
            changed += len(want) != len(row.tokens)
    assert compared >= 5 and changed >= 2


def test_what_no_edit_makes_likelier_by_enough_stays_as_it_is():
    rows = [dataclasses.replace(row, resample=False) for row in _drafts(5)]
    state = _state(rows, _rule(gain_B=np.full(ROWS, 1e6, np.float32)))
    state = canvases.shared_advance()(toy.params(), state, FOREVER)
    for row, result in zip(rows, canvases.results(state), strict=True):
        assert result.tokens == row.tokens
        assert result.forwards == 5 + 4 * (1 + TRIALS)
    # Spaces never go; where nothing comes either there is no candidate, and no text is asked for.
    full = [
        dataclasses.replace(row, tokens=(toy.SPACE,) * len(row.tokens), capacity=len(row.tokens))
        for row in rows
    ]
    state = _state(full, _rule())
    state = canvases.shared_advance()(toy.params(), state, FOREVER)
    assert [result.forwards for result in canvases.results(state)] == [5] * ROWS


def test_a_length_target_is_refused():
    asked: dict[str, Any] = {"edit": True, "edit_scoring": "likelihood"}
    with pytest.raises(ValueError, match="edit_scoring='likelihood' has no length_target_mode="):
        SamplingParams(length_target_mode="to_max_new", **asked)
