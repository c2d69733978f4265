"""Structures: regular expressions as automata over the tokens of a model.

A pattern is parsed by Python's regex parser, converted to a nondeterministic automaton over
characters (Thompson 1968), and then to a deterministic automaton by subset construction (Rabin and
Scott 1959). Equivalent states are merged (Moore 1956).
"""

from __future__ import annotations

import importlib
import itertools
import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import RowSettings
from dlm_jax.data import ByteTokenizer, Tokenizer
from dlm_jax.inference.grammar import is_grammar, regex_of_grammar
from dlm_jax.inference.json_schema import regex_of_objects as regex_of_objects
from dlm_jax.inference.json_schema import regex_of_schema as regex_of_schema
from dlm_jax.inference.json_schema import without_anchors
from dlm_jax.sampling.blocks import steps_needed
from dlm_jax.sampling.commit.quotas import QuotaRule
from dlm_jax.sampling.transforms.automaton import MOST_CLASSES, MOST_STATES, Automaton, held
from dlm_jax.settings import UNSET, SettingError

MOST_NODES = 1 << 16
"""Maximum number of nodes of a pattern after its repeats are expanded."""

_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


class Characters(NamedTuple):
    """A deterministic automaton over character classes.

    Attributes:
      class_of: class of each character of the alphabet.
      next_SK: int32 ``[S, K]``, next state for each character class; state 0 is dead.
      is_final_S: bool ``[S]``, True at accepting states.
      start: state before the first character.
    """

    class_of: dict[str, int]
    next_SK: np.ndarray
    is_final_S: np.ndarray
    start: int


def characters(pattern: str, alphabet: Sequence[str], *, most_states: int) -> Characters:
    r"""Returns the automaton that accepts exactly the full matches of a pattern.

    Args:
      pattern: regular expression in the syntax of `re`, without look-around and back-references.
        ``^`` and ``$`` at the ends of the pattern have no effect; ``\p{..}`` matches a Unicode
        general category.
      alphabet: the characters that can occur in a text.
      most_states: maximum number of states.
    """
    parser: Any = importlib.import_module("re._parser")  # the only parser of Python's regex syntax
    try:
        parsed = parser.parse(_with_categories(pattern, alphabet))
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags are not supported; write the pattern without flags")
        nodes = _Nodes(alphabet)
        end = nodes.new()
        start = nodes.sequence(without_anchors(parsed, is_first=True, is_last=True), end)
    except _Unknown as error:
        found = re.search(_SIGNS.get(error.op, "$"), pattern)
        where = f" at position {found.start()}" if found else ""
        raise ValueError(f"{error.op}{where} is not supported; {error}") from None
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return nodes.determinized(start, end, most_states)


_SIGNS = {
    "AT": r"(?<!^)(?<!\[)[\^]|[$](?!$)|\\[bBAZ]", "ASSERT": r"\(\?<?=", "ASSERT_NOT": r"\(\?<?!",
    "GROUPREF": r"\\[1-9]|\(\?P=",
}  # fmt: skip
"""Expressions that locate an unsupported item in a pattern, keyed by the item's name in `re`."""


class _Unknown(ValueError):
    """Raised for an item of a pattern that automata do not support."""

    def __init__(self, op: str):
        super().__init__(
            "use ^ and $ only at the ends, and no \\b" if op == "AT"
            else "use no look-around or back-references"
        )  # fmt: skip
        self.op = op


_PROPERTY = re.compile(r"\\(?:([pP])\{(\^?)([^}]*)\}|.)|\[\^?\]?|\]", re.DOTALL)
_NOTHING = "\\U0010FFFF"
_LONG_NAMES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Other": "C",
}  # fmt: skip
_CATEGORY_NAMES = frozenset({
    "L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc",
    "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C",
    "Cc", "Cf", "Cs", "Co", "Cn",
})  # fmt: skip


def _with_categories(pattern: str, alphabet: Sequence[str]) -> str:
    r"""Replaces ``\p{..}`` and ``\P{..}`` in a pattern with characters of the alphabet."""
    is_inside = False

    def written(found: re.Match[str]) -> str:
        nonlocal is_inside
        if found[1] is None:
            if found[0][0] != "\\":
                is_inside = found[0][0] == "[" or (is_inside and found[0] != "]")
            return found[0]
        name = _LONG_NAMES.get(found[3], found[3])
        if name not in _CATEGORY_NAMES:
            raise ValueError(
                f"{found[0]} at position {found.start()} is not a Unicode general category"
            )
        is_not = (found[1] == "P") != bool(found[2])
        chosen = [c for c in alphabet if unicodedata.category(c).startswith(name) != is_not]
        text = "".join(f"\\U{ord(c):08x}" for c in chosen) or _NOTHING
        return text if is_inside else f"[{text}]"

    return _PROPERTY.sub(written, pattern)


