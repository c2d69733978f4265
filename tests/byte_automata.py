"""Texts read by an automaton over bytes."""

from __future__ import annotations

from dlm_jax.structured.regex import ByteAutomaton


def after(automaton: ByteAutomaton, text: str, state: int | None = None) -> int:
    """The state after a text; 0 if no match begins with it."""
    state = automaton.start if state is None else state
    for byte in text.encode():
        state = int(automaton.next_SK[state, automaton.class_of_256[byte]])
    return state


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    """True if the whole text matches."""
    return bool(automaton.is_final_S[after(automaton, text)])
