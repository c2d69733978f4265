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
        ('{"text": "a"', "is not JSON (Expecting ',' delimiter: line 1 column 13"),
        ("[" * 100_000, "is not JSON"),
        ('["a"]', 'has the fields none; expected {"prompt": ..., "response": ...}, {'),
        ('{"prompt": "a"}', "has the fields prompt; expected"),
        ('{"messages": [], "id": 3}', "; expected"),
        ('{"prompt": "a", "completion": "c"}', "; expected"),
        ('{"prompt": 3, "response": "b"}', ": prompt is not a text; write a string"),
        ('{"text": ""}', ": text is empty; add it or delete the line"),
        ('{"prompt": "a", "response": ""}', ": response is empty; add it"),
        (r'{"text": "a\ud800"}', ": text: the text has a lone surrogate (U+D800)"),
        ('{"messages": "hi"}', "messages is not a list of turns"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant; add it"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "not begin with another role"),
        ('{"messages": ["hi"]}', 'message 1 is not {"role": ..., "content": ...}'),
        (
            '{"messages": [{"role": ["a"], "content": "a"}]}',
            "message 1: role=['a'] is unknown; use one of system,",
        ),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "message 1: content is not a text; write a string",
        ),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "content is empty; add it"),
    ],
)
def test_a_bad_line_is_refused_in_one_line_with_file_and_number(line, message):
    content = '{"text": "good"}\n\n' + line + "\n"
    with pytest.raises(ValueError, match=r"^f\.jsonl line 3") as caught:
        list(read_jsonl("f.jsonl", content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
