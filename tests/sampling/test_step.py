"""The laws of docs/design.md for `advance`: what the loop may and may not let rows feel."""

import dataclasses
import functools
import re

import canvases
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from canvases import FOREVER, POSITIONS, RANDOM, ROWS, Row, holes
from jax.sharding import NamedSharding, PartitionSpec
from oracles import mirostat

from dlm_jax import devices
from dlm_jax.model.transformer import build
from dlm_jax.sampling.commit import CommitRule, LeftToRight
from dlm_jax.sampling.commit.orders import linear_quota
from dlm_jax.sampling.loop import Advance
from dlm_jax.sampling.mask_step import step
from dlm_jax.sampling.propose import Parallel
from dlm_jax.sampling.remask import Scheduled
from dlm_jax.sampling.state import visible_context
from dlm_jax.sampling.transforms import LogitTransform, Mirostat, chain
from dlm_jax.settings import pytree, rule
from dlm_jax.types import Status

_step = jax.jit(step, static_argnums=0)


def _is_status(result, status):
    return Status(result.status) is status


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_on_a_gpu_no_product_of_a_step_rounds_its_operands(platform, monkeypatch):
    """Otherwise, a text would depend on the shape of its batch."""
    monkeypatch.setattr(devices, "platform", lambda: platform)
    state = canvases.make_state(canvases.mixed_rows())
    advance = Advance(canvases.program())
    traced = str(advance._jitted.trace(toy.params(), state, np.int32(1), np.int32(1)).jaxpr)
    products = len(re.findall(r"= dot_general\[", traced))
    exact = len(re.findall(r"precision=\((Precision\.)?HIGHEST, (Precision\.)?HIGHEST\)", traced))
    assert products and (exact == products) == (platform == "gpu")


# Row independence


def test_row_result_does_not_depend_on_its_neighbours_at_a_working_size():
    """Matrices large enough that a library picks its kernels by where a row stands."""
    config = toy.config(width=96, heads=3, vocab_size=101)
    network = build(config)
    params = toy.random_params(network, scale=0.1)
    advance = canvases.make_advance(canvases.program(network, chunk=40))

    def results(rows):
        return canvases.results(advance(params, canvases.make_state(rows), FOREVER))

    rows = [dataclasses.replace(row, steps=3) for row in canvases.mixed_rows(3)]
    together = results(rows)
    order = np.random.default_rng(0).permutation(ROWS)
    assert results([rows[i] for i in order]) == [together[i] for i in order]
    for place in (1, 6):
        alone = [rows[place] if slot == 5 else None for slot in range(ROWS)]
        assert results(alone)[5] == together[place]


def test_eight_devices_sample_without_talking():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(toy.params(), everywhere)
    state = jax.device_put(canvases.make_state(canvases.mixed_rows(), RANDOM), by_rows)
    advance = Advance(canvases.program(rows=by_rows))
    forever = jax.device_put(np.int32(FOREVER), everywhere)
    compiled = advance._jitted.lower(params, state, forever, forever).compile()
    state = compiled(params, state, forever, forever)
    assert state.canvas.tokens_BL.sharding.is_equivalent_to(by_rows, 2)
    # whether any row runs and how many have ended is all that devices tell each other
    talk = re.findall(r"= (\S+) (?:all|collective|reduce-scatter)[\w-]*\(", compiled.as_text())
    assert sorted(talk) == ["pred[]", "s32[]"]


def test_position_that_was_not_committed_is_drawn_anew_at_the_next_step():
    """The even positions are drawn at every step and committed at the last one."""
    slots = [Row(holes(20), steps=steps, seed=3, temperature=1e6) for steps in (2, 3)]
    two, three = canvases.run(slots + [None] * 6, _OddOnly())[:2]
    assert two.tokens[1::2] == three.tokens[1::2]
    assert two.tokens[::2] != three.tokens[::2]


