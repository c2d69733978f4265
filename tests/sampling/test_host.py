"""Host samplers and read-back: single rows leave the device, the others do not notice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import SamplingParams
from dlm_jax.sampling.advance import make_advance
from dlm_jax.sampling.commit import LeftToRight
from dlm_jax.sampling.host import HostLoop, describe
from dlm_jax.sampling.loop import Program, start
from dlm_jax.sampling.params import pack
from dlm_jax.types import Status

LENGTH, CANVAS, ROWS = 10, 12, 3
PROGRAM = Program(toy.network(), toy.MASK, chunk=16)
LOOP = HostLoop(PROGRAM, max_candidates=4)


def _chain(**changes):
    settings = [SamplingParams(), SamplingParams(**changes), SamplingParams(temperature=0.5)]
    return pack(settings, vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))


def _state(**changes):
    tokens = np.full((ROWS, CANVAS), toy.PAD)
    tokens[:, :LENGTH] = toy.MASK
    tokens[:, 0] = [1, 2, 3]
    return start(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(ROWS, LENGTH),
        seeds_B=jnp.arange(5, 5 + ROWS, dtype=jnp.uint32),
        steps_B=jnp.full(ROWS, LENGTH - 1),
        chain=_chain(**changes),
        rule=LeftToRight(),
        mask_id=toy.MASK,
    )


def _run(samplers, read_back=(), **changes):
    state, records = _state(**changes), []
    while np.any(np.asarray(state.status_B) == Status.RUNNING):
        state, written = LOOP.step(toy.params(), state, samplers, read_back=read_back)
        records += written
    return state, records


def _alone():
    return make_advance(PROGRAM)(toy.params(), _state(), 100)


def test_without_samplers_the_single_steps_equal_the_compiled_loop():
    state, _ = _run({})
    jax.tree.map(np.testing.assert_array_equal, state.canvas, _alone().canvas)


def test_a_host_sampler_changes_its_own_row_alone():
    state, _ = _run({1: lambda candidates: candidates.ids[-1]})
    tokens, alone = np.asarray(state.canvas.tokens_BL), np.asarray(_alone().canvas.tokens_BL)
    np.testing.assert_array_equal(tokens[[0, 2]], alone[[0, 2]])
    assert (tokens[1] != alone[1]).any()


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


def test_more_survivors_than_are_copied_are_counted():
    _, records = _run({}, read_back=[0])
    assert {len(record.candidates.ids) for record in records} == {4}
    assert {record.candidates.num_survivors for record in records} == {
        toy.VOCAB_SIZE - len(toy.BANNED)
    }


def test_read_back_tells_every_commit_of_the_rows_asked_for_and_changes_nothing():
    state, records = _run({}, read_back=[0, 2])
    tokens = np.asarray(state.canvas.tokens_BL)
    jax.tree.map(np.testing.assert_array_equal, state.canvas, _alone().canvas)
    assert {record.candidates.row for record in records} == {0, 2}
    for record in records:
        row, index = record.candidates.row, record.candidates.index
        assert record.token == tokens[row, index]
        shown = dict(zip(record.candidates.ids, record.candidates.logprobs, strict=True))
        if record.token in shown:
            assert record.probability == pytest.approx(np.exp(shown[record.token]), rel=1e-4)
    assert len(records) == 2 * (LENGTH - 1)


def test_a_sampler_can_be_attached_replaced_and_removed_between_steps():
    state = _state()
    for samplers in (
        {},
        {1: lambda c: c.ids[-1]},
        {1: lambda c: c.ids[1]},
        {0: lambda c: c.ids[2]},
    ):
        before = np.asarray(state.canvas.tokens_BL).copy()
        state, records = LOOP.step(toy.params(), state, samplers, read_back=list(samplers))
        after = np.asarray(state.canvas.tokens_BL)
        assert ((before != after).sum(1) == 1).all()
        for record in records:
            choose = samplers[record.candidates.row]
            assert record.token == choose(record.candidates)


def test_a_regular_expression_is_obeyed_in_one_row_with_left_to_right_commits():
    letters = "abcdefgh"
    pattern = re.compile(r"(ab|c)*d?h*")

    def partly_matches(text):
        """Whether some continuation of `text` matches: tried with every letter up to two more."""
        tails = ["", *letters, *(a + b for a in letters for b in letters)]
        return any(pattern.fullmatch(text + tail) for tail in tails)

    def obey(candidates):
        text = "".join(letters[t] for t in candidates.tokens[1 : candidates.index])
        for token in candidates.ids:
            if token < len(letters) and partly_matches(text + letters[token]):
                return token
        raise AssertionError("no candidate fits; let more survive")

    loop = HostLoop(PROGRAM, max_candidates=toy.VOCAB_SIZE)
    state = _state()
    while np.any(np.asarray(state.status_B) == Status.RUNNING):
        state, _ = loop.step(toy.params(), state, {1: obey})
    text = "".join(letters[t] for t in np.asarray(state.canvas.tokens_BL)[1, 1:LENGTH])
    assert partly_matches(text)
    others = np.asarray(state.canvas.tokens_BL)[[0, 2]]
    np.testing.assert_array_equal(others, np.asarray(_alone().canvas.tokens_BL)[[0, 2]])


def test_choosing_something_else_than_a_candidate_is_refused_by_row_and_position():
    with pytest.raises(ValueError, match=r"^row 1: the host sampler chose 8 at position 1, which"):
        LOOP.step(toy.params(), _state(), {1: lambda candidates: toy.MASK})


def test_report_names_each_part_and_where_it_runs():
    def my_sampler(candidates):
        return candidates.ids[0]

    report = describe(_chain(), my_sampler).splitlines()
    assert report[0] == "bans: device"
    assert "top_p: device" in report
    assert report[-1] == "choice among the survivors: host (my_sampler)"
    assert describe(_chain(), None).splitlines()[-1] == "draw: device"
