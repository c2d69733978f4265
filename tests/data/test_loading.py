"""Laws of `load_corpus`: what is held out, when files are made again, and what is refused."""

from __future__ import annotations

import concurrent.futures
import hashlib

import numpy as np
import pytest

from dlm_jax.data import loading, token_files
from dlm_jax.data.corpora import BUILTIN_CORPUS
from dlm_jax.data.loading import load_corpus
from dlm_jax.data.pipeline import train_dataset
from dlm_jax.data.token_files import open_tokens
from dlm_jax.data.tokenizers import TOKENIZERS, ByteTokenizer, CharacterTokenizer

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
    write = token_files.write_tokens

    def recording(path, ids, *, vocab_size):
        names.append(path.name)
        write(path, ids, vocab_size=vocab_size)

    monkeypatch.setattr(loading.token_files, "write_tokens", recording)
    return names


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_token_files_decode_to_the_text(source, tmp_path, kind):
    corpus = load_corpus(source, tokenizer=kind, cache_dir=tmp_path / "cache")
    train = corpus.tokenizer.decode(open_tokens(corpus.train_path))
    held_out = corpus.tokenizer.decode(open_tokens(corpus.val_path))
    assert train + held_out == TEXT
    assert (corpus.num_train_characters, corpus.num_val_characters) == (len(train), len(held_out))
    assert corpus.num_train_tokens == len(open_tokens(corpus.train_path))
    assert corpus.num_val_tokens == len(open_tokens(corpus.val_path))
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_held_out_text_is_in_no_training_window(source, tmp_path):
    corpus = load_corpus(source, cache_dir=tmp_path / "cache")
    decode = corpus.tokenizer.decode
    held_out = set(decode(open_tokens(corpus.val_path)).splitlines())
    dataset = train_dataset(corpus.train_path, seq_len=100, batch_size=50, seed=0)
    seen = set()
    for step in range(10):
        batch = dataset[step]
        assert batch is not None
        for row in batch["tokens"]:
            seen.update(decode(row).splitlines()[1:-1])
    assert len(held_out) == 20
    assert len(seen) > 350
    assert not held_out & seen


def test_equal_inputs_share_files_and_any_change_makes_new_ones(source, tmp_path, writes):
    def paths(**options):
        before = len(writes)
        corpus = load_corpus(source, cache_dir=tmp_path / "cache", **options)
        return corpus.train_path, len(writes) - before

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


@pytest.mark.parametrize("part", ["train_path", "val_path"])
@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "other"])
def test_a_damaged_file_is_made_again_and_the_whole_one_is_not(
    source, tmp_path, writes, part, damage
):
    corpus = load_corpus(source, cache_dir=tmp_path / "cache")
    path = getattr(corpus, part)
    whole = path.read_bytes()
    writes.clear()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        np.save(path, np.zeros(3, np.float32))
    else:
        half = len(whole) // 2
        path.write_bytes(whole[:half] + (b"" if damage == "cut" else b"\xff" + whole[half + 1 :]))
    assert load_corpus(source, cache_dir=tmp_path / "cache") == corpus
    assert writes == [path.name]
    assert path.read_bytes() == whole


def test_many_processes_may_load_at_once(source, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_corpus, source, cache_dir=tmp_path / "c") for _ in range(8)]
        corpora = {job.result().train_path: job.result() for job in jobs}
    (corpus,) = corpora.values()
    assert token_files.is_intact(corpus.train_path)
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".npy", ".npy"]


def test_an_existing_tokenizer_is_kept(source, tmp_path):
    tokenizer = CharacterTokenizer.of(TEXT + "\u00e9")
    corpus = load_corpus(source, tokenizer=tokenizer, cache_dir=tmp_path)
    assert corpus.tokenizer is tokenizer


def test_files_go_where_the_environment_says(source, tmp_path, monkeypatch):
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "here"))
    assert load_corpus(source).train_path.parent == tmp_path / "here"


def test_the_builtin_corpus_loads(tmp_path):
    corpus = load_corpus(BUILTIN_CORPUS, seq_len=256, cache_dir=tmp_path)
    assert corpus.name == BUILTIN_CORPUS
    assert corpus.num_train_tokens > 10 * corpus.num_val_tokens
    assert corpus.tokenizer == ByteTokenizer()


def test_bad_input_is_refused_in_one_line_and_leaves_no_file(source, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "strange.txt").write_text("text \u00e9")
    cache = tmp_path / "cache"
    letters = CharacterTokenizer.of(TEXT)
    cases = [
        (tmp_path / "short.txt", {}, r"short\.txt has 1 characters, too short to split; give"),
        (source, {"tokenizer": "word"}, "tokenizer='word' is unknown; use one of byte, character"),
        (source, {"held_out": 1.5}, r"held_out=1\.5 is outside"),
        (
            [source, tmp_path / "strange.txt"],
            {"tokenizer": letters},
            r"strange\.txt: the character .*\(U\+00E9\) at position 5 is not among",
        ),
    ]
    for bad, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            load_corpus(bad, cache_dir=cache, **options)
        assert "\n" not in str(caught.value)
        assert not cache.exists()


def test_text_shorter_than_one_window_is_refused(source, tmp_path):
    num_tokens = load_corpus(source, cache_dir=tmp_path).num_train_tokens
    assert load_corpus(source, seq_len=num_tokens, cache_dir=tmp_path)
    message = f"{num_tokens} training tokens, fewer than one window of seq_len={num_tokens + 1}; "
    with pytest.raises(ValueError, match=message):
        load_corpus(source, seq_len=num_tokens + 1, cache_dir=tmp_path)
