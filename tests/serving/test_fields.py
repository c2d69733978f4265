"""Fields of requests: aliases, the page that lists them, stops, ids and conversations."""

from pathlib import Path

import pytest
from serving_cases import MODEL, choices_of, complete, events_of, post, refusal_of

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


def _choices(running, more):
    found = choices_of(post(running, "/v1/completions", ASKED | more))
    return [(one["text"], one["finish_reason"]) for one in found]


@pytest.mark.parametrize("name", SAME)
def test_an_alias_gives_the_text_of_the_field_that_it_stands_for(running, name):
    theirs, ours = SAME[name]
    assert _choices(running, theirs) == _choices(running, ours)


def test_fields_of_requests_are_in_the_page():
    fields = {*Chat.model_fields, *Completion.model_fields, *Infill.model_fields}
    fields -= {"messages", "prompt"}
    assert [name for name in sorted(fields) if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_or_behind_it_if_that_is_asked_for(running, stream):
    plain = {"prompt": "A ", "max_tokens": 20, "seed": 11, "steps": 20, "ignore_eos": True}
    whole = complete(running, plain)
    stop, ids = whole[7:9], MODEL.tokenizer.encode(whole[7]).tolist()
    stops, start = {"stop": [stop, "never"]}, whole.index(stop)
    for more, end in (
        (stops, start),
        (stops | {"include_stop_str_in_output": True}, start + len(stop)),
        ({"stop_token_ids": ids}, whole.index(whole[7])),
    ):
        response = post(running, "/v1/completions", plain | more | {"stream": stream})
        choices = choices_of(response)
        assert "".join(one["text"] for one in choices) == whole[:end]
        assert choices[-1]["finish_reason"] == "stop"
        if more == stops and not stream:
            assert response.json()["usage"]["completion_tokens"] == start + len(stop)


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
    events = events_of(post(running, f"/v1/{path}", asked | {"stream": True}))
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
        assert refusal_of(post(running, path, said | wrong))["param"] == param
    asked |= {"chat_template_kwargs": {"x": 1}, "return_token_ids": True}
    made = post(running, path, said | asked)
    assert made.status_code == 200, made.text
    assert made.json()["prompt_token_ids"] == MODEL.tokenizer.encode("The cat").tolist()
