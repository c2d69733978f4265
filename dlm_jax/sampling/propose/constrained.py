"""A fill that draws all candidates of a row jointly, so that they match the row's structure.

A structure is an automaton over the tokens (`dlm_jax.structured`). A backward recursion
computes, for each state, the probability of completing a match from that state. A forward recursion
then draws a match or computes the most likely one (Rabiner 1989, section III; Suresh et al. 2025,
DINGO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.randomness import salted
from dlm_jax.sampling.positions import fold, place_of_largest, put
from dlm_jax.sampling.propose.fill import FillInput, FillOutput, FillRule
from dlm_jax.sampling.transforms.structure import STRUCTURE, automaton_of
from dlm_jax.sampling.transforms.transform import At, refuse_memory
from dlm_jax.settings import UNSET, per_row, require, require_values, rule
from dlm_jax.structured.automaton import Arcs, stack_arcs
from dlm_jax.types import left_of, live_positions, right_of

_CUT = 1e4
"""Difference of log-weights, in nats, between ids that the chain keeps and ids that it removes."""
_LEAST = math.log(1e-30)
"""Log-weight above which float32 sums are sufficiently exact. Lower weights are summed in the log
domain."""
_MOST_MEMBERS = 1 << 22
_MOST_ARCS = 1 << 20
_CLASS, _MEMBER, _ARC, _LABEL = 0x636C, 0x6D65, 0x6172, 0x6C61


class Seen(NamedTuple):
    """For each class of ids, ``[..., C]``: its log-weight, and one of its ids, drawn by weight or
    the most likely, with its log-probability under the clean logits and the confidence in it.
    """

    weight: jax.Array
    ids: jax.Array
    logprob: jax.Array
    confidence: jax.Array


@rule
class Constrained(FillRule):
    """Draws the open positions of a row jointly, as part of a match of the row's structure.

    The match is drawn from the product of the positions' distributions after the row's chain,
    conditioned on the automaton. The matched text starts after the given prefix, includes given
    tokens between holes, and is followed by EOS. A greedy row takes the most likely match. Any
    subset of the candidates can be committed, because the remaining candidates complete the match.

    Independent draws that already match are kept, which does not change the distribution. An id
    removed by truncation is drawn only if no match exists without such an id. Holes that the step
    does not fill can become any token that fits. Rows without structure use `Parallel`.
    """

    about = "jointly, as a match of the row's structure; in parallel in rows without a structure"
    otherwise = "parallel"
    """Name of the fill for rows without structure."""

    arcs: Arcs = per_row(STRUCTURE)

    @classmethod
    def check(cls, row: Any) -> None:
        commit, remedy = row.table.commit[row.order], "for example, use order='threshold'"
        why = f"changes tokens of a match that fill={cls.name!r} draws jointly"
        off = {"edit": [False], "resample": [False], "renoise_start": [0.0], "renoise_end": [0.0]}
        require_values(row, off, why)
        require(commit.rewrites is None, "order", row.order, why, remedy)
        why = f"stores candidates, but fill={cls.name!r} redraws them"
        require("candidates" not in commit.needs, "order", row.order, why, remedy)
        why = "ends with EOS, which ignore_eos bans"
        require(not row.ignore_eos, "structure", UNSET, why, "remove one of them")
        why = f"depends on draws of single tokens, but fill={cls.name!r} draws them jointly"
        refuse_memory(row, why)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        arcs = automaton_of(row).arcs
        classes, labels = arcs.is_member_CK.shape
        is_small = arcs.is_member_CK.size <= _MOST_MEMBERS and arcs.next_DS.size <= _MOST_ARCS
        why = f"has {labels} sets of {classes} classes of ids, too many for fill={cls.name!r}"
        remedy = "use fill='parallel', or a shorter structure"
        require(is_small, "structure", UNSET, why, remedy, "fill")

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Constrained:
        return cls(stack_arcs([automaton_of(row) for row in rows]))

    def propose(self, fill: FillInput) -> FillOutput:
        """The independently drawn candidates if they match, otherwise a jointly drawn match."""
        out, seen = self._read(fill)
        places = self._places(fill, out.proposal.tokens_BL, seen)
        arc_wait_BLD, class_wait_BLC = self._arrivals(fill, places)
        rows_B = jnp.arange(self.arcs.start.size)

        def forth(states: tuple[jax.Array, ...], at_one: Any) -> Any:
            # The state of the drawn match and that of the independent candidates, which are
            # followed up to the first hole that is not filled, and whether they match.
            drawn_B, own_B, fits_B, is_known_B = states
            behind_BS, wait_BD, at = at_one
            arc_B, next_B = self._next(drawn_B, behind_BS, wait_BD, at.label_BLK)
            arc_BD, next_BD = self._leaving(own_B)
            leads_BD = self.arcs.is_member_CK[rows_B[:, None], at.class_BL[:, None], arc_BD]
            own_next_B = jnp.max(jnp.where(leads_BD, next_BD, 0), axis=1)
            is_known_B &= ~at.is_wild_BL
            can_match_B = behind_BS[rows_B, own_next_B] > -jnp.inf
            can_match_B = jnp.where(is_known_B, can_match_B, ~at.is_open_BL)
            states = (
                jnp.where(at.is_text_BL, next_B, drawn_B),
                jnp.where(at.is_text_BL, own_next_B, own_B),
                fits_B & (can_match_B | ~at.is_text_BL),
                is_known_B,
            )
            return states, arc_B

        wait_LBD, at_L = jax.tree.map(lambda x_BL: x_BL.swapaxes(0, 1), (arc_wait_BLD, places))
        begin = self.arcs.start, self.arcs.start, rows_B >= 0, rows_B >= 0
        by_place = self._messages(places), wait_LBD, at_L
        (_, _, fits_B, _), arc_LB = jax.lax.scan(forth, begin, by_place)
        is_new_BL, drawn = places.is_open_BL & ~fits_B[:, None], out.proposal
        new_BL = self._of_arcs(seen, arc_LB.T, class_wait_BLC)
        return out._replace(
            proposal=drawn._replace(
                tokens_BL=jnp.where(is_new_BL, new_BL[0], drawn.tokens_BL),
                logprob_BL=jnp.where(is_new_BL, new_BL[1], drawn.logprob_BL),
                confidence_BL=jnp.where(is_new_BL, new_BL[2], drawn.confidence_BL),
            )
        )

    def _read(self, fill: FillInput) -> tuple[FillOutput, Seen]:
        """Independent candidates of the LM head, and the `Seen` of each open position."""
        first_BC = self._first_blocks()

        def draw(
            carry: tuple[FillOutput, Seen], places_N: jax.Array, is_real_N: jax.Array
        ) -> tuple[FillOutput, Seen]:
            out, seen = carry
            clean_NV = fill.logits(places_N)
            new = self._see(fill, first_BC, places_N, is_real_N, clean_NV)
            out = fill.draw(out, places_N, is_real_N, clean_NV)
            return out, put(seen, places_N, is_real_N, new)

        num_classes = self.arcs.is_member_CK.shape[1]
        each_BLC = jnp.zeros((*fill.is_open_BL.shape, num_classes), jnp.float32)
        none = Seen(each_BLC, jnp.zeros(each_BLC.shape, jnp.int32), each_BLC, each_BLC)
        return fold(fill.is_read_BL, fill.chunk, draw, (fill.start(), none))

    def _first_blocks(self) -> jax.Array:
        """Index of the first block of each class, ``[B, C]``."""
        class_1C = jnp.arange(self.arcs.is_member_CK.shape[1])[None]
        return jnp.sum(self.arcs.class_M[:, :, None] < class_1C[:, None], axis=1)

    def _see(
        self,
        fill: FillInput,
        first_BC: jax.Array,
        places_N: jax.Array,
        is_real_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None = None,
    ) -> Seen:
        """The `Seen` of the positions of a chunk, ``[N, ...]``; see `FillInput.draw`."""
        at = fill.at(places_N, is_real_N)
        row_N, key_N = at.row_N, at.key_N
        clean_NV = clean_NV.astype(jnp.float32)
        from_NV = clean_NV if drawable_NV is None else drawable_NV
        final_NV = fill.chain.apply(fill.chain_state, from_NV, at)
        is_greedy_N = fill.chain.is_greedy(at)
        ids_NJM, class_NM = self.arcs.ids_JM[row_N], self.arcs.class_M[row_N]
        left_NJM = _of_ids(final_NV, ids_NJM)
        weight_NC, block_NC = _by_sums(left_NJM, class_NM, first_BC[row_N], key_N)
        is_class_NC = jnp.any(self.arcs.is_member_CK, axis=2)[row_N]
        is_small_N = jnp.any(is_class_NC & (weight_NC < _LEAST), axis=1) | is_greedy_N
        is_small_N &= is_real_N

        def member_of(logits_NJM: jax.Array, block_NC: jax.Array) -> jax.Array:
            score_NJC = _take(logits_NJM, block_NC[:, None, :], axis=2)
            wait_NJ = _waits(salted(key_N, _MEMBER), score_NJC.shape[1])
            score_NJC -= jnp.where(is_greedy_N[:, None], 0.0, wait_NJ)[:, :, None]
            # The index of the maximum; faster on CPU than comparing pairs.
            is_most_NJC = score_NJC == jnp.max(score_NJC, axis=1, keepdims=True)
            last = score_NJC.shape[1] - 1
            each_1J1 = jnp.arange(last + 1)[None, :, None]
            return jnp.min(jnp.where(is_most_NJC, each_1J1, last), axis=1)

        def small() -> tuple[jax.Array, jax.Array, jax.Array]:
            below_NJM = jnp.maximum(_of_ids(clean_NV, ids_NJM), -_CUT) - _CUT
            is_cut_NJM = (ids_NJM >= 0) & ~(left_NJM > -jnp.inf) & is_small_N[:, None, None]
            all_NJM = jnp.where(is_cut_NJM, below_NJM, left_NJM)
            exact = _by_peaks(all_NJM, class_NM, key_N, is_greedy_N, weight_NC.shape[1])
            exact_NC = jnp.where(is_small_N[:, None], exact[0], weight_NC)
            place_NC = jnp.where(is_small_N[:, None], exact[1], block_NC)
            return exact_NC, place_NC, member_of(all_NJM, place_NC)

        # The results of the conditional are kept small, because its operands are copied.
        weight_NC, block_NC, member_NC = jax.lax.cond(
            jnp.any(is_small_N),
            small,
            lambda: (weight_NC, block_NC, member_of(left_NJM, block_NC)),
        )
        place_NC = member_NC * class_NM.shape[1] + block_NC
        ids_NC = jnp.maximum(_take(ids_NJM.reshape(row_N.size, -1), place_NC, axis=1), 0)
        logprob_NC, confidence_NC = jax.vmap(
            lambda ids_N: fill.score_ids(clean_NV, ids_N, at, drawable_NV)[:2],
            in_axes=1,
            out_axes=1,
        )(ids_NC)
        return Seen(weight_NC, ids_NC, logprob_NC, confidence_NC)

    def _labels(self, weight_BLC: jax.Array, takes_best_BL: jax.Array) -> jax.Array:
        """Log-weight of each label, ``[B, L, K]``: the log of the sum or maximum of its classes."""
        peak_BL1 = _finite(jnp.max(weight_BLC, axis=2, keepdims=True))
        share_BLC = jnp.exp(weight_BLC - peak_BL1)
        member_BCK = self.arcs.is_member_CK.astype(jnp.float32)
        sum_BLK = jnp.einsum("blc,bck->blk", share_BLC, member_BCK, precision="highest")
        label_BLK = peak_BL1 + jnp.log(sum_BLK)
        is_label_B1K = jnp.any(self.arcs.is_member_CK, axis=1, keepdims=True)
        is_small_BL = jnp.any(is_label_B1K & (sum_BLK < math.exp(_LEAST)), axis=2) | takes_best_BL

        def of_row(at_row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            weight_LC, is_member_CK, takes_best_L = at_row
            each_LCK = jnp.where(is_member_CK[None], weight_LC[:, :, None], -jnp.inf)
            return _total(each_LCK, takes_best_L[:, None])

        def small() -> jax.Array:
            exact_BLK = jax.lax.map(of_row, (weight_BLC, self.arcs.is_member_CK, takes_best_BL))
            return jnp.where(is_small_BL[:, :, None], exact_BLK, label_BLK)

        return jax.lax.cond(jnp.any(is_small_BL), small, lambda: label_BLK)

    def _arrivals(self, fill: FillInput, places: Places) -> tuple[jax.Array, jax.Array]:
        """Arrival times (`_waits`) of arcs, ``[B, L, D]``, and classes, ``[B, L, C]``."""
        place_P = jnp.arange(places.is_open_BL.size)
        key_P = fill.at(place_P, place_P >= 0).key_N

        def waits(salt: int, size: int) -> jax.Array:
            wait_BLX = _waits(salted(key_P, salt), size).reshape(*places.is_open_BL.shape, size)
            return jnp.where(places.takes_best_BL[:, :, None], 0.0, wait_BLX)

        degree, num_classes = self.arcs.next_DS.shape[1], self.arcs.is_member_CK.shape[1]
        return waits(_ARC, degree), waits(_LABEL, num_classes)

    def _of_arcs(
        self, seen: Seen, arc_BL: jax.Array, wait_BLC: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A token with the drawn label at each position, its log-probability and confidence."""
        has_BCL = _take(self.arcs.is_member_CK, arc_BL[:, None, :], axis=2)
        score_BLC = jnp.where(has_BCL.swapaxes(1, 2), seen.weight - wait_BLC, -jnp.inf)
        class_BL1 = place_of_largest(score_BLC)[:, :, None]
        _, *drawn = (_take(x, class_BL1, axis=2)[:, :, 0] for x in seen)
        return drawn[0], drawn[1], drawn[2]

    def _places(self, fill: FillInput, drawn_BL: jax.Array, seen: Seen) -> Places:
        """The `Places` of the canvas, with the candidates at the open positions."""
        num_rows, num_positions = fill.is_open_BL.shape
        assert fill.is_given_BL is not None, "the step passes the given tokens"
        begin_B1 = place_of_largest(~fill.is_given_BL)[:, None]
        is_text_BL = jnp.arange(num_positions)[None] >= begin_B1
        is_text_BL &= live_positions(fill.length_B, num_positions)
        is_open_BL = fill.is_open_BL & is_text_BL
        is_wild_BL = is_text_BL & ~is_open_BL & ~fill.is_seen_BL
        # A token follows the arcs whose label contains its class. A hole that the step does not
        # fill follows all arcs.
        token_BL = jnp.where(is_open_BL, drawn_BL, fill.tokens_BL)
        token_BL = jnp.clip(token_BL, 0, self.arcs.class_of_V.shape[1] - 1)
        class_BL = _take(self.arcs.class_of_V, token_BL, axis=1).astype(jnp.int32)
        has_BLK = _take(self.arcs.is_member_CK, class_BL[:, :, None], axis=1)
        is_label_B1K = jnp.any(self.arcs.is_member_CK, axis=1, keepdims=True)
        stands_BLK = jnp.where(is_wild_BL[:, :, None], is_label_B1K, has_BLK)
        rows_B = jnp.arange(num_rows)
        is_greedy_B1 = fill.chain.is_greedy(At(rows_B, rows_B, fill.key_B, rows_B >= 0))[:, None]
        label_BLK = self._labels(seen.weight, is_open_BL & is_greedy_B1)
        stands_BLK = jnp.where(stands_BLK, 0.0, -jnp.inf)
        label_BLK = jnp.where(is_open_BL[:, :, None], label_BLK, stands_BLK)
        takes_best_BL = ~is_open_BL | is_greedy_B1
        return Places(
            is_open_BL=is_open_BL,
            is_text_BL=is_text_BL,
            is_wild_BL=is_wild_BL,
            takes_best_BL=takes_best_BL,
            class_BL=class_BL,
            label_BLK=label_BLK,
        )

    def _messages(self, places: Places) -> jax.Array:
        """Log-weight of the paths from each state after each position to the end, ``[L, B, S]``, up
        to a constant per row and position.
        """
        num_rows, degree, num_states = self.arcs.next_DS.shape
        next_BI, arc_BI = (x.reshape(num_rows, -1) for x in (self.arcs.next_DS, self.arcs.label_DS))

        def back(behind_BS: jax.Array, at_one: Any) -> tuple[jax.Array, jax.Array]:
            label_BK, takes_best_B, is_text_B = at_one
            each_BI = _take(label_BK, arc_BI, axis=1) + _take(behind_BS, next_BI, axis=1)
            now_BS = _total(each_BI.reshape(num_rows, degree, num_states), takes_best_B[:, None])
            now_BS -= _finite(jnp.max(now_BS, axis=1))[:, None]
            return jnp.where(is_text_B[:, None], now_BS, behind_BS), behind_BS

        by_place = places.label_BLK.swapaxes(0, 1), places.takes_best_BL.T, places.is_text_BL.T
        end_BS = jnp.where(self.arcs.is_final_S, 0.0, -jnp.inf)
        return jax.lax.scan(back, end_BS, by_place, reverse=True)[1]

    def _leaving(self, state_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The labels and the target states of the arcs of each row's state, ``[B, D]``."""
        rows_B = jnp.arange(state_B.size)
        return self.arcs.label_DS[rows_B, :, state_B], self.arcs.next_DS[rows_B, :, state_B]

    def _next(
        self, state_B: jax.Array, behind_BS: jax.Array, wait_BD: jax.Array, label_BK: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The label of the arc drawn at a position of each row, and its target state, ``[B]``."""
        arc_BD, next_BD = self._leaving(state_B)
        weight_BD = _take(label_BK, arc_BD, axis=1) + _take(behind_BS, next_BD, axis=1)
        at_B1 = place_of_largest(weight_BD - wait_BD)[:, None]
        return _take(arc_BD, at_B1, axis=1)[:, 0], _take(next_BD, at_B1, axis=1)[:, 0]


class Places(NamedTuple):
    """The inputs of the walks over the automaton, ``[B, L]``."""

    is_open_BL: jax.Array
    is_text_BL: jax.Array
    is_wild_BL: jax.Array  # holes in the text that the step does not fill
    takes_best_BL: jax.Array  # the maximum over paths is used instead of the sum
    class_BL: jax.Array
    label_BLK: jax.Array  # log-weight of each label; 0 or -inf at tokens


def _of_ids(logits_NV: jax.Array, ids_NJM: jax.Array) -> jax.Array:
    """The logits of each id relative to the largest; -inf where `ids_NJM` is -1."""
    logits_NI = _take(logits_NV, jnp.maximum(ids_NJM, 0).reshape(len(ids_NJM), -1), axis=1)
    logits_NJM = jnp.where(ids_NJM >= 0, logits_NI.reshape(ids_NJM.shape), -jnp.inf)
    peak_N = jnp.max(logits_NJM, axis=(1, 2))
    return logits_NJM - _finite(peak_N)[:, None, None]


def _by_sums(
    logits_NJM: jax.Array, class_NM: jax.Array, first_NC: jax.Array, key_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The log-weight of each class of ids, accurate above `_LEAST`, and a block of the class, drawn
    by weight; ``[N, C]`` each.
    """
    num_blocks = class_NM.shape[1]
    share_NM = jnp.sum(jnp.exp(logits_NJM), axis=1)

    def add(upto_N: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        share_N, is_first_N = block
        upto_N = jnp.where(is_first_N, share_N, upto_N + share_N)
        return upto_N, upto_N

    by_block = share_NM.T, (class_NM != left_of(class_NM, -1)).T
    upto_NM = jax.lax.scan(add, jnp.zeros_like(share_NM[:, 0]), by_block, unroll=8)[1].T
    end_NC = right_of(first_NC, num_blocks)
    last_NC = jnp.clip(end_NC - 1, 0, num_blocks - 1)
    sum_NC = jnp.where(first_NC < end_NC, _take(upto_NM, last_NC, axis=1), 0.0)
    bits_N = jax.vmap(jax.random.bits)(salted(key_N, _CLASS)).astype(jnp.float32)
    target_NC = jnp.minimum(bits_N * 2.0**-32, 1.0 - 2.0**-23)[:, None] * sum_NC
    # A binary search finds the class's first block whose cumulative sum exceeds the target.
    low_NC, high_NC = jnp.minimum(first_NC, last_NC), last_NC
    for _ in range(num_blocks.bit_length()):
        middle_NC = (low_NC + high_NC) // 2
        is_below_NC = _take(upto_NM, middle_NC, axis=1) <= target_NC
        low_NC = jnp.where(is_below_NC, jnp.minimum(middle_NC + 1, high_NC), low_NC)
        high_NC = jnp.where(is_below_NC, high_NC, middle_NC)
    return jnp.log(sum_NC), low_NC


def _by_peaks(
    logits_NJM: jax.Array,
    class_NM: jax.Array,
    key_N: jax.Array,
    is_greedy_N: jax.Array,
    num_classes: int,
) -> tuple[jax.Array, jax.Array]:
    """Like `_by_sums`, but relative to the peak of each class; greedy rows take the most likely
    block.
    """
    num_places, _, num_blocks = logits_NJM.shape
    place_N1 = jnp.arange(num_places)[:, None]
    is_greedy_N1 = is_greedy_N[:, None]

    def most(score_NM: jax.Array) -> jax.Array:
        none_NC = jnp.full((num_places, num_classes), -jnp.inf)
        return none_NC.at[place_N1, class_NM].max(score_NM, mode="promise_in_bounds")

    block_NM = _total(logits_NJM, is_greedy_N1)
    peak_NC = most(block_NM)
    share_NM = jnp.exp(block_NM - _finite(_take(peak_NC, class_NM, axis=1)))
    sum_NC = jnp.zeros(peak_NC.shape).at[place_N1, class_NM].add(share_NM, mode="promise_in_bounds")
    weight_NC = jnp.where(is_greedy_N1, peak_NC, peak_NC + jnp.log(sum_NC))
    wait_NM = _waits(salted(key_N, _CLASS), num_blocks)
    score_NM = block_NM - jnp.where(is_greedy_N1, 0.0, wait_NM)
    is_most_NM = score_NM == _take(most(score_NM), class_NM, axis=1)
    number_1M = jnp.arange(num_blocks)[None]
    block_NC = (
        jnp.full(peak_NC.shape, num_blocks - 1)
        .at[place_N1, class_NM]
        .min(jnp.where(is_most_NM, number_1M, num_blocks - 1))
    )
    return weight_NC, block_NC


def _total(each_NKX: jax.Array, takes_best_NX: jax.Array) -> jax.Array:
    """Log-sum-exp or maximum over the middle axis; -inf if all entries are -inf."""
    peak_NX = jnp.max(each_NKX, axis=1)
    total_NX = jnp.sum(jnp.exp(each_NKX - _finite(peak_NX)[:, None]), axis=1)
    return jnp.where(takes_best_NX, peak_NX, peak_NX + jnp.log(total_NX))


def _take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Entries along an axis, without bounds checks, which would double the cost of the reads."""
    return jnp.take_along_axis(x, index, axis=axis, mode="promise_in_bounds")


def _finite(peak: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def _waits(key_N: jax.Array, size: int) -> jax.Array:
    """Logarithms of exponential arrival times, from 64 random bits each. Divided by weights ``w``,
    entry i comes first with probability ``w_i / sum(w)``.
    """
    bits_NK2 = jax.vmap(lambda key: jax.random.bits(key, (size, 2)))(key_N).astype(jnp.float32)
    uniform_NK = bits_NK2[..., 0] * 2.0**-32 + bits_NK2[..., 1] * 2.0**-64
    return jnp.log(-jnp.log1p(-jnp.minimum(uniform_NK, 1.0 - 2.0**-24)))
