"""The forward pass of a step, over whole rows or over windows of rows with a KV cache.

With a cache, forward passes process groups of a fixed number of rows, so that a row does not depend
on other rows. If rows are split over devices, a group has as many rows of each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.sampling.commit.commit_rule import attention_blocks
from dlm_jax.sampling.kv_cache import CacheState
from dlm_jax.sampling.positions import TrunkOutput, group_size, hidden, place_of_largest
from dlm_jax.sampling.program import Counters, Program
from dlm_jax.sampling.state import State
from dlm_jax.types import CachedTrunk, Params, Window, live_positions

_HUGE = 3e38
_PREFILL = 32
"""Number of positions per chunk of a prompt on CPUs, where the cost follows the positions."""

Pass = tuple[TrunkOutput, CacheState | None, Counters]
"""The trunk's output, the cache, and the counts of the running rows."""


def with_cache(program: Program, params: Params, state: State) -> State:
    """Adds the KV cache and the self-conditioning signal to the state, if they are used and not
    there. The Transformer in this package stores ``2 depth L G K`` numbers per row, or twice that
    number if the program has guidance.
    """
    signal, shape = program.network.signal, state.canvas.tokens_BL.shape
    if signal is not None and state.signal_BLD is None:
        logits_1V = jax.ShapeDtypeStruct((1, program.network.vocab_size), jnp.float32)
        out_1D = jax.eval_shape(signal, params, logits_1V)
        state = state._replace(signal_BLD=jnp.zeros((*shape, out_1D.shape[1]), out_1D.dtype))
    if state.cache is None or jax.tree.leaves(state.cache.kv_cache):
        return state
    init = _cached_trunk(program).init
    kv_cache = init(params, *shape)
    uncond = init(params, *shape) if program.is_guided else None
    return state._replace(cache=state.cache._replace(kv_cache=kv_cache, uncond_kv_cache=uncond))


def ready(program: Program, params: Params, state: State) -> Params:
    """The parameters in the layout that the steps read. Call this once before the first step."""
    if state.cache is None or (lay_out := _cached_trunk(program).ready) is None:
        return params
    return lay_out(params)


