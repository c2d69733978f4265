"""OpenAI's client: each of its arguments is answered or refused by name, each error is its own."""

import dataclasses
import inspect
import json
import logging
import threading

import httpx
import jax
import jax.numpy as jnp
import openai
import pytest
from serving_cases import MODEL, SLOW, choices_of, client_of, post, refusal_of, serving

SAID = [{"role": "user", "content": "A "}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
# What is answered, each with what it needs beside it; all others are refused by their names.
COMPLETION = {
    "model": {"model": "toy"}, "prompt": {"prompt": "The "},
    "frequency_penalty": {"frequency_penalty": 0.5}, "presence_penalty": {"presence_penalty": -0.5},
    "logit_bias": {"logit_bias": {"3": -5}}, "logprobs": {"logprobs": 2},
    "max_tokens": {"max_tokens": 3}, "n": {"n": 2}, "seed": {"seed": 3},
    "stop": {"stop": ["a", "zz"]}, "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "suffix": {"suffix": " a"}, "temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.5},
    "user": {"user": "me"},
}  # fmt: skip
IGNORED = {
    "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
    "safety_identifier": "me",
}  # fmt: skip
CHAT = {name: COMPLETION[name] for name in COMPLETION if name not in
        ("prompt", "suffix", "logprobs")} | {
    "messages": {"messages": SAID}, "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "response_format": {"response_format": {"type": "text"}},
    "tools": {"tools": TOOLS, "tool_choice": "none"},
    "tool_choice": {"tools": TOOLS, "tool_choice": "none"},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
} | {name: {name: value} for name, value in IGNORED.items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_every_argument_of_the_client_is_answered_or_refused_by_its_name(client, kind):
    create = (client.chat.completions if kind == "chat" else client.completions).create
    answered, base = {
        "completions": (COMPLETION, {"model": "toy", "prompt": "A ", "seed": 1}),
        "chat": (CHAT, {"model": "toy", "messages": SAID, "max_tokens": 4, "seed": 1}),
    }[kind]
    names = set(inspect.signature(create).parameters)
    names = {name for name in names if not name.startswith("extra_")} - {"timeout"}
    assert len(names) > 15 and answered.keys() <= names
    for name in sorted(names):
        asked = base | answered.get(name, {name: "x"})
        if name == "max_completion_tokens":
            del asked["max_tokens"]
        if name not in answered:
            with pytest.raises(openai.BadRequestError) as refused:
                create(**asked)
            assert refused.value.param == name, name
            continue
        made = create(**asked)
        if "stream" in asked:
            assert (list(made)[-1].usage is not None) == (name == "stream_options")
        else:
            assert len(made.choices) == asked.get("n", 1)


def test_a_row_that_fails_is_told_and_leaves_others_alone():
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), MODEL.params)
    with (
        serving(dataclasses.replace(MODEL, params=params)) as running,
        client_of(running) as client,
    ):
        for stream in (False, True):
            with pytest.raises(openai.APIError) as told:
                list(client.completions.create(model="toy", prompt="A ", stream=stream))
            assert told.value.code == "non_finite"
        assert client.models.list().data and running.idle()


@pytest.mark.parametrize("drain", [1, 120])
def test_a_stop_takes_nothing_new_lets_rows_finish_and_tells_those_that_do_not(drain):
    asked = SLOW | {"steps": 4000 if drain == 1 else 1000, "n": 2}
    with serving(drain=drain) as running:
        found = {}

        def ask(stream):
            found[stream] = post(running, "/v1/completions", asked | {"stream": stream})

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        while running.engine.report().running < 4:
            pass
        running.server.should_exit = True
        for thread in threads:
            thread.join(120)
        if drain == 1:
            assert refusal_of(found[False], 503)["type"] == "server_error"
            assert '"error"' in found[True].text and "[DONE]" not in found[True].text
        else:
            assert len(choices_of(found[False])) == 2 and "[DONE]" in found[True].text
        with pytest.raises(httpx.TransportError):
            post(running, "/v1/completions", asked)


def test_logs_tell_of_answers_without_their_texts(caplog):
    caplog.set_level(logging.INFO)
    with serving() as running:
        made = post(running, "/v1/completions", {"prompt": "The cat sat", "max_tokens": 4}).json()
        post(running, "/v1/completions", {"prompt": "The cat sat", "temperature": -1})
    told = [vars(record).get("told", {}) for record in caplog.records]
    (done,) = [one for one in told if "completion_tokens" in one]
    assert done["completion_tokens"] == made["usage"]["completion_tokens"]
    assert "The cat sat" not in json.dumps(told) + caplog.text
