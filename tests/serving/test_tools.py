"""Calls of functions: every answer that must call matches its schema, whole and in a stream."""

import dataclasses
import json
import re

import pytest
import serving_cases
import toy_model
from serving_cases import post, refusal_of, serving

from dlm_jax.hf import ChatTemplate
from dlm_jax.serving.protocol import Chat, Options, Planner
from dlm_jax.serving.tools import Calls, pattern_of

TEXT = '{}"name": fgaruets, 0123456789-n\n[]bcdh{}'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.n + 1 }}{% endfor %}{% endfor %}"
)
_TOY = toy_model.of(TEXT)
MODEL = dataclasses.replace(
    _TOY, max_length=64, sample=dataclasses.replace(serving_cases.MODEL.sample, steps=64),
    chat=ChatTemplate(TEMPLATE, _TOY.tokenizer),
)  # fmt: skip
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "a", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "g"}},
]
SAID = [{"role": "user", "content": "ab"}]
OPEN, LINE = (str(int(MODEL.tokenizer.encode(c)[0])) for c in "{\n")


@pytest.fixture(scope="module")
def running():
    with serving(MODEL) as server:
        yield server


def _ask(client, **more):
    asked = {"model": "toy", "messages": SAID, "tools": TOOLS, "max_tokens": 60, "seed": 3}
    return client.chat.completions.create(**asked | more)


def _check(call, names):
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    if call.function.name == "f":
        assert list(arguments) == ["n"] and isinstance(arguments["n"], int)
    else:
        assert arguments == {}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"f", "g"}), ({"type": "function", "function": {"name": "f"}}, {"f"})],
)
def test_an_answer_that_must_call_has_one_call_whole_and_streamed(client, choice, names):
    for seed in (3, 4):
        made = _ask(client, tool_choice=choice, seed=seed).choices[0]
        assert made.finish_reason == "tool_calls" and made.message.content is None
        (call,) = made.message.tool_calls
        _check(call, names)
        seen, arguments, ends = [], "", []
        for event in _ask(client, tool_choice=choice, seed=seed, stream=True):
            (one,) = event.choices
            assert not one.delta.content
            ends += [one.finish_reason] if one.finish_reason else []
            for part in one.delta.tool_calls or ():
                assert part.index == 0
                seen += [part.function.name] if part.id else []
                arguments += part.function.arguments
        assert seen == [call.function.name] and arguments == call.function.arguments
        assert ends == ["tool_calls"]


def test_several_calls_are_whole_and_streamed_where_they_are_allowed(client):
    asked = {"tools": TOOLS[1:], "tool_choice": "required", "logit_bias": {LINE: 100}}
    (alone,) = _ask(client, **asked).choices[0].message.tool_calls
    asked["parallel_tool_calls"] = True
    made = _ask(client, **asked).choices[0]
    calls = made.message.tool_calls
    assert (
        made.finish_reason == "tool_calls" and len(calls) == 2 and len({c.id for c in calls}) == 2
    )
    for call in (alone, *calls):
        _check(call, {"g"})
    streamed = {}
    for event in _ask(client, stream=True, **asked):
        for part in event.choices[0].delta.tool_calls or ():
            name, arguments = streamed.get(part.index, ("", ""))
            name = part.function.name if part.id else name
            streamed[part.index] = (name, arguments + part.function.arguments)
    want = [(call.function.name, call.function.arguments) for call in calls]
    assert [streamed[index] for index in range(2)] == want


def test_auto_is_a_call_or_a_text_as_the_model_has_it_and_none_is_a_text(client):
    called = _ask(client, logit_bias={OPEN: 100}).choices[0]
    assert called.finish_reason == "tool_calls" and len(called.message.tool_calls) == 1
    for more in ({"logit_bias": {OPEN: -100}}, {"tool_choice": "none"}):
        talked = _ask(client, **more).choices[0]
        assert talked.message.tool_calls is None and talked.message.content
        assert talked.finish_reason in ("stop", "length")
    streamed = _ask(client, logit_bias={OPEN: -100}, stream=True)
    told = "".join(event.choices[0].delta.content or "" for event in streamed)
    assert told == _ask(client, logit_bias={OPEN: -100}).choices[0].message.content


