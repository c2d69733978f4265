r"""Regular expressions as deterministic automata over bytes.

Expressions mean what `re` says, whose parser reads them. `outlines_core.Index` does not accept the
language of a whole expression: it prefers some matches over others, and loses texts that continue a
match, such as ``cat sat`` of ``(cat|rat)( sat)?``. It also cannot be stopped after a number of
steps. Expressions are therefore compiled here (Thompson 1968), with a limit on states and steps
that depends on the expression alone, so all machines refuse the same expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

import numpy as np

LONGEST = 1 << 15
"""Maximum length of an expression in characters."""
MOST_STEPS = 1 << 22
"""Maximum number of states and arcs that the compilation of an expression visits."""
_MOST_UNMERGED = 2
_MOST_NODES = 1 << 18
_MOST_ARCS = 1 << 20
_NONE = -2
_BEGINS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)
_NAMES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
}
_CLASSES = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
"""The operations that read one character."""

Tree = Sequence[tuple[Any, Any]]
"""A parsed expression: pairs of an operation of `re` and its arguments."""


def parsed(pattern: str) -> Tree:
    """Parses an expression. Anchors at its ends are left out.

    Raises:
      ValueError: the expression is invalid or has flags.
    """
    try:
        found = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if found.state.flags & ~re.UNICODE.value:
        raise ValueError("flags are not supported; remove them")
    tree: Tree = found.data
    while tree and tree[0][0] is sre.AT and tree[0][1] in _BEGINS:
        tree = tree[1:]
    while tree and tree[-1][0] is sre.AT and tree[-1][1] in _ENDS:
        tree = tree[:-1]
    return tree


def _ranges_of(op: Any, argument: Any) -> tuple[bool, list[Any]]:
    r"""True if a class of characters is negated, and its items: pairs of codes, or categories as
    expressions, such as ``\d``.
    """
    if op is sre.ANY:
        return True, [(10, 10)]
    if op is not sre.IN:
        return op is sre.NOT_LITERAL, [(argument, argument)]
    items: list[Any] = []
    for inner, value in argument:
        if inner is sre.LITERAL:
            items.append((value, value))
        elif inner is not sre.NEGATE:
            items.append(value if inner is sre.RANGE else _NAMES[value])
    return argument[0][0] is sre.NEGATE, items


def num_characters(tree: Tree) -> int:
    """The number of characters of an expression whose repeats are written out."""
    total = 0
    for op, argument in tree:
        if op in _CLASSES:
            # A character outside ASCII has states between its bytes.
            total += 8 if _ranges_of(op, argument)[0] else 1
        elif op is sre.BRANCH and argument[1][0] and argument[1][0][0][0] is not sre.ASSERT:
            total += sum(map(num_characters, argument[1]))
        elif op is sre.SUBPATTERN:
            total += num_characters(argument[3])
        elif op is sre.MAX_REPEAT:
            low, high, inner = argument
            total += num_characters(inner) * max(1, low, 0 if high is sre.MAXREPEAT else high)
    return total


_Rows = tuple[dict[int, int], ...]
"""An automaton for one character: the next row for each byte of each row; -1 is the end."""


@lru_cache(maxsize=256)
def _rows_of(is_not: bool, items: tuple[Any, ...]) -> _Rows:
    """The smallest automaton over the bytes of the characters of a class."""
    has = np.zeros(0x140000, bool)
    for item in items:
        for low, high in _category(item) if isinstance(item, str) else (item,):
            has[low : high + 1] = True
    if is_not:
        has[:0x110000] ^= True
    has[0xD800:0xE000] = False  # surrogates are no characters
    rows: list[dict[int, int]] = [{byte: -1 for byte in np.flatnonzero(has[:0x80]).tolist()}]
    known: dict[bytes, int] = {}

    def add(block: np.ndarray) -> int:
        """The row for the bytes behind the first ones, which choose this block of characters."""
        key = block.tobytes()
        if key not in known:
            known[key] = len(rows)
            rows.append({})
            parts = block.reshape(64, -1)
            some = np.flatnonzero(parts.any(axis=1)).tolist()
            rows[known[key]] |= {0x80 + n: add(parts[n]) if block.size > 64 else -1 for n in some}
        return known[key]

    # Leading bytes have 5, 4 or 3 bits, and shorter codes are not encoded in more bytes.
    for first, last, size, least in ((0xC0, 0xDF, 6, 0x80), (0xE0, 0xEF, 12, 0x800),
                                     (0xF0, 0xF4, 18, 0x10000)):  # fmt: skip
        for byte in range(first, last + 1):
            begin = (byte - first) << size
            block = has[begin : begin + (1 << size)].copy()
            block[: max(0, least - begin)] = False
            if block.any():
                rows[0][byte] = add(block)
    if not rows[0]:
        raise ValueError("a part of it matches no text")
    return tuple(rows)


@lru_cache(maxsize=8)
def _category(name: str) -> list[tuple[int, int]]:
    r"""The ranges of the characters that ``\d`` or another category matches."""
    characters = "".join(map(chr, range(0x110000)))
    return [(m.start(), m.end() - 1) for m in re.finditer(f"{name}+", characters)]


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over classes of bytes.

    Attributes:
      class_of_256: class of each byte.
      next_SK: int32 ``[S, K]``, next state for each class; state 0 is dead.
      is_final_S: bool ``[S]``, True at accepting states.
      start: state before the first byte.
    """

    class_of_256: np.ndarray
    next_SK: np.ndarray
    is_final_S: np.ndarray
    start: int