def test_draws_commits_and_remasks_of_every_step_and_row_have_keys_of_their_own():
    taken = []

    @rule
    class Fill(Parallel):
        def propose(self, fill):
            taken.append(fill.key_B)
            return super().propose(fill)

    @rule
    class Commit(LeftToRight):
        def select(self, state, context, proposal):
            taken.append(context.key_B)
            return super().select(state, context, proposal)

    @rule
    class Remask(Scheduled):
        def select(self, state, context):
            taken.append(context.key_B)
            return super().select(state, context)

    rows = [Row(holes(9, seed), steps=5, seed=seed) for seed in range(2)]
    rules = {"fill": Fill(), "remask": Remask(jnp.full(2, 0.1), jnp.zeros(2), needs=())}
    state = canvases.make_state(rows, Commit(linear_quota), **rules)
    for _ in range(2):
        state = step(canvases.program(), toy.params(), state)
    numbers = [tuple(row) for key_B in taken for row in jax.random.key_data(key_B).tolist()]
    assert len(numbers) == 2 * 3 * len(rows) == len(set(numbers))


# Reference loop


def test_compiled_loop_equals_a_python_loop_over_the_step():
    rows = canvases.mixed_rows(2)
    state = canvases.make_state(rows)
    while np.any(np.asarray(state.status_B) == Status.RUNNING):
        state = _step(canvases.program(), toy.params(), state)
    assert canvases.results(state) == canvases.run(rows)


# Steps, statuses and work


def test_more_steps_than_holes_stops_when_the_holes_are_filled():
    result = canvases.run([Row(holes(3, 1), steps=20)] + [None] * 7)[0]
    assert result.steps == result.forwards == 3
    assert _is_status(result, Status.DONE)


def test_rule_commits_what_it_made_eligible_alone_and_the_last_step_every_hole():
    row = Row(holes(6, 1), steps=4)
    result = canvases.run([row] + [None] * 7, _OddOnly())[0]
    assert result.committed == (-1, 0, 3, 0, 3, 0, 3)
    assert _is_status(result, Status.DONE)
    assert result.steps == 4


def test_finished_and_idle_rows_come_back_bit_for_bit():
    rows = canvases.mixed_rows(6)
    rows[0] = Row(holes(2, 1), steps=1)
    rows[3] = Row((1, 2, 3))
    slots = [*rows[:-1], None]
    state = canvases.shared_advance()(toy.params(), canvases.make_state(slots), 1)
    before = jax.tree.map(np.asarray, state)
    after = jax.tree.map(np.asarray, canvases.shared_advance()(toy.params(), state, FOREVER))
    is_done = before.status_B == Status.DONE
    assert is_done[[0, 3, 7]].all()
    assert not is_done.all()
    old, new = (jax.tree.map(lambda leaf: leaf[is_done], tree) for tree in (before, after))
    chex.assert_trees_all_equal(old, new)


def test_non_finite_row_stops_before_writing_and_others_do_not_notice():
    rows = canvases.mixed_rows(8)
    rows[2] = Row(holes(8, toy.EOS), steps=8)
    broken = canvases.run(rows, advance=_breaking_advance())
    assert _is_status(broken[2], Status.NON_FINITE)
    assert broken[2].steps == 5
    assert broken[2].tokens.count(toy.MASK) == 4
    assert np.isfinite(broken[2].logprobs).all()
    sound = [*rows[:2], Row(holes(8, 1), steps=8), *rows[3:]]
    unbroken = canvases.run(sound, advance=_breaking_advance())
    assert _is_status(unbroken[2], Status.DONE)
    assert unbroken[:2] + unbroken[3:] == broken[:2] + broken[3:]


def test_loop_moves_nothing_between_host_and_device():
    advance = canvases.shared_advance()
    state, num_steps = canvases.make_state(canvases.mixed_rows()), jnp.int32(2)
    params = toy.params()
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(advance(params, state, num_steps))
        state = jax.block_until_ready(advance(params, state, 3))
    assert int(state.step_B.max()) == 5


def test_state_holds_nothing_of_the_size_of_the_vocabulary():
    state = canvases.make_state(canvases.mixed_rows())
    assert all(leaf.ndim <= 2 for leaf in jax.tree.leaves(state))


