"""Loads the data of the tasks in this package for lm-evaluation-harness."""

import importlib
import json
from pathlib import Path
from typing import Any


def shakespeare_cloze(**metadata: object) -> dict[str, Any]:
    """Loads lines of Shakespeare, each with four continuations."""
    return _split("shakespeare_cloze")


def arithmetic_words(**metadata: object) -> dict[str, Any]:
    """Loads sums written in words."""
    return _split("arithmetic_words")


def rows(name: str) -> list[dict[str, Any]]:
    """Returns the documents of the task `name`."""
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _split(name: str) -> dict[str, Any]:
    # The package `datasets` is installed with lm-evaluation-harness.
    datasets = importlib.import_module("datasets")
    return {"test": datasets.Dataset.from_list(rows(name))}
