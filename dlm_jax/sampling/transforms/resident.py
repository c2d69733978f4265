"""A Pallas kernel for TPUs that runs several transforms on logits in fast memory.

Each program of the kernel loads the logits of eight positions once. All passes over the vocabulary
then read fast memory, so that a search of twenty passes takes little longer than one pass over main
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.devices import kind, mesh_in_use, platform
from dlm_jax.sampling import vocab

POSITIONS = 8
WIDTH = 1024
_LANES = 128
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


def change_all(transforms: Sequence[Any], is_real_N: Array, logits_NV: Array) -> Array:
    """The logits after the `Pointwise.change` of transforms with parameters per position, in a
    kernel if that is possible.
    """
    way = run if runs_here(logits_NV.shape[1]) else run_plainly
    return way(transforms, is_real_N, logits_NV)


def run_plainly(transforms: Sequence[Any], is_real_N: Array, logits_NV: Array) -> Array:
    """The result of `change_all`, in passes over main memory."""
    for t in transforms:
        logits_NV = t.change(logits_NV, is_real_N)
    return logits_NV


@jax.custom_jvp
def run(transforms: Sequence[Any], is_real_N: Array, logits_NV: Array) -> Array:
    """The result of `change_all`, in one kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    bitcast = jax.lax.bitcast_convert_type
    (N, V), at_once = logits_NV.shape, blocks_at_once(logits_NV.shape[1])
    num_turns = -(-V // (at_once * WIDTH))
    width = num_turns * at_once * WIDTH
    # A table whose columns are the bits of the parameters. The positions that fill the last program
    # are not real.
    leaves, tree = jax.tree.flatten((transforms, is_real_N))
    is_float = [leaf.dtype == jnp.float32 for leaf in leaves]
    pairs = zip(leaves, is_float, strict=True)
    columns = [x if own else bitcast(x.astype(jnp.int32), jnp.float32) for x, own in pairs]
    missing = ((0, -N % POSITIONS), (0, -len(columns) % _LANES))
    table_NP = jnp.pad(jnp.stack(columns, axis=1), missing)
    num_rows = len(table_NP)

    def body(table_ref: jax.Ref, logits_ref: jax.Ref, out_ref: jax.Ref, *spare: jax.Ref) -> None:
        def fold(step: Callable[[Any, Any, Array], Any], init: Any) -> Any:
            def turn(i: Array, acc: Any) -> Any:
                for part in range(at_once):
                    start = pl.multiple_of((i * at_once + part) * WIDTH, WIDTH)
                    ids = jax.lax.broadcasted_iota(jnp.int32, (POSITIONS, WIDTH), 1) + start
                    acc = step(acc, (slice(None), pl.ds(start, WIDTH)), ids)
                return acc

            return jax.lax.fori_loop(0, num_turns, turn, init)

        def reduce(read: Callable[[Any], Any], *terms: tuple[str, vocab.Term]) -> tuple[Array, ...]:
            kinds = [vocab.KINDS[kind] for kind, _ in terms]

            def add(accs: tuple[Array, ...], place: Any, ids: Array) -> tuple[Array, ...]:
                new = [fn(read(place), ids).astype(jnp.float32) for _, fn in terms]
                return tuple(k[0](a, x) for k, a, x in zip(kinds, accs, new, strict=True))

            accs = tuple(jnp.full((POSITIONS, WIDTH), k[2], jnp.float32) for k in kinds)
            return tuple(k[1](x, -1) for k, x in zip(kinds, fold(add, accs), strict=True))

        def store(*values: Callable[[Array], Array]) -> Callable[..., tuple[Array, ...]]:
            refs = spare[: len(values)]

            def put(_: None, place: Any, ids: Array) -> None:
                for ref, value in zip(refs, values, strict=True):
                    ref[place] = value(out_ref[place])

            fold(put, None)
            return lambda *terms: reduce(lambda place: [ref[place] for ref in refs], *terms)

        def change(fn: vocab.Term) -> vocab.Resident:
            def put(_: None, place: Any, ids: Array) -> None:
                out_ref[place] = fn(out_ref[place], ids)

            fold(put, None)
            return logits

        def load(_: None, place: Any, ids: Array) -> None:
            out_ref[place] = jnp.where(ids < V, logits_ref[place], -jnp.inf)

        logits = vocab.Resident(
            (POSITIONS, V),
            lambda *terms: reduce(lambda place: out_ref[place], *terms),
            store,
            change,
        )
        table = table_ref[...]
        values = []
        for i, leaf in enumerate(leaves):
            column = table[:, i]
            column = column if is_float[i] else bitcast(column, jnp.int32)
            values.append(column != 0 if leaf.dtype == jnp.bool_ else column)
        transforms, is_real_N = jax.tree.unflatten(tree, values)
        fold(load, None)
        for t in transforms:

            @pl.when((t.is_active() & is_real_N).any())
            def _(t: Any = t) -> None:
                t.change(logits, is_real_N)

    final_NV = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((num_rows, V), jnp.float32),
        grid=(num_rows // POSITIONS,),
        in_specs=[
            pl.BlockSpec((POSITIONS, table_NP.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec((POSITIONS, width), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((POSITIONS, width), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((POSITIONS, width), jnp.float32)] * 2,
        interpret=platform() != "tpu",
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY + 24 * width * POSITIONS),
        name="transforms_" + "_".join(t.name for t in transforms),
    )(table_NP, jnp.pad(logits_NV, (missing[0], (0, 0))))
    return final_NV[:N]


@run.defjvp
def _run_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return jax.jvp(run_plainly, primals, tangents)
