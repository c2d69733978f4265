"""Languages as automata over a model's tokens, and what is refused of requests that have one."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_jax.data import ByteTokenizer, Tokenizer
from dlm_jax.inference.regular import Characters, characters
from dlm_jax.sampling.blocks import steps_needed
from dlm_jax.sampling.commit.quotas import QuotaRule
from dlm_jax.sampling.transforms.structure import MOST_CLASSES, MOST_STATES, Automaton

if TYPE_CHECKING:
    from dlm_jax.inference.request import Request

LONGEST = 1 << 15
"""Characters of a pattern at most."""

_KEPT = 64
_MOST_ENTRIES = 1 << 26
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Structures:
    """The automata of a model's vocabulary, made once for each pattern.

    Args:
      tokenizer: whose ids are the letters.
      vocab_size: of the network.
      eos_ids: that end a text.
      banned_ids: that are never written.
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
        """The automaton of a regular expression.

        Raises:
          ValueError: it is none that `dlm_jax.inference.regular` knows, none of its texts can be
            written with these tokens, or it is too large.
        """
        if len(pattern) > LONGEST:
            raise ValueError(f"structure has {len(pattern)} characters; use {LONGEST} at most")
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
            letters = characters(pattern, self._alphabet, most_states=MOST_STATES - 2)
        except ValueError as error:
            why = " ".join(str(error).split())[:300]
            raise ValueError(f"structure={pattern[:100]!r} cannot be used: {why}") from None
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
            raise ValueError(
                f"structure={pattern[:100]!r} matches nothing that the model's tokens can write"
            )
        return made

    def _walked(self, letters: Characters, pattern: str) -> np.ndarray:
        """The state behind each text of a token from each state, int16 ``[S, U]``."""
        num_states, num_classes = letters.next_SK.shape
        if num_states * len(self._texts) > _MOST_ENTRIES:
            raise ValueError(
                f"structure={pattern[:100]!r} has {num_states} states, too many for a vocabulary "
                f"of {len(self._texts)} texts; use a shorter one"
            )
        longest = max(map(len, self._texts))
        codes_UK = np.full((len(self._texts), longest), num_classes, np.int32)
        for place, text in enumerate(self._texts):
            codes_UK[place, : len(text)] = [letters.class_of[c] for c in text]
        # Texts whose characters are of the same classes lead to the same states.
        kinds_NK, kind_U = np.unique(codes_UK, axis=0, return_inverse=True)
        stay_S1 = np.arange(num_states, dtype=np.int32)[:, None]
        next_SK = np.append(letters.next_SK, stay_S1, axis=1)
        state_SN = np.repeat(stay_S1, len(kinds_NK), axis=1)
        for column_N in kinds_NK.T:
            state_SN = next_SK[state_SN, column_N[None]]
        return state_SN[:, kind_U.reshape(-1)].astype(np.int16)


def pieces(tokenizer: Tokenizer, left_out: set[int]) -> dict[str, list[int]]:
    """The ids that stand for each text; those that hold a part of a character are left out."""
    found: dict[str, list[int]] = {}
    if isinstance(tokenizer, ByteTokenizer):
        return {chr(id_): [id_] for id_ in range(128) if id_ not in left_out}
    # Behind another one, as some tokenizers write a first token differently.
    before = _anchor(tokenizer)
    shown = len(tokenizer.decode(before))
    for id_ in range(tokenizer.vocab_size):
        if id_ in left_out:
            continue
        text = tokenizer.decode([*before, id_])[shown:]
        if text and _UNKNOWN not in text:
            found.setdefault(text, []).append(id_)
    return found


def regex_of_schema(schema: Mapping[str, Any]) -> str:
    """The regular expression of the texts that a JSON schema allows.

    Raises:
      ValueError: the schema is none, or has parts that no regular expression holds.
    """
    try:
        return _core().json_schema.build_regex_from_schema(json.dumps(schema))
    except (ValueError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"the schema cannot be used: {why}") from None


