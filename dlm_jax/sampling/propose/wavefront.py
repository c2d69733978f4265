"""The wavefront fill: the sampler head fills open positions in waves that start at filled ones.

The wave of a hole is its distance to the nearest filled position, whatever the tokens. Holes are
therefore sorted once and processed in chunks that end at wave boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import most, preferences, reaches
from dlm_jax.sampling.positions import (
    NEVER,
    TrunkOutput,
    at_places,
    chunk_size,
    distance,
    fold,
    put,
    wave_chunk,
)
from dlm_jax.sampling.propose.fill import DrawLogits, FillInput, FillOutput, FillRule
from dlm_jax.sampling.transforms.chain import Chain, chain, chain_of
from dlm_jax.sampling.transforms.penalties import LogitBias
from dlm_jax.sampling.transforms.transform import Context
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule
from dlm_jax.types import Network, Params, left_of, live_positions


def bootstrap(
    is_far_BL: jax.Array,
    sureness_BL: jax.Array,
    ratio_B: jax.Array,
    preference_BL: jax.Array | None = None,
) -> jax.Array:
    """True at the starting positions of each row, ``[B, L]``; see `Wavefront`.

    `is_far_BL` marks the open positions in runs without a visible token at either end.
    """
    total_B = jnp.sum(is_far_BL, axis=1)
    count_B = jnp.floor(ratio_B * total_B + 1e-3).astype(jnp.int32)
    count_B = jnp.minimum(jnp.maximum(count_B, 1), total_B)
    is_first_BL = most(sureness_BL, is_far_BL, count_B, preference_BL, 1.0)

    # A run without any of them starts at its most confident position; ties as in `most`.
    num_rows, num_positions = is_far_BL.shape
    run_BL = jnp.cumsum(is_far_BL & ~left_of(is_far_BL), axis=1) - 1
    run_BL += num_positions * jnp.arange(num_rows)[:, None]
    run_P = jnp.where(is_far_BL, run_BL, run_BL.size).reshape(-1)

    def over_run(value_BL: jax.Array, reduce: Any = jax.ops.segment_max) -> jax.Array:
        of_runs = reduce(value_BL.reshape(-1), run_P, value_BL.size + 1)
        return of_runs[run_P].reshape(value_BL.shape)

    is_in_BL = is_far_BL & (over_run(is_first_BL.astype(jnp.int32)) == 0)
    best_BL = over_run(jnp.where(is_in_BL, sureness_BL, -jnp.inf))
    if preference_BL is None:
        is_best_BL = is_in_BL & (sureness_BL >= best_BL)
    else:
        is_best_BL = is_in_BL & reaches(sureness_BL, best_BL, 1.0)
        liked_BL = jnp.where(is_best_BL, preference_BL, jnp.uint32(0))
        is_best_BL &= liked_BL == over_run(liked_BL)
    place_BL = jnp.broadcast_to(jnp.arange(num_positions), is_far_BL.shape)
    first_BL = over_run(jnp.where(is_best_BL, place_BL, NEVER), jax.ops.segment_min)
    return is_first_BL | (is_best_BL & (place_BL == first_BL))


GIVEN = -1
"""The level of visible tokens."""
_FEW_TOKENS = 16


SAMPLER_TEMPERATURE = Setting(
    "sampler_temperature",
    1.0,
    "wavefront: divisor of the sampler head's logits before the chain",
    ABOVE_ZERO,
    1e6,
    is_preset=True,
)


@dataclass(frozen=True)
class SamplerReadout:
    """The sampler head as pure functions: ``Network.heads["sampler"]``.

    Attributes:
      readout: ``(params, left_NCD, hidden_ND, right_NCD) -> logits_NV``, float32. ``left`` and
        ``right`` are the embeddings of the ``C`` nearest positions on each side, nearest first,
        with zero vectors for missing neighbours.
      context: the number ``C`` of neighbours on each side.
      sides: ``(params, vectors_VD) -> (left_VCH, right_VCH)``, the contribution of each vector, as
        a neighbour, to the head's first layer; or None.
      from_sides: ``(params, sides_NH, hidden_ND) -> logits_NV``, the rest of the head, from the
        summed contributions of the neighbours; or None. With both, few distinct tokens beside many
        positions are cheap.
    """

    readout: Callable[..., jax.Array]
    context: int = 1
    sides: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    from_sides: Callable[..., jax.Array] | None = None


@rule
class Wavefront(FillRule):
    """Draws candidates in waves. Each wave is conditioned on earlier waves.

    A run of open positions is filled from the visible tokens at its ends. Runs without visible
    tokens at their ends are bootstrapped. Of the n positions in such runs of a row, the
    ``max(1, floor(ratio n))`` positions where the LM head (without banned ids) is most confident
    become starting positions. A run that contains none of them starts at its most confident
    position. Candidates at starting positions are drawn from the LM head, and all others from the
    sampler head, both after the row's chain. A neighbour is visible to a position if it belongs to
    an earlier wave, regardless of other rows and of chunks. In one-sided rows, holes between two
    tokens are filled from the left, so that waves never meet; this can double their number.

    Levels order the draws: 0 at starting positions, larger in later waves (two levels per wave, for
    even and odd positions), -1 at visible tokens, and 2^30 elsewhere.

    Source: sampler head, section 4, ``sampler_wavefront_fill`` and
    ``_bootstrap_fill_by_confidence``; but starting positions are chosen per row and drawn from the
    LM head.
    """

    about = "in waves by the sampler head, given the neighbours"
    needs = ("head:sampler",)

    ratio_B: jax.Array = per_row(
        Setting(
            "sampler_min_neighbors_ratio",
            0.01,
            "wavefront, also of critics: share of the holes without a filled neighbour that start "
            "waves",
            low=ABOVE_ZERO,
            high=1.0,
        )
    )
    is_alternating_B: jax.Array = per_row(
        Setting("sampler_even_odd", False, "wavefront, also of critics: even before odd positions")
    )
    temperature_B: jax.Array = per_row(SAMPLER_TEMPERATURE)
    is_one_sided_B: jax.Array = per_row(
        Setting("sampler_one_sided", False, "wavefront: fill from the left", is_preset=True)
    )

    def propose(self, fill: FillInput) -> FillOutput:
        """The candidates, with log-probability and confidence under the head that drew them."""
        is_open_BL, is_seen_BL = fill.is_open_BL, fill.is_seen_BL & ~fill.is_open_BL

        # Runs without a visible token: the LM head reads them to choose where waves start.
        is_far_BL = is_open_BL & (distance(is_open_BL, is_seen_BL) == NEVER)
        is_read_BL = is_far_BL
        if fill.is_scored_BL is not None:
            is_read_BL |= fill.is_scored_BL & is_open_BL
        if fill.own_BL is not None:
            is_read_BL |= fill.own_BL >= 0
        banned = jnp.array(fill.banned_ids, jnp.int32)

        def read(carry: Any, places_N: jax.Array, is_real_N: jax.Array) -> Any:
            out, sureness_BL = carry
            clean_NV = fill.logits(places_N)
            allowed_NV = clean_NV.at[:, banned].set(-jnp.inf) if fill.banned_ids else clean_NV
            sureness_N = -jnp.log(vocab.max_and_rest(allowed_NV)[1])
            # Every run needs a starting position, so NaN is replaced. The row ends as non-finite in
            # any case.
            sureness_N = jnp.where(jnp.isnan(sureness_N), -jnp.inf, sureness_N)
            sureness_BL = put(sureness_BL, places_N, is_real_N, sureness_N)
            return fill.draw(out, places_N, is_real_N, clean_NV), sureness_BL

        start = fill.start(), jnp.zeros(is_open_BL.shape, jnp.float32)
        out, sureness_BL = fold(is_read_BL, fill.chunk, read, start)
        is_first_BL = jax.lax.cond(
            jnp.any(is_far_BL),
            lambda: bootstrap(is_far_BL, sureness_BL, self.ratio_B, fill.preference_BL),
            lambda: jnp.zeros_like(is_far_BL),
        )

        # Waves: all other open positions, in order of their distance to a filled one.
        is_grown_BL = is_open_BL & ~is_first_BL
        wave_BL = distance(is_grown_BL, is_seen_BL | is_first_BL, self.is_one_sided_B)
        is_odd_1L = (jnp.arange(is_open_BL.shape[1]) % 2 == 1)[None]
        is_late_BL = self.is_alternating_B[:, None] & is_odd_1L
        level_BL = jnp.where(is_grown_BL, 2 * wave_BL + is_late_BL, NEVER)
        level_BL = jnp.where(is_first_BL, 0, jnp.where(is_seen_BL, GIVEN, level_BL))
        grown = grown_logits(fill, level_BL, self.temperature_B)

        def grow(out: FillOutput, places_N: jax.Array, is_real_N: jax.Array) -> FillOutput:
            return fill.draw(out, places_N, is_real_N, *grown(out.proposal.tokens_BL, places_N))

        out = fold(is_grown_BL, head_chunk(fill), grow, out, level_BL=level_BL)
        waves_B = jnp.max(jnp.where(is_grown_BL, wave_BL, 0), axis=1)
        counts = {"waves": waves_B, "bootstrapped": jnp.sum(is_first_BL, axis=1)}
        return out._replace(level_BL=level_BL, counts=counts)

    def logits(self, fill: FillInput, tokens_BL: jax.Array, level_BL: jax.Array) -> DrawLogits:
        """The LM head at starting positions, and the sampler head at all others."""
        grown = grown_logits(fill, level_BL, self.temperature_B)

        def read(places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            is_grown_N = at_places(level_BL, places_N) > 0
            none_NV = jnp.zeros((places_N.size, fill.network.vocab_size), jnp.float32)

            def if_any(is_from_N: jax.Array, logits: Callable[[], jax.Array]) -> jax.Array:
                return jax.lax.cond(jnp.any(is_real_N & is_from_N), logits, lambda: none_NV)

            first_NV = if_any(~is_grown_N, lambda: fill.logits(places_N))
            grown_NV = if_any(is_grown_N, lambda: grown(tokens_BL, places_N)[1])
            return jnp.where(is_grown_N[:, None], grown_NV, first_NV)

        return read


def wavefront_fill(
    params: Params,
    hidden_BLD: jax.Array | TrunkOutput,
    tokens_BL: jax.Array,
    key_B: jax.Array,
    *,
    rule: FillRule | None = None,
    network: Network,
    is_open_BL: jax.Array,
    length_B: jax.Array | None = None,
    is_seen_BL: jax.Array | None = None,
    preference_BL: jax.Array | None = None,
    settings: Mapping[str, Any] | Chain | None = None,
    banned_ids: tuple[int, ...] = (),
    chunk: int = 0,
) -> FillOutput:
    """A token for each open position, as one step of a fill rule draws it: in waves by the sampler
    head, given the neighbours, or as ``rule=Parallel()`` and other rules do.

    In the result, ``proposal.tokens_BL`` is the canvas with the drawn tokens. Of waves,
    ``level_BL`` is the order of the draws, and ``counts`` has the waves and the starting positions
    of each row. ``network``, ``banned_ids`` and ``chunk`` are static, everything else is traced.

    Args:
      params: the network's parameters.
      hidden_BLD: the output of ``network.trunk`` for `tokens_BL`, or a `TrunkOutput`.
      tokens_BL: int32 canvas. Values at open positions are ignored.
      key_B: one typed key per row; the key of a position is ``fold_in(key, index)``.
      rule: the fill; by default, ``Wavefront()``. Its fields have one value for all rows, or
        ``[B]``.
      network: the model as pure functions, with the heads that the rule needs.
      is_open_BL: True at the positions to fill, usually ``tokens_BL == mask_id``.
      length_B: int32, number of live positions in each row; by default, all are live.
      is_seen_BL: True at tokens that are neighbours of open positions; by default, all live
        positions that are not open.
      preference_BL: uint32, priority of equally confident positions; by default, by the keys.
      settings: settings or transforms of all draws, the `params` of `sample_logits` with ``[B]``
        values.
      banned_ids: ids that are never drawn and that the choice of starting positions ignores,
        usually those of MASK and PAD.
      chunk: number of positions per readout of the LM head.
    """
    num_rows, num_positions = tokens_BL.shape
    of_rows: FillRule = jax.tree.map(
        lambda value: jnp.broadcast_to(value, (num_rows,)), Wavefront() if rule is None else rule
    )
    if preference_BL is None:
        preference_BL = preferences(key_B, jnp.zeros(num_rows, bool), num_positions)
    if length_B is None:
        length_B = jnp.full(num_rows, num_positions, jnp.int32)
    if is_seen_BL is None:
        is_seen_BL = live_positions(length_B, num_positions)
    is_seen_BL = is_seen_BL & ~is_open_BL
    ids_BK = jnp.broadcast_to(jnp.array(banned_ids, jnp.int32), (num_rows, len(banned_ids)))
    bans = LogitBias(ids_BK, jnp.full(ids_BK.shape, -jnp.inf))
    full = chain(bans, chain_of(settings or {}, num_rows, network.vocab_size))
    context = Context(tokens_BL, jnp.zeros_like(tokens_BL), is_seen_BL, length_B)
    fill = FillInput(
        network=network,
        params=params,
        output=hidden_BLD if isinstance(hidden_BLD, TrunkOutput) else TrunkOutput(hidden_BLD),
        chunk=chunk or chunk_size(network.vocab_size),
        tokens_BL=tokens_BL,
        length_B=length_B,
        is_open_BL=is_open_BL,
        is_seen_BL=is_seen_BL,
        chain=full,
        chain_state=full.init(context),
        key_B=key_B,
        preference_BL=preference_BL,
        banned_ids=banned_ids,
    )
    out = of_rows.propose(fill)
    canvas_BL = jnp.where(is_open_BL, out.proposal.tokens_BL, tokens_BL)
    return out._replace(proposal=out.proposal._replace(tokens_BL=canvas_BL))


def head_chunk(fill: FillInput) -> int:
    """Number of positions per call to the sampler head."""
    return min(fill.chunk, wave_chunk(fill.network.vocab_size))


def grown_logits(
    fill: FillInput, level_BL: jax.Array, temperature_B: jax.Array
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """``(candidates_BL, places_N) -> (clean_NV, drawable_NV)``: the sampler head's logits, before
    and after division by the temperature, given tokens and candidates of lower levels.
    """
    network, params, tokens_BL = fill.network, fill.params, fill.tokens_BL
    sampler, num_positions = network.heads["sampler"], level_BL.shape[1]
    tables = None
    if sampler.sides is not None and _FEW_TOKENS * network.vocab_size <= level_BL.size:
        # With few tokens for many positions, precomputing what each token contributes to the head's
        # first layer halves the time of the fill (at width 384).
        tables = sampler.sides(params, network.embed(params, jnp.arange(network.vocab_size)))

    def beside(candidates_BL: jax.Array, places_N: jax.Array, side: int) -> jax.Array:
        """What the neighbours on one side add, nearest first: 0 where they are not visible."""
        offset_1C = (2 * side - 1) * (1 + jnp.arange(sampler.context))[None]
        index_NC = places_N[:, None] % num_positions + offset_1C
        place_NC = jnp.clip(places_N[:, None] + offset_1C, 0, level_BL.size - 1)
        level_NC = at_places(level_BL, place_NC)
        token_NC = jnp.where(
            level_NC == GIVEN, at_places(tokens_BL, place_NC), at_places(candidates_BL, place_NC)
        )
        is_seen_NC = (index_NC >= 0) & (index_NC < num_positions)
        is_seen_NC &= level_NC < at_places(level_BL, places_N)[:, None]
        if tables is None:
            vector_NCD = network.embed(params, token_NC)
        else:
            vector_NCD = tables[side][token_NC, jnp.arange(sampler.context)[None]]
        return jnp.where(is_seen_NC[:, :, None], vector_NCD, 0.0)

    def logits(candidates_BL: jax.Array, places_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        left_NCD, right_NCD = (beside(candidates_BL, places_N, side) for side in (0, 1))

        def head(hidden_ND: jax.Array) -> jax.Array:
            if tables is None:
                return sampler.readout(params, left_NCD, hidden_ND, right_NCD)
            return sampler.from_sides(params, left_NCD.sum(1) + right_NCD.sum(1), hidden_ND)

        clean_NV = fill.output.read(head, places_N)
        divisor_N1 = temperature_B[places_N // num_positions][:, None]
        drawable_NV = jax.lax.cond(
            jnp.any(divisor_N1 != 1.0),
            lambda x: jnp.where(divisor_N1 == 1.0, x, x / divisor_N1),
            lambda x: x,
            clean_NV,
        )
        return clean_NV, drawable_NV

    return logits
