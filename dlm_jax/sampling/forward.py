"""The forward pass of a step, over whole rows or over windows of rows with cached keys and values.

With a cache, forward passes process groups of a fixed number of rows. The result for a row
therefore does not depend on other rows or on their number. If rows are split over devices, a group
contains the same number of rows from each device, and all devices process it together. Layers with
sharded parameters are gathered one by one, as in any other forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule, CacheState
from dlm_jax.sampling.commit.commit_rule import attention_blocks
from dlm_jax.sampling.positions import TrunkOutput, group_size, hidden, place_of_largest, returned
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.state import State
from dlm_jax.types import CachedTrunk, Params, Window, live_positions

Carry = TypeVar("Carry")
Rows = TypeVar("Rows")

_HUGE = 3e38

_PREFILL = 32
"""Number of positions per chunk of a prompt on CPUs, where the cost follows the positions."""


Pass = tuple[TrunkOutput, CacheState | None, jax.Array, jax.Array]
"""(trunk output, cache, number of forward passes ``[B]``, number of live positions computed with a
cache ``[B]``)."""


class _Inputs(NamedTuple):
    """The per-row inputs of the forward passes of a step. The first axis of every leaf is the row
    axis.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    plan: CachePlan
    place_B: jax.Array
    is_due_B: jax.Array
    settles_B: jax.Array
    size_B: jax.Array


def with_cache(program: Program, params: Params, state: State) -> State:
    """Adds the cache and the self-conditioning signal to the state, if they are used.

    Existing arrays are unchanged. The Transformer in this package stores ``2 depth L G K`` numbers
    per row, or twice that number if the program has guidance.
    """
    state = _with_signal(program, params, state)
    if state.cache is None or jax.tree.leaves(state.cache.kept):
        return state
    rows, positions = state.canvas.tokens_BL.shape
    init = _pieces(program).init
    kept = init(params, rows, positions)
    bare = init(params, rows, positions) if program.is_guided else None
    return state._replace(cache=state.cache._replace(kept=kept, bare=bare))


def _with_signal(program: Program, params: Params, state: State) -> State:
    signal, shape = program.network.signal, state.canvas.tokens_BL.shape
    if signal is None or state.signal_BLD is not None:
        return state
    of_one = jax.ShapeDtypeStruct((1, program.network.vocab_size), jnp.float32)
    found = jax.eval_shape(signal, params, of_one)
    return state._replace(signal_BLD=jnp.zeros((*shape, found.shape[1]), found.dtype))


def ready(program: Program, params: Params, state: State) -> Params:
    """The parameters in the layout that the steps read. Call this once before the first step."""
    if state.cache is None or (lay_out := _pieces(program).ready) is None:
        return params
    return lay_out(params)


