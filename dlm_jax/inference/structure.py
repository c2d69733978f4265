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
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import RowSettings
from dlm_jax.data import ByteTokenizer, Tokenizer
from dlm_jax.inference.budget import Budget
from dlm_jax.inference.grammar import is_grammar, regex_of_grammar
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


def characters(
    pattern: str, alphabet: Sequence[str], *, most_states: int, work: Budget | None = None
) -> Characters:
    r"""Returns the automaton that accepts exactly the full matches of a pattern.

    Args:
      pattern: regular expression in the syntax of `re`, without back-references and without
        look-around, except look-behind of one character. ``^`` and ``$`` at the ends of the pattern
        have no effect; ``\p{..}`` matches a Unicode general category.
      alphabet: the characters that can occur in a text.
      most_states: maximum number of states.
      work: limit on the work.

    Raises:
      ValueError: the pattern is not supported, or exceeds a limit.
    """
    parser: Any = importlib.import_module("re._parser")  # the only parser of Python's regex syntax
    work = work or Budget()
    work.spend(_PER_CHARACTER * len(pattern))
    try:
        written, kept = _with_categories(pattern)
        parsed = parser.parse(written)
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags are not supported; write the pattern without flags")
        nodes = _Nodes(alphabet, kept, work)
        end = nodes.new()
        start = nodes.sequence(without_anchors(parsed, is_first=True, is_last=True), end)
    except _Unknown as error:
        found = re.search(_SIGNS.get(error.op, "$"), pattern)
        where = f" at position {found.start()}" if found else ""
        raise ValueError(f"{error.op}{where} is not supported; {error}") from None
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return nodes.determinized(start, end, most_states)


_MOST_UNMERGED = 4
_PER_CHARACTER = 16
"""Operations of Python's parser per character of a pattern."""

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
            else "use no look-around, except look-behind of one character, or back-references"
        )  # fmt: skip
        self.op = op


_PROPERTY = re.compile(r"\\(?:([pP])\{(\^?)([^}]*)\}|.)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG_NAMES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Other": "C",
}  # fmt: skip
_CATEGORY_NAMES = frozenset({
    "L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc",
    "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C",
    "Cc", "Cf", "Cs", "Co", "Cn",
})  # fmt: skip

_PRIVATE = 0xDC00
"""The first of the lone surrogates that represent Unicode categories in a pattern."""


