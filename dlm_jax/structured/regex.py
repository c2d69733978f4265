r"""Regular expressions as deterministic automata over bytes.

Expressions are in the common part of Python's and Rust's syntax, and mean what `re` says. They are
rewritten for Rust and compiled by `outlines_core` in a process with limits on memory and time.

`outlines_core.Index` does not accept the language of an expression by itself. It prefers some
matches over others, and loses texts that continue a match: ``(cat|rat)( sat)?`` without ``cat
sat``. It also builds the automaton of an unanchored search, with exponentially many states for
counted repeats: 12 characters of a string take 0.3 s, three more 8 times as long. An expression is
therefore compiled between two marks, U+0001, that no other part of it matches. The vocabulary is
the 256 bytes, because the transitions of all tokens of a model are a dictionary with an entry for
each state and token. A look-behind at one character is compiled as a mark of its own, whose
transitions are then taken where the last byte is that character.
"""

from __future__ import annotations

import array
import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

LONGEST = 1 << 15
"""Maximum length of an expression in characters."""
MOST_MEGABYTES = 512
MOST_SECONDS = 4
"""Limits on the process that compiles an expression: address space and processor time."""


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
    r"|(?P<behind>\(\?<[=!](?:\\[^\w\s]|[^\W]|[ ,;:\"'<>=!@#%&/~`_-])\))"
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


def code_of(escape: Token) -> int | None:
    """The character of an escape; None for a class of characters.

    Raises:
      ValueError: it is neither.
    """
    name, rest = escape.text[1], escape.text[2:]
    if name in "dwsDWSpP":
        if name in "pP" and not rest:
            raise ValueError(f"{escape.text!r} at position {escape.place} lacks a name in braces")
        return None
    if name in "xuU" and rest:
        return int(rest, 16)
    if name == "0":
        return int(name + rest, 8)
    if name in _CONTROLS:
        return ord(_CONTROLS[name])
    if name.isalnum():
        raise ValueError(
            f"{escape.text!r} at position {escape.place} is not supported; use no back-references "
            f"and no \\b"
        )
    return ord(name)


def items_of(token: Token) -> tuple[bool, list[tuple[int, int] | Token]]:
    """True if a set is negated, and its ranges and classes of characters."""
    is_not = token.text.startswith("[^")
    begin = 1 + is_not
    parts: list[int | Token] = []
    for match in _ITEM.finditer(token.text, begin, len(token.text) - 1):
        item = Token("escape" if match[0][0] == "\\" else "char", match[0], token.place)
        if item.text == "\\b":  # the backspace, inside a set
            item = Token("char", "\b", token.place)
        code = code_of(item) if item.kind == "escape" else ord(item.text)
        parts.append(item if code is None else -1 if item.text == "-" else code)
    items: list[tuple[int, int] | Token] = []
    place = 0
    while place < len(parts):
        low, *rest = parts[place : place + 3]
        if isinstance(low, int) and len(rest) == 2 and rest[0] == -1 and isinstance(rest[1], int):
            items.append((_plain(low), _plain(rest[1])))
            place += 3
            continue
        items.append((_plain(low), _plain(low)) if isinstance(low, int) else low)
        place += 1
    return is_not, items


def _plain(code: int) -> int:
    return ord("-") if code < 0 else code


# What `re` matches, in Rust's syntax inside a set.
_CLASSES = {
    "d": r"\p{Nd}",
    "D": r"\P{Nd}",
    "w": r"\p{L}\p{N}_",
    "W": r"[^\p{L}\p{N}_]",
    "s": r"\s\x1c-\x1f",
    "S": r"[^\s\x1c-\x1f]",
}
_MARK = 1
_FREE_MARKS = (*range(2, 9), *range(14, 28))  # controls that are no white space


