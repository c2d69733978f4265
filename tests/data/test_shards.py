"""Laws of sharded corpora: the rows of one long text, whoever cut it and whoever reads it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpus_cases import TEXTS, assert_equal, make_shards, take, write_jsonl, write_tokenizer

from dlm_jax.data import shard, shards
from dlm_jax.data.corpus import load_corpus
from dlm_jax.data.pipeline import train_batches, validation_windows
from dlm_jax.data.shards import DamagedShard, read_index
from dlm_jax.data.tokenizers import ByteTokenizer

SIZES = {"seq_len": 16, "batch_size": 8}


@pytest.fixture(autouse=True)
def short_records(monkeypatch):
    """Records far shorter than a row, so that rows span records and shards."""
    monkeypatch.setattr(shard, "RECORD_TOKENS", 7)


def ids_of(corpus_part) -> np.ndarray:
    return corpus_part[:].astype(np.int32)


def _texts(ids: np.ndarray) -> list[str]:
    coder = ByteTokenizer()
    ends = np.flatnonzero(ids == coder.eos_id)
    assert ends[-1] == len(ids) - 1
    return [coder.decode(part) for part in np.split(ids, ends + 1)[:-1]]


@pytest.mark.parametrize("num_shards", [1, 5, 200])
def test_every_document_is_in_one_shard_once_in_its_order(tmp_path, num_shards):
    corpus = load_corpus(
        make_shards(tmp_path, shards=num_shards), seq_len=16, cache_dir=tmp_path / "c"
    )
    train, val = _texts(ids_of(corpus.train_rows)), _texts(ids_of(corpus.val_rows))
    assert sorted(train + val) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train]
    assert 3 <= len(val) <= 25
    assert corpus.num_train_tokens == sum(len(text) + 1 for text in train)
    assert corpus.num_val_characters == sum(map(len, val))


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.undo()
    one, two = make_shards(tmp_path, "one"), make_shards(tmp_path, "two", workers=2)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_rows_of_shards_are_those_of_one_text_with_the_same_ids(tmp_path):
    corpus = load_corpus(make_shards(tmp_path), seq_len=16, cache_dir=tmp_path / "c")
    ids = ids_of(corpus.train_rows)
    assert_equal(
        take(train_batches(corpus.train_rows, **SIZES, seed=3), 30),
        take(train_batches(ids, **SIZES, seed=3), 30),
    )
    for limit in (None, 3):
        how = {"seq_len": 16, "pad_id": 257, "max_windows": limit, "multiple_of": 4}
        assert_equal(
            [validation_windows(corpus.val_rows, **how)],
            [validation_windows(ids_of(corpus.val_rows), **how)],
        )


def test_few_files_are_open_however_many_there_are(tmp_path, monkeypatch):
    def open_files(limit):
        monkeypatch.setattr(shards, "_MAX_OPEN", limit)
        corpus = load_corpus(root, seq_len=16, cache_dir=tmp_path / "c")
        rows = take(train_batches(corpus.train_rows, **SIZES, seed=0, prefetch=0), 5)
        names = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        return rows, sum(name.startswith(f"{root}/train-") for name in names)

    root = make_shards(tmp_path)
    few, num_few = open_files(2)
    all_, num_all = open_files(100)
    assert_equal(few, all_)
    assert 1 <= num_few <= 2 < num_all


# Damage and other bad input


def _a_shard(root: Path) -> Path:
    return max(root.glob("train-*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", ["cut", "missing", "index"])
def test_damage_is_refused_by_file_before_a_run_begins(tmp_path, damage):
    root = make_shards(tmp_path)
    path = root / "index.json" if damage == "index" else _a_shard(root)
    data = bytearray(path.read_bytes())
    if damage == "index":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[:-9] if damage == "cut" else data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=path.name) as caught:
        load_corpus(root, seq_len=16, cache_dir=tmp_path / "c")
    assert "\n" not in str(caught.value)


def test_an_index_of_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(shards, "_FORMAT", 99)
        root = make_shards(tmp_path)
    with pytest.raises(ValueError, match=r"index\.json has format 99, but this .*; rebuild"):
        read_index(str(root))


def test_no_flipped_bit_of_a_shard_is_read_as_another_token(tmp_path):
    root = make_shards(tmp_path, shards=1)
    path, good = _a_shard(root), _a_shard(root).read_bytes()
    expected = ids_of(load_corpus(root, seq_len=16, cache_dir=tmp_path / "c").train_rows)
    rng = np.random.default_rng(0)
    found = []
    for bit in rng.choice(8 * len(good), 150, replace=False):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            rows = load_corpus(root, seq_len=16, cache_dir=tmp_path / "c").train_rows
            np.testing.assert_array_equal(ids_of(rows), expected)
        except DamagedShard as error:
            found.append(str(error))
    # Most of a shard this small is padding, where a flip changes nothing.
    assert len(found) > 10
    assert all(path.name in line for line in found)


def test_a_shard_of_another_tokenizer_is_refused(tmp_path):
    index = read_index(str(make_shards(tmp_path, "a")))
    make_shards(tmp_path, "b", tokenizer=write_tokenizer(tmp_path / "t.json"))
    name = index.train[0].name
    # Of the same size as far as the index knows, so that only the tokenizer differs.
    theirs = tmp_path / "b" / name
    facts = dataclasses.replace(index.train[0], num_bytes=theirs.stat().st_size)
    os.replace(theirs, tmp_path / "a" / name)
    changed = dataclasses.replace(index, train=(facts, *index.train[1:]))
    changed.write(shards.located(tmp_path / "a"))
    with pytest.raises(DamagedShard, match=f"{name} .*it was made with a different tokenizer"):
        load_corpus(tmp_path / "a", seq_len=16, cache_dir=tmp_path / "c")


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    bpe = write_tokenizer(tmp_path / "t.json")
    low, high = make_shards(tmp_path, "low"), make_shards(tmp_path, "high", tokenizer=bpe)
    text = write_jsonl(tmp_path / "text.jsonl")
    cases = [
        ([low, high], {}, "high has a different tokenizer or record size from .*low"),
        (high, {"tokenizer": "byte"}, "high was made with a different tokenizer from data.tok"),
        (low, {"tokenizer": "bpe:280"}, "low was made with a different tokenizer"),
        ([low, low], {"weights": (0, 0)}, r"data.weights=\[0.0, 0.0\] must be numbers of at"),
        ([low, low], {"weights": (1, 1e-9)}, "at least 1/10000 of their sum"),
        ([low, low], {"weights": (1,)}, "data.weights has 1 numbers for 2 corpora"),
        (text, {"weights": (1,)}, "data.weights applies to sharded corpora"),
        ([low, text], {}, "text.jsonl is not a sharded corpus"),
        (
            low,
            {"layout": "documents"},
            "data.layout='documents' is not supported for sharded corpora",
        ),
        (low, {"seq_len": 10**6}, "fewer than one window of seq_len=1000000"),
        ("ftp://host/x", {}, "URL of an unknown kind; use gs://, s3://"),
    ]
    for source, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            load_corpus(source, **({"seq_len": 16, "cache_dir": tmp_path / "c"} | options))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"text": "a"}\n{"text": 3}\n', [], "at byte 14: text is not a text"),
        ('{"prompt": "a", "response": "b"}\n', [], "has a prompt, which rows of packed"),
        ('{"text": "a"}\n', [], "no documents are"),
        ('{"text": "a"}\n', ["--held-out", "1"], "--held-out=1.0 is outside"),
        ('{"text": "a"}\n', ["--tokenizer", "bpe:300"], "reads the whole text; use byte or a"),
        ('{"text": "a"}\n', ["--shard", "2"], "unrecognized arguments: --shard"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, content, flags, message):
    (tmp_path / "in.jsonl").write_text(content)
    arguments = [str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert shard.main([*arguments, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_full_disk_ends_in_one_line_with_5(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 100)
    command = f"-m dlm_jax.data.shard {source} --out {tmp_path / 'out'} --shards 1 --workers 1"
    # A file that may not grow stands for a full disk.
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 8; exec {sys.executable} {command} --tokenizer byte"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert re.fullmatch(r"error: .*File too large.*; free some space and .*\n", done.stderr)