def regex_of_objects() -> str:
    """The regular expression of JSON objects that are nested up to two deep."""
    text = r'"([^"\\\x00-\x1F]|\\["\\/bfnrt])*"'
    plain = rf"(?:{text}|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|true|false|null)"
    value = rf"(?:{plain}|\[(?:{plain}(?:, ?{plain})*)?\]|{_object(text, plain)})"
    return _object(text, value)


def _object(name: str, value: str) -> str:
    pair = rf"{name}: ?{value}"
    return rf"\{{(?:{pair}(?:, ?{pair})*)?\}}"


def check_structure(request: Request, *, mask_id: int) -> None:
    """Raises ValueError if a request may break its structure, or cannot complete it."""
    sample = request.sample
    automaton = sample.structure
    if not isinstance(automaton, Automaton):
        return
    if not issubclass(sample.table.commit[sample.order], QuotaRule) or sample.schedule != "linear":
        raise ValueError(
            f"structure takes a token a step, which order={sample.order!r} with "
            f"schedule={sample.schedule!r} does not; use order='left_to_right', say"
        )
    (holes,) = np.nonzero(request.tokens == mask_id)
    if not holes.size:
        return
    if sample.steps < (needed := steps_needed(holes, sample.block_length, holes[0])):
        raise ValueError(
            f"steps={sample.steps} is less than the {needed} that a structure takes, a token a "
            f"step; use steps={needed}"
        )
    _check_reach(automaton, request.tokens[holes[0] :], mask_id)


def is_broken(request: Request, tokens: np.ndarray) -> bool:
    """Whether the tokens of a row that has ended, from its first hole on, break its structure."""
    automaton = request.sample.structure
    return isinstance(automaton, Automaton) and not automaton.accepts(tokens)


def _check_reach(automaton: Automaton, tokens: np.ndarray, mask_id: int) -> None:
    states = np.arange(len(automaton.next_SC)) == automaton.start
    (given,) = np.nonzero(tokens != mask_id)
    if not given.size:
        fewest = automaton.fewest_S[automaton.start]
        if fewest > tokens.size:
            raise ValueError(
                f"structure needs {fewest} new tokens at least, and gen_length={tokens.size}; "
                "allow more"
            )
        return
    for token in tokens.tolist():
        states = automaton.after(states, None if token == mask_id else token)
    if not (states & automaton.is_final_S).any():
        raise ValueError("structure does not go with the text that is given and its gaps")


def _in_classes(
    pattern: str, table_SV: np.ndarray, is_final_S: np.ndarray, start: int
) -> Automaton:
    """The automaton of a table of states behind states and ids."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 2**63, len(table_SV), dtype=np.uint64)
    marks = np.zeros(table_SV.shape[1], np.uint64)
    for row, weight in zip(table_SV, weights, strict=True):
        marks += row.astype(np.uint64) * weight
    # The class of ids that lead nowhere has the mark 0, which comes first.
    marks = np.append(marks, np.uint64(0))
    _, first, class_of = np.unique(marks, return_index=True, return_inverse=True)
    whole = np.append(table_SV, np.zeros((len(table_SV), 1), np.int16), axis=1)
    next_SC = whole[:, first]
    assert np.array_equal(next_SC[:, class_of], whole), "two marks collide"
    if next_SC.shape[1] > MOST_CLASSES:
        raise ValueError(
            f"structure={pattern[:100]!r} tells too many tokens apart; use a shorter one"
        )
    return Automaton(pattern, class_of[:-1].astype(np.int16), next_SC, is_final_S, start)


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Ids of some text that others may follow."""
    for text in ("a", "e", "0", " "):
        try:
            return tokenizer.encode(text).tolist()
        except ValueError:
            continue
    return []


def _core() -> Any:
    try:
        return importlib.import_module("outlines_core")
    except ModuleNotFoundError:
        raise ValueError(
            "a JSON schema needs outlines-core; install it with: pip install 'dlm_jax[structure]'"
        ) from None
