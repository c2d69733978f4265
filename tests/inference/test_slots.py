"""Slots: requests of any number and length in, the same rows out."""

import canvases
import numpy as np
import pytest
import toy
from canvases import Row, holes

from dlm_jax.config import SampleConfig
from dlm_jax.inference.host import HostLoop
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import assemble
from dlm_jax.inference.slots import Slots, finish, slot_count
from dlm_jax.sampling.rules import ModelFacts
from dlm_jax.types import Status

ROWS = [*canvases.mixed_rows(seed=11, count=5), Row(holes(40, 1, 2), steps=3, seed=9)]
FACTS = ModelFacts(toy.VOCAB_SIZE, toy.BANNED, (toy.EOS,))


def _request(row):
    sample = SampleConfig(
        steps=row.steps, temperature=row.temperature, order="random", chain=("temperature",)
    )
    return Request(np.array(row.tokens, np.int32), sample, row.seed)


def _slots(rows, **settings):
    requests = [_request(row) for row in rows]
    advance, params = canvases.shared_advance(), toy.params()
    return Slots(advance, params, requests, FACTS, pad_id=toy.PAD, **settings)


def _generate(rows, on_commits=None, **settings):
    slots = _slots(rows, **settings)
    slots.submit(range(len(rows)))
    found = dict(finish(slots, on_commits))
    return assemble([found[index] for index in range(len(rows))], pad_id=toy.PAD)


def _assert_same(ours, theirs):
    assert ours.status == theirs.status
    for name in ("tokens", "lengths", "steps", "forwards", "committed"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_groups_of_rows_give_what_all_at_once_do():
    whole = _generate(ROWS)
    _assert_same(_generate(ROWS, batch_size=4), whole)
    backwards = _generate(ROWS[::-1], batch_size=4)
    np.testing.assert_array_equal(backwards.tokens[::-1], whole.tokens)


def test_results_are_in_order_and_keep_what_was_given():
    result = _generate(ROWS)
    assert result.tokens.shape == (len(ROWS), 64)
    assert result.lengths.tolist() == [len(row.tokens) for row in ROWS]
    assert set(result.status) == {Status.DONE}
    for row, tokens, committed in zip(ROWS, result.tokens, result.committed, strict=True):
        given = np.array(row.tokens)
        live = tokens[: given.size]
        assert live[given != toy.MASK].tolist() == given[given != toy.MASK].tolist()
        assert not set(live[given == toy.MASK].tolist()) & set(toy.BANNED)
        assert (tokens[given.size :] == toy.PAD).all()
        assert (committed[: given.size] >= 0).tolist() == (given == toy.MASK).tolist()


def test_progress_adds_up_to_the_holes():
    told = []
    _generate(ROWS, on_commits=told.append)
    assert sum(told) == sum(row.tokens.count(toy.MASK) for row in ROWS)
    assert min(told) >= 0
    assert len(told) == -(-max(row.steps for row in ROWS) // 8)


def test_batches_of_other_rows_compile_nothing_new():
    _generate(ROWS)
    before = list(canvases.shared_advance().compiled)
    _generate([Row(holes(5, 3), steps=2, seed=4)] * 7)
    assert canvases.shared_advance().compiled == before


def test_slots_come_in_few_sizes():
    assert [slot_count(n, 64) for n in (1, 2, 3, 5, 64, 65, 1000)] == [1, 2, 4, 8, 64, 64, 64]
    assert [slot_count(n, 6) for n in (3, 5, 7)] == [4, 6, 6]
    assert [slot_count(n, 6, 4) for n in (1, 5, 7)] == [4, 8, 8]


def test_nothing_to_do_and_no_slots_are_refused():
    with pytest.raises(ValueError, match="nothing to generate"):
        _generate([])
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        _generate(ROWS, batch_size=0)


def test_what_the_slots_cannot_run_is_refused():
    (request,) = [_request(ROWS[0])]
    few = _request(Row(holes(9, 1), steps=2))
    few = few.__class__(few.tokens, SampleConfig(steps=2, block_length=3), few.seed)
    asks = Request(request.tokens, request.sample, read_back=True)
    for requests, options, said in (
        ([request, few], {}, "steps=2 is less than the 3 blocks"),
        ([request, asks], {}, "row 1 needs the host; run it in a HostLoop"),
        ([request, asks], {"names": [7, 8]}, "row 8 needs the host; run it in a HostLoop"),
        ([request], {"canvas": 2}, "canvas=2 is less than a request may fill; raise it"),
    ):
        with pytest.raises(ValueError, match=said):
            Slots(
                canvases.shared_advance(), toy.params(), requests, FACTS, pad_id=toy.PAD, **options
            )
    loop = HostLoop(canvases.program())
    assert Slots(loop, toy.params(), [request, asks], FACTS, pad_id=toy.PAD).num_slots == 2
