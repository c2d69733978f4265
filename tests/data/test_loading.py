"""Laws of `load_corpus`: what is held out, when files are made again, and what is refused."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from dlm_jax.data import corpus as loading
from dlm_jax.data.corpus import load_arrays, load_corpus, store_arrays
from dlm_jax.data.pipeline import validation_windows
from dlm_jax.data.shards import id_dtype
from dlm_jax.data.tokenizers import TOKENIZERS, CharacterTokenizer, HubTokenizer

TEXT = "".join(f"line {i:04d} of the text\n" for i in range(400))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def writes(monkeypatch):
    """The cached files that were written."""
    paths = []

    def recording(path, arrays):
        paths.append(path)
        store_arrays(path, arrays)

    monkeypatch.setattr(loading, "store_arrays", recording)
    return paths


@pytest.mark.parametrize("kind", [*TOKENIZERS, "bpe:300"])
def test_the_ids_decode_to_the_text(source, tmp_path, kind):
    corpus = load_corpus(source, tokenizer=kind, cache_dir=tmp_path / "cache")
    train = corpus.tokenizer.decode(corpus.train_rows)
    held_out = corpus.tokenizer.decode(corpus.val_rows)
    assert train + held_out == TEXT
    assert corpus.num_val_characters == len(held_out)
    assert corpus.num_train_tokens == len(corpus.train_rows)
    assert corpus.num_val_tokens == len(corpus.val_rows)
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_equal_inputs_share_a_file_and_any_change_makes_a_new_one(source, tmp_path, writes):
    def written(**options):
        writes.clear()
        load_corpus(source, cache_dir=tmp_path / "cache", **options)
        return list(writes)

    seen = written()
    assert len(seen) == 1
    assert written() == written(seq_len=64) == []
    for change in (
        lambda: written(tokenizer="character"),
        lambda: written(held_out=0.1),
        lambda: source.write_text(TEXT.replace("0007", "0008")) and written(),
    ):
        (path,) = change()
        assert path not in seen
        seen.append(path)
    source.write_text(TEXT)
    assert written() == []


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_made_again(source, tmp_path, writes, damage):
    corpus = load_corpus(source, cache_dir=tmp_path / "cache")
    (path,) = writes
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(whole[:half] + (b"" if damage == "cut" else b"\xff" + whole[half + 1 :]))
    again = load_corpus(source, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(again.train_rows, corpus.train_rows)
    np.testing.assert_array_equal(again.val_rows, corpus.val_rows)
    assert writes == [path, path]


def test_many_processes_may_load_at_once(source, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_corpus, source, cache_dir=tmp_path / "c") for _ in range(8)]
        assert len({job.result().train_rows.tobytes() for job in jobs}) == 1
    (path,) = (tmp_path / "c").iterdir()
    assert load_arrays(path, ["train", "val"]) is not None


ARRAYS = {"train": np.arange(300, dtype=np.uint16), "val": np.arange(7, dtype=np.int64)}


def _same(found):
    pairs = [(found[name], ARRAYS[name]) for name in found]
    return found.keys() == ARRAYS.keys() and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs
    )


def test_no_flipped_bit_is_read_as_another_id(tmp_path):
    path = tmp_path / "t.npz"
    store_arrays(path, ARRAYS)
    whole = path.read_bytes()
    assert _same(load_arrays(path, ARRAYS))
    found = 0
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        arrays = load_arrays(path, ARRAYS)
        found += arrays is None
        assert arrays is None or _same(arrays), bit
    assert found > 8 * len(whole) // 4
    path.unlink()
    assert load_arrays(path, ARRAYS) is None


def test_an_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    store_arrays(path, ARRAYS)
    before = path.read_bytes()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for name in ("numpy.savez", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                store_arrays(path, {})
        assert os.listdir(tmp_path) == ["t.npz"]
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65537, "int32"), ((1 << 31) + 1, "int64")],
)
def test_ids_have_the_smallest_type_that_holds_them(vocab_size, dtype):
    assert id_dtype(vocab_size) == np.dtype(dtype)
    assert np.array(vocab_size - 1).astype(id_dtype(vocab_size)) == vocab_size - 1


PAIRS = [{"prompt": f"ask {i} ", "response": "yes " * (1 + i % 4)} for i in range(40)]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


DOCUMENTS = {"layout": "documents", "seq_len": 32}


@pytest.mark.parametrize("tail", ["eos", "pad"])
def test_documents_come_back_with_their_prompts_given_and_whole_ones_held_out(
    pairs, tmp_path, tail
):
    corpus = load_corpus(pairs, cache_dir=tmp_path / "c", tail=tail, **DOCUMENTS)
    coder = corpus.tokenizer
    shown = []
    for rows in (corpus.train_rows, corpus.val_rows):
        batch = validation_windows(rows, seq_len=32, pad_id=coder.pad_id)
        for tokens, length, given in zip(*batch.values(), strict=True):
            text, prompt = coder.decode(tokens[:length]), coder.decode(tokens[:given])
            shown.append({"prompt": prompt, "response": text.removeprefix(prompt)})
            assert (tokens[length:] == coder.pad_id).all()
            assert (length == 32) == (tail == "eos")
            assert tokens[length - 1] == coder.eos_id
    assert shown == PAIRS
    assert len(batch["length"]) == 2
    assert corpus.num_val_tokens == (batch["length"] - batch["given"]).sum()
    assert corpus.num_val_characters == sum(len(pair["response"]) for pair in PAIRS[-2:])


def test_bad_input_is_refused_in_one_line_and_leaves_no_file(pairs, source, tmp_path):
    (tmp_path / "strange.txt").write_text("text \u00e9")
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"text": "ok"}\n{"prompt": "\\u00e9", "response": "a"}\n')
    letters, ok = CharacterTokenizer.of(TEXT), CharacterTokenizer.of("ok")
    strange = [source, tmp_path / "strange.txt"]
    cases = [
        (source, {"tokenizer": "word"}, "tokenizer='word' is unknown; use one of byte, character"),
        (source, {"held_out": 1.5}, r"held_out=1\.5 is outside"),
        (strange, {"tokenizer": letters}, r"strange\.txt: .*\(U\+00E9\) at position 5 has no id"),
        (pairs, {}, r"pairs\.jsonl line 1 has a prompt, which rows .*; use"),
        (pairs, {"layout": "lines"}, "layout='lines' is unknown; use windows or documents"),
        (pairs, {"tail": "bos"}, "tail='bos' is unknown; use eos or pad"),
        (pairs, DOCUMENTS | {"seq_len": 16}, r"pairs\.jsonl line 3: a prompt of 6 .* seq_len=19"),
        (source, DOCUMENTS, r"text\.txt with data\.layout=documents is one piece"),
        (odd, DOCUMENTS | {"tokenizer": ok}, r"odd\.jsonl line 2: .*\(U\+00E9\) at position 0 has"),
    ]
    for bad, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            load_corpus(bad, cache_dir=tmp_path / "c", **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "record",
    [
        {"text": "of \u4e2d"},
        {"prompt": "of", "response": "of \u4e2d"},
        {
            "messages": [
                {"role": "user", "content": "of \u4e2d"},
                {"role": "assistant", "content": "of"},
            ]
        },
    ],
)
@pytest.mark.parametrize("layout", ["windows", "documents"])
def test_a_character_that_a_published_tokenizer_would_drop_is_refused_by_document(
    tmp_path, record, layout
):
    """Without a token for unknown characters, the library drops them."""
    vocab = {letter: id_ for id_, letter in enumerate("of \n<>m")}
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}}
    tokenizer = HubTokenizer(json.dumps(data), 7, 8, 9)
    lines = [{"text": "of of of of"}, record]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    talk = SimpleNamespace(source="", turns=lambda messages: [])
    line = r"a\.jsonl line 2: the character .*\(U\+4E2D\) at position 3 has no id"
    if layout == "windows" and "text" not in record:
        line = "use data.layout=documents"
    with pytest.raises(ValueError, match=line):
        load_corpus(
            tmp_path / "a.jsonl",
            tokenizer=tokenizer,
            layout=layout,
            chat=talk,
            cache_dir=tmp_path / "c",
        )
    assert not (tmp_path / "c").exists()
