"""What clients and browsers send by habit: echoed messages, cross-site requests, odd JSON."""

import httpx
import pytest
from serving_cases import MODEL, choices_of, complete, post, refusal_of
from starlette.testclient import TestClient

from dlm_jax.inference.engine import AsyncEngine, Engine
from dlm_jax.serving.app import make_app
from dlm_jax.serving.protocol import Options

SAID = [{"role": "user", "content": "The "}]


def test_a_gap_may_be_at_the_end_of_its_text(running):
    asked = {"max_tokens": 4, "seed": 1, "steps": 4}
    plain = complete(running, asked | {"prompt": "The "})
    (choice,) = choices_of(post(running, "/v1/infill", asked | {"template": "The <hole:4>"}))
    assert choice["infills"] == [plain] and choice["text"] == f"The {plain}"
    assert complete(running, asked | {"prompt": "The ", "suffix": ""}) == plain


def test_a_client_may_send_back_the_message_that_it_received(client):
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

    one, other = (
        choices_of(post(running, "/v1/chat/completions", body)) for body in (asked | more, asked)
    )
    assert one == other


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_bodies_that_any_page_may_send_without_a_preflight_are_refused(running, kind):
    headers = {} if kind is None else {"content-type": kind}
    made = httpx.post(
        f"{running.url}/v1/completions", headers=headers, content=b'{"prompt": "A"}', timeout=60
    )
    assert refusal_of(made, 415)["code"] == "unsupported_media_type"
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
        assert client.get("/v1/models", headers={"host": host}).status_code == 400, host
    assert TestClient(_app()).get("/v1/models", headers={"host": "any"}).status_code == 200
