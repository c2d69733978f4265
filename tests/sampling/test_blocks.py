"""Blocks against plain Python, alone and in the loop."""

import dataclasses

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
import toy
from canvases import ROWS, Row, holes
from oracles import commit as oracle

from dlm_jax.config import SamplingParams
from dlm_jax.sampling.positions import first_block, next_block
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.types import Status

_first, _next = jax.jit(first_block), jax.jit(next_block)


def test_blocks_and_their_steps_are_those_of_the_oracle():
    rng = np.random.default_rng(0)
    rows, length = 200, 20
    is_frozen = rng.random((rows, length)) < rng.random((rows, 1))
    is_hole = ~is_frozen & (rng.random((rows, length)) < 0.5)
    size = rng.integers(0, 9, rows)
    windows = [oracle.blocks(is_frozen[r], length, int(size[r]) or None) for r in range(rows)]
    busy = [[w for w in ws if any(is_hole[r, i] for i in w)] for r, ws in enumerate(windows)]
    steps = np.array([len(b) + int(rng.integers(0, 9)) or 1 for b in busy])
    arguments = (jnp.asarray(is_hole), jnp.asarray(is_hole))
    shared = (jnp.asarray(size, jnp.int32), jnp.asarray(steps, jnp.int32))
    first_B = jnp.argmax(jnp.asarray(~is_frozen), axis=1)
    block, is_any = _first(*arguments, first_B, *shared)
    seen = [[] for _ in range(rows)]
    for _ in range(length + 1):
        holds = np.asarray(block.holds(length))
        for r in np.flatnonzero(np.asarray(is_any)):
            place = np.flatnonzero(holds[r])
            seen[r].append((place[0], place[-1] + 1, int(block.steps_B[r]),
                            int(block.first_holes_B[r])))  # fmt: skip
        block, has_more = _next(block, *arguments, *shared)
        is_any = is_any & has_more
    for r in range(rows):
        budgets = oracle.split_steps(int(steps[r]), len(busy[r])) if busy[r] else []
        expected = [
            (w.start, w.stop, budget, int(is_hole[r, w.start : w.stop].sum()))
            for w, budget in zip(busy[r], budgets, strict=True)
        ]
        assert seen[r] == expected
    assert max(map(len, seen)) > 4


@pytest.mark.parametrize(
    ("schedule", "confidence"), [("linear", "sampled"), ("linear", "max"), ("cosine", "sampled")]
)
def test_greedy_decoding_in_blocks_equals_the_oracle(schedule, confidence):
    rng = np.random.default_rng(4)
    rows = [
        dataclasses.replace(row, temperature=0.0, block_length=int(rng.integers(1, 9)), steps=24)
        for row in canvases.mixed_rows(4)
    ]
    settings = [
        SamplingParams(order="low_confidence", schedule=schedule, confidence=confidence)
    ] * ROWS
    rule = BUILT_IN.pack(settings, rule_cases.FACTS).commit
    compared = 0
    for row, result in zip(rows, canvases.run(rows, rule), strict=True):

        def logits(tokens_L):
            padded = np.pad(tokens_L, (0, canvases.POSITIONS - len(tokens_L)),
                            constant_values=toy.PAD)  # fmt: skip
            return np.asarray(toy.row_logits(padded, len(tokens_L)))

        trace = oracle.denoise(
            logits, row.tokens, steps=row.steps, mask_id=toy.MASK, banned=set(toy.BANNED),
            block_length=row.block_length, schedule=schedule, confidence=confidence,
        )  # fmt: skip
        if min(trace.score_gap, trace.token_gap) < 1e-5:
            continue
        compared += 1
        assert result.tokens == tuple(trace.tokens.tolist())
        for index, positions in enumerate(trace.commits):
            assert np.flatnonzero(np.array(result.committed) == index).tolist() == sorted(positions)
    assert compared >= ROWS - 3


@pytest.mark.parametrize("refines", [False, True], ids=["stays", "resampled"])
def test_a_row_that_stops_at_eos_ends_with_its_text_and_not_before(refines):
    """What stays is whole up to its first hole, what is resampled up to the block that is done."""
    some = {"steps": 20, "block_length": 4, "temperature": 2.0}
    rows = [Row(holes(20, 1), seed=seed, **some, resample=refines) for seed in range(ROWS)]
    whole = canvases.run(rows, canvases.RANDOM)
    stopping = [dataclasses.replace(row, stop_at_eos=True) for row in rows]
    stopped = canvases.run(stopping, canvases.RANDOM)
    ends = 0
    for long, short in zip(whole, stopped, strict=True):
        assert Status(short.status) is Status.DONE and toy.MASK not in long.tokens
        if toy.EOS not in short.tokens:
            assert short == long
            continue
        ends += short.steps < long.steps
        end = short.tokens.index(toy.EOS) + 1
        assert short.tokens[:end] == long.tokens[:end] and toy.MASK not in short.tokens[:end]
        if not refines:
            assert short.steps == max(short.committed[:end]) + 1
        else:
            assert short.steps == (end + 2) // 4 * 4 and toy.EOS not in long.tokens[: end - 1]
    assert ends > 1


def test_an_eos_that_was_given_before_the_holes_ends_nothing():
    rows = [Row(holes(6, 1, toy.EOS), steps=6, seed=seed, stop_at_eos=True) for seed in range(ROWS)]
    for result in canvases.run(rows, canvases.RANDOM):
        assert Status(result.status) is Status.DONE
        if toy.EOS not in result.tokens[2:]:
            assert result.steps == 6 and toy.MASK not in result.tokens
