"""Candidates of a block-causal model that its own weights verify, with blocks of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling import draw as drawing
from dlm_jax.sampling.blocks import steps_needed
from dlm_jax.sampling.propose.parallel import Parallel
from dlm_jax.sampling.propose.protocol import (
    CandidateWriter,
    Filled,
    FillRule,
    Reader,
    Wanted,
    gather,
)
from dlm_jax.sampling.transforms.protocol import At, LogitTransform
from dlm_jax.settings import rule

_SALT = 0x73706563


class _Verified(NamedTuple):
    """Of each position whether its draft is accepted, another token, and how likely each is."""

    is_accepted_P: jax.Array
    other_P: jax.Array
    logprob_P: jax.Array
    other_logprob_P: jax.Array


@rule
class Speculative(FillRule):
    """Drafts the open positions in parallel, and keeps what one token a time would have written.

    The draft x of a position comes from q, what the model says of the block with its holes; one
    more forward with blocks of one token gives p, what it says of every open position behind the
    drafts before it. From the left on, x is accepted with probability ``min(1, p(x) / q(x))``; at
    the first that is not, a token is drawn from ``max(p - q, 0)``, and the rest waits for the next
    step (Leviathan et al. 2023, Speculative decoding, algorithm 1). p and q are those after the
    row's chain. So whatever is drafted, texts have the distribution of p, one token after the
    other.

    Accepted candidates have confidence 1 and the others 0, for ``order = "threshold"``. A step
    writes one token at least; blocks need a step for each of their holes, as the last step of a
    block writes all that is left.
    """

    forwards = 1

    @classmethod
    def check(cls, row: Any) -> None:
        """Refuses what would write other tokens than the accepted, or read what is not written."""
        for name, fine in (
            ("order", "threshold"), ("remask", "none"), ("resample", False), ("guidance", 0.0),
            ("cache", "none"), ("threshold_alone", 0), ("threshold_least", 1),
        ):  # fmt: skip
            if getattr(row, name) != fine:
                raise ValueError(
                    f"{name}={getattr(row, name)!r} does not go with fill='speculative', which "
                    f"verifies a draft of the whole row from the left on; use {name}={fine!r}"
                )
        if row.threshold <= 0:
            raise ValueError("threshold=0.0 takes what fill='speculative' rejected; use 0.9, say")
        if row.threshold >= 1 and row.threshold_above:
            raise ValueError(
                f"threshold={row.threshold} with threshold_above takes nothing of what "
                "fill='speculative' accepted; use threshold=0.9, say"
            )
        if row.edits or row.renoises:
            raise ValueError("edit and re-noise do not go with fill='speculative'; leave them off")
        for name in row.chain:
            for cls_ in row.table.transforms[name]:
                if cls_.prepare is not LogitTransform.prepare and cls_.is_used(row):
                    raise ValueError(
                        f"{name!r} of the chain reads what is written, and fill='speculative' "
                        "verifies before that; leave it at its default"
                    )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Refuses models that know no blocks."""
        if not facts.block_length:
            raise ValueError(
                "fill='speculative' needs model.attention_type='block_causal'; use fill='parallel'"
            )

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        """Refuses fewer steps than tokens: the last step of a block would write what is left."""
        (holes,) = np.nonzero(is_open)
        begin = holes[0] // facts.block_length * facts.block_length
        if row.steps < (needed := steps_needed(holes, row.block_length, begin)):
            raise ValueError(
                f"steps={row.steps} is less than the {needed} in which fill='speculative' verifies "
                f"every token; use steps={needed}"
            )

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The candidates up to the first that was not accepted, which another token replaces."""
        drafted = Parallel().propose(reader, writer, wanted)
        is_open_BL, draft = wanted.is_open_BL, drafted.proposal
        clean_BL = jnp.where(is_open_BL, draft.tokens_BL, wanted.tokens_BL)
        network = reader.network
        assert network.cached is not None and network.cached.beside_clean is not None
        # What is not live is PAD, which sees and shows nothing that is read here.
        length_B = jnp.full(is_open_BL.shape[0], is_open_BL.shape[1], jnp.int32)
        hidden_BLD = network.cached.beside_clean(
            reader.params, wanted.tokens_BL, clean_BL, length_B, block_length=1
        )
        hidden_PD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])

        def true_logits(places_N: jax.Array) -> jax.Array:
            return network.readout(reader.params, hidden_PD[places_N])

        found = _verified(reader, writer, is_open_BL, clean_BL, true_logits)
        shape = is_open_BL.shape
        is_accepted_BL = found.is_accepted_P.reshape(shape)
        is_wrong_BL = is_open_BL & ~is_accepted_BL
        rank_BL = jnp.cumsum(is_wrong_BL, axis=1)
        is_first_BL = is_wrong_BL & (rank_BL == 1)
        is_taken_BL = is_open_BL & ((rank_BL == 0) | is_first_BL)
        proposal = draft._replace(
            tokens_BL=jnp.where(is_first_BL, found.other_P.reshape(shape), draft.tokens_BL),
            logprob_BL=jnp.where(
                is_first_BL, found.other_logprob_P.reshape(shape), found.logprob_P.reshape(shape)
            ),
            confidence_BL=is_taken_BL.astype(jnp.float32),
        )
        return drafted._replace(proposal=proposal)


def _verified(
    reader: Reader,
    writer: CandidateWriter,
    is_open_BL: jax.Array,
    draft_BL: jax.Array,
    true_logits: Callable[[jax.Array], jax.Array],
) -> _Verified:
    """Whether each draft is accepted on its own, and what stands there if it is the first not."""
    flat, num_open = gather(is_open_BL, reader.chunk)
    size, num_positions = min(reader.chunk, is_open_BL.size), is_open_BL.shape[1]

    def one_chunk(carry: tuple[jax.Array, _Verified]) -> tuple[jax.Array, _Verified]:
        first, found = carry
        places_N = jax.lax.dynamic_slice(flat, (first,), (size,))
        is_real_N = first + jnp.arange(size) < num_open
        row_N, index_N = places_N // num_positions, places_N % num_positions
        key_N = jax.vmap(jax.random.fold_in)(writer.key_B[row_N], index_N)
        at = At(row_N=row_N, index_N=index_N, key_N=key_N, is_real_N=is_real_N)
        draft_N = draft_BL.reshape(-1)[places_N]
        true_NV = true_logits(places_N)
        p_NV, q_NV = (
            _probabilities(writer, logits_NV, at)
            for logits_NV in (true_NV, reader.logits(places_N))
        )
        p_N, q_N = (jnp.take_along_axis(x, draft_N[:, None], axis=1)[:, 0] for x in (p_NV, q_NV))
        salted = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(key_N)
        two = jax.vmap(jax.random.split)(salted)
        uniform_N = jax.vmap(jax.random.uniform)(two[:, 0])
        rest_NV = jnp.maximum(p_NV - q_NV, 0.0)
        # Where rounding leaves nothing of the rest, p and q are the same.
        is_any_N1 = jnp.any(rest_NV > 0, axis=1, keepdims=True)
        other_N = drawing.draw(jnp.log(jnp.where(is_any_N1, rest_NV, p_NV)), two[:, 1])
        made = _Verified(
            uniform_N * q_N < p_N,
            other_N,
            drawing.log_prob(true_NV, draft_N),
            drawing.log_prob(true_NV, other_N),
        )
        target_N = jnp.where(is_real_N, places_N, is_open_BL.size)
        found = jax.tree.map(lambda old, new: old.at[target_N].set(new, mode="drop"), found, made)
        return first + size, found

    zeros_P = jnp.zeros(is_open_BL.size, jnp.float32)
    none = _Verified(zeros_P > 0, zeros_P.astype(jnp.int32), zeros_P, zeros_P)
    start = (jnp.zeros((), jnp.int32), none)
    return jax.lax.while_loop(lambda carry: carry[0] < num_open, one_chunk, start)[1]


def _probabilities(writer: CandidateWriter, logits_NV: jax.Array, at: At) -> jax.Array:
    """What the row's chain leaves of clean logits: all on the likeliest for a greedy row."""
    final_NV = writer.chain.apply(writer.prepared, logits_NV, at)
    best_NV = jax.nn.one_hot(drawing.argmax(final_NV), final_NV.shape[1])
    is_greedy_N1 = writer.chain.is_greedy(at)[:, None]
    return jnp.where(is_greedy_N1, best_NV, jax.nn.softmax(final_NV, axis=1))
