"""Candidates as a loop would hand them to a host sampler, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dlm_jax.inference.host import Candidates


def make(probabilities: Sequence[float], **changes: Any) -> Candidates:
    """Candidates with the ids 0, 1, ... and these probabilities, at the first of three holes."""
    logprobs = np.log(np.array(probabilities, np.float32))
    plain = Candidates(
        row=0,
        index=0,
        step=0,
        tokens=np.full(3, -1),
        ids=np.arange(logprobs.size, dtype=np.int32),
        logits=logprobs + 1,
        logprobs=logprobs,
        clean_logprobs=logprobs,
        num_survivors=logprobs.size,
        is_greedy=False,
        uniform=0.5,
    )
    return plain._replace(**changes)