def _in_rust(pattern: str) -> tuple[str, dict[str, int]]:
    """The expression for Rust, without matches of the marks, and the mark of each look-behind."""
    tokens = list(tokens_of(pattern))
    behinds = dict.fromkeys(token.text for token in tokens if token.kind == "behind")
    if len(behinds) > len(_FREE_MARKS):
        raise ValueError(f"it looks behind at more than {len(_FREE_MARKS)} characters")
    marks = dict(zip(behinds, _FREE_MARKS, strict=False))
    codes = [_MARK, *marks.values()]
    outside = f"&&[^{''.join(map(_rust, codes))}]"
    parts = []
    for token in tokens:
        kind, text, _ = token
        if kind == "set":
            is_not, items = items_of(token)
            inner = "".join(
                _class(item) if isinstance(item, Token) else _rust(item[0]) + "-" + _rust(item[1])
                for item in items
            )
            parts.append(f"[[{'^' * is_not}{inner}]{outside}]")
        elif kind == "any":
            parts.append(f"[[^\\n]{outside}]")
        elif kind == "behind":
            parts.append(_rust(marks[text]))
        elif kind == "open":
            parts.append("(?:")
        elif kind in ("close", "or"):
            parts.append(text)
        elif kind == "times":
            parts.append(text.removesuffix("?") if len(text) > 1 else text)
            parts[-1] = parts[-1].replace("{,", "{0,")
        else:
            code = ord(text) if kind == "char" else code_of(token)
            if code in codes:
                raise ValueError(f"the character U+{code:04X} is not supported here; remove it")
            parts.append(f"[[{_class(token)}]{outside}]" if code is None else _rust(code))
    return f"{_rust(_MARK)}(?:{''.join(parts)}){_rust(_MARK)}", marks


def _class(escape: Token) -> str:
    text = escape.text
    if text[2:4] == "{^":
        text = f"\\{text[1].swapcase()}{{{text[4:]}"
    return _CLASSES.get(text[1], text)


def _rust(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise ValueError("lone surrogates are not characters; remove them")
    return f"\\x{{{code:x}}}"


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


_COMPILE = """
import array, resource, sys
size, seconds, most_states = map(int, sys.argv[1:4])
sys.path.append(sys.argv[4])
import outlines_core
resource.setrlimit(resource.RLIMIT_AS, (size, size))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
letters = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
try:
    index = outlines_core.Index(sys.stdin.buffer.read().decode(), letters)
except ValueError as error:
    sys.exit(str(error))
arcs = index.get_transitions()
if len(arcs) > most_states:
    sys.exit("too many states")
made = array.array("I", [index.get_initial_state()])
for state, nexts in arcs.items():
    for byte, after in nexts.items():
        if byte < 256:
            made.extend((state, byte, after))
sys.stdout.buffer.write(made.tobytes())
"""


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
    spec = importlib.util.find_spec("outlines_core")
    if spec is None or spec.origin is None:
        raise ValueError(
            "structured output needs outlines_core; install it with pip install dlm_jax[structured]"
        )
    rust, marks = _in_rust(pattern)
    limits = [MOST_MEGABYTES << 20, MOST_SECONDS, _MOST_UNMERGED * most_states]
    where = spec.origin.rsplit("outlines_core", 1)[0]
    too_large = ValueError(
        f"compiling it takes more than {MOST_SECONDS} seconds or {MOST_MEGABYTES} MB; use smaller "
        f"or fewer repeats, alternatives and optional parts"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _COMPILE, *map(str, limits), where],
            input=rust.encode(),
            capture_output=True,
            timeout=30 * MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise too_large from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGABRT):
        raise too_large
    if done.returncode:
        why = done.stderr.decode(errors="replace")
        if "MemoryError" in why:
            raise too_large
        if "too many states" in why:
            raise ValueError(f"the pattern has more than {most_states} states")
        if "Found no transitions" in why:
            why = "a part of it matches no text"
        if "error building NFA" in why:
            why = "it has an unknown Unicode property, or is too large"
        raise ValueError(why.strip().split("\n")[-1][:200])
    values = np.array(array.array("I", done.stdout), np.int64)
    table = _table(int(values[0]), values[1:])
    automaton = _merge(_without_marks(table, marks) if marks else table)
    if len(automaton.next_SK) > most_states:
        raise ValueError(f"the pattern has more than {most_states} states")
    return automaton


