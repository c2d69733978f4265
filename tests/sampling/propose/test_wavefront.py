"""The compiled wavefront fill against the one that plays it wave by wave."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import wavefront as oracle

from dlm_jax.sampling.positions import TrunkOutput
from dlm_jax.sampling.propose import FillInput, FillOutput, SamplerReadout, Wavefront
from dlm_jax.sampling.transforms import Context, Temperature, chain
from dlm_jax.sampling.vocab import draw
from dlm_jax.types import Network

ROWS, POSITIONS, WIDTH, V = 8, 24, 8, toy.VOCAB_SIZE
BANNED = toy.BANNED
GREEDY = 0.0
CLEAR = 1e-5
"""What float32 can tell apart: a lead below this decides nothing."""
SLOW = pytest.mark.slow
PROGRAMS = [(1, 3), (2, 64), *(pytest.param(*p, marks=SLOW) for p in [(1, 1000), (2, 1)])]
"""Reach of the head and chunk of each program: 4 s to compile, so two of them for `-m slow`."""
CALLS: list[str] = []
"""Which readouts ran in the latest fill."""


def _random_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (V, WIDTH), "head": (WIDTH, V), "out": (24, V)}
    shapes |= {f"in{reach}": ((2 * reach + 1) * WIDTH, 24) for reach in (1, 2)}
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


PARAMS = _random_params()


def _sampler_head(params, left_NCD, hidden_ND, right_NCD, *, np=jnp):
    """A small head, for one position as for many; `np` is who computes."""
    reach, lead = left_NCD.shape[-2], hidden_ND.shape[:-1]
    sides = [x.reshape(*lead, reach * WIDTH) for x in (left_NCD, right_NCD)]
    inputs = np.concatenate([sides[0], hidden_ND, sides[1]], axis=-1)
    return np.tanh(0.3 * (inputs @ params[f"in{reach}"])) @ params["out"]


def _head(params, hidden_ND):
    return hidden_ND @ params["head"]


@functools.cache
def _network(reach: int) -> Network:
    """Hidden vectors are given to the fill, without a trunk; `CALLS` learns of each readout."""

    def counted(name, head):
        def readout(*args):
            jax.debug.callback(lambda: CALLS.append(name))
            return head(*args)

        return readout

    return Network(
        init=lambda key: {},
        trunk=lambda params, tokens_BL, length_B, cache: (params["hidden"], cache),
        embed=lambda params, ids: params["embed"][ids],
        readout=counted("head", _head),
        vocab_size=V,
        heads={"sampler": SamplerReadout(counted("sampler", _sampler_head), reach)},
    )


class Canvas(NamedTuple):
    """One batch to fill, in NumPy: what is there, and then how each row is filled."""

    tokens_BL: Any
    is_open_BL: Any
    is_visible_BL: Any
    hidden_BLD: Any
    bare_BLD: Any
    guidance_B: Any
    own_BL: Any
    seed_B: Any
    chain_temperature_B: Any
    ratio_B: Any
    is_alternating_B: Any
    temperature_B: Any
    is_one_sided_B: Any


def _pictured(pictures: list[str], seed: int = 0, **changes) -> Canvas:
    """Rows from one letter per position: `v` visible, `o` open, `x` neither; PAD behind.

    An `r` is open and holds a token that `is_visible` calls visible, as when resampling.
    """
    rng = np.random.default_rng(seed)
    letters = np.array([list(picture.ljust(POSITIONS, "-")) for picture in pictures])
    num_rows = len(pictures)
    text = rng.integers(0, toy.MASK, letters.shape)
    tokens = np.select([letters == "-", np.isin(letters, ["o", "x"])], [toy.PAD, toy.MASK], text)
    every = {
        "tokens_BL": tokens.astype(np.int32),
        "is_open_BL": np.isin(letters, ["o", "r"]),
        "is_visible_BL": np.isin(letters, ["v", "r"]),
        "hidden_BLD": rng.standard_normal((*letters.shape, WIDTH)).astype(np.float32),
        "bare_BLD": rng.standard_normal((*letters.shape, WIDTH)).astype(np.float32),
        "guidance_B": np.zeros(num_rows),
        "own_BL": np.full(letters.shape, -1, np.int32),
        "seed_B": rng.integers(2**32, size=num_rows, dtype=np.uint32),
        "chain_temperature_B": np.full(num_rows, GREEDY),
        "ratio_B": np.full(num_rows, 0.01),
        "is_alternating_B": np.zeros(num_rows, bool),
        "temperature_B": np.ones(num_rows),
        "is_one_sided_B": np.zeros(num_rows, bool),
    }
    return Canvas(**every | changes)


def _random_picture(rng: np.random.Generator, kind: int) -> str:
    length = int(rng.integers(1, POSITIONS + 1))

    def mixed(size: int, **weights: float) -> str:
        return "".join(rng.choice(list(weights), size, p=list(weights.values())))

    def single() -> str:
        place = int(rng.integers(POSITIONS))
        return "v" * place + "o" + "v" * (POSITIONS - place - 1)

    return [
        lambda: "o" * length,
        single,
        lambda: ("ov", "vo", "oov", "ox", "oxv")[rng.integers(5)] * (length // 3),
        lambda: mixed(length, v=0.15, o=0.85),
        lambda: mixed(length, x=0.2, o=0.8),
        lambda: mixed(POSITIONS, v=0.1, o=0.6, x=0.15, r=0.15),
        lambda: mixed(length, v=0.4, o=0.6),
        lambda: "v" + "o" * (length - 1),
        lambda: "r" * length,
        lambda: "x" * int(rng.integers(4)) + "o" * int(rng.integers(9)) + "x" + "ovxo" * 3,
        lambda: ("", "v" * length, "x" * length)[rng.integers(3)],
    ][kind % 11]()


def _random_canvas(seed: int, chain_temperature: float = GREEDY) -> Canvas:
    """Rows of every kind, each with settings of its own."""
    rng = np.random.default_rng(seed)
    pictures = [_random_picture(rng, seed * ROWS + row) for row in range(ROWS)]
    return _pictured(
        pictures,
        seed,
        chain_temperature_B=np.full(ROWS, chain_temperature),
        ratio_B=rng.choice([0.01, 0.3, 1.0], ROWS),
        is_alternating_B=rng.random(ROWS) < 0.5,
        temperature_B=rng.choice([1.0, 0.6, 1.7], ROWS),
        guidance_B=rng.choice([0.0, 0.0, 0.5], ROWS),
        is_one_sided_B=rng.random(ROWS) < 0.4,
    )


def _measure(logits_NV, logprob_N):
    return logits_NV.max(-1) + 2 * logprob_N


@functools.partial(jax.jit, static_argnames=("network", "chunk"))
def _program(network, params, canvas: Canvas, *, chunk: int) -> FillOutput:
    return _propose(network, params, canvas, canvas.own_BL, chunk=chunk)


def _propose(network, params, canvas: Canvas, own_BL, *, chunk: int) -> FillOutput:
    length_B = jnp.sum(canvas.tokens_BL != toy.PAD, axis=1)
    order_BL = jnp.full(canvas.tokens_BL.shape, -1)
    bans, _ = canvases.make_chain([1.0] * ROWS).transforms
    full = chain(bans, Temperature(canvas.chain_temperature_B))
    context = Context(canvas.tokens_BL, order_BL, canvas.is_visible_BL, length_B)
    fill = Wavefront(
        ratio_B=canvas.ratio_B,
        is_alternating_B=canvas.is_alternating_B,
        temperature_B=canvas.temperature_B,
        is_one_sided_B=canvas.is_one_sided_B,
    )
    return fill.propose(
        FillInput(
            network=network,
            params=params,
            output=TrunkOutput(canvas.hidden_BLD, canvas.bare_BLD, canvas.guidance_B),
            chunk=chunk,
            tokens_BL=canvas.tokens_BL,
            length_B=length_B,
            is_open_BL=canvas.is_open_BL,
            is_seen_BL=canvas.is_visible_BL,
            own_BL=own_BL,
            chain=full,
            chain_state=full.init(context),
            key_B=jax.vmap(jax.random.key)(canvas.seed_B),
            rule=types.SimpleNamespace(
                score=lambda state, logits_NV, drawn: (_measure(logits_NV, drawn.logprob_N), ())
            ),
            banned_ids=BANNED,
        )
    )


def _on_device(tree):
    def put(x):
        return jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)

    return jax.tree.map(put, tree)


def _fill(canvas: Canvas, *, reach: int = 1, chunk: int = 3) -> FillOutput:
    CALLS.clear()
    filled = _program(_network(reach), _on_device(PARAMS), _on_device(canvas), chunk=chunk)
    jax.effects_barrier()
    return jax.tree.map(np.asarray, filled)


@jax.jit
def _draw_one(seed, index, logits_V):
    key = jax.random.fold_in(jax.random.key(seed), index)
    return draw(logits_V[None], key[None])[0]


def _expected(canvas: Canvas, row: int, *, reach: int = 1) -> tuple[oracle.Filled, float]:
    """The row as the oracle fills it, and the smallest lead of a choice it made."""
    params = {name: value.astype(np.float64) for name, value in PARAMS.items()}
    leads = [np.inf]

    def guided(head):
        """From a position's two hidden vectors, with the canvas and without what was given."""

        def logits(both_D):
            with_D, bare_D = np.split(both_D, 2)
            bare_V = head(bare_D)
            return bare_V + (canvas.guidance_B[row] + 1) * (head(with_D) - bare_V)

        return logits

    def take(index, logits_V):
        allowed_V = np.where(np.isin(np.arange(V), BANNED), -np.inf, logits_V)
        temperature = canvas.chain_temperature_B[row]
        if temperature == GREEDY:
            second, best = np.sort(allowed_V)[-2:]
            leads.append(best - second)
            return int(allowed_V.argmax())
        cooled_V = jnp.asarray(allowed_V / temperature, jnp.float32)
        return int(_draw_one(jnp.uint32(canvas.seed_B[row]), jnp.int32(index), cooled_V))

    done = oracle.fill(
        canvas.tokens_BL[row],
        canvas.is_open_BL[row],
        canvas.is_visible_BL[row],
        np.concatenate([canvas.hidden_BLD[row], canvas.bare_BLD[row]], axis=-1, dtype=np.float64),
        embed_VD=params["embed"],
        head=guided(lambda hidden_D: _head(params, hidden_D)),
        sampler_head=lambda left_CD, both_D, right_CD: guided(
            lambda hidden_D: _sampler_head(params, left_CD, hidden_D, right_CD, np=np)
        )(both_D),
        draw=take,
        measure=_measure,
        rule=oracle.Rule(
            ratio=canvas.ratio_B[row],
            is_alternating=canvas.is_alternating_B[row],
            is_one_sided=canvas.is_one_sided_B[row],
            temperature=canvas.temperature_B[row],
            banned=BANNED,
            context=reach,
        ),
    )
    return done, min(done.gap, *leads)


