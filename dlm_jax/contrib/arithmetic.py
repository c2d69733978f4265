"""Sums of two two-digit numbers: prompts such as ``47+85=``, answers, and their rewards.

``python -m dlm_jax.contrib.arithmetic`` prints 8000 examples as JSON lines for ``data.source``, and
``dlm_jax.contrib.arithmetic:rewards`` is a reward function of `dlm_jax.contrib.rl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

_TEXT = re.compile(r"([0-9]{1,19})\+([0-9]{1,19})=([0-9]+)")


def example(seed: int) -> tuple[str, str]:
    """A prompt and its answer."""
    # Raw bits are the same for every version of NumPy.
    bits = np.random.Philox(seed)
    first, second = (10 + int(bits.random_raw()) % 90 for _ in range(2))
    return f"{first}+{second}=", str(first + second)


def examples(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` examples with different prompts, at most 8100, from consecutive seeds."""
    found: dict[str, str] = {}
    while len(found) < count:
        found.setdefault(*example(seed))
        seed += 1
    return list(found.items())


def rewards(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1.0 for each answer that is the sum of its prompt, and 0.0 for other texts."""
    found = [_TEXT.fullmatch(p + answer) for p, answer in zip(prompts, answers, strict=True)]
    return [float(m is not None and m[3] == str(int(m[1]) + int(m[2]))) for m in found]


if __name__ == "__main__":
    for prompt, answer in examples(8000):
        print(json.dumps({"prompt": prompt, "response": answer}))
