"""Laws of files of requests: every line is read or named, and no bad one stops the rest."""

from __future__ import annotations

import io
import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.batch import Line, RequestFile, fingerprint, request_file, share
from dlm_jax.batch.request_file import KeyTable

KNOWN = ("temperature", "top_k", "logit_bias")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = TEXTS.filter(lambda text: not text.startswith("line ")) | st.integers(-(2**70), 2**70)
CONTENTS = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"prompt": TEXTS}),
    st.fixed_dictionaries({"template": TEXTS, "draft": TEXTS}),
    st.fixed_dictionaries({"tokens": st.lists(st.integers(-5, 99), max_size=3)}),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "steps": st.integers(),
        "temperature": st.floats(allow_nan=False) | TEXTS,
        "logit_bias": st.dictionaries(TEXTS, st.floats(0, 1), max_size=2),
    },
)
REQUESTS = st.lists(st.tuples(CONTENTS, SETTINGS).map(lambda pair: pair[0] | pair[1]), max_size=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("requests") / "in.jsonl"


def read(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return list(RequestFile(path, known=KNOWN))


@given(
    REQUESTS,
    st.lists(IDS, min_size=5, max_size=5, unique=True),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n \t\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
@settings(deadline=None, max_examples=30)
def test_requests_come_back_as_written_in_their_order(path, requests, ids, is_ascii, end, mark):
    content = "".join(
        json.dumps({"id": id_} | request, ensure_ascii=is_ascii) + end
        for id_, request in zip(ids, requests, strict=False)
    )
    lines = read(path, mark + content.encode())
    step = end.count("\n")
    assert lines == [
        Line(1 + i * step, id_, request)
        for i, (id_, request) in enumerate(zip(ids, requests, strict=False))
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "is not JSON: Expecting ',' delimiter at column 15; write one object"),
        ("{'prompt': 'a'}", "is not JSON: Expecting property name enclosed in double quotes at"),
        ('{"seed": 1} {"seed": 2}', "is not JSON: Extra data at column 13; write one object per"),
        ("[" * 100_000, "is not readable JSON"),
        ("9" * 10_000, "is not readable JSON (Exceeds the limit"),
        ('{"seed": 1, "seed": 2}', 'readable JSON ("seed" is given twice); correct it'),
        ('["a"]', ': [...] is not an object; write {"prompt": ...}'),
        ('"a"', ': "a" is not an object; write {"prompt": ...}'),
        ("null", ": null is not an object"),
        (b'{"prompt": "\xe4"}', "is not UTF-8: byte 0xe4 at column 13 (in bytes); save the file"),
        ('{"id": 1.5}', ": id=1.5 must be a string or an integer"),
        ('{"id": true}', ": id=true must be a string or an integer"),
        ('{"id": null}', ": id=null must be a string or an integer"),
        ('{"id": [1]}', ": id=[...] must be a string or an integer"),
        (r'{"id": "\udc00"}', ": id has a lone surrogate (U+DC00) at position 0, which is not"),
        ('{"id": "line 7"}', ': id="line 7" is reserved for that line; use another id'),
        ('{"id": "first"}', ': id="first" is already used by line 1; use unique ids'),
    ],
)
def test_a_line_without_a_usable_id_gets_the_id_of_its_number_and_the_reason(path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    content = b'{"id": "first"}\n\n' + line + b'\n{"id": 4, "prompt": "b"}'
    first, bad, last = read(path, content)
    assert (first, last) == (Line(1, "first", {}), Line(4, 4, {"prompt": "b"}))
    assert (bad.number, bad.id, bad.settings) == (3, "line 3", {})
    assert bad.error is not None and bad.error.startswith("in.jsonl line 3")
    assert message in bad.error
    assert "\n" not in bad.error and len(bad.error) < 300


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": "a", "template": "b"}, " has prompt and template; keep one of them"),
        ({"tokens": [], "prompt": "", "template": ""}, " has prompt and template and tokens; keep"),
        ({"prompt": 3}, ": prompt=3 is not a string; write it in quotes"),
        ({"prompt": None}, ": prompt=null is not a string"),
        ({"template": ["a"]}, ": template=[...] is not a string"),
        ({"draft": {}}, ": draft={...} is not a string"),
        ({"prompt": "ab\ud800"}, ": prompt has a lone surrogate (U+D800) at position 2, which"),
        ({"template": "\ud800"}, ": template has a lone surrogate"),
        ({"draft": "\ud800"}, ": draft has a lone surrogate"),
        ({"tokens": "1 2"}, ': tokens="1 2" is not a list; for example, write [1, 2, 3]'),
        ({"tokens": [1, 2.0]}, ": tokens[1]=2.0 is not an integer; write one without quotes"),
        ({"tokens": [True]}, ": tokens[0]=true is not an integer"),
        ({"seed": "7"}, ': seed="7" is not an integer; write one without quotes, such as 7'),
        ({"seed": True}, ": seed=true is not an integer"),
        ({"steps": 8.0}, ": steps=8.0 is not an integer"),
        ({"gen_length": None}, ": gen_length=null is not an integer"),
        ({"max_length": [4]}, ": max_length=[...] is not an integer"),
        ({"seed": "7" * 500}, "7... is not an integer"),
        ({"temprature": 1}, ": 'temprature' is not a setting; did you mean 'temperature'?"),
        ({"promt": "a"}, ": 'promt' is not a setting; did you mean 'prompt'?"),
        ({"x": "a"}, ": 'x' is not a setting; use one of id, prompt, template, tokens, draft,"),
        ({"x\ud800\n" * 500: "a"}, "is not a setting; use one of"),
    ],
)
def test_a_bad_setting_is_told_under_the_id_of_its_request(path, request_, message):
    content = "{}\n" + json.dumps({"id": "mine"} | request_) + "\n{}"
    first, bad, last = read(path, content)
    assert (first, last) == (Line(1, "line 1", {}), Line(3, "line 3", {}))
    assert (bad.number, bad.id, bad.settings) == (2, "mine", {})
    assert bad.error is not None and bad.error.startswith("in.jsonl line 2")
    assert message in bad.error
    assert "\n" not in bad.error and len(bad.error) < 600
    bad.error.encode("utf-8")


