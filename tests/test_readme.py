"""The README's code runs as it stands, and CI runs the README's own test command."""

import re
from pathlib import Path

import pytest
import toy
import toy_model

import dlm_jax
from dlm_jax.model.transformer import build

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def _printed(capsys):
    (example,) = PYTHON_BLOCKS
    exec(compile(example, "README.md", "exec"), {})
    return capsys.readouterr().out


def test_its_picture_is_there_and_small():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures == ["docs/denoising.svg"]
    assert (ROOT / pictures[0]).stat().st_size < 500_000


@pytest.mark.slow
def test_the_example_samples_both_ways_with_as_many_forwards(capsys, monkeypatch):
    tokenizer = toy_model.TOKENIZER
    network = build(toy.config(vocab_size=tokenizer.vocab_size, add_sampler_head=True))
    model = dlm_jax.Model(network, toy.random_params(network), tokenizer, max_length=64)
    monkeypatch.setattr(dlm_jax, "load", lambda: model, raising=False)
    printed = _printed(capsys)
    assert re.findall(r"--- (\w+), (\d+) forwards", printed) == [
        ("parallel", "8"), ("wavefront", "8"),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_example_prints_what_the_readme_shows(capsys):
    shown = re.findall(r"```\n(--- parallel.*?)```", README, flags=re.DOTALL)
    assert [_printed(capsys).rstrip()] == [text.rstrip() for text in shown]


def test_there_are_two_commands_that_set_themselves_up():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert sum(command.endswith("pytest") for command in commands) == 1


@pytest.mark.parametrize(
    "path",
    [
        *re.findall(r"`((?:configs|docs|benchmarks)/[\w./-]+)`", README),
        *re.findall(r"\]\(((?!http)[\w./-]+)\)", README),
    ],
)
def test_every_file_that_the_readme_names_exists(path):
    assert (ROOT / path).exists()
