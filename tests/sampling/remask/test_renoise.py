"""Re-noise: how much of a block is written over, where and with what; and nobody else notices."""

import dataclasses
import functools
import math

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_model
from canvases import POSITIONS, ROWS, Row
from oracles.edits import ratio_at

from dlm_jax.config import SamplingParams
from dlm_jax.inference.request import make_requests
from dlm_jax.sampling.edits import Uncertainty
from dlm_jax.sampling.mask_step import apply_renoise
from dlm_jax.sampling.remask import RENOISE_TOKENS, Renoise
from dlm_jax.sampling.state import EDITED
from dlm_jax.sampling.transforms import LogitBias
from dlm_jax.types import Status

TEXT_IDS = tuple(range(8))
NEVER = -7

_renoised = jax.jit(functools.partial(apply_renoise, canvases.program()))


def _renoise(start=0.5, end=0.0, kinds=RENOISE_TOKENS, *, rows=ROWS) -> Renoise:
    """The numbers of all rows, or one of each row; kinds in turn."""
    return Renoise(
        jnp.asarray(np.broadcast_to(np.float32(start), rows)),
        jnp.asarray(np.broadcast_to(np.float32(end), rows)),
        jnp.asarray(
            np.resize([RENOISE_TOKENS.index(kind) for kind in kinds], rows).astype(np.int32)
        ),
    )


def _rows(seed: int = 0) -> list[Row | None]:
    """Drafts with given tokens and holes among them, in blocks and in one piece; one slot idle."""
    rng = np.random.default_rng(seed)
    rows: list[Row | None] = [
        Row(
            tokens=tuple(rng.choice([*TEXT_IDS, toy.MASK], 18 + index % 5).tolist()),
            is_draft=tuple((rng.random(18 + index % 5) < 0.8).tolist()),
            steps=9,
            seed=index,
            block_length=(0, 9)[index % 2],
        )
        for index in range(ROWS)
    ]
    rows[5] = None
    return rows


def _state(rows, renoise, step=0, **changes):
    """The state of rows that have taken a step or more; what each one wrote is marked."""
    state = canvases.make_state(rows, renoise=renoise, **changes)
    return state._replace(
        step_B=jnp.asarray(np.broadcast_to(np.int32(step), len(rows))),
        committed_BL=jnp.full((len(rows), POSITIONS), NEVER),
        logprob_BL=jnp.full((len(rows), POSITIONS), -1.5),
    )


def _hits(state) -> np.ndarray:
    return np.asarray(state.committed_BL) != NEVER


def _may_be_hit(row: Row | None) -> np.ndarray:
    """True at the unfrozen positions of a row's first block, whose steps have not begun."""
    is_open = np.zeros(POSITIONS, bool)
    if row is None:
        return is_open
    tokens = np.array(row.tokens)
    is_open[: tokens.size] = np.array(row.is_draft) | (tokens == toy.MASK)
    first = int(np.argmax(is_open))
    place = np.arange(POSITIONS)
    return is_open & (place < first + (row.block_length or POSITIONS))


def test_a_step_writes_over_the_scheduled_share_of_the_tokens_in_its_block():
    rows, rng = _rows(), np.random.default_rng(1)
    rows[3] = dataclasses.replace(rows[3], steps=1, block_length=0)
    some = 0
    for step in (0, 3, 7, 8):
        start, end = rng.uniform(0, 1, (2, ROWS)).astype(np.float32)
        start[2], end[2] = 0.0, 0.0
        state = _state(rows, _renoise(start, end), step)
        after = _renoised(state)
        hits, old = _hits(after), np.asarray(state.canvas.tokens_BL)
        for index, row in enumerate(rows):
            may = _may_be_hit(row)
            is_token = may & (old[index] != toy.MASK)
            assert not (hits[index] & ~is_token).any()
            steps = 1 if row is None else row.steps
            at = min(step, steps - 1), steps, "cosine"
            share = ratio_at(float(start[index]), float(end[index]), *at)
            wanted = math.floor(share * is_token.sum() + 1e-3)
            assert hits[index].sum() == wanted
            some += 0 < wanted < is_token.sum()
    assert some > 2 * ROWS


def test_each_row_is_written_over_with_its_own_kind_and_random_tokens_are_text():
    rows, seen = _rows(2), set()
    for step in range(6):
        after = _renoised(_state(rows, _renoise(0.9, 0.9), step))
        tokens, hits = np.asarray(after.canvas.tokens_BL), _hits(after)
        for index in range(ROWS):
            kind, new = RENOISE_TOKENS[index % 3], tokens[index, hits[index]].tolist()
            if kind == "random":
                seen |= set(new)
            else:
                assert set(new) <= {toy.SPACE if kind == "space" else toy.MASK}
            # No step committed it, and it has no probability.
            told = np.asarray(after.committed_BL)[index, hits[index]]
            assert (told == (-1 if kind == "mask" else EDITED)).all()
            assert not np.asarray(after.logprob_BL)[index, hits[index]].any()
    assert seen == set(TEXT_IDS)


