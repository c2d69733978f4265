"""What clients and browsers send by habit: echoed messages, cross-site requests, odd JSON."""

import httpx
import pytest
from serving_cases import MODEL, client_of, post, serving
from starlette.testclient import TestClient

from dlm_jax.inference.engine import AsyncEngine, Engine
from dlm_jax.serving.app import make_app
from dlm_jax.serving.protocol import Options

SAID = [{"role": "user", "content": "The "}]


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


def test_a_gap_may_be_at_the_end_of_its_text(running):
    asked = {"max_tokens": 4, "seed": 1, "steps": 4}
    plain = post(running, "/v1/completions", asked | {"prompt": "The "}).json()["choices"][0]
    for more in ({}, {"suffix": ""}):
        made = post(running, "/v1/infill", asked | {"prefix": "The "} | more)
        assert made.status_code == 200, made.text
        (choice,) = made.json()["choices"]
        assert choice["infills"] == [plain["text"]]
        assert choice["text"] == "The " + plain["text"]
    made = post(running, "/v1/completions", asked | {"prompt": "The ", "suffix": ""})
    assert made.json()["choices"][0]["text"] == plain["text"]


def test_a_client_may_send_back_the_message_that_it_received(running):
    with client_of(running) as client:
        asked = {"model": "toy", "max_tokens": 3, "seed": 1}
        made = client.chat.completions.create(messages=SAID, **asked)
        turn = made.choices[0].message.model_dump()
        assert {"refusal", "audio", "function_call"} <= set(turn)
        again = client.chat.completions.create(messages=[*SAID, turn, *SAID], **asked)
        assert again.choices[0].finish_reason


def test_what_a_server_need_not_read_changes_nothing(running):
    asked = {"messages": SAID, "max_tokens": 4, "seed": 1, "stream": True}
    turn = {"reasoning_content": "hm", "cache_control": {"type": "ephemeral"}, "refusal": None,
            "audio": None, "function_call": None, "annotations": [], "unknown": None}  # fmt: skip
    part = {"type": "text", "text": "The ", "cache_control": {"type": "ephemeral"}}
    more = {
        "messages": [{"role": "user", "content": [part]} | turn], "store": True,
        "metadata": {"a": "b"}, "service_tier": "auto",
        "stream_options": {"include_usage": False, "include_obfuscation": False},
    }  # fmt: skip

    def text(body):
        made = post(running, "/v1/chat/completions", body)
        assert made.status_code == 200, made.text
        return [line.partition('"delta"')[2] for line in made.text.splitlines()]

    assert text(asked | more) == text(asked)


@pytest.mark.parametrize(
    ("messages", "key"),
    [
        ([*SAID, {"role": "user", "content": 3}], "messages.1.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}], "0.t"),
        ([{"content": "A"}], "messages.0.role"),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
         "messages.0.tool_calls.0.function.arguments"),
    ],
)  # fmt: skip
def test_an_error_names_the_whole_path_of_a_key(running, messages, key):
    made = post(running, "/v1/chat/completions", {"messages": messages})
    error = made.json()["error"]
    assert made.status_code == 400 and error["param"] == "messages"
    assert key in error["message"] and "\n" not in error["message"], error


@pytest.mark.parametrize(
    ("path", "content"),
    [("/v1/completions", {"prompt": "A"}), ("/v1/chat/completions", {"messages": SAID})],
)
def test_an_unknown_model_is_not_found(running, path, content):
    made = post(running, path, content | {"model": "other"})
    error = made.json()["error"]
    assert made.status_code == 404 and error["code"] == "model_not_found"
    assert error["param"] == "model"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_bodies_that_any_page_may_send_without_a_preflight_are_refused(running, kind):
    headers = {} if kind is None else {"content-type": kind}
    made = httpx.post(
        f"{running.url}/v1/completions", headers=headers, content=b'{"prompt": "A"}', timeout=60
    )
    assert made.status_code == 415 and made.json()["error"]["code"] == "unsupported_media_type"
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "A", "max_tokens": 1}'
    made = httpx.post(f"{running.url}/v1/completions", headers=headers, content=body, timeout=60)
    assert made.status_code == 200


def _app(**options):
    return make_app(AsyncEngine(Engine(MODEL, sizes=(4,))), Options("toy", **options))


def test_a_host_of_another_name_is_refused():
    hosts = ("127.0.0.1", "[::1]", "localhost")
    client = TestClient(_app(hosts=hosts))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        made = client.get("/v1/models", headers={"host": host})
        assert made.status_code == 403 and made.json()["error"]["code"] == "wrong_host"
    assert TestClient(_app()).get("/v1/models", headers={"host": "any"}).status_code == 200


@pytest.mark.parametrize("allowed", ["https://a.example", "*"])
def test_pages_of_allowed_origins_may_read_answers_after_a_preflight(allowed):
    client = TestClient(_app(origins=(allowed,), key="secret"))
    ask = {"origin": "https://a.example", "access-control-request-method": "POST",
           "access-control-request-headers": "content-type,authorization"}  # fmt: skip
    told = client.options("/v1/completions", headers=ask)
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] in ("https://a.example", "*")
    assert "authorization" in told.headers["access-control-allow-headers"].lower()
    answer = client.get("/v1/models", headers={"origin": "https://a.example"})
    assert answer.status_code == 401  # the page may read why
    assert answer.headers["access-control-allow-origin"] in ("https://a.example", "*")
    other = client.options("/v1/completions", headers=ask | {"origin": "https://b.example"})
    assert ("access-control-allow-origin" in other.headers) == (allowed == "*")
    plain = TestClient(_app()).options("/v1/completions", headers=ask)
    assert plain.status_code == 405 and "access-control-allow-origin" not in plain.headers
