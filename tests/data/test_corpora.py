"""Laws of the corpora: what is read, in which order, how it is split, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.cli import evaluation
from dlm_jax.data import shard
from dlm_jax.data.text import (
    BUILTIN_CORPUS,
    PYTHON_SOURCE,
    SHAKESPEARE_PATH,
    Document,
    join_documents,
    read_documents,
    split_documents,
    split_text,
)
from dlm_jax.data.tokenizers import SubwordTokenizer


def _names(documents):
    return [os.path.basename(document.name) for document in documents]


def test_builtin_corpus_is_the_same_every_time_and_sorted():
    documents = read_documents(BUILTIN_CORPUS)
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert documents == read_documents([BUILTIN_CORPUS, BUILTIN_CORPUS])
    assert len(join_documents(documents)) > 200_000


def test_builtin_held_out_text_does_not_repeat_training_paragraphs():
    train, held_out = split_text(join_documents(read_documents(BUILTIN_CORPUS)), 0.05)
    known = set(train.split("\n\n"))
    paragraphs = [part for part in held_out.split("\n\n") if len(part) > 40]
    repeated = sum(len(part) for part in paragraphs if part in known)
    assert repeated <= 0.01 * sum(map(len, paragraphs))


def test_the_standard_library_is_a_document_per_module_without_tests_and_installed_packages():
    documents = read_documents(PYTHON_SOURCE)
    names = [document.name.removeprefix("python-source:") for document in documents]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert len(set(names)) == len(names)
    assert not [name for name in names if {"test", "site-packages"} & set(name.split("/"))]
    assert documents == read_documents([PYTHON_SOURCE])
    (decoder,) = (d.text for d in documents if d.name == "python-source:json/decoder.py")
    assert decoder == pathlib.Path(json.decoder.__file__).read_text(encoding="utf-8")


def test_files_are_sorted_and_read_once_however_they_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text(name)
    documents = read_documents(["b.txt", "**/*.txt", tmp_path / "a.txt", "sub/../b.txt"])
    assert _names(documents) == ["a.txt", "b.txt", "c.txt"]
    assert [document.text for document in documents] == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_taken_literally(tmp_path):
    (tmp_path / "a[1].txt").write_text("literal")
    (tmp_path / "a1.txt").write_text("other")
    assert [d.text for d in read_documents(tmp_path / "a[1].txt")] == ["literal"]


def test_text_is_read_exactly_but_for_the_byte_order_mark(tmp_path):
    text = "caf\u00e9\r\n\r\n \U0001f600"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_documents(tmp_path / "a.txt")[0].text == text


def test_an_empty_file_that_a_glob_found_is_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    assert _names(read_documents(tmp_path / "*.txt")) == ["b.txt"]


def test_a_file_of_json_lines_is_a_document_per_line_in_its_order(tmp_path):
    lines = ['{"text": "z"}', '{"prompt": "b", "response": "c"}'] * 6
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.txt").write_text("text")
    documents = read_documents([tmp_path / "*"])
    assert [(d.prompt, d.text) for d in documents] == [
        *[(None, "z"), ("b", "c")] * 6,
        (None, "text"),
    ]
    assert documents[11].name.endswith("a.jsonl line 12")


@given(st.integers(2, 50), st.floats(0.001, 0.999))
@settings(deadline=None)
def test_whole_documents_are_held_out_at_the_end(count, share):
    documents = [Document(str(i), "text") for i in range(count)]
    train, held_out = split_documents(documents, share, name="n")
    assert [*train, *held_out] == documents
    assert len(train) >= 1
    assert abs(len(held_out) - count * share) <= 1


def test_one_document_cannot_be_held_out():
    with pytest.raises(ValueError, match=r"n is one document.*; .* or use data\.layout=windows"):
        split_documents([Document("a", "text")], 0.5, name="n")
    with pytest.raises(ValueError, match=r"held_out=1\.0 is outside"):
        split_documents([Document("a", "text")] * 2, 1.0, name="n")


def test_documents_are_one_blank_line_apart_and_the_last_stays_as_it_is():
    documents = [Document("1", "one\n\n\n"), Document("2", "two"), Document("3", "three\n\n")]
    assert join_documents(documents) == "one\n\ntwo\n\nthree\n\n"


@given(st.text(alphabet="ab\n", min_size=2, max_size=200), st.floats(0.001, 0.999))
@settings(deadline=None)
def test_the_two_parts_make_up_the_text_and_neither_is_empty(text, fraction):
    train, held_out = split_text(text, fraction)
    assert train + held_out == text
    assert train
    assert held_out
    wanted = min(max(1, round(len(text) * fraction)), len(text) - 1)
    assert wanted <= len(held_out) <= 2 * wanted


def test_the_cut_is_at_a_line_start_where_there_is_one():
    text = "".join(f"line {i:03d}\n" for i in range(100))
    train, held_out = split_text(text, 0.047)
    assert train.endswith("\n")
    assert held_out.startswith("line 095")
    assert split_text("a" * 100, 0.05) == ("a" * 95, "a" * 5)


def test_bad_sources_are_refused_in_one_line(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    (tmp_path / "utf16.txt").write_text("text", encoding="utf-16")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    cases = [
        ("no.txt", r"no\.txt does not exist; pass a path, a glob or the built-in corpus"),
        ("*.md", r"\*\.md matches no file; pass a path"),
        ("", "is a directory; pass its files, such as"),
        ("empty.txt", r"empty\.txt is empty; use"),
        ("bom.txt", r"bom\.txt is empty; use"),
        ("empt*", "all files are empty; use"),
        ("blank.jsonl", r"blank\.jsonl is empty; use"),
        ("bad.jsonl", r"bad\.jsonl line 2: text is a number; write"),
        ("latin.txt", r"latin\.txt is not UTF-8: byte 0xe9 at byte offset 11 \(line 3\); convert"),
        ("utf16.txt", r"is not UTF-8: byte 0xff at byte offset 0 \(line 1\); convert"),
    ]
    for name, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            read_documents(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="source contains no file names"):
        read_documents([])


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match="cannot be read: Permission denied; make it readable"):
        read_documents(tmp_path / "a.txt")


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_held_out_fraction_outside_0_and_1_is_refused(fraction):
    with pytest.raises(ValueError, match=r"held_out=.* is outside \(0, 1\); 0.05 holds out"):
        split_text("text", fraction)


def test_one_character_cannot_be_split():
    with pytest.raises(ValueError, match="1 characters cannot be split; use more text"):
        split_text("a", 0.5)


RECORDS = [{"text": "one"}, {"text": "two\\nlines"}]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.JSONL", "a.jsonlines", "a.jl", "a.ndjson", "a.NdJson", "a.ldjson", "a.json",
     "a.JSON"],
)  # fmt: skip
def test_json_is_read_as_documents_whatever_the_case_of_its_suffix(tmp_path, name):
    path = tmp_path / name
    if name.lower().endswith(".json"):
        path.write_text(json.dumps(RECORDS, indent=1))
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    assert [document.text for document in read_documents(path)] == ["one", "two\\nlines"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"}', "a.json is not JSON .*rename JSON lines to .jsonl"),
        ('{"text": "a"}', "a.json is an object, not a list; write a list of records, or rename"),
        ('[{"text": "a"}, {"body": "b"}]', "a.json record 2 has the fields body; expected"),
        ('["a"]', "a.json record 1 is a string, not an object"),
        ("[" * 100_000, "a.json is not JSON"),
    ],
)
def test_a_json_file_that_is_no_list_of_records_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_documents(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def _fifo(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def _device(tmp_path):
    return "/dev/zero"


def _linked(tmp_path):
    (tmp_path / "text.txt").symlink_to("/dev/zero")
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize("make", [_fifo, _device, _linked])
def test_what_is_no_regular_file_is_refused_in_one_line(tmp_path, monkeypatch, capsys, make):
    path = make(tmp_path)
    line = f"{path} is not a regular file; copy its content to a file"
    for read in (read_documents, SubwordTokenizer.of_file, evaluation._read):
        with pytest.raises(ValueError, match=line):
            read(path)
    assert shard.main([path, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    monkeypatch.setenv(SHAKESPEARE_PATH, path)
    with pytest.raises(ValueError, match=line):
        read_documents("tinyshakespeare")
