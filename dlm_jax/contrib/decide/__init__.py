"""Decisions: probabilities of labels, with temperatures fitted to labelled examples.

``python -m dlm_jax.contrib.decide`` evaluates a model on a file of labelled prompts.
"""

from dlm_jax.contrib.decide.calibration import (
    Scale,
    calibrate,
    calibrate_lengths,
    expected_calibration_error,
    nll,
    read_calibration,
    write_calibration,
)
from dlm_jax.contrib.decide.decisions import Decision, Question, answers, decide, question

__all__ = [
    "Decision",
    "Question",
    "Scale",
    "answers",
    "calibrate",
    "calibrate_lengths",
    "decide",
    "expected_calibration_error",
    "nll",
    "question",
    "read_calibration",
    "write_calibration",
]
