"""Rows for the tests of the sampling loop: one shape and one chain, so few programs compile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toy

from dlm_jax.sampling.commit import CommitRule, LowConfidence, RandomOrder
from dlm_jax.sampling.commit.orders import cosine_quota
from dlm_jax.sampling.edits import EditRule
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.program import TIES, Program, RowParams
from dlm_jax.sampling.propose import FillRule, Parallel
from dlm_jax.sampling.remask import RemaskRule, Renoise
from dlm_jax.sampling.rules import Rules
from dlm_jax.sampling.state import State
from dlm_jax.sampling.transforms import Chain, LogitBias, Temperature, chain
from dlm_jax.types import Network

ROWS, POSITIONS, CHUNK = 8, 24, 16
FOREVER = 1000

make_advance = functools.lru_cache(maxsize=64)(Advance)

LOW_CONFIDENCE = LowConfidence()
COSINE = LowConfidence(cosine_quota)
RANDOM = RandomOrder()


@dataclasses.dataclass(frozen=True)
class Row:
    """One request: its tokens with MASK at the holes, and its settings."""

    tokens: tuple[int, ...]
    steps: int = 4
    seed: int = 0
    temperature: float = 1.0
    block_length: int = 0
    guidance: float = 0.0
    stop_at_eos: bool = False
    is_draft: tuple[bool, ...] | None = None
    resample: bool = False
    capacity: int = 0
    max_new_tokens: int = 0
    ties: str = "key"


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything of one row that a caller can see, without PAD."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    committed: tuple[int, ...]
    steps: int
    forwards: int
    status: int


def holes(number: int, *prompt: int) -> tuple[int, ...]:
    """A prompt and `number` holes behind it."""
    return (*prompt, *(toy.MASK,) * number)


def mixed_rows(seed: int = 0, count: int = ROWS) -> list[Row]:
    """Rows that differ in everything: lengths, gaps, steps, temperatures and seeds.

    Each has a given token: holes that see nothing else are equally confident but for rounding.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(3, POSITIONS + 1))
        text = rng.integers(0, toy.MASK, length)
        is_hole = rng.random(length) < rng.uniform(0.3, 1.0)
        is_hole[[0, int(rng.integers(1, length))]] = False, True
        tokens = np.where(is_hole, toy.MASK, text)
        rows.append(
            Row(
                tokens=tuple(int(token) for token in tokens),
                steps=int(rng.integers(1, 12)),
                seed=int(rng.integers(2**32)),
                temperature=(0.0, 1.0, 0.6, 1.7)[index % 4],
            )
        )
    return rows


def make_chain(temperatures: Sequence[float], banned: Sequence[int] = toy.BANNED) -> Chain:
    """Bans and a temperature for each row."""
    ids = jnp.tile(jnp.array([banned], jnp.int32), (len(temperatures), 1))
    bans = LogitBias(ids, jnp.full(ids.shape, -jnp.inf))
    first_B = jnp.array(temperatures, jnp.float32)
    return chain(
        bans, Temperature(first_B, first_B, jnp.zeros_like(first_B), jnp.ones_like(first_B))
    )


def make_state(
    rows: Sequence[Row | None],
    rule: CommitRule = LOW_CONFIDENCE,
    *,
    positions: int = POSITIONS,
    banned: Sequence[int] = toy.BANNED,
    remask: RemaskRule | None = None,
    fill: FillRule | None = None,
    edit: EditRule | None = None,
    renoise: Renoise | None = None,
) -> State:
    """The state before the first step, one slot per row; None is an idle slot."""
    full = [row or Row(tokens=(), steps=1) for row in rows]
    tokens_BL = np.full((len(rows), positions), toy.PAD, np.int32)
    frozen_BL = np.ones((len(rows), positions), bool)
    for slot, row in enumerate(full):
        tokens_BL[slot, : len(row.tokens)] = row.tokens
        if row.is_draft is not None:
            frozen_BL[slot, : len(row.tokens)] = ~np.array(row.is_draft)
    row = RowParams(
        steps_B=jnp.array([row.steps for row in full], jnp.int32),
        seed_B=jnp.array([row.seed for row in full], jnp.uint32),
        block_length_B=jnp.array([row.block_length for row in full], jnp.int32),
        guidance_B=jnp.array([row.guidance for row in full], jnp.float32),
        stops_at_eos_B=jnp.array([row.stop_at_eos for row in full]),
        resamples_B=jnp.array([row.resample for row in full]),
        capacity_B=jnp.array([row.capacity for row in full], jnp.int32),
        max_new_B=jnp.array([row.max_new_tokens for row in full], jnp.int32),
        ties_B=jnp.asarray(TIES.column([row.ties for row in full])),
    )
    rules = Rules(
        chain=make_chain([row.temperature for row in full], banned),
        commit=rule,
        fill=fill or Parallel(),
        remask=remask,
        edit=edit,
        renoise=renoise,
    )
    length_B = jnp.array([len(row.tokens) for row in full], jnp.int32)
    return start(
        jnp.asarray(tokens_BL), length_B, row, rules, mask_id=toy.MASK,
        frozen_BL=jnp.asarray(frozen_BL),
    )  # fmt: skip


@functools.cache
def shared_network() -> Network:
    """The toy network, built once: the same functions are the same program."""
    return toy.network()


def program(
    network: Network | None = None, *, chunk: int = CHUNK, rows=None, is_guided: bool = False
) -> Program:
    """What is compiled in, around the shared network or another one."""
    network = network or shared_network()
    return Program(
        network=network,
        mask_id=toy.MASK,
        chunk=chunk,
        rows=rows,
        is_guided=is_guided,
        eos_ids=(toy.EOS,),
        banned_ids=toy.BANNED,
        pad_id=toy.PAD,
        space_id=toy.SPACE,
    )


def shared_advance() -> Advance:
    """The compiled loop that all tests share."""
    return make_advance(program())


def results(state: State) -> list[Result]:
    """The rows of a state, without the padding of their slots."""
    arrays = state.canvas.tokens_BL, state.logprob_BL, state.committed_BL
    tokens, logprobs, committed = map(np.asarray, arrays)
    return [
        Result(
            tokens=tuple(tokens[row, :length].tolist()),
            logprobs=tuple(logprobs[row, :length].tolist()),
            committed=tuple(committed[row, :length].tolist()),
            steps=int(state.step_B[row]),
            forwards=int(state.counters.forwards[row]),
            status=int(state.status_B[row]),
        )
        for row, length in enumerate(np.asarray(state.canvas.length_B).tolist())
    ]


def run(
    rows: Sequence[Row | None],
    rule: CommitRule = LOW_CONFIDENCE,
    *,
    advance: Advance | None = None,
    positions: int = POSITIONS,
    remask: RemaskRule | None = None,
) -> list[Result]:
    """The rows after as many steps as they want, in the shared program unless told otherwise."""
    advance = advance or shared_advance()
    state = make_state(rows, rule, positions=positions, remask=remask)
    state = advance(toy.params(), state, FOREVER)
    return results(jax.block_until_ready(state))


def assert_same_up_to_rounding(ours: Sequence[Result], theirs: Sequence[Result]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
        assert dataclasses.replace(a, logprobs=b.logprobs) == b


def run_on_eight_devices(state: State, params: Any, make_program: Callable[..., Program]) -> State:
    """The state at its end, its rows split over eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    forever = jax.device_put(np.int32(FOREVER), everywhere)
    params = jax.device_put(params, everywhere)
    advance = make_advance(make_program(rows=by_rows))
    return advance(params, jax.device_put(state, by_rows), forever, forever)
