"""Small tasks with verifiable answers, for experiments that take a few minutes.

Each text consists of a prompt and an answer, such as ``47+85=`` and ``132``. Use ``data.source =
"task:arithmetic"`` to train on such texts and ``rl.reward = "dlm_jax.tasks:arithmetic"`` to score
samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["TASKS", "TextTask", "arithmetic", "brackets", "letters", "sorting", "sudoku"]


class Draws:
    """Random integers from a seed. The stream is the same with every version of NumPy.

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
      judge: ``(prompt, answer) -> reward`` for the two parts of a text, without the mark.
      mark: last character of a prompt, which occurs nowhere else in a text.
      size: number of distinct examples in the corpus ``task:NAME``.
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
        """The reward of each answer to its prompt: a reward function for ``rl.reward``."""
        return [self.verify(p + answer) for p, answer in zip(prompts, answers, strict=True)]

    def examples(self, count: int, seed: int = 0) -> list[tuple[str, str]]:
        """Up to `count` distinct examples, from consecutive seeds starting at `seed`."""
        seeds = range(seed, seed + 20 * count)
        return list(itertools.islice(_different(map(self.example, seeds)), count))


def _different(examples: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for prompt, answer in examples:
        if prompt not in seen:
            seen.add(prompt)
            yield prompt, answer


def _sum_of_two(draws: Draws) -> tuple[str, str]:
    first, second = 10 + draws.below(90), 10 + draws.below(90)
    return f"{first}+{second}", str(first + second)


def _is_sum(prompt: str, answer: str) -> float:
    terms = prompt.split("+")
    if len(terms) != 2 or not all(map(_is_number, terms)):
        return 0.0
    return float(answer == str(sum(map(int, terms))))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _opened(draws: Draws) -> tuple[str, str]:
    """3 to 8 brackets, of which at least one is left open, and the closing brackets."""
    text, closing = "", ""
    for _ in range(3 + draws.below(6)):
        if len(closing) > 1 and draws.below(2):
            text, closing = text + closing[0], closing[1:]
        else:
            bracket = "([{"[draws.below(3)]
            text, closing = text + bracket, _PAIRS[bracket] + closing
    return text, closing


def _is_balanced(prompt: str, answer: str) -> float:
    closing: list[str] = []
    for bracket in prompt + answer:
        if bracket in _PAIRS:
            closing.append(_PAIRS[bracket])
        elif not closing or closing.pop() != bracket:
            return 0.0
    return float(not closing)


# Cell indices of the rows, columns and boxes of a 4x4 grid.
_UNITS = (
    *(tuple(range(4 * i, 4 * i + 4)) for i in range(4)),
    *(tuple(range(i, 16, 4)) for i in range(4)),
    *(tuple(8 * (i // 2) + 2 * (i % 2) + j for j in (0, 1, 4, 5)) for i in range(4)),
)


def _solution(draws: Draws, cells: str = "") -> str | None:
    """A solved grid that starts with these cells; None if there is none."""
    if len(cells) == 16:
        return cells
    taken = {cells[c] for unit in _UNITS if len(cells) in unit for c in unit if c < len(cells)}
    for digit in draws.shuffled(range(1, 5)):
        if str(digit) not in taken:
            found = _solution(draws, cells + str(digit))
            if found is not None:
                return found
    return None


def _grid(draws: Draws) -> tuple[str, str]:
    solved = _solution(draws) or ""
    hidden = set(draws.shuffled(range(16))[: 4 + draws.below(5)])
    return "".join("." if i in hidden else cell for i, cell in enumerate(solved)), solved


def _right_units(prompt: str, answer: str) -> float:
    if len(prompt) != 16 or len(answer) != 16:
        return 0.0
    if any(given not in (".", cell) for given, cell in zip(prompt, answer, strict=True)):
        return 0.0
    right = [sorted(answer[cell] for cell in unit) == list("1234") for unit in _UNITS]
    return sum(right) / len(right)


def _digits(draws: Draws) -> tuple[str, str]:
    text = "".join(str(draws.below(10)) for _ in range(6))
    return text, "".join(sorted(text))


def _in_place(prompt: str, answer: str) -> float:
    if len(prompt) != len(answer):
        return 0.0
    return sum(map(str.__eq__, sorted(prompt), answer)) / len(answer)


def _counted(draws: Draws) -> tuple[str, str]:
    text = "".join("abcde"[draws.below(5)] for _ in range(5 + draws.below(6)))
    letter = "abcde"[draws.below(5)]
    return f"{text}/{letter}", str(text.count(letter))


def _is_count(prompt: str, answer: str) -> float:
    text, _, letter = prompt.rpartition("/")
    return float(len(letter) == 1 and answer == str(text.count(letter)))


arithmetic = TextTask(
    "arithmetic", "sums of two two-digit numbers:  47+85=132", _sum_of_two, _is_sum
)
brackets = TextTask(
    "brackets", "brackets, and the brackets that close them:  ([{}=])", _opened, _is_balanced
)
sudoku = TextTask(
    "sudoku",
    "a 4x4 grid row by row with gaps, and the full grid: 1.34...=12343412; the reward is the "
    "share of correct rows, columns and boxes",
    _grid,
    _right_units,
)
sorting = TextTask(
    "sorting",
    "six digits, and the same digits sorted: 520914=012459; the reward is the share of correct "
    "digits",
    _digits,
    _in_place,
)
letters = TextTask(
    "letters", "a text, a letter, and its number of occurrences: abacb/a=2", _counted, _is_count
)

TASKS: dict[str, TextTask] = {
    task.name: task for task in (arithmetic, brackets, sudoku, sorting, letters)
}
"""Tasks by name."""
