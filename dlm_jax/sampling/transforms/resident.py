"""A Pallas kernel for TPUs that runs several transforms on logits in fast memory.

Each program of the kernel loads the logits of eight positions once. All passes over the vocabulary
then read fast memory, so that a search of fifteen passes takes little longer than one pass over
main memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.devices import kind, mesh_in_use, platform
from dlm_jax.sampling.transforms.transform import At, Pointwise
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

    def shares(transform: Any) -> bool:
        return has_kernel(transform) and not transform.gives_from_logits

    grouped: list[list[tuple[Any, Any]]] = []
    for step in steps:
        if grouped and shares(step[0]) and shares(grouped[-1][-1][0]):
            grouped[-1].append(step)
        else:
            grouped.append([step])
    return grouped


def name_of(steps: Sequence[tuple[Any, Any]]) -> str:
    """The name of the kernel for the transforms."""
    return "_".join(type(t).name for t, _ in steps)


def run(
    steps: Sequence[tuple[Any, Any]], logits_NV: Array, at: At, *, interpret: bool = False
) -> Array:
    """The logits after the transforms of one of the `groups`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    bitcast = jax.lax.bitcast_convert_type
    num_given, V = logits_NV.shape
    rows = [
        (jax.tree.map(lambda x_B: x_B[at.row_N], t), t.given(prepared, logits_NV, at))
        for t, prepared in steps
    ]
    leaves, tree = jax.tree.flatten((rows, at.is_real_N, at.is_grown_N))
    dtypes = [leaf.dtype for leaf in leaves]
    # A table whose columns are the bits of the parameters. Tiles are whole: the added rows are not
    # real, so no transform is applied to them.
    columns = [
        leaf if leaf.dtype == jnp.float32 else bitcast(leaf.astype(jnp.int32), jnp.float32)
        for leaf in leaves
    ]
    missing = -num_given % POSITIONS
    table_NP = jnp.pad(jnp.stack(columns, axis=1), ((0, missing), (0, -len(columns) % _LANES)))
    logits_NV = jnp.pad(logits_NV, ((0, missing), (0, 0)))

    def body(table_ref: Any, logits_ref: Any, out_ref: Any, *spare: Array) -> None:
        table = table_ref[...]
        values = [
            table[:, i] if dtype == jnp.float32 else bitcast(table[:, i], jnp.int32)
            for i, dtype in enumerate(dtypes)
        ]
        pairs = zip(values, dtypes, strict=True)
        values = [x != 0 if dtype == jnp.bool_ else x for x, dtype in pairs]
        rows, is_real_N, is_grown_N = jax.tree.unflatten(tree, values)
        at = At(slice(None), None, None, is_real_N, is_grown_N)  # type: ignore[arg-type]
        logits = Resident((out_ref,), spare, V)

        def load(_: None, place: Any, block: Array, ids: Array) -> None:
            out_ref[place] = jnp.where(ids < V, block, -jnp.inf)

        Resident((logits_ref,), (), V).fold(load, None)
        for transform, given in rows:

            @pl.when((transform.is_active() & is_real_N).any())
            def _(transform: Pointwise = transform, given: Any = given) -> None:
                new = transform.change(given, logits, at)

                def write(_: None, place: Any, block: Array, ids: Array) -> None:
                    out_ref[place] = new(block, ids)

                logits.fold(write, None)

    width = -(-V // RESIDENT_WIDTH) * RESIDENT_WIDTH
    final_NV = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(logits_NV.shape, jnp.float32),
        grid=(len(logits_NV) // POSITIONS,),
        in_specs=[
            pl.BlockSpec((POSITIONS, table_NP.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec((POSITIONS, width), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((POSITIONS, width), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((POSITIONS, width), jnp.float32)] * 2,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY + 24 * width * POSITIONS),
        name=name_of(steps),
    )(table_NP, logits_NV)
    return final_NV[:num_given]
