"""Host samplers and read-back: single rows leave the device, the others do not notice."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import SamplingParams
from dlm_jax.inference.host import HostLoop
from dlm_jax.sampling.commit import LeftToRight
from dlm_jax.sampling.loop import start
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.propose import Parallel
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts, Rules
from dlm_jax.types import Status

LENGTH, CANVAS, ROWS = 10, 12, 3
PROGRAM = Program(toy.network(), toy.MASK, chunk=16)
LOOP = HostLoop(PROGRAM)
MAX_CANDIDATES = 6


def _chain(**changes):
    rows = [
        SamplingParams(chain=("temperature", "top_k", "mirostat"), **settings)
        for settings in ({}, changes, {"temperature": 0.5})
    ]
    return BUILT_IN.pack(
        rows, ModelFacts(vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))
    ).chain


def _state(**changes):
    tokens = np.full((ROWS, CANVAS), toy.PAD)
    tokens[:, :LENGTH] = toy.MASK
    tokens[:, 0] = [1, 2, 3]
    none_B = jnp.zeros(ROWS, jnp.int32)
    row = RowParams(
        steps_B=jnp.full(ROWS, LENGTH - 1),
        seed_B=jnp.arange(5, 5 + ROWS, dtype=jnp.uint32),
        block_length_B=none_B,
        guidance_B=jnp.zeros(ROWS),
        stops_at_eos_B=none_B > 0,
        resamples_B=none_B > 0,
        capacity_B=none_B,
        max_new_B=none_B,
        ties_B=none_B,
    )
    rules = Rules(_chain(**changes), LeftToRight(), Parallel())
    return start(
        jnp.asarray(tokens, jnp.int32), jnp.full(ROWS, LENGTH), row, rules, mask_id=toy.MASK
    )


def _run(samplers, read_back=(), **changes):
    state, records = _state(**changes), []
    while np.any(np.asarray(state.status_B) == Status.RUNNING):
        state, written = _step(state, samplers, read_back)
        records += written
    return state, records


def _step(state, samplers, read_back=(), params=None):
    params = toy.params() if params is None else params
    return LOOP.step(params, state, samplers, read_back=read_back, max_candidates=MAX_CANDIDATES)


def test_a_host_sampler_sees_only_survivors_of_the_device_chain_most_likely_first():
    seen = []

    def take_first(candidates):
        seen.append(candidates)
        return candidates.ids[0]

    state, _ = _run({1: take_first}, top_k=3)
    assert [c.index for c in seen] == list(range(1, LENGTH))
    for candidates in seen:
        assert len(candidates.ids) == candidates.num_survivors == 3
        assert not set(candidates.ids.tolist()) & set(toy.BANNED)
        assert (np.diff(candidates.logits) <= 0).all()
        assert np.exp(candidates.logprobs).sum() == pytest.approx(1, abs=1e-5)
        row = np.full(CANVAS, toy.PAD)
        row[:LENGTH] = candidates.tokens
        logits = np.array(toy.row_logits(row, LENGTH)[candidates.index], np.float64)
        logits[list(toy.BANNED)] = -np.inf
        assert candidates.ids.tolist() == np.argsort(-logits, kind="stable")[:3].tolist()
    written = np.asarray(state.canvas.tokens_BL)[1, 1:LENGTH]
    assert written.tolist() == [c.ids[0] for c in seen]


def test_a_sampler_can_be_attached_replaced_and_removed_between_steps():
    state = _state()
    for samplers in (
        {},
        {1: lambda c: c.ids[-1]},
        {1: lambda c: c.ids[1]},
        {0: lambda c: c.ids[2]},
    ):
        before = np.asarray(state.canvas.tokens_BL).copy()
        state, records = _step(state, samplers, list(samplers))
        after = np.asarray(state.canvas.tokens_BL)
        assert ((before != after).sum(1) == 1).all()
        for record in records:
            choose = samplers[record.candidates.row]
            assert record.token == choose(record.candidates)


def test_the_hosts_token_has_its_probability_under_the_clean_logits():
    before = _state(top_k=1)
    state, _ = _step(before, {1: lambda candidates: candidates.ids[0]})
    row = np.full(CANVAS, toy.PAD)
    row[:LENGTH] = np.asarray(before.canvas.tokens_BL)[1, :LENGTH]
    clean = jax.nn.log_softmax(toy.row_logits(row, LENGTH)[1])
    token = int(state.canvas.tokens_BL[1, 1])
    assert float(clean[token]) < -0.1
    assert float(state.logprob_BL[1, 1]) == pytest.approx(float(clean[token]), rel=1e-4)


def test_a_hosted_row_draws_the_same_whatever_else_is_hosted():
    def anything(candidates):
        return candidates.choose(np.ones(candidates.ids.size, bool))

    alone, _ = _run({1: anything})
    together, _ = _run({0: anything, 1: anything, 2: anything})
    alone, together = (np.asarray(s.canvas.tokens_BL) for s in (alone, together))
    np.testing.assert_array_equal(alone[1], together[1])
    assert (alone[[0, 2]] != together[[0, 2]]).any()


def test_candidates_carry_a_number_of_their_own():
    _, records = _run({}, read_back=[0, 1], temperature=0.0)
    uniforms = [record.candidates.uniform for record in records]
    assert len(set(uniforms)) == len(uniforms)
    assert min(uniforms) >= 0 and max(uniforms) < 1
    for record in records:
        assert record.candidates.is_greedy == (record.candidates.row == 1)
        assert len(record.candidates.tokens) == LENGTH


def test_a_row_without_finite_logits_ends_with_its_status_and_is_not_asked():
    broken = jax.tree.map(lambda leaf: leaf * np.nan, toy.params())
    state, records = _step(_state(), {1: pytest.fail}, read_back=[0, 1], params=broken)
    assert [Status(int(s)) for s in state.status_B] == [Status.NON_FINITE] * ROWS
    assert not records


def test_mirostat_learns_how_likely_the_hosts_choice_was():
    seen = []

    def take_last(candidates):
        seen.append(candidates)
        return candidates.ids[-1]

    state = _state(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, temperature=0.7)
    state, _ = _step(state, {1: take_last})
    (candidates,) = seen
    surprise = -float(candidates.logprobs[-1]) / math.log(2)
    assert float(state.chain_state[-1][1]) == pytest.approx(4.0 - 0.5 * (surprise - 2.0), abs=1e-5)
