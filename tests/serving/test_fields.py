"""Fields of requests: aliases, the page that lists them, stops, ids and conversations."""

import json
from pathlib import Path

import pytest
from serving_cases import MODEL, post, serving

from dlm_jax.serving.protocol import Chat, Completion, Infill

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ASKED = {"prompt": "The ", "max_tokens": 10, "seed": 3, "temperature": 1.5}
SAME = {
    "guided_regex": ({"guided_regex": "cat|rat"}, {"structure": "cat|rat"}),
    "n_predict": ({"n_predict": 4, "max_tokens": None}, {"max_tokens": 4}),
    "repeat_penalty": (
        {"repeat_penalty": 1.8, "repeat_last_n": 2},
        {"repetition_penalty": 1.8, "penalty_last_n": 2},
    ),
    "ignored": ({"metadata": {"a": "b"}, "store": False, "repeat_penalty": None}, {}),
}


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


def _choices(running, more):
    found = post(running, "/v1/completions", ASKED | more)
    assert found.status_code == 200, found.text
    return [(one["text"], one["finish_reason"]) for one in found.json()["choices"]]


@pytest.mark.parametrize("name", SAME)
def test_an_alias_gives_the_text_of_the_field_that_it_stands_for(running, name):
    theirs, ours = SAME[name]
    assert _choices(running, theirs) == _choices(running, ours)


REFUSED = [
    ({"guided_json": {}}, "guided_json", "is not a field"),
    ({"guided_regex": 5}, "structure", "string"),
    ({"n_predict": -1}, "max_tokens", "greater than"),
    ({"max_tokens": 6, "n_predict": 6}, "n_predict", "max_tokens is given under two names"),
    ({"ties": "lower"}, "ties", "a preset sets it"),
    ({"repeat_penalty": -1}, "repetition_penalty", "repetition_penalty=-1"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "use 0 to"),
]


@pytest.mark.parametrize(("more", "param", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_that_cannot_be_read_is_refused_by_name(running, more, param, told):
    given = {k: v for k, v in ASKED.items() if k != "max_tokens"} | more
    response = post(running, "/v1/completions", given)
    error = response.json().get("error", {})
    assert response.status_code == 400, response.text
    assert error["param"] == param and told in error["message"], error


def test_fields_of_requests_are_in_the_page():
    fields = {*Chat.model_fields, *Completion.model_fields, *Infill.model_fields}
    fields -= {"messages", "prompt"}
    assert [name for name in sorted(fields) if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_is_kept_where_that_is_asked_for(running, stream):
    plain = {"prompt": "A ", "max_tokens": 20, "seed": 11, "steps": 20, "ignore_eos": True}
    whole = post(running, "/v1/completions", plain).json()["choices"][0]["text"]
    stop = whole[7:9]
    asked = plain | {"stop": [stop, "never"], "include_stop_str_in_output": True, "stream": stream}
    answer = post(running, "/v1/completions", asked)
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    choices = [event["choices"][0] for event in events] if stream else answer.json()["choices"]
    assert "".join(one["text"] for one in choices) == whole[: whole.index(stop) + len(stop)]
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_token_ids_are_those_of_the_prompt_and_of_the_text(running, path):
    is_chat = path.startswith("chat")
    asked = {"max_tokens": 6, "seed": 2, "steps": 6, "block_length": 2, "return_token_ids": True}
    asked |= {"messages": [{"role": "user", "content": "The "}]} if is_chat else {"prompt": "The "}
    whole = post(running, f"/v1/{path}", asked).json()
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    given = (whole if is_chat else choice)["prompt_token_ids"]
    assert given == MODEL.tokenizer.encode("The ").tolist()
    assert MODEL.tokenizer.decode(choice["token_ids"]) == text
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    lines = post(running, f"/v1/{path}", asked | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ids = [event["choices"][0].get("token_ids", []) for event in events]
    assert sum(ids, []) == choice["token_ids"] and max(map(len, ids)) < 6
    holders = [event if is_chat else event["choices"][0] for event in events]
    assert [one.get("prompt_token_ids") for one in holders] == [given] + [None] * (len(events) - 1)
    del asked["return_token_ids"]
    assert "token_ids" not in post(running, f"/v1/{path}", asked).text


def test_conversations_are_written_as_the_request_asks(running):
    said = {"messages": [{"role": "u", "content": "The cat"}]}
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    path = "/v1/chat/completions"
    for wrong, param in (
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continues": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ):  # fmt: skip
        response = post(running, path, said | wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    asked |= {"chat_template_kwargs": {"x": 1}, "return_token_ids": True}
    made = post(running, path, said | asked)
    assert made.status_code == 200, made.text
    assert made.json()["prompt_token_ids"] == MODEL.tokenizer.encode("The cat").tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_a_stop_id(running, stream):
    plain = {"prompt": "A ", "max_tokens": 20, "seed": 11, "steps": 20, "ignore_eos": True}
    whole = post(running, "/v1/completions", plain).json()["choices"][0]["text"]
    ids = MODEL.tokenizer.encode(whole[7]).tolist()
    answer = post(running, "/v1/completions", plain | {"stop_token_ids": ids, "stream": stream})
    lines = [one for one in answer.text.splitlines() if one.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    choices = choices if stream else answer.json()["choices"]
    assert "".join(one["text"] for one in choices) == whole[: whole.index(whole[7])]
    assert choices[-1]["finish_reason"] == "stop"
