"""python -m dlm_jax.evaluate and .export as their users run them."""

import hashlib
import json

import pytest
import saved_model
import toy_model

from dlm_jax.cli import evaluation, exporter
from dlm_jax.inference.scoring import score


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    """The programs set up JAX for their process; here that process goes on."""
    for module in (evaluation, exporter):
        monkeypatch.setattr(module, "start_jax", lambda *args: None)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


def _records(run_dir, capsys, *flags):
    assert evaluation.main(["--checkpoint", str(run_dir), "--json", *map(str, flags)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_files_are_scored_one_by_one_and_split_at_a_line(run_dir, tmp_path, capsys):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("The cat sat.")
    two.write_text("A rat ran.\n---\nThe rat sat.\n")
    first, second = _records(run_dir, capsys, "--text", one, two, "--split")
    expected = score(toy_model.MODEL, ["A rat ran.", "The rat sat."])
    assert (first["texts"], second["texts"]) == (1, 2)
    assert second["nats_per_token"] == pytest.approx(expected.nats_per_token[0], rel=1e-5)
    assert second["bits_per_character_error"] == pytest.approx(expected.bits_per_character[1])
    assert second["kind"] == "upper bound"
    assert second["characters"] == 22


def test_pairs_score_the_responses_given_their_prompts(run_dir, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "The cat ", "response": "sat."}\n{"prompt": "A ", "response": "rat"}\n'
    )
    (record,) = _records(run_dir, capsys, "--text", path, "--num-draws", "2")
    expected = score(toy_model.MODEL, ["sat.", "rat"], prompts=["The cat ", "A "], num_draws=2)
    assert record["tokens"] == 7
    assert record["nats_per_token"] == pytest.approx(expected.nats_per_token[0], rel=1e-5)


def test_without_texts_the_held_out_part_of_a_corpus_is_scored(run_dir, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text((toy_model.TEXT + " ") * 40)
    (record,) = _records(run_dir, capsys, "--held-out", corpus)
    assert record["source"].endswith("corpus.txt")
    assert record["characters"] == record["tokens"] == pytest.approx(0.05 * 24 * 40, abs=2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--num-draws", "0"], "argument --num-draws: 0 is not in [1, "),
        (["--batch-size", "-1"], "argument --batch-size: -1 is not in [1, "),
        (["--seed", str(2**64)], "argument --seed: 18446744073709551616 is not in [0, "),
        (["--text", "bad.jsonl"], "bad.jsonl"),
        (["--held-out", "nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(run_dir, tmp_path, monkeypatch, capsys, flags,
                                                 said):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SystemExit) as ended:
        evaluation.main(["--checkpoint", str(run_dir), *flags])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line


@pytest.fixture
def own_text(tmp_path, monkeypatch):
    """A run whose corpus lies in the working directory, and that corpus; caches are apart."""
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text((toy_model.TEXT + " ") * 40)
    sha256 = hashlib.sha256(corpus.read_bytes()).hexdigest()
    strange = str(tmp_path / "strange")
    data = {"source": (corpus.name,), "cache_dir": strange}
    run = saved_model.save(tmp_path / "run", sha256=sha256, data=data)
    return run, corpus


def _refused(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        evaluation.main(list(map(str, flags)))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_the_own_text_is_scored_unless_it_changed(own_text, capsys, tmp_path):
    run, corpus = own_text
    assert evaluation.main(["--checkpoint", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == pytest.approx(0.05 * 24 * 40, abs=2)
    assert not (tmp_path / "strange").exists()
    assert any((tmp_path / "cache").iterdir())
    corpus.write_text(corpus.read_text() + "A cat.")
    line = _refused(capsys, "--checkpoint", run)
    assert "corpus.txt is not the text that the model was trained on" in line


def test_a_weights_file_decides_neither_what_is_read_nor_what_is_written(
    own_text, capsys, tmp_path, monkeypatch
):
    run, corpus = own_text
    path = tmp_path / "strange.safetensors"
    assert exporter.main(["--checkpoint", str(run), "--out", str(path)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        evaluation, "load_corpus", lambda *args, **kwargs: pytest.fail("it is read")
    )
    line = _refused(capsys, "--checkpoint", path)
    assert "cannot select the text to read; name the text: --held-out" in line
    monkeypatch.undo()
    monkeypatch.setattr(evaluation, "start_jax", lambda *args: None)
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "cache"))
    flags = ["--checkpoint", str(path), "--held-out", str(corpus), "--json"]
    assert evaluation.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 0
    assert not (tmp_path / "strange").exists()


@pytest.mark.parametrize("tail", ["eos", "pad"])
def test_text_and_the_eos_behind_it_are_scored_apart(tmp_path, monkeypatch, capsys, tail):
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "cache"))
    pairs = [("The cat ", "sat."), ("A ", "rat"), ("A rat ", "ran.")] * 8
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(
        json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs
    ))  # fmt: skip
    data = {"layout": "documents", "tail": tail, "held_out": 0.25}
    run = saved_model.save(tmp_path / "run", data=data)
    text, behind = _records(run, capsys, "--held-out", path)
    held_out = [response for _, response in pairs[-6:]]
    assert text["tokens"] == text["characters"] == sum(map(len, held_out))
    size = saved_model.CONFIG.data.seq_len
    ends = sum(size - len(p) - len(r) if tail == "eos" else 1 for p, r in pairs[-6:])
    assert behind["tokens"] == ends
    assert behind["source"] == f"EOS behind the {text['source']}"
    assert behind["bits_per_character"] is None
    # Together they are the bound of the rows, as training reports it.
    from dlm_jax.data import load_corpus, validation_windows
    from dlm_jax.inference.scoring import score_rows

    tokenizer = toy_model.TOKENIZER
    corpus = load_corpus(str(path), tokenizer=tokenizer, held_out=0.25, layout="documents",
                         tail=tail, seq_len=size)  # fmt: skip
    rows = validation_windows(corpus.val_rows, seq_len=size, pad_id=tokenizer.pad_id)
    whole = score_rows(toy_model.MODEL, rows).nats_B.sum()
    parts = [r["nats_per_token"] * r["tokens"] for r in (text, behind)]
    assert sum(parts) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.NDJSON", "texts.json"])
def test_texts_in_json_are_scored_as_the_texts_that_they_are(run_dir, tmp_path, capsys, name):
    path, texts = tmp_path / name, ["A rat ran.", "The rat sat."]
    records = [{"text": text} for text in texts]
    is_list = name.endswith(".json")
    path.write_text(json.dumps(records) if is_list else "\n".join(map(json.dumps, records)))
    (record,) = _records(run_dir, capsys, "--text", path)
    expected = score(toy_model.MODEL, texts)
    assert (record["texts"], record["characters"]) == (2, 22)
    assert record["nats_per_token"] == pytest.approx(expected.nats_per_token[0], rel=1e-5)
    path.write_text(json.dumps([{"prompt": "A", "completion": "b"}]).strip("[]" * (not is_list)))
    line = _refused(capsys, "--checkpoint", run_dir, "--text", path)
    assert "1 has the fields completion, prompt; expected" in line
