"""The code of docs/ runs as it stands and does what the text around it says."""

import csv
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import toy

import dlm_jax
import dlm_jax.config as configs
from benchmarks import causal_to_diffusion, settings_page
from dlm_jax.config import Config, DataConfig, SampleConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.store import Checkpoints

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = [
    block
    for name in ("host_samplers.md", "generation.md")
    for block in re.findall(
        r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL
    )
]
NAMES = (
    "matching",
    "only_digits",
    "loop.step",
    "template",
    "dlm_jax.stream",
    "Softened",
    "NoRepeats",
)


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
    exec(compile(block, "docs", "exec"), scope)
    return capsys.readouterr().out, scope


def test_every_block_is_run_below():
    assert [sum(name in block for name in NAMES) for block in BLOCKS] == [1] * len(NAMES)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_host_sampler_that_follows_its_rows_writes_no_token_twice(model, capsys, monkeypatch):
    _, scope = _printed(NAMES[6], model, capsys, monkeypatch)
    result = scope["result"]
    for tokens, length in zip(result.tokens, result.lengths, strict=True):
        written = tokens[len("version ") : length].tolist()
        assert len(set(written)) == len(written) > 1


@pytest.mark.slow
def test_single_steps_tell_of_both_rows(model, capsys, monkeypatch):
    out, scope = _printed(NAMES[2], model, capsys, monkeypatch)
    assert out.count("\n0 ") + out.startswith("0 ") >= 1
    assert out.count("\n1 ") + out.startswith("1 ") >= 1
    assert (scope["state"].committed_BL[:, 8:12] >= 0).all()


@pytest.mark.slow
def test_templates_keep_their_text_and_drafts_are_rewritten(model, capsys, monkeypatch):
    _, scope = _printed(NAMES[3], model, capsys, monkeypatch)
    template, draft, blocks = scope["result"].texts
    assert re.fullmatch(r"The .{5} statement .{8}\.", template, flags=re.DOTALL)
    assert draft.startswith("The ")
    assert len(draft) == len("The value of the the") and draft != "The value of the the"
    assert blocks.startswith("A list ")
    assert scope["result"].steps.tolist()[2] == 12


def test_a_stream_shows_the_canvas_every_so_many_steps(model, capsys, monkeypatch):
    out, _ = _printed(NAMES[4], model, capsys, monkeypatch)
    assert [int(steps) for steps in re.findall(r"^0 (\d+) The ", out, flags=re.MULTILINE)] == [
        0, 2, 4, 6, 8,
    ]  # fmt: skip


def test_rules_of_ones_own_are_obeyed(model, capsys, monkeypatch):
    _, scope = _printed(NAMES[5], model, capsys, monkeypatch)
    result = scope["result"]
    for row, (count, prompt) in enumerate(zip((2, 4), scope["prompts"], strict=True)):
        committed = result.committed[row, len(prompt["prompt"]) : result.lengths[row]]
        assert (committed >= 0).all()
        by_step = [int((committed == step).sum()) for step in range(15)]
        assert max(by_step) == count if row == 0 else max(by_step) <= count
    assert result.steps[0] == 10


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder with a toy in ``runs/quickstart``, as a run would have left it."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = CharacterTokenizer.of(string.printable)
    model = toy.config(vocab_size=tokenizer.vocab_size)
    config = Config(model=model, data=DataConfig(seq_len=32), sample=SampleConfig(steps=4))
    meta = {
        "config": configs.to_dict(config),
        "tokenizer": tokenizer.to_json(),
        "corpus": {"name": "toy", "sha256": "0"},
    }
    with Checkpoints(folder / "runs/quickstart/checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": toy.random_params(build(model))}, meta)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_block_runs_in_a_process_of_its_own(page, quickstart, tmp_path):
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    text = (DOCS / page).read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        env = os.environ | {"PYTHONPATH": str(DOCS.parent)}
        folder = quickstart if "runs/quickstart" in block else tmp_path
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stdout


def test_the_page_of_settings_is_what_the_rules_declare():
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings_page.page()


def test_the_table_of_causal_models_that_are_turned_is_that_of_its_data():
    path = DOCS / "causal_to_diffusion.csv"
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    assert "\n".join(causal_to_diffusion.table(path)) in text
    with path.open(encoding="utf-8", newline="") as file:
        bound = {(row["kind"], row["begins"], row["step"]): float(row["nats"])
                 for row in csv.DictReader(file) if row["kind"] != "causal"}  # fmt: skip
    assert len(bound) == 32
    for (kind, begins, step), nats in bound.items():
        assert begins == "fresh" or nats < bound[kind, "fresh", step]
