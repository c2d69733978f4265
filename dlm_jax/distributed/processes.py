"""Agreement between the processes of one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def on_first_process(decide: Callable[[], Any]) -> Any:
    """What ``decide`` gave on process 0, on every process; what it raised, raised on every one.

    Every process must call it at the same point; none returns before process 0 has decided. The
    result must be JSON. An error arrives on the other processes as `ValueError`.
    """
    if jax.process_count() == 1:
        return decide()
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            outcome = {"value": decide()}
        except Exception as error:
            outcome, failure = {"error": str(error)}, error
    text = json.dumps(outcome).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.frombuffer(text.ljust(size)[:size], dtype=np.uint8)
    outcome = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if failure is not None:
        raise failure
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["value"]