class _Nodes:
    """A nondeterministic automaton, built from the end to the start."""

    def __init__(self, alphabet: Sequence[str]):
        self._alphabet = list(alphabet)
        self._silent: list[list[int]] = []
        self._moves: list[tuple[int, int] | None] = []
        self._sets: dict[bytes, int] = {}
        self._masks: list[np.ndarray] = []

    def new(self) -> int:
        if len(self._silent) >= MOST_NODES:
            raise ValueError("the pattern is too large after its repeats are expanded")
        self._silent.append([])
        self._moves.append(None)
        return len(self._silent) - 1

    def sequence(self, items: list[tuple[Any, Any]], end: int) -> int:
        """Adds a sequence of items that ends at `end` and returns its first node."""
        for op, given in reversed(items):
            end = self._item(str(op), given, end)
        return end

    def determinized(self, start: int, end: int, most_states: int) -> Characters:
        """Returns the deterministic automaton with equivalent states merged."""
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
        for nodes in itertools.islice(subsets, 1, None):  # the list grows in this loop
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
                raise ValueError("flags are not supported; write the pattern without flags")
            return self.sequence(list(items), end)
        if op == "BRANCH":
            node = self.new()
            self._silent[node] = [self.sequence(list(items), end) for items in given[1]]
            return node
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, items = given
            return self._repeat(low, high, items, end)
        raise _Unknown(op)

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
        """Returns the characters that an item matches."""
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
        """Returns the nodes that are reachable without consuming a character."""
        found, todo = set(nodes), list(nodes)
        while todo:
            for node in self._silent[todo.pop()]:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        return frozenset(found)


def _merged(found: Characters) -> Characters:
    """Returns the minimal equivalent automaton. The dead state remains first."""
    label = found.is_final_S.astype(np.int64)
    while True:
        told = np.column_stack([label, label[found.next_SK]])
        _, first, finer = np.unique(told, axis=0, return_index=True, return_inverse=True)
        finer = finer.reshape(-1)
        if finer.max() == label.max():
            break
        label = finer
    # States are numbered so that the class of the dead state comes first.
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


LONGEST = 1 << 15
"""Maximum length of a pattern in characters."""

