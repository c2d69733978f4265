"""An automaton over tokens that restricts a row's text to a regular language.

A candidate is kept if the other holes can be filled such that the whole text is in the language.
Sets of states are propagated from the left over possible prefixes and from the right over possible
suffixes (Rabin and Scott 1959, subsets of a finite automaton). Tokens can therefore be committed in
any order, as long as each step commits one token. For fast reductions, sets are packed into words
of 32 states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling.positions import place_of_largest
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.settings import UNSET, Setting, SettingError, per_row, rule

_PLACES = np.arange(32, dtype=np.uint32)


def word_of(state_BS: Array, num_words: int) -> Array:
    """The set that contains only the state of each entry, in words of 32, ``[B, S, W]``."""
    bit_BS1 = jnp.uint32(1) << (state_BS[:, :, None] % 32).astype(jnp.uint32)
    is_there_BSW = state_BS[:, :, None] // 32 == jnp.arange(num_words)[None, None]
    return jnp.where(is_there_BSW, bit_BS1, jnp.uint32(0))


def packed(is_in_BS: Array) -> Array:
    """Sets of states, packed into words of 32, ``[B, W]``."""
    padded_BP = jnp.pad(is_in_BS, ((0, 0), (0, -is_in_BS.shape[1] % 32)))
    bits_BW32 = padded_BP.reshape(padded_BP.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits_BW32 << _PLACES[None, None], axis=2, dtype="uint32")


def any_of(is_in_BS: Array, words_BSW: Array) -> Array:
    """The union of the sets where `is_in_BS` is True, ``[B, W]``."""
    kept_BSW = jnp.where(is_in_BS[:, :, None], words_BSW, jnp.uint32(0))
    return jax.lax.reduce(kept_BSW, jnp.uint32(0), jax.lax.bitwise_or, (1,))


def unpacked(words_BW: Array, num_states: int) -> Array:
    """The inverse of `packed`: sets as bool ``[B, S]``."""
    bits_BWK = (words_BW[:, :, None] >> _PLACES[None, None]) & jnp.uint32(1)
    return bits_BWK.reshape(words_BW.shape[0], -1)[:, :num_states].astype(bool)


# The smallest sizes fit most schemas, which therefore share a program.
_STATE_SIZES = tuple(2**power for power in range(7, 13))
_CLASS_SIZES = tuple(2**power for power in range(6, 15))
_AT_ONCE = 16
_MOST_REDUCED = 512


class Arcs(NamedTuple):
    """An automaton as arcs. One arc represents all classes of ids that lead from a state to the
    same next state.

    Attributes:
      next_DS: int32 ``[D, S]``, target of each arc that leaves a state; padded with 0.
      label_DS: int32, label of each arc; padded with 0, the label without classes.
      is_member_CK: bool ``[C, K]``, True where a class belongs to a label.
      ids_JM: int32 ``[J, M]``, ids of all classes except class 0, in ascending order within each
        class. The ids are divided into M blocks of up to J ids of the same class, padded with -1.
      class_M: int32, the class of each block.
    """

    next_DS: np.ndarray
    label_DS: np.ndarray
    is_member_CK: np.ndarray
    ids_JM: np.ndarray
    class_M: np.ndarray


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over the ids of a vocabulary.

    State 0 is dead, and class 0 contains the ids without any transition. From a final state, EOS
    leads to a state that accepts only EOS.

    Attributes:
      pattern: regular expression of the language.
      class_of_V: int16 ``[V]``, class of each id. All ids in a class have the same transitions.
      next_SC: int16 ``[S, C]``, next state for each class.
      is_final_S: bool ``[S]``, True where a text can end.
      start: state before the first id.
    """

    pattern: str
    class_of_V: np.ndarray
    next_SC: np.ndarray
    is_final_S: np.ndarray
    start: int

    def __repr__(self) -> str:
        return f"Automaton({self.pattern!r})"

    @cached_property
    def leads_SS(self) -> np.ndarray:
        """True where some id leads from one live state to another."""
        leads = np.zeros((len(self.next_SC),) * 2, bool)
        leads[np.arange(len(leads))[:, None], self.next_SC] = True
        leads[:, 0] = leads[0] = False
        return leads

    @cached_property
    def fewest_S(self) -> np.ndarray:
        """Minimum number of ids from each state to the end of a text; a large number if no end is
        reachable.
        """
        fewest = np.where(self.is_final_S, 0, np.iinfo(np.int32).max)
        reached, count = np.flatnonzero(self.is_final_S), 0
        while reached.size:  # each state once, so the time grows with the number of pairs of states
            count += 1
            is_new = self.leads_SS[:, reached].any(1) & (fewest > count)
            fewest[is_new] = count
            reached = np.flatnonzero(is_new)
        return fewest

    @cached_property
    def arcs(self) -> Arcs:
        """The automaton's arcs, and the ids in its classes."""
        num_classes = self.next_SC.shape[1]
        labels: dict[bytes, int] = {bytes(num_classes): 0}
        arcs: list[list[tuple[int, int]]] = []
        for next_C in self.next_SC:
            classes = {int(state): next_C == state for state in np.unique(next_C) if state}
            arcs.append(
                [
                    (state, labels.setdefault(is_in_C.tobytes(), len(labels)))
                    for state, is_in_C in classes.items()
                ]
            )
        pairs_SD2 = np.zeros((len(arcs), max(1, *map(len, arcs)), 2), np.int32)
        for state, found in enumerate(arcs):
            pairs_SD2[state, : len(found)] = np.reshape(found, (-1, 2))
        # About the square root of the vocabulary size, because a draw reads the sums of all blocks
        # and the ids of one block.
        size = 1 << (max(len(self.class_of_V), 1 << 10).bit_length() - 1) // 2
        blocks, classes_of = [np.full((1, size), -1)], [0]
        for class_ in range(1, num_classes):
            (ids,) = np.nonzero(self.class_of_V == class_)
            padded = np.pad(ids, (0, -ids.size % size), constant_values=-1)
            blocks.append(padded.reshape(-1, size))
            classes_of += [class_] * len(blocks[-1])
        is_member_KC = np.frombuffer(b"".join(labels), bool).reshape(-1, num_classes)
        return Arcs(
            pairs_SD2[..., 0].T,
            pairs_SD2[..., 1].T,
            is_member_KC.T,
            np.concatenate(blocks).T.astype(np.int32),
            np.array(classes_of, np.int32),
        )

    def without(self, ids: frozenset[int]) -> Automaton:
        """The automaton without these ids."""
        class_of_V = self.class_of_V.copy()
        class_of_V[sorted(ids)] = 0
        next_SC = self.next_SC.copy()
        next_SC[:, ~np.isin(np.arange(next_SC.shape[1]), class_of_V)] = 0
        return dataclasses.replace(self, class_of_V=class_of_V, next_SC=next_SC)

    def after(self, states_S: np.ndarray, token: int | None) -> np.ndarray:
        """The states reached with the given id, or with any id if it is None."""
        if token is None:
            return np.any(self.leads_SS[states_S], axis=0, keepdims=False).reshape(-1)
        found = np.zeros_like(states_S)
        found[self.next_SC[states_S, self.class_of_V[token]]] = True
        found[0] = False
        return found

    def accepts(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """True if the ids are a text in the language, optionally followed by EOS."""
        state = self.start
        for token in tokens:
            state = int(self.next_SC[state, self.class_of_V[token]])
        return bool(self.is_final_S[state])


_without = lru_cache(maxsize=64)(Automaton.without)


def held(row: Any) -> Automaton:
    """The automaton of a row with a structure, without the ids banned by the row's biases."""
    banned = frozenset(token for token, bias in row.logit_bias if bias == -math.inf)
    return _without(row.structure, banned) if banned else row.structure


def _checked(value: Any) -> Any:
    if not isinstance(value, str | Automaton):
        raise SettingError("structure", value, "is not a regular expression", "pass it as a string")
    return value


STRUCTURE = Setting(
    "structure",
    "",
    "regular expression or GBNF grammar that the whole new text matches; a recommended ignore_eos "
    "no longer holds beside it",
    parse=_checked,
    resets=("ignore_eos",),
    aliases=("guided_regex",),
)


def _no_column(rows: Sequence[Any]) -> Any:
    raise AssertionError("`Structure.columns` makes all columns")


@rule
class Structure(LogitTransform):
    """Keeps the ids that can still lead to a text in the row's language.

    The text starts after the row's given prefix. The restriction is exact if each step commits one
    token per row, in any order. `dlm_jax.inference.structure` rejects other requests.

    Attributes:
      class_of_BV: int16, see `Automaton`.
      next_BCS: int16, see `Automaton`, transposed and padded with the dead state.
      leads_BSW: uint32, `Automaton.leads_SS` in words of 32 states.
      is_final_BS: see `Automaton`.
      start_B: int32 start state; 0 (the dead state) for rows without structure.
    """

    class_of_BV: Array = per_row(STRUCTURE, column=_no_column)
    next_BCS: Array = per_row(STRUCTURE, column=_no_column)
    leads_BSW: Array = per_row(STRUCTURE, column=_no_column)
    is_final_BS: Array = per_row(STRUCTURE, column=_no_column)
    start_B: Array = per_row(STRUCTURE, column=_no_column)

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

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Structure:
        """The automata of the rows, padded to limit the number of compiled programs."""
        automata = [row.structure for row in rows]
        states = _padded(max(len(a.next_SC) for a in automata), _STATE_SIZES)
        classes = _padded(max(a.next_SC.shape[1] for a in automata), _CLASS_SIZES)
        next_BCS = np.zeros((len(rows), classes, states), np.int16)
        leads_BSS = np.zeros((len(rows), states, states), bool)
        is_final_BS = np.zeros((len(rows), states), bool)
        for place, a in enumerate(automata):
            size, width = a.next_SC.shape
            next_BCS[place, :width, :size] = a.next_SC.T
            leads_BSS[place, :size, :size] = a.leads_SS
            is_final_BS[place, :size] = a.is_final_S
        words = np.packbits(leads_BSS, axis=2, bitorder="little")
        padded = np.pad(words, ((0, 0), (0, 0), (0, -words.shape[2] % 4)))
        columns: Any = (
            np.stack([a.class_of_V for a in automata]),
            next_BCS,
            np.ascontiguousarray(padded).view(np.uint32),
            is_final_BS,
            np.array([a.start for a in automata], np.int32),
        )
        return cls(*columns)

    def is_active(self) -> Array:
        return self.start_B > 0

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
        tokens_BL = jnp.clip(tokens_BL, 0, self.class_of_BV.shape[1] - 1)
        class_BL = jnp.take_along_axis(self.class_of_BV, tokens_BL, axis=1).astype(jnp.int32)
        num_states = self.next_BCS.shape[2]

        def next_BS(class_B: Array) -> Array:
            return self.next_BCS[rows_B, class_B].astype(jnp.int32)

        def told(before_BS: Array, class_B: Array) -> Array:
            return jnp.zeros_like(before_BS).at[rows_B[:, None], next_BS(class_B)].max(before_BS)

        def forth(before_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at
            # On CPU, scattering the states takes three times as long as reducing their words if
            # there are at most `_MOST_REDUCED` states. The cost of the reduction grows with the
            # square of the number of states.
            if num_states <= _MOST_REDUCED:
                words_BW = _by_row(
                    is_hole_B,
                    lambda: self.leads_BSW,
                    lambda: word_of(next_BS(class_B), self.leads_BSW.shape[2]),
                    lambda leads_BSW: any_of(before_BS, leads_BSW),
                )
            else:
                words_BW = _by_row(
                    is_hole_B,
                    lambda: any_of(before_BS, self.leads_BSW),
                    lambda: packed(told(before_BS, class_B)),
                )
            now_BS = unpacked(words_BW, num_states).at[:, 0].set(False)
            return jnp.where(is_text_B[:, None], now_BS, before_BS), before_BS

        def back(behind_BS: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            class_B, is_text_B, is_hole_B = at
            now_BS = _by_row(
                is_hole_B,
                lambda: jnp.any((self.leads_BSW & packed(behind_BS)[:, None]) != 0, axis=2),
                lambda: jnp.take_along_axis(behind_BS, next_BS(class_B), axis=1),
            )
            return jnp.where(is_text_B[:, None], now_BS, behind_BS), behind_BS

        by_place = (class_BL.T, is_text_BL.T, is_hole_BL.T)
        first_BS = jnp.arange(num_states)[None] == self.start_B[:, None]
        first_BS = first_BS & self.is_active()[:, None]
        _, before_LBS = jax.lax.scan(forth, first_BS, by_place)
        _, behind_LBS = jax.lax.scan(back, self.is_final_BS, by_place, reverse=True)
        return jnp.moveaxis(before_LBS, 0, 1), jnp.moveaxis(behind_LBS, 0, 1)

    def apply(self, prepared: tuple[Array, Array], logits_NV: Array, at: At) -> Array:
        before_NS, behind_NS = (states_BLS[at.row_N, at.index_N] for states_BLS in prepared)

        def of_one() -> Array:
            """For positions with at most one previous state, as in left-to-right decoding."""
            state_N = place_of_largest(before_NS)
            next_NC = self.next_BCS[at.row_N, :, state_N].astype(jnp.int32)
            return jnp.take_along_axis(behind_NS, next_NC, axis=1)

        def of_many() -> Array:
            def one(at_one: tuple[Array, Array, Array]) -> Array:
                row, before_S, behind_S = at_one
                return jnp.any(behind_S[self.next_BCS[row]] & before_S[None], axis=1)

            return jax.lax.map(one, (at.row_N, before_NS, behind_NS), batch_size=_AT_ONCE)

        is_one = jnp.all((jnp.sum(before_NS, axis=1) <= 1) | ~at.is_real_N)
        fits_NC = jax.lax.cond(is_one, of_one, of_many)
        class_NV = self.class_of_BV[at.row_N].astype(jnp.int32)
        fits_NV = jnp.take_along_axis(fits_NC, class_NV, axis=1)
        is_held_N = self.is_active()[at.row_N] & at.is_real_N
        return jnp.where(is_held_N[:, None] & ~fits_NV, -jnp.inf, logits_NV)


def _padded(size: int, sizes: Sequence[int]) -> int:
    return next(s for s in sizes if s >= size)


Make = Callable[[], Array]


def _by_row(
    is_yes_B: Array, yes: Make, no: Make, then: Callable[[Array], Array] = lambda made: made
) -> Array:
    """Selects one of two branches for each row. A branch that no row selects is not computed."""

    def both() -> Array:
        made = yes()
        return then(jnp.where(jnp.expand_dims(is_yes_B, range(1, made.ndim)), made, no()))

    kind = jnp.where(is_yes_B.all(), 0, jnp.where(is_yes_B.any(), 2, 1))
    return jax.lax.switch(kind, (lambda: then(yes()), lambda: then(no()), both))


MOST_STATES = _STATE_SIZES[-1]
"""Maximum number of states of an automaton."""
MOST_CLASSES = _CLASS_SIZES[-1]
"""Maximum number of classes of ids in an automaton."""
