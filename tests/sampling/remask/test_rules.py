"""Remask rules and the ancestral commit rule against plain Python."""

import dataclasses

import canvases
import commit_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
import toy
from canvases import Row
from oracles import remask as oracle
from oracles import rules

import dlm_jax
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.sampling.commit import Ancestral, RandomFilled
from dlm_jax.sampling.mask_step import step as one_step
from dlm_jax.sampling.remask import RemaskContext, Scheduled
from dlm_jax.settings import pytree

ROWS, LENGTH = 240, 14
RNG = np.random.default_rng(1)
POWER = 2.0
KEYS = jax.vmap(jax.random.key)


def _step(step, steps, is_hole=None):
    is_hole = np.zeros((len(step), LENGTH), bool) if is_hole is None else is_hole
    return commit_cases.context(is_hole, step=step, steps=steps)


def _context(step, is_open, is_fresh, probability, num_free):
    return RemaskContext(
        step, jnp.asarray(is_open), jnp.asarray(is_fresh), jnp.asarray(num_free, jnp.int32),
        jnp.log(jnp.asarray(probability, jnp.float32)), None, KEYS(jnp.arange(len(is_open)) + 1000),
    )  # fmt: skip


def _scheduled(start, end):
    return Scheduled(jnp.asarray(start, jnp.float32), jnp.asarray(end, jnp.float32))


_select = jax.jit(lambda rule, context: context.is_open_BL & rule.select((), context)[0])


def test_scheduled_remasking_takes_the_least_likely_tokens():
    steps = RNG.integers(2, 9, ROWS)
    step = RNG.integers(0, steps - 1)
    start, end = RNG.uniform(0, 1, (2, ROWS)).round(2)
    is_open = np.ones((ROWS, LENGTH), bool)
    is_open[:, -3:] = False
    probability = RNG.uniform(0, 1, (ROWS, LENGTH)).astype(np.float32)
    context = _context(_step(step, steps), is_open, is_open, probability, is_open.sum(1))
    chosen = _select(_scheduled(start, end), context)
    sizes = set()
    for row in range(ROWS):
        ratio = oracle.scheduled_ratio(int(step[row]) + 1, int(steps[row]), start[row], end[row])
        want = oracle.worst((1.0 - probability[row]).tolist(), is_open[row], ratio)
        assert set(np.flatnonzero(chosen[row]).tolist()) == want
        sizes.add(len(want))
    assert len(sizes) > 8


def test_a_number_that_is_whole_is_not_rounded_down_by_float32():
    """0.95 - 0.9 * 2 / 3 is 0.35, and of 20 tokens 7."""
    is_open = np.ones((1, 20), bool)
    step = _step([1], [4], ~is_open)
    probability = np.linspace(0.05, 0.95, 20)[None]
    chosen = _select(
        _scheduled([0.95], [0.05]), _context(step, is_open, ~is_open, probability, [20])
    )
    assert np.flatnonzero(chosen[0]).tolist() == list(range(7))


def test_the_tokens_that_the_critic_calls_wrong_are_remasked():
    is_open = np.ones((1, LENGTH), bool)
    wrong = np.full((1, LENGTH), 0.1, np.float32)
    wrong[0, [2, 9, 11]] = 0.9
    likely_when_drawn = np.where(wrong > 0.5, 0.99, 0.01)
    context = _context(_step([0], [4]), is_open, ~is_open, likely_when_drawn, [LENGTH])
    rule = _scheduled([3 / LENGTH], [3 / LENGTH])
    chosen = _select(rule, context._replace(wrong_BL=jnp.asarray(wrong)))
    assert np.flatnonzero(chosen[0]).tolist() == [2, 9, 11]


def test_count_is_of_the_free_positions_holes_included():
    is_open = np.arange(LENGTH)[None] < 6
    context = _context(_step([0], [4]), is_open, is_open, np.zeros((1, LENGTH)), [10])
    assert int(_select(_scheduled([0.5], [0.5]), context).sum()) == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_holes_are_unmasked_as_often_as_the_process_says(schedule):
    noise, steps, rows = SCHEDULES[schedule](POWER), 5, 4000
    is_hole = np.ones((rows, LENGTH), bool)
    for step in range(steps - 1):
        now = _step(np.full(rows, step), np.full(rows, steps), is_hole)
        rate = np.asarray(_eligible(Ancestral(noise), now)).mean()
        want = rules.ancestral_probability(schedule, step, steps, POWER)
        assert rate == pytest.approx(want, abs=0.01)


_eligible = jax.jit(lambda rule, context: rule.eligible((), context))


def test_a_drafts_tokens_are_known_by_their_own_probability():
    """Nothing is remasked here; what the rule would read is looked at."""
    is_draft = (False, True, True, False, False, True)
    rows = [Row((1, 2, 3, 4, toy.MASK, 5), steps=3, is_draft=is_draft)]
    state = canvases.make_state(rows, canvases.RANDOM, remask=_scheduled([0.01], [0.01]))
    state = jax.jit(one_step, static_argnums=0)(canvases.program(), toy.params(), state)
    logprobs = jax.nn.log_softmax(toy.row_logits([*rows[0].tokens, *[toy.PAD] * 18], 6)[:6])
    for place, token in ((1, 2), (2, 3), (5, 5)):
        own = float(state.logprob_BL[0, place])
        assert own == pytest.approx(float(logprobs[place, token]), rel=1e-4)
        assert int(state.committed_BL[0, place]) == -1
    assert (np.asarray(state.logprob_BL[0, [0, 3]]) == 0).all()


