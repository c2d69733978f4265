"""The program that converts a published causal model, on a tiny one: its files are repeatable."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tiny_chat import publish, write_text

pytest.importorskip("dlm_jax.contrib", reason="benchmarks measure it")

import dlm_jax  # noqa: E402
from benchmarks import real_model, real_model_files  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    return [
        "--model", str(publish(folder / "model")), "--text", str(write_text(folder / "text")),
        "--mask", "<|unused|>", "--layers", "1", "--dialogues", "4", "--answer-tokens", "8",
        "--length", "16", "--batch-size", "8", "--rank", "2", "--head-start", "0", "--log-every",
        "1", "--windows", "4", "--draws", "1", "--questions", "1", "--thresholds", "0.5",
        "--part-mebibytes", "1", "--packages", "--mebibytes", "1", "--steps", "3", "--no-head",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(given, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    real_model.main(["prepare", "--root", str(root), *given])
    return root


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _train(root: Path, given: list[str], seconds: float = 600.0) -> None:
    real_model.main(["train", "--root", str(root), *given, "--seconds", str(seconds)])


def test_prepared_files_depend_on_the_model_and_the_text_alone(prepared, given, tmp_path):
    real_model.main(["prepare", "--root", str(tmp_path), *given])
    for name in ("model", "tokens", "parts"):
        assert _bytes(tmp_path / name) == _bytes(prepared / name)
    texts = [json.loads(one)["text"] for one in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert len(texts) == 14 and not any("hidden" in text or "x{}" in text for text in texts)


def test_a_second_preparation_makes_nothing_again(prepared, given):
    before = {path: path.stat().st_mtime_ns for path in (prepared / "parts").rglob("*")}
    real_model.main(["prepare", "--root", str(prepared), *given])
    assert {path: path.stat().st_mtime_ns for path in (prepared / "parts").rglob("*")} == before


def test_the_cut_model_has_its_first_layers_and_a_mask_that_text_does_not_use(prepared, given):
    tensors = safetensors.numpy.load_file(prepared / "model" / "model.safetensors")
    whole = safetensors.numpy.load_file(Path(given[1]) / "model.safetensors")
    kept = {name for name in whole if not name.startswith(("model.layers.1.", "model.layers.2."))}
    assert tensors.keys() == kept
    config = json.loads((prepared / "model" / "config.json").read_text())
    made = tokenizers.Tokenizer.from_file(str(prepared / "model" / "tokenizer.json"))
    assert config["num_hidden_layers"] == 1
    assert config["mask_token_id"] == made.token_to_id("<|unused|>")


def test_a_model_in_one_file_is_written_as_its_directory_is(given, tmp_path, monkeypatch):
    """A GGUF file is loaded and exported on the way; here, loading it gives the directory."""
    model, file = dlm_jax.load(given[1]), tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(dlm_jax, "load", lambda path, **options: model)
    written = []
    for source in (given[1], file):
        out = tmp_path / f"from_{Path(source).name}"
        real_model_files.write_model(Path(source), out, layers=1, mask="<|unused|>")
        written.append(safetensors.numpy.load_file(out / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    for name, tensor in written[0].items():
        np.testing.assert_array_equal(tensor, written[1][name], err_msg=name)


@pytest.mark.parametrize("num_bytes", [2**16 + 40, 2**16 + 1000])
def test_parts_join_to_the_files_they_were_cut_from(tmp_path, num_bytes):
    rng = np.random.default_rng(0)
    (tmp_path / "from").mkdir()
    sizes = {"a": 0, "b": 3, "c": 900, "d/e": 101}
    content = {name: rng.bytes(size) for name, size in sizes.items()}
    files = {}
    for name, data in content.items():
        files[name] = tmp_path / "from" / name.replace("/", "_")
        files[name].write_bytes(data)
    real_model_files.write_parts(files, tmp_path / "parts", num_bytes)
    for part in (tmp_path / "parts").iterdir():
        assert sum(path.stat().st_size for path in part.iterdir()) <= num_bytes
    assert real_model_files.join_parts(tmp_path / "parts", tmp_path / "to") == sorted(content)
    assert _bytes(tmp_path / "to") == content
    piece = next(path for path in sorted((tmp_path / "parts").rglob("c.*")))
    piece.unlink()
    (tmp_path / "to" / "c").unlink()
    with pytest.raises(ValueError, match="is missing; carry all parts"):
        real_model_files.join_parts(tmp_path / "parts", tmp_path / "to")


def test_a_run_from_parts_that_was_interrupted_ends_like_one_that_was_not(
    prepared, given, tmp_path, capsys
):
    _train(prepared, given)
    whole = _bytes(prepared / "results")
    shutil.copytree(prepared / "parts", tmp_path / "parts")
    capsys.readouterr()
    _train(tmp_path, given, seconds=0.0)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["reason"], last["step"]) == ("interrupted", 1)
    _train(tmp_path, given)
    found = _bytes(tmp_path / "results")
    trained = [name for name in whole if name.startswith("trained-")]
    assert trained and all(found[name] == whole[name] for name in trained)
    records = [json.loads(one) for one in found["figures.jsonl"].splitlines()]
    steps = [one["step"] for one in records if one["kind"] == "train"]
    assert steps == [1, 2, 3]
    train = [one for one in records if one["kind"] == "train"]
    keys = {"loss", "tokens_per_second", "utilisation_measured"}
    assert all(keys <= one.keys() for one in train)
    _check_evaluation(tmp_path, given, ["parallel"])


@pytest.mark.slow
def test_the_sampler_head_trains_in_the_same_run_and_is_evaluated(prepared, given, tmp_path):
    for name in ("model", "tokens"):
        shutil.copytree(prepared / name, tmp_path / name)
    given = [*given, "--head"]
    _train(tmp_path, given)
    records = map(json.loads, (tmp_path / "results" / "figures.jsonl").read_text().splitlines())
    assert all("sampler" in one for one in records if one["kind"] == "train")
    _check_evaluation(tmp_path, given, ["parallel", "wavefront"])


def _check_evaluation(root: Path, given: list[str], fills: list[str]) -> None:
    real_model.main(["evaluate", "--root", str(root), *given])
    told = json.loads((root / "results" / "evaluation.json").read_text())
    assert set(told["held_out"]) == {"text", "dialogues"}
    for one in told["held_out"].values():
        for kind in ("diffusion", "causal"):
            assert one[kind].keys() == {"nats_per_token", "bits_per_byte"}
            assert 0 < one[kind]["nats_per_token"] < 20
    assert [one["fill"] for one in told["generations"]] == fills
    for one in told["generations"]:
        assert one["forwards_per_token"] == one["forwards"] / one["tokens"]
