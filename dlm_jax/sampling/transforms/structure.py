"""A logit transform that restricts a row's text to a regular language.

A candidate is allowed if the other holes can be filled such that the whole text is in the language.
Sets of states are propagated from the left over possible prefixes and from the right over possible
suffixes (Rabin and Scott 1959, subsets of a finite automaton). Tokens can therefore be committed in
any order, as long as each step commits one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling.positions import place_of_largest
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.settings import UNSET, Setting, SettingError, per_row, rule
from dlm_jax.structured.automaton import Arcs, Automaton, stack_arcs

_AT_ONCE = 16

_without = lru_cache(maxsize=64)(Automaton.without)


def automaton_of(row: Any) -> Automaton:
    """The automaton of a row with a structure, without the ids banned by the row's biases."""
    banned = frozenset(token for token, bias in row.logit_bias if bias == -math.inf)
    return _without(row.structure, banned) if banned else row.structure


def _parse(value: Any) -> Any:
    if not isinstance(value, str | Automaton):
        raise SettingError("structure", value, "is not a regular expression", "pass it as a string")
    return value


STRUCTURE = Setting(
    "structure",
    "",
    "regular expression that the whole new text matches; a recommended ignore_eos no longer holds "
    "beside it",
    parse=_parse,
    resets=("ignore_eos",),
)


@rule
class Structure(LogitTransform):
    """Keeps the ids that can still lead to a text in the row's language.

    The text starts after the row's given prefix. The restriction is exact if each step commits one
    token per row, in any order. `check_structure` of `dlm_jax.inference.request` rejects other
    requests.

    Attributes:
      arcs: the automata of the rows; start state 0 (the dead state) for rows without structure.
    """

    arcs: Arcs = per_row(STRUCTURE)

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.structure != ""

    @classmethod
    def check(cls, row: Any) -> None:
        if not cls.is_used(row):
            return
        if row.refines:
            raise SettingError(
                "structure",
                UNSET,
                "requires tokens that do not change",
                "disable edit, remask, resample and renoise",
            )
        if row.ignore_eos:
            raise SettingError(
                "structure", UNSET, "ends with EOS, which ignore_eos bans", "remove one of them"
            )
        if row.fill == "speculative":
            raise SettingError(
                "structure", UNSET, "requires one token per step", "use fill='parallel'"
            )

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Structure:
        return cls(stack_arcs([row.structure for row in rows]))

    def is_active(self) -> Array:
        return self.arcs.start > 0

    def prepare(self, state: Any, context: Context) -> tuple[Array, Array]:
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

        def follows(class_B: Array, is_hole_B: Array) -> Array:
            """True for the arcs that a token of this class, or any token at a hole, follows."""
            has_BK = is_member_BCK[rows_B, class_B] | is_hole_B[:, None]
            has_BI = jnp.take_along_axis(has_BK, label_BDS.reshape(num_rows, -1), axis=1)
            return has_BI.reshape(next_BDS.shape) & (next_BDS > 0)

        def forth(before_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at
            leaves_BDS = follows(class_B, is_hole_B) & before_BS[:, None]
            now_BS = jnp.zeros_like(before_BS)
            now_BS = now_BS.at[rows_B[:, None], next_BI].max(leaves_BDS.reshape(num_rows, -1))
            return jnp.where(is_text_B[:, None], now_BS, before_BS), before_BS

        def back(behind_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at
            ends_BDS = jnp.take_along_axis(behind_BS, next_BI, axis=1).reshape(next_BDS.shape)
            now_BS = jnp.any(follows(class_B, is_hole_B) & ends_BDS, axis=1)
            return jnp.where(is_text_B[:, None], now_BS, behind_BS), behind_BS

        by_place = (class_BL.T, is_text_BL.T, is_hole_BL.T)
        first_BS = jnp.arange(num_states)[None] == self.arcs.start[:, None]
        first_BS = first_BS & self.is_active()[:, None]
        _, before_LBS = jax.lax.scan(forth, first_BS, by_place)
        _, behind_LBS = jax.lax.scan(back, self.arcs.is_final_S, by_place, reverse=True)
        return jnp.moveaxis(before_LBS, 0, 1), jnp.moveaxis(behind_LBS, 0, 1)

    def apply(self, prepared: tuple[Array, Array], logits_NV: Array, at: At) -> Array:
        next_BDS, label_BDS, is_member_BCK, class_of_BV, *_ = self.arcs
        before_NS, behind_NS = (states_BLS[at.row_N, at.index_N] for states_BLS in prepared)

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
