"""Laws of the corpora: what is read, in which order, how it is split, and what is refused."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.cli.common import read_text
from dlm_jax.data import shard
from dlm_jax.data.text import (
    BUILTIN_CORPUS,
    PYTHON_SOURCE,
    join_documents,
    read_documents,
    split_text,
)
from dlm_jax.data.tokenizers import SubwordTokenizer


def _names(documents):
    return [os.path.basename(document.name) for document in documents]


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
    assert not [name for name in names if {"test", "site-packages"} & set(name.split("/"))]


def test_files_are_sorted_and_read_once_however_they_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text(name)
    documents = read_documents(["b.txt", "**/*.txt", tmp_path / "a.txt", "sub/../b.txt"])
    assert _names(documents) == ["a.txt", "b.txt", "c.txt"]
    assert [document.text for document in documents] == ["a.txt", "b.txt", "sub/c.txt"]


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


def test_text_is_read_exactly_but_for_the_byte_order_mark_and_empty_files(tmp_path):
    text = "caf\u00e9\r\n\r\n \U0001f600"
    (tmp_path / "a[1].txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "a1.txt").write_text("")
    for source in (tmp_path / "a[1].txt", tmp_path / "*.txt"):
        assert [document.text for document in read_documents(source)] == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.NdJson", "a.json", "a.JSON"])
def test_json_is_read_as_documents_in_order_whatever_the_case_of_its_suffix(tmp_path, name):
    records = [{"text": "z\n"}, {"prompt": "b", "response": "c"}] * 6
    lines = [json.dumps(record) for record in records]
    is_list = name.lower().endswith(".json")
    (tmp_path / name).write_text(f"[{','.join(lines)}]" if is_list else "\n".join(lines))
    documents = read_documents(tmp_path / name)
    assert [(d.prompt, d.text) for d in documents] == [(None, "z\n"), ("b", "c")] * 6
    assert documents[11].name.endswith(f"{name} {'record' if is_list else 'line'} 12")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, r"no\.txt does not exist; pass a path, a glob or the built-in corpus"),
        ("", None, "is a directory; pass its files, such as"),
        ("empty.txt", b"", "there is no text; pass files"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"bad\.jsonl line 2: text is not a text"),
        ("latin.txt", b"one\ntwo\ncaf\xe9\n", r"latin\.txt is not UTF-8 \(.*position 11.*; conv"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', "a.json is not JSON .*; write one object"),
        ("b.json", b'{"text": "a"}', "b.json is not a list of records"),
        ("c.json", b'[{"text": "a"}, {"body": "b"}]', "record 2 has the fields body; expected"),
        ("d.json", b"[" * 100_000, "d.json is not JSON"),
    ],
)
def test_bad_sources_are_refused_in_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_held_out_is_refused():
    for text, held_out, message in (
        ("a", 0.5, "the text is one piece"),
        ("text", float("nan"), r"held_out=nan is outside \(0, 1\); 0.05"),
    ):
        with pytest.raises(ValueError, match=message):
            split_text(text, held_out)


@pytest.mark.parametrize("is_linked", [False, True])
def test_what_is_no_regular_file_is_refused_in_one_line(tmp_path, capsys, is_linked):
    path = str(tmp_path / "pipe.txt")
    os.symlink("/dev/zero", path) if is_linked else os.mkfifo(path)
    line = f"{path} is not a regular file; copy its content to a file"
    for read in (read_documents, SubwordTokenizer.of_file, read_text):
        with pytest.raises(ValueError, match=line):
            read(path)
    assert shard.main([path, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
