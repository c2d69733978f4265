"""Laws of token files: they come back as written, and appear whole or not at all."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dlm_jax.data import pipeline
from dlm_jax.data.pipeline import id_dtype, is_intact, open_tokens, write_tokens

IDS = np.arange(1000, dtype=np.int32) % 250


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (256, "uint8"),
        (257, "uint16"),
        (65537, "int32"),
        ((1 << 31) + 1, "int64"),
    ],
)
def test_ids_come_back_from_the_smallest_type_that_holds_them(tmp_path, vocab_size, dtype):
    ids = np.array([0, 7, vocab_size - 1], np.int64)
    write_tokens(tmp_path / "t.npy", ids, vocab_size=vocab_size)
    tokens = open_tokens(tmp_path / "t.npy")
    assert tokens.dtype == id_dtype(vocab_size) == np.dtype(dtype)
    assert tokens.tolist() == ids.tolist()
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    path = tmp_path / "t.npy"
    write_tokens(path, IDS, vocab_size=260)
    whole = path.read_bytes()
    assert is_intact(path)
    header = len(whole) - IDS.astype(np.uint16).nbytes - 4
    for bit in [*range(8 * header), *range(8 * header, 8 * len(whole), 37), 8 * len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert not is_intact(path), bit


def test_an_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "t.npy"
    write_tokens(path, IDS, vocab_size=260)
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    for name in ("crc_of", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{pipeline.__name__}.{name}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write_tokens(path, IDS[::-1], vocab_size=260)
        assert os.listdir(tmp_path) == ["t.npy"]
        assert path.read_bytes() == before


def test_a_file_cut_short_missing_or_without_checksum_is_refused(tmp_path):
    path = tmp_path / "t.npy"
    write_tokens(path, IDS, vocab_size=260)
    whole = path.read_bytes()
    for content in (b"", whole[:500], whole[:-4]):
        path.write_bytes(content)
        assert not is_intact(path)
        with pytest.raises(ValueError, match="is not a complete token file; load the corpus again"):
            open_tokens(path)
    path.unlink()
    assert not is_intact(path)
    with pytest.raises(ValueError, match=r"t\.npy does not exist; load the corpus again"):
        open_tokens(path)
