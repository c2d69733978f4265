"""What a server tells of itself: usage, times, whether it is warm; and what long texts cost."""

import dataclasses
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest
import toy_model
from serving_cases import MODEL, SLOW, events_of, post, refusal_of, serving

from dlm_jax.data.tokenizers import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.serving import http


@pytest.mark.parametrize(
    ("path", "body", "given", "written"),
    [
        ("/v1/completions", {"prompt": "The", "suffix": " sat.", "max_tokens": 4}, 8, 4),
        ("/v1/infill", {"template": "The <hole:3> sat. A <hole:2>."}, 13, 5),
        ("/v1/completions", {"prompt": "The", "max_tokens": 4, "ignore_eos": True}, 3, 4),
    ],
)
def test_usage_counts_each_token_once(running, path, body, given, written):
    asked = body | {"steps": 4, "seed": 1, "n": 2}
    usage = post(running, path, asked).json()["usage"]
    told = [usage[f"{kind}_tokens"] for kind in ("prompt", "completion", "total")]
    assert told == [given, 2 * written, given + 2 * written]
    stream = asked | {"stream": True, "stream_options": {"include_usage": True}}
    assert events_of(post(running, path, stream))[-1]["usage"] == usage


def _is_warm(server) -> bool:
    return httpx.get(f"{server.url}/health").json()["is_warm"]


def test_a_server_is_warm_after_all_warm_ups_and_not_if_one_fails(monkeypatch):
    warmed, is_last, fails = [], threading.Event(), False

    def warm_up(engine, request, *, num_rows):
        warmed.append(num_rows)
        assert is_last.wait(30)
        if fails:
            raise MemoryError

    monkeypatch.setattr(Engine, "warm_up", warm_up)
    with serving(warms_up=True, sizes=(1, 3)) as server:
        assert not _is_warm(server)
        is_last.set()
        while not _is_warm(server):
            time.sleep(0.01)
    assert warmed == sorted(warmed) and set(warmed) == {1, 3}
    count, fails = len(warmed), True
    warmed.clear()
    with serving(warms_up=True, sizes=(1, 3)) as server:
        while len(warmed) < count:
            time.sleep(0.01)
        time.sleep(0.1)
        assert not _is_warm(server)


@pytest.mark.slow
def test_no_ordinary_request_to_a_warm_server_compiles():
    compiled = []

    def note(name, seconds, **more):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    model = dataclasses.replace(toy_model.of('{}[]":, A rat.'), sample=MODEL.sample)
    with serving(model, warms_up=True, sizes=(1, 3)) as server:
        while not _is_warm(server):
            time.sleep(0.05)
        assert compiled
        compiled.clear()
        plain = {"prompt": "A ", "max_tokens": 20, "seed": 1}
        for own in (
            {}, {"n": 3}, {"logprobs": 2}, {"n": 3, "logprobs": 2}, {"stream": True},
            {"temperature": 0.5, "top_p": 0.9, "steps": 20}, {"max_tokens": 4}, {"n": 7},
            {"response_format": {"type": "json_object"}}, {"suffix": " rat.", "max_tokens": 4},
        ):  # fmt: skip
            assert post(server, "/v1/completions", plain | own).status_code == 200, own
        with ThreadPoolExecutor(12) as pool:
            ask = functools.partial(post, server, "/v1/completions")
            assert all(a.status_code == 200 for a in pool.map(ask, [plain] * 12))
        assert compiled == []


LONG = "A " * 3000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["A ", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": "A ", "suffix": LONG, "max_tokens": 2}, "suffix"),
        ("/v1/completions", {"prompt": "A ", "draft": LONG}, "draft"),
        ("/v1/infill", {"template": LONG + "<hole:2>"}, "template"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    running, path, body, param, monkeypatch
):
    def encode(tokenizer, text):
        assert len(text) < 1000, "a long text is encoded"
        return np.zeros(len(text), np.int32)

    monkeypatch.setattr(CharacterTokenizer, "encode", encode)
    error = refusal_of(post(running, path, body))
    assert error["param"] == param and "characters exceeds the canvas" in error["message"]


def test_others_are_answered_while_a_long_text_is_encoded(running, monkeypatch):
    encodes, goes_on = threading.Event(), threading.Event()
    text = "A" * (128 * MODEL.max_length)  # as long as a text may be

    def encode(tokenizer, text):
        encodes.set()
        assert goes_on.wait(10)
        return np.zeros(len(text), np.int32)

    monkeypatch.setattr(CharacterTokenizer, "encode", encode)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, running, "/v1/completions", {"prompt": text})
        assert encodes.wait(10)
        assert httpx.get(f"{running.url}/health", timeout=5).status_code == 200
        goes_on.set()
        assert asked.result().status_code == 400


def test_a_stream_that_waits_sends_comments(monkeypatch):
    """A proxy closes a connection on which nothing is sent."""
    monkeypatch.setattr(http, "_BEAT_SECONDS", 0.1)
    with serving(max_seconds=1) as server:
        text = post(server, "/v1/completions", SLOW | {"stream": True}).text
    *comments, event = [part for part in text.split("\n\n") if part]
    assert len(comments) >= 4 and all(part.startswith(":") for part in comments)
    assert '"code":"timeout"' in event