_MOST_UNMERGED = 2


def _table(first: int, arcs: np.ndarray) -> ByteAutomaton:
    """The automaton between the marks of these arcs, ``(state, byte, next state)``."""
    from_, byte, to = arcs.reshape(-1, 3).T
    names = np.unique(np.concatenate([from_, to, [first]]))
    next_S256 = np.zeros((len(names) + 1, 256), np.int32)
    next_S256[np.searchsorted(names, from_) + 1, byte] = np.searchsorted(names, to) + 1
    start = int(next_S256[np.searchsorted(names, first) + 1, _MARK])
    is_final_S = next_S256[:, _MARK] > 0
    is_final_S[np.searchsorted(names, first) + 1] = False
    next_S256[:, _MARK] = 0
    next_SK, class_of_256 = np.unique(next_S256, axis=1, return_inverse=True)
    return ByteAutomaton(class_of_256.reshape(-1), next_SK, is_final_S, start)


def _without_marks(automaton: ByteAutomaton, marks: Mapping[str, int]) -> ByteAutomaton:
    """The automaton of the texts without the marks of look-behinds.

    A state is a set of states of the marked automaton, and the character before it if a look-behind
    follows. A mark is passed where the look-behind holds.
    """
    behinds = [(ord(text[-2]), text[3] == "=", code) for text, code in marks.items()]
    seen_bytes = sorted({byte for byte, _, _ in behinds})
    next_S256 = automaton.next_SK[:, automaton.class_of_256]
    next_S256[:, list(marks.values())], marked_SM = 0, next_S256[:, list(marks.values())].copy()
    # Each byte that a look-behind reads is a class of its own.
    own = np.zeros((len(seen_bytes), 256), np.int32)
    own[np.arange(len(seen_bytes)), seen_bytes] = 1
    next_RK, class_of_256 = np.unique(np.concatenate([next_S256, own]), axis=1, return_inverse=True)
    class_of_256 = class_of_256.reshape(-1)
    next_SK = next_RK[: len(next_S256)]
    byte_of = {int(class_of_256[byte]): byte for byte in seen_bytes}
    has_mark_S = marked_SM.any(axis=1)

    def closed(states: Iterable[int], last: int) -> tuple[int, ...]:
        done, todo = set(states), list(states)
        while todo:
            state = todo.pop()
            for (byte, is_equal, _), target in zip(behinds, marked_SM[state], strict=True):
                if target and (byte == last) == is_equal and target not in done:
                    done.add(int(target))
                    todo.append(int(target))
        return tuple(sorted(done))

    def arrive(states: tuple[int, ...], last: int) -> int:
        if has_mark_S[list(states)].any():
            states = closed(states, last)
        if states not in number_of:
            number_of[states] = len(sets)
            sets.append(states)
        return number_of[states]

    number_of: dict[tuple[int, ...], int] = {(): 0}
    sets: list[tuple[int, ...]] = [()]
    start = arrive((automaton.start,), -1)
    rows: list[np.ndarray] = []
    finals: list[bool] = []
    for states in map(list, sets):  # which grows
        finals.append(bool(automaton.is_final_S[states].any()))
        row = np.zeros(next_SK.shape[1], np.int32)
        targets_KN = next_SK[states].T
        for class_ in np.flatnonzero(targets_KN.any(axis=1)):
            targets = tuple(sorted(set(targets_KN[class_].tolist()) - {0}))
            row[class_] = arrive(targets, byte_of.get(int(class_), -1))
        rows.append(row)
    return ByteAutomaton(class_of_256, np.stack(rows), np.array(finals), start)


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
