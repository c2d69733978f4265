"""Laws of the pipeline: batches depend on file, seed and step, and on nothing else."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from corpus_cases import assert_equal, batch_at, make_two, take

from dlm_jax.data import pipeline, shard
from dlm_jax.data.corpus import load_corpus
from dlm_jax.data.pipeline import DocumentRows, train_batches, validation_windows

NUM_TOKENS = 1003
SIZES = {"seq_len": 16, "batch_size": 8}


@pytest.fixture
def ids():
    """A text in which every token is its own position."""
    return np.arange(NUM_TOKENS, dtype=np.uint16)


@pytest.fixture
def documents():
    """Thirteen rows: row i is given i % 3 tokens, and every token to learn is i."""
    given, learnt = np.arange(13) % 3, np.arange(13) % 5 + 1
    bounds = np.concatenate([[0], np.cumsum(np.stack([given, learnt], 1).ravel())])
    ids = np.repeat(np.arange(13, dtype=np.uint8), given + learnt)
    return DocumentRows(ids, bounds, 16, eos_id=90, pad_id=91, tail="pad")


@pytest.fixture(params=["windows", "documents", "mixture"])
def source(request, ids, tmp_path, monkeypatch):
    if request.param != "mixture":
        return ids if request.param == "windows" else request.getfixturevalue("documents")
    # Records far shorter than a row, so that rows span records and shards.
    monkeypatch.setattr(shard, "RECORD_TOKENS", 7)
    roots = make_two(tmp_path)
    return load_corpus(roots, seq_len=16, weights=(3, 1), cache_dir=tmp_path / "c").train_rows


@pytest.mark.parametrize("process_count", [4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(source, process_count):
    whole = take(train_batches(source, **SIZES, seed=3), 20)
    parts = [
        take(
            train_batches(source, **SIZES, seed=3, process_index=p, process_count=process_count), 20
        )
        for p in range(process_count)
    ]
    joined = [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_resuming_at_a_step_continues_the_uninterrupted_run(source, prefetch):
    whole = take(train_batches(source, **SIZES, seed=1), 40)
    for step in (0, 1, 17):
        resumed = train_batches(source, **SIZES, seed=1, start_step=step, prefetch=prefetch)
        assert_equal(take(resumed, 5), whole[step : step + 5])
    far = batch_at(source, 10**12, **SIZES, seed=1)
    assert_equal(take(train_batches(source, **SIZES, seed=1, start_step=10**12), 1), [far])


@pytest.mark.parametrize("table_limit", [1 << 20, 0], ids=["table", "cipher"])
def test_an_epoch_shows_each_token_at_most_once_and_leaves_out_less_than_two_windows(
    ids, monkeypatch, table_limit
):
    monkeypatch.setattr(pipeline, "_TABLE_LIMIT", table_limit)
    windows = (NUM_TOKENS - 15) // 16
    at = functools.partial(batch_at, ids, seq_len=16, batch_size=1, seed=5)
    epochs = []
    for epoch in range(8):
        rows = [at(epoch * windows + i)["tokens"][0] for i in range(windows)]
        tokens = np.concatenate(rows).tolist()
        assert len(set(tokens)) == len(tokens) > NUM_TOKENS - 2 * 16
        assert tokens != sorted(tokens)
        epochs.append(tuple(int(row[0]) for row in rows))
    assert len({min(starts) for starts in epochs}) > 3, "windows begin elsewhere every epoch"
    assert len(set(epochs)) == len(epochs), "the order is another every epoch"


def test_the_stream_of_a_seed_never_changes_between_releases(ids):
    starts = batch_at(ids, 0, seq_len=16, batch_size=8, seed=0)["tokens"][:, 0]
    assert starts.tolist() == [707, 307, 867, 963, 499, 19, 627, 659]


@pytest.mark.parametrize("table_limit", [1 << 20, 0], ids=["table", "cipher"])
def test_an_epoch_shows_each_document_once_in_an_order_of_its_own(
    documents, monkeypatch, table_limit
):
    monkeypatch.setattr(pipeline, "_TABLE_LIMIT", table_limit)
    at = functools.partial(batch_at, documents, seq_len=16, batch_size=1, seed=5)
    orders = []
    for epoch in range(4):
        rows = [at(epoch * 13 + i) for i in range(13)]
        orders.append([int(row["tokens"][0, 0]) for row in rows])
        assert sorted(orders[-1]) == list(range(13))
        for number, row in zip(orders[-1], rows, strict=True):
            assert row["given"] == number % 3
            assert row["length"] == number % 3 + number % 5 + 2
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("num_tokens", [16, 17, 30, 31, 32])
def test_texts_of_about_one_window_are_served(num_tokens):
    at = functools.partial(batch_at, np.arange(num_tokens), seq_len=16, batch_size=64, seed=0)
    tokens = np.concatenate([at(step)["tokens"] for step in range(8)])
    assert tokens.max() < num_tokens
    assert len(np.unique(tokens)) == num_tokens


@pytest.mark.parametrize("seq_len", [1, 16, 17, 1003, 1004])
def test_validation_windows_cover_the_file_once_in_order(ids, seq_len):
    batch = validation_windows(ids, seq_len=seq_len, pad_id=5000)
    is_live = np.arange(seq_len) < batch["length"][:, None]
    np.testing.assert_array_equal(batch["tokens"][is_live], np.arange(NUM_TOKENS))
    assert (batch["tokens"][~is_live] == 5000).all()
    assert (batch["length"][:-1] == seq_len).all()
    assert batch["length"][-1] >= 1


def test_fewer_validation_windows_are_spread_over_the_file(ids):
    every = validation_windows(ids, seq_len=16, pad_id=5000)
    some = validation_windows(ids, seq_len=16, pad_id=5000, max_windows=4)
    np.testing.assert_array_equal(some["tokens"][:, 0], [0, 240, 496, 752])
    assert {tuple(row) for row in some["tokens"]} <= {tuple(row) for row in every["tokens"]}
    assert_equal([validation_windows(ids, seq_len=16, pad_id=5000, max_windows=999)], [every])


def test_held_out_documents_are_shown_in_their_order(documents):
    every = validation_windows(documents, seq_len=16, pad_id=91)
    assert every["tokens"][:, 0].tolist() == list(range(13))
    assert every["given"].tolist() == [i % 3 for i in range(13)]
    some = validation_windows(documents, seq_len=16, pad_id=91, max_windows=4, multiple_of=8)
    assert some["tokens"][:, 0].tolist() == [0, 3, 6, 9, 91, 91, 91, 91]
    assert some["length"].tolist() == [*every["length"][[0, 3, 6, 9]], 0, 0, 0, 0]
    assert some["given"].tolist() == [*every["given"][[0, 3, 6, 9]], 0, 0, 0, 0]


def test_rows_that_fill_up_a_validation_batch_are_empty(ids):
    every = validation_windows(ids, seq_len=16, pad_id=5000)
    filled = validation_windows(ids, seq_len=16, pad_id=5000, multiple_of=8)
    n = len(every["length"])
    assert len(filled["length"]) == 64 > n
    assert_equal([{name: array[:n] for name, array in filled.items()}], [every])
    assert not filled["length"][n:].any()
    assert (filled["tokens"][n:] == 5000).all()


def test_bad_input_is_refused_in_one_line(ids):
    for change, message in (
        ({"batch_size": 9, "process_count": 2}, "9 is not a multiple of the 2 processes; use 8"),
        ({"seq_len": 1004}, "1003 training tokens, fewer than one window of seq_len=1004; use"),
    ):
        with pytest.raises(ValueError, match=message):
            train_batches(ids, **{**SIZES, "seed": 0, **change})


def test_no_epoch_of_a_seed_is_one_of_another_seed(ids):
    windows = (NUM_TOKENS - 15) // 16

    def begins(seed, epoch):
        at = functools.partial(batch_at, ids, seq_len=16, batch_size=1, seed=seed)
        rows = range(epoch * windows, (epoch + 1) * windows)
        return tuple(int(at(row)["tokens"][0][0]) for row in rows)

    assert len({begins(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
