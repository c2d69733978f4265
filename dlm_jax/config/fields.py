"""What the sections of a config are made of: fields with a help text, and one-line refusals."""

from __future__ import annotations

import dataclasses
from typing import Any


def field(default: Any, doc: str) -> Any:
    """A dataclass field with a default; `doc` is the help of its flag."""
    return dataclasses.field(default=default, metadata={"help": doc})


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)
