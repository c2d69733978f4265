"""A logit transform that restricts a row's text to a regular language.

A candidate is allowed if the other holes can be filled such that the whole text is in the language.
Sets of states are propagated from the left over possible prefixes and from the right over possible
suffixes (Rabin and Scott 1959, subsets of a finite automaton). Tokens can therefore be committed in
any order, as long as each step commits one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling.positions import place_of_largest
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.settings import UNSET, Setting, per_row, require, rule
from dlm_jax.structured.automaton import Arcs, Automaton, stack_arcs

_AT_ONCE = 16
_MOST_REDUCED = 512
_PLACES = np.arange(32, dtype=np.uint32)

_without = lru_cache(maxsize=64)(Automaton.without)


def automaton_of(row: Any) -> Automaton:
    """The automaton of a row with a structure, without the ids banned by the row's biases."""
    banned = frozenset(token for token, bias in row.logit_bias if bias == -math.inf)
    return _without(row.structure, banned) if banned else row.structure


def _parse(value: Any) -> Any:
    is_pattern = isinstance(value, str | Automaton)
    require(is_pattern, "structure", value, "is not a regular expression", "pass it as a string")
    return value


STRUCTURE = Setting(
    "structure",
    "",
    "regular expression that the whole new text matches; a recommended ignore_eos no longer holds "
    "beside it",
    parse=_parse,
    resets=("ignore_eos",),
    aliases=("guided_regex",),
)