def forward(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The forward pass, plus the unconditional forward pass if a running row is guided."""
    network, canvas, block = program.network, state.canvas, state.block
    if state.rules.cache is not None:
        return _cached_forward(program, params, state, is_open_BL)
    runs_B = state.is_running_B.astype(jnp.int32)
    if network.behind is not None:  # a canvas: no later tokens are visible
        length_B = jnp.minimum(canvas.length_B, block.end_B)
        hidden_BLD = network.behind(
            params, canvas.tokens_BL, length_B, block.begin_B, _signal(state)
        )
        return TrunkOutput(hidden_BLD), None, Counters(forwards=runs_B)
    attention_BLL = None
    if num_blocks := attention_blocks(state.rules.commit.needs):
        assert network.inside is not None, "the request was checked"
        _, maps_BEHLL, hidden_BLD = network.inside(params, canvas.tokens_BL, canvas.length_B)
        is_live_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
        map_BLL = maps_BEHLL[:, -num_blocks:].mean(axis=(1, 2))
        attention_BLL = jnp.where(is_live_BL[:, :, None], map_BLL, 0.0)
    else:
        hidden_BLD = hidden(network, params, canvas.tokens_BL, canvas.length_B)
    output = TrunkOutput(hidden_BLD, attention_BLL=attention_BLL)
    if not program.is_guided:
        return output, None, Counters(forwards=runs_B)
    is_guided_B, uncond_BL = state.row.guidance_B != 0, _uncond_tokens(program, state)
    uncond_BLD = jax.lax.cond(
        jnp.any(is_guided_B & state.is_running_B),
        lambda: hidden(network, params, uncond_BL, canvas.length_B),
        lambda: jnp.zeros_like(hidden_BLD),
    )
    output = output._replace(uncond_BLD=uncond_BLD, scale_B=state.row.guidance_B)
    return output, None, Counters(forwards=runs_B * (1 + is_guided_B))


def _signal(state: State) -> jax.Array | None:
    """The self-conditioning signal of the step; zeros in the first step of a block."""
    if state.signal_BLD is None:
        return None
    is_first_B11 = (state.block.step_B == 0)[:, None, None]
    return jnp.where(is_first_B11, jnp.zeros((), state.signal_BLD.dtype), state.signal_BLD)


def _uncond_tokens(program: Program, state: State) -> jax.Array:
    """The canvas with the given tokens masked."""
    canvas = state.canvas
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    return jnp.where(is_given_BL, program.mask_id, canvas.tokens_BL)


def _cached_trunk(program: Program) -> CachedTrunk:
    """The trunk with a cache, of a program whose requests were checked to have one."""
    cached = program.network.cached
    assert cached is not None, "the request was checked"
    return cached


def _cached_forward(program: Program, params: Params, state: State, is_open_BL: jax.Array) -> Pass:
    """The forward pass over each row's window, after the refresh of its cache."""
    rule, cache, trunk = state.rules.cache, state.cache, _cached_trunk(program)
    assert rule is not None and cache is not None
    block, length_B, runs_B = state.block, state.canvas.length_B, state.is_running_B
    num_rows, num_positions = is_open_BL.shape

    # The window of each row, and what is cached before it.
    first_B = jnp.where(jnp.any(is_open_BL, axis=1), place_of_largest(is_open_BL), block.begin_B)
    first_B = jnp.minimum(first_B, num_positions - 1).astype(jnp.int32)
    begin_B, end_B, width = rule.read(block, first_B, num_positions)
    is_due_B, is_finished_B = rule.refresh(block, begin_B, cache.valid_B)
    place_B = jnp.minimum(begin_B, num_positions - width).astype(jnp.int32)
    window = Window(place_B, begin_B, end_B)
    signal_BWD = _signal(state)
    if signal_BWD is not None:
        signal_BWD = cut(signal_BWD, place_B, width)
    # On CPUs, a causal model computes a prompt in chunks up to the window, not as a whole row.
    is_chunked = trunk.block_length == 1 and platform() == "cpu"

    def run(kv_cache: Any, tokens_BL: jax.Array, runs_B: jax.Array) -> tuple[Any, jax.Array]:
        """The cache and the hidden vectors ``[B, W, D]`` after all passes over one canvas."""
        due_B, rows = is_due_B & runs_B, (tokens_BL, length_B)

        def cache_run(kv_cache: Any, is_due_B: jax.Array, first_B: jax.Array, size: int) -> Any:
            """The cache with `size` positions from `first_B` on, up to the window."""

            def compute(kv_cache: Any, rows: Any, row_N: jax.Array) -> Any:
                tokens_NL, length_N, first_N, end_N = rows
                part = Window(jnp.minimum(first_N, num_positions - size), first_N, end_N)
                hidden_NWD, update = trunk.window(
                    params, kv_cache, row_N, tokens_NL, length_N, part, size=size
                )
                return update, after(hidden_NWD, part.place_N)

            def put(kv_cache: Any, computed: Any, row_N: jax.Array) -> Any:
                return trunk.store(kv_cache, computed[0], row_N, computed[1])

            parts = *rows, first_B, begin_B
            return in_groups(program, is_due_B, size, compute, put, kv_cache, parts)

        hidden_BWD = None
        if is_chunked:
            size, upto_B = min(_PREFILL, num_positions), jnp.where(due_B, begin_B, 0)

            def chunk(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                first, kv_cache = carry
                first_B = jnp.full_like(begin_B, first)
                return first + size, cache_run(kv_cache, upto_B > first, first_B, size)

            with jax.named_scope("prefill"):
                start, last = (jnp.zeros((), jnp.int32), kv_cache), jnp.max(upto_B)
                kv_cache = jax.lax.while_loop(lambda carry: carry[0] < last, chunk, start)[1]
        else:
            shape = jax.eval_shape(trunk.whole, params, *rows)[0]
            hidden_BWD = jnp.zeros((num_rows, width, shape.shape[2]), shape.dtype)

            def compute(carry: Any, rows: Any, row_N: jax.Array) -> Any:
                hidden_NLD, update = trunk.whole(params, *rows[:2])
                return update, hidden_NLD, rows[2]

            def put(carry: Any, computed: Any, row_N: jax.Array) -> Any:
                (kv_cache, hidden_BWD), (update, hidden_NLD, place_N) = carry, computed
                kv_cache = trunk.store(kv_cache, update, row_N, jnp.zeros_like(place_N))
                return kv_cache, hidden_BWD.at[row_N].set(cut(hidden_NLD, place_N, width))

            with jax.named_scope("refresh"):
                carry = kv_cache, hidden_BWD
                kv_cache, hidden_BWD = in_groups(
                    program, due_B, num_positions, compute, put, carry, (*rows, place_B)
                )
            if is_finished_B is not None:
                first_B = jnp.maximum(begin_B - width, 0)
                with jax.named_scope("finished_blocks"):
                    kv_cache = cache_run(kv_cache, is_finished_B & runs_B, first_B, width)
        if trunk.canvas is not None:
            hidden_BWD = trunk.canvas(params, kv_cache, *rows, window, signal_BWD, size=width)
            return kv_cache, hidden_BWD

        def window_of_all() -> tuple[jax.Array, Any]:
            return trunk.window(params, kv_cache, None, *rows, window, size=width)

        if trunk.block_length == 1:
            window_BWD, update = window_of_all()
            kv_cache = trunk.store(kv_cache, update, None, after(window_BWD, place_B))
            if hidden_BWD is None:
                return kv_cache, window_BWD
        else:
            assert hidden_BWD is not None
            window_BWD = jax.lax.cond(
                jnp.any(runs_B & ~is_due_B), lambda: window_of_all()[0], lambda: hidden_BWD
            )
        return kv_cache, jnp.where(due_B[:, None, None], hidden_BWD, window_BWD)

    # The forward passes.
    kv_cache, hidden_BWD = run(cache.kv_cache, state.canvas.tokens_BL, runs_B)
    offset_BL = jnp.arange(num_positions)[None] - place_B[:, None]
    output = TrunkOutput(hidden_BWD, at_BL=jnp.clip(offset_BL, 0, width - 1))
    uncond, passes_B = cache.uncond_kv_cache, runs_B.astype(jnp.int32)
    if program.is_guided:
        is_guided_B = state.row.guidance_B != 0
        uncond, uncond_BWD = run(uncond, _uncond_tokens(program, state), runs_B & is_guided_B)
        output = output._replace(uncond_BLD=uncond_BWD, scale_B=state.row.guidance_B)
        passes_B *= 1 + is_guided_B
    valid_B = begin_B + (trunk.block_length == 1)
    valid_B = jnp.where(runs_B, valid_B, cache.valid_B).astype(jnp.int32)

    # Counts. A canvas requires a forward pass in addition to that of the text.
    forwards_B, num_B = jnp.ones_like(length_B), jnp.minimum(end_B, length_B) - begin_B
    num_B = jnp.maximum(num_B, 0)
    whole_B = begin_B if is_chunked else length_B
    if trunk.canvas is not None or is_chunked:
        whole_B += num_B
    if is_finished_B is not None:
        forwards_B += is_finished_B
        num_B += is_finished_B * jnp.minimum(begin_B, width)
    if trunk.canvas is not None:
        forwards_B += is_due_B
    num_B = jnp.where(is_due_B, whole_B, num_B)
    counters = Counters(forwards=forwards_B * passes_B, positions=num_B * passes_B)
    return output, CacheState(kv_cache, uncond, valid_B), counters


def in_groups(
    program: Program,
    is_due_B: jax.Array,
    num_positions: int,
    compute: Callable[[Any, Any, jax.Array], Any],
    put: Callable[[Any, Any, jax.Array], Any],
    carry: Any,
    rows: Any,
) -> Any:
    """`carry`, updated group by group with the results of the rows where `is_due_B` is True.

    Nothing is computed if no device has such a row. A partial group is padded with its first
    row.

    ``compute(carry, rows_N, row_N) -> computed`` is the forward pass over the rows of a group,
    given with their indices `row_N`. On each device, the shard of `row_N` indexes the device's own
    rows. ``put(carry, computed, row_N) -> carry`` runs on each device with local shards only.
    `num_positions` is the number of positions that a forward pass computes per row.
    """

    def ordered(_: Any, is_due_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_rows = is_due_B.shape[0]
        size, num_due = group_size(num_rows, num_positions), jnp.sum(is_due_B)
        (row_B,) = jnp.nonzero(is_due_B, size=num_rows, fill_value=0)
        place_P = jnp.arange(-(-num_rows // size) * size)
        first_P = place_P // size * size
        row_P = row_B[jnp.where(place_P < num_due, place_P, first_P) % num_rows]
        return num_due[None], row_P.astype(jnp.int32).reshape(1, -1, size)

    by_rows = program.by_rows
    num_due_S, own_SGN = by_rows(ordered)((), is_due_B)
    num_shares, _, size = own_SGN.shape
    num_own, most = is_due_B.shape[0] // num_shares, jnp.max(num_due_S)

    def put_if_due(first: jax.Array, own: tuple[Any, Any, jax.Array, jax.Array]) -> Any:
        carry, computed, own_N, num_due_1 = own
        if num_shares == 1:  # the loop ends before a group without due rows
            return put(carry, computed, own_N)
        return jax.lax.cond(
            first < num_due_1[0], lambda: put(carry, computed, own_N), lambda: carry
        )

    def one(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        # The barrier hides the row index from the compiler. Without the barrier, the compiler
        # hoists the forward pass out of the loop and runs it even if no row is due.
        (first, carry), mine = jax.lax.optimization_barrier((state, rows))
        own_SN = jax.lax.dynamic_index_in_dim(own_SGN, first // size, 1, keepdims=False)
        own_N = own_SN.reshape(-1)
        row_N = (own_SN + num_own * jnp.arange(num_shares)[:, None]).reshape(-1)
        given = by_rows(lambda _, own: jax.tree.map(lambda leaf: leaf[own[0]], own[1]))(
            (), (own_N, mine)
        )
        computed = compute(carry, given, row_N)
        return first + size, by_rows(put_if_due)(first, (carry, computed, own_N, num_due_S))

    start = (jnp.zeros((), most.dtype), carry)
    return jax.lax.while_loop(lambda state: state[0] < most, one, start)[1]


def after(hidden_NWD: jax.Array, place_N: jax.Array) -> jax.Array:
    """The indices, with a data dependency on the hidden vectors: writes at these indices follow all
    reads that the vectors depend on, so the compiler updates the cache in place. An optimization
    barrier is removed before the compiler decides that.
    """
    # Larger values occur only in rows that end with the status NON_FINITE.
    is_huge_N = jnp.max(hidden_NWD.astype(jnp.float32), axis=(1, 2)) > _HUGE
    return jnp.where(is_huge_N, 0, place_N)


def cut(x_NLD: jax.Array, place_N: jax.Array, size: int) -> jax.Array:
    """`size` consecutive positions of each row, starting at the index in `place_N`."""
    return jax.vmap(lambda x_LD, place: jax.lax.dynamic_slice_in_dim(x_LD, place, size))(
        x_NLD, place_N
    )


def read_head(
    program: Program,
    params: Params,
    state: State,
    name: str,
    tokens_BL: jax.Array,
    reads_B: jax.Array,
) -> tuple[jax.Array, Counters]:
    """The sigmoid of a head of the network at every position of a canvas, ``[B, L]``, and the
    counts of this forward pass. It is computed if any row reads it.
    """
    network, length_B = program.network, state.canvas.length_B

    def read() -> jax.Array:
        hidden_BLD = hidden(network, params, tokens_BL, length_B)
        logit_P = network.heads[name](params, hidden_BLD.reshape(-1, hidden_BLD.shape[2]))
        return jax.nn.sigmoid(logit_P).reshape(tokens_BL.shape)

    none_BL = jnp.zeros(tokens_BL.shape, jnp.float32)
    value_BL = jax.lax.cond(jnp.any(reads_B), read, lambda: none_BL)
    places_B = length_B * (reads_B if state.rules.cache is not None else 0)
    return value_BL, Counters(forwards=reads_B.astype(jnp.int32), positions=places_B)
