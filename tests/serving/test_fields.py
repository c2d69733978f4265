"""Fields of requests: aliases, the page that lists them, stops, ids and conversations."""

from pathlib import Path

import pytest
from serving_cases import MODEL, choices_of, complete, post, refusal_of

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
    "gen_length": ({"gen_length": 4, "max_tokens": None}, {"max_tokens": 4}),
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


@pytest.mark.parametrize("wrong", [{"messages": []}, {"continues": 1}, 3])
def test_variables_of_the_template_that_the_server_sets_are_refused(running, wrong):
    asked = {"messages": [{"role": "u", "content": "The cat"}], "chat_template_kwargs": wrong}
    made = post(running, "/v1/chat/completions", asked)
    assert refusal_of(made)["param"] == "chat_template_kwargs"
    made = post(running, "/v1/chat/completions", asked | {"chat_template_kwargs": {"x": 1}})
    assert made.status_code == 200, made.text
