r"""Regular expressions as deterministic automata over bytes.

Expressions are in the common part of Python's and Rust's syntax, and mean what `re` says.
`outlines_core` compiles their classes of characters. `outlines_core.Index` does not accept the
language of a whole expression: it prefers some matches over others, and loses texts that continue a
match, such as ``cat sat`` of ``(cat|rat)( sat)?``. It also cannot be stopped after a number of
steps. The classes are therefore combined here (Thompson 1968), with a limit on states and steps
that depends on the expression alone, so all machines refuse the same expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

LONGEST = 1 << 15
"""Maximum length of an expression in characters."""
MOST_STEPS = 1 << 22
"""Maximum number of states and arcs that the compilation of an expression visits."""
_MOST_UNMERGED = 2
_MOST_NODES = 1 << 18
_MOST_ARCS = 1 << 20
_NONE = -2


class Token(NamedTuple):
    """A part of an expression.

    Attributes:
      kind: ``set``, ``escape``, ``any``, ``behind``, ``open``, ``close``, ``or``, ``times``,
        ``anchor`` or ``char``.
      text: its text.
      place: the index of its first character.
    """

    kind: str
    text: str
    place: int


_ESCAPE = r"\\(?:[pP]\{\^?\w+\}|0[0-7]{0,2}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)"
_TOKEN = re.compile(
    rf"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<escape>{_ESCAPE})|(?P<any>\.)"
    r"|(?P<behind>\(\?<[=!](?:\\[!-/:-@[-`{-~]|[A-Za-z0-9_ ,;:\"'<>=!@#%&/~`-])\))"
    r"|(?P<open>\((?:\?:|\?P<[A-Za-z_]\w*>|(?!\?)))|(?P<close>\))|(?P<or>\|)"
    r"|(?P<times>(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})\??)|(?P<anchor>[$^])|(?P<char>[^\\\[(])",
    re.DOTALL,
)
_ITEM = re.compile(f"{_ESCAPE}|.", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


def tokens_of(pattern: str) -> Iterator[Token]:
    """The parts of an expression in order. Anchors at the ends of its alternatives are left out.

    Raises:
      ValueError: the expression is invalid or has an unsupported part; the message names it.
    """
    try:
        re.compile(re.sub(r"\\[pP]\{\^?\w+\}", r"\\w", pattern))
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    place, depth, before = 0, 0, "or"
    while place < len(pattern):
        match = _TOKEN.match(pattern, place)
        if match is None:
            shown = pattern[place : place + 4]
            why = (
                "use no flags, and look only behind at one character"
                if shown[0] == "("
                else "write it with escapes"
            )
            raise ValueError(f"{shown!r} at position {place} is not supported; {why}")
        kind, text = str(match.lastgroup), match[0]
        depth += (kind == "open") - (kind == "close")
        if kind == "anchor" or text in ("\\A", "\\Z"):
            is_start = text in ("^", "\\A")
            is_end = match.end() == len(pattern) or pattern[match.end()] in "|$"
            if depth or not (before in ("or", "^") if is_start else is_end):
                raise ValueError(
                    f"{text!r} at position {place} is not supported; use anchors only at the ends, "
                    f"outside groups"
                )
            before = "^" if is_start else "$"
        elif kind == "times" and before in ("times", "^", "$"):
            raise ValueError(f"{text!r} at position {place} is not supported; remove it")
        else:
            yield Token(kind, text, place)
            before = kind
        place = match.end()


def code_of(token: Token) -> int | None:
    """The character of a character or an escape; None for a class of characters.

    Raises:
      ValueError: the escape is neither.
    """
    if token.kind == "char":
        return ord(token.text)
    name, rest = token.text[1], token.text[2:]
    if name in "dwsDWSpP":
        if name in "pP" and not rest:
            raise ValueError(f"{token.text!r} at position {token.place} lacks a name in braces")
        return None
    if name in "xuU" and rest:
        return int(rest, 16)
    if name == "0":
        return int(name + rest, 8)
    if name in _CONTROLS:
        return ord(_CONTROLS[name])
    if name.isalnum():
        raise ValueError(
            f"{token.text!r} at position {token.place} is not supported; use no back-references "
            f"and no \\b"
        )
    return ord(name)


def items_of(token: Token) -> tuple[bool, list[tuple[int, int] | Token]]:
    """True if a set is negated, and its ranges and classes of characters."""
    is_not = token.text.startswith("[^")
    parts: list[int | Token] = []
    for match in _ITEM.finditer(token.text, 1 + is_not, len(token.text) - 1):
        item = Token("escape" if match[0][0] == "\\" else "char", match[0], token.place)
        code = ord("\b") if item.text == "\\b" else code_of(item)  # the backspace, inside a set
        parts.append(item if code is None else -1 if item.text == "-" else code)
    hyphen = ord("-")
    items: list[tuple[int, int] | Token] = []
    while parts:
        low, *rest = parts[:3]
        if isinstance(low, Token):
            items.append(low)
            del parts[0]
            continue
        low = hyphen if low < 0 else low
        if len(rest) == 2 and rest[0] == -1 and isinstance(rest[1], int):
            items.append((low, hyphen if rest[1] < 0 else rest[1]))
            del parts[:3]
        else:
            items.append((low, low))
            del parts[0]
    return is_not, items


# What `re` matches, in Rust's syntax inside a set.
_CLASSES = {
    "d": r"\p{Nd}",
    "D": r"\P{Nd}",
    "w": r"\p{L}\p{N}_",
    "W": r"[^\p{L}\p{N}_]",
    "s": r"\s\x1c-\x1f",
    "S": r"[^\s\x1c-\x1f]",
}


def _class(token: Token) -> str:
    text = token.text
    if text[2:4] == "{^":
        text = f"\\{text[1].swapcase()}{{{text[4:]}"
    return _CLASSES.get(text[1], text)


def _rust(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise ValueError("lone surrogates are not characters; remove them")
    return f"\\x{{{code:x}}}"


def _rows_of(token: Token) -> tuple[dict[int, int], ...]:
    """An automaton for one character: the next row for each byte of each row; -1 is the end."""
    code = code_of(token) if token.kind in ("char", "escape") else None
    if code is not None:
        _rust(code)
        data = chr(code).encode()
        return tuple({byte: at + 1} for at, byte in enumerate(data[:-1])) + ({data[-1]: -1},)
    if token.kind == "any":
        return _rows_of_class(r"[^\n]")
    if token.kind == "escape":
        return _rows_of_class(f"[{_class(token)}]")
    is_not, items = items_of(token)
    inner = [
        _class(item) if isinstance(item, Token) else f"{_rust(item[0])}-{_rust(item[1])}"
        for item in items
    ]
    return _rows_of_class(f"[{'^' * is_not}{''.join(inner)}]")


@lru_cache(maxsize=32)
def _rows_of_class(name: str) -> tuple[dict[int, int], ...]:
    try:
        import outlines_core
    except ImportError:
        raise ValueError(
            "structured output needs outlines_core; install it with pip install dlm_jax[structured]"
        ) from None
    letters = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        index = outlines_core.Index(name, letters)
    except ValueError as error:
        is_empty = "Found no transitions" in str(error)
        why = "a part of it matches no text" if is_empty else "it has an unknown Unicode property"
        raise ValueError(why) from None
    arcs, ends = index.get_transitions(), index.get_final_states()
    first = index.get_initial_state()
    number = {first: 0} | {end: -1 for end in ends}
    rows = []
    for state in [first, *(state for state in arcs if state != first and state not in ends)]:
        number.setdefault(state, len(rows))
        rows.append(arcs[state])
    return tuple({byte: number[to] for byte, to in row.items() if byte < 256} for row in rows)


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

    def after(self, text: str, state: int | None = None) -> int:
        """The state after a text; 0 if no match begins with it."""
        state = self.start if state is None else state
        for byte in text.encode():
            state = int(self.next_SK[state, self.class_of_256[byte]])
        return state

    def accepts(self, text: str) -> bool:
        """True if the whole text matches."""
        return bool(self.is_final_S[self.after(text)])


def compile_regex(pattern: str, *, most_states: int) -> ByteAutomaton:
    r"""The smallest automaton that accepts exactly the full matches of an expression.

    Args:
      pattern: regular expression as in `re`, without back-references and flags, and with no other
        look-around than ``(?<=c)`` and ``(?<!c)`` for one ASCII character. ``^`` and ``$`` are
        allowed at its ends and have no effect; ``\p{..}`` is a Unicode property.
      most_states: maximum number of states.

    Raises:
      ValueError: the expression is not supported or exceeds a limit, or `outlines_core` is not
        installed.
    """
    part, atoms = _parse(pattern)
    if part.size > _MOST_NODES:
        raise _too_large(f"{part.size} states before they are merged")
    # Bytes with the same transitions everywhere are one class; a byte that a look-behind reads is a
    # class of its own.
    table = np.full((sum(map(len, atoms.values())), 256), _NONE, np.int32)
    for out, row in zip(table, (row for rows in atoms.values() for row in rows), strict=True):
        out[list(row)] = list(row.values())
    _, class_of_256 = np.unique(table, axis=1, return_inverse=True)
    class_of_256 = class_of_256.reshape(-1)
    classes = {
        text: [
            list({int(class_of_256[byte]): to for byte, to in row.items()}.items()) for row in rows
        ]
        for text, rows in atoms.items()
    }
    rows: list[Sequence[tuple[int, int]]] = [()]
    places: list[tuple[int, int]] = [(0, 0)]  # the first node of a character, and the node behind
    empty: list[list[tuple[int, tuple[int, bool] | None]]] = [[]]

    def add(nexts: list[tuple[int, tuple[int, bool] | None]]) -> int:
        rows.append(())
        places.append((0, 0))
        empty.append(nexts)
        return len(rows) - 1

    def build(part: _Part, behind: int) -> int:
        """Adds the nodes of a part and returns the first one. Node 0 accepts."""
        if part.kind == "all":
            for one in reversed(part.parts):
                behind = build(one, behind)
            return behind
        if part.kind == "or":
            return add([(build(one, behind), None) for one in part.parts])
        if part.kind == "times":
            (inner,) = part.parts
            first = behind
            if part.most is None:
                first = add([])
                empty[first] += [(build(inner, first), None), (behind, None)]
            for _ in range((part.most or part.fewest) - part.fewest):
                first = add([(build(inner, first), None), (behind, None)])
            for _ in range(part.fewest):
                first = build(inner, first)
            return first
        if part.kind == "behind":
            ((class_, _),) = classes[part.text][0]
            return add([(behind, (class_, part.text[3] == "="))])
        first = len(rows)
        for row in classes[part.text]:
            rows.append(row)
            places.append((first, behind))
            empty.append([])
        return first

    try:
        first = build(part, 0)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
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
                    condition is None or (condition[0] == last) == condition[1]
                ):
                    seen.add(after)
                    todo.append(after)
        count_steps(len(seen))
        return frozenset(node for node in seen if not node or rows[node])

    # A state is a set of nodes (Rabin and Scott 1959).
    start = closure([first], -1)
    number_of = {frozenset[int](): 0}
    number_of.setdefault(start, 1)
    sets = list(number_of)
    next_SK: list[list[int]] = []
    for nodes in sets:  # which grows
        reached: dict[int, set[int]] = {}
        for node in nodes:
            base, behind = places[node]
            count_steps(len(rows[node]))
            for class_, to in rows[node]:
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


class _Part(NamedTuple):
    """A part of an expression: a character, look-behind, sequence, choice or repeat.

    `size` is the number of its nodes.
    """

    kind: str
    size: int
    text: str = ""
    parts: tuple[_Part, ...] = ()
    fewest: int = 0
    most: int | None = None


_Rows = tuple[dict[int, int], ...]


def _parse(pattern: str) -> tuple[_Part, dict[str, _Rows]]:
    """The tree of an expression, and the automaton of each of its characters and look-behinds."""
    atoms: dict[str, _Rows] = {}
    groups: list[list[list[_Part]]] = [[[]]]
    num_arcs = 0

    def choice(group: list[list[_Part]]) -> _Part:
        some = [_Part("all", sum(one.size for one in row), parts=tuple(row)) for row in group]
        if len(some) == 1:
            return some[0]
        return _Part("or", 1 + sum(one.size for one in some), parts=tuple(some))

    for token in tokens_of(pattern):
        kind, text, _ = token
        if kind == "open":
            groups.append([[]])
        elif kind == "close":
            part = choice(groups.pop())
            groups[-1][-1].append(part)
        elif kind == "or":
            groups[-1].append([])
        elif kind == "times":
            inner = groups[-1][-1].pop()
            numbers = re.fullmatch(r"\{(\d*)(,?)(\d*)\}\??", text)
            if numbers is None:
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text[0]]
            else:
                low = int(numbers[1] or 0)
                high = int(numbers[3]) if numbers[3] else None if numbers[2] else low
            count = low + 1 if high is None else high
            size = inner.size * count + (1 if high is None else high - low)
            groups[-1][-1].append(
                _Part("times", size, "", (inner,), low, high) if inner.size else inner
            )
        elif kind == "behind":
            atoms[text] = ({ord(text[-2]): -1},)
            groups[-1][-1].append(_Part("behind", 1, text))
        else:
            if text not in atoms:
                atoms[text] = _rows_of(token)
                num_arcs += sum(map(len, atoms[text]))
                if num_arcs > _MOST_ARCS:
                    raise _too_large(f"more than {_MOST_ARCS} arcs of different characters")
            rows = atoms[text]
            groups[-1][-1].append(_Part("char", len(rows), text))
    return choice(groups[0]), atoms


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
