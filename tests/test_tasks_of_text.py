"""The tasks with a judge: examples from seeds, rewards, and their corpora."""

import itertools

import pytest

from dlm_jax.data import load_corpus
from dlm_jax.tasks import TASKS

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
        ("records", f"{PERSON}[]", 0.0),
        ("letters", "abacb/a=2", 1.0),
        ("letters", "abacb/d=0", 1.0),
        ("letters", "abacb/a=3", 0.0),
        ("letters", "abacb=0", 0.0),
    ],
)
def test_what_texts_are_worth(name, text, reward):
    assert TASKS[name].verify(text) == pytest.approx(reward)


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


def test_a_task_is_a_corpus_of_different_prompts_and_answers(tmp_path):
    corpus = load_corpus(
        ["task:arithmetic"], tokenizer="character", seq_len=10, cache_dir=tmp_path,
        layout="documents",
    )  # fmt: skip
    tokens, (length, given) = (
        corpus.train_rows.rows([0])["tokens"][0],
        (corpus.train_rows.rows([0])[name][0] for name in ("length", "given")),
    )
    prompt, answer = TASKS["arithmetic"].example(0)
    assert corpus.tokenizer.decode(tokens[:given]) == prompt
    assert corpus.tokenizer.decode(tokens[given:length]) == answer
    assert len(corpus.train_rows) + len(corpus.val_rows) == 8000
    with pytest.raises(ValueError, match="task:arithmatic does not exist"):
        load_corpus("task:arithmatic")
    with pytest.raises(ValueError, match="has a prompt, .*use data.layout=documents"):
        load_corpus("task:sorting", cache_dir=tmp_path)
