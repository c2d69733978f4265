"""The forward of a step: of the whole canvas, or of what a cache rule has computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.cache.groups import after, cut, in_groups
from dlm_jax.sampling.cache.protocol import CacheContext, CachePlan, CacheState
from dlm_jax.sampling.output import TrunkOutput
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.state import State
from dlm_jax.types import CachedTrunk, Params, Window, live_positions


class Pass(NamedTuple):
    """What the forward of a step found, and what it cost.

    Attributes:
      output: what the trunk returned.
      cache: what is kept after it; None without a cache.
      forwards_B: int32, forwards of the trunk that the row asked for.
      positions_B: int32, live positions that those computed; 0 without a cache.
    """

    output: TrunkOutput
    cache: CacheState | None
    forwards_B: jax.Array
    positions_B: jax.Array


class Ready(NamedTuple):
    """Parameters that `CachedTrunk.ready` has laid out before the call that reads them."""

    params: Params


class _Inputs(NamedTuple):
    """What the passes of a step read of the rows; every leaf has them first."""

    tokens_BL: jax.Array
    length_B: jax.Array
    plan: CachePlan
    place_B: jax.Array
    is_due_B: jax.Array
    settles_B: jax.Array
    size_B: jax.Array


_Carried = tuple[Any, jax.Array]  # what is kept, and the hidden vectors of the windows


def with_cache(program: Program, params: Params, state: State) -> State:
    """The state with room for what its cache rule keeps; as it is without one, or with that room.

    ``2 depth L G K`` numbers a row for the Transformer of this package, and as many again in a
    program with guidance.
    """
    if state.cache is None or jax.tree.leaves(state.cache.kept):
        return state
    rows, positions = state.canvas.tokens_BL.shape
    init = _pieces(program).init
    kept = init(params, rows, positions)
    bare = init(params, rows, positions) if program.is_guided else None
    return state._replace(cache=state.cache._replace(kept=kept, bare=bare))


def ready(program: Program, params: Params | Ready, state: State) -> Params:
    """The parameters as the steps of a state read them: once for all, before the first."""
    if isinstance(params, Ready):
        return params.params
    if state.cache is None or (lay_out := _pieces(program).ready) is None:
        return params
    return lay_out(params)


def forward(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The forward, and the one without what was given if a running row is guided."""
    if state.rules.cache is not None:
        return _beside_kept(program, params, state, is_open_BL)
    canvas = state.canvas
    hidden_BLD, _ = program.network.trunk(params, canvas.tokens_BL, canvas.length_B, None)
    ones_B = jnp.ones_like(canvas.length_B)
    if not program.is_guided:
        return Pass(TrunkOutput(hidden_BLD), None, ones_B, jnp.zeros_like(ones_B))
    bare_BL = _bare(program, state)
    bare_BLD = jax.lax.cond(
        _any_guided(state),
        lambda: program.network.trunk(params, bare_BL, canvas.length_B, None)[0],
        lambda: jnp.zeros_like(hidden_BLD),
    )
    forwards_B = ones_B + (state.row.guidance_B != 0)
    output = TrunkOutput(hidden_BLD, bare_BLD, state.row.guidance_B)
    return Pass(output, None, forwards_B, jnp.zeros_like(ones_B))


def _bare(program: Program, state: State) -> jax.Array:
    """The canvas with its given tokens masked."""
    canvas = state.canvas
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    return jnp.where(is_given_BL, program.mask_id, canvas.tokens_BL)


def _any_guided(state: State) -> jax.Array:
    return jnp.any((state.row.guidance_B != 0) & state.is_running_B)


def _pieces(program: Program) -> CachedTrunk:
    cached = program.network.cached
    assert cached is not None, "the request was checked"
    return cached


