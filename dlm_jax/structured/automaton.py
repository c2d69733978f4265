"""Automata over the tokens of a vocabulary, and their one format on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

MOST_STATES = 1 << 12
"""Maximum number of states of an automaton."""
MOST_CLASSES = 1 << 14
"""Maximum number of classes of ids in an automaton."""


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
