"""Laws of the named corpus: where it is looked for, and that no other text passes for it."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading

import pytest

from dlm_jax.data import text
from dlm_jax.data.text import SHAKESPEARE, SHAKESPEARE_PATH, read_documents

PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


class _Server:
    """Serves `body` with `status` at `url` and counts how often it was asked."""

    def __init__(self):
        self.body, self.status, self.asked = PLAY, 200, 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked += 1
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(PLAY)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_):
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/input.txt"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server of a short play that stands for the corpus; the cache folder is fresh."""
    server = _Server()
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", SHAKESPEARE_PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLM_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "_URL", server.url)
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", hashlib.sha256(PLAY).hexdigest())
    yield server
    server.server.shutdown()
    thread.join()
    server.server.server_close()


def _files(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").glob("*"))


def test_the_text_is_loaded_once_and_a_damaged_copy_again(server, tmp_path):
    for _ in range(2):
        (document,) = read_documents([SHAKESPEARE])
        assert (document.name, document.text) == (SHAKESPEARE, PLAY.decode())
    assert server.asked == 1
    assert _files(tmp_path) == [f"{SHAKESPEARE}.txt"]
    copy = tmp_path / "cache" / f"{SHAKESPEARE}.txt"
    copy.write_bytes(PLAY[:-1])
    assert text.read_shakespeare() == PLAY.decode()
    assert server.asked == 2
    assert copy.read_bytes() == PLAY


def test_an_interrupted_write_leaves_nothing(server, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.read_shakespeare()
    assert _files(tmp_path) == []


def test_a_file_that_the_environment_names_comes_first(server, tmp_path, monkeypatch):
    (tmp_path / "own.txt").write_bytes(PLAY)
    monkeypatch.setenv(SHAKESPEARE_PATH, str(tmp_path / "own.txt"))
    assert text.read_shakespeare() == PLAY.decode()
    assert server.asked == 0
    assert _files(tmp_path) == []


def test_a_folder_that_cannot_be_written_does_not_keep_the_text_away(server, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert text.read_shakespeare() == PLAY.decode()


@pytest.mark.parametrize("body", [PLAY[:-1] + b"!", PLAY[:20]], ids=["other", "cut short"])
def test_another_checksum_is_refused_and_nothing_is_kept(server, tmp_path, monkeypatch, body):
    server.body = body
    found, known = (hashlib.sha256(data).hexdigest()[:12] for data in (body, PLAY))
    message = f"{len(body)} bytes with the sha256 {found}.*, but {SHAKESPEARE} has {known}.*; pass"
    with pytest.raises(ValueError, match=f"{server.url}.*--data.source path/to/input") as caught:
        text.read_shakespeare()
    assert "\n" not in str(caught.value)
    assert _files(tmp_path) == []
    (tmp_path / "own.txt").write_bytes(body)
    monkeypatch.setenv(SHAKESPEARE_PATH, str(tmp_path / "own.txt"))
    with pytest.raises(ValueError, match=f"own.txt: {message}"):
        text.read_shakespeare()


def test_without_a_network_the_remedy_is_named(server, monkeypatch, tmp_path):
    server.status = 404
    with pytest.raises(ValueError, match=f"cannot be loaded from {server.url} .*; pass the path"):
        text.read_shakespeare()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/input.txt"
        monkeypatch.setattr(text, "_URL", url)
        with pytest.raises(ValueError, match=r"cannot be loaded .*--data\.source path/") as caught:
            text.read_shakespeare()
        assert "\n" not in str(caught.value)
    assert _files(tmp_path) == []


def test_a_named_file_that_is_missing_is_refused(server, monkeypatch, tmp_path):
    monkeypatch.setenv(SHAKESPEARE_PATH, str(tmp_path / "no.txt"))
    with pytest.raises(ValueError, match=r"no\.txt cannot be read: No such file .*; correct or"):
        text.read_shakespeare()
    assert server.asked == 0