def _beside_kept(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The forward of each row's window beside what is kept, or of the whole row where it is due."""
    rule, cache = state.rules.cache, state.cache
    assert rule is not None and cache is not None
    num_positions = is_open_BL.shape[1]
    first_B = jnp.where(
        jnp.any(is_open_BL, axis=1), jnp.argmax(is_open_BL, axis=1), state.block.begin_B
    )
    first_B = jnp.minimum(first_B, num_positions - 1).astype(jnp.int32)
    context = CacheContext(
        state.block, first_B, cache.valid_B, cache.age_B, cache.block_B, num_positions
    )
    plan, sizes = rule.plan(context), rule.sizes(num_positions)
    runs_B = state.is_running_B
    inputs = _Inputs(
        state.canvas.tokens_BL,
        state.canvas.length_B,
        plan,
        jnp.minimum(plan.begin_B, num_positions - sizes[0]).astype(jnp.int32),
        plan.is_due_B & runs_B,
        plan.settles_B & runs_B,
        _smallest(sizes, state, plan, runs_B),
    )
    run = _Windows(program, state, sizes)
    kept, hidden_BWD = run(params, cache.kept, inputs)
    output = TrunkOutput(hidden_BWD, at_BL=_places(inputs.place_B, sizes[0], num_positions))
    bare = cache.bare
    if program.is_guided:
        guided_B = state.row.guidance_B != 0
        inputs = inputs._replace(
            tokens_BL=_bare(program, state),
            is_due_B=inputs.is_due_B & guided_B,
            settles_B=inputs.settles_B & guided_B,
            size_B=jnp.where(guided_B, inputs.size_B, -1),
        )
        bare, bare_BWD = run(params, cache.bare, inputs)
        output = output._replace(bare_BLD=bare_BWD, scale_B=state.row.guidance_B)
    cache = CacheState(
        kept,
        bare,
        jnp.where(runs_B, plan.valid_B, cache.valid_B).astype(jnp.int32),
        jnp.where(runs_B, jnp.where(plan.is_due_B, 1, cache.age_B + 1), cache.age_B),
        jnp.where(runs_B & plan.is_due_B, state.block.index_B, cache.block_B),
    )
    return _counted(program, state, plan, output, cache, settled=sizes[0])


def _smallest(
    sizes: tuple[int, ...], state: State, plan: CachePlan, runs_B: jax.Array
) -> jax.Array:
    """Number of the smallest size that holds each row's window; -1: the row needs none."""
    need_B = jnp.minimum(plan.end_B, state.canvas.length_B) - plan.begin_B
    number_B = jnp.sum(need_B[:, None] > jnp.array(sizes[:-1], jnp.int32)[None], axis=1)
    return jnp.where(runs_B & ~plan.is_due_B, number_B, -1).astype(jnp.int32)


def _places(place_B: jax.Array, width: int, num_positions: int) -> jax.Array:
    """Where the hidden vector of each position stands in the window of its row, ``[B, L]``."""
    offset_BL = jnp.arange(num_positions)[None] - place_B[:, None]
    return jnp.clip(offset_BL, 0, width - 1)


def _counted(
    program: Program, state: State, plan: CachePlan, output: TrunkOutput, cache: CacheState,
    *, settled: int,
) -> Pass:  # fmt: skip
    length_B = state.canvas.length_B
    times_B = jnp.ones_like(length_B)
    if program.is_guided:
        times_B += state.row.guidance_B != 0
    window_B = jnp.maximum(jnp.minimum(plan.end_B, length_B) - plan.begin_B, 0)
    settled_B = plan.settles_B * jnp.minimum(plan.begin_B, settled)
    positions_B = jnp.where(plan.is_due_B, length_B, window_B + settled_B)
    forwards_B = 1 + plan.settles_B.astype(jnp.int32)
    return Pass(output, cache, forwards_B * times_B, positions_B * times_B)


class _Windows:
    """The passes of a step over one canvas: ``(params, kept, inputs) -> (kept, hidden_BWD)``."""

    def __init__(self, program: Program, state: State, sizes: tuple[int, ...]):
        assert state.rules.cache is not None
        self._program, self._rule, self._sizes = program, state.rules.cache, sizes
        self._pieces = _pieces(program)

    def __call__(self, params: Params, kept: Any, inputs: _Inputs) -> tuple[Any, jax.Array]:
        rows, width = inputs.length_B.shape[0], self._sizes[0]
        shape = jax.eval_shape(
            lambda: self._program.network.trunk(params, inputs.tokens_BL, inputs.length_B, None)[0]
        )
        hidden_BWD = jnp.zeros((rows, width, shape.shape[2]), shape.dtype)
        kept, hidden_BWD = self._in_groups(params, kept, hidden_BWD, inputs)
        if len(self._sizes) > 1:
            return kept, hidden_BWD
        return self._all_rows(params, kept, hidden_BWD, inputs)

    def _in_groups(
        self, params: Params, kept: Any, hidden_BWD: jax.Array, inputs: _Inputs
    ) -> tuple[Any, jax.Array]:
        """What runs for some rows: the whole canvas, finished blocks, windows of several sizes."""
        num_positions, width = inputs.tokens_BL.shape[1], self._sizes[0]
        by_rows = self._program.by_rows

        def whole(carry: _Carried, rows: _Inputs, row_N: jax.Array) -> tuple[Any, ...]:
            del carry, row_N
            hidden_NLD, piece = self._pieces.whole(params, rows.tokens_BL, rows.length_B)
            return piece, hidden_NLD, rows.place_B

        def put_whole(carry: _Carried, made: tuple[Any, ...], row_N: jax.Array) -> _Carried:
            (kept, hidden_BWD), (piece, hidden_NLD, place_N) = carry, made
            kept = self._pieces.store(kept, piece, row_N, jnp.zeros_like(place_N))
            return kept, hidden_BWD.at[row_N].set(cut(hidden_NLD, place_N, width))

        def settled(kept: Any, rows: _Inputs, row_N: jax.Array) -> tuple[Any, jax.Array]:
            first_N = jnp.maximum(rows.plan.begin_B - width, 0)
            window = Window(first_N, first_N, rows.plan.begin_B)
            hidden_NWD, piece = self._pieces.window(
                params, kept, row_N, rows.tokens_BL, rows.length_B, window, size=width
            )
            return piece, after(hidden_NWD, window.place_N)

        def put_settled(kept: Any, made: tuple[Any, jax.Array], row_N: jax.Array) -> Any:
            piece, place_N = made
            return self._pieces.store(kept, piece, row_N, place_N)

        kept, hidden_BWD = in_groups(
            by_rows, inputs.is_due_B, num_positions, whole, put_whole, (kept, hidden_BWD), inputs
        )
        if self._rule.settles:
            kept = in_groups(by_rows, inputs.settles_B, width, settled, put_settled, kept, inputs)
        if len(self._sizes) > 1:
            for number, size in enumerate(self._sizes):
                compute = self._of_size(params, kept, size, self._num_seen(number, num_positions))
                is_mine_B = inputs.size_B == number
                hidden_BWD = in_groups(
                    by_rows, is_mine_B, size, compute, self._put_cut, hidden_BWD, inputs
                )
        return kept, hidden_BWD

    def _put_cut(
        self, hidden_BWD: jax.Array, made: tuple[jax.Array, jax.Array], row_N: jax.Array
    ) -> jax.Array:
        return hidden_BWD.at[row_N].set(cut(*made, self._sizes[0]))

    def _num_seen(self, number: int, num_positions: int) -> int | None:
        """Kept positions that the windows of that size see the last of; None: any.

        A window that does not fit the size before begins further from the end of the canvas.
        """
        if self._rule.sees_behind or number == 0:
            return None
        return num_positions - self._sizes[number - 1]

    def _of_size(
        self, params: Params, kept: Any, size: int, num_seen: int | None
    ) -> Callable[[jax.Array, _Inputs, jax.Array], tuple[jax.Array, jax.Array]]:
        """The window of some rows whose smallest size it is, and where in it their block stands."""

        def one(
            hidden_BWD: jax.Array, rows: _Inputs, row_N: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            del hidden_BWD
            plan = rows.plan
            first_N = jnp.minimum(plan.begin_B, rows.tokens_BL.shape[1] - size)
            window = Window(first_N, plan.begin_B, plan.end_B)
            hidden_NSD, _ = self._pieces.window(
                params, kept, row_N, rows.tokens_BL, rows.length_B, window, size=size,
                num_seen=num_seen,
            )  # fmt: skip
            return hidden_NSD, rows.place_B - window.place_N

        return one

    def _all_rows(
        self, params: Params, kept: Any, hidden_BWD: jax.Array, inputs: _Inputs
    ) -> tuple[Any, jax.Array]:
        """The windows of all rows together; those of rows that were computed whole do not count."""
        plan = inputs.plan
        window = Window(inputs.place_B, plan.begin_B, plan.end_B)

        def compute() -> tuple[jax.Array, Any]:
            return self._pieces.window(
                params, kept, None, inputs.tokens_BL, inputs.length_B, window, size=self._sizes[0]
            )

        if self._rule.keeps:
            own_BWD, piece = compute()
            kept = self._pieces.store(kept, piece, None, after(own_BWD, inputs.place_B))
        else:
            is_any = jnp.any(inputs.size_B >= 0)
            own_BWD = jax.lax.cond(is_any, lambda: compute()[0], lambda: hidden_BWD)
        return kept, jnp.where(inputs.is_due_B[:, None, None], hidden_BWD, own_BWD)
