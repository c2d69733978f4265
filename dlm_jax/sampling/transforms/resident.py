"""A Pallas kernel for TPUs whose passes over the vocabulary read fast memory.

Each program of the kernel loads the logits of eight positions once, so that a search of twenty
passes takes little longer than one pass over main memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.devices import kind, mesh_in_use, platform
from dlm_jax.sampling.vocab import flushed

POSITIONS = 8
WIDTH = 1024
_MAX_VOCAB = 1 << 18
# They cannot gather sublanes.
_WITHOUT = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
# In bytes, beside the arrays of a program.
_MEMORY = 1 << 23


def runs_here(num_logits: int) -> bool:
    """True if the program is for a TPU with the instructions of the kernel, the logits are more
    than a block and fit, and no array is split over devices.
    """
    is_tpu = platform() == "tpu" and kind() not in _WITHOUT
    return is_tpu and WIDTH < num_logits <= _MAX_VOCAB and mesh_in_use() is None


def blocks_at_once(num_logits: int) -> int:
    """Number of blocks in one iteration of a loop over the vocabulary."""
    num_blocks = -(-num_logits // WIDTH)
    return next(size for size in (4, 3, 2, 1) if num_blocks % size == 0)


def search(
    fn: Callable[..., tuple[Array, Array]],
    limits: Sequence[Array],
    values: Sequence[Callable[..., Array]],
    columns: Sequence[Array],
    logits_NV: Array,
) -> tuple[Array, Array]:
    """The results `[N]`, float32 and int32, of `fn(sums, *limits)`.

    `sums(*terms)` passes over the vocabulary, as `vocab.sums`. Its terms get the values of a block
    of logits (denormals are 0), computed once by functions of the logits and of the columns `[N,
    1]`. Limits and columns are float32 arrays `[N]`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    N, V = logits_NV.shape
    at_once = blocks_at_once(V)
    num_turns = -(-V // (at_once * WIDTH))
    width = num_turns * at_once * WIDTH

    def body(logits_ref: Any, *refs: jax.Ref) -> None:
        given, refs = [ref[...] for ref in refs[:num_given]], refs[num_given:]
        cut_ref, last_ref, *value_refs = refs

        def fold(step: Callable[[Any, Any, Array], Any], init: Any) -> Any:
            def turn(i: Array, acc: Any) -> Any:
                for part in range(at_once):
                    start = pl.multiple_of((i * at_once + part) * WIDTH, WIDTH)
                    ids = jax.lax.broadcasted_iota(jnp.int32, (POSITIONS, WIDTH), 1) + start
                    acc = step(acc, (slice(None), pl.ds(start, WIDTH)), ids)
                return acc

            return jax.lax.fori_loop(0, num_turns, turn, init)

        def store(_: None, place: Any, ids: Array) -> None:
            block = flushed(jnp.where(ids < V, logits_ref[place], -jnp.inf))
            for ref, value in zip(value_refs, values, strict=True):
                ref[place] = value(block, *given[len(limits) :])

        def sums(*terms: Callable[[list[Array], Array], Array]) -> tuple[Array, ...]:
            def add(accs: tuple[Array, ...], place: Any, ids: Array) -> tuple[Array, ...]:
                block = [ref[place] for ref in value_refs]
                return tuple(acc + term(block, ids) for acc, term in zip(accs, terms, strict=True))

            zeros = (jnp.zeros((POSITIONS, WIDTH), jnp.float32),) * len(terms)
            return tuple(sum_NC.sum(-1) for sum_NC in fold(add, zeros))

        fold(store, None)
        cut_N, last_N = fn(sums, *(limit_N1[:, 0] for limit_N1 in given[: len(limits)]))
        cut_ref[...], last_ref[...] = cut_N[:, None], last_N[:, None]

    # Infinite limits end the search at the positions that fill the last program.
    missing = -N % POSITIONS
    given = [
        jnp.pad(x_N, (0, missing), constant_values=jnp.inf)[:, None] for x_N in (*limits, *columns)
    ]
    num_given, shape = len(given), (N + missing, 1)
    narrow = pl.BlockSpec((POSITIONS, 1), lambda i: (i, 0))
    cut_N1, last_N1 = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ],
        grid=(shape[0] // POSITIONS,),
        in_specs=[pl.BlockSpec((POSITIONS, width), lambda i: (i, 0))] + [narrow] * num_given,
        out_specs=[narrow, narrow],
        scratch_shapes=[pltpu.VMEM((POSITIONS, width), jnp.float32)] * len(values),
        interpret=platform() != "tpu",
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY + 16 * width * POSITIONS),
        name=f"search_{len(values)}_{len(columns)}",
    )(logits_NV, *given)
    return cut_N1[:N, 0], last_N1[:N, 0]
