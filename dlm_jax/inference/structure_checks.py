"""Checks of requests with a structure, and of their texts."""

from __future__ import annotations

import numpy as np

from dlm_jax.config import RowSettings
from dlm_jax.sampling.blocks import steps_needed
from dlm_jax.sampling.commit.orders import QuotaRule
from dlm_jax.sampling.propose import Constrained
from dlm_jax.sampling.transforms.structure import automaton_of
from dlm_jax.settings import UNSET, SettingError
from dlm_jax.structured.automaton import Automaton


def check_structure(
    sample: RowSettings, tokens: np.ndarray, *, is_draft: np.ndarray | None, mask_id: int
) -> None:
    """Raises ValueError if a request can violate its structure or cannot complete it."""
    automaton = sample.structure
    if not isinstance(automaton, Automaton):
        return
    (holes,) = np.nonzero(tokens == mask_id)
    if issubclass(sample.table.named("fill", sample), Constrained):
        if is_draft is not None:
            raise SettingError("draft", UNSET, "can violate the structure", "remove one of them")
        if holes.size:
            _check_reach(automaton_of(sample), tokens[holes[0] :], mask_id)
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