def forward(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The forward pass, plus the unconditional forward pass if a running row is guided."""
    if state.rules.cache is not None:
        return _beside_kept(program, params, state, is_open_BL)
    if program.network.behind is not None:
        return _behind(program, params, state)
    canvas = state.canvas
    attention_BLL = None
    if attention_blocks(state.rules.commit.needs):
        hidden_BLD, attention_BLL = _with_attention(program, params, state)
    else:
        hidden_BLD = hidden(program.network, params, canvas.tokens_BL, canvas.length_B)
    ones_B, none_B = jnp.ones_like(canvas.length_B), jnp.zeros_like(canvas.length_B)
    if not program.is_guided:
        return TrunkOutput(hidden_BLD, attention_BLL=attention_BLL), None, ones_B, none_B
    bare_BL = _bare(program, state)
    bare_BLD = jax.lax.cond(
        jnp.any((state.row.guidance_B != 0) & state.is_running_B),
        lambda: hidden(program.network, params, bare_BL, canvas.length_B),
        lambda: jnp.zeros_like(hidden_BLD),
    )
    forwards_B = ones_B + (state.row.guidance_B != 0)
    output = TrunkOutput(hidden_BLD, bare_BLD, state.row.guidance_B, attention_BLL=attention_BLL)
    return output, None, forwards_B, none_B


def _with_attention(program: Program, params: Params, state: State) -> tuple[jax.Array, jax.Array]:
    """The hidden vectors, and the attention from live positions that the commit rule reads."""
    canvas, inside = state.canvas, program.network.inside
    assert inside is not None, "the request was checked"
    found = inside(params, canvas.tokens_BL, canvas.length_B)
    maps_BEHLL = found.attention_BEHLL[:, -attention_blocks(state.rules.commit.needs) :]
    is_live_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    return found.final_BLD, jnp.where(is_live_BL[:, :, None], maps_BEHLL.mean(axis=(1, 2)), 0.0)


def _behind(program: Program, params: Params, state: State) -> Pass:
    """The forward pass of a network with canvases, in which no later tokens are visible."""
    network, canvas, block = program.network, state.canvas, state.block
    assert network.behind is not None, "the network has canvases"
    length_B = jnp.minimum(canvas.length_B, block.end_B)
    hidden_BLD = returned(
        network.behind(params, canvas.tokens_BL, length_B, block.begin_B, _signal_now(state)),
        network,
        "behind",
        "B, L, D",
        (*canvas.tokens_BL.shape, None),
        float,
    )
    none_B = jnp.zeros_like(length_B)
    return TrunkOutput(hidden_BLD), None, jnp.ones_like(length_B), none_B


def _signal_now(state: State) -> jax.Array | None:
    """The self-conditioning signal of the step; zeros in the first step of a block."""
    if state.signal_BLD is None:
        return None
    is_first_B11 = (state.block.step_B == 0)[:, None, None]
    return jnp.where(is_first_B11, jnp.zeros((), state.signal_BLD.dtype), state.signal_BLD)


def _bare(program: Program, state: State) -> jax.Array:
    """The canvas with the given tokens masked."""
    canvas = state.canvas
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    return jnp.where(is_given_BL, program.mask_id, canvas.tokens_BL)


def _pieces(program: Program) -> CachedTrunk:
    cached = program.network.cached
    assert cached is not None, "the request was checked"
    return cached


def _beside_kept(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The cached forward pass over each row's window, or over the whole row if a refresh is due."""
    rule, cache = state.rules.cache, state.cache
    assert rule is not None and cache is not None
    num_positions = is_open_BL.shape[1]
    first_B = jnp.where(
        jnp.any(is_open_BL, axis=1), place_of_largest(is_open_BL), state.block.begin_B
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
    is_canvas = _pieces(program).canvas is not None
    if is_canvas:
        kept, hidden_BWD = _canvases(program, params, state, inputs)
    else:
        kept, hidden_BWD = _windows(program, params, rule, sizes, cache.kept, inputs)
    offset_BL = jnp.arange(num_positions)[None] - inputs.place_B[:, None]
    output = TrunkOutput(hidden_BWD, at_BL=jnp.clip(offset_BL, 0, sizes[0] - 1))
    bare = cache.bare
    if program.is_guided:
        guided_B = state.row.guidance_B != 0
        inputs = inputs._replace(
            tokens_BL=_bare(program, state),
            is_due_B=inputs.is_due_B & guided_B,
            settles_B=inputs.settles_B & guided_B,
            size_B=jnp.where(guided_B, inputs.size_B, -1),
        )
        bare, bare_BWD = _windows(program, params, rule, sizes, cache.bare, inputs)
        output = output._replace(bare_BLD=bare_BWD, scale_B=state.row.guidance_B)
    cache = CacheState(
        kept,
        bare,
        jnp.where(runs_B, plan.valid_B, cache.valid_B).astype(jnp.int32),
        jnp.where(runs_B, jnp.where(plan.is_due_B, 1, cache.age_B + 1), cache.age_B),
        jnp.where(runs_B & plan.is_due_B, state.block.index_B, cache.block_B),
    )
    times_B = jnp.ones_like(state.canvas.length_B)
    if program.is_guided:
        times_B += state.row.guidance_B != 0
    # A canvas requires a forward pass in addition to that of the text.
    reads_B = plan.settles_B | plan.is_due_B if is_canvas else plan.settles_B
    num_B = _num_computed(state, plan, sizes[0], is_canvas=is_canvas, is_prefilled=_prefills(rule))
    return output, cache, (1 + reads_B.astype(jnp.int32)) * times_B, num_B * times_B


def _smallest(
    sizes: tuple[int, ...], state: State, plan: CachePlan, runs_B: jax.Array
) -> jax.Array:
    """Index of the smallest entry of `sizes` that the window of each row fits into; -1 if the row
    needs no window.
    """
    need_B = jnp.minimum(plan.end_B, state.canvas.length_B) - plan.begin_B
    number_B = jnp.sum(need_B[:, None] > jnp.array(sizes[:-1], jnp.int32)[None], axis=1)
    return jnp.where(runs_B & ~plan.is_due_B, number_B, -1).astype(jnp.int32)


def _num_computed(
    state: State, plan: CachePlan, settled: int, *, is_canvas: bool, is_prefilled: bool
) -> jax.Array:
    """Number of live positions per row that the step computes for one canvas."""
    length_B = state.canvas.length_B
    window_B = jnp.maximum(jnp.minimum(plan.end_B, length_B) - plan.begin_B, 0)
    settled_B = plan.settles_B * jnp.minimum(plan.begin_B, settled)
    whole_B = plan.begin_B if is_prefilled else length_B
    whole_B += window_B * (is_canvas or is_prefilled)
    return jnp.where(plan.is_due_B, whole_B, window_B + settled_B)


def _windows(
    program: Program,
    params: Params,
    rule: CacheRule,
    sizes: tuple[int, ...],
    kept: Any,
    inputs: _Inputs,
) -> tuple[Any, jax.Array]:
    """The cache after the forward passes of a step over one canvas, and the hidden vectors ``[B, W,
    D]``.
    """
    tokens_BL, length_B, width = inputs.tokens_BL, inputs.length_B, sizes[0]
    rows, num_positions = tokens_BL.shape
    shape = jax.eval_shape(lambda: hidden(program.network, params, tokens_BL, length_B))
    hidden_BWD = jnp.zeros((rows, width, shape.shape[2]), shape.dtype)
    if _prefills(rule):
        kept = _prefilled(program, params, kept, inputs)
        inputs = inputs._replace(is_due_B=jnp.zeros_like(inputs.is_due_B))
    else:
        kept, hidden_BWD = _refreshed(program, params, rule, kept, hidden_BWD, inputs)
    if len(sizes) == 1:
        return _all_rows(program, params, rule, kept, hidden_BWD, inputs)
    for number, size in enumerate(sizes):
        # A window that does not fit the previous size starts more than that size before the end of
        # the canvas, and only cached positions before the window are read.
        is_any = rule.sees_behind or number == 0
        num_seen = None if is_any else num_positions - sizes[number - 1]

        def compute(
            hidden_BWD: jax.Array,
            rows: _Inputs,
            row_N: jax.Array,
            size: int = size,
            num_seen: int | None = num_seen,
        ) -> tuple[jax.Array, jax.Array]:
            first_N = jnp.minimum(rows.plan.begin_B, num_positions - size)
            window = Window(first_N, rows.plan.begin_B, rows.plan.end_B)
            hidden_NSD, _ = _pieces(program).window(
                params,
                kept,
                row_N,
                rows.tokens_BL,
                rows.length_B,
                window,
                size=size,
                num_seen=num_seen,
            )
            return hidden_NSD, rows.place_B - window.place_N

        def put(
            hidden_BWD: jax.Array, made: tuple[jax.Array, jax.Array], row_N: jax.Array
        ) -> jax.Array:
            return hidden_BWD.at[row_N].set(cut(*made, width))

        is_mine_B = inputs.size_B == number
        with jax.named_scope(f"window_{size}"):
            hidden_BWD = in_groups(
                program.by_rows, is_mine_B, size, compute, put, hidden_BWD, inputs
            )
    return kept, hidden_BWD


def _canvases(
    program: Program, params: Params, state: State, inputs: _Inputs
) -> tuple[Any, jax.Array]:
    """The cache, updated with new text, and the hidden vectors ``[B, W, D]`` of the canvases."""
    pieces, plan, rule, cache = _pieces(program), inputs.plan, state.rules.cache, state.cache
    assert rule is not None and cache is not None and pieces.canvas is not None
    (width,) = rule.sizes(inputs.tokens_BL.shape[1])
    window = Window(inputs.place_B, plan.begin_B, plan.end_B)
    signal_BLD = _signal_now(state)
    signal_BWD = None if signal_BLD is None else cut(signal_BLD, inputs.place_B, width)
    rows = inputs.tokens_BL, inputs.length_B, window, signal_BWD

    def canvases(kept: Any) -> jax.Array:
        assert pieces.canvas is not None
        return pieces.canvas(params, kept, *rows, size=width)

    shape = jax.eval_shape(canvases, cache.kept)
    unread_BWD = jnp.zeros(shape.shape, shape.dtype)
    kept, _ = _refreshed(program, params, rule, cache.kept, unread_BWD, inputs)
    return kept, canvases(kept)


def _refreshed(
    program: Program,
    params: Params,
    rule: CacheRule,
    kept: Any,
    hidden_BWD: jax.Array,
    inputs: _Inputs,
) -> tuple[Any, jax.Array]:
    """The cache and hidden vectors after forward passes over whole rows and over newly finished
    blocks.
    """
    pieces, by_rows = _pieces(program), program.by_rows
    width, num_positions = hidden_BWD.shape[1], inputs.tokens_BL.shape[1]

    def whole(carry: Any, rows: _Inputs, row_N: jax.Array) -> tuple[Any, ...]:
        hidden_NLD, piece = pieces.whole(params, rows.tokens_BL, rows.length_B)
        return piece, hidden_NLD, rows.place_B

    def put_whole(carry: Any, made: tuple[Any, ...], row_N: jax.Array) -> tuple[Any, jax.Array]:
        (kept, hidden_BWD), (piece, hidden_NLD, place_N) = carry, made
        kept = pieces.store(kept, piece, row_N, jnp.zeros_like(place_N))
        return kept, hidden_BWD.at[row_N].set(cut(hidden_NLD, place_N, width))

    def settled(kept: Any, rows: _Inputs, row_N: jax.Array) -> tuple[Any, jax.Array]:
        first_N = jnp.maximum(rows.plan.begin_B - width, 0)
        window = Window(first_N, first_N, rows.plan.begin_B)
        hidden_NWD, piece = pieces.window(
            params, kept, row_N, rows.tokens_BL, rows.length_B, window, size=width
        )
        return piece, after(hidden_NWD, window.place_N)

    def put_settled(kept: Any, made: tuple[Any, jax.Array], row_N: jax.Array) -> Any:
        piece, place_N = made
        return pieces.store(kept, piece, row_N, place_N)

    carry = kept, hidden_BWD
    with jax.named_scope("refresh"):
        kept, hidden_BWD = in_groups(
            by_rows, inputs.is_due_B, num_positions, whole, put_whole, carry, inputs
        )
    if rule.settles:
        with jax.named_scope("settle"):
            kept = in_groups(by_rows, inputs.settles_B, width, settled, put_settled, kept, inputs)
    return kept, hidden_BWD


def _prefills(rule: CacheRule) -> bool:
    """Whether rows are prefilled up to their window instead of computed as a whole."""
    return rule.keeps and platform() == "cpu"


def _prefilled(program: Program, params: Params, kept: Any, inputs: _Inputs) -> Any:
    """The cache of a causal network after forward passes over the positions before the windows of
    the rows that are due, in chunks.
    """
    pieces, num_positions = _pieces(program), inputs.tokens_BL.shape[1]
    size = min(_PREFILL, num_positions)
    end_B = jnp.where(inputs.is_due_B, inputs.plan.begin_B, 0)

    def chunk(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        first, kept = state

        def compute(kept: Any, rows: _Inputs, row_N: jax.Array) -> tuple[Any, jax.Array]:
            place_N = jnp.full(row_N.shape, jnp.minimum(first, num_positions - size))
            window = Window(place_N, jnp.full_like(place_N, first), rows.plan.begin_B)
            hidden_NWD, piece = pieces.window(
                params, kept, row_N, rows.tokens_BL, rows.length_B, window, size=size
            )
            return piece, after(hidden_NWD, place_N)

        def put(kept: Any, made: tuple[Any, jax.Array], row_N: jax.Array) -> Any:
            piece, place_N = made
            return pieces.store(kept, piece, row_N, place_N)

        kept = in_groups(program.by_rows, end_B > first, size, compute, put, kept, inputs)
        return first + size, kept

    with jax.named_scope("prefill"):
        start = (jnp.zeros((), jnp.int32), kept)
        return jax.lax.while_loop(lambda state: state[0] < jnp.max(end_B), chunk, start)[1]


def _all_rows(
    program: Program,
    params: Params,
    rule: CacheRule,
    kept: Any,
    hidden_BWD: jax.Array,
    inputs: _Inputs,
) -> tuple[Any, jax.Array]:
    """Computes the windows of all rows together, ignoring the windows of fully computed rows."""
    pieces, plan = _pieces(program), inputs.plan
    window = Window(inputs.place_B, plan.begin_B, plan.end_B)

    def compute() -> tuple[jax.Array, Any]:
        return pieces.window(
            params, kept, None, inputs.tokens_BL, inputs.length_B, window, size=hidden_BWD.shape[1]
        )

    if rule.keeps:
        own_BWD, piece = compute()
        kept = pieces.store(kept, piece, None, after(own_BWD, inputs.place_B))
    else:
        is_any = jnp.any(inputs.size_B >= 0)
        own_BWD = jax.lax.cond(is_any, lambda: compute()[0], lambda: hidden_BWD)
    return kept, jnp.where(inputs.is_due_B[:, None, None], hidden_BWD, own_BWD)


def in_groups(
    by_rows: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]],
    is_due_B: jax.Array,
    num_positions: int,
    compute: Callable[[Carry, Rows, jax.Array], Any],
    put: Callable[[Carry, Any, jax.Array], Carry],
    carry: Carry,
    rows: Rows,
) -> Carry:
    """`carry`, updated group by group with the results of the rows where `is_due_B` is True.

    Nothing is computed if no device has such a row. A partial group is padded with its first
    row.

    ``compute(carry, rows_N, row_N) -> made`` is the forward pass over the rows of a group, given
    with their indices `row_N`. On each device, the shard of `row_N` indexes the device's own rows.
    ``put(carry, made, row_N) -> carry`` runs on each device with local shards only. `num_positions`
    is the number of positions that a forward pass computes per row.
    """

    def ordered(_: Any, is_due_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_rows = is_due_B.shape[0]
        size, num_due = group_size(num_rows, num_positions), jnp.sum(is_due_B)
        (row_B,) = jnp.nonzero(is_due_B, size=num_rows, fill_value=0)
        place_P = jnp.arange(-(-num_rows // size) * size)
        first_P = place_P // size * size
        row_P = row_B[jnp.where(place_P < num_due, place_P, first_P) % num_rows]
        return num_due[None], row_P.astype(jnp.int32).reshape(1, -1, size)

    num_due_S, own_SGN = by_rows(ordered)((), is_due_B)
    num_shares, _, size = own_SGN.shape
    num_own = is_due_B.shape[0] // num_shares
    most = jnp.max(num_due_S)

    def one(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        # The barrier hides the row index from the compiler. Without the barrier, the compiler
        # hoists the forward pass out of the loop and runs it even if no row is due.
        (first, carry), mine = jax.lax.optimization_barrier((state, rows))
        own_SN = jax.lax.dynamic_index_in_dim(own_SGN, first // size, 1, keepdims=False)
        own_N = own_SN.reshape(-1)
        row_N = (own_SN + num_own * jnp.arange(num_shares)[:, None]).reshape(-1)
        given = by_rows(lambda _, own: rows_of(*own))((), (own_N, mine))
        made = compute(carry, given, row_N)
        return first + size, by_rows(put_if_due)(first, (carry, made, own_N, num_due_S))

    def put_if_due(first: jax.Array, own: tuple[Carry, Any, jax.Array, jax.Array]) -> Carry:
        carry, made, own_N, num_due_1 = own
        if num_shares == 1:  # the loop ends before a group without due rows
            return put(carry, made, own_N)
        return jax.lax.cond(first < num_due_1[0], lambda: put(carry, made, own_N), lambda: carry)

    start = (jnp.zeros((), most.dtype), carry)
    return jax.lax.while_loop(lambda state: state[0] < most, one, start)[1]


def after(hidden_NWD: jax.Array, place_N: jax.Array) -> jax.Array:
    """The indices, with a data dependency on the hidden vectors.

    Writes at these indices then follow all reads that the vectors depend on, so the compiler
    updates the cache in place instead of copying it. An optimization barrier does not help, because
    it is removed before the compiler decides whether to copy. Values above `_HUGE` occur only
    in rows that end with the status ``NON_FINITE``.
    """
    is_huge_N = jnp.max(hidden_NWD.astype(jnp.float32), axis=(1, 2)) > _HUGE
    return jnp.where(is_huge_N, 0, place_N)


def rows_of(row_N: jax.Array, rows: Rows) -> Rows:
    """The rows of each array with these local indices."""
    return jax.tree.map(lambda leaf: leaf[row_N], rows)


def cut(x_NLD: jax.Array, place_N: jax.Array, size: int) -> jax.Array:
    """`size` consecutive positions of each row, starting at the index in `place_N`."""
    return jax.vmap(lambda x_LD, place: jax.lax.dynamic_slice_in_dim(x_LD, place, size))(
        x_NLD, place_N
    )


def read_head(program: Program, params: Params, name: str, hidden_BLD: jax.Array) -> jax.Array:
    """The sigmoid of a head of the network at every position, ``[B, L]``."""
    num_rows, num_positions, width = hidden_BLD.shape
    logit_P = program.network.heads[name](params, hidden_BLD.reshape(-1, width))
    returned(logit_P, program.network, name, "N", (num_rows * num_positions,), jnp.float32)
    return jax.nn.sigmoid(logit_P).reshape(num_rows, num_positions)


def read_head_with_candidates(
    program: Program,
    params: Params,
    state: State,
    name: str,
    output: TrunkOutput,
    candidate_BL: jax.Array,
    is_open_BL: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The sigmoid of a head ``[B, L]`` for the canvas with candidates at its open MASK, and True
    ``[B]`` for rows that require another forward pass, which reads them.
    """
    tokens_BL, length_B = state.canvas.tokens_BL, state.canvas.length_B
    is_filled_BL = is_open_BL & (tokens_BL == program.mask_id)
    extra_B = jnp.any(is_filled_BL, axis=1) & state.is_stepping_B
    filled_BL = jnp.where(is_filled_BL, candidate_BL, tokens_BL)
    hidden_BLD = jax.lax.cond(
        jnp.any(extra_B),
        lambda: hidden(program.network, params, filled_BL, length_B),
        lambda: output.hidden_BLD,
    )
    hidden_BLD = jnp.where(extra_B[:, None, None], hidden_BLD, output.hidden_BLD)
    return read_head(program, params, name, hidden_BLD), extra_B
