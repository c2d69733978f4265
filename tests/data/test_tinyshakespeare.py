"""Laws of the named corpus: where it is looked for, and that no other text passes for it."""

from __future__ import annotations

import hashlib
import io
import urllib.error

import pytest

from dlm_jax.data import text
from dlm_jax.data.text import SHAKESPEARE, read_documents

PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """What the network answers, last first; a short play stands for the corpus."""
    answers = []

    def urlopen(url, timeout):
        if not answers:
            raise urllib.error.URLError("no route")
        return io.BytesIO(answers.pop())

    monkeypatch.setattr(text.urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", hashlib.sha256(PLAY).hexdigest())
    return answers


def test_the_text_is_loaded_once_and_a_damaged_copy_again(downloads, tmp_path):
    downloads += [PLAY, PLAY]
    copy = tmp_path / "cache" / f"{SHAKESPEARE}.txt"
    for _ in range(2):
        (document,) = read_documents([SHAKESPEARE])
        assert (document.name, document.text) == (SHAKESPEARE, PLAY.decode())
        assert len(downloads) == 1 and copy.read_bytes() == PLAY
    copy.write_bytes(PLAY[:-1])
    assert text.read_shakespeare() == PLAY.decode()
    assert not downloads and copy.read_bytes() == PLAY


@pytest.mark.parametrize("answer", [PLAY[:20], None])
def test_another_text_or_none_is_refused_with_a_remedy_and_nothing_is_stored(
    downloads, tmp_path, answer
):
    downloads += [] if answer is None else [answer]
    message = "cannot be loaded from .*; put the file at .*--data.source path/to/input"
    with pytest.raises(ValueError, match=message) as caught:
        text.read_shakespeare()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()
