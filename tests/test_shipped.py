"""The models that come with the package: what they say of themselves is so, and they work."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import chain, near, samplers

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli import sample
from dlm_jax.data.text import SHAKESPEARE_SHA256
from dlm_jax.inference.request import only_chains_in_use
from dlm_jax.store import load_params
from dlm_jax.store.weights import DEFAULT
from dlm_jax.store.weights import SHIPPED as MODELS

ROOT = Path(__file__).parent.parent
CONFIGS = {
    "shakespeare": ROOT / "configs" / "shakespeare_bpe_heads.toml",
    "proofreader": ROOT / "configs" / "shakespeare_proofreader_heads.toml",
}
CORPUS = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


def test_the_default_is_one_of_them_and_each_names_its_text():
    assert DEFAULT in MODELS and set(MODELS) == set(CONFIGS)
    for path in MODELS.values():
        assert load_params(path)[1]["corpus"]["sha256"] == SHAKESPEARE_SHA256


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
    bound = load_params(MODELS[name])[1]["bound"]
    assert f"{bound:.3f}" in text


@pytest.mark.slow
def test_the_proofreader_repairs_by_its_defaults_as_its_page_says():
    page = (ROOT / "docs" / "edits.md").read_text(encoding="utf-8")
    pairs = re.findall(r'proofreader --draft "(.*)"\n(.*)\n', page)
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
    with pytest.raises(ValueError, match="checkpoint directory .*shakespeare has no complete"):
        dlm_jax.load("shakespeare")


def test_an_unknown_name_lists_the_models_that_ship(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        sample.main(["--checkpoint", "shakespear"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "shakespear does not exist" in error and f"shipped model: {', '.join(MODELS)}" in error


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


# Recorded on one CPU; they hold for any number of slots and any canvas.
GOLDEN = {
    "shakespeare": (
        {"prompt": "ROMEO:\n", "gen_length": 24, "seed": 3},
        [834, 25, 198, 652, 753, 596, 74, 505, 11, 343, 515, 320, 83, 11, 343, 321, 378, 352, 75,
         296, 300, 416, 13, 198, 198, 834, 25],
    ),
    "proofreader": (
        {"draft": "Tho he be a man of great honour, he is not hre.", "max_length": 60, "seed": 3},
        [32, 46, 53, 1, 46, 43, 1, 40, 43, 1, 39, 1, 51, 39, 52, 1, 53, 44, 1, 45, 56, 43, 39, 58,
         1, 46, 53, 52, 53, 59, 56, 6, 1, 46, 43, 1, 47, 57, 1, 52, 53, 58, 1, 46, 43, 8],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "canvas"), [(1, 64), pytest.param(3, 128, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "proofreader" else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)
def test_a_seed_gives_the_recorded_ids_in_any_number_of_slots_on_any_canvas(name, slots, canvas):
    asked, ids = GOLDEN[name]
    model = dlm_jax.load(name)
    requests = [
        dlm_jax.make_requests(model, asked | {"seed": asked["seed"] + k}, {})[0]
        for k in range(slots)
    ]
    with dlm_jax.Engine(model, sizes=(slots,), canvases=(canvas,)) as engine:
        rows = {row.number: row for row in engine.run(only_chains_in_use(requests))}
    assert rows[0].tokens.tolist() == ids


@pytest.mark.slow
def test_at_temperature_07_top_p_09_top_k_50_every_token_is_one_that_the_oracle_leaves():
    model, length = dlm_jax.load("shakespeare"), 64
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    result = dlm_jax.generate(
        model, ["ROMEO:\n"], num_samples=2, gen_length=length, steps=length,
        order="left_to_right", fill="parallel", ignore_eos=True, read_back=True, seed=1,
        temperature_end=-1.0, min_p=0.0, chain=("temperature", "top_k", "top_p"), **settings,
    )  # fmt: skip
    network, tokenizer = model.network, model.tokenizer

    @jax.jit
    def logits_of(tokens_BL):
        length_B = jnp.full(tokens_BL.shape[0], tokens_BL.shape[1])
        hidden_BLD, _ = network.trunk(model.params, tokens_BL, length_B, None)
        return network.readout(model.params, hidden_BLD[jnp.arange(length), place_B])

    banned = {*model.banned_ids, *model.eos_ids}
    likeliest = 0
    for row, records in enumerate(result.read_back):
        assert [record.candidates.step for record in records] == list(range(length))
        place_B = np.array([record.place for record in records])
        # The canvas of each step: what a later one wrote was MASK then.
        is_later_BL = result.committed[row][None] >= np.arange(length)[:, None]
        size = result.lengths[row]
        canvases_BL = np.where(is_later_BL, tokenizer.mask_id, result.tokens[row])[:, :size]
        clean_BV = np.asarray(logits_of(canvases_BL), np.float64)
        for logits_V, record in zip(clean_BV, records, strict=True):
            about = settings | {"banned": banned}
            left_V = chain.full_chain(logits_V, about)
            seen, kept = record.candidates, set(np.flatnonzero(np.isfinite(left_V)).tolist())
            assert seen.num_survivors == len(seen.ids) <= 50 and record.token in seen.ids
            differ = kept ^ set(seen.ids.tolist())
            if differ:
                assert differ <= near.undecided_in_chain(logits_V, about)
                continue
            np.testing.assert_allclose(seen.logits, left_V[seen.ids], rtol=1e-4, atol=1e-4)
            assert record.probability == pytest.approx(
                samplers.distribution(left_V)[record.token], rel=1e-3
            )
            likeliest += record.token == seen.ids[0]
    assert 0.3 * 2 * length < likeliest < 0.95 * 2 * length
    if CORPUS.exists():
        known = set(re.findall(r"[a-z]+", CORPUS.read_text().lower()))
        words = [word for text in result.texts for word in re.findall(r"[a-z]+", text.lower())[:-1]]
        assert len(words) > 60 and sum(word in known for word in words) / len(words) > 0.85
