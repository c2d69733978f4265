"""Small tasks with verifiable answers, for experiments that take a few minutes.

Each text consists of a prompt and an answer, such as ``47+85=`` and ``132``. ``python -m
dlm_jax.contrib.tasks arithmetic`` prints such texts for training, and the task
``dlm_jax.contrib.tasks:arithmetic`` is a reward function of `dlm_jax.contrib.rl`.
"""

from __future__ import annotations

import json

from dlm_jax.contrib.tasks.lists import lists
from dlm_jax.contrib.tasks.text_task import Draws, TextTask

__all__ = [
    "TASKS", "TextTask", "arithmetic", "brackets", "letters", "lists", "records", "sorting",
    "sudoku",
]  # fmt: skip


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
    """A prompt of 3 to 8 brackets with at least one open bracket, and the closing brackets as the
    answer.
    """
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
    """A solved grid that starts with the given cells; None if there is no solution."""
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


_FIRST = (
    "Ada", "Amy", "Ann", "Ben", "Bob", "Dan", "Eva", "Eve", "Finn", "Gil", "Hugo", "Ida", "Ivo",
    "Jan", "Joan", "Kim", "Leo", "Lisa", "Max", "Mia",
)  # fmt: skip
_LAST = (
    "Adams", "Baker", "Bell", "Cole", "Diaz", "Ford", "Gray", "Hill", "Kahn", "King", "Lang",
    "Lee", "May", "Moss", "Park", "Roy", "Shaw",
)  # fmt: skip
_CITIES = {
    "Athens": "Greece", "Berlin": "Germany", "Bonn": "Germany", "Cairo": "Egypt",
    "Delhi": "India", "Dover": "England", "Kyoto": "Japan", "Leeds": "England", "Lima": "Peru",
    "Lyon": "France", "Malmo": "Sweden", "Milan": "Italy", "Nice": "France", "Oslo": "Norway",
    "Osaka": "Japan", "Paris": "France", "Porto": "Portugal", "Quito": "Ecuador",
    "Riga": "Latvia", "Rome": "Italy", "Sofia": "Bulgaria", "Turin": "Italy",
    "Vienna": "Austria", "Warsaw": "Poland",
}  # fmt: skip
_GROUPS = {"child": range(4, 18), "adult": range(18, 65), "senior": range(65, 100)}
RECORD = {
    "type": "object",
    "required": ["name", "age", "group", "home"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+ [A-Z][a-z]+$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "group": {"enum": list(_GROUPS)},
        "home": {
            "type": "object",
            "required": ["city", "land"],
            "properties": dict.fromkeys(
                ("city", "land"), {"type": "string", "pattern": "^[A-Z][a-z]+$"}
            ),
        },
    },
}
"""The JSON schema of the answers in the task `records`."""


def _record(draws: Draws) -> tuple[str, str]:
    """A prompt with a name and a city, and a JSON record that adds an age, the age group, and the
    country of the city.
    """
    name = f"{_FIRST[draws.below(len(_FIRST))]} {_LAST[draws.below(len(_LAST))]}"
    city = list(_CITIES)[draws.below(len(_CITIES))]
    age = 4 + draws.below(96)
    (group,) = (group for group, ages in _GROUPS.items() if age in ages)
    home = {"city": city, "land": _CITIES[city]}
    return f"{name}, {city}", json.dumps({"name": name, "age": age, "group": group, "home": home})


def _right_fields(prompt: str, answer: str) -> float:
    try:
        made = json.loads(answer)
        name, age, group = made["name"], made["age"], made["group"]
        city, land = made["home"]["city"], made["home"]["land"]
        is_group = age in _GROUPS[group]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    wanted, _, wanted_city = prompt.partition(", ")
    right = name == wanted, is_group, city == wanted_city, land == _CITIES.get(wanted_city)
    return sum(right) / len(right)


arithmetic = TextTask(
    "arithmetic", "sums of two two-digit numbers:  47+85=132", _sum_of_two, _is_sum
)
brackets = TextTask(
    "brackets", "brackets, and the missing closing brackets: ([{}=])", _opened, _is_balanced
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
records = TextTask(
    "records",
    "a name and a city, and a JSON record with an age, its group and the country: Ada Bell, "
    'Oslo={"name": "Ada Bell", "age": 30, "group": "adult", "home": {"city": "Oslo", "land": '
    '"Norway"}}; the reward is the share of correct fields',
    _record,
    _right_fields,
)
letters = TextTask(
    "letters", "a text, a letter, and its number of occurrences: abacb/a=2", _counted, _is_count
)

TASKS: dict[str, TextTask] = {
    task.name: task for task in (arithmetic, brackets, sudoku, sorting, letters, records, lists)
}
"""Tasks by name."""