def _assert_row_is(ours: FillOutput, row: int, canvas: Canvas, done: oracle.Filled) -> None:
    is_open_L = canvas.is_open_BL[row]
    want_L = np.where(is_open_L, done.canvas, 0)
    np.testing.assert_array_equal(ours.proposal.tokens_BL[row], want_L)
    assert (ours.counts["waves"][row], ours.counts["bootstrapped"][row]) == (
        done.num_waves,
        len(done.seeds),
    )
    for mine_BL, theirs in [
        (ours.proposal.logprob_BL, done.logprob),
        (ours.proposal.confidence_BL, done.confidence),
    ]:
        want_L = [theirs.get(i, 0.0) for i in range(POSITIONS)]
        np.testing.assert_allclose(mine_BL[row], want_L, rtol=1e-5, atol=1e-5)
    assert not ours.proposal.final_logprob_BL[row].any(), "nothing in the chain reads it"


def _assert_as_the_oracle(canvas: Canvas, ours: FillOutput, *, reach: int = 1) -> int:
    """How many rows were compared: all whose choices are clear in float32."""
    assert ours.is_finite_B.all()
    num_compared = 0
    for row in range(ROWS):
        done, lead = _expected(canvas, row, reach=reach)
        if lead > CLEAR:
            _assert_row_is(ours, row, canvas, done)
            num_compared += 1
    return num_compared


