"""Laws of JSON lines: what a line may be, and how a bad one is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.data.text import read_jsonl

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
LINES = st.one_of(
    st.fixed_dictionaries({"text": TEXTS}),
    st.fixed_dictionaries({"prompt": TEXTS | st.just(""), "response": TEXTS}),
)


@given(st.lists(LINES, max_size=5), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]))
@settings(deadline=None)
def test_lines_come_back_as_written_in_their_order(lines, is_ascii, line_end):
    content = "".join(json.dumps(line, ensure_ascii=is_ascii) + line_end for line in lines)
    read = list(read_jsonl("f", content))
    assert [line.text for line in read] == [x.get("text") or x["response"] for x in lines]
    assert [line.prompt for line in read] == [x.get("prompt") for x in lines]
    step = line_end.count("\n")
    assert [line.name for line in read] == [f"f line {1 + i * step}" for i in range(len(lines))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"is not JSON: Expecting ',' delimiter at column 13; write one object"),
        ("text", "is not JSON: Expecting value at column 1"),
        ('{"text": "a"} {"text": "b"}', "is not JSON: Extra data at column 15"),
        ("[" * 100_000, "is not readable JSON"),
        ("9" * 10_000, "is not readable JSON"),
        ('["a"]', 'is a list, not an object; write {"prompt": ..., "response": ...} or'),
        ("null", "is null, not an object"),
        ("{}", "has the fields none; expected"),
        ('{"prompt": "a"}', "has the fields prompt; expected"),
        ('{"response": "a"}', "has the fields response; expected"),
        ('{"instruction": "a", "input": "b"}', "has the fields instruction, input; expected"),
        (
            '{"prompt": "a", "response": "b", "text": "c"}',
            "fields prompt, response, text; expected",
        ),
        ('{"prompt": 3, "response": "b"}', ": prompt is a number; write a string"),
        ('{"prompt": "a", "response": null}', ": response is null; write a string"),
        ('{"text": true}', ": text is true; write a string"),
        ('{"text": ["a"]}', ": text is a list; write a string"),
        ('{"prompt": "a", "response": ""}', ": response is empty; add it or delete the line"),
        ('{"text": ""}', ": text is empty; add it or delete the line"),
        ('{"messages": "hi"}', "messages is a string; write a list"),
        ('{"messages": []}', "no message of the assistant; add it"),
        ('{"messages": ["hi"]}', 'message 1 is a string, not an object; write {"role"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant; add it"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "begins with the assistant; put"),
        (
            '{"messages": [{"from": "user", "value": "a"}]}',
            'message 1 has the fields from, value; expected {"role": ..., "content": ...}',
        ),
        (
            '{"messages": [{"role": "gpt", "content": "a"}]}',
            "message 1: role='gpt' is unknown; use one of system,",
        ),
        ('{"messages": [{"role": ["a"], "content": "a"}]}', "message 1: role=['a'] is unknown"),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "message 1: content is a list; write a string",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "as'
            'sistant", "content": ""}]}',
            "message 2: content is empty; add it",
        ),
        ('{"messages": [], "id": 3}', "has the fields messages, id; expected"),
        ('{"conversations": []}', "has the fields conversations; expected"),
        ('{"prompt": "a", "completion": ""}', "completion is empty; add it"),
        (
            '{"prompt": "a", "input": "b", "completion": "c"}',
            "fields prompt, input, completion; exp",
        ),
        (r'{"text": "a\ud800"}', ": text: the text has a lone surrogate (U+D800)"),
    ],
)
def test_a_bad_line_is_refused_in_one_line_with_file_and_number(line, message):
    content = '{"text": "good"}\n\n' + line + "\n"
    with pytest.raises(ValueError, match=r"^f\.jsonl line 3") as caught:
        list(read_jsonl("f.jsonl", content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
