"""Laws of files of results: no kill, cut or race loses a row, and no stranger's file is touched."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.batch import Results, fingerprint, result_file

RUN = "a" * 64
ORDER = ["b", 7, "line 3", "7", "ä\u2028\r", 0, "last"]
ROOT = Path(__file__).parents[2]


def result(id_):
    text = f"text of {id_}\n\x85\u2028 ä"
    return {"id": id_, "text": text, "tokens": [1, 2], "length": 2, "steps": 1, "status": "done"}


def line(id_):
    return summed(json.dumps(result(id_), ensure_ascii=False))


def summed(text):
    """The line of that JSON as it is kept: its CRC32 is its last key."""
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def without_sum(row):
    found = json.loads(row)
    del found["crc"]
    return found


def work(path, *, index=0, count=1, order=ORDER):
    """Writes what is missing of the share of a process; the ids it wrote, and what `finish` says"""
    wrote = []
    with Results(path, fingerprint=RUN, index=index, count=count) as results:
        for id_ in reversed(order[index::count]):
            if id_ not in results.done:
                results.write(result(id_))
                wrote.append(id_)
        return wrote, results.finish(order)


def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rows(file):
    """The lines of a file by key, and the offset of their end."""
    with result_file.open_owned(file, RUN) as handle:
        places = list(result_file.scan_lines(handle, file))
    content, rows = file.read_bytes(), {}
    for key, offset, size in places:
        rows.setdefault(key, content[offset : offset + size])
    return rows, sum(size for *_, size in places)


def is_finished(folder, order=ORDER):
    found = tree(folder)
    record = without_sum(found.pop("out.jsonl.run"))
    return record == {"fingerprint": RUN, "complete": True} and found == {
        "out.jsonl": b"".join(map(line, order))
    }


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
        results.write(result("b"))
        results.write(result(7))
        own = path.stat().st_ino
        assert own not in synced
    assert own in synced
    with Results(path, fingerprint=RUN) as results:
        assert results.finish([7, "b"])
    assert path.stat().st_ino != own
    assert path.stat().st_ino in synced
    assert synced[-1] == path.parent.stat().st_ino


def test_results_end_in_the_order_of_the_requests_as_they_were_written(path):
    assert work(path) == (list(reversed(ORDER)), True)
    assert is_finished(path.parent)
    rows = path.read_bytes().decode().split("\n")[:-1]
    assert [without_sum(row) for row in rows] == [result(id_) for id_ in ORDER]


@pytest.mark.parametrize("count", [1, 2])
def test_running_finished_work_again_finds_all_done_and_changes_nothing(path, count):
    for index in range(count):
        work(path, index=index, count=count)
    before = tree(path.parent)
    written = [file.stat().st_ino for file in (path, result_file.run_path(path))]
    for again in (count, 1, 3):
        for index in range(again):
            with Results(path, fingerprint=RUN, index=index, count=again) as results:
                assert results.done == set(ORDER)
                assert tree(path.parent) == before
                assert results.finish(ORDER)
    assert tree(path.parent) == before
    assert [file.stat().st_ino for file in (path, result_file.run_path(path))] == written


def test_finished_work_clears_what_its_own_kills_left_and_nothing_of_others(path):
    work(path)
    before = tree(path.parent)
    mine, theirs = (path.with_name(f"out.jsonl.part-00-of-0{count}") for count in (2, 3))
    for part, run in ((mine, RUN), (theirs, "b" * 64)):
        part.write_bytes(line("b"))
        result_file.run_path(part).write_bytes(summed(json.dumps({"fingerprint": run})))
    path.with_name("out.jsonl.writing").write_bytes(b"half")
    kept = {file.name: file.read_bytes() for file in (theirs, result_file.run_path(theirs))}
    assert work(path) == ([], True)
    assert tree(path.parent) == before | kept


@pytest.mark.parametrize("order", [[], ORDER])
@pytest.mark.parametrize("name", ["new/deep/out.jsonl", "empty"])
def test_a_missing_folder_is_made_and_an_empty_file_is_nobodys(tmp_path, order, name):
    (tmp_path / "empty").touch()
    assert work(tmp_path / name, order=order)[1]
    assert (tmp_path / name).read_bytes() == b"".join(map(line, order))


def test_each_result_is_in_the_file_as_soon_as_it_is_written(path):
    with Results(path, fingerprint=RUN) as results:
        for number, id_ in enumerate(ORDER, 1):
            results.write(result(id_))
            assert path.read_bytes() == b"".join(map(line, ORDER[:number]))
        assert json.loads((path.parent / "out.jsonl.run").read_text())["fingerprint"] == RUN


def test_a_lone_surrogate_in_a_text_comes_back_from_valid_json(path):
    with Results(path, fingerprint=RUN) as results:
        results.write({"id": 1, "text": "a\ud800ä"})
    assert without_sum(path.read_bytes().decode("utf-8")) == {"id": 1, "text": "a\ud800ä"}


@given(st.integers(0, 400), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=60)
def test_a_file_cut_at_any_byte_loses_no_whole_row_and_redoes_only_the_rest(
    tmp_path_factory, cut, count
):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    ids = ORDER[:4]
    with Results(path, fingerprint=RUN, count=count) as results:
        for id_ in ids:
            results.write(result(id_))
    file = next(f for f in path.parent.iterdir() if f.suffix != ".run")
    whole = file.read_bytes()
    cut %= len(whole) + 1
    os.truncate(file, cut)
    kept = whole[:cut].count(b"\n")
    with Results(path, fingerprint=RUN, count=count) as results:
        assert results.done == set(ids[:kept])
        assert file.read_bytes() == b"".join(map(line, ids[:kept]))
        for id_ in ids[kept:]:
            results.write(result(id_))
    assert file.read_bytes() == whole


CHILD = """
import os, signal, sys
from dlm_jax.batch import Results, result_file
assert not {"jax", "numpy"} & set(sys.modules)
path, run, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
append = result_file.append_line
def half(writer, data):
    if f'"id": {last}' in data.decode():
        writer.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    append(writer, data)