@rule
class Structure(LogitTransform):
    """Keeps the ids that can still lead to a text in the row's language.

    The text starts after the row's given prefix. The restriction is exact if each step commits one
    token per row, in any order. `dlm_jax.inference.request.check_canvas` rejects other requests.

    Attributes:
      arcs: the automata of the rows; start state 0 (the dead state) for rows without structure.
    """

    arcs: Arcs = per_row(STRUCTURE)

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.structure != ""

    @classmethod
    def check(cls, row: Any) -> None:
        why, remedy = "requires tokens that do not change", "disable edit, remask and resample"
        require(not row.refines, "structure", UNSET, why, remedy)
        why = "ends with EOS, which ignore_eos bans"
        require(not row.ignore_eos, "structure", UNSET, why, "remove one of them")

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Structure:
        return cls(stack_arcs([row.structure for row in rows]))

    def is_active(self) -> Array:
        return self.arcs.start > 0

    def init(self, context: Context) -> tuple[Array, Array]:
        """The states reachable before each position, and the states after it from which the text
        can end; bool ``[B, L, S]`` each.
        """
        tokens_BL, order_BL, is_visible_BL, length_B = context
        rows_B = jnp.arange(tokens_BL.shape[0])
        place_1L = jnp.arange(tokens_BL.shape[1])[None]
        is_given_BL = is_visible_BL & (order_BL < 0)
        begin_B1 = place_of_largest(~is_given_BL)[:, None]
        is_text_BL = (place_1L >= begin_B1) & (place_1L < length_B[:, None])
        is_hole_BL = is_text_BL & ~is_visible_BL
        next_BDS, label_BDS, is_member_BCK, class_of_BV, *_ = self.arcs
        tokens_BL = jnp.clip(tokens_BL, 0, class_of_BV.shape[1] - 1)
        class_BL = jnp.take_along_axis(class_of_BV, tokens_BL, axis=1).astype(jnp.int32)
        num_rows, _, num_states = next_BDS.shape
        next_BI = next_BDS.reshape(num_rows, -1)
        # On CPU, scattering the states takes three times as long as reducing words of 32 states if
        # there are at most `_MOST_REDUCED` states. The reduction grows with their square.
        is_small = num_states <= _MOST_REDUCED
        leads_BSW = _leads(next_BDS) if is_small else jnp.zeros((0, 0, 0), jnp.uint32)

        def next_BS(class_B: Array) -> Array:
            """The state behind a token of this class for each state before it."""
            has_BI = _take(is_member_BCK[rows_B, class_B], label_BDS.reshape(num_rows, -1))
            return jnp.max(jnp.where(has_BI, next_BI, 0).reshape(next_BDS.shape), axis=1)

        def scatter(before_BI: Array, to_BI: Array) -> Array:
            none_BS = jnp.zeros((num_rows, num_states), bool)
            return none_BS.at[rows_B[:, None], to_BI].max(before_BI)

        def forth(before_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at
            if is_small:
                words_BW = _by_row(
                    is_hole_B,
                    lambda: leads_BSW,
                    lambda: _word_of(next_BS(class_B), leads_BSW.shape[2]),
                    lambda words_BSW: _any_of(before_BS, words_BSW),
                )
                now_BS = _unpack(words_BW, num_states)
            else:
                degree = next_BDS.shape[1]
                now_BS = _by_row(
                    is_hole_B,
                    lambda: scatter(jnp.tile(before_BS, (1, degree)), next_BI),
                    lambda: scatter(before_BS, next_BS(class_B)),
                )
            now_BS = now_BS.at[:, 0].set(False)
            return jnp.where(is_text_B[:, None], now_BS, before_BS), before_BS

        def back(behind_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at

            def before_hole() -> Array:
                if is_small:
                    return jnp.any((leads_BSW & _pack(behind_BS)[:, None]) != 0, axis=2)
                return jnp.any(_take(behind_BS, next_BI).reshape(next_BDS.shape), axis=1)

            now_BS = _by_row(is_hole_B, before_hole, lambda: _take(behind_BS, next_BS(class_B)))
            return jnp.where(is_text_B[:, None], now_BS, behind_BS), behind_BS

        by_place = (class_BL.T, is_text_BL.T, is_hole_BL.T)
        first_BS = jnp.arange(num_states)[None] == self.arcs.start[:, None]
        first_BS = first_BS & self.is_active()[:, None]
        _, before_LBS = jax.lax.scan(forth, first_BS, by_place)
        _, behind_LBS = jax.lax.scan(back, self.arcs.is_final_S, by_place, reverse=True)
        return jnp.moveaxis(before_LBS, 0, 1), jnp.moveaxis(behind_LBS, 0, 1)

    def apply(self, state: tuple[Array, Array], logits_NV: Array, at: At) -> Array:
        next_BDS, label_BDS, is_member_BCK, class_of_BV, *_ = self.arcs
        before_NS, behind_NS = (states_BLS[at.row_N, at.index_N] for states_BLS in state)

        def of_arcs(label_NI: Array, next_NI: Array, leaves_NI: Array) -> Array:
            """The labels of arcs that end in a state from which the text can end, ``[N, K]``."""
            fits_NI = leaves_NI & jnp.take_along_axis(behind_NS, next_NI, axis=1) & (next_NI > 0)
            none_NK = jnp.zeros((len(label_NI), is_member_BCK.shape[2]), bool)
            return none_NK.at[jnp.arange(len(label_NI))[:, None], label_NI].max(fits_NI)

        def of_one() -> Array:
            """For positions with at most one previous state, as in left-to-right decoding."""
            state_N = place_of_largest(before_NS)
            leaves_N1 = jnp.any(before_NS, axis=1)[:, None]
            label_ND, next_ND = label_BDS[at.row_N, :, state_N], next_BDS[at.row_N, :, state_N]
            return of_arcs(label_ND, next_ND, leaves_N1)

        def of_many() -> Array:
            def one(at_one: tuple[Array, Array, Array]) -> Array:
                row, before_S, behind_S = at_one
                fits_DS = before_S[None] & behind_S[next_BDS[row]] & (next_BDS[row] > 0)
                return jnp.zeros(is_member_BCK.shape[2], bool).at[label_BDS[row]].max(fits_DS)

            return jax.lax.map(one, (at.row_N, before_NS, behind_NS), batch_size=_AT_ONCE)

        is_one = jnp.all((jnp.sum(before_NS, axis=1) <= 1) | ~at.is_real_N)
        fits_NK = jax.lax.cond(is_one, of_one, of_many)
        fits_NC = jnp.any(is_member_BCK[at.row_N] & fits_NK[:, None], axis=2)
        class_NV = class_of_BV[at.row_N].astype(jnp.int32)
        fits_NV = jnp.take_along_axis(fits_NC, class_NV, axis=1)
        is_held_N = self.is_active()[at.row_N] & at.is_real_N
        return jnp.where(is_held_N[:, None] & ~fits_NV, -jnp.inf, logits_NV)


def _take(x_BS: Array, index_BI: Array) -> Array:
    return jnp.take_along_axis(x_BS, index_BI, axis=1)


def _leads(next_BDS: Array) -> Array:
    """The states that follow each state, in words of 32, ``[B, S, W]``."""
    num_rows, _, num_states = next_BDS.shape
    rows_B, states_S = jnp.arange(num_rows), jnp.arange(num_states)
    leads_BSS = jnp.zeros((num_rows, num_states, num_states), bool)
    leads_BSS = leads_BSS.at[rows_B[:, None, None], states_S, next_BDS].set(True)
    leads_BSS = leads_BSS.at[:, :, 0].set(False)
    return _pack(leads_BSS.reshape(-1, num_states)).reshape(num_rows, num_states, -1)


def _word_of(state_BS: Array, num_words: int) -> Array:
    """The set that contains only the state of each entry, in words of 32, ``[B, S, W]``."""
    bit_BS1 = jnp.uint32(1) << (state_BS[:, :, None] % 32).astype(jnp.uint32)
    is_there_BSW = state_BS[:, :, None] // 32 == jnp.arange(num_words)[None, None]
    return jnp.where(is_there_BSW, bit_BS1, jnp.uint32(0))


def _pack(is_in_BS: Array) -> Array:
    """Sets of states in words of 32, ``[B, W]``."""
    bits_BW32 = is_in_BS.reshape(is_in_BS.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits_BW32 << _PLACES[None, None], axis=2, dtype="uint32")


def _unpack(words_BW: Array, num_states: int) -> Array:
    """The inverse of `_pack`."""
    bits_BWK = (words_BW[:, :, None] >> _PLACES[None, None]) & jnp.uint32(1)
    return bits_BWK.reshape(words_BW.shape[0], num_states).astype(bool)


def _any_of(is_in_BS: Array, words_BSW: Array) -> Array:
    """The union of the sets where `is_in_BS` is True, ``[B, W]``."""
    kept_BSW = jnp.where(is_in_BS[:, :, None], words_BSW, jnp.uint32(0))
    return jax.lax.reduce(kept_BSW, jnp.uint32(0), jax.lax.bitwise_or, (1,))


def _by_row(
    is_yes_B: Array,
    yes: Callable[[], Array],
    no: Callable[[], Array],
    then: Callable[[Array], Array] = lambda array: array,
) -> Array:
    """Selects one of two branches for each row. A branch that no row selects is not computed."""

    def both() -> Array:
        array = yes()
        return then(jnp.where(jnp.expand_dims(is_yes_B, range(1, array.ndim)), array, no()))

    kind = jnp.where(is_yes_B.all(), 0, jnp.where(is_yes_B.any(), 2, 1))
    return jax.lax.switch(kind, (lambda: then(yes()), lambda: then(no()), both))
