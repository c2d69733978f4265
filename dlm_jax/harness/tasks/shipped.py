"""The data of the tasks that ship with the package, as lm-evaluation-harness loads it."""

import importlib
import json
from pathlib import Path
from typing import Any


def shakespeare_cloze(**metadata: object) -> dict[str, Any]:
    """Lines with four continuations each."""
    return _split("shakespeare_cloze")


def arithmetic_words(**metadata: object) -> dict[str, Any]:
    """Sums in words."""
    return _split("arithmetic_words")


def rows(name: str) -> list[dict[str, Any]]:
    """The documents of a task."""
    text = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _split(name: str) -> dict[str, Any]:
    # Comes with lm-evaluation-harness.
    datasets = importlib.import_module("datasets")
    return {"test": datasets.Dataset.from_list(rows(name))}