def test_no_row_is_written_over_with_what_it_bans():
    rows, seen = _rows(2), [set() for _ in range(ROWS)]
    renoise = _renoise(0.9, 0.9, ["random"])
    bans = np.array([[*toy.BANNED, index % 8, (index + 3) % 8] for index in range(ROWS)], np.int32)
    bans[1, 3:] = toy.BANNED[:2]
    for step in range(8):
        state = _state(rows, renoise, step)
        first, *others = state.rules.chain.transforms
        first = LogitBias(jnp.asarray(bans), jnp.full(bans.shape, -jnp.inf))
        chain = dataclasses.replace(state.rules.chain, transforms=(first, *others))
        after = _renoised(state._replace(rules=state.rules._replace(chain=chain)))
        tokens, hits = np.asarray(after.canvas.tokens_BL), _hits(after)
        for index in range(ROWS):
            seen[index] |= set(tokens[index, hits[index]].tolist())
    for index, ids in enumerate(seen):
        assert ids == (set() if rows[index] is None else {*TEXT_IDS} - {*bans[index].tolist()})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"renoise_start": 0.3, "logit_bias": {0: -math.inf}}, "renoise='space' writes spaces, wh"),
        (
            {"draft": "a rat", "logit_bias": {4: -math.inf, 9: -math.inf}},
            "draft contains the ids 4, 9",
        ),
    ],
)
def test_banned_spaces_and_drafts_of_banned_ids_are_refused_in_one_line(settings, line):
    asked = {"steps": 4, "gen_length": 4, "resample": True, "schedule": "all", **settings}
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        make_requests(toy_model.MODEL, asked, {})
    assert line in str(refusal.value)


def test_every_token_is_hit_as_often_as_any_other_and_every_id_is_written_as_often():
    number, positions = 6000, 14
    tokens = np.tile(np.r_[np.full(4, 20), toy.MASK, np.full(9, 20)], (number, 1))
    is_free = np.arange(positions) >= 2
    renoise = _renoise(0.3, 0.3, ["random"], rows=number)
    is_text = np.isin(np.arange(toy.VOCAB_SIZE), (3, 5, 6))

    @jax.jit
    def write(keys):
        return renoise.write(
            jnp.asarray(tokens), jnp.tile(is_free, (number, 1)), jnp.zeros(number, jnp.int32),
            jnp.full(number, 5), keys,
            mask_id=toy.MASK, space_id=toy.SPACE, is_text=lambda: jnp.tile(is_text, (number, 1)),
        )  # fmt: skip

    after, is_hit = write(jax.random.split(jax.random.key(0), number))
    after, is_hit = np.asarray(after), np.asarray(is_hit)
    # 3 of the 11 tokens that are free. One standard deviation is 35 hits.
    counts = is_hit.sum(0)
    expected = np.where(is_free & (tokens[0] != toy.MASK), 3 / 11 * number, 0)
    np.testing.assert_allclose(counts, expected, atol=160)
    both = is_hit.T.astype(int) @ is_hit
    pairs = both[np.ix_(expected > 0, expected > 0)][np.triu_indices(11, 1)]
    np.testing.assert_allclose(pairs / number, 3 / 11 * 2 / 10, atol=0.015)
    for place in np.flatnonzero(expected):
        written = after[is_hit[:, place], place]
        np.testing.assert_allclose(
            np.bincount(written, minlength=7) / written.size, [0, 0, 0, 1 / 3, 0, 1 / 3, 1 / 3],
            atol=0.06,
        )  # fmt: skip


def test_rows_that_have_ended_and_drafts_that_are_only_looked_at_are_not_written_over():
    rows, renoise = _rows(5), _renoise(0.8, 0.8)
    state = _state(rows, renoise)
    is_done = np.arange(ROWS) % 2 == 0
    state = state._replace(status_B=jnp.where(jnp.asarray(is_done), Status.DONE, state.status_B))
    assert _hits(_renoised(state)).any(1).tolist() == [False, True, False, True, False, False,
                                                       False, True]  # fmt: skip
    edit = Uncertainty.pack([SamplingParams(edit=True, edit_token="mask")] * ROWS, None)
    warm = _state(rows[:2] + [Row(canvases.holes(6, 1))] * 6, renoise, edit=edit)
    warms = np.asarray(warm.edits.warms_B)
    assert warms.tolist() == [True, True, *[False] * 6]
    assert not _hits(_renoised(warm)).any()
    warm = warm._replace(edits=warm.edits._replace(warms_B=jnp.zeros(ROWS, bool)))
    assert _hits(_renoised(warm)).any(1).tolist() == warms.tolist()
