"""Laws of rows: a document stands whole in its rows, its prompt is marked, its tail is as asked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.data import load_corpus
from dlm_jax.data.pipeline import DocumentRows, cut_into_rows, pack_rows

SEQ_LEN, EOS, PAD = 8, 90, 91
IDS = st.lists(st.integers(0, 80), min_size=1, max_size=30).map(np.array)
SHORT = st.lists(st.integers(0, 80), min_size=1, max_size=3).map(np.array)
NO_IDS = np.zeros(0, np.int64)
DOCUMENTS = st.lists(
    st.tuples(st.just("d"), st.none(), IDS)
    | st.tuples(st.just("d"), SHORT | st.just(NO_IDS), SHORT),
    min_size=1,
    max_size=6,
)


def _rows(documents, tail, pack=1) -> DocumentRows:
    ids, bounds = cut_into_rows(documents, seq_len=SEQ_LEN)
    return DocumentRows(ids.astype(np.uint8), bounds, SEQ_LEN, EOS, PAD, tail, pack)


@pytest.mark.parametrize("tail", ["eos", "pad"])
@given(documents=DOCUMENTS)
@settings(deadline=None, max_examples=40)
def test_rows_are_the_documents_one_after_the_other(tail, documents):
    rows = _rows(documents, tail)
    batch = rows.rows(range(len(rows)))
    expected = []
    for _, prompt, text in documents:
        ids = [*([] if prompt is None else prompt), *text]
        given = 0 if prompt is None else len(prompt)
        cuts = [ids[i : i + SEQ_LEN] for i in range(0, len(ids), SEQ_LEN)]
        expected += [(cut, given) for cut in cuts]
    assert len(rows) == len(expected)
    targets = 0
    for row, (ids, given) in enumerate(expected):
        room = SEQ_LEN - len(ids)
        end = [EOS] * room if tail == "eos" else [EOS, *[PAD] * room][:room]
        length = SEQ_LEN if tail == "eos" else min(len(ids) + 1, SEQ_LEN)
        assert batch["tokens"][row].tolist() == [*ids, *end]
        assert (batch["length"][row], batch["given"][row]) == (length, given)
        targets += length - given
    assert rows.num_targets() == targets
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


@given(documents=DOCUMENTS, pack=st.integers(2, 4))
@settings(deadline=None, max_examples=40)
def test_packed_rows_have_each_document_whole_and_once(documents, pack):
    rows, packed = (_rows(documents, "pad", most) for most in (1, pack))
    alone = rows.rows(range(len(rows)))
    batch = packed.read([(row, 0) for row in range(len(packed))])
    assert batch["tokens"].shape == (len(packed), SEQ_LEN)
    assert batch["length"].shape == batch["given"].shape == (len(packed), pack)
    found = []
    for tokens, lengths, givens in zip(*(batch[name] for name in batch), strict=True):
        ends = np.cumsum(lengths)
        found += [
            (tokens[end - length : end].tolist(), given)
            for end, length, given in zip(ends, lengths, givens, strict=True)
            if length
        ]
        assert set(tokens[ends[-1] :]) <= {PAD}
    expected = [
        (tokens[:length].tolist(), given)
        for tokens, length, given in zip(*(alone[name] for name in alone), strict=True)
    ]
    assert sorted(found) == sorted(expected)
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_best_fit_fills_rows_and_ends_at_the_most_documents():
    rows = pack_rows(np.array([3, 8, 2, 5, 1, 1, 1]), seq_len=8, most=3)
    assert rows.tolist() == [[1, -1, -1], [3, 0, -1], [2, 4, 5], [6, -1, -1]]


def test_best_fit_takes_the_open_row_with_the_least_space():
    """The row with more space keeps it for a document that fits nowhere else."""
    rows = pack_rows(np.array([51, 48, 9, 7, 5]), seq_len=60, most=8)
    assert [[number for number in row if number >= 0] for row in rows.tolist()] == [
        [0, 2],
        [1, 3, 4],
    ]


def test_a_row_read_alone_is_the_row_read_among_others():
    documents = [("d", None, np.arange(n)) for n in (3, 20, 1, 8)]
    rows = _rows(documents, "pad")
    whole = rows.rows(range(len(rows)))
    for numbers in ([4], [5, 0, 2], [1, 1]):
        for name, array in rows.rows(numbers).items():
            np.testing.assert_array_equal(array, whole[name][numbers])


def test_a_response_fits_with_its_prompt_and_eos_or_is_refused():
    prompt, text = np.arange(3), np.arange(4)
    cut_into_rows([("f line 1", prompt, text)], seq_len=8)
    with pytest.raises(
        ValueError,
        match="^f line 2: a prompt of 3 tokens, a response of 4 and EOS exceed seq_len=7; "
        "shorten them or use seq_len=8$",
    ):
        cut_into_rows([("f line 2", prompt, text)], seq_len=7)


def test_rows_of_each_length_are_their_own_in_a_directory_that_runs_share(tmp_path):
    lines = (json.dumps({"text": "abcdefgh " * n}) + "\n" for n in range(1, 20))
    (tmp_path / "text.jsonl").write_text("".join(lines))

    def batch(seq_len, name):
        options = {"layout": "documents", "seq_len": seq_len, "cache_dir": tmp_path / name}
        rows = load_corpus(tmp_path / "text.jsonl", **options).train_rows
        return rows.rows(range(len(rows)))

    batch(64, "shared")
    for ours, alone in zip(
        *(batch(32, name).values() for name in ("shared", "fresh")), strict=True
    ):
        np.testing.assert_array_equal(ours, alone)
