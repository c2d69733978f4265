"""Operations on a short list, each in five wordings, such as ``reverse badce=ecdab``.

The operations are those of ParallelBench (Kang et al. 2025). Some operations have one correct
answer (copy, reverse, sort, and replace, insert and remove at a given place). The other operations
(shuffle, and replace, insert and remove at any place) have many correct answers, whose positions
cannot be drawn independently. If all n items are drawn in parallel from the true marginals, the
answer is correct with probability 1 for the first operations, ``n!/n^n`` for `shuffle` (which can
return the given list here), and ``(1 - 1/n)^(n - 1)`` for `replace_any`.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable
from typing import NamedTuple

from dlm_jax.contrib.tasks.text_task import Draws, TextTask

__all__ = ["OPERATIONS", "TEMPLATES", "ListQuestion", "asked", "example", "lists", "one_draw"]

LETTERS, ITEMS = "abcdefgh", 5
_LETTER = "a-h"


class ListQuestion(NamedTuple):
    """The operation in a prompt, with its arguments.

    Attributes:
      operation: name of the operation.
      items: the list.
      place: a place in the list, counted from 1; 0 if the operation needs no place.
      item: an item outside the list; empty if the operation needs no item.
    """

    operation: str
    items: str
    place: int = 0
    item: str = ""


class ListOperation(NamedTuple):
    """An operation on a list.

    Attributes:
      about: the operation in words, with the fields of `ListQuestion` in braces.
      answers: ``(items, place, item) -> answers``, the set of all correct answers.
    """

    about: str
    answers: Callable[[str, int, str], set[str]]


def _at(items: str, place: int, item: str, gone: int) -> str:
    """The list with `item` inserted at `place`, in place of `gone` (0 or 1) items."""
    return items[: place - 1] + item + items[place - 1 + gone :]


def _anywhere(items: str, item: str, gone: int) -> set[str]:
    places = range(1, len(items) + 2 - gone)
    return {_at(items, place, item, gone) for place in places}


def _orders(items: str) -> set[str]:
    if len(items) < 2:
        return {items}
    return {
        first + rest
        for place, first in enumerate(items)
        for rest in _orders(items[:place] + items[place + 1 :])
    }


OPERATIONS: dict[str, ListOperation] = {
    "copy": ListOperation("say it again", lambda items, place, item: {items}),
    "reverse": ListOperation("from last to first", lambda items, place, item: {items[::-1]}),
    "sort": ListOperation("by the alphabet", lambda items, place, item: {"".join(sorted(items))}),
    "shuffle": ListOperation("in any order", lambda items, place, item: _orders(items)),
    "replace": ListOperation(
        "put {item} for number {place}", lambda items, place, item: {_at(items, place, item, 1)}
    ),
    "replace_any": ListOperation(
        "put {item} for any one", lambda items, place, item: _anywhere(items, item, 1)
    ),
    "insert": ListOperation(
        "add {item} as number {place}", lambda items, place, item: {_at(items, place, item, 0)}
    ),
    "insert_any": ListOperation(
        "add {item} anywhere", lambda items, place, item: _anywhere(items, item, 0)
    ),
    "remove": ListOperation(
        "without number {place}", lambda items, place, item: {_at(items, place, "", 1)}
    ),
    "remove_any": ListOperation(
        "without any one", lambda items, place, item: _anywhere(items, "", 1)
    ),
}
"""The operations by name."""

_BETWEEN = {"items": "", "spaced": " ", "commas": ","}
TEMPLATES = (
    "{name}{arguments} {items}",
    "{items} {name}{arguments}",
    "[{commas}].{name}({called})",
    "{about}: {spaced}",
    "{spaced}, {about}",
)
"""The five wordings of a prompt."""


def asked(what: ListQuestion, template: str) -> str:
    """The prompt in the wording of `template`, without the final mark."""
    arguments = [str(x) for x in (what.place, what.item) if x]
    fields = {
        "name": what.operation,
        "arguments": "".join(f" {x}" for x in arguments),
        "called": ",".join(arguments),
        "about": OPERATIONS[what.operation].about.format(place=what.place, item=what.item),
    } | {field: between.join(what.items) for field, between in _BETWEEN.items()}
    return template.format(**fields)


def one_draw(operation: str) -> float:
    """Probability of a correct answer if every position is drawn independently from its marginal
    over the correct answers.
    """
    answers = OPERATIONS[operation].answers(LETTERS[:ITEMS], 2, LETTERS[ITEMS])
    columns = list(zip(*answers, strict=True))
    total = 0.0
    for answer in answers:
        share = 1.0
        for letter, column in zip(answer, columns, strict=True):
            share *= column.count(letter) / len(column)
        total += share
    return total


def _drawn(draws: Draws, operation: str) -> ListQuestion:
    order = "".join(LETTERS[i] for i in draws.shuffled(range(len(LETTERS))))
    about = OPERATIONS[operation].about
    place = 1 + draws.below(ITEMS) if "{place}" in about else 0
    return ListQuestion(operation, order[:ITEMS], place, order[ITEMS] if "{item}" in about else "")


def example(draws: Draws, operation: str, template: str) -> tuple[str, str]:
    """A prompt for an operation in the wording of `template`, and a uniformly random correct
    answer.
    """
    what = _drawn(draws, operation)
    answers = sorted(OPERATIONS[operation].answers(*what[1:]))
    return asked(what, template), answers[draws.below(len(answers))]


def _any_example(draws: Draws) -> tuple[str, str]:
    operation = list(OPERATIONS)[draws.below(len(OPERATIONS))]
    return example(draws, operation, TEMPLATES[draws.below(len(TEMPLATES))])


def _pattern(operation: str, template: str) -> re.Pattern[str]:
    """A pattern for the prompts of an operation in the wording of `template`. The groups of the
    pattern are named after the fields of `ListQuestion`.
    """
    about = OPERATIONS[operation].about
    groups = {"place": f"(?P<place>[1-{ITEMS}])", "item": f"(?P<item>[{_LETTER}])"}
    arguments = [group for name, group in groups.items() if f"{{{name}}}" in about]
    fields = {
        "name": operation,
        "arguments": "".join(f" {group}" for group in arguments),
        "called": ",".join(arguments),
        "about": _filled(about, groups),
    } | {
        field: f"(?P<items>[{_LETTER}](?:{between}[{_LETTER}]){{{ITEMS - 1}}})"
        for field, between in _BETWEEN.items()
    }
    return re.compile(_filled(template, fields))


def _filled(template: str, fields: dict[str, str]) -> str:
    """Returns the template as a pattern, with its fields replaced by `fields`."""
    parts = string.Formatter().parse(template)
    return "".join(re.escape(words) + fields.get(field or "", "") for words, field, _, _ in parts)


_PATTERNS = tuple(
    (operation, _pattern(operation, template))
    for operation, template in itertools.product(OPERATIONS, TEMPLATES)
)


def _is_answer(prompt: str, answer: str) -> float:
    for operation, pattern in _PATTERNS:
        if found := pattern.fullmatch(prompt):
            groups = {"place": "0", "item": ""} | found.groupdict()
            items = re.sub("[ ,]", "", groups["items"])
            answers = OPERATIONS[operation].answers(items, int(groups["place"]), groups["item"])
            return float(answer in answers)
    return 0.0


lists = TextTask(
    "lists",
    "ten operations on a list of five letters, in five wordings: reverse badce=ecdab",
    _any_example,
    _is_answer,
    size=60_000,
)