RAW_IDS = st.sampled_from(["a", "b", "line 1", "line 2", "line 3", "line 03", 1, "1", 0, True, 1.0])
RAW_LINES = st.one_of(
    st.binary(max_size=8).map(lambda raw: raw.replace(b"\n", b" ")),
    RAW_IDS.map(lambda id_: json.dumps({"id": id_}).encode()),
    RAW_IDS.map(lambda id_: json.dumps({"id": id_, "bad": 1}).encode()),
    st.just(b"{}"),
)


@given(st.lists(RAW_LINES, max_size=8))
@settings(deadline=None, max_examples=60)
def test_whatever_a_file_holds_each_line_that_is_not_blank_has_an_id_of_its_own(path, raws):
    lines = read(path, b"\n".join(raws))
    raws[:1] = [raws[0].removeprefix(b"\xef\xbb\xbf")] if raws else []
    numbers = [i for i, raw in enumerate(raws, 1) if raw.strip()]
    assert [line.number for line in lines] == numbers
    ids = [json.dumps(line.id) for line in lines]
    assert len(set(ids)) == len(ids)


def test_the_error_of_a_repeated_id_names_both_lines_also_where_the_first_was_bad(path):
    first, second = read(path, '{"id": 5, "steps": "x"}\n{"id": 5}')
    assert (first.id, second.id) == (5, "line 2")
    assert second.error == "in.jsonl line 2: id=5 is already used by line 1; use unique ids"


def test_a_line_may_be_named_after_its_own_number(path):
    assert read(path, '{"id": "line 1"}\n{}') == [Line(1, "line 1", {}), Line(2, "line 2", {})]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_a_file_of_blank_lines_has_no_requests(path, content):
    assert read(path, content) == []


def test_a_missing_file_and_a_folder_are_refused_at_once(tmp_path):
    kind = "pass a file of requests, one JSON object per line"
    with pytest.raises(ValueError, match=f"nothing.jsonl does not exist; {kind}$"):
        RequestFile(tmp_path / "nothing.jsonl", known=KNOWN)
    with pytest.raises(ValueError, match=f" is not a file; {kind}$"):
        RequestFile(tmp_path, known=KNOWN)


