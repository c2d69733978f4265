"""What is malformed is refused in one line, with the name of its field."""

import pytest
from serving_cases import MODEL, post, refusal_of

SAID = [{"role": "user", "content": "A"}]
SCHEMA = {"schema": {"type": "poem"}}
COMPLETIONS = [
    ("prompt", {"prompt": 5}, ""),
    ("prompt", {"prompt": []}, ""),
    ("prompt", {"prompt": [10**9]}, ""),
    ("prompt", {"prompt": "\u00e9"}, ""),
    ("prompt", {"prompt": "x" * 4000}, ""),
    ("prompt", {"prompt": [MODEL.tokenizer.mask_id]}, "tokens contain MASK"),
    ("max_tokens", {"max_tokens": 4000}, ""),
    ("max_tokens", {"max_tokens": "5"}, ""),
    ("max_tokens", {"prompt": "A r", "max_tokens": 40}, "a prompt of 3 tokens"),
    ("max_tokens", {"n_predict": -1}, "greater than"),
    ("gen_length", {"max_tokens": 5, "gen_length": 6}, ""),
    ("n_predict", {"max_tokens": 6, "n_predict": 6}, "max_tokens is given under two names"),
    ("max_completion_tokens", {"max_completion_tokens": 3}, "is not a field of /v1/completions"),
    ("temperature", {"temperature": -1}, ""),
    ("temperature", {"temperature": [1.0]}, ""),
    ("temprature", {"temprature": 1}, "/v1/completions; did you mean 'temperature'?"),
    ("logit_bias", {"logit_bias": {"3": 10**400}}, ""),
    ("logit_bias", {"logit_bias": {"x": 1}}, ""),
    ("n", {"n": 10**6}, ""),
    ("seed", {"seed": 2**32 - 1, "n": 2}, ""),
    ("stop", {"stop": ""}, ""),
    ("stop", {"stop": ["a"] * 99}, ""),
    ("stop_token_ids", {"stop_token_ids": [300]}, "use 0 to"),
    ("steps", {"steps": 10**6}, ""),
    ("steps", {"steps": 2, "block_length": 4, "max_tokens": 16}, ""),
    ("max_length", {"max_length": 10**6}, ""),
    ("draft", {"draft": "A"}, ""),
    ("suffix", {"suffix": "A", "draft": "A"}, ""),
    ("suffix", {"suffix": "\u00e9"}, ""),
    ("stream", {"stream": "yes"}, ""),
    ("diffusing", {"diffusing": True}, ""),
    ("rules", {"rules": ["x"]}, ""),
    ("host_sampler", {"host_sampler": "x"}, ""),
    ("read_back", {"read_back": 5}, ""),
    ("echo", {"echo": True}, ""),
    ("logprobs", {"logprobs": 21}, ""),
    ("ties", {"ties": "lower"}, "a preset sets it"),
    ("repetition_penalty", {"repeat_penalty": 0}, "repetition_penalty=0 is outside"),
    ("guided_json", {"guided_json": {}}, "is not a field"),
    ("structure", {"guided_regex": 5}, "string"),
    ("structure", {"guided_regex": "["}, "structure='[' cannot be used"),
    (
        "response_format",
        {"response_format": {"type": "regex", "regex": "a"}, "resample": True, "schedule": "all"},
        "requires tokens that do not change",
    ),
]
FORMATS = [
    ("response_format", {"type": "poem"}, {}),
    ("response_format", {"type": "regex"}, {}),
    ("response_format", {"type": "regex", "regex": "("}, {}),
    ("response_format", {"type": "regex", "regex": "[0-9]+"}, {}),
    ("response_format", {"type": "json_schema"}, {}),
    ("response_format", {"type": "json_schema", "json_schema": SCHEMA}, {}),
    ("max_tokens", {"type": "regex", "regex": "a{9}"}, {"max_tokens": 4}),
    ("stop", {"type": "regex", "regex": "a+"}, {"stop": "a"}),
    ("structure", {"type": "regex", "regex": "a+"}, {"structure": "a"}),
    ("steps", {"type": "regex", "regex": "a+"}, {"steps": 2, "max_tokens": 4}),
    ("order", {"type": "regex", "regex": "a+"}, {"order": "threshold"}),
]
CHATS = [
    ("messages", {"messages": []}, ""),
    ("messages", {}, ""),
    ("messages", {"messages": [{"role": "user"}]}, ""),
    ("messages", {"messages": [{"role": "user", "content": "\u00e9"}]}, ""),
    ("messages", {"messages": [{"role": "user", "content": "The " * 9}]}, "prompt of 36 tokens"),
    ("messages", {"messages": [*SAID, {"role": "user", "content": 3}]}, "messages.1.content"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "0.text"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]},
        "0.t",
    ),
    ("messages", {"messages": [{"content": "A"}]}, "messages.0.role"),
    (
        "messages",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
    ),
    ("max_completion_tokens", {"messages": SAID, "max_tokens": 2, "max_completion_tokens": 3}, ""),
    ("top_logprobs", {"messages": SAID, "top_logprobs": 2}, ""),
    ("suffix", {"messages": SAID, "suffix": "."}, "is not a field of /v1/chat/completions"),
]
INFILLS = [
    ("template", {}, ""),
    ("template", {"template": "A <hole:0>"}, ""),
    ("template", {"template": "A \u00e9<hole:2>"}, ""),
    ("stop", {"template": "The <hole:2>", "stop": "a"}, ""),
    ("stop_token_ids", {"template": "The <hole:2>", "stop_token_ids": [3]}, ""),
]
CASES = [
    *(("completions", param, {"prompt": "A"} | body, told) for param, body, told in COMPLETIONS),
    *(("completions", param, {"prompt": "A", "response_format": form} | more, "")
      for param, form, more in FORMATS),
    *(("chat/completions", *case) for case in CHATS),
    *(("infill", *case) for case in INFILLS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "param", "body", "told"), CASES, ids=lambda value: str(value)[:50]
)
def test_what_is_malformed_is_refused_with_the_name_of_its_field(running, path, param, body, told):
    error = refusal_of(post(running, f"/v1/{path}", body))
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert told in error["message"], error


@pytest.mark.parametrize(
    ("path", "content"),
    [("completions", {"prompt": "A"}), ("chat/completions", {"messages": SAID})],
)
def test_an_unknown_model_is_not_found(running, path, content):
    error = refusal_of(post(running, f"/v1/{path}", content | {"model": "other"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
