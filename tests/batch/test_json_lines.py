"""Files of requests and of results: every line is read or named, and no kill loses a row."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.batch import Line, RequestFile, Results, fingerprint

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": TEXTS | st.integers(-(2**70), 2**70) | st.lists(TEXTS, max_size=2),
            "prompt": TEXTS,
            "tokens": st.lists(st.integers(-5, 99), max_size=3),
            "seed": st.integers(0, 2**40),
            "temperature": st.floats(allow_nan=False) | TEXTS,
            "logit_bias": st.dictionaries(TEXTS, st.floats(0, 1), max_size=2),
        },
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tmp_path_factory.mktemp("requests") / "in.jsonl"


def read(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return list(RequestFile(path))


@given(
    REQUESTS,
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n \t\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
@settings(deadline=None, max_examples=30)
def test_requests_come_back_as_written_in_their_order(source, requests, is_ascii, end, mark):
    content = "".join(json.dumps(one, ensure_ascii=is_ascii) + end for one in requests)
    step = end.count("\n")
    assert read(source, mark + content.encode()) == [
        Line(1 + i * step, {k: v for k, v in one.items() if k != "id"}, one.get("id"))
        for i, one in enumerate(requests)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "is not JSON: Expecting ',' delimiter at column 15; write one object"),
        ("[" * 100_000, "recursion"),
        ("9" * 10_000, "Exceeds the limit"),
        ('{"seed": 1, "seed": 2}', '"seed" is given twice'),
        ('["a"]', '["a"] is not an object; write {"prompt": ...}'),
        ("null", "null is not an object"),
        (b'{"prompt": "\xe4"}', "can't decode byte 0xe4"),
        (r'{"id": "\udc00"}', "surrogates not allowed"),
        (r'{"draft": "\ud800"}', "surrogates not allowed"),
    ],
)
def test_a_line_that_cannot_be_read_has_its_number_and_the_reason(source, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    content = b'{"id": "first"}\n\n' + line + b'\n{"id": 4, "prompt": "b"}'
    first, bad, last = read(source, content)
    assert (first, last) == (Line(1, {}, "first"), Line(4, {"prompt": "b"}, 4))
    assert (bad.number, bad.id, bad.settings) == (3, None, {})
    assert bad.error is not None and bad.error.startswith("in.jsonl line 3")
    assert message in bad.error and "\n" not in bad.error and len(bad.error) < 300


RAW_LINES = st.binary(max_size=8).map(lambda raw: raw.replace(b"\n", b" ")) | st.just(b"{}")


@given(st.lists(RAW_LINES, max_size=8), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_whatever_a_file_holds_each_line_that_is_not_blank_is_one_of_one_process(
    source, raws, count
):
    source.write_bytes(b"\n".join(raws))
    parts = [list(RequestFile(source, index=index, count=count)) for index in range(count)]
    raws[:1] = [raws[0].removeprefix(b"\xef\xbb\xbf")] if raws else []
    numbers = [i for i, raw in enumerate(raws, 1) if raw.strip()]
    assert sorted(line.number for part in parts for line in part) == numbers
    for index, part in enumerate(parts):
        assert {line.number % count for line in part} <= {index}


def test_a_file_that_is_missing_or_changes_is_refused(tmp_path):
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(ValueError, match="cannot be read: .*; pass a file of requests, one"):
            RequestFile(path)
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    requests = RequestFile(path)
    path.write_text("{}\n{}\n")
    with pytest.raises(ValueError, match="has changed during the run"):
        list(requests)


# Results

RUN = "a" * 64
ORDER = [2, 3, 5, 8, 13, 21, 40]
ROOT = Path(__file__).parents[2]


def result(number):
    text = f"text of {number}\n\x85\u2028 ä"
    return {"line": number, "id": "a", "text": text, "tokens": [1, 2], "status": "done"}


def summed(text):
    """The line of that JSON as it is stored: its CRC32 is its last key."""
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def line(number):
    return summed(json.dumps(result(number), ensure_ascii=False))


def lines(order):
    return [*map(Line, order)]


def work(path, *, order=ORDER):
    """Writes what is missing and sorts it; returns the lines that were written."""
    wrote = []
    with Results(path, fingerprint=RUN) as results:
        for number in reversed(order):
            if number not in results.done:
                results.write(result(number))
                wrote.append(number)
        results.finish(lines(order))
    return wrote


def is_finished(folder, order=ORDER):
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = json.loads(found.pop("out.jsonl.run"))
    return record["fingerprint"] == RUN and found == {"out.jsonl": b"".join(map(line, order))}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture(autouse=True, scope="module")
def synced():
    """Inodes that were brought to disk; doing so is left out, since it takes the most time here."""
    inodes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: inodes.append(os.fstat(number).st_ino))
        yield inodes


def test_what_is_written_is_on_disk_before_it_counts(path, synced):
    with Results(path, fingerprint=RUN) as results:
        assert path.with_name("out.jsonl.run").stat().st_ino in synced
        results.write(result(2))
        results.write(result(3))
        assert path.read_bytes() == line(2) + line(3)
        own = path.stat().st_ino
        assert own not in synced
    assert own in synced
    with Results(path, fingerprint=RUN) as results:
        results.finish(lines([3, 2]))
    assert path.stat().st_ino != own and path.stat().st_ino in synced


def test_results_end_in_the_order_of_the_requests_and_a_finished_run_changes_nothing(path):
    assert work(path) == list(reversed(ORDER))
    assert is_finished(path.parent)
    inode = path.stat().st_ino
    assert work(path) == [] and path.stat().st_ino == inode
    path.write_bytes(path.read_bytes().replace(line(ORDER[2]), b""))
    assert work(path) == [ORDER[2]] and is_finished(path.parent)


def test_each_process_writes_a_file_of_its_own_and_what_determines_the_programs_stays(path):
    for index in range(3):
        with Results(path, fingerprint=RUN, index=index, count=3, plan={"a": index}) as results:
            assert results.path.name == f"out.jsonl.part-{index:02d}-of-03"
            results.write(result(index + 1))
            results.finish(lines([index + 1]))
        with Results(path, fingerprint=RUN, index=index, count=3, plan={"a": 9}) as results:
            assert results.plan == {"a": index} and index + 1 in results.done
    with pytest.raises(ValueError, match="index=3 is not a process of count=3"):
        Results(path, fingerprint=RUN, index=3, count=3)


@given(st.integers(0, 400))
@settings(deadline=None, max_examples=60)
def test_a_file_cut_at_any_byte_loses_no_whole_row_and_redoes_only_the_rest(tmp_path_factory, cut):
    path, numbers = tmp_path_factory.mktemp("cut") / "out.jsonl", ORDER[:4]
    with Results(path, fingerprint=RUN) as results:
        for number in numbers:
            results.write(result(number))
    whole = path.read_bytes()
    cut %= len(whole) + 1
    os.truncate(path, cut)
    count = whole[:cut].count(b"\n")
    with Results(path, fingerprint=RUN) as results:
        assert [number for number in numbers if number in results.done] == numbers[:count]
        assert path.read_bytes() == b"".join(map(line, numbers[:count]))
        for number in numbers[count:]:
            results.write(result(number))
    assert path.read_bytes() == whole


class Broken(BaseException):
    """What a process that is killed raises from then on at whatever it does to the disk."""


def test_a_run_killed_between_any_two_steps_is_finished_by_running_it_again(tmp_path, monkeypatch):
    for number in itertools.count():
        path, calls, results = tmp_path / f"{number}" / "out.jsonl", itertools.count(), None

        def breaking(function, number=number, calls=calls):
            def call(*args, **kwargs):
                if next(calls) >= number:
                    raise Broken
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
                patch.setattr(owner, name, breaking(getattr(owner, name)))
            try:
                results = Results(path, fingerprint=RUN)
                for one in reversed(ORDER):
                    results.write(result(one))
                results.finish(lines(ORDER))
            except Broken:
                pass
            else:
                break
        if results is not None and results._writer is not None:
            results._writer.close()
        work(path)
        rest = [name for name in path.parent.iterdir() if name.suffix == ".writing"]
        assert len(rest) <= 1
        for name in rest:
            name.unlink()
        assert is_finished(path.parent)
    assert number > 5


def test_a_write_that_fails_leaves_nothing_of_its_line(path):
    class Full:
        """A disk that takes seven bytes at a time, and no more than twenty."""

        def __init__(self, writer):
            self.writer, self.taken = writer, 0

        def write(self, data):
            if self.taken > 20:
                raise OSError(28, "No space left on device")
            self.taken += 7
            return self.writer.write(bytes(data[:7]))

        def __getattr__(self, name):
            return getattr(self.writer, name)

    results = Results(path, fingerprint=RUN)
    results.write(result(2))
    writer, results._writer = results._writer, Full(results._writer)
    with pytest.raises(OSError, match="No space left on device"):
        results.write(result(3))
    assert path.read_bytes() == line(2) and 3 not in results.done
    results._writer = writer
    results.write(result(3))
    results.close()
    assert path.read_bytes() == line(2) + line(3)


@pytest.mark.parametrize("content", [b'{"id": 1}\n', b"a letter", b"\n"])
@pytest.mark.parametrize("record", [None, b"", b"[]", b'{"fingerprint": "b"}', b"\xff"])
def test_a_file_of_another_run_is_refused_and_left_as_it_is(path, content, record):
    path.write_bytes(content)
    if record is not None:
        path.with_name("out.jsonl.run").write_bytes(record)
    with pytest.raises(ValueError, match="out.jsonl belongs to another run: remove it or choose"):
        Results(path, fingerprint=RUN)
    assert path.read_bytes() == content


@pytest.mark.parametrize("bad", [b"[" * 100_000, b'{"text": "a"}', b'{"id": 1.5}', b"\xff"])
def test_a_line_that_is_damaged_or_no_result_is_refused_with_its_number(path, bad):
    work(path, order=[2])
    for content, said in ((bad + b"\n", "is damaged"), (summed_bytes(bad), "is not a result")):
        path.write_bytes(line(2) + content)
        with pytest.raises(ValueError, match=f"out.jsonl line 2 {said}"):
            Results(path, fingerprint=RUN)
        assert path.read_bytes() == line(2) + content


def summed_bytes(row):
    """A line with a right checksum, whatever it holds."""
    plain = row[:-1] + b"}"
    return b'%s, "crc": "%08x"}\n' % (row[:-1], zlib.crc32(plain))


def test_every_flipped_bit_of_results_and_their_record_is_found_or_its_row_redone(path):
    numbers = ORDER[:3]
    work(path, order=numbers)
    found = redone = 0
    files = (path, path.with_name("out.jsonl.run"))
    contents = [file.read_bytes() for file in files]
    for file, whole in zip(files, contents, strict=True):
        for bit in range(0, 8 * len(whole), 3):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            try:
                with Results(path, fingerprint=RUN) as results:
                    done = [number for number in numbers if number in results.done]
            except ValueError:
                found += 1
            else:
                # The last line has lost its end: it counts as cut off by a kill.
                assert file == path and bit // 8 == len(whole) - 1 and done == numbers[:-1]
                redone += 1
            file.write_bytes(whole)
    assert found > 600 and redone


def test_of_two_results_of_a_line_the_first_stays(path):
    work(path, order=[2, 3])
    path.write_bytes(path.read_bytes() + summed('{"line": 2}'))
    assert work(path, order=[2, 3]) == [] and is_finished(path.parent, [2, 3])


def test_a_file_that_another_process_writes_is_refused_until_it_ends(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result(2))
        with pytest.raises(ValueError, match="out.jsonl is being written by another process"):
            Results(path, fingerprint=RUN)
        results.write(result(3))
    with Results(path, fingerprint=RUN) as results:
        assert 2 in results.done and 3 in results.done


def test_what_cannot_be_written_is_refused(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path, Path("/dev/null"), tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match=".*choose another --output"):
            Results(place, fingerprint=RUN)
    with Results(path, fingerprint=RUN) as results:
        results.write(result(2))
        for bad in ({}, {"line": None}, {"line": True}, {"line": 1.0}, {"line": 0}):
            with pytest.raises(ValueError, match="has no line"):
                results.write(bad)
        with pytest.raises(ValueError, match="exists already; write each result once"):
            results.write(result(2))
        with pytest.raises(ValueError, match="lacks the result of line 3; run again"):
            results.finish(lines([2, 3]))
    assert path.read_bytes() == line(2)


def test_the_fingerprint_is_that_of_content_model_and_settings_and_no_others(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"{}\n")
    settings_ = {"order": "random", "logit_bias": ((3, 1.5),)}
    known = fingerprint(file, model={"path": "m"}, settings=settings_)
    assert known == "78334d23308d406c9b5a76f27c873ef36359d402c1d8b588aec2c68a98de2424"
    shuffled = {"logit_bias": [[3, 1.5]], "order": "random"}
    assert fingerprint(file, model={"path": "m"}, settings=shuffled) == known
    others = [
        fingerprint(file, model={"path": "n"}, settings=settings_),
        fingerprint(file, model={"path": "m"}, settings=settings_ | {"order": "linear"}),
        fingerprint(file, model=settings_, settings={"path": "m"}),
    ]
    file.write_bytes(b"{}\n\n")
    others.append(fingerprint(file, model={"path": "m"}, settings=settings_))
    assert len({known, *others}) == 5
