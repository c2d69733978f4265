"""The server as clients know it: the openai package over real sockets, and what is malformed."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from serving_cases import EOS, MODEL, SLOW, choices_of, post, refusal_of, serving

import dlm_jax
from dlm_jax.serving import http
from dlm_jax.structured import Structures


def _expected(prompts, **settings):
    """Texts of `generate` behind their prompts, with the result."""
    result = dlm_jax.generate(MODEL, prompts, **settings)
    texts = []
    per_prompt = settings.get("num_samples", 1)
    for place, (tokens, length) in enumerate(zip(result.tokens, result.lengths, strict=True)):
        given = MODEL.tokenizer.encode(prompts[place // per_prompt]).size
        texts.append(MODEL.tokenizer.decode(tokens[given:length]))
    return texts, result


def test_completions_are_those_of_generate(client):
    settings = {
        "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "presence_penalty": 0.1,
        "seed": 5,
    }  # fmt: skip
    own = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1, "steps": 6}
    bias = {"3": -2.0}
    made = client.completions.create(
        model="toy", prompt=["The ", "A r"], n=2, max_tokens=6, logit_bias=bias, logprobs=0,
        user="me", extra_body=own, **settings,
    )  # fmt: skip
    texts, result = _expected(
        ["The ", "A r"], num_samples=2, gen_length=6, logit_bias=bias, **own, **settings
    )
    assert [choice.text for choice in made.choices] == texts
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.object == "text_completion" and made.model == "toy"
    for row, choice in enumerate(made.choices):
        n = int(result.lengths[row])
        given = result.committed[row, :n] < 0
        np.testing.assert_allclose(
            choice.logprobs.token_logprobs, result.logprobs[row, :n][~given], atol=1e-4
        )
        assert "".join(choice.logprobs.tokens) == choice.text
    usage = made.usage
    assert usage.prompt_tokens == 7
    assert usage.completion_tokens == int((result.committed >= 0).sum())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_holds_the_whole_answer_as_its_tokens_settle(client):
    asked = {"model": "toy", "prompt": "A ", "max_tokens": 12, "seed": 3}
    own = {"steps": 12, "block_length": 4, "order": "low_confidence", "ignore_eos": True}
    whole = client.completions.create(**asked, extra_body=own)
    chunks = list(
        client.completions.create(
            **asked, extra_body=own, stream=True, stream_options={"include_usage": True}, logprobs=0
        )
    )
    *pieces, last = chunks
    sizes = [len(piece.choices[0].text) for piece in pieces]
    assert len(sizes) > 2 and min(sizes) > 0
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    *ends, end = [piece.choices[0].finish_reason for piece in pieces]
    assert {*ends} == {None} and end == "length"
    assert [len(piece.choices[0].logprobs.tokens) for piece in pieces] == sizes
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chats_are_answered_and_streamed(client):
    said = [
        {"role": "user", "content": "The "},
        {"role": "user", "content": [{"type": "text", "text": "cat"}]},
    ]
    asked = {"model": "toy", "messages": said, "seed": 2, "extra_body": {"steps": 5}}
    made = client.chat.completions.create(
        **asked, max_completion_tokens=5, logprobs=True, top_logprobs=2
    )
    (choice,) = made.choices
    (text,), _ = _expected(["The cat"], gen_length=5, steps=5, seed=2, read_back=True)
    assert choice.message.content == text and choice.message.role == "assistant"
    for told in choice.logprobs.content:
        assert bytes(told.bytes).decode() == told.token and len(told.top_logprobs) == 2
        assert told.top_logprobs[0].logprob >= told.top_logprobs[1].logprob
    chunks = list(client.chat.completions.create(**asked, max_tokens=5, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    (plain,), _ = _expected(["The cat"], gen_length=5, steps=5, seed=2)
    assert streamed == plain
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_an_end_of_generation_ends_the_answer(client):
    made = client.completions.create(
        model="toy", prompt="A ", max_tokens=6, logit_bias={str(EOS): 1e6}
    )
    assert made.choices[0].text == "" and made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens == 1


def test_ids_and_a_suffix(client, running):
    ids = MODEL.tokenizer.encode("The ").tolist()
    asked = {"model": "toy", "max_tokens": 4, "seed": 1, "extra_body": {"steps": 4}}
    texts = [
        client.completions.create(prompt=prompt, **asked).choices[0].text
        for prompt in ("The ", ids, [ids])
    ]
    assert len(set(texts)) == 1
    made = client.completions.create(prompt="The", suffix=" sat.", **asked)
    filled = made.choices[0].text
    body = {"template": "The<hole:4> sat.", "seed": 1, "steps": 4}
    (whole,) = choices_of(post(running, "/v1/infill", body))
    assert whole["text"] == f"The{whole['infills'][0]} sat." == f"The{filled}"


def test_an_infill_is_that_of_generate_with_the_log_probabilities_of_its_gaps_alone(running):
    template = "The <hole:3> sat. A <hole:2>"
    settings = {"seed": 4, "steps": 5, "order": "low_confidence", "ignore_eos": True}
    asked = settings | {"template": template, "logprobs": 0}
    (choice,) = choices_of(post(running, "/v1/infill", asked))
    assert choice["text"] == dlm_jax.generate(MODEL, [{"template": template}], **settings).texts[0]
    assert [len(text) for text in choice["infills"]] == [3, 2]
    assert choice["logprobs"]["tokens"] == list("".join(choice["infills"]))
    assert all(p < 0 for p in choice["logprobs"]["token_logprobs"])


def test_models_health_and_figures(client, running):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{running.url}/health").json()["status"] == "ok"
    assert running.idle()
    figures = httpx.get(f"{running.url}/metrics").text
    for name in ("requests_total", "rows_running", "tokens_total", "request_seconds_bucket"):
        assert f"dlm_jax_{name}" in figures
    work = running.engine.report()
    for name in ("rows", "forwards", "steps", "waves", "bootstrapped", "filled"):
        holder = work if name in ("rows", "steps") else work.counters
        assert f"dlm_jax_{name}_total {float(getattr(holder, name))}\n" in figures
    assert work.counters.filled > 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000,
     b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}',
     b'{"prompt": "' + b'\\"' * 100_000],
)  # fmt: skip
def test_bodies_that_are_no_request_are_refused(running, body):
    refusal_of(post(running, "/v1/completions", body))


def test_unknown_paths_and_methods_get_the_error_object(running):
    assert httpx.get(f"{running.url}/v2").json()["error"]["code"] == "not_found"
    wrong = httpx.get(f"{running.url}/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_answers_have_the_format_that_is_asked_for(client):
    form = {"type": "regex", "regex": "(cat|rat)( sat)?"}
    for seed in range(6):
        together = {"fill": "constrained", "steps": 2} if seed > 3 else {}
        made = client.completions.create(
            model="toy", prompt="The ", max_tokens=10, seed=seed,
            extra_body={"response_format": form, "temperature": 1.5} | together,
        )  # fmt: skip
        assert re.fullmatch(form["regex"], made.choices[0].text)
        assert made.choices[0].finish_reason == "stop"


def _leaving(running, body):
    """A client that goes away as soon as its request is sent."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(head.encode() + data)
        if body.get("stream"):
            assert link.recv(64)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_free_their_slots(running, client, stream, caplog):
    before = running.engine.report().steps
    _leaving(running, SLOW | {"stream": stream, "n": 3})
    assert running.idle()
    assert running.engine.report().steps - before < 3 * 4000
    assert client.completions.create(model="toy", prompt="A ", max_tokens=2).choices
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_keys_limits_and_time(monkeypatch):
    limits = {"max_rows": 8, "max_waiting": 1, "max_seconds": 0.5}
    monkeypatch.setattr(http, "_MOST_BYTES", 2000)
    with serving(key="secret", **limits) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            response = post(running, "/v1/completions", {"prompt": "A"}, **headers)
            assert refusal_of(response, 401)["code"] == "invalid_api_key"
        good = {"authorization": "Bearer secret"}
        large = post(running, "/v1/completions", {"prompt": "A" * 3000}, **good)
        assert refusal_of(large, 413)["code"] == "too_large"
        full = post(running, "/v1/completions", {"prompt": "A ", "n": 6}, **good)
        assert full.status_code == 429 and full.headers["retry-after"]
        late = post(running, "/v1/completions", SLOW, **good)
        assert refusal_of(late, 504)["code"] == "timeout"
        lines = post(running, "/v1/completions", SLOW | {"stream": True}, **good).text
        assert '"code":"timeout"' in lines and "[DONE]" not in lines
        assert running.idle()