@pytest.mark.parametrize(("reach", "chunk"), PROGRAMS)
@pytest.mark.parametrize("chain_temperature", [GREEDY, 0.7])
def test_fill_is_that_of_the_oracle_whatever_the_chunk(reach, chunk, chain_temperature):
    seeds = range(11)  # eleven kinds of row, each in every place of the batch
    num_compared = 0
    for seed in seeds:
        canvas = _random_canvas(seed + 100 * reach, chain_temperature)
        ours = _fill(canvas, reach=reach, chunk=chunk)
        num_compared += _assert_as_the_oracle(canvas, ours, reach=reach)
    assert num_compared > 0.9 * ROWS * len(seeds)


def _assert_same_bits(ours: FillOutput, other: FillOutput) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, other)


def _same_rows(picture: str, seed: int = 0) -> Canvas:
    """Eight times the same row."""
    return jax.tree.map(lambda x: np.repeat(x[:1], ROWS, axis=0), _pictured([picture], seed))


def test_what_cannot_be_seen_may_hold_any_token():
    canvas = _random_canvas(61, 0.7)
    is_seen_BL = canvas.is_visible_BL & ~canvas.is_open_BL
    noise_BL = np.random.default_rng(0).integers(0, V, is_seen_BL.shape)
    live_noise_BL = np.where(canvas.tokens_BL == toy.PAD, toy.PAD, noise_BL % toy.MASK)
    other = canvas._replace(
        tokens_BL=np.where(is_seen_BL, canvas.tokens_BL, live_noise_BL).astype(np.int32),
        is_visible_BL=is_seen_BL,
        hidden_BLD=np.where(canvas.is_open_BL[..., None], canvas.hidden_BLD, np.nan),
    )
    _assert_same_bits(_fill(other), _fill(canvas))


