"""Coherent candidates: the sampler head fills the open positions in waves, beside what is filled.

The waves are known before the first token is: once a row has a filled position, a hole's wave is
its distance to the nearest one. So the holes are sorted once, and run in chunks that end where a
wave does; the cost follows the holes (`docs/design.md`, readings of the sampler head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
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
from dlm_jax.sampling.propose.waves import NEVER, bootstrap, by_density, distance
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule
from dlm_jax.types import Network, Params

_GIVEN = -1
# Positions of one pass of the sampler head: a wave holds few, and each pass costs a whole chunk.
_CPU_CHUNK = 128
_ACCELERATOR_CHUNK = 1024
# On a CPU, logits of one pass; a large vocabulary makes an empty place of a chunk expensive.
_CPU_LOGITS = 2**20
_LEAST = 16
_FEW_TOKENS = 16


SAMPLER_MIN_NEIGHBORS_RATIO = Setting(
    "sampler_min_neighbors_ratio", 0.01,
    "wavefront, also of the critic's training: share of the holes without filled neighbour that "
    "begin, in (0, 1]",
    low=ABOVE_ZERO, high=1.0,
)  # fmt: skip
SAMPLER_RATIO_BY_DENSITY = Setting(
    "sampler_ratio_by_density", 0.0,
    "wavefront: that share is multiplied by this power of the share of the row that is not filled",
    low=0.0, high=16.0,
)  # fmt: skip
SAMPLER_SPREAD_SEEDS = Setting(
    "sampler_spread_seeds", False,
    "wavefront: the holes that begin are spread evenly over the row",
)  # fmt: skip
SAMPLER_EVEN_ODD = Setting(
    "sampler_even_odd",
    False,
    "wavefront, also of the critic's training: odd positions of a wave wait for the even ones",
)
SAMPLER_ONE_SIDED = Setting(
    "sampler_one_sided", False,
    "wavefront: holes between two filled tokens are filled from the left one on, so that no two "
    "waves meet; up to twice as many waves",
)  # fmt: skip
SAMPLER_TEMPERATURE = Setting(
    "sampler_temperature", 1.0,
    "wavefront: divides the sampler head's logits, before the chain", low=ABOVE_ZERO, high=1e6,
)  # fmt: skip


@rule
class Wavefront(FillRule):
    """Draws candidates in waves, each beside those of earlier waves.

    A run of open positions grows from the visible tokens at its ends. Runs without one are
    bootstrapped: of the n positions in such runs of a row, ``max(1, floor(ratio n))``, those where
    the LM head is surest once banned ids are left out, and in each run that has none among them its
    surest. These are drawn from the LM head, all others from the sampler head; both through the
    row's chain. A neighbour is seen if its wave is smaller: what other rows or chunks have done by
    then does not matter.

    Attributes:
      ratio_B: float32 in (0, 1], share of the positions without any filled neighbour that begin;
        one at least.
      density_power_B: float32 in [0, 16]; the share is multiplied by ``d ** power``, where d is the
        share of the row that is not filled, open in this step or not. 0: it is the same throughout.
      is_spread_B: True for rows that begin at the surest of equal windows, not of the row.
      is_alternating_B: True for rows where odd positions of a wave wait for its even ones, so that
        no two neighbours are filled blind to each other.
      temperature_B: float32 above 0, of the sampler head's logits, before the chain.
      is_one_sided_B: True for rows where a run between two filled tokens grows from its left end
        alone. From both ends, the tokens of a wave are blind to each other, which matters the more
        the shorter the run.
    """

    ratio_B: jax.Array = per_row(SAMPLER_MIN_NEIGHBORS_RATIO)
    density_power_B: jax.Array = per_row(SAMPLER_RATIO_BY_DENSITY)
    is_spread_B: jax.Array = per_row(SAMPLER_SPREAD_SEEDS)
    is_alternating_B: jax.Array = per_row(SAMPLER_EVEN_ODD)
    temperature_B: jax.Array = per_row(SAMPLER_TEMPERATURE)
    is_one_sided_B: jax.Array = per_row(SAMPLER_ONE_SIDED)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Refuses a model without a sampler head."""
        if not facts.has_sampler:
            raise ValueError(
                "fill='wavefront' needs a sampler head, which this model lacks; use "
                "fill='parallel', or train one with model.add_sampler_head"
            )

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The candidates, with log-probability and confidence under the head of each."""
        is_open_BL, own_BL = wanted.is_open_BL, writer.own_BL
        is_seen_BL = wanted.is_seen_BL & ~is_open_BL
        is_far_BL = is_open_BL & (distance(is_open_BL, is_seen_BL) == NEVER)
        is_read_BL = is_far_BL if own_BL is None else is_far_BL | (own_BL >= 0)
        if wanted.is_scored_BL is not None:
            is_read_BL |= wanted.is_scored_BL & is_open_BL
        drawn, sureness_BL = _read(
            reader, writer, is_read_BL,
            keeps_total=wanted.is_scored_BL is not None, keeps_best=wanted.keeps_best,
        )  # fmt: skip
        ratio_B = by_density(self.ratio_B, self.density_power_B, is_seen_BL, wanted.length_B)
        is_first_BL = jax.lax.cond(
            jnp.any(is_far_BL),
            lambda: bootstrap(
                is_far_BL, sureness_BL, ratio_B, self.is_spread_B, wanted.preference_BL
            ),
            lambda: jnp.zeros_like(is_far_BL),
        )
        is_grown_BL = is_open_BL & ~is_first_BL
        wave_BL = distance(is_grown_BL, is_seen_BL | is_first_BL, self.is_one_sided_B)
        is_odd_1L = (jnp.arange(is_open_BL.shape[1]) % 2 == 1)[None]
        is_late_BL = self.is_alternating_B[:, None] & is_odd_1L
        level_BL = jnp.where(is_grown_BL, 2 * wave_BL + is_late_BL, NEVER)
        level_BL = jnp.where(is_first_BL, 0, jnp.where(is_seen_BL, _GIVEN, level_BL))
        drawn = _grow(
            reader, writer, drawn, level_BL, is_grown_BL, wanted.tokens_BL, self.temperature_B
        )
        waves_B = jnp.max(jnp.where(is_grown_BL, wave_BL, 0), axis=1)
        return drawn.filled(is_open_BL.shape, waves_B, jnp.sum(is_first_BL, axis=1))


def _wave_chunk(vocab_size: int) -> int:
    if platform() != "cpu":
        return _ACCELERATOR_CHUNK
    return max(_LEAST, min(_CPU_CHUNK, _CPU_LOGITS // vocab_size))


def _read(
    reader: Reader,
    writer: CandidateWriter,
    is_read_BL: jax.Array,
    *,
    keeps_total: bool,
    keeps_best: bool,
) -> tuple[Drawn, jax.Array]:
    """Candidates of the LM head, and its largest probability among the ids that are not banned."""
    banned_ids, chunk = writer.banned_ids, min(reader.chunk, is_read_BL.size)
    flat, num_read = gather(is_read_BL, chunk)
    banned = jnp.array(banned_ids, jnp.int32)

    def one_chunk(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        first, drawn, sureness_P = carry
        places_N = jax.lax.dynamic_slice(flat, (first,), (chunk,))
        is_real_N = first + jnp.arange(chunk) < num_read
        clean_NV = reader.logits(places_N)
        allowed_NV = clean_NV.at[:, banned].set(-jnp.inf) if banned_ids else clean_NV
        sureness_N = jnp.max(allowed_NV, axis=1) - jax.nn.logsumexp(allowed_NV, axis=1)
        # So that every run has a beginning; the row of a NaN ends as not finite anyway.
        sureness_N = jnp.where(jnp.isnan(sureness_N), -jnp.inf, sureness_N)
        target_N = jnp.where(is_real_N, places_N, sureness_P.size)
        sureness_P = sureness_P.at[target_N].set(sureness_N, mode="drop")
        return first + chunk, writer.write(drawn, places_N, is_real_N, clean_NV), sureness_P

    start = (
        jnp.zeros((), jnp.int32),
        no_candidates(is_read_BL.shape, keeps_total=keeps_total, keeps_best=keeps_best),
        jnp.zeros(is_read_BL.size, jnp.float32),
    )
    _, drawn, sureness_P = jax.lax.while_loop(lambda carry: carry[0] < num_read, one_chunk, start)
    return drawn, sureness_P.reshape(is_read_BL.shape)


def _grow(
    reader: Reader,
    writer: CandidateWriter,
    drawn: Drawn,
    level_BL: jax.Array,
    is_grown_BL: jax.Array,
    tokens_BL: jax.Array,
    temperature_B: jax.Array,
) -> Drawn:
    """`drawn` with the sampler head's candidates, level by level."""
    network, reach = reader.network, reader.network.sampler_context
    chunk = min(reader.chunk, level_BL.size, _wave_chunk(network.vocab_size))
    num_positions = level_BL.shape[1]
    order_BL = jnp.where(is_grown_BL, level_BL, NEVER)
    sorted_P = jnp.argsort(order_BL.reshape(-1), stable=True).astype(jnp.int32)
    sorted_P = jnp.pad(sorted_P, (0, chunk))
    num_grown = jnp.sum(is_grown_BL)
    level_P, given_P = level_BL.reshape(-1), tokens_BL.reshape(-1)

    def beside(drawn: Drawn, places_N: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
        """Tokens of the neighbours on one side, nearest first, and where there is one."""
        offset_1C = side * (1 + jnp.arange(reach))[None]
        index_NC = places_N[:, None] % num_positions + offset_1C
        place_NC = jnp.clip(places_N[:, None] + offset_1C, 0, level_P.size - 1)
        is_inside_NC = (index_NC >= 0) & (index_NC < num_positions)
        level_NC = level_P[place_NC]
        token_NC = jnp.where(level_NC == _GIVEN, given_P[place_NC], drawn.tokens_P[place_NC])
        return token_NC, is_inside_NC & (level_NC < level_P[places_N][:, None])

    head = _head(network, reader.params, size=level_P.size)

    def one_chunk(carry: tuple[jax.Array, Drawn]) -> tuple[jax.Array, Drawn]:
        first, drawn = carry
        places_N = jax.lax.dynamic_slice(sorted_P, (first,), (chunk,))
        is_rest_N = first + jnp.arange(chunk) < num_grown
        is_real_N = is_rest_N & (level_P[places_N] == level_P[places_N[0]])
        left, right = beside(drawn, places_N, -1), beside(drawn, places_N, 1)
        clean_NV = reader.output.read(head(left, right), places_N)
        divisor_N = temperature_B[places_N // num_positions]
        drawable_NV = jax.lax.cond(
            jnp.any(divisor_N != 1.0),
            lambda x: jnp.where(divisor_N[:, None] == 1.0, x, x / divisor_N[:, None]),
            lambda x: x,
            clean_NV,
        )
        drawn = writer.write(drawn, places_N, is_real_N, clean_NV, drawable_NV)
        return first + jnp.sum(is_real_N), drawn

    start = (jnp.zeros((), num_grown.dtype), drawn)
    return jax.lax.while_loop(lambda carry: carry[0] < num_grown, one_chunk, start)[1]


_Neighbours = tuple[jax.Array, jax.Array]


def _head(
    network: Network, params: Params, *, size: int
) -> Callable[[_Neighbours, _Neighbours], Callable[[jax.Array], jax.Array]]:
    """``(left, right) -> head``: the sampler head beside neighbours, tokens ``[N, C]`` each.

    On a canvas of many more places than there are tokens (`size` in all), what the tokens add to
    the head's first layer is computed once for all of them: half of the fill's time at width 384.
    """
    readout, sides, finish = (
        network.sampler_readout, network.sampler_sides, network.sampler_from_sides
    )  # fmt: skip
    assert readout is not None
    if sides is None or finish is None or _FEW_TOKENS * network.vocab_size > size:

        def vectors(tokens_NC: jax.Array, is_seen_NC: jax.Array) -> jax.Array:
            return jnp.where(is_seen_NC[:, :, None], network.embed(params, tokens_NC), 0.0)

        def beside(left: _Neighbours, right: _Neighbours) -> Callable[[jax.Array], jax.Array]:
            left_NCD, right_NCD = vectors(*left), vectors(*right)
            return lambda hidden_ND: readout(params, left_NCD, hidden_ND, right_NCD)

        return beside
    left_VCH, right_VCH = sides(params, network.embed(params, jnp.arange(network.vocab_size)))

    def added(table_VCH: jax.Array, tokens_NC: jax.Array, is_seen_NC: jax.Array) -> jax.Array:
        each_1C = jnp.arange(table_VCH.shape[1])[None]
        return jnp.where(is_seen_NC[:, :, None], table_VCH[tokens_NC, each_1C], 0.0).sum(1)

    def beside_tables(left: _Neighbours, right: _Neighbours) -> Callable[[jax.Array], jax.Array]:
        sides_NH = added(left_VCH, *left) + added(right_VCH, *right)
        return lambda hidden_ND: finish(params, sides_NH, hidden_ND)

    return beside_tables