def compile_regex(pattern: str, *, most_states: int) -> ByteAutomaton:
    r"""The smallest automaton that accepts exactly the full matches of an expression.

    Args:
      pattern: regular expression as in `re`, without back-references and flags, and with no other
        look-around than ``(?<=c)`` and ``(?<!c)`` for one ASCII character. ``^`` and ``$`` are
        allowed at its ends and have no effect.
      most_states: maximum number of states.

    Raises:
      ValueError: the expression is not supported or exceeds a limit.
    """
    # Node 0 accepts. Other nodes read a byte by a row of the table, or lead to nodes without one,
    # some of which depend on the byte before.
    table: list[dict[int, int]] = []
    offsets: dict[Any, tuple[int, int]] = {}
    row_of: list[int] = [-1]
    places: list[tuple[int, int]] = [(0, 0)]  # the first node of a character, and the node behind
    empty: list[list[tuple[int, tuple[int, bool] | None]]] = [[]]
    num_arcs = 0

    def add(nexts: list[tuple[int, tuple[int, bool] | None]], row: int = -1) -> int:
        if len(row_of) > _MOST_NODES:
            raise _too_large(f"more than {_MOST_NODES} states before they are merged")
        row_of.append(row)
        places.append((0, 0))
        empty.append(nexts)
        return len(row_of) - 1

    def character(key: Any, behind: int) -> int:
        nonlocal num_arcs
        if key not in offsets:
            rows = _rows_of(*key)
            offsets[key] = len(table), len(rows)
            table.extend(rows)
            num_arcs += sum(map(len, rows))
            if num_arcs > _MOST_ARCS:
                raise _too_large(f"more than {_MOST_ARCS} arcs of different characters")
        offset, count = offsets[key]
        first = len(row_of)
        for row in range(offset, offset + count):
            places[add([], row)] = first, behind
        return first

    def sequence(tree: Tree, behind: int) -> int:
        """Adds the nodes of a sequence and returns the first one."""
        for op, argument in reversed(tree):
            behind = one(op, argument, behind)
        return behind

    def one(op: Any, argument: Any, behind: int) -> int:
        if op in _CLASSES:
            is_not, items = _ranges_of(op, argument)
            return character((is_not, tuple(items)), behind)
        if op is sre.BRANCH:
            return add([(sequence(part, behind), None) for part in argument[1]])
        if op is sre.SUBPATTERN and not argument[1] and not argument[2]:
            return sequence(argument[3], behind)
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = argument
            first = behind
            if high is sre.MAXREPEAT:
                first = add([])
                empty[first] += [(sequence(inner, first), None), (behind, None)]
                high = low
            for count in range(high):
                again = sequence(inner, first)
                if again == first:  # it reads nothing
                    break
                first = again if count >= high - low else add([(again, None), (behind, None)])
            return first
        is_behind = op in (sre.ASSERT, sre.ASSERT_NOT) and argument[0] == -1
        (inner, code), *others = (is_behind and argument[1]) or [(None, 0)]
        if inner is not sre.LITERAL or code >= 128 or others:
            raise ValueError(
                f"{str(op).lower()} is not supported; use no flags, back-references, possessive "
                "repeats or \\b, anchors only at the ends, and look only behind at one ASCII "
                "character"
            )
        if ("behind", code) not in offsets:
            offsets["behind", code] = len(table), 1
            table.append({code: -1})
        return add([(behind, (code, op is sre.ASSERT))])

    try:
        first = sequence(parsed(pattern), 0)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Bytes with the same transitions everywhere are one class; a byte that a look-behind reads is a
    # class of its own.
    by_byte = np.full((len(table), 256), _NONE, np.int32)
    for out, row in zip(by_byte, table, strict=True):
        out[list(row)] = list(row.values())
    _, class_of_256 = np.unique(by_byte, axis=1, return_inverse=True)
    class_of_256 = class_of_256.reshape(-1)
    rows = [
        list({int(class_of_256[byte]): to for byte, to in row.items()}.items()) for row in table
    ]
    steps = 0

    def count_steps(number: int) -> None:
        nonlocal steps
        steps += number
        if steps > MOST_STEPS:
            raise _too_large(f"more than {MOST_STEPS} steps")

    def closure(nodes: Iterable[int], last: int) -> frozenset[int]:
        """The nodes that accept or read a byte, from `nodes` on, behind a byte of class `last`."""
        seen, todo = set(nodes), list(nodes)
        while todo:
            for after, condition in empty[todo.pop()]:
                if after not in seen and (
                    condition is None or (class_of_256[condition[0]] == last) == condition[1]
                ):
                    seen.add(after)
                    todo.append(after)
        count_steps(len(seen))
        return frozenset(node for node in seen if not node or row_of[node] >= 0)

    # A state is a set of nodes (Rabin and Scott 1959).
    start = closure([first], -1)
    number_of = {frozenset[int](): 0}
    number_of.setdefault(start, 1)
    sets = list(number_of)
    next_SK: list[list[int]] = []
    for nodes in sets:  # which grows
        reached: dict[int, set[int]] = {}
        for node in nodes - {0}:
            base, behind = places[node]
            arcs = rows[row_of[node]]
            count_steps(len(arcs))
            for class_, to in arcs:
                reached.setdefault(class_, set()).add(behind if to < 0 else base + to)
        next_K = [0] * (int(class_of_256.max()) + 1)
        for class_, targets in reached.items():
            after = closure(targets, class_)
            next_K[class_] = number_of.setdefault(after, len(sets))
            if next_K[class_] == len(sets):
                sets.append(after)
        next_SK.append(next_K)
        if len(sets) > _MOST_UNMERGED * most_states:
            raise ValueError(f"the pattern has more than {most_states} states")
    is_final_S = np.array([0 in nodes for nodes in sets])
    automaton = _merge(
        ByteAutomaton(class_of_256, np.array(next_SK, np.int32), is_final_S, number_of[start])
    )
    if len(automaton.next_SK) > most_states:
        raise ValueError(f"the pattern has more than {most_states} states")
    return automaton