@dlm_jax.rule
class Aged(dlm_jax.RemaskRule):
    """Remasks tokens that have stood for `span` steps, and counts them in each row."""

    span_B: jax.Array = dlm_jax.per_row(dlm_jax.Setting("aged_span", 3, "aged: span", low=1))

    def init(self, num_rows, num_positions):
        age_BL = jnp.zeros((num_rows, num_positions), jnp.int32)
        return age_BL, jnp.zeros(num_rows, jnp.int32)

    def select(self, state, context):
        age_BL, count_B = state
        age_BL += context.is_open_BL
        is_old_BL = context.is_open_BL & (age_BL > self.span_B[:, None])
        return is_old_BL, (age_BL, count_B + jnp.sum(is_old_BL, axis=1))


def test_the_state_of_a_remask_rule_moves_with_edits_and_ends_with_its_token():
    name = "left_to_right-scheduled-parallel-edit"
    rows = [dataclasses.replace(row, block_length=0, stop_at_eos=False)
            for row in rule_cases.rows(resamples=True)]  # fmt: skip
    rows = [dataclasses.replace(row, resample=False, steps=14) for row in rows]
    slots = list(zip(rows, rule_cases.samples(name, len(rows)), strict=True))
    state = rule_cases.make_state(name, slots)
    rule = Aged(jnp.full(len(rows), 3, jnp.int32))
    start = rule.init(*state.canvas.tokens_BL.shape)
    state = state._replace(rules=state.rules._replace(remask=rule), remask_state=start)
    take_step, params = jax.jit(one_step, static_argnums=0), rule_cases.params(name)
    num_moved = 0
    for _ in range(10):
        before = np.asarray(state.committed_BL)
        state = take_step(rule_cases.program(name), params, state)
        committed, step_B1 = np.asarray(state.committed_BL), np.asarray(state.step_B)[:, None]
        ages, is_hole = np.asarray(state.remask_state[0]), state.canvas.tokens_BL == toy.MASK
        is_told = (committed >= 0) & np.asarray(state.is_running_B)[:, None]
        np.testing.assert_array_equal(ages[is_told], (step_B1 - committed)[is_told])
        assert (ages[np.asarray(is_hole)] == 0).all() and ages.max() <= 3
        num_moved += (is_told & (committed != before) & (committed < step_B1 - 1)).sum()
    assert num_moved > 10
    assert (np.asarray(state.remask_state[1]) > 0).any()


@pytree
class Counted(RandomFilled):
    """Counts the candidates that each hole has had."""

    def init(self, num_rows, num_positions):
        return jnp.zeros((num_rows, num_positions), jnp.int32)

    def score(self, state_N, logits_NV, drawn):
        return super().score(state_N, logits_NV, drawn)[0], state_N + 1


def test_the_state_of_a_commit_rule_moves_with_edits_and_begins_anew_at_new_holes():
    name = "left_to_right-scheduled-parallel-edit"
    rows = [dataclasses.replace(row, block_length=0, stop_at_eos=False, resample=False, steps=14)
            for row in rule_cases.rows(resamples=True)]  # fmt: skip
    slots = list(zip(rows, rule_cases.samples(name, len(rows)), strict=True))
    state, rule = rule_cases.make_state(name, slots), Counted()
    start = rule.init(*state.canvas.tokens_BL.shape)
    rules = state.rules._replace(commit=rule, remask=None)
    state = state._replace(rules=rules, rule_state=start, remask_state=())
    take_step, params = jax.jit(one_step, static_argnums=0), rule_cases.params(name)
    place_BL = jnp.broadcast_to(jnp.arange(canvases.POSITIONS), state.canvas.tokens_BL.shape)
    seen = {"moved": 0, "new": 0}
    for _ in range(8):
        state = state._replace(edits=state.edits._replace(origin_BL=place_BL))
        old = jax.device_get((state.canvas.tokens_BL == toy.MASK, state.rule_state))
        steps_B, step_B = np.asarray(state.is_stepping_B), np.asarray(state.step_B)
        state = take_step(rule_cases.program(name), params, state)
        is_hole, counts, origin = jax.device_get(
            (state.canvas.tokens_BL == toy.MASK, state.rule_state, state.edits.origin_BL)
        )
        for row in np.flatnonzero(steps_B & (step_B + 1 < 14)):
            for place in np.flatnonzero(is_hole[row]):
                source = origin[row, place]
                was_hole = source >= 0 and old[0][row, source]
                assert counts[row, place] == (old[1][row, source] + 1 if was_hole else 0)
                seen["moved"] += bool(was_hole and source != place)
                seen["new"] += not was_hole
    assert min(seen.values()) > 5, seen