@pytest.fixture
def compiling(monkeypatch):
    """Counts the compilations of patterns of some "s"; they end with the test."""
    goes_on, began, compile_ = threading.Event(), threading.Semaphore(0), Structures._compile

    def slow(self, pattern):
        if pattern.startswith("s"):
            began.release()
            assert goes_on.wait(60)
        return compile_(self, pattern)

    monkeypatch.setattr(Structures, "_compile", slow)
    yield began, goes_on
    goes_on.set()


def _of_form(running, regex):
    form = {"type": "regex", "regex": regex}
    body = {"prompt": "A ", "max_tokens": 6, "response_format": form}
    return post(running, "/v1/completions", body)


def test_a_structure_that_compiles_for_long_delays_nobody_else(compiling):
    began, goes_on = compiling
    with serving(max_waiting=1) as running, ThreadPoolExecutor() as threads:
        try:
            assert _of_form(running, "(cat|rat)").status_code == 200
            for n in range(1, 3):  # as many as are compiled at the same time
                threads.submit(_of_form, running, "s" * n)
                assert began.acquire(timeout=20)
            assert _of_form(running, "(cat|rat)").status_code == 200
            four = {"prompt": ["A "] * 4, "max_tokens": 6}  # with the two, more than the five
            assert post(running, "/v1/completions", four).status_code == 429
        finally:
            goes_on.set()


def test_compilation_is_part_of_the_time_of_a_request_and_outlives_no_server(compiling):
    with serving(max_seconds=0.3) as running:
        assert refusal_of(_of_form(running, "sat"), 504)["code"] == "timeout"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_while_it_is_busy(number):
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
from starlette.applications import Starlette
from dlm_jax.serving.http import Server, listening

class App(Starlette):
    async def __call__(self, scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        print("listening", flush=True)
        await receive()
        print("stopping", flush=True)
        time.sleep(60)

Server(App(), drain=1).run(sockets=[listening("127.0.0.1", 0)])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for word in ("listening", "stopping"):
            assert process.stdout.readline().strip() == word
            process.send_signal(number)
        assert process.wait(30) == -number
