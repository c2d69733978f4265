"""Automata over the tokens of a model, and their one format on the device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from dlm_jax.settings import UNSET, SettingError
from dlm_jax.structured.regex import LONGEST, ByteAutomaton, compile_regex

MOST_STATES = 1 << 12
"""Maximum number of states of an automaton."""
MOST_CLASSES = 1 << 14
"""Maximum number of classes of ids in an automaton."""
_CACHED = 64
_MOST_BYTE_STATES = (1 << 15) - 2
_MOST_EFFECTS = 1 << 25
_MOST_PAIRS = 1 << 31
_MOST_ARCS = 1 << 22
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class Arcs(NamedTuple):
    """Automata as arcs. One arc represents all ids that lead from a state to the same next state.

    On the host the arrays of one automaton; on the device those of a batch, ``[B, ...]``, padded to
    powers of two, which limits the number of compiled programs.

    Attributes:
      next_DS: int32 ``[D, S]``, target of each arc that leaves a state; padded with 0, the dead
        state.
      label_DS: int32, label of each arc; padded with 0, the label without classes.
      is_member_CK: bool ``[C, K]``, True where a class of ids belongs to a label.
      class_of_V: int16 ``[V]``, class of each id; class 0 belongs to no label.
      ids_JM: int32 ``[J, M]``, ids of all classes except class 0, in ascending order within each
        class. The ids are divided into M blocks of up to J ids of the same class, padded with -1.
      class_M: int32, the class of each block.
      is_final_S: bool, True where a text can end.
      start: int32, state before the first id.
    """

    next_DS: jax.Array
    label_DS: jax.Array
    is_member_CK: jax.Array
    class_of_V: jax.Array
    ids_JM: jax.Array
    class_M: jax.Array
    is_final_S: jax.Array
    start: jax.Array


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
        """The automaton as arcs, in host arrays."""
        num_classes = self.next_SC.shape[1]
        labels: dict[bytes, int] = {bytes(num_classes): 0}
        arcs = [
            [
                (state, labels.setdefault((next_C == state).tobytes(), len(labels)))
                for state in np.unique(next_C).tolist()
                if state
            ]
            for next_C in self.next_SC
        ]
        pairs_SD2 = np.zeros((len(arcs), max(1, *map(len, arcs)), 2), np.int32)
        for state, leaving in enumerate(arcs):
            pairs_SD2[state, : len(leaving)] = np.reshape(leaving, (-1, 2))
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
        arrays: dict[str, np.ndarray] = dict(
            next_DS=pairs_SD2[..., 0].T,
            label_DS=pairs_SD2[..., 1].T,
            is_member_CK=is_member_KC.T,
            class_of_V=self.class_of_V,
            ids_JM=np.concatenate(blocks).T.astype(np.int32),
            class_M=np.array(classes_of, np.int32),
            is_final_S=self.is_final_S,
            start=np.array(self.start, np.int32),
        )
        return Arcs(**arrays)  # pyright: ignore[reportArgumentType]

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
        reached_S = np.zeros_like(states_S)
        reached_S[self.next_SC[states_S, self.class_of_V[token]]] = True
        reached_S[0] = False
        return reached_S

    def accepts(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """True if the ids are a text in the language, optionally followed by EOS."""
        state = self.start
        for token in tokens:
            state = int(self.next_SC[state, self.class_of_V[token]])
        return bool(self.is_final_S[state])


def stack_arcs(automata: Sequence[Automaton]) -> Arcs:
    """The arcs of a batch, ``[B, ...]``, in host arrays."""
    arcs = [automaton.arcs for automaton in automata]
    degree = _power(max(a.next_DS.shape[0] for a in arcs), 4)
    states = _power(max(a.next_DS.shape[1] for a in arcs), 32)
    classes = _power(max(a.is_member_CK.shape[0] for a in arcs), 16)
    labels = _power(max(a.is_member_CK.shape[1] for a in arcs), 16)
    blocks = max(len(a.class_M) for a in arcs)
    # The largest number of blocks, which depends on the vocabulary, is rounded up by at most a
    # quarter, or to a multiple of 16.
    step = max(16, 1 << max(0, blocks.bit_length() - 3))
    blocks = -(-blocks // step) * step
    shapes = {
        "next_DS": (degree, states),
        "label_DS": (degree, states),
        "is_member_CK": (classes, labels),
        "ids_JM": (len(arcs[0].ids_JM), blocks),
        "class_M": (blocks,),
        "is_final_S": (states,),
    }
    fills = {"ids_JM": -1, "class_M": classes - 1}
    stacked: dict[str, np.ndarray] = {}
    for name in Arcs._fields:
        arrays = [np.asarray(getattr(a, name)) for a in arcs]
        shape = shapes.get(name, arrays[0].shape)
        stacked[name] = np.full((len(arcs), *shape), fills.get(name, 0), arrays[0].dtype)
        for place, array in enumerate(arrays):
            stacked[name][(place, *map(slice, array.shape))] = array
    return Arcs(**stacked)  # pyright: ignore[reportArgumentType]


def _power(size: int, least: int) -> int:
    """The smallest power of two that is at least as large as both."""
    return max(least, 1 << (size - 1).bit_length())


def token_bytes(tokenizer: Any, left_out: set[int]) -> dict[bytes, list[int]]:
    """Maps the bytes of tokens to their ids, including tokens that are a part of a character.

    Of a tokenizer, ``bytes_of(id)``, if present, returns the bytes of an id, or None.
    """
    ids_of: dict[bytes, list[int]] = {}
    bytes_of = getattr(tokenizer, "bytes_of", lambda id_: None)
    # Decode after another token, because some tokenizers decode the first token differently.
    before: list[int] = []
    for some in ("a", "e", "0", " "):
        with contextlib.suppress(ValueError):
            before = before or tokenizer.encode(some).tolist()
    shown = len(tokenizer.decode(before))
    for id_ in range(tokenizer.vocab_size):
        if id_ in left_out:
            continue
        text = tokenizer.decode([*before, id_])[shown:]
        data = bytes_of(id_) if _REPLACED in text else text.encode("utf-8", "surrogatepass")
        if data:
            ids_of.setdefault(data, []).append(id_)
    return ids_of


class Structures:
    """Automata over the vocabulary of a model, compiled once per regular expression.

    Texts consist of the ids of the tokenizer without `banned_ids`, which are never written. Any of
    `eos_ids` ends a text. The network returns `vocab_size` logits.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        banned_ids: Sequence[int],
    ):
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        ids_of = token_bytes(tokenizer, {*eos_ids, *banned_ids, tokenizer.mask_id})
        texts = sorted(ids_of, key=len, reverse=True)
        # The first, second, ... bytes of all tokens that have one; longer tokens come first.
        sizes = np.array([-len(text) for text in texts])
        self._bytes = [
            np.array([text[at] for text in texts[: np.searchsorted(sizes, -at)]])
            for at in range(len(texts[0]) if texts else 0)
        ]
        self._ids = [np.array(ids_of[text]) for text in texts]
        self._cached = lru_cache(_CACHED)(lambda pattern: self._compile(pattern))

    def automaton(self, pattern: str) -> Automaton:
        """Returns the automaton of a regular expression."""
        if len(pattern) > LONGEST:
            raise SettingError(
                "structure", UNSET, f"has {len(pattern)} characters", f"use at most {LONGEST}"
            )
        return self._cached(pattern)

    def _compile(self, pattern: str) -> Automaton:
        try:
            letters = compile_regex(pattern, most_states=_MOST_BYTE_STATES)
            automaton = self._over_tokens(letters, pattern)
            num_pairs = int(automaton.leads_SS.sum()) * automaton.next_SC.shape[1]
            arcs = automaton.arcs if num_pairs <= _MOST_PAIRS else None
            if arcs is None or max(arcs.next_DS.size, arcs.is_member_CK.size) > _MOST_ARCS:
                raise ValueError("it distinguishes too many tokens; use a shorter expression")
        except ValueError as error:
            why = " ".join(str(error).split())[:300]
            raise SettingError("structure", pattern[:100], f"cannot be used: {why}") from None
        if automaton.fewest_S[automaton.start] > MOST_STATES:
            raise SettingError(
                "structure", pattern[:100], "matches no text that the tokens of the model can form"
            )
        return automaton

    def _over_tokens(self, letters: ByteAutomaton, pattern: str) -> Automaton:
        """Returns the automaton over ids that accepts the texts of an automaton over bytes."""
        num_states, num_classes = letters.next_SK.shape
        over = num_states  # the state behind EOS
        next_KS = np.ascontiguousarray(letters.next_SK.T.astype(np.int16))
        # Tokens are grouped by their effect: the state behind them for each state before them. The
        # effect of a token follows from the effect of its beginning and from its last byte.
        effects: list[bytes] = [bytes(2 * num_states)]
        numbers: dict[bytes, int] = {effects[0]: 0}

        def number(effect_S: np.ndarray) -> int:
            effect = effect_S.tobytes()
            place = numbers.setdefault(effect, len(effects))
            if place == len(effects):
                effects.append(effect)
            if len(effects) * num_states > _MOST_EFFECTS:
                raise ValueError("it distinguishes too many tokens; use a shorter expression")
            return place

        effect_U = np.full(len(self._ids), number(np.arange(num_states, dtype=np.int16)))
        for bytes_U in self._bytes:
            classes_U = letters.class_of_256[bytes_U]
            keys = effect_U[: len(bytes_U)] * num_classes + classes_U
            some, inverse = np.unique(keys, return_inverse=True)
            reached = [
                number(
                    next_KS[key % num_classes][np.frombuffer(effects[key // num_classes], np.int16)]
                )
                for key in some.tolist()
            ]
            effect_U[: len(bytes_U)] = np.array(reached, np.int64)[inverse.reshape(-1)]
        effect_of_V = np.zeros(self._vocab_size, np.int64)
        for ids, effect in zip(self._ids, effect_U, strict=True):
            effect_of_V[ids] = effect
        is_final_S = np.append(letters.is_final_S, True)
        table_ES = np.frombuffer(b"".join(effects), np.int16).reshape(-1, num_states)
        eos_effect = len(effects)
        effects.clear()
        numbers.clear()
        table_ES = np.pad(table_ES, ((0, 1), (0, 1)))
        table_ES[-1, is_final_S] = over
        effect_of_V[list(self._eos_ids)] = eos_effect
        # States within characters are left out if no token ends there.
        used, effect_of_V = np.unique(np.append(effect_of_V, 0), return_inverse=True)
        table_ES = table_ES[used]
        is_reached_S = np.arange(num_states + 1) == letters.start
        is_reached_S[0] = True
        new = np.array([letters.start])
        while new.size:
            next_ = np.unique(table_ES[:, new])
            new = next_[~is_reached_S[next_]]
            is_reached_S[new] = True
        number_S = np.cumsum(is_reached_S, dtype=np.int32) - 1
        if number_S[-1] >= MOST_STATES:
            raise ValueError(f"the pattern has more than {MOST_STATES - 2} states")
        number_S = number_S.astype(np.int16)
        # The class of ids without transitions comes first.
        next_CS, class_of_E = np.unique(
            number_S[table_ES[:, is_reached_S]], axis=0, return_inverse=True
        )
        if len(next_CS) > MOST_CLASSES:
            raise ValueError("it distinguishes too many tokens; use a shorter expression")
        return Automaton(
            pattern=pattern,
            class_of_V=class_of_E.reshape(-1)[effect_of_V.reshape(-1)[:-1]].astype(np.int16),
            next_SC=np.ascontiguousarray(next_CS.T.astype(np.int16)),
            is_final_S=is_final_S[is_reached_S],
            start=int(number_S[letters.start]),
        )
