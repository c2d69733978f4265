"""Candidates for the open positions of a step, all drawn in parallel from one forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit import Proposal
from dlm_jax.sampling.draw import log_prob
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import At, Context
from dlm_jax.types import Network, Params

_CPU_LOGITS = 2**18
_ACCELERATOR_LOGITS = 2**24


def chunk_size(vocab_size: int) -> int:
    """Positions per readout: as many as keep the logits in a CPU's cache, or fill an accelerator.

    64 on CPU and 256 elsewhere at least.
    """
    if jax.default_backend() == "cpu":
        return max(64, _CPU_LOGITS // vocab_size)
    return max(256, _ACCELERATOR_LOGITS // vocab_size)


def propose_parallel(
    network: Network,
    params: Params,
    sight: Sight,
    is_open_BL: jax.Array,
    chain: Chain,
    chain_state: Any,
    context: Context,
    key_B: jax.Array,
    own_BL: jax.Array | None = None,
    *,
    measure: Callable[[jax.Array, jax.Array], jax.Array],
    chunk: int,
    method: str = "inverse_cdf",
) -> tuple[Proposal, jax.Array]:
    """A candidate for every open position, drawn blind to the others; and which rows are finite.

    The open positions of all rows are gathered and run in chunks of `chunk`, so that the cost
    follows their number and no ``[B, L, V]`` array exists. Each draws with a key of its row and
    its place in the canvas.

    Args:
      network: whose `readout` is used.
      params: its parameters.
      sight: what the trunk returned.
      is_open_BL: True where a candidate is wanted.
      chain: logit transforms between the clean logits and the draw.
      chain_state: what the chain carries.
      context: the visible tokens when the step began.
      key_B: this step's key of each row, for draws alone.
      own_BL: int32 tokens that stand in the canvas and are to be scored, not drawn; -1 elsewhere.
      measure: confidence from clean logits and the candidate's log-probability.
      chunk: positions of one readout.
      method: how a token is drawn; see `dlm_jax.sampling.draw.draw`.

    Returns:
      The proposal, zero where not open; and ``[B]``, False for a row with an open position whose
      clean logits hold a NaN or +inf, or are all -inf.
    """
    num_rows, num_positions = is_open_BL.shape
    is_wanted_BL = is_open_BL if own_BL is None else is_open_BL | (own_BL >= 0)
    total = num_rows * num_positions
    chunk = min(chunk, total)
    num_open = jnp.sum(is_wanted_BL)
    padded = -(-total // chunk) * chunk
    (flat,) = jnp.nonzero(is_wanted_BL.reshape(-1), size=total, fill_value=0)
    flat = jnp.pad(flat, (0, padded - total)).astype(jnp.int32)
    prepared = chain.prepare(chain_state, context)

    def one_chunk(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        first, ids, logprobs, finals, confidences, is_finite = carry
        places_N = jax.lax.dynamic_slice(flat, (first,), (chunk,))
        is_real_N = first + jnp.arange(chunk) < num_open
        row_N, index_N = places_N // num_positions, places_N % num_positions
        key_N = jax.vmap(jax.random.fold_in)(key_B[row_N], index_N)
        clean_NV = sight.logits(network, params, places_N)
        at = At(row_N=row_N, index_N=index_N, key_N=key_N, is_real_N=is_real_N)
        ids_N, final_N = chain.draw_and_score(prepared, clean_NV, at, method=method)
        if own_BL is not None:
            own_N = own_BL.reshape(-1)[places_N]
            ids_N = jnp.where(own_N >= 0, own_N, ids_N)
        logprob_N = log_prob(clean_NV, ids_N)
        target_N = jnp.where(is_real_N, places_N, total)
        return (
            first + chunk,
            ids.at[target_N].set(ids_N, mode="drop"),
            logprobs.at[target_N].set(logprob_N, mode="drop"),
            finals.at[target_N].set(final_N, mode="drop"),
            confidences.at[target_N].set(measure(clean_NV, logprob_N), mode="drop"),
            is_finite.at[row_N].min(jnp.isfinite(logprob_N) | ~is_real_N),
        )

    start = (
        jnp.zeros((), jnp.int32),
        jnp.zeros(total, jnp.int32),
        *3 * (jnp.zeros(total, jnp.float32),),
        jnp.ones(num_rows, jnp.bool_),
    )
    _, *arrays, is_finite_B = jax.lax.while_loop(
        lambda carry: carry[0] < num_open, one_chunk, start
    )
    shape = (num_rows, num_positions)
    return Proposal(*(array.reshape(shape) for array in arrays)), is_finite_B
