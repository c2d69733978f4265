"""The tasks with a judge: examples from seeds, rewards, and their corpora."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from dlm_jax.contrib.tasks import TASKS
from dlm_jax.contrib.tasks.lists import (
    LETTERS,
    OPERATIONS,
    TEMPLATES,
    ListQuestion,
    asked,
    one_draw,
)
from dlm_jax.data import load_corpus

PERSON = "Ada Bell, Oslo="
RECORD = (
    '{"name": "Ada Bell", "age": 30, "group": "adult", "home": {"city": "Oslo", "land": "Norway"}}'
)


@pytest.mark.parametrize("name", TASKS)
def test_right_answers_get_1_and_no_text_anything_outside_0_to_1(name):
    task = TASKS[name]
    examples = [task.example(seed) for seed in range(300)]
    assert examples == [task.example(seed) for seed in range(300)]
    assert len({prompt for prompt, _ in examples}) > 200
    prompts, answers = zip(*examples, strict=True)
    assert task(prompts, answers) == [1.0] * 300
    wrong = task(prompts, [*answers[1:], answers[0]])
    assert all(0.0 <= reward <= 1.0 for reward in wrong) and sum(wrong) < 250
    for prompt, answer in examples[:20]:
        assert prompt.count(task.mark) == 1 and prompt.endswith(task.mark)
        for text in (prompt, prompt[:-1] + answer, answer, "", task.mark, prompt + "\u00b2"):
            assert task.verify(text) == 0.0
        assert task.verify(prompt + answer + answer) < 1.0


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("arithmetic", "47+85=132", 1.0),
        ("arithmetic", "47+85=131", 0.0),
        ("arithmetic", "47+85=0132", 0.0),
        ("arithmetic", "47+8+5=60", 0.0),
        ("arithmetic", "4x+85=89", 0.0),
        ("brackets", "([{}=])", 1.0),
        ("brackets", "([{}=]()[])", 1.0),
        ("brackets", "([{}=)]", 0.0),
        ("brackets", "([{}=]", 0.0),
        ("brackets", "(=x)", 0.0),
        ("sudoku", "1.34341221434321=1234341221434321", 1.0),
        # Two cells of the last row change places: two columns are wrong; boxes and rows are right.
        ("sudoku", "1.343412214343..=1234341221434312", 10 / 12),
        ("sudoku", "1.34341221434321=4234341221434321", 0.0),
        ("sorting", "520914=012459", 1.0),
        ("sorting", "520914=012495", 4 / 6),
        ("records", f"{PERSON}{RECORD}", 1.0),
        ("records", f"{PERSON}{RECORD.replace('30', '17')}", 3 / 4),
        ("records", f"{PERSON}{RECORD.replace('Norway', 'Italy').replace('Bell', 'Lee')}", 1 / 2),
        ("records", f"{PERSON}{RECORD.replace('Oslo', 'Rome')}", 3 / 4),
        ("records", f"{PERSON}{RECORD.replace('age', 'ag')}", 0.0),
        ("records", f"{PERSON}{'[' * 5000}", 0.0),
        ("records", f"{PERSON}[]", 0.0),
        ("letters", "abacb/a=2", 1.0),
        ("letters", "abacb/d=0", 1.0),
        ("letters", "abacb/a=3", 0.0),
        ("letters", "abacb=0", 0.0),
        ("lists", "reverse badce=ecdab", 1.0),
        ("lists", "badce shuffle=abcde", 1.0),
        ("lists", "[b,a,d,c,e].insert(3,h)=bahdce", 1.0),
        ("lists", "put h for any one: b a d c e=badch", 1.0),
        ("lists", "b a d c e, without number 5=badc", 1.0),
        ("lists", "b a d c e, without number 6=badce", 0.0),
        ("lists", "insert h 3 badce=bahdce", 0.0),
    ],
)
def test_what_texts_are_worth(name, text, reward):
    assert TASKS[name].verify(text) == pytest.approx(reward)


_WANTED = {
    "copy": lambda given, place, item, answer: answer == given,
    "reverse": lambda given, place, item, answer: list(answer) == list(reversed(given)),
    "sort": lambda given, place, item, answer: list(answer) == sorted(given),
    "shuffle": lambda given, place, item, answer: sorted(answer) == sorted(given),
    "replace": lambda given, place, item, answer: _changes(given, answer) == {place: item},
    "replace_any": lambda given, place, item, answer: (
        list(_changes(given, answer).values()) == [item]
    ),
    "insert": lambda given, place, item, answer: (
        answer.replace(item, "") == given and _places(answer, item) == [place]
    ),
    "insert_any": lambda given, place, item, answer: (
        answer.replace(item, "") == given and answer.count(item) == 1
    ),
    "remove": lambda given, place, item, answer: answer == given.replace(given[place - 1], ""),
    "remove_any": lambda given, place, item, answer: (
        len(answer) == 4 and answer in (given.replace(x, "") for x in given)
    ),
}
"""Whether an answer is right, for a list without repeats and an item outside it."""


def _places(answer, item):
    return [place for place, letter in enumerate(answer, start=1) if letter == item]


def _changes(given, answer):
    if len(given) != len(answer):
        return {0: "", -1: ""}
    pairs = enumerate(zip(given, answer, strict=True), start=1)
    return {place: new for place, (old, new) in pairs if old != new}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_answer_about_a_list_is_right_in_every_wording_or_in_none(operation):
    rng = np.random.default_rng(0)
    about, seen = OPERATIONS[operation].about, [0, 0]
    for _ in range(40):
        letters = "".join(rng.permutation(list(LETTERS)))
        given, item = letters[:5], letters[5] if "{item}" in about else ""
        place = int(rng.integers(1, 6)) if "{place}" in about else 0
        what = ListQuestion(operation, given, place, item)
        prompts = {asked(what, template) for template in TEMPLATES}
        assert len(prompts) == 5
        right = rng.choice(sorted(OPERATIONS[operation].answers(given, place, item)))
        swapped = right[1] + right[0] + right[2:]
        for answer in (right, given, given[::-1], swapped, right[:-1], right + item, right[0] * 5):
            wanted = bool(_WANTED[operation](given, place, item, answer))
            found = {TASKS["lists"].verify(f"{prompt}={answer}") for prompt in prompts}
            assert found == {float(wanted)}, (prompts, answer)
            seen[wanted] += 1
    assert min(seen) >= 40


def test_one_parallel_draw_is_right_as_often_as_the_closed_forms_say():
    shares = {operation: one_draw(operation) for operation in OPERATIONS}
    many = {"shuffle": math.factorial(5) / 5**5, "replace_any": (1 - 1 / 5) ** 4}
    for operation, found in shares.items():
        if "any" not in operation and operation != "shuffle":
            assert found == pytest.approx(1.0), operation
    assert {name: shares[name] for name in many} == pytest.approx(many)
    assert shares["insert_any"] < shares["remove_any"] < 1.0


def test_every_sudoku_is_the_rest_of_a_solution():
    """Rows, columns and boxes, counted without the table of the task."""
    for seed in range(50):
        prompt, answer = TASKS["sudoku"].example(seed)
        grid = [answer[4 * i : 4 * i + 4] for i in range(4)]
        boxes = [
            "".join(grid[2 * r + i][2 * c + j] for i, j in itertools.product((0, 1), repeat=2))
            for r, c in itertools.product((0, 1), repeat=2)
        ]
        for unit in (*grid, *map("".join, zip(*grid, strict=True)), *boxes):
            assert sorted(unit) == ["1", "2", "3", "4"]
        assert 4 <= prompt.count(".") <= 8


def test_a_task_prints_a_corpus_of_different_prompts_and_answers(tmp_path):
    path = tmp_path / "arithmetic.jsonl"
    with path.open("w") as file:
        command = [sys.executable, "-m", "dlm_jax.contrib.tasks", "arithmetic"]
        subprocess.run(command, stdout=file, check=True)
    corpus = load_corpus(
        [str(path)], tokenizer="character", seq_len=10, cache_dir=tmp_path, layout="documents"
    )
    row = corpus.train_rows.rows([0])
    tokens, length, given = (row[name][0] for name in ("tokens", "length", "given"))
    prompt, answer = TASKS["arithmetic"].example(0)
    assert corpus.tokenizer.decode(tokens[:given]) == prompt
    assert corpus.tokenizer.decode(tokens[given:length]) == answer
    assert len(corpus.train_rows) + len(corpus.val_rows) == 8000
    with pytest.raises(ValueError, match="task:sorting does not exist; python -m dlm_jax.contrib"):
        load_corpus("task:sorting")
