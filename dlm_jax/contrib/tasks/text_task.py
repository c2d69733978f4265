"""Tasks with reward functions, and the random integers for their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Draws", "TextTask"]


class Draws:
    """A stream of random integers from a seed, the same for every version of NumPy.

    Args:
      seed: at least 0.
    """

    def __init__(self, seed: int):
        self._bits = np.random.Philox(seed)

    def below(self, limit: int) -> int:
        """A uniform integer in [0, limit)."""
        return int(self._bits.random_raw()) % limit

    def shuffled(self, items: Sequence[int]) -> list[int]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]


@dataclass(frozen=True)
class TextTask:
    """A task: a generator of examples and a scorer of texts.

    Attributes:
      name: name of the task.
      about: description of its texts.
      make: ``(draws) -> (prompt, answer)``.
      judge: ``(prompt, answer) -> reward``, for the two parts of a text.
      mark: last character of a prompt, which occurs nowhere else in a text.
      size: number of distinct examples in `corpus`.
    """

    name: str
    about: str
    make: Callable[[Draws], tuple[str, str]]
    judge: Callable[[str, str], float]
    mark: str = "="
    size: int = 8000

    def example(self, seed: int) -> tuple[str, str]:
        """A prompt and its correct answer. The prompt ends with the mark."""
        prompt, answer = self.make(Draws(seed))
        return prompt + self.mark, answer

    def verify(self, text: str) -> float:
        """The reward of a whole text (prompt and answer) in [0, 1]; 1 for a correct answer.

        A malformed text or answer has reward 0.
        """
        prompt, mark, answer = text.partition(self.mark)
        return float(self.judge(prompt, answer)) if mark and answer else 0.0

    def __call__(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        """The reward of each answer to its prompt. This method is a reward function of
        `dlm_jax.contrib.rl`.
        """
        return [self.verify(p + answer) for p, answer in zip(prompts, answers, strict=True)]

    def corpus(self) -> list[tuple[str, str]]:
        """`size` distinct examples."""
        return self.examples(self.size)

    def examples(self, count: int, seed: int = 0) -> list[tuple[str, str]]:
        """Up to `count` distinct examples, from consecutive seeds starting at `seed`."""
        found: dict[str, str] = {}
        for number in range(seed, seed + 20 * count):
            prompt, answer = self.example(number)
            found.setdefault(prompt, answer)
            if len(found) == count:
                break
        return list(found.items())