@given(st.sets(st.integers(1, 60)), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_every_line_is_in_the_share_of_exactly_one_process(numbers, count):
    lines = [Line(number, number, {}) for number in sorted(numbers)]
    shares = [list(share(lines, index, count)) for index in range(count)]
    assert sorted((line for part in shares for line in part), key=lambda x: x.number) == lines
    assert all(line.number % count == index for index in range(count) for line in shares[index])


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (0, 0, "count=0 processes are too few; use at least 1"),
        (3, 3, "index=3 is not a process of count=3; use 0 to 2"),
        (-1, 3, "index=-1 is not a process of count=3; use 0 to 2"),
        (True, 3, "index=True of the processes is not an integer"),
        (0, 2.0, "count=2.0 of the processes is not an integer"),
    ],
)
def test_a_process_that_cannot_be_is_refused(index, count, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        share([], index, count)


def test_ten_thousand_lines_half_of_them_bad_take_little_time(path):
    good = {"prompt": "x" * 200, "tokens_": 0, "seed": 7}
    content = "".join(
        json.dumps({"id": i, **good, ("tokens_" if i % 2 else "seed"): i}) + "\n"
        for i in range(10_000)
    )
    start = time.process_time()
    lines = read(path, content)
    assert time.process_time() - start < 3
    assert len(lines) == 10_000


@given(st.lists(st.tuples(IDS | st.tuples(IDS, st.integers(0, 9)), st.integers(0, 99))))
@settings(deadline=None, max_examples=30)
def test_a_table_on_disk_is_the_dict_that_keeps_the_first_place_of_a_key(pairs):
    table, plain = KeyTable(), {}
    for key, number in pairs:
        assert table.add(key, (number, 2, 3)) == (key not in plain)
        plain.setdefault(key, (number, 2, 3))
        assert key in table
    assert table == plain.keys() and len(table) == len(plain)
    assert all(table.place(key) == place for key, place in plain.items())
    assert table.place("line 1") is None


def test_a_line_that_is_too_long_is_refused_unread_and_others_are_read(path, monkeypatch):
    monkeypatch.setattr(request_file, "_LONGEST_LINE", 1000)
    long, other = read(path, json.dumps({"tokens": [1] * 1000}) + '\n{"prompt": "A"}\n')
    assert long.id == "line 1" and "line 1 has 3012 bytes; use at most 1000" in str(long.error)
    assert other.error is None and other.settings == {"prompt": "A"}


@pytest.mark.parametrize("content", ["x", ""])
def test_a_long_blank_line_is_read_in_pieces_and_one_that_ends_in_content_is_not_blank(
    path, monkeypatch, content
):
    monkeypatch.setattr(request_file, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(request_file, "_CHUNK", 100)
    sizes = []

    class Watched(io.FileIO):
        def readline(self, size=-1):
            assert size <= 1002
            sizes.append(size)
            return super().readline(size)

    monkeypatch.setattr(type(path), "open", lambda file, mode: Watched(file, mode))
    lines = read(path, b" " * 5000 + content.encode() + b'\n{"prompt": "A"}\n')
    assert len(sizes) > 40 and lines[-1] == Line(2, "line 2", {"prompt": "A"})
    assert [str(line.error)[:33] for line in lines[:-1]] == (
        ["in.jsonl line 1 has 5001 bytes; u"] if content else []
    )


def test_many_keys_take_little_time_also_where_the_last_two_are_equal(path):
    keys = [f'"k{n}": 0' for n in range(100_000)]
    start = time.process_time()
    (line,) = read(path, "{" + ", ".join([*keys, '"k99999": 1']) + "}")
    assert line.error.endswith('("k99999" is given twice); correct it')
    assert time.process_time() - start < 3


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file that cannot be read")
def test_a_file_whose_bytes_cannot_be_read_is_refused_by_name():
    unreadable = "/proc/self/mem"
    for read in (
        lambda: list(RequestFile(unreadable, known=())),
        lambda: fingerprint(unreadable, model={}, settings={}),
    ):
        with pytest.raises(ValueError, match="^/proc/self/mem cannot be read: .*; pass a file of"):
            read()