def test_equally_sure_positions_are_seeds_from_the_left():
    canvas = _pictured(["o" * 20, "oooxooooxoxx"] * 4)
    ratio_B = np.repeat([0.3, 0.01, 0.5, 1.0], 2)
    canvas = canvas._replace(ratio_B=ratio_B, hidden_BLD=np.zeros_like(canvas.hidden_BLD))
    ours = _fill(canvas)
    for row in range(ROWS):
        _assert_row_is(ours, row, canvas, _expected(canvas, row)[0])


@pytest.mark.parametrize(
    ("picture", "changes", "heads", "samplers"),
    [
        ("vvxx", {}, 0, 0),
        ("vov", {}, 0, 3),  # 8 holes in chunks of 3
        ("vooo", {}, 0, 3 * 3),
        ("voooov", {}, 0, 2 * 6),  # 16 holes in each of two waves
        ("voooov", {"is_alternating_B": np.arange(ROWS) >= 0}, 0, 2 * 2 * 3),
        ("voooov", {"is_alternating_B": np.arange(ROWS) < 4}, 0, 2 * (4 + 2)),
        ("oooo", {"ratio_B": np.ones(ROWS)}, 11, 0),
        ("ooxx", {}, 6, 3),
    ],
)
def test_readouts_follow_the_open_positions(picture, changes, heads, samplers):
    """Law 9: a wave of all rows shares its chunks; the main head reads what nothing reaches."""
    _fill(_same_rows(picture)._replace(**changes))
    assert (CALLS.count("head"), CALLS.count("sampler")) == (heads, samplers)