def _with_categories(pattern: str) -> tuple[str, list[tuple[str, bool]]]:
    r"""Replaces ``\p{..}`` and ``\P{..}`` in a pattern with lone surrogates. Also returns the name
    of each surrogate's category, and whether it represents the other characters.
    """
    kept: dict[tuple[str, bool], int] = {}

    def written(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        name = _LONG_NAMES.get(found[3], found[3])
        if name not in _CATEGORY_NAMES:
            raise ValueError(
                f"{found[0]} at position {found.start()} is not a Unicode general category"
            )
        is_not = (found[1] == "P") != bool(found[2])
        return chr(_PRIVATE + kept.setdefault((name, is_not), len(kept)))

    made = _PROPERTY.sub(written, pattern)
    if kept and _SURROGATE.search(pattern):
        raise ValueError("lone surrogates are not characters; remove them")
    return made, list(kept)


class _Nodes:
    """A nondeterministic automaton, built from the end to the start.

    `kept` contains the categories of the surrogates from `_PRIVATE`; `work` counts operations.
    """

    def __init__(self, alphabet: Sequence[str], kept: list[tuple[str, bool]], work: Budget):
        self._alphabet, self._work = list(alphabet), work
        self._kept = {_PRIVATE + place: category for place, category in enumerate(kept)}
        self._codes = np.array([ord(c) for c in alphabet], np.int64)
        self._silent: list[list[int]] = []
        self._moves: list[tuple[int, int] | None] = []
        # Nodes that are entered only behind a character of a set, or only behind no such character.
        self._behind: dict[int, tuple[int, bool]] = {}
        self._sets: dict[bytes, int] = {}
        self._masks: list[np.ndarray] = []
        self._set_of_item: dict[Any, int] = {}
        self._members: dict[Any, np.ndarray] = {}

    def new(self) -> int:
        if len(self._silent) >= MOST_NODES:
            raise ValueError("the pattern is too large after its repeats are expanded")
        self._work.spend(1)
        self._silent.append([])
        self._moves.append(None)
        return len(self._silent) - 1

    def sequence(self, items: list[tuple[Any, Any]], end: int) -> int:
        """Adds a sequence of items that ends at `end` and returns its first node."""
        self._work.spend(4 + len(items))
        for op, given in reversed(items):
            end = self._item(str(op), given, end)
        return end

    def determinized(self, start: int, end: int, most_states: int) -> Characters:
        """Returns the deterministic automaton with equivalent states merged."""
        masks = np.array(self._masks or [np.zeros(len(self._alphabet), bool)])
        _, first, class_of = np.unique(
            np.packbits(masks, axis=0), axis=1, return_index=True, return_inverse=True
        )
        class_of = class_of.reshape(-1)
        classes = [tuple(np.flatnonzero(mask[first]).tolist()) for mask in masks]
        # Classes on which the same look-behinds hold have the same sign.
        watched = sorted({place for place, _ in self._behind.values()})
        signs: list[Any] = [tuple(masks[watched, place].tolist()) for place in first]
        before = (False,) * len(watched)
        too_large = ValueError(f"the pattern has more than {most_states} states")
        numbers: dict[frozenset[int], int] = {frozenset(): 0}
        subsets: list[frozenset[int]] = [frozenset()]

        def number(targets: list[int], sign: tuple[bool, ...]) -> int:
            holds = dict(zip(watched, sign, strict=True))
            nodes = self._closure(targets, holds)
            if nodes not in numbers:
                if len(subsets) > _MOST_UNMERGED * most_states:
                    raise too_large
                numbers[nodes] = len(subsets)
                subsets.append(nodes)
            return numbers[nodes]

        begin = number([start], before)
        rows = [np.zeros(len(first), np.int32)]
        for nodes in itertools.islice(subsets, 1, None):  # the list grows in this loop
            targets_of: dict[int, list[int]] = {}
            for node in nodes:
                if (move := self._moves[node]) is not None:
                    targets_of.setdefault(move[0], []).append(move[1])
            sets_of: dict[int, list[int]] = {}
            for place in targets_of:
                for kind in classes[place]:
                    sets_of.setdefault(kind, []).append(place)
            self._work.spend(len(nodes) + sum(len(classes[place]) for place in targets_of))
            self._work.spend_elements(len(first))
            # Characters in the same sets lead to the same state.
            alike: dict[Any, list[int]] = {}
            for kind, places in sets_of.items():
                alike.setdefault((tuple(places), signs[kind]), []).append(kind)
            row = np.zeros(len(first), np.int32)
            for (places, sign), kinds in alike.items():
                row[kinds] = number([node for p in places for node in targets_of[p]], sign)
            rows.append(row)
        is_final = np.array([end in nodes for nodes in subsets])
        found = dict(zip(self._alphabet, class_of.tolist(), strict=True))
        made = _merged(Characters(found, np.array(rows), is_final, begin), self._work)
        if len(made.next_SK) > most_states:
            raise too_large
        return made

    def _item(self, op: str, given: Any, end: int) -> int:
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            node = self.new()
            self._moves[node] = self._set(op, given), end
            return node
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
        if op in ("ASSERT", "ASSERT_NOT"):
            direction, items = given
            inner = [(str(kind), value) for kind, value in items]
            if direction < 0 and len(inner) == 1 and inner[0][0] in (
                "LITERAL", "NOT_LITERAL", "ANY", "IN"
            ):  # fmt: skip
                node = self.new()
                self._behind[node] = self._set(*inner[0]), op == "ASSERT"
                self._silent[node] = [end]
                return node
        raise _Unknown(op)

    def _repeat(self, low: int, high: Any, items: Any, end: int) -> int:
        items = list(items)
        if str(high) == "MAXREPEAT":
            node = self.new()
            self._silent[node] = [end, self.sequence(items, node)]
            end = node
        else:
            last = end
            for _ in range(high - low):
                node = self.new()
                self._silent[node] = [self.sequence(items, end), last]
                end = node
        for _ in range(low):
            end = self.sequence(items, end)
        return end

    def _set(self, op: str, given: Any) -> int:
        """Returns the number of the set of characters that an item matches."""
        # Repeats expand the same item many times; a list lives as long as the parsed pattern.
        key = (op, id(given) if op == "IN" else given)
        if key not in self._set_of_item:
            mask = self._mask(op, given)
            place = self._sets.setdefault(mask.tobytes(), len(self._masks))
            if place == len(self._masks):
                self._masks.append(mask)
            self._set_of_item[key] = place
        return self._set_of_item[key]

    def _mask(self, op: str, given: Any) -> np.ndarray:
        if op == "ANY":
            return self._codes != ord("\n")
        if op == "IN":
            parts = [(str(kind), value) for kind, value in given]
            is_not = parts[0][0] == "NEGATE"
            mask = np.zeros(len(self._codes), bool)
            for kind, value in parts[is_not:]:
                mask |= self._member(kind, value)
            return mask != is_not
        return self._member("LITERAL", given) == (op == "LITERAL")

    def _member(self, kind: str, value: Any) -> np.ndarray:
        self._work.spend_elements(len(self._codes))
        if kind == "LITERAL" and value not in self._kept:
            return self._codes == value
        if kind == "RANGE":
            if self._kept.keys() & set(value):
                raise ValueError("a range begins or ends with a category; write it separately")
            return (value[0] <= self._codes) & (self._codes <= value[1])
        if value not in self._members:
            self._work.spend(len(self._codes))
            self._members[value] = self._where(self._test(value))
        return self._members[value]

    def _test(self, value: Any) -> Callable[[str], bool]:
        if value in self._kept:
            category, is_other = self._kept[value]
            return lambda c: unicodedata.category(c).startswith(category) != is_other
        name = str(value).removeprefix("CATEGORY_")
        is_not = name.startswith("NOT_")
        compiled = re.compile(_CATEGORIES[name.removeprefix("NOT_")])
        return lambda c: (compiled.fullmatch(c) is not None) != is_not

    def _where(self, is_in: Callable[[str], bool]) -> np.ndarray:
        return np.fromiter(map(is_in, self._alphabet), bool, len(self._alphabet))

    def _closure(self, nodes: list[int], holds: dict[int, bool]) -> frozenset[int]:
        """Returns the nodes that are reachable without consuming a character. `holds` says which
        sets contain the last character.
        """
        found, todo, count = set(nodes), list(nodes), len(nodes)
        while todo:
            node = todo.pop()
            if node in self._behind:
                place, expected = self._behind[node]
                if holds[place] != expected:
                    continue
            after = self._silent[node]
            count += 1 + len(after)
            for node in after:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        self._work.spend(count)
        return frozenset(found)


def _merged(found: Characters, work: Budget) -> Characters:
    """Returns the minimal equivalent automaton. The dead state remains first."""
    num_states, num_classes = found.next_SK.shape
    work.spend_elements(16 * found.next_SK.size)
    pairs = np.unique(found.next_SK + np.arange(num_states)[:, None] * num_states)
    by_target = np.argsort(pairs % num_states, kind="stable")
    ends = np.searchsorted((pairs % num_states)[by_target], np.arange(num_states + 1))
    sources = (pairs // num_states)[by_target]
    label = found.is_final_S.astype(np.int64)
    members = {block: set(np.flatnonzero(label == block).tolist()) for block in (0, 1)}
    num_labels, dirty = 2, np.arange(num_states)
    # States whose successors changed their label are compared again. When a block is divided, its
    # largest part keeps the label, so a state changes its label at most log S times.
    while dirty.size:
        work.spend(4 * dirty.size + 8)
        work.spend_elements(dirty.size * num_classes)
        parts_of: dict[int, dict[bytes, list[int]]] = {}
        for state, block, row in zip(
            dirty.tolist(), label[dirty].tolist(), label[found.next_SK[dirty]], strict=True
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
    # States are numbered by their first occurrence, so the dead state comes first.
    _, first, finer = np.unique(label, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    label, first = place[finer.reshape(-1)], first[order]
    return Characters(
        found.class_of,
        label[found.next_SK[first]].astype(np.int32),
        found.is_final_S[first],
        int(label[found.start]),
    )


LONGEST = 1 << 15
"""Maximum length of a pattern in characters."""

_KEPT = 64
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
        texts = sorted(found, key=len, reverse=True)
        self._alphabet = sorted(set("".join(texts)))
        place = {c: code for code, c in enumerate(self._alphabet)}
        # The first, second, ... characters of all texts that have one; longer texts come first.
        codes = [[place[c] for c in text] for text in texts]
        sizes = np.array([-len(text) for text in texts])
        self._codes = [
            np.array([code[at] for code in codes[: np.searchsorted(sizes, -at)]])
            for at in range(len(texts[0]) if texts else 0)
        ]
        self._ids = [np.array(found[text]) for text in texts]
        self._known: OrderedDict[str, Future[Automaton]] = OrderedDict()
        self._lock = threading.Lock()

    def automaton(self, pattern: str) -> Automaton:
        """Returns the automaton of a pattern. Concurrent calls for one pattern share its
        compilation; calls for other patterns do not wait for it.
        """
        if len(pattern) > LONGEST:
            raise SettingError(
                "structure", UNSET, f"has {len(pattern)} characters", f"use at most {LONGEST}"
            )
        with self._lock:
            found = self._known.get(pattern)
            is_new = found is None
            if found is None:
                found = self._known[pattern] = Future()
            self._known.move_to_end(pattern)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        if is_new:
            try:
                found.set_result(self._compiled(pattern))
            except BaseException as error:
                with self._lock:
                    if self._known.get(pattern) is found:
                        del self._known[pattern]
                found.set_exception(error)
                raise
        return found.result()

    def is_compiled(self, pattern: str) -> bool:
        """Returns whether the automaton of a pattern is available without compilation."""
        with self._lock:
            found = self._known.get(pattern)
        return found is not None and found.done()

    def _compiled(self, pattern: str) -> Automaton:
        work = Budget()
        try:
            regex = (
                regex_of_grammar(pattern, longest=LONGEST, work=work)
                if is_grammar(pattern)
                else pattern
            )
            letters = characters(regex, self._alphabet, most_states=MOST_STATES - 2, work=work)
            made = self._over_tokens(letters, pattern, work)
        except SettingError:
            raise
        except ValueError as error:
            why = " ".join(str(error).split())[:300]
            raise SettingError("structure", pattern[:100], f"cannot be used: {why}") from None
        if made.fewest_S[made.start] > MOST_STATES:
            raise SettingError(
                "structure", pattern[:100], "matches no text that the tokens of the model can form"
            )
        return made

    def _over_tokens(self, letters: Characters, pattern: str, work: Budget) -> Automaton:
        """Returns the automaton over ids that accepts the texts of an automaton over characters."""
        num_states, num_classes = letters.next_SK.shape
        over = num_states  # the state behind EOS
        class_of_A = np.array([letters.class_of[c] for c in self._alphabet], np.int64)
        next_KS = np.ascontiguousarray(letters.next_SK.T.astype(np.int16))
        # Texts are grouped by their effect: the state behind them for each state before them. The
        # effect of a text follows from the effect of its beginning and from its last character.
        effects: list[np.ndarray] = [np.zeros(num_states, np.int16)]
        numbers: dict[bytes, int] = {effects[0].tobytes(): 0}

        def number(effect_S: np.ndarray) -> int:
            found = numbers.setdefault(effect_S.tobytes(), len(effects))
            if found == len(effects):
                effects.append(effect_S)
            if len(effects) > _MOST_EFFECTS:
                raise ValueError("it distinguishes too many tokens; use a shorter pattern")
            return found

        effect_U = np.full(len(self._ids), number(np.arange(num_states, dtype=np.int16)))
        for codes in self._codes:
            keys = effect_U[: len(codes)] * num_classes + class_of_A[codes]
            work.spend_elements(16 * len(codes))
            some, inverse = np.unique(keys, return_inverse=True)
            work.spend(len(some))
            work.spend_elements(len(some) * num_states)
            made = [number(next_KS[key % num_classes][effects[key // num_classes]])
                    for key in some.tolist()]  # fmt: skip
            effect_U[: len(codes)] = np.array(made, np.int64)[inverse.reshape(-1)]
        effect_of_V = np.zeros(self._vocab_size, np.int64)
        for ids, effect in zip(self._ids, effect_U, strict=True):
            effect_of_V[ids] = effect
        is_final_S = np.append(letters.is_final_S, True)
        table_ES = np.pad(np.array(effects), ((0, 1), (0, 1)))
        table_ES[-1, is_final_S] = over
        effect_of_V[list(self._eos_ids)] = len(effects)
        # The class of ids without transitions comes first.
        used, class_of_V = np.unique(np.append(effect_of_V, 0), return_inverse=True)
        if len(used) > MOST_CLASSES:
            raise ValueError("it distinguishes too many tokens; use a shorter pattern")
        class_of_V = class_of_V.reshape(-1)[:-1].astype(np.int16)
        next_SC = np.ascontiguousarray(table_ES[used].T)
        work.spend_elements(next_SC.size + num_states**2)
        return Automaton(pattern, class_of_V, next_SC, is_final_S, letters.start)


_MOST_EFFECTS = 2 * MOST_CLASSES


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


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a short text to decode before a token; empty if no text can be encoded."""
    for text in ("a", "e", "0", " "):
        try:
            return tokenizer.encode(text).tolist()
        except ValueError:
            continue
    return []
