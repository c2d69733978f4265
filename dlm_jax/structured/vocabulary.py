"""Automata over the tokens of a model, compiled once per regular expression."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from dlm_jax.settings import UNSET, SettingError
from dlm_jax.structured.automaton import MOST_CLASSES, MOST_STATES, Automaton
from dlm_jax.structured.regex import LONGEST, ByteAutomaton, compile_regex

_CACHED = 64
_MOST_BYTE_STATES = (1 << 15) - 2
_MOST_EFFECTS = 1 << 27
_MOST_PAIRS = 1 << 31
_MOST_ARCS = 1 << 22
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of a tokenizer. ``bytes_of(id)``, if present, returns the bytes of an id, or
    None if they are unknown.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def mask_id(self) -> int: ...

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Any) -> str: ...


def token_bytes(tokenizer: Decoder, left_out: set[int]) -> dict[bytes, list[int]]:
    """Maps the bytes of tokens to their ids, including tokens that are a part of a character."""
    ids_of: dict[bytes, list[int]] = {}
    bytes_of = getattr(tokenizer, "bytes_of", lambda id_: None)
    # Decode after another token, because some tokenizers decode the first token differently.
    before = _anchor(tokenizer)
    shown = len(tokenizer.decode(before))
    for id_ in range(tokenizer.vocab_size):
        if id_ in left_out:
            continue
        text = tokenizer.decode([*before, id_])[shown:]
        data = bytes_of(id_) if _REPLACED in text else text.encode("utf-8", "surrogatepass")
        if data:
            ids_of.setdefault(data, []).append(id_)
    return ids_of


def _anchor(tokenizer: Decoder) -> list[int]:
    """The ids of a short text; empty if no text can be encoded."""
    for text in ("a", "e", "0", " "):
        try:
            return tokenizer.encode(text).tolist()
        except ValueError:
            continue
    return []


class Structures:
    """Automata over the vocabulary of a model, compiled once per regular expression.

    Texts consist of the ids of the tokenizer without `banned_ids`, which are never written. Any of
    `eos_ids` ends a text. The network returns `vocab_size` logits.
    """

    def __init__(
        self,
        tokenizer: Decoder,
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
        self._cache: OrderedDict[str, Future[Automaton | SettingError]] = OrderedDict()
        self._lock = threading.Lock()

    def automaton(self, pattern: str) -> Automaton:
        """Returns the automaton of a regular expression. Concurrent calls for one expression share
        its compilation; calls for other expressions do not wait for it. A refusal is cached, too.
        """
        if len(pattern) > LONGEST:
            raise SettingError(
                "structure", UNSET, f"has {len(pattern)} characters", f"use at most {LONGEST}"
            )
        with self._lock:
            future = self._cache.get(pattern)
            is_new = future is None
            if future is None:
                future = self._cache[pattern] = Future()
            self._cache.move_to_end(pattern)
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        if is_new:
            try:
                future.set_result(self._compile(pattern))
            except SettingError as error:
                future.set_result(error)
            except BaseException as error:
                with self._lock:
                    if self._cache.get(pattern) is future:
                        del self._cache[pattern]
                future.set_exception(error)
                raise
        result = future.result()
        if isinstance(result, SettingError):
            raise SettingError(*result.args)
        return result

    def is_compiled(self, pattern: str) -> bool:
        """Returns whether the automaton of an expression, or its refusal, is available without
        compilation.
        """
        with self._lock:
            future = self._cache.get(pattern)
        return future is not None and future.done()

    def _compile(self, pattern: str) -> Automaton:
        if re.search(r"^\s*root\s*::=", pattern, re.MULTILINE):
            raise SettingError(
                "structure",
                pattern[:100],
                "is a grammar, which is no longer supported",
                "write it as a regular expression, or use regex_of_schema",
            )
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
        effects: list[np.ndarray] = [np.zeros(num_states, np.int16)]
        numbers: dict[bytes, int] = {effects[0].tobytes(): 0}

        def number(effect_S: np.ndarray) -> int:
            place = numbers.setdefault(effect_S.tobytes(), len(effects))
            if place == len(effects):
                effects.append(effect_S)
            if len(effects) * num_states > _MOST_EFFECTS:
                raise ValueError("it distinguishes too many tokens; use a shorter expression")
            return place

        effect_U = np.full(len(self._ids), number(np.arange(num_states, dtype=np.int16)))
        for bytes_U in self._bytes:
            classes_U = letters.class_of_256[bytes_U]
            keys = effect_U[: len(bytes_U)] * num_classes + classes_U
            some, inverse = np.unique(keys, return_inverse=True)
            reached = [
                number(next_KS[key % num_classes][effects[key // num_classes]])
                for key in some.tolist()
            ]
            effect_U[: len(bytes_U)] = np.array(reached, np.int64)[inverse.reshape(-1)]
        effect_of_V = np.zeros(self._vocab_size, np.int64)
        for ids, effect in zip(self._ids, effect_U, strict=True):
            effect_of_V[ids] = effect
        is_final_S = np.append(letters.is_final_S, True)
        table_ES = np.pad(np.array(effects), ((0, 1), (0, 1)))
        table_ES[-1, is_final_S] = over
        effect_of_V[list(self._eos_ids)] = len(effects)
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
        number_S = np.cumsum(is_reached_S) - 1
        if number_S[-1] >= MOST_STATES:
            raise ValueError(f"the pattern has more than {MOST_STATES - 2} states")
        # The class of ids without transitions comes first.
        next_CS, class_of_E = np.unique(
            number_S[table_ES[:, is_reached_S]], axis=0, return_inverse=True
        )
        if len(next_CS) > MOST_CLASSES:
            raise ValueError("it distinguishes too many tokens; use a shorter expression")
        return Automaton(
            pattern,
            class_of_E.reshape(-1)[effect_of_V.reshape(-1)[:-1]].astype(np.int16),
            np.ascontiguousarray(next_CS.T.astype(np.int16)),
            is_final_S[is_reached_S],
            int(number_S[letters.start]),
        )
