"""Candidates that are all drawn in parallel from one forward, each blind to the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.sampling.propose.protocol import (
    CandidateWriter,
    Drawn,
    Filled,
    FillRule,
    Reader,
    Wanted,
    gather,
    no_candidates,
)
from dlm_jax.settings import rule


@rule
class Parallel(FillRule):
    """Draws a candidate for every open position from the LM head, blind to the others.

    The open positions of all rows are gathered and run in chunks, so that the cost follows their
    number and no ``[B, L, V]`` array exists. Each draws with a key of its row and its place in the
    canvas.
    """

    allows_host = True

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The proposal, zero where not open."""
        is_open_BL, own_BL = wanted.is_open_BL, writer.own_BL
        is_read_BL = is_open_BL if own_BL is None else is_open_BL | (own_BL >= 0)
        flat, num_open = gather(is_read_BL, reader.chunk)

        def one_chunk(carry: tuple[jax.Array, Drawn]) -> tuple[jax.Array, Drawn]:
            first, drawn = carry
            size = min(reader.chunk, is_open_BL.size)
            places_N = jax.lax.dynamic_slice(flat, (first,), (size,))
            is_real_N = first + jnp.arange(places_N.size) < num_open
            clean_NV = reader.logits(places_N)
            return first + places_N.size, writer.write(drawn, places_N, is_real_N, clean_NV)

        keeps_total = wanted.is_scored_BL is not None
        none = no_candidates(
            is_open_BL.shape, keeps_total=keeps_total, keeps_best=wanted.keeps_best
        )
        start = (jnp.zeros((), jnp.int32), none)
        _, drawn = jax.lax.while_loop(lambda carry: carry[0] < num_open, one_chunk, start)
        none_B = jnp.zeros(is_open_BL.shape[0], jnp.int32)
        return drawn.filled(is_open_BL.shape, none_B, none_B)