def _too_large(what: str) -> ValueError:
    return ValueError(
        f"compiling it takes {what}; use smaller or fewer repeats, alternatives and optional parts"
    )


def _merge(automaton: ByteAutomaton) -> ByteAutomaton:
    """The minimal equivalent automaton (Hopcroft 1971), its states in order of reachability."""
    next_SK, is_final_S = automaton.next_SK, automaton.is_final_S
    num_states = len(next_SK)
    pairs = np.unique(next_SK + np.arange(num_states)[:, None] * num_states)
    by_target = np.argsort(pairs % num_states, kind="stable")
    ends = np.searchsorted((pairs % num_states)[by_target], np.arange(num_states + 1))
    sources = (pairs // num_states)[by_target]
    label = is_final_S.astype(np.int64)
    members = {block: set(np.flatnonzero(label == block).tolist()) for block in (0, 1)}
    num_labels, dirty = 2, np.arange(num_states)
    # States whose successors changed their label are compared again. When a block is divided, its
    # largest part keeps the label, so a state changes its label at most log S times.
    while dirty.size:
        parts_of: dict[int, dict[bytes, list[int]]] = {}
        for state, block, row in zip(
            dirty.tolist(), label[dirty].tolist(), label[next_SK[dirty]], strict=True
        ):
            parts_of.setdefault(block, {}).setdefault(row.tobytes(), []).append(state)
        changed: list[int] = []
        for block, parts in parts_of.items():
            some = sorted(parts.values(), key=len, reverse=True)
            others = len(members[block]) - sum(map(len, some))
            if others and others < len(some[0]):
                some.append(list(members[block].difference(*some)))
            for part in some if others >= len(some[0]) else some[1:]:
                members[block].difference_update(part)
                members[num_labels] = set(part)
                label[part] = num_labels
                num_labels += 1
                changed += part
        dirty = np.unique(
            np.concatenate(
                [sources[:0], *(sources[ends[state] : ends[state + 1]] for state in changed)]
            )
        )
    # The numbers of the states depend on the language alone: the dead state, the start, and the
    # others in order of their first path.
    place: dict[int, int] = {int(label[0]): 0}
    order = [0]
    todo = [automaton.start]
    for state in todo:
        if int(label[state]) not in place:
            place[int(label[state])] = len(order)
            order.append(state)
            by_byte = next_SK[state, automaton.class_of_256]
            todo += by_byte[np.sort(np.unique(by_byte, return_index=True)[1])].tolist()
    places = np.zeros(num_labels, np.int32)
    places[list(place)] = list(place.values())
    next_SK, kinds = np.unique(places[label[next_SK[order]]], axis=1, return_inverse=True)
    return ByteAutomaton(
        kinds.reshape(-1)[automaton.class_of_256],
        next_SK,
        is_final_S[order],
        int(places[label[automaton.start]]),
    )
