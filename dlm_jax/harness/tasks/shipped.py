"""Loads the task of this package for lm-evaluation-harness."""

import importlib
import json
from pathlib import Path
from typing import Any


def shakespeare_cloze(**metadata: object) -> dict[str, Any]:
    """Lines of Shakespeare, each with four continuations."""
    text = Path(__file__).with_name("shakespeare_cloze.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    # The package `datasets` is installed with lm-evaluation-harness.
    return {"test": importlib.import_module("datasets").Dataset.from_list(rows)}
