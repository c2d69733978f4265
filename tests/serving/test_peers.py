"""Names of vLLM, SGLang and llama-server: read as ours, or refused by the name that was sent."""

import json
import re
from pathlib import Path

import pytest
from serving_cases import CHAT, MODEL, post, serving

from dlm_jax.elsewhere import TABLE
from dlm_jax.published import TextTemplate
from dlm_jax.serving.peers import PEERS, table
from dlm_jax.serving.protocol import Chat, Completion, Infill, Responses

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ASKED = {"prompt": "The ", "max_tokens": 10, "seed": 3, "temperature": 1.5}
FORM = {"response_format": {"type": "regex", "regex": "cat|rat"}}
SAME = {
    "guided_regex": ({"guided_regex": "cat|rat"}, FORM),
    "regex": ({"regex": "cat|rat"}, FORM),
    "guided_choice": ({"guided_choice": ["cat", "rat"]}, FORM),
    "structured_outputs": ({"structured_outputs": {"choice": ["cat", "rat"], "json": None}}, FORM),
    "n_predict": ({"n_predict": 4, "max_tokens": None}, {"max_tokens": 4}),
    "both names": ({"n_predict": 4, "max_tokens": 4}, {"max_tokens": 4}),
    "repeat_penalty": ({"repeat_penalty": 1.8}, {"repetition_penalty": 1.8}),
    "repeat_last_n": (
        {"repeat_penalty": 1.8, "repeat_last_n": 2},
        {"repetition_penalty": 1.8, "penalty_last_n": 2},
    ),
    "no_stop_trim": (
        {"no_stop_trim": True, "stop": "a"},
        {"include_stop_str_in_output": True, "stop": "a"},
    ),
    "neutral": (
        {"min_tokens": 0, "stop_token_ids": [], "best_of": 1, "use_beam_search": False,
         "skip_special_tokens": True, "length_penalty": 1.0, "lora": [], "grammar": None},
        {},
    ),
    "not read": ({"cache_prompt": True, "id_slot": 3, "request_id": "x"}, {}),
}  # fmt: skip


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


@pytest.mark.parametrize("schema", [{"enum": ["a", "b"]}, '{"type": "integer"}'])
@pytest.mark.parametrize("name", ["guided_json", "json_schema", "structured_outputs"])
def test_schemas_are_those_of_the_response_format(name, schema):
    value = {"json": schema} if name == "structured_outputs" else schema
    asked = Completion.model_validate({"prompt": "", name: value})
    wanted = json.loads(schema) if isinstance(schema, str) else schema
    assert asked.response_format is not None and asked.response_format.json_schema is not None
    assert asked.response_format.json_schema.schema_ == wanted


def test_a_choice_is_of_the_texts_as_they_are():
    texts = ["The cat.", "A", "a rat", "A. c"]
    asked = Completion.model_validate({"guided_choice": texts})
    assert asked.response_format is not None and asked.response_format.regex is not None
    pattern = asked.response_format.regex
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not re.fullmatch(pattern, "A! c") and not re.fullmatch(pattern, "The cat!")
    assert MODEL.structures.automaton(pattern) is not None


REFUSED = [
    ({"grammar": 'root ::= "x"'}, "grammar", "response_format"),
    ({"min_tokens": 3}, "min_tokens", "ignore_eos"),
    ({"best_of": True}, "best_of", "use n"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "use 0 to"),
    ({"chat_template": "{{ x }}"}, "chat_template", "flag of the server"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": 5}, "guided_json", "is not a schema"),
    ({"guided_json": {"type": "poem"}}, "guided_json", "schema"),
    ({"guided_regex": 5}, "guided_regex", "string"),
    ({"guided_regex": "("}, "guided_regex", ""),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "exactly one of json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"n_predict": -1}, "n_predict", "greater than"),
    ({"n_predict": 5, "max_tokens": 6}, "n_predict", "another name of max_tokens"),
    ({"max_tokens": 6, "n_predict": 5}, "n_predict", "another name of max_tokens"),
    ({"regex": "a", "guided_regex": "b"}, "guided_regex", "another name of response_format"),
    ({"repeat_penalty": -1}, "repeat_penalty", "repeat_penalty=-1"),
]


@pytest.mark.parametrize(("more", "param", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_has_no_counterpart_is_refused_by_the_name_that_was_sent(running, more, param, told):
    given = {k: v for k, v in ASKED.items() if k != "max_tokens"} | more
    response = post(running, "/v1/completions", given)
    error = response.json().get("error", {})
    assert response.status_code == 400, response.text
    assert error["param"] == param and told in error["message"], error


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.read is None])
def test_every_refused_name_is_refused(running, name):
    error = post(running, "/v1/completions", {"prompt": "A", name: "x"}).json()["error"]
    assert error["param"] == name and name in error["message"]


def test_the_table_is_the_one_of_the_page_and_names_only_what_is_there():
    page = Path(__file__).parents[2] / "docs" / "peers.md"
    assert "\n".join(table()) + "\n" in page.read_text(encoding="utf-8")
    settings = MODEL.sample.table.settings
    known = {*settings, *Chat.model_fields, *Completion.model_fields, "chain", "rules", ""}
    for name, peer in PEERS.items():
        assert peer.ours in known or peer.ours.startswith("--"), name
        # A name that is a setting or a field of all end points could never be read as a peer's.
        assert name not in settings, name
        assert not all(name in one.model_fields for one in (Chat, Completion, Infill)), name
        # The advice of the library and that of the server do not contradict each other.
        if name in TABLE and peer.ours in settings:
            assert peer.ours in TABLE[name].names, name


def test_fields_of_requests_are_in_the_page():
    fields = {*Chat.model_fields, *Completion.model_fields, *Responses.model_fields}
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


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ tail }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
TURNS = [{"role": "u", "content": "The cat"}, {"role": "a", "content": " A rat "}]


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, "<u>The cat\n<a>A rat\n<bot>"),
        ({"begins_answer": False}, "<u>The cat\n<a>A rat\n"),
        ({"begins_answer": False, "continues": True}, "<u>The cat\n<a>A rat"),
        ({"tail": "."}, "<u>The cat.\n<a>A rat.\n<bot>"),
    ],
)
def test_a_last_turn_stays_open_where_the_answer_continues_it(options, written):
    template = TextTemplate(TEMPLATE, text_tokenizer=MODEL.tokenizer)
    assert template.text(TURNS, **options) == written


def test_a_turn_keeps_the_space_that_its_template_keeps():
    assert CHAT.text(TURNS, continues=True) == "The cat A rat "
    assert CHAT.text([{"role": "u", "content": " "}], continues=True) == " "
    with pytest.raises(ValueError, match="the last message has no text to continue"):
        CHAT.text([], continues=True)


def test_conversations_are_written_as_the_request_asks(running):
    said = {"messages": [{"role": "u", "content": "The cat"}]}
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    ids = MODEL.tokenizer.encode("The cat").tolist()
    assert post(running, "/tokenize", said | asked).json()["tokens"] == ids
    for path in ("/tokenize", "/v1/chat/completions"):
        for wrong, param in (
            ({"continue_final_message": True, "add_generation_prompt": True},
             "continue_final_message"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"continues": 1}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ):  # fmt: skip
            response = post(running, path, said | wrong)
            assert response.status_code == 400 and response.json()["error"]["param"] == param
    made = post(running, "/v1/chat/completions", said | asked | {"chat_template_kwargs": {"x": 1}})
    assert made.status_code == 200, made.text


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
