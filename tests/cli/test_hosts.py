"""``train.py`` on several hosts of which one is lost, stopped or otherwise configured."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import tiny_run

from dlm_jax.training.metrics import read_records

pytestmark = pytest.mark.slow


def _two(out_dir: Path, *differing: dict, **changes: object):
    """Two processes of one run; `differing` are changes of each alone, or of its environment."""
    port = tiny_run.free_port()
    children = []
    for index in range(2):
        own = changes | (differing[index] if differing else {})
        environment = {name: str(own.pop(name)) for name in [*own] if name.isupper()}
        script = environment.pop("SCRIPT", "train.py")
        given = tiny_run.flags(out_dir, **own)
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        children.append(
            tiny_run.program(
                *("--distributed", "--coordinator", f"127.0.0.1:{port}"),
                *("--num-processes", "2", "--process-id", index),
                *flags,
                script=script,
                TF_CPP_MIN_LOG_LEVEL="3",
                **environment,
            )
        )
    return children


LONG = {"train__steps": 100_000, "train__eval_every": 0, "train__checkpoint_every": 20}


def _wait_for_steps(out_dir: Path) -> None:
    deadline = time.monotonic() + 400
    while not read_records(out_dir / "metrics.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_other_within_a_minute(tmp_path, lost):
    children = _two(tmp_path, **LONG)
    _wait_for_steps(tmp_path)
    children[lost].kill()
    start = time.monotonic()
    err = children[1 - lost].communicate(timeout=90)[1]
    assert time.monotonic() - start < 60
    children[lost].communicate()
    assert children[1 - lost].returncode == -signal.SIGABRT, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train__seed": 7}, "train.seed than process 0 (7, not 0)"),
        ({"JAX_THREEFRY_PARTITIONABLE": 0},
         "jax_threefry_partitionable than process 0 (False, not True)"),
    ],
)  # fmt: skip
def test_hosts_that_are_set_otherwise_are_refused_before_anything_is_written(
    tmp_path, change, told
):
    children = _two(tmp_path / "run", {}, change)
    errors = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [2, 2], errors
    for err in errors:
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert f"process 1 has a different {told}" in line
    assert list(tmp_path.iterdir()) == []


def test_hosts_with_other_code_are_refused_before_anything_is_written(tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(tiny_run.ROOT / "dlm_jax", changed / "dlm_jax")
    shutil.copy(tiny_run.ROOT / "train.py", changed)
    path = changed / "dlm_jax" / "training" / "optimisers.py"
    path.write_text(path.read_text() + "\nFACTOR = 0.25\n")
    children = _two(tmp_path / "run", {}, {"SCRIPT": changed / "train.py"})
    errors = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [2, 2], errors
    for err in errors:
        assert "process 1 has a different source code of dlm_jax than process 0" in err
    assert not (tmp_path / "run").exists()


def test_a_host_that_is_refused_alone_ends_the_other(tmp_path):
    children = _two(tmp_path / "run", {}, {"data__source": tmp_path / "nowhere.txt"})
    errors = [child.communicate(timeout=300)[1] for child in children]
    assert children[0].returncode and children[1].returncode == 2, errors
    assert "nowhere.txt does not exist" in errors[1]


def test_two_hosts_stop_at_one_step_and_one_or_two_continue_as_if_nothing_had_been(tmp_path):
    alone = tmp_path / "alone"
    given = {"train__steps": 40, "train__eval_every": 20, "train__checkpoint_every": 0}
    expected = tiny_run.run(alone, **given)
    children = _two(tmp_path / "run", mesh__data=2, **given)
    _wait_for_steps(tmp_path / "run")
    children[1].send_signal(signal.SIGTERM)
    outputs = [child.communicate(timeout=200) for child in children]
    codes = {child.returncode for child in children}
    assert codes in ({128 + signal.SIGTERM}, {0}), outputs
    if codes == {128 + signal.SIGTERM}:
        assert re.search(r"interrupted: saved at step \d+", outputs[0][1])
    outcome = tiny_run.run(tmp_path / "run", **given)
    assert (outcome.reason, outcome.step) == ("finished", 40)
    assert outcome.bound == pytest.approx(expected.bound, rel=1e-3)


def test_two_killed_hosts_continue_as_if_uninterrupted(tmp_path):
    given = {"train__steps": 150, "train__eval_every": 0, "train__checkpoint_every": 20}
    alone = tiny_run.run(tmp_path / "alone", **given)
    given |= {"mesh__data": 1, "mesh__fsdp": 2}
    children = _two(tmp_path / "run", **given)
    deadline = time.monotonic() + 400
    while len(read_records(tmp_path / "run" / "metrics.jsonl")) < 10:
        assert time.monotonic() < deadline and not any(child.poll() for child in children)
        time.sleep(0.1)
    for child in children:
        child.kill()
        child.communicate()
    children = _two(tmp_path / "run", **given)
    errors = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    assert f"continuing {tmp_path / 'run'} from step" in errors[0]
    records = tiny_run.records(tmp_path / "run")
    for one, expected in zip(records, tiny_run.records(tmp_path / "alone"), strict=True):
        assert one["step"] == expected["step"]
        name = "loss" if one["kind"] == "train" else "bound"
        assert one[name] == pytest.approx(expected[name], rel=1e-3)
    assert records[-1]["bound"] == pytest.approx(alone.bound, rel=1e-3)


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_two_processes_train_like_one_however_they_share_the_work(tmp_path, axis):
    tiny_run.run(tmp_path / "alone")
    changes = {"mesh__data": 1, f"mesh__{axis}": 2}
    children = _two(tmp_path / "together", train__sample_every=5, **changes)
    outputs = [child.communicate(timeout=400) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0].count("\n---\n") == 2
    # The library of collectives greets, in lines that its threads mix.
    assert outputs[1][0] == re.sub(r".*connected peer ranks.*\n", "", outputs[1][1]) == ""
    assert "sample at step 20" in outputs[0][1]
    ours, theirs = (tiny_run.records(tmp_path / name) for name in ("together", "alone"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in a.keys() - {"kind"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3), (name, a, b)
