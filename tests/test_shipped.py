"""The models that come with the package: what they say of themselves is so, and they work."""

import re
import tomllib
from pathlib import Path

import pytest

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.checkpoint import load_weights
from dlm_jax.checkpoint.shipped import DEFAULT
from dlm_jax.checkpoint.shipped import SHIPPED as MODELS
from dlm_jax.cli import sample
from dlm_jax.data.tinyshakespeare import SHA256

ROOT = Path(__file__).parent.parent
CONFIGS = {
    "shakespeare": ROOT / "configs" / "shakespeare_bpe_heads.toml",
    "proofreader": ROOT / "configs" / "shakespeare_proofreader_heads.toml",
}
CORPUS = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


def test_the_default_is_one_of_them_and_each_names_its_text():
    assert DEFAULT in MODELS and set(MODELS) == set(CONFIGS)
    for path in MODELS.values():
        assert load_weights(path)[1]["corpus"]["sha256"] == SHA256


@pytest.mark.parametrize("name", CONFIGS)
def test_it_was_trained_by_the_config_that_anyone_can_rerun(name):
    text = CONFIGS[name].read_text()
    there, ours = dlm_jax.load(name).config, configs.load(CONFIGS[name])
    given = tomllib.loads(text)
    for section in ("model", "data", "objective", "heads", "train", "sample"):
        for key in given[section]:
            if (section, key) not in {("data", "source"), ("train", "out_dir")}:
                assert getattr(getattr(there, section), key) == getattr(
                    getattr(ours, section), key
                ), f"{section}.{key}"
    bound = load_weights(MODELS[name])[1]["bound"]
    assert f"{bound:.3f}" in text


@pytest.mark.slow
def test_the_proofreader_repairs_by_its_defaults_as_the_readme_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pairs = re.findall(r'proofreader --draft "(.*)"\n(.*)\n', readme)
    assert len(pairs) == 2
    for draft, repaired in pairs:
        made = dlm_jax.generate(dlm_jax.load("proofreader"), [{"draft": draft}])
        assert made.texts == (repaired,) and repaired != draft


def test_every_model_that_ships_is_small_and_loads_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert set(MODELS) >= {"shakespeare"}
    for name, path in MODELS.items():
        assert path.stat().st_size <= 4_000_000
        assert dlm_jax.load(name).config == dlm_jax.load(path).config
    (tmp_path / "shakespeare").mkdir()
    with pytest.raises(ValueError, match="checkpoint directory .*shakespeare is empty"):
        dlm_jax.load("shakespeare")


def test_an_unknown_name_lists_the_models_that_ship(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        sample.main(["--checkpoint", "shakespear"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "shakespear does not exist" in error and f"package: {', '.join(MODELS)}" in error


def test_sample_without_arguments_prints_a_text(capsys, monkeypatch):
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    assert sample.main([]) == 0
    out, err = capsys.readouterr()
    assert len(out.strip()) > 100
    assert "1 texts, 16 steps" in err


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus is not beside the project")
@pytest.mark.slow
def test_its_unprompted_texts_are_mostly_words_of_its_corpus():
    known = set(re.findall(r"[a-z]+", CORPUS.read_text().lower()))
    texts = dlm_jax.generate(dlm_jax.load(), num_samples=8, seed=1).texts
    words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())[1:-1]]
    assert len(words) > 200
    # 0.9 over many texts; eight of them vary by about 0.03.
    assert sum(word in known for word in words) / len(words) > 0.82