def test_calls_and_results_of_the_history_reach_the_template():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 4}'}}
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "cd"}]  # fmt: skip
    asked = Chat.model_validate({"messages": said, "tools": TOOLS, "max_tokens": 16})
    (request,) = Planner(MODEL, Options("toy")).answer(asked).requests
    given = request.tokens[request.tokens != MODEL.tokenizer.mask_id]
    assert MODEL.tokenizer.decode(given) == "fgab5cd"


REFUSED = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"type": "nothing"}}}}}]}, "tools"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structure": "a"}, "structure"),
    ({"stop": ["a"]}, "stop"),
    ({"tool_choice": "required", "max_tokens": 8}, "max_tokens"),
    ({"messages": [{"role": "assistant"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_bad_tools_are_refused_by_their_field(running, more, param):
    asked = {"messages": SAID, "tools": TOOLS, "max_tokens": 60}
    assert refusal_of(post(running, "/v1/chat/completions", asked | more))["param"] == param


def test_a_call_that_ends_too_early_is_a_text():
    made = Calls()
    assert made.grown('{"name": "f", ') == ("", [])
    assert made.grown('"arguments": {', is_last=True) == ('{"name": "f", "arguments": {', [])


CALLS = '{"name": "f", "arguments":{"a": "}{\\"", "b": [{}]}}\n{"name":"g", "arguments": {}}'


def test_a_text_in_any_pieces_has_the_same_calls():
    def parsed(cuts):
        made, told = Calls(), {}
        ends = [0, *cuts, len(CALLS)]
        for first, last in zip(ends, ends[1:], strict=False):
            text, parts = made.grown(CALLS[first:last])
            assert text == ""
            told |= {part["index"]: part["function"] for part in parts}
        assert [one["function"] for one in made.whole] == list(told.values())
        return list(told.values())

    want = [
        {"name": "f", "arguments": '{"a": "}{\\"", "b": [{}]}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert parsed([]) == want == parsed(range(1, len(CALLS)))
    for cut in range(1, len(CALLS)):
        assert parsed([cut]) == want


@pytest.mark.parametrize(
    "text",
    [' {"name": "h", "arguments": {"a": 1}}', "\n{ab", " ", '}\n{"name": "f", "arguments": {}}'],
)
def test_a_text_with_a_brace_behind_its_first_character_is_no_call(text):
    pattern = pattern_of({"f": NUMBER}, is_parallel=False, may_talk=True)
    assert re.fullmatch(pattern, text)
    for cut in range(len(text) + 1):
        made = Calls()
        pieces = [made.grown(text[:cut]), made.grown(text[cut:], is_last=True)]
        assert "".join(told for told, _ in pieces) == text
        assert not made.whole and not any(parts for _, parts in pieces)


def test_the_pattern_has_calls_of_the_functions_alone_and_texts_where_they_may_be():
    functions = {"f": NUMBER, "g-1": None}
    one, two = '{"name": "f", "arguments": {"n": 3}}', '{"name":"g-1","arguments":{}}'
    strict = pattern_of(functions, is_parallel=False, may_talk=False)
    several = pattern_of(functions, is_parallel=True, may_talk=True)
    for text in (one, two):
        assert re.fullmatch(strict, text) and re.fullmatch(several, text)
    for text in (f"{one}\n{two}", "a text\nof lines", ""):
        assert not re.fullmatch(strict, text) and re.fullmatch(several, text)
    for text in (one.replace("f", "h"), one.replace("3", '"3"'), two[:-1], f"{one}\n"):
        assert not re.fullmatch(strict, text) and not re.fullmatch(several, text)
