"""Structured output: regular expressions and JSON schemas as automata over tokens."""

from dlm_jax.structured.automaton import Arcs, Automaton, Structures, stack_arcs
from dlm_jax.structured.json_schema import regex_of_schema
from dlm_jax.structured.regex import compile_regex

__all__ = [
    "Arcs",
    "Automaton",
    "Structures",
    "compile_regex",
    "regex_of_schema",
    "stack_arcs",
]
