"""The code of docs/ runs as it stands and does what the text around it says."""

import os
import pkgutil
import re
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import toy

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.config import Config, DataConfig, SamplingParams
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.store import Checkpoints

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = ("settings.md", "api_reference.md")
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name not in GENERATED)


def _text(page):
    return (DOCS / page).read_text(encoding="utf-8")


def _blocks(page):
    return re.findall(r"```python\n(.*?)```", _text(page), flags=re.DOTALL)


BLOCKS = [
    block for page in ("host_samplers.md", "generation.md", "own_rules.md")
    for block in _blocks(page)
]  # fmt: skip
NAMES = ("only_digits", "template", "dlm_jax.stream", "Softened")


@pytest.fixture(scope="module")
def model():
    """A toy in the place of the quickstart's model; its short chain compiles fast."""
    tokenizer = CharacterTokenizer.of(string.printable)
    network = build(toy.config(vocab_size=tokenizer.vocab_size))
    sample = SamplingParams(steps=4, chain=("temperature",))
    return Model(network, toy.random_params(network), tokenizer, max_length=32, sample=sample)


def _printed(name, model, capsys, monkeypatch):
    (block,) = [block for block in BLOCKS if name in block]
    monkeypatch.setattr(dlm_jax, "load", lambda path: model, raising=False)
    scope = {}
    exec(compile(block, "docs", "exec"), scope)
    return capsys.readouterr().out, scope


def test_every_name_stands_for_one_block():
    assert [sum(name in block for block in BLOCKS) for name in NAMES] == [1] * len(NAMES)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.name)
def test_every_table_of_results_has_its_command(path):
    for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
        if "| ---" in section:
            assert "    python " in section or "`python " in section, section[:40]


def test_every_page_is_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    results = [f"results/{path.name}" for path in RESULTS.glob("*.md")]
    for page in [*PAGES, *GENERATED, *results]:
        assert f": {page}\n" in site, page


@pytest.mark.parametrize("path", [*DOCS.glob("*.md"), *RESULTS.glob("*.md")], ids=lambda p: p.name)
def test_every_link_leads_to_a_file(path):
    for link in re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


def test_extras_of_the_first_page_exist():
    table = re.search(r"\| extra .*?\n\n", _text("index.md"), flags=re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = table[0].strip().splitlines()[2:] if table else []
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {"serve", "hub"} <= named <= set(project["optional-dependencies"])


def test_a_host_sampler_of_ones_own_is_obeyed_in_its_row(model, capsys, monkeypatch):
    out, scope = _printed(NAMES[0], model, capsys, monkeypatch)
    first, second = scope["result"].texts
    assert re.fullmatch(r"version \d{6}", first) and not re.fullmatch(r"module [\d.]+", second)
    assert [len(records) for records in scope["result"].read_back] == [6, 0]
    assert first in out
    assert out.endswith("choice among the remaining candidates: host (only_digits)\n")


@pytest.mark.slow
def test_templates_keep_their_text_and_drafts_are_rewritten(model, capsys, monkeypatch):
    _, scope = _printed(NAMES[1], model, capsys, monkeypatch)
    template, draft, blocks = scope["result"].texts
    assert re.fullmatch(r"The .{5} statement .{8}\.", template, flags=re.DOTALL)
    assert draft.startswith("The ")
    assert len(draft) == len("The value of the the") and draft != "The value of the the"
    assert blocks.startswith("A list ")
    assert scope["result"].steps.tolist()[2] == 12


def test_a_stream_shows_the_canvas_every_so_many_steps(model, capsys, monkeypatch):
    out, _ = _printed(NAMES[2], model, capsys, monkeypatch)
    assert [int(steps) for steps in re.findall(r"^0 (\d+) The ", out, flags=re.MULTILINE)] == [
        0, 2, 4, 6, 8,
    ]  # fmt: skip


def test_rules_of_ones_own_are_obeyed(model, capsys, monkeypatch):
    _, scope = _printed(NAMES[3], model, capsys, monkeypatch)
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
    config = Config(model=model, data=DataConfig(seq_len=32), sample=SamplingParams(steps=4))
    meta = {
        "config": configs.to_dict(config),
        "tokenizer": tokenizer.to_json(),
        "corpus": {"name": "toy", "sha256": "0"},
    }
    with Checkpoints(folder / "runs/quickstart/checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": toy.random_params(build(model))}, meta)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_in_a_process_of_its_own(page, quickstart, tmp_path):
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    for block in _blocks(page):
        if "path/to/" in block:  # needs a model; its own test runs it
            continue
        env = os.environ | {"PYTHONPATH": str(DOCS.parent)}
        folder = quickstart if "runs/quickstart" in block else tmp_path
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stdout


def test_every_order_has_a_row_in_the_table_of_orders():
    cells = {cell for line in _text("generation.md").splitlines() for cell in line.split("|")[1:2]}
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert BUILT_IN.commit.keys() <= named


def test_the_page_of_settings_is_what_the_rules_declare():
    made = subprocess.run(
        [sys.executable, DOCS / "settings_page.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert _text("settings.md") == made.stdout


CITED = re.compile(
    r"(?<![\w/.-])((?:docs|configs|benchmarks|tests|dlm_jax)/[\w/.-]*\w\.(?:py|md|toml|csv|png|html))"
)


def test_every_path_and_name_that_code_and_pages_cite_exists():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in listed.splitlines()
        if (ROOT / name).exists()
    }
    cited = {(name, path) for name, text in texts.items() for path in CITED.findall(text)}
    assert not {(name, path) for name, path in cited if not (ROOT / path).exists()}
    texts.pop("CHANGELOG.md")  # it names what left
    names = re.findall(r"`(dlm_jax(?:\.\w+)+)`", "".join(texts.values()))
    for name in set(names):
        owner, _, last = name.rpartition(".")
        found = pkgutil.resolve_name(owner)
        assert last in getattr(found, "__dataclass_fields__", {}) or pkgutil.resolve_name(name)
