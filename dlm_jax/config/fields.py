"""What the sections of a config are made of: fields with a help text, and one-line refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_INT = 2**31 - 1
MOST_FLOAT = 3.0e38
"""Beyond these, a number does not fit the 32 bits that compiled programs have for it."""

# Sizes are bounded before anything of that size is made.
_MOST = {
    "model": {
        "depth": 2**12, "width": 2**17, "heads": 2**12, "kv_heads": 2**12, "mlp_width": 2**20,
        "vocab_size": 2**22, "sampler_context": 2**6, "sampler_width": 2**20,
    },
    "data": {"seq_len": 2**20},
    "objective": {"span_count": 2**16, "schedule_power": 100},
    "train": {"batch_size": 2**20, "accumulate": 2**20, "seed": 2**32 - 1},
    "mesh": dict.fromkeys(("data", "fsdp", "tensor", "expert", "context"), 2**20),
}  # fmt: skip


def field(default: Any, doc: str) -> Any:
    """A dataclass field with a default; `doc` is the help of its flag."""
    return dataclasses.field(default=default, metadata={"help": doc})


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_fit(section: str, config: Any) -> None:
    """Raises ValueError for a number of a section that is too large, infinite or NaN.

    Args:
      section: its name.
      config: a dataclass; fields that are no numbers are passed over.
    """
    most = _MOST.get(section, {})
    for made in dataclasses.fields(config):
        value = getattr(config, made.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        limit = most.get(made.name, MOST_INT if isinstance(value, int) else MOST_FLOAT)
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
        require(
            -limit <= value <= limit,  # NaN fails every comparison
            f"{section}.{made.name}={shown} is not a number up to {limit:.10g}; use a smaller one",
        )
