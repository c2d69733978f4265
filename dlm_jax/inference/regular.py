"""Regular expressions as automata over the characters of a finite alphabet.

What Python's own parser makes of a pattern becomes a nondeterministic automaton (Thompson 1968),
its subsets a deterministic one (Rabin and Scott 1959), whose equal states are merged (Moore 1956).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_NODES = 1 << 16
"""Nodes of a pattern with its repeats written out, at most."""

_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


class Characters(NamedTuple):
    """A deterministic automaton over classes of characters.

    Attributes:
      class_of: of each character of the alphabet.
      next_SK: int32 ``[S, K]``, the state behind a character of a class; state 0 is dead.
      is_final_S: bool ``[S]``.
      start: state before the first character.
    """

    class_of: dict[str, int]
    next_SK: np.ndarray
    is_final_S: np.ndarray
    start: int


def characters(pattern: str, alphabet: Sequence[str], *, most_states: int) -> Characters:
    """The automaton of the texts that a pattern matches from end to end.

    Args:
      pattern: of the module `re`, without anchors, look-around and back-references.
      alphabet: the characters that texts may consist of.
      most_states: that it may have.

    Raises:
      ValueError: it is no such pattern, or too large.
    """
    parser: Any = importlib.import_module("re._parser")  # the only parser of Python's syntax
    try:
        parsed = parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags are not known; write what they mean into the pattern")
        nodes = _Nodes(alphabet)
        end = nodes.new()
        start = nodes.sequence(list(parsed), end)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return nodes.determinized(start, end, most_states)


class _Nodes:
    """A nondeterministic automaton that is built from its end to its begin."""

    def __init__(self, alphabet: Sequence[str]):
        self._alphabet = list(alphabet)
        self._silent: list[list[int]] = []
        self._moves: list[tuple[int, int] | None] = []
        self._sets: dict[bytes, int] = {}
        self._masks: list[np.ndarray] = []

    def new(self) -> int:
        """A node that leads nowhere yet."""
        if len(self._silent) >= MOST_NODES:
            raise ValueError("the pattern is too large with its repeats written out")
        self._silent.append([])
        self._moves.append(None)
        return len(self._silent) - 1

    def sequence(self, items: list[tuple[Any, Any]], end: int) -> int:
        """The first node of some items behind each other, the last of which leads to `end`."""
        for op, given in reversed(items):
            end = self._item(str(op), given, end)
        return end

    def determinized(self, start: int, end: int, most_states: int) -> Characters:
        """The deterministic automaton, its equal states merged."""
        masks = np.array(self._masks or [np.zeros(len(self._alphabet), bool)])
        _, first, class_of = np.unique(masks, axis=1, return_index=True, return_inverse=True)
        class_of = class_of.reshape(-1)
        classes = [tuple(np.flatnonzero(mask[first])) for mask in masks]
        numbers: dict[frozenset[int], int] = {frozenset(): 0}
        subsets: list[frozenset[int]] = [frozenset()]

        def number(nodes: frozenset[int]) -> int:
            if nodes not in numbers:
                if len(subsets) > most_states:
                    raise ValueError(f"the pattern has more than {most_states} states")
                numbers[nodes] = len(subsets)
                subsets.append(nodes)
            return numbers[nodes]

        begin = number(self._closure([start]))
        rows = [np.zeros(len(first), np.int32)]
        for nodes in _growing(subsets):
            reached: dict[int, list[int]] = {}
            for node in nodes:
                move = self._moves[node]
                for kind in () if move is None else classes[move[0]]:
                    reached.setdefault(kind, []).append(move[1])  # type: ignore[index]
            row = np.zeros(len(first), np.int32)
            for kind, targets in reached.items():
                row[kind] = number(self._closure(targets))
            rows.append(row)
        is_final = np.array([end in nodes for nodes in subsets])
        found = dict(zip(self._alphabet, class_of.tolist(), strict=True))
        return _merged(Characters(found, np.array(rows), is_final, begin))

    def _item(self, op: str, given: Any, end: int) -> int:
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._move(self._set(op, given), end)
        if op == "SUBPATTERN":
            _, add, remove, items = given
            if add or remove:
                raise ValueError("flags are not known; write what they mean into the pattern")
            return self.sequence(list(items), end)
        if op == "BRANCH":
            node = self.new()
            self._silent[node] = [self.sequence(list(items), end) for items in given[1]]
            return node
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, items = given
            return self._repeat(low, high, items, end)
        raise ValueError(f"{op} is not known; use no anchors, look-around or back-references")

    def _repeat(self, low: int, high: Any, items: Any, end: int) -> int:
        if str(high) == "MAXREPEAT":
            node = self.new()
            self._silent[node] = [end, self.sequence(list(items), node)]
            end = node
        else:
            last = end
            for _ in range(high - low):
                node = self.new()
                self._silent[node] = [self.sequence(list(items), end), last]
                end = node
        for _ in range(low):
            end = self.sequence(list(items), end)
        return end

    def _move(self, mask: np.ndarray, end: int) -> int:
        node = self.new()
        place = self._sets.setdefault(mask.tobytes(), len(self._masks))
        if place == len(self._masks):
            self._masks.append(mask)
        self._moves[node] = place, end
        return node

    def _set(self, op: str, given: Any) -> np.ndarray:
        """Which characters an item stands for."""
        if op == "ANY":
            return self._where(lambda c: c != "\n")
        if op == "IN":
            parts = [(str(kind), value) for kind, value in given]
            is_not = parts[0][0] == "NEGATE"
            masks = [self._member(kind, value) for kind, value in parts[is_not:]]
            return np.any(masks, axis=0) != is_not
        return self._where(lambda c: (ord(c) == given) == (op == "LITERAL"))

    def _member(self, kind: str, value: Any) -> np.ndarray:
        if kind == "LITERAL":
            return self._where(lambda c: ord(c) == value)
        if kind == "RANGE":
            return self._where(lambda c: value[0] <= ord(c) <= value[1])
        name = str(value).removeprefix("CATEGORY_")
        is_not = name.startswith("NOT_")
        compiled = re.compile(_CATEGORIES[name.removeprefix("NOT_")])
        return self._where(lambda c: (compiled.fullmatch(c) is not None) != is_not)

    def _where(self, is_in: Callable[[str], bool]) -> np.ndarray:
        return np.fromiter(map(is_in, self._alphabet), bool, len(self._alphabet))

    def _closure(self, nodes: list[int]) -> frozenset[int]:
        """The nodes that are reached without a character."""
        found, todo = set(nodes), list(nodes)
        while todo:
            for node in self._silent[todo.pop()]:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        return frozenset(found)


def _growing(subsets: list[frozenset[int]]):
    """The subsets behind the first, those too that are added meanwhile."""
    place = 1
    while place < len(subsets):
        yield subsets[place]
        place += 1


def _merged(found: Characters) -> Characters:
    """The same language with as few states as there can be; the dead one stays the first."""
    label = found.is_final_S.astype(np.int64)
    while True:
        told = np.column_stack([label, label[found.next_SK]])
        _, first, finer = np.unique(told, axis=0, return_index=True, return_inverse=True)
        finer = finer.reshape(-1)
        if finer.max() == label.max():
            break
        label = finer
    # Numbered so that what is as the dead state comes first.
    order = np.argsort(np.where(np.arange(len(first)) == finer[0], -1, first), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    label, first = place[finer], first[order]
    return Characters(
        found.class_of,
        label[found.next_SK[first]].astype(np.int32),
        found.is_final_S[first],
        int(label[found.start]),
    )
