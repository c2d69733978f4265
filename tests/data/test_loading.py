"""Laws of `load_corpus`: what is held out, when files are made again, and what is refused."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
from types import SimpleNamespace

import pytest

from dlm_jax.data import corpus as loading
from dlm_jax.data.corpus import load_corpus
from dlm_jax.data.pipeline import is_intact, open_tokens, validation_windows
from dlm_jax.data.tokenizers import TOKENIZERS, CharacterTokenizer, HubTokenizer

TEXT = "".join(f"line {i:04d} of the text\n" for i in range(400))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def writes(monkeypatch):
    """Names of the token files that were written."""
    names: list[str] = []
    write = loading.write_tokens

    def recording(path, ids, *, vocab_size):
        names.append(path.name)
        write(path, ids, vocab_size=vocab_size)

    monkeypatch.setattr(loading, "write_tokens", recording)
    return names


@pytest.mark.parametrize("kind", [*TOKENIZERS, "bpe:300"])
def test_the_token_files_decode_to_the_text(source, tmp_path, kind):
    corpus = load_corpus(source, tokenizer=kind, cache_dir=tmp_path / "cache")
    train = corpus.tokenizer.decode(open_tokens(corpus.train_rows))
    held_out = corpus.tokenizer.decode(open_tokens(corpus.val_rows))
    assert train + held_out == TEXT
    assert (corpus.num_train_characters, corpus.num_val_characters) == (len(train), len(held_out))
    assert corpus.num_train_tokens == len(open_tokens(corpus.train_rows))
    assert corpus.num_val_tokens == len(open_tokens(corpus.val_rows))
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_equal_inputs_share_files_and_any_change_makes_new_ones(source, tmp_path, writes):
    def paths(**options):
        before = len(writes)
        corpus = load_corpus(source, cache_dir=tmp_path / "cache", **options)
        return corpus.train_rows, len(writes) - before

    first, written = paths()
    assert written == 2
    assert paths() == (first, 0)
    assert paths(seq_len=64) == (first, 0)
    changes = [
        lambda: paths(tokenizer="character"),
        lambda: paths(held_out=0.1),
        lambda: source.write_text(TEXT.replace("0007", "0008")) and paths(),
    ]
    seen = {first}
    for change in changes:
        path, written = change()
        assert written == 2
        assert path not in seen
        seen.add(path)
    source.write_text(TEXT)
    assert paths() == (first, 0)


@pytest.mark.parametrize("part", ["train_rows", "val_rows"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_made_again_and_the_whole_one_is_not(
    source, tmp_path, writes, part, damage
):
    corpus = load_corpus(source, cache_dir=tmp_path / "cache")
    path = getattr(corpus, part)
    whole = path.read_bytes()
    writes.clear()
    half = len(whole) // 2
    path.write_bytes(whole[:half] + (b"" if damage == "cut" else b"\xff" + whole[half + 1 :]))
    assert load_corpus(source, cache_dir=tmp_path / "cache") == corpus
    assert writes == [path.name]
    assert path.read_bytes() == whole


def test_many_processes_may_load_at_once(source, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_corpus, source, cache_dir=tmp_path / "c") for _ in range(8)]
        corpora = {job.result().train_rows: job.result() for job in jobs}
    (corpus,) = corpora.values()
    assert is_intact(corpus.train_rows)
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".npy", ".npy"]


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
    assert corpus.num_train_characters == sum(len(pair["response"]) for pair in PAIRS[:-2])


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