result_file.append_line = half
results = Results(path, fingerprint=run)
assert results.done == set(range(first)), results.done
for i in range(first, 99):
    results.write({"id": i, "text": "x" * 50})
"""


def test_a_process_killed_in_the_middle_of_a_line_loses_only_that_line(path):
    # The second one starts from what the first one left.
    for first, last in ((0, 20), (20, 21)):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, path, RUN, str(first), str(last)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not path.read_bytes().endswith(b"\n")
    with Results(path, fingerprint=RUN) as results:
        assert results.done == set(range(21))


class Broken(BaseException):
    """What a process that is killed raises from then on at whatever it does to the disk."""


def kill_at(monkeypatch, number):
    """Lets the writing calls to the disk fail from the `number`-th on."""
    calls = itertools.count()

    def breaking(function):
        def call(*args, **kwargs):
            if next(calls) >= number:
                raise Broken
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (os, "replace"),
        (os, "fsync"),
        (Path, "unlink"),
        (result_file, "append_line"),
    ):
        monkeypatch.setattr(owner, name, breaking(getattr(owner, name)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_killed_between_any_two_steps_is_finished_by_running_it_again(
    tmp_path, count, monkeypatch
):
    for number in itertools.count():
        path = tmp_path / f"{number}" / "out.jsonl"
        others = [work(path, index=index, count=count) for index in range(1, count)]
        assert not any(finished for _, finished in others)
        results = None
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            try:
                results = Results(path, fingerprint=RUN, count=count)
                for id_ in ORDER[::count]:
                    results.write(result(id_))
                results.finish(ORDER)
                was_killed = False
            except Broken:
                was_killed = True
            if results is not None and results._writer is not None:
                results._writer.close()
        again = [work(path, index=index, count=count) for index in range(count)]
        assert again[-1][1]
        assert not any(wrote for wrote, _ in again[1:])
        assert is_finished(path.parent)
        if not was_killed:
            break
    assert number > 10


def test_a_write_that_fails_leaves_nothing_of_its_line(path):
    class Full:
        """A disk that takes a few bytes at a time, and none after 20."""

        def __init__(self, writer):
            self.writer, self.taken = writer, 0

        def __getattr__(self, name):
            return getattr(self.writer, name)

        def write(self, data):
            if self.taken > 20:
                raise KeyboardInterrupt
            self.taken += 7
            return self.writer.write(data[:7])

    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        writer = results._writer
        assert writer is not None
        with pytest.raises(KeyboardInterrupt):
            result_file.append_line(Full(writer), line(7))  # type: ignore[arg-type]
        assert path.read_bytes() == line("b")
        results.write(result(7))
        assert path.read_bytes() == line("b") + line(7)


@pytest.mark.parametrize("finishing", list(itertools.permutations(range(3))))
def test_the_last_of_three_processes_merges_whichever_it_is(path, finishing):
    for index in finishing:
        assert work(path, index=index, count=3)[1] == (index == finishing[-1])
    assert is_finished(path.parent)


def test_three_running_processes_each_write_their_own_part(path):
    running = [Results(path, fingerprint=RUN, index=index, count=3) for index in range(3)]
    for number, id_ in enumerate(ORDER):
        running[number % 3].write(result(id_))
    assert {f"out.jsonl.part-{i:02d}-of-03" for i in range(3)} <= tree(path.parent).keys()
    # All have written everything, and all find that they are the last.
    assert [results.finish(ORDER) for results in running] == [True] * 3
    assert is_finished(path.parent)


STEPS = [
    (result_file, "open_owned"),
    (result_file, "scan_lines"),
    (result_file, "run_of"),
    (result_file, "replacing"),
    (os, "replace"),
    (Path, "unlink"),
]


@pytest.mark.parametrize("during", ["finish", "open"])
def test_a_merge_at_any_moment_of_another_process_loses_nothing(tmp_path, during, monkeypatch):
    for number in itertools.count():
        path = tmp_path / f"{number}" / "out.jsonl"
        work(path, index=1, count=2)
        with Results(path, fingerprint=RUN, index=0, count=2) as results:
            for id_ in ORDER[::2]:
                results.write(result(id_))
        other = Results(path, fingerprint=RUN, index=1, count=2)
        calls, is_inside = itertools.count(), [False]

        def meeting(function, number=number, calls=calls, is_inside=is_inside, other=other):
            def call(*args, **kwargs):
                if not is_inside[0] and next(calls) == number:
                    is_inside[0] = True
                    assert other.finish(ORDER)
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            if during == "open":
                for owner, name in STEPS:
                    patch.setattr(owner, name, meeting(getattr(owner, name)))
            again = Results(path, fingerprint=RUN, index=0, count=2)
            assert again.done >= set(ORDER[::2])
            if during == "finish":
                for owner, name in STEPS:
                    patch.setattr(owner, name, meeting(getattr(owner, name)))
            assert again.finish(ORDER)
        other.close()
        assert is_finished(path.parent)
        if not is_inside[0]:
            break
    assert number > 3


def snapshot_and_refusal(path, **kwargs):
    before = tree(path.parent)
    with pytest.raises(ValueError) as caught:
        Results(path, **{"fingerprint": RUN, **kwargs})
    assert tree(path.parent) == before
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_process_that_begins_to_write_while_another_looks_is_no_stranger(path, monkeypatch):
    look = result_file.run_of

    def looking(file):
        record = look(file)
        monkeypatch.undo()
        with Results(path, fingerprint=RUN, index=1, count=2) as other:
            other.write(result(7))
        return record

    part = path.with_name("out.jsonl.part-01-of-02")
    part.touch()
    monkeypatch.setattr(result_file, "run_of", looking)
    assert _rows(part) == ({7: line(7)}, len(line(7)))


STRANGER = "out.jsonl belongs to another run: remove it or choose another --output"


@pytest.mark.parametrize("content", [b'{"id": 1}\n', b"a letter", b"\n"])
@pytest.mark.parametrize("record", [None, b"", b"[]", b'{"fingerprint": "b"}', b"\xff"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_file_of_another_run_is_refused_and_left_as_it_is(path, content, record, count):
    path.write_bytes(content)
    if record is not None:
        path.with_name("out.jsonl.run").write_bytes(record)
    assert snapshot_and_refusal(path, count=count) == STRANGER


def test_a_part_of_another_run_is_refused_by_all_processes_and_left_as_it_is(path):
    with Results(path, fingerprint="b" * 64, index=1, count=2) as results:
        results.write(result(1))
    for index in range(2):
        message = snapshot_and_refusal(path, index=index, count=2)
        assert message == STRANGER.replace("jsonl", "jsonl.part-01-of-02")


def test_a_stranger_that_appears_while_a_run_works_stops_the_merge_and_stays(path):
    results = Results(path, fingerprint=RUN, index=0, count=2)
    assert not work(path, index=1, count=2)[1]
    for id_ in ORDER[::2]:
        results.write(result(id_))
    path.write_bytes(b"a letter")
    before = tree(path.parent)
    with results, pytest.raises(ValueError, match="out.jsonl belongs to another run: remove it or"):
        results.finish(ORDER)
    assert tree(path.parent) == before
    path.unlink()
    assert work(path, index=0, count=2) == ([], True)


@pytest.mark.parametrize(
    ("there", "count", "name"),
    [(3, 2, ".part-00-of-03"), (2, 3, ".part-00-of-02"), (2, 1, ".part-00-of-02"), (1, 2, "")],
)
def test_another_number_of_processes_is_refused_and_says_which_continues(path, there, count, name):
    with Results(path, fingerprint=RUN, count=there) as results:
        results.write(result("b"))
    assert snapshot_and_refusal(path, count=count) == (
        f"out.jsonl{name} belongs to a run with count={there} processes, not {count}; "
        f"continue with {there}, or remove it or choose another --output"
    )


BAD_LINES = [b"{", b"\xff", b"[1]", b'{"text": "a"}', b'{"id": 1.5}', b'{"id": true}', b"", b"\0\0"]


@pytest.mark.parametrize("bad", [*BAD_LINES, b"[" * 100_000])
def test_a_damaged_line_is_refused_with_its_number_and_left_as_it_is(path, bad):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
    path.write_bytes(path.read_bytes() + bad + b"\n" + line(7) + b'{"id"')
    message = "out.jsonl line 2 is damaged: it has no checksum; remove that line or the file"
    assert snapshot_and_refusal(path) == message
    path.write_bytes(line("b") + line(7))
    with Results(path, fingerprint=RUN) as results:
        assert results.done == {"b", 7}


@pytest.mark.parametrize("bad", ['{"text": "a"}', '{"id": 1.5}'])
def test_a_whole_line_that_is_no_result_is_refused(path, bad):
    work(path)
    path.write_bytes(path.read_bytes() + summed(bad))
    said = f"out.jsonl line {len(ORDER) + 1} is not a result; remove that line or the file"
    assert snapshot_and_refusal(path) == said


def test_every_flipped_bit_of_results_and_their_record_is_found_or_its_row_redone(path):
    ids = ORDER[:3]
    work(path, order=ids)
    found = redone = 0
    for file in (path, result_file.run_path(path)):
        whole = file.read_bytes()
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            try:
                rows, end = _rows(path)
            except ValueError:
                found += 1
                continue
            # The last line has lost its end: it counts as cut off by a kill.
            assert file == path and bit // 8 == len(whole) - 1
            assert rows == {id_: line(id_) for id_ in ids[:-1]}
            assert whole[:end] == b"".join(rows.values())
            redone += 1
        file.write_bytes(whole)
    assert found > 2000
    assert redone == 8


def test_a_file_that_another_process_writes_is_refused_until_it_ends(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        message = "out.jsonl is being written by another process; wait until it ends or choose"
        assert snapshot_and_refusal(path).startswith(message)
        results.write(result(7))
    with Results(path, fingerprint=RUN) as results:
        assert results.done == {"b", 7}


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path, message in (
        (tmp_path, " is not a file; choose another --output"),
        (Path("/dev/null"), "^/dev/null is not a file; choose another --output"),
        (
            tmp_path / "file" / "out",
            "/out cannot be read: Not a directory; choose another --output",
        ),
        (tmp_path / ("x" * 300), "x cannot be read: File name too long; choose another --output"),
        (tmp_path / ("x" * 253), "x cannot be written: File name too long; choose another"),
    ):
        with pytest.raises(ValueError, match=message):
            Results(path, fingerprint=RUN)
    with pytest.raises(ValueError, match="index=2 is not a process of count=2; use 0 to 1"):
        Results(tmp_path / "out", fingerprint=RUN, index=2, count=2)


def test_a_result_without_an_id_or_a_second_one_or_after_the_end_is_refused(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        for bad in ({}, {"id": None}, {"id": True}, {"id": 1.0}):
            with pytest.raises(ValueError, match="has no id; use a string or an integer"):
                results.write(bad)
        with pytest.raises(ValueError, match="the result of id='b' exists already; write it"):
            results.write(result("b"))
        with pytest.raises(TypeError):
            results.write({"id": "c", "tokens": {1}})
    with pytest.raises(ValueError, match="out.jsonl is closed; open the results again"):
        results.write(result("c"))
    assert path.read_bytes() == line("b")


def test_the_first_of_two_results_of_one_request_is_kept(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        results.write(result(7))
    other = summed(json.dumps(result("b") | {"text": "another"}, ensure_ascii=False))
    path.write_bytes(path.read_bytes() + other)
    assert work(path, order=["b", 7])[0] == []
    assert path.read_bytes() == line("b") + line(7)


def test_an_order_that_lacks_a_result_is_refused_before_anything_is_lost(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        results.write(result(7))
        with pytest.raises(ValueError, match="has a result of id=7, which no request has; remove"):
            results.finish(["b"])
        assert path.read_bytes() == line("b") + line(7)


def test_a_file_that_vanishes_while_it_is_written_is_told(path):
    with Results(path, fingerprint=RUN) as results:
        results.write(result("b"))
        path.unlink()
        with pytest.raises(ValueError, match="out.jsonl has lost the result of id='b';"):
            results.finish(["b"])


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_taken_out_of_finished_results_is_redone_alone(path, count):
    for index in range(count):
        work(path, index=index, count=count)
    path.write_bytes(path.read_bytes().replace(line(ORDER[2]), b""))
    assert work(path, count=count) == ([ORDER[2]], True)
    assert is_finished(path.parent)


def test_a_link_stays_one(tmp_path, path):
    (tmp_path / "real").mkdir()
    path.symlink_to(tmp_path / "real" / "out.jsonl")
    assert work(path)[1]
    assert path.is_symlink()
    assert is_finished(tmp_path / "real")


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
