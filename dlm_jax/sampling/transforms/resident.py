"""A Pallas kernel for TPUs that runs several transforms on logits in fast memory.

Each program of the kernel loads the logits of eight positions once. All passes over the vocabulary
then read fast memory, so that a search of fifteen passes takes little longer than one pass over
main memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.devices import kind, mesh_in_use, platform
from dlm_jax.sampling.transforms.transform import At, Pointwise, is_wanted
from dlm_jax.sampling.vocab import RESIDENT_WIDTH, Resident

POSITIONS = 8
_LANES = 128
_MAX_VOCAB = 1 << 18
# They cannot gather sublanes.
_WITHOUT = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
# In bytes, beside the double buffers of the logits.
_MEMORY = 1 << 23


def runs_here(vocab_size: int) -> bool:
    """True if the program is for a TPU with the instructions of the kernel, the vocabulary is
    larger than a block and fits, and no array is split over devices.
    """
    fits = RESIDENT_WIDTH < vocab_size <= _MAX_VOCAB
    return fits and platform() == "tpu" and kind() not in _WITHOUT and mesh_in_use() is None


def has_kernel(transform: Any) -> bool:
    """True if `run` gives what the transform's `apply` gives."""
    return isinstance(transform, Pointwise) and type(transform).apply is Pointwise.apply


def groups(steps: Sequence[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """The steps in order, with those that one kernel runs together."""
    found: list[list[tuple[Any, Any]]] = []
    for step in steps:
        joins = has_kernel(step[0]) and not step[0].gives_from_logits
        if joins and found and has_kernel(found[-1][0][0]):
            found[-1].append(step)
        else:
            found.append([step])
    return found


def name_of(steps: Sequence[tuple[Any, Any]]) -> str:
    """The name of the kernel for the transforms."""
    return "_".join(type(t).name for t, _ in steps)


def run(
    steps: Sequence[tuple[Any, Any]], logits_NV: Array, at: At, *, interpret: bool = False
) -> Array:
    """The logits after the transforms of one of the `groups`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    num_given, V = logits_NV.shape
    own = [
        (jax.tree.map(lambda x_B: x_B[at.row_N], t), _given(t, prepared, logits_NV, at))
        for t, prepared in steps
    ]
    here = (own, at.is_real_N, at.is_grown_N)
    leaves, tree = jax.tree.flatten(here)
    # Whole tiles: the added rows are not real, so no transform is applied to them.
    missing = ((0, -num_given % POSITIONS), (0, 0))
    table_NP, logits_NV = (jnp.pad(x, missing) for x in (_packed(leaves), logits_NV))
    N = logits_NV.shape[0]
    width = -(-V // RESIDENT_WIDTH) * RESIDENT_WIDTH
    body = functools.partial(_body, tree=tree, dtypes=[leaf.dtype for leaf in leaves], vocab_size=V)
    size = POSITIONS
    found_NV = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((N, V), jnp.float32),
        grid=(-(-N // size),),
        in_specs=[
            pl.BlockSpec((size, table_NP.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec((size, width), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((size, width), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((size, width), jnp.float32)] * 2,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY + 24 * width * size),
        name=name_of(steps),
    )(table_NP, logits_NV)
    return found_NV[:num_given]


def _given(transform: Pointwise, prepared: Any, logits_NV: Array, at: At) -> Any:
    if not transform.gives_from_logits:
        return transform.given(prepared, logits_NV, at)
    shapes = jax.eval_shape(transform.given, prepared, logits_NV, at)
    return jax.lax.cond(
        is_wanted(transform, at),
        lambda: transform.given(prepared, logits_NV, at),
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    )


def _packed(leaves: Sequence[Array]) -> Array:
    """A table whose columns hold the bits of numbers `[N]`, padded to a multiple of 128 columns."""
    columns = [
        leaf if leaf.dtype == jnp.float32 else _bits(leaf.astype(jnp.int32), jnp.float32)
        for leaf in leaves
    ]
    table = jnp.stack(columns, axis=1)
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % _LANES)))


def _unpacked(table: Array, dtypes: Sequence[Any]) -> list[Array]:
    found = []
    for place, dtype in enumerate(dtypes):
        column = table[:, place]
        if dtype != jnp.float32:
            column = _bits(column, jnp.int32)
        found.append(column != 0 if dtype == jnp.bool_ else column)
    return found


def _bits(x: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def _body(
    table_ref: Any,
    logits_ref: Any,
    out_ref: Any,
    *spare: Array,
    tree: Any,
    dtypes: Any,
    vocab_size: int,
) -> None:
    from jax.experimental import pallas as pl

    own, is_real_N, is_grown_N = jax.tree.unflatten(tree, _unpacked(table_ref[...], dtypes))
    at = At(slice(None), None, None, is_real_N, is_grown_N)  # type: ignore[arg-type]
    logits = Resident((out_ref,), spare, vocab_size)

    def load(_: None, place: Any, block: Array, ids: Array) -> None:
        out_ref[place] = jnp.where(ids < vocab_size, block, -jnp.inf)

    Resident((logits_ref,), (), vocab_size).fold(load, None)
    for transform, given in own:

        @pl.when((transform.is_active() & is_real_N).any())
        def _(transform: Pointwise = transform, given: Any = given) -> None:
            new = transform.change(given, logits, at)

            def write(_: None, place: Any, block: Array, ids: Array) -> None:
                out_ref[place] = new(block, ids)

            logits.fold(write, None)
