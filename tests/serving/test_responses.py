"""/v1/responses by the openai package, whole and in events, and what a server tells of itself."""

import dataclasses
import inspect

import httpx
import openai
import pytest
from serving_cases import EOS, MODEL, SLOTS, client_of, post, serving

import dlm_jax

SETTINGS = {"seed": 3, "steps": 8, "block_length": 2}
ASKED = {"model": "toy", "input": "The ", "max_output_tokens": 8, "extra_body": SETTINGS}


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with client_of(running) as made:
        yield made


def _chat(client, messages):
    asked = {"model": "toy", "messages": messages, "max_tokens": 8, "extra_body": SETTINGS}
    return client.chat.completions.create(**asked)


def test_a_response_is_the_answer_of_a_chat(client):
    made = client.responses.create(**ASKED, metadata={"a": "b"})
    chat = _chat(client, [{"role": "user", "content": "The "}])
    assert made.output_text == chat.choices[0].message.content != ""
    assert made.usage.input_tokens == chat.usage.prompt_tokens == 4
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert made.object == "response" and made.model == "toy" and made.metadata == {"a": "b"}
    assert made.output[0].id.startswith("msg-") and made.id.startswith("resp-")


def test_turns_and_instructions_are_a_conversation_and_answers_may_be_among_them(client):
    first = client.responses.create(**ASKED)
    turns = [{"role": "user", "content": "The "}, *first.output,
             {"role": "user", "content": [{"type": "input_text", "text": "sat."}]}]  # fmt: skip
    asked = ASKED | {"input": turns, "instructions": "A rat. ", "max_output_tokens": 4}
    made = client.responses.create(**asked)
    said = [{"role": "system", "content": "A rat. "}, {"role": "user", "content": "The "},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "sat."}]  # fmt: skip
    chat = client.chat.completions.create(
        model="toy", messages=said, max_tokens=4, extra_body=SETTINGS
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stream_has_the_events_of_the_client_and_the_whole_response_at_last(client):
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)
        last = stream.get_final_response() if whole.status == "completed" else events[-1].response
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 1
    assert last.output_text == whole.output_text and last.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", f"response.{whole.status}"]  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "status"), [({str(EOS): 1e6}, "completed"), ({str(EOS): -1e6}, "incomplete")]
)
def test_a_text_that_fills_its_canvas_is_incomplete(client, bias, status):
    asked = ASKED | {"extra_body": SETTINGS | {"logit_bias": bias}}
    made = client.responses.create(**asked)
    assert made.status == status
    assert (made.incomplete_details is None) == (status == "completed")
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == f"response.{status}" and last.response.status == status


def test_the_wire_names_each_event_and_has_no_done(running):
    body = {"input": "A ", "max_output_tokens": 2, "stream": True}
    lines = post(running, "/v1/responses", body).text.splitlines()
    assert lines[0] == "event: response.created" and lines[1].startswith("data: {")
    assert not [line for line in lines if "[DONE]" in line]


def test_a_model_without_a_chat_template_continues_a_text():
    with serving(dataclasses.replace(MODEL, chat=None)) as running:
        asked = {"max_tokens": 6, "seed": 1, "steps": 6}
        made = post(running, "/v1/responses", asked | {"input": "The "}).json()
        same = post(running, "/v1/completions", asked | {"prompt": "The "}).json()
        assert made["output"][0]["content"][0]["text"] == same["choices"][0]["text"]
        for more in ({"instructions": "x"}, {"input": [{"role": "user", "content": "A"}]}):
            error = post(running, "/v1/responses", {"input": "A "} | more).json()["error"]
            assert error["param"] == "input" and "chat template" in error["message"]


ANSWERED = {
    "input": "A ", "instructions": "A ", "max_output_tokens": 3, "metadata": {"a": "b"},
    "model": "toy", "store": False, "background": False, "stream": True, "temperature": 0.5,
    "top_p": 0.5, "truncation": "disabled", "user": "me",
    "text": {"format": {"type": "text"}}, "stream_options": None, "service_tier": "auto",
    "prompt_cache_key": "k", "safety_identifier": "me",
}  # fmt: skip


def test_every_argument_of_the_client_is_answered_or_refused_by_its_name(client):
    names = set(inspect.signature(client.responses.create).parameters)
    names = {name for name in names if not name.startswith("extra_")} - {"timeout"}
    assert len(names) > 20 and ANSWERED.keys() <= names
    for name in sorted(names):
        asked = {"model": "toy", "input": "A ", "max_output_tokens": 2}
        if name in ANSWERED:
            client.responses.create(**asked | {name: ANSWERED[name]})
            continue
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**asked, **{name: "x"})
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "The " * 40}, "input"),
        ({"input": "\u00e9"}, "input"),
        ({"store": True}, "store"),
        ({"n": 2}, "n"),
        ({"diffusing": True, "stream": True}, "diffusing"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"max_output_tokens": 2, "max_tokens": 3}, "max_output_tokens"),
        ({"text": {"format": {"type": "poem"}}}, "text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}}, "text"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_with_the_name_of_its_field(running, more, param):
    response = post(running, "/v1/responses", {"input": "A "} | more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_response_has_the_format_that_is_asked_for(client):
    form = {"type": "regex", "regex": "(cat|rat)( sat)?"}
    made = client.responses.create(
        model="toy", input="The ", max_output_tokens=10, text={"format": form},
        extra_body={"temperature": 1.5, "seed": 1},
    )  # fmt: skip
    assert made.output_text in ("cat", "rat", "cat sat", "rat sat") and made.status == "completed"
    assert made.text.format.type == "regex"


def test_ids_become_the_text_that_they_were(running):
    ids = post(running, "/tokenize", {"prompt": "The cat"}).json()["tokens"]
    assert post(running, "/detokenize", {"tokens": ids}).json() == {"prompt": "The cat"}
    for wrong in ([10**9], [-1], "x", None, [10**30]):
        error = post(running, "/detokenize", {"tokens": wrong}).json()["error"]
        assert error["param"] == "tokens"


def test_a_server_tells_what_it_is(running):
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{running.url}/ping").json()["status"] == "ok"
    assert httpx.get(f"{running.url}/version").json() == {"version": dlm_jax.__version__}
    props = httpx.get(f"{running.url}/props").json()
    assert props["model"] == "toy" and props["total_slots"] == SLOTS
    assert props["max_model_len"] == MODEL.max_length
    usual = props["default_generation_settings"]
    assert (usual["steps"], usual["order"]) == (MODEL.sample.steps, "left_to_right")
    assert set(usual) == set(MODEL.sample.table.request_settings)
    assert props["chat_template"] == MODEL.chat.source
