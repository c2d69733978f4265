"""Rows cut at their end, and rows side by side."""

import dataclasses

import numpy as np
import pytest

from dlm_jax.inference.results import Row
from dlm_jax.sampling.program import Counters
from dlm_jax.types import Status

PAD = 9


def _row(tokens, frozen=(), **changes) -> Row:
    number = len(tokens)
    is_frozen = np.isin(np.arange(number), frozen)
    row = Row(
        tokens=np.array(tokens, np.int32),
        is_frozen=is_frozen,
        logprobs=np.where(is_frozen, 0, -np.arange(number)).astype(np.float32),
        committed=np.where(is_frozen, -1, np.arange(number)).astype(np.int32),
        steps=number,
        block=0,
        status=Status.DONE,
        counters=Counters(forwards=number, lost=2),
        origin=np.arange(number),
    )
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("tokens", "frozen", "eos_ids", "length"),
    [
        ([1, 2, 5, 3, 5], [0], (5,), 3),
        ([1, 2, 5, 3, 6], [0], (6, 5), 3),
        ([1, 2, 5, 3, 6], [0], (6,), 5),
        ([1, 2, 3], [0], (5,), 3),
        ([5, 1, 2], [0], (5,), 3),  # given
        ([1, 5, 2, 3], [3], (5,), 4),  # with a given token behind it
        ([1, 5, 2, 5, 3], [2], (5,), 4),  # the first with none
        ([1, 2, 5], [0], (), 3),
    ],
)
def test_a_row_ends_with_the_first_of_the_ends_that_it_wrote(tokens, frozen, eos_ids, length):
    row = _row(tokens, frozen)
    cut = row.upto_eos(eos_ids)
    for name in ("tokens", "is_frozen", "logprobs", "committed", "origin"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(row, name)[:length])
    assert (cut.steps, cut.status, cut.counters) == (row.steps, row.status, row.counters)
    assert dataclasses.replace(row, origin=None).upto_eos(eos_ids).origin is None