@functools.cache
def _breaking_advance():
    """The shared network, which breaks for rows that begin with EOS and have fewer than 5 holes."""
    inner = canvases.shared_network()

    def trunk(params, tokens_BL, length_B, cache):
        hidden_BLD, cache = inner.trunk(params, tokens_BL, length_B, cache)
        num_holes_B = jnp.sum(tokens_BL == toy.MASK, axis=1)
        breaks_B = (tokens_BL[:, 0] == toy.EOS) & (num_holes_B < 5)
        return jnp.where(breaks_B[:, None, None], jnp.nan, hidden_BLD), cache

    return Advance(canvases.program(dataclasses.replace(inner, trunk=trunk)))


@pytree
class _OddOnly(CommitRule):
    """Asks for holes at odd positions; tries to commit all at step 0 and none after that."""

    def eligible(self, state, context):
        return context.is_hole_BL & (jnp.arange(POSITIONS) % 2 == 1)[None]

    def score(self, state_N, logits_NV, drawn):
        return drawn.logprob_N, state_N

    def select(self, state, context, proposal):
        return jnp.broadcast_to((context.step_B == 0)[:, None], context.is_hole_BL.shape), state


# Feedback


@rule
class CountSteps(LogitTransform):
    def is_active(self):
        return jnp.ones(ROWS, bool)

    def init(self, context):
        return jnp.zeros(context.tokens_BL.shape[0], jnp.int32)

    def apply(self, state_B, logits_NV, at):
        return logits_NV

    def update(self, state_B, is_committed_BL, proposal):
        return state_B + 1


def _with_transform(state, transform):
    rules = state.rules._replace(chain=chain(transform))
    chain_state = rules.chain.start(visible_context(state, mask_id=toy.MASK))
    return state._replace(rules=rules, chain_state=chain_state)


def test_the_memory_of_a_transform_changes_only_in_rows_that_take_a_step():
    rows = [Row(holes(9, 1, 2), steps=1 + seed % 3, seed=seed) for seed in range(ROWS)]
    state = _with_transform(canvases.make_state(rows, RANDOM), CountSteps())
    for _ in range(4):
        state = _step(canvases.program(), toy.params(), state)
    assert state.chain_state[0].tolist() == state.step_B.tolist() == [row.steps for row in rows]


@pytest.mark.slow
def test_mirostat_learns_how_likely_the_committed_tokens_were_after_the_whole_chain():
    """The surprise under the clean logits, or before the truncation, is another one."""
    temperatures, tau, eta = [0.5, 1.5] * (ROWS // 2), 2.0, 0.4
    rows = [Row(holes(9, 1, 2), steps=3, seed=seed) for seed in range(ROWS)]
    state = canvases.make_state(rows, RANDOM)
    every = functools.partial(jnp.full, (ROWS,))
    steered = chain(
        canvases.make_chain(temperatures),
        Mirostat(every(2), every(tau), every(eta), every(1), vocab_size=toy.VOCAB_SIZE),
    )
    rules = state.rules._replace(chain=steered)
    chain_state = steered.start(visible_context(state, mask_id=toy.MASK))
    state = state._replace(rules=rules, chain_state=chain_state)
    mus = [mirostat.start(tau)] * ROWS
    for number in range(2):
        before = np.asarray(state.canvas.tokens_BL)
        state = _step(canvases.program(), toy.params(), state)
        after, committed = np.asarray(state.canvas.tokens_BL), np.asarray(state.committed_BL)
        for row, temperature in enumerate(temperatures):
            logits = np.array(toy.row_logits(before[row], 11), np.float64) / temperature
            logits[:, list(toy.BANNED)] = -np.inf
            places = np.flatnonzero(committed[row] == number)
            final = [mirostat.v2(logits[place], mus[row]) for place in places]
            assert any(np.isinf(kept).sum() > len(toy.BANNED) for kept in final)
            drawn = [
                (kept, int(after[row, place])) for kept, place in zip(final, places, strict=True)
            ]
            mus[row] = mirostat.update(mus[row], drawn, tau=tau, eta=eta)
        np.testing.assert_allclose(np.asarray(state.chain_state[-1]), mus, atol=1e-4)
