"""The code of docs/ runs as it stands and does what the text around it says."""

import re
import string
from pathlib import Path

import pytest
import toy

import dlm_jax
from dlm_jax.config import SampleConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.model.transformer import build
from dlm_jax.models import Model

TEXT = (Path(__file__).parent.parent / "docs/host_samplers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
NAMES = ("matching", "only_digits", "loop.step")


@pytest.fixture(scope="module")
def model():
    """A toy in the place of the quickstart's model; its short chain compiles fast."""
    tokenizer = CharacterTokenizer.of(string.printable)
    network = build(toy.config(vocab_size=tokenizer.vocab_size))
    sample = SampleConfig(steps=4, chain=("temperature",))
    return Model(network, toy.random_params(network), tokenizer, max_length=32, sample=sample)


def _printed(name, model, capsys, monkeypatch):
    (block,) = [block for block in BLOCKS if name in block]
    monkeypatch.setattr(dlm_jax, "load", lambda path: model, raising=False)
    scope = {}
    exec(compile(block, "docs/host_samplers.md", "exec"), scope)
    return capsys.readouterr().out, scope


def test_every_block_is_run_below():
    assert [sum(name in block for name in NAMES) for block in BLOCKS] == [1] * len(NAMES)


def test_a_prompt_with_a_host_sampler_matches_its_pattern(model, capsys, monkeypatch):
    out, scope = _printed(NAMES[0], model, capsys, monkeypatch)
    first, second = scope["result"].texts
    assert re.fullmatch(r"version \d\.\d\d?(\.\d)?", first)
    assert not re.fullmatch(r"module [\d.]+", second)
    assert [len(records) for records in scope["result"].read_back] == [6, 0]
    assert first in out


def test_a_host_sampler_of_ones_own_is_obeyed_in_all_rows(model, capsys, monkeypatch):
    out, scope = _printed(NAMES[1], model, capsys, monkeypatch)
    for text in scope["result"].texts:
        assert re.fullmatch(r"(version|page) \d{4}", text)
    assert out.endswith("choice among the survivors: host (only_digits)\n")


def test_single_steps_tell_of_both_rows(model, capsys, monkeypatch):
    out, scope = _printed(NAMES[2], model, capsys, monkeypatch)
    assert out.count("\n0 ") + out.startswith("0 ") >= 1
    assert out.count("\n1 ") + out.startswith("1 ") >= 1
    assert (scope["state"].committed_BL[:, 8:12] >= 0).all()
