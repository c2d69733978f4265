"""The loop of sampling steps as a program of a TPU topology."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.devices import used
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import axes_of, shardings
from dlm_jax.model.transformer import build
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.rules import ModelFacts


def sampling_step(
    model: ModelConfig, sample: SamplingParams, mesh: Mesh, rows: int, positions: int
) -> tuple[jax.stages.Compiled, Any]:
    """The compiled loop for empty canvases on `mesh`, and its initial state.

    Parameters are bfloat16, sharded as in `dlm_jax.distributed.partitions`; MASK is the last id.
    """
    network, mask = build(model), model.vocab_size - 1
    split, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    program = Program(network, mask, chunk=256, rows=split, banned_ids=(mask,))
    facts = ModelFacts(
        vocab_size=model.vocab_size,
        banned_ids=(mask,),
        has_cache=True,
        block_length=network.block_length,
    )

    def make(params: Any) -> Any:
        tokens_BL = jnp.full((rows, positions), mask, jnp.int32)
        row = RowParams.pack([sample] * rows, facts)
        row = dataclasses.replace(row, seed_B=jnp.zeros(rows, jnp.uint32))
        rules = sample.table.pack([sample] * rows, facts)
        length_B = jnp.full(rows, positions, jnp.int32)
        state = start(tokens_BL, length_B, row, rules, mask_id=mask)
        return with_cache(program, params, state)

    params = jax.eval_shape(network.init, jax.random.key(0))
    places = shardings(params, axes_of(network, params), mesh)
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, "bfloat16", sharding=place),
        params,
        places,
    )
    with used(split):
        state = jax.eval_shape(make, params)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), state
    )
    number = jax.ShapeDtypeStruct((), "int32", sharding=whole)
    advance = Advance(program, compiler_options=compiler.options("sample", mesh))
    return advance._jitted.lower(params, state, number, number).compile(), state
