"""sample.py on the devices of several processes: each feeds and tells its share of the rows."""

import json
import re
import signal
import time

import pytest
import saved_model
import tiny_run

from dlm_jax.cli.ends import End

ORDER = ["--chain", "temperature", "--order", "left_to_right"]
SHORT = [*ORDER, "--steps", "9", "--ignore-eos", "true"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


def _together(*flags, **axes):
    """(exit code, standard output, standard error) of each of two processes that form one mesh."""
    mesh = [part for name, size in axes.items() for part in (f"--mesh.{name}", size)]
    children = _start_two([*flags, *mesh])
    outputs = [child.communicate(timeout=400) for child in children]
    return [
        (child.returncode, out, err) for child, (out, err) in zip(children, outputs, strict=True)
    ]


def _start_two(flags, *own):
    """Two processes that form one mesh, with further flags of each."""
    port = tiny_run.free_port()
    return [
        tiny_run.program(
            *flags, *(flag for flags in own for flag in flags(index)), "--distributed",
            "--coordinator", f"127.0.0.1:{port}", "--num-processes", 2, "--process-id", index,
            script="sample.py", JAX_NUM_CPU_DEVICES="2",
        )
        for index in range(2)
    ]  # fmt: skip


def _alone(*flags):
    child = tiny_run.program(*flags, script="sample.py", JAX_NUM_CPU_DEVICES="1")
    out, err = child.communicate(timeout=400)
    assert child.returncode in (End.DONE, End.PARTLY), err
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"data": 4}, {"data": 1, "fsdp": 2, "tensor": 2}, {"data": 1, "tensor": 4}],
    ids=["data", "fsdp", "tensor"],
)  # fmt: skip
def test_two_processes_write_what_one_does_each_its_own_rows(run_dir, tmp_path, axes):
    requests = [
        {"id": number, "prompt": "The cat "[: number % 6], "gen_length": 2 + number % 8,
         "guidance": float(number % 2)}
        for number in range(20)
    ] + [{"id": "bad", "stepz": 3}]  # fmt: skip
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))

    def flags(output):
        return ["--checkpoint", run_dir, "--prompts", source, "--output", output, *SHORT,
                "--batch-size", "8"]  # fmt: skip

    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    _alone(*flags(one))
    told = _together(*flags(two), **axes)
    assert {code for code, _, _ in told} <= {End.DONE, End.PARTLY}, told
    count = 1 if axes == {"data": 1, "tensor": 4} else 2
    parts = [path for path in tmp_path.glob("two.jsonl*") if path.suffix != ".run"]
    assert len(parts) == count
    ours, theirs = (
        [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        for paths in (parts, [one])
    )
    places = [row["id"] for row in theirs]
    assert places == [*range(20), "bad"]
    ours.sort(key=lambda row: places.index(row["id"]))
    for row in (*ours, *theirs):
        for clock in ("seconds", "crc"):
            row.pop(clock, None)
    assert ours == theirs
    writers = [err for _, _, err in told if re.search(r"\d+ rows, \d refused", err)]
    assert len(writers) == count
    assert "21 of 21 requests are done" not in told[0][2]


@pytest.mark.slow
def test_two_processes_print_the_texts_once(run_dir):
    flags = ["--checkpoint", run_dir, *SHORT, "--prompt", "The ", "--gen-length", "6",
             "--num-samples", "3", "--batch-size", "4"]  # fmt: skip
    first, second = _together(*flags, data=2, fsdp=2)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1] == _alone(*flags) and second[1] == ""


@pytest.mark.slow
def test_a_killed_process_ends_the_other(run_dir, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text((json.dumps({"prompt": "A"}) + "\n") * 320_000)
    files = ["--prompts", source, "--output", output]
    how = ["--gen-length", "30", "--batch-size", "4", "--mesh.data", "4"]
    first, second = _start_two(["--checkpoint", run_dir, *SHORT, *files, *how])
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("out.jsonl*")) and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)
    second.kill()
    err = first.communicate(timeout=90)[1]
    second.communicate()
    assert first.returncode == -signal.SIGABRT, err


@pytest.mark.slow
def test_processes_with_other_flags_or_files_are_refused(run_dir, tmp_path):
    flags = ["--checkpoint", run_dir, *SHORT, "--prompt", "The ", "--mesh.data", "4"]
    children = _start_two(flags, lambda index: ["--seed", index])
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [2, 2], errors
    assert all(
        "process 1 has a different --seed than process 0 ('1', not '0')" in e for e in errors
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "axes", "said"),
    [
        (["--batch-size", "6"], {"data": 4}, "--batch-size 6 is not divisible by the 4 devices"),
        ([], {"data": 3}, "do not multiply to 4, the number of devices"),
        (["--watch"], {"data": 4}, "canvases can only be shown in a single process"),
        (["--host-sampler", "operator:index"], {"data": 4}, "host samplers and read-back need"),
    ],
)
def test_what_several_processes_cannot_do_ends_with_code_2_in_each(run_dir, flags, axes, said):
    for code, out, err in _together("--checkpoint", run_dir, *SHORT, *flags, **axes):
        assert (code, out) == (2, "")
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert said in line
