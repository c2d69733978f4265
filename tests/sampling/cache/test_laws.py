"""Law 13: a cache changes time, not text; and no row feels what is computed for another."""

import dataclasses
import functools
import itertools

import canvases
import jax
import jax.numpy as jnp
import layout
import numpy as np
import pytest
import toy
from canvases import FOREVER, POSITIONS, ROWS
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.config import MeshConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.model import ops
from dlm_jax.model.transformer import build
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.kv_cache import Dual
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.positions import CurrentBlock
from dlm_jax.sampling.program import RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts

UNIT = 4
MODELS = {
    "bidirectional": {},
    "causal": {"attention_type": "causal", "start_id": toy.MASK},
    "block_causal": {"attention_type": "block_causal", "block_length": UNIT},
}
CASES = {
    "block_causal-exact": {"cache": "exact", "block_length": UNIT, "order": "low_confidence"},
    "causal-exact": {"cache": "exact", "order": "left_to_right"},
    "bidirectional-dual": {"cache": "dual", "block_length": UNIT, "order": "low_confidence"},
    "bidirectional-dual-short": {"cache": "dual", "block_length": 3},
}  # fmt: skip

FEW = ("block_causal-exact",)
"""The cases of the default tests: every one compiles a loop of its own."""


def _some(*cases):
    return [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@functools.cache
def _network(kind):
    network = build(toy.config(**MODELS[kind]))
    return network, toy.random_params(network)


def _advance(kind, **static) -> Advance:
    return canvases.make_advance(canvases.program(_network(kind)[0], **static))


def _rows(seed=0, count=ROWS):
    """Prompts of any length, with holes behind them; every row a step for each hole."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        given = int(rng.integers(1, 12))
        holes = int(rng.integers(1, POSITIONS - given + 1))
        tokens = [*rng.integers(0, toy.MASK, given).tolist(), *[toy.MASK] * holes]
        temperature = (0.0, 1.0, 0.6)[index % 3]
        rows.append({"tokens": tokens, "steps": holes + int(rng.integers(3)), "seed": index + seed,
                     "temperature": temperature})  # fmt: skip
    return rows


def _state(kind, rows, *, is_guided=False, **settings):
    """The state before the first step; None is an idle slot."""
    tokens_BL = np.full((len(rows), POSITIONS), toy.PAD, np.int32)
    length_B = np.zeros(len(rows), np.int32)
    samples, seeds = [], []
    for slot, row in enumerate(rows):
        row = dict(row) if row else {"tokens": [], "steps": 1, "seed": 0}
        tokens = row.pop("tokens")
        tokens_BL[slot, : len(tokens)], length_B[slot] = tokens, len(tokens)
        seeds.append(row.pop("seed"))
        samples.append(SamplingParams(**settings | row))
    model = _network(kind)[0]
    facts = ModelFacts(
        vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,), has_cache=True,
        is_causal=kind == "causal", block_length=model.block_length,
    )  # fmt: skip
    row_params = dataclasses.replace(
        RowParams.pack(samples, facts),
        seed_B=jnp.array(seeds, jnp.uint32),
        stops_at_eos_B=jnp.zeros(len(seeds), bool),
    )
    state = start(
        jnp.asarray(tokens_BL), jnp.asarray(length_B), row_params,
        BUILT_IN.pack(samples, facts), mask_id=toy.MASK,
    )  # fmt: skip
    program = canvases.program(model, is_guided=is_guided)
    return with_cache(program, _network(kind)[1], state)


def _run(kind, rows, *, is_guided=False, **settings):
    state = _state(kind, rows, is_guided=is_guided, **settings)
    state = _advance(kind, is_guided=is_guided)(_network(kind)[1], state, FOREVER)
    return canvases.results(state), state.counters


def _without(settings):
    return settings | {"cache": "none", "cache_refresh": 0}


def _same_up_to_rounding(ours, theirs, *, forwards=True):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.committed, a.steps, a.status) == (
            b.tokens, b.committed, b.steps, b.status
        )  # fmt: skip
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
        if forwards:
            assert a.forwards == b.forwards


@pytest.mark.parametrize("case", _some("block_causal-exact", "causal-exact"))
def test_an_exact_cache_gives_the_rows_that_none_gives(case):
    kind, settings = case.split("-")[0], CASES[case]
    for seed in range(2):
        ours, counters = _run(kind, _rows(seed), **settings)
        theirs, _ = _run(kind, _rows(seed), **_without(settings))
        _same_up_to_rounding(ours, theirs, forwards=False)
        plain = sum(result.forwards * len(result.tokens) for result in theirs)
        assert np.asarray(counters.positions).sum() < 0.5 * plain


@pytest.mark.parametrize("block_length", [UNIT, UNIT // 2])
def test_an_exact_cache_is_exact_in_parts_of_blocks_and_behind_blocks_without_holes(block_length):
    rng = np.random.default_rng(0)
    rows = []
    for index in range(ROWS):
        tokens = rng.integers(0, toy.MASK, POSITIONS)
        tokens[UNIT : 2 * UNIT] = tokens[3 * UNIT + index % 3 :] = toy.MASK
        rows.append({"tokens": tokens.tolist(), "steps": POSITIONS, "seed": index,
                     "temperature": (0.0, 1.0)[index % 2]})  # fmt: skip
    settings = CASES["block_causal-exact"] | {"block_length": block_length}
    ours, _ = _run("block_causal", rows, **settings)
    theirs, _ = _run("block_causal", rows, **_without(settings))
    _same_up_to_rounding(ours, theirs, forwards=False)


@pytest.mark.parametrize("case", _some(*[case for case in CASES if "exact" not in case]))
def test_an_approximate_cache_refreshed_at_every_step_gives_the_rows_that_none_gives(case):
    settings = CASES[case] | {"cache_refresh": 1}
    ours, _ = _run("bidirectional", _rows(), **settings)
    theirs, _ = _run("bidirectional", _rows(), **_without(settings))
    _same_up_to_rounding(ours, theirs)


def test_a_plan_is_due_at_a_new_block_and_at_every_refresh():
    begins, refreshes = (0, 4, POSITIONS - 2), (0, 1, 3)
    cases = list(itertools.product(begins, refreshes))
    begin, refresh = (jnp.array(column) for column in zip(*cases, strict=True))
    rule, none = Dual(refresh, block_length=4), jnp.zeros_like(begin)
    age = [None] * len(cases)
    for step in [*range(7), *range(2)]:  # of two blocks
        block = CurrentBlock(
            begin_B=begin, end_B=begin + 4, step_B=none + step, steps_B=none + 7,
            first_holes_B=none + 4, index_B=none, count_B=none + 2, settled_B=none,
        )  # fmt: skip
        begin_B, end_B, _ = rule.read(block, begin, POSITIONS)
        is_due_B, is_finished_B = rule.refresh(block, begin_B, none)
        assert is_finished_B is None
        for row, (first, every) in enumerate(cases):
            # A whole pass is needed at first, in another block, and `every` steps after the last.
            is_due = step == 0 or (every > 0 and age[row] == every)
            age[row] = 1 if is_due else age[row] + 1
            assert bool(is_due_B[row]) == is_due
            assert int(begin_B[row]) == first
            assert int(end_B[row]) == min(first + 4, POSITIONS)


@pytest.mark.parametrize("case", _some(*CASES))
def test_no_row_feels_the_others_the_batch_or_its_place(case):
    """Bit for bit; rows begin, change blocks, are refreshed and end at different times."""
    kind, settings = case.split("-")[0], CASES[case]
    rows = _rows(3)
    if "exact" not in case:
        for place, row in enumerate(rows):
            row["cache_refresh"] = (0, 2, 3, 1)[place % 4]
    together, _ = _run(kind, rows, **settings)
    order = np.random.default_rng(0).permutation(ROWS)
    assert _run(kind, [rows[i] for i in order], **settings)[0] == [together[i] for i in order]
    strangers = _rows(9)
    for place in (0, 5):
        crowd = [*strangers[:place], rows[place], *strangers[place + 1 :]]
        assert _run(kind, crowd, **settings)[0][place] == together[place]
        alone = [rows[place] if slot == 3 else None for slot in range(ROWS)]
        assert _run(kind, alone, **settings)[0][3] == together[place]


@pytest.mark.parametrize("case", _some(*CASES))
def test_nothing_a_row_may_change_compiles_again(case):
    kind, settings = case.split("-")[0], CASES[case]
    advance = _advance(kind)
    _run(kind, _rows(), **settings)
    before = len(advance.compiled), advance._jitted._cache_size()
    rows = _rows(5)
    for row in rows:
        row["cache_refresh"] = 3
    _run(kind, rows, **settings)
    _run(kind, [*_rows(2)[:2], *[None] * (ROWS - 2)], **settings)
    assert (len(advance.compiled), advance._jitted._cache_size()) == before


@pytest.mark.slow
def test_forwards_and_positions_are_those_of_the_formulas():
    """A row of 5 given tokens and 11 holes, one token a step."""
    rows = [{"tokens": [1, 2, 3, 4, 5, *[toy.MASK] * 11], "steps": 12, "seed": 0}]
    rows += [None] * (ROWS - 1)
    result, counters = _run("block_causal", rows, **CASES["block_causal-exact"])
    # The prompt's block is settled, as are two finished ones; each step computes its block.
    assert result[0].forwards == 11 + 3 == int(counters.forwards[0])
    assert int(counters.positions[0]) == 4 * (11 + 3)
    result, counters = _run("bidirectional", rows, **CASES["bidirectional-dual"])
    # Blocks begin at 5, 9 and 13, the last of three; each begins with a whole forward.
    assert result[0].forwards == 11
    assert int(counters.positions[0]) == 3 * 16 + 4 * (3 + 3) + 3 * 2
    result, counters = _run("causal", rows, **CASES["causal-exact"])
    assert result[0].forwards == 11
    assert int(counters.positions[0]) == 5 + 11
    result, counters = _run("causal", rows, **_without(CASES["causal-exact"]))
    assert (result[0].forwards, int(counters.positions[0])) == (11, 0)


@pytest.mark.slow
def test_guidance_keeps_the_row_and_the_row_without_what_was_given():
    rows = _rows(4)
    for place, row in enumerate(rows):
        row["guidance"] = (0.0, 1.5)[place % 2]
    for kind, case, more in (
        ("block_causal", "block_causal-exact", {}),
        ("bidirectional", "bidirectional-dual", {"cache_refresh": 1}),
    ):
        settings = CASES[case] | more
        ours, _ = _run(kind, rows, is_guided=True, **settings)
        theirs, _ = _run(kind, rows, is_guided=True, **_without(settings))
        _same_up_to_rounding(ours, theirs, forwards=False)


def test_a_step_reads_out_no_more_places_than_its_windows_hold():
    chunk = 20
    for case, places in (("causal-exact", ROWS), ("block_causal-exact", chunk)):
        kind = case.split("-")[0]
        network, params = _network(kind)
        program = dataclasses.replace(canvases.program(network), chunk=chunk)
        state = _state(kind, _rows(), chain=("temperature",), **CASES[case])
        advance = Advance(program)
        text = advance._jitted.lower(params, state, jnp.int32(3), jnp.int32(9)).as_text()
        assert f"tensor<{places}x{toy.VOCAB_SIZE}xf32>" in text
        assert places == chunk or f"tensor<{chunk}x{toy.VOCAB_SIZE}xf32>" not in text


@pytest.mark.slow
@pytest.mark.parametrize("case", ["block_causal-exact", "causal-exact", "bidirectional-dual"])
def test_layers_that_are_kept_together_give_the_rows_of_layers_apart(case, monkeypatch):
    """As on accelerators, where the layers run in one loop."""
    kind, settings = case.split("-")[0], CASES[case]
    ours, _ = _run(kind, _rows(), **settings)
    monkeypatch.setattr(ops, "_LONGEST_UNROLLED_CACHE", 0)
    state = _state(kind, _rows(), **settings)
    assert [
        leaf.shape[:2] + leaf.shape[3:4] for leaf in jax.tree.leaves(state.cache.kv_cache)
    ] == 2 * [(ROWS, toy.config().depth, POSITIONS)]
    state = Advance(canvases.program(_network(kind)[0]))(_network(kind)[1], state, FOREVER)
    _same_up_to_rounding(canvases.results(state), ours)


@pytest.mark.slow
def test_no_device_gathers_all_layers_of_a_matrix_that_is_split(monkeypatch):
    """As without a cache: layers are gathered one by one, in a loop, as on accelerators."""
    monkeypatch.setattr(ops, "_LONGEST_UNROLLED_CACHE", 0)
    network, params = _network("bidirectional")
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    state = _state("bidirectional", _rows(), **CASES["bidirectional-dual"])
    state = jax.device_put(state, split)
    params = jax.device_put(params, shardings(params, axes_of(network), mesh))
    whole = {leaf.shape for leaf in jax.tree.leaves(params["blocks"]) if leaf.ndim > 2}
    advance = Advance(canvases.program(network, rows=split))
    compiled = advance._jitted.lower(params, state, jnp.int32(0), jnp.int32(9)).compile()
    found = [
        f"{x.kind} {x.type}"
        for x in layout.operations(compiled.as_text())
        for _, dims, _ in layout.shapes(x)
        if dims in whole
    ]
    assert not found, found