_KEPT = 64
_MOST_ENTRIES = 1 << 26
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Structures:
    """Automata over the vocabulary of a model, built once per pattern.

    The letters of the automata are the ids of the tokenizer without `banned_ids`, which are never
    written. Any of `eos_ids` ends a text. The network returns `vocab_size` logits.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int],
        banned_ids: Sequence[int],
    ):  # fmt: skip
        self._vocab_size, self._eos_ids = vocab_size, tuple(eos_ids)
        found = pieces(tokenizer, {*eos_ids, *banned_ids, tokenizer.mask_id})
        self._texts, self._ids = list(found), list(found.values())
        self._alphabet = sorted(set("".join(self._texts)))
        self._known: OrderedDict[str, Automaton] = OrderedDict()
        self._lock = threading.Lock()

    def automaton(self, pattern: str) -> Automaton:
        if len(pattern) > LONGEST:
            raise SettingError(
                "structure", UNSET, f"has {len(pattern)} characters", f"use at most {LONGEST}"
            )
        with self._lock:
            found = self._known.get(pattern)
            if found is None:
                found = self._known[pattern] = self._compiled(pattern)
            self._known.move_to_end(pattern)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def _compiled(self, pattern: str) -> Automaton:
        try:
            regex = regex_of_grammar(pattern, longest=LONGEST) if is_grammar(pattern) else pattern
            letters = characters(regex, self._alphabet, most_states=MOST_STATES - 2)
        except ValueError as error:
            why = " ".join(str(error).split())[:300]
            raise SettingError("structure", pattern[:100], f"cannot be used: {why}") from None
        num_states, over = len(letters.next_SK) + 1, len(letters.next_SK)
        table_SU = self._walked(letters, pattern)
        table_SV = np.zeros((num_states, self._vocab_size), np.int16)
        for column, ids in enumerate(self._ids):
            table_SV[:over, ids] = table_SU[:, column : column + 1]
        is_final_S = np.append(letters.is_final_S, True)
        for eos_id in self._eos_ids:
            table_SV[is_final_S, eos_id] = over
        made = _in_classes(pattern, table_SV, is_final_S, letters.start)
        if made.fewest_S[made.start] > MOST_STATES:
            raise SettingError(
                "structure", pattern[:100], "matches no text that the tokens of the model can form"
            )
        return made

    def _walked(self, letters: Characters, pattern: str) -> np.ndarray:
        """Returns the next state for each state and token text, int16 ``[S, U]``."""
        num_states, num_classes = letters.next_SK.shape
        if num_states * len(self._texts) > _MOST_ENTRIES:
            raise SettingError(
                "structure",
                pattern[:100],
                f"has {num_states} states, too many for a vocabulary of {len(self._texts)} texts",
                "use a shorter pattern",
            )
        longest = max(map(len, self._texts))
        codes_UK = np.full((len(self._texts), longest), num_classes, np.int32)
        for place, text in enumerate(self._texts):
            codes_UK[place, : len(text)] = [letters.class_of[c] for c in text]
        # Texts whose characters have the same classes lead to the same states.
        kinds_NK, kind_U = np.unique(codes_UK, axis=0, return_inverse=True)
        stay_S1 = np.arange(num_states, dtype=np.int32)[:, None]
        next_SK = np.append(letters.next_SK, stay_S1, axis=1)
        state_SN = np.repeat(stay_S1, len(kinds_NK), axis=1)
        for column_N in kinds_NK.T:
            state_SN = next_SK[state_SN, column_N[None]]
        return state_SN[:, kind_U.reshape(-1)].astype(np.int16)


def pieces(tokenizer: Tokenizer, left_out: set[int]) -> dict[str, list[int]]:
    """Maps each text to the ids that decode to it. Ids that decode to part of a character are
    skipped.
    """
    found: dict[str, list[int]] = {}
    if isinstance(tokenizer, ByteTokenizer):
        return {chr(id_): [id_] for id_ in range(128) if id_ not in left_out}
    # Decode after another token, because some tokenizers decode the first token differently.
    before = _anchor(tokenizer)
    shown = len(tokenizer.decode(before))
    for id_ in range(tokenizer.vocab_size):
        if id_ in left_out:
            continue
        text = tokenizer.decode([*before, id_])[shown:]
        if text and _UNKNOWN not in text:
            found.setdefault(text, []).append(id_)
    return found


def check_structure(
    sample: RowSettings, tokens: np.ndarray, *, is_draft: np.ndarray | None, mask_id: int
) -> None:
    """Raises ValueError if a request can violate its structure or cannot complete it."""
    automaton = sample.structure
    if not isinstance(automaton, Automaton):
        return
    (holes,) = np.nonzero(tokens == mask_id)
    if sample.table.named("fill", sample).holds_structure:
        if is_draft is not None:
            raise SettingError("draft", UNSET, "can violate the structure", "remove one of them")
        if holes.size:
            _check_reach(held(sample), tokens[holes[0] :], mask_id)
        return
    if not issubclass(sample.table.commit[sample.order], QuotaRule) or sample.schedule != "linear":
        raise SettingError(
            "structure",
            UNSET,
            f"requires one token per step, which order={sample.order!r} with "
            f"schedule={sample.schedule!r} does not guarantee",
            "for example, use order='left_to_right'",
            others=["order"],
        )
    if not holes.size:
        return
    if sample.steps < (needed := steps_needed(holes, sample.block_length, holes[0])):
        raise SettingError(
            "steps",
            sample.steps,
            f"is less than the {needed} steps that a structure requires, one token per step",
            f"use steps={needed}",
        )
    _check_reach(automaton, tokens[holes[0] :], mask_id)


def is_broken(automaton: Automaton | str | None, tokens: np.ndarray) -> bool:
    """Returns whether the tokens of a row from its first hole onward violate its structure."""
    return isinstance(automaton, Automaton) and not automaton.accepts(tokens)


def _check_reach(automaton: Automaton, tokens: np.ndarray, mask_id: int) -> None:
    states = np.arange(len(automaton.next_SC)) == automaton.start
    (given,) = np.nonzero(tokens != mask_id)
    if not given.size:
        fewest = automaton.fewest_S[automaton.start]
        if fewest > tokens.size:
            raise SettingError(
                "structure",
                UNSET,
                f"requires at least {fewest} new tokens, but gen_length={tokens.size}",
                "increase gen_length",
                others=["gen_length"],
            )
        return
    for token in tokens.tolist():
        states = automaton.after(states, None if token == mask_id else token)
    if not (states & automaton.is_final_S).any():
        raise SettingError("structure", UNSET, "cannot match the given text and its holes")


def _in_classes(
    pattern: str, table_SV: np.ndarray, is_final_S: np.ndarray, start: int
) -> Automaton:
    """Builds the automaton from a table of next states, indexed by state and id."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 2**63, len(table_SV), dtype=np.uint64)
    marks = np.zeros(table_SV.shape[1], np.uint64)
    for row, weight in zip(table_SV, weights, strict=True):
        marks += row.astype(np.uint64) * weight
    # The class of ids without transitions has the label 0, which comes first.
    marks = np.append(marks, np.uint64(0))
    _, first, class_of = np.unique(marks, return_index=True, return_inverse=True)
    whole = np.append(table_SV, np.zeros((len(table_SV), 1), np.int16), axis=1)
    next_SC = whole[:, first]
    assert np.array_equal(next_SC[:, class_of], whole), "two marks collide"
    if next_SC.shape[1] > MOST_CLASSES:
        raise SettingError(
            "structure", pattern[:100], "distinguishes too many tokens", "use a shorter pattern"
        )
    return Automaton(pattern, class_of[:-1].astype(np.int16), next_SC, is_final_S, start)


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a short text to decode before a token; empty if no text can be encoded."""
    for text in ("a", "e", "0", " "):
        try:
            return tokenizer.encode(text).tolist()
        except ValueError:
            continue
    return []
