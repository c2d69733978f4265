"""Structural edits: insertions and deletions, which change the length of a row."""

from collections.abc import Mapping

from dlm_jax.sampling.edits.edit_rule import EditContext, EditRule
from dlm_jax.sampling.edits.moves import Edits, delete_at, insert_at
from dlm_jax.sampling.edits.scores import (
    Likelihood,
    Uncertainty,
    deletion_scores,
    gap_scores,
    token_uncertainty,
)

EDIT_RULES: Mapping[str, type[EditRule]] = {rule.name: rule for rule in (Uncertainty, Likelihood)}
"""Edit rules, keyed by the value of ``edit_scoring``."""

__all__ = [
    "EDIT_RULES",
    "EditContext",
    "EditRule",
    "Edits",
    "Likelihood",
    "Uncertainty",
    "delete_at",
    "deletion_scores",
    "gap_scores",
    "insert_at",
    "token_uncertainty",
]
