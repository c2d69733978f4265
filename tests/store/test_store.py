"""Checkpoints, on disks and in buckets: complete or absent, and damage is found."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import buckets
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.store import Checkpoints, checkpoints, load_params
from dlm_jax.store.files import located
from dlm_jax.store.weights import checksums

pytestmark = pytest.mark.filterwarnings("default")

MANIFEST = "manifest/metadata"
META = {"config": {"model": {"depth": 2}}, "tokenizer": {}, "data": {"next": [1, 2]}}


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


def _state(step: int, *, width: int = 6) -> State:
    params = {
        "blocks": {"kernel": jnp.full((8, width), step / 3), "scale": jnp.ones(8, jnp.bfloat16)},
        "embedding": jnp.arange(16.0).reshape(16, 1) + step,
    }
    return State(params, optax.adamw(1e-3).init(params), jnp.int32(step), jax.random.key(step))


def _abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _plain(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _assert_same(left: Any, right: Any) -> None:
    chex.assert_trees_all_equal_dtypes(left, right)
    chex.assert_trees_all_equal(jax.tree.map(_plain, left), jax.tree.map(_plain, right))


def _save(directory: Any, *steps: int, keep: int = 2) -> Any:
    with Checkpoints(directory, keep=keep) as saved:
        for step in steps:
            saved.save(step, _state(step), {**META, "step": step})
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2; tests that change files work on a copy."""
    return _save(tmp_path_factory.mktemp("saved"), 1, 2)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        yield tmp_path / "run"
        return
    with buckets.bucket() as url:
        yield located(f"{url}/run")


def _files(directory: Any) -> list[Any]:
    if not isinstance(directory, Path):
        return buckets.files_under(located(directory))
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_what_is_restored_is_what_was_saved_and_only_the_newest_are_kept(place):
    _save(place / "checkpoints", 1, 2, 3)
    with Checkpoints(place / "checkpoints", keep=2) as again:
        restored = again.restore(_abstract(_state(0)))
        _assert_same(restored.state, _state(3))
        assert (restored.step, restored.meta) == (3, again.read_meta()) == (3, {**META, "step": 3})
        assert not again.save(3, _state(9), META)
        with pytest.raises(ValueError, match="step=1 is before step 3"):
            again.save(1, _state(1), META)
        assert again.steps() == [2, 3]
    roots = {str(p).removeprefix(str(place)).split("/")[2] for p in _files(place)}
    assert roots - {".keep"} == {"step_00000002", "step_00000003"}
    params, meta = load_params(place)
    _assert_same(params, _state(3).params)
    assert meta["step"] == 3


def test_parameters_are_loaded_in_the_dtype_that_place_gives(saved):
    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float16 if name == "embedding" else leaf.dtype)

    params, _ = load_params(saved, place=place)
    expected = _state(2).params
    _assert_same(params, expected | {"embedding": expected["embedding"].astype(jnp.float16)})


def test_a_state_donated_right_after_saving_is_saved_as_it_was(place):
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    value = jnp.arange(1_000_000.0)
    expected = np.array(value)
    step(value + 0)  # compiled beforehand, so that the steps below run while the save is writing
    with Checkpoints(place, keep=1) as saved:
        saved.save(0, {"x": value}, {})
        for _ in range(5):
            value = step(value)
        restored = saved.restore({"x": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)})
    np.testing.assert_array_equal(restored.state["x"], expected)


def test_a_state_saved_on_one_mesh_is_restored_on_another(place):
    def placed(*shape: int) -> Any:
        devices = jax.devices()[: int(np.prod(shape))]
        mesh = jax.make_mesh(shape, ("data", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
        return lambda leaf: NamedSharding(mesh, P("fsdp") if leaf.ndim == 2 else P())

    state = _state(3)
    with Checkpoints(place, keep=1) as saved:
        saved.save(3, jax.tree.map(lambda x: jax.device_put(x, placed(1, 8)(x)), state), META)
        for there in (placed(2, 2), placed(8, 1), placed(1, 1)):
            wanted = jax.tree.map(
                lambda x, there=there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there(x)),
                state,
            )
            restored = saved.restore(wanted).state
            _assert_same(restored, state)
            same = jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, wanted)
            assert jax.tree.all(same)


def test_another_architecture_is_refused_naming_the_first_parameter(saved: Path):
    good = _abstract(_state(0))
    cases = [
        (_abstract(_state(0, width=7)), r"params/blocks/kernel is float32\[8,7\] .*float32\[8,6\]"),
        (good._replace(step=jax.ShapeDtypeStruct((), jnp.int8)), r"step is int8\[\] .*int32\[\]"),
        (good._replace(params={"blocks": good.params["blocks"]}), r"params/embedding is absent "),
        (good._replace(params={**good.params, "critic": good.step}), r"critic is int32\[\] .*abse"),
    ]
    with Checkpoints(saved, keep=2) as again:
        for wanted, message in cases:
            with pytest.raises(ValueError, match=message + ".*use its training config"):
                again.restore(wanted)


def _damage(path: Any, kind: str, bit: int) -> None:
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "short":
        path.write_bytes(content[:-1])
    else:
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        path.write_bytes(content)


def test_no_flip_and_no_deleted_or_shortened_file_changes_what_is_loaded(place):
    _save(place, 1, 2)
    rng, found = random.Random(0), 0
    files = _files(place / "step_00000002")
    is_bucket = not isinstance(place, Path)
    cases = [(path, kind) for path in files for kind in ("missing", "short")]
    cases += [(rng.choice(files), "flip") for _ in range(20)]
    if is_bucket:
        cases = [(max(files, key=lambda path: len(path.read_bytes())), "flip")]
        cases += [(path, "missing") for path in files if path.name == "commit_success.txt"]
    for path, kind in cases:
        original = path.read_bytes()
        _damage(path, kind, rng.randrange(8 * len(original) or 1))
        lines: list[str] = []
        with Checkpoints(place, keep=2) as again:
            restored = again.restore(_abstract(_state(0)), report=lines.append)
            meta = again.read_meta(report=lines.append)
        # A flip in bytes that are not read does no harm.
        _assert_same(restored.state, _state(restored.step))
        assert restored.meta == meta == {**META, "step": restored.step}
        # Without its last object, a bucket holds no checkpoint, only what a save left unfinished.
        is_unfinished = is_bucket and kind == "missing"
        assert len(lines) == (restored.step == 1 and not is_unfinished)
        assert all("using step 1" in line and str(place) in line for line in lines)
        found += restored.step == 1
        path.write_bytes(original)
    assert found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("size", [(), (3, 4, 2), (600, 600)])
def test_a_checksum_sees_every_flip_and_swap_and_no_sharding(dtype: str, size: tuple[int, ...]):
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    values = np.random.default_rng(0).integers(0, 2, size).astype(dtype)
    (expected,) = checksums({"a": jnp.asarray(values)}).values()
    for axis in range(len(size)):
        if size[axis] % 8 == 0:
            placed = jax.device_put(values, NamedSharding(mesh, P(*[None] * axis, "x")))
            assert checksums({"a": placed}) == {"a": expected}
    assert checksums({"a": jax.device_put(values, NamedSharding(mesh, P()))}) == {"a": expected}
    rng = random.Random(0)
    for _ in range(10):
        changed = np.array(values)
        data = changed.reshape(-1).view(np.uint8)
        bit = 0 if dtype == "bool" else rng.randrange(8)
        data[rng.randrange(data.size)] ^= 1 << bit
        assert checksums({"a": jnp.asarray(changed)}) != {"a": expected}
    if len(size) > 1 and (values[0] != values[1]).any():
        swapped = np.concatenate([values[1::-1], values[2:]])
        assert checksums({"a": jnp.asarray(swapped)}) != {"a": expected}


def test_training_goes_on_from_the_fallback_and_a_damaged_one_is_replaced(place):
    _save(place, 1, 2)
    _damage(place / "step_00000002" / MANIFEST, "flip", 99)
    with Checkpoints(place, keep=2) as again:
        assert again.restore(_abstract(_state(0)), report=lambda line: None).step == 1
        assert again.save(2, _state(2), META)
        again.wait()
        _assert_same(again.restore(_abstract(_state(0))).state, _state(2))
        assert again.steps() == [1, 2]


def test_an_unfinished_save_is_no_checkpoint_and_goes_with_the_next(tmp_path, monkeypatch):
    def fail(path: Any) -> None:
        raise OSError("the network is gone")

    with Checkpoints(tmp_path, keep=3) as saved:
        saved.save(1, _state(1), META)
        saved.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "sync", fail)
            saved.save(2, _state(2), META)
            with pytest.raises(OSError, match="the network is gone"):
                saved.wait()
        assert saved.steps() == [1]
        assert saved.restore(_abstract(_state(0))).step == 1
        saved.save(3, _state(3), META)
        saved.wait()
        assert saved.steps() == [1, 3]
    assert not [path for path in _files(tmp_path) if "step_00000002" in str(path)]


def _several_runs(copy: Path) -> None:
    with Checkpoints(copy, keep=3) as again:
        again.save(3, _state(3), {"run": "another"})


def _other_format(copy: Path) -> None:
    facts = {"format": 99, "versions": "jax 1"}
    crc = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    (copy / "step_00000002" / MANIFEST).write_text(json.dumps(facts | {"crc": crc}))


def _all_damaged(copy: Path) -> None:
    for step in (1, 2):
        (copy / f"step_0000000{step}" / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (None, "nowhere", "does not exist; pass the directory of a run"),
        (lambda copy: (copy / "file").touch(), "file", "not a directory; pass a directory"),
        (None, "step_00000001", "has no complete checkpoint; pass"),
        (_several_runs, "", "contains checkpoints of several runs .*; move"),
        (_other_format, "", "has format 99, but this program reads 2; use the"),
        (_all_damaged, "", "no usable checkpoint.* cannot be read .*; restart in another"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(copy, change, where, message):
    if change is not None:
        change(copy)
    with pytest.raises(ValueError, match=message) as error:
        load_params(copy / where)
    assert "\n" not in str(error.value)


def test_urls_that_orbax_does_not_write_are_refused(monkeypatch):
    monkeypatch.setattr(checkpoints, "_BUCKETS", ("gs://",))
    for url, message in [
        ("ftp://bucket", "ftp://bucket is a URL of an unknown kind"),
        ("s3://pail", "no checkpoints to s3://pail; use gs://, or mount the bucket"),
    ]:
        with pytest.raises(ValueError, match=message):
            Checkpoints(url, keep=1)


def test_starting_again_from_a_step_removes_it_and_later_ones(tmp_path: Path):
    _save(tmp_path, 1, 2, 3, keep=3)
    with Checkpoints(tmp_path, keep=3) as again:
        again.remove_from(2)
        assert again.steps() == [1]


def test_files_and_links_in_the_place_of_directories_stop_no_save(tmp_path: Path):
    (tmp_path / "2024").mkdir()
    for name in ("step_00000002", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "step_00000003").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_00000003.orbax-checkpoint-tmp").symlink_to(tmp_path / "2024")
    _save(tmp_path, 2, 3, keep=1)
    assert load_params(tmp_path)[1]["step"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"2024", "notes.txt", "step_00000003"}


@pytest.mark.parametrize("fault", ["rename", "prune"])
def test_a_failure_at_any_moment_leaves_a_good_checkpoint(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail_halfway(path: Any, **kwargs: Any) -> None:
        next(Path(path).glob(f"**/{MANIFEST}")).unlink()
        fail()

    _save(tmp_path, 1, keep=1)
    with Checkpoints(tmp_path, keep=1) as saved:
        with monkeypatch.context() as patch:
            name, stub = {"rename": ("os.rename", fail), "prune": ("shutil.rmtree", fail_halfway)}[
                fault
            ]
            patch.setattr(name, stub)
            saved.save(2, _state(2), {**META, "step": 2})
            with pytest.raises(OSError, match="No space left"):
                saved.wait()
        expected = 1 if fault == "rename" else 2
        restored = saved.restore(_abstract(_state(0)))
        assert restored.step == expected
        _assert_same(restored.state, _state(expected))
        assert saved.save(3, _state(3), META)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_no_thread_and_no_chatter_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    before = set(threading.enumerate())
    caplog.set_level(logging.INFO)
    _save(tmp_path, 1)
    load_params(tmp_path)
    deadline = time.monotonic() + 5  # Orbax's event loops end their idle threads a moment later
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")


def _python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    paths = f"{tiny_run.ROOT}:{tiny_run.ROOT / 'tests'}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **environment},
    )


_TOO_LARGE = """
import errno, resource, sys, jax.numpy as jnp
from dlm_jax.store import Checkpoints
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
checkpoints = Checkpoints(sys.argv[1], keep=2)
try:
    checkpoints.save(1, {"x": jnp.arange(4096.0)}, {})
    checkpoints.wait()
except OSError as error:
    print(error.errno == errno.EFBIG, error.filename, error.strerror)
checkpoints.close(together=False)
"""


def test_a_file_that_may_not_grow_is_an_error_of_the_operating_system(tmp_path: Path):
    out, _ = _python(_TOO_LARGE, tmp_path).communicate(timeout=100)
    assert out == f"True {tmp_path / 'step_00000001'} File too large\n"


_SAVE_FOREVER = """
import sys, jax, jax.numpy as jnp
from dlm_jax.store import Checkpoints
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    step = 1 + max(checkpoints.steps(), default=0)
    while True:
        state = {"params": {"x": jnp.full((64, 65), float(step))}, "step": jnp.int32(step)}
        checkpoints.save(step, state, {"step": step})
        print(step, flush=True)
        step += 1
"""


def test_a_process_killed_at_any_moment_leaves_a_state_that_was_saved(tmp_path: Path):
    rng = random.Random(0)
    x, step = jax.ShapeDtypeStruct((64, 65), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    for _ in range(3):
        with _python(_SAVE_FOREVER, tmp_path) as child:
            assert child.stdout is not None
            begun = [int(child.stdout.readline()), int(child.stdout.readline())]
            time.sleep(rng.uniform(0, 0.3))
            child.send_signal(signal.SIGKILL)
            last = max(*begun, *map(int, child.stdout.read().split()))
        lines: list[str] = []
        with Checkpoints(tmp_path, keep=2) as again:
            restored = again.restore({"params": {"x": x}, "step": step}, report=lines.append)
        assert lines == []
        assert last - 1 <= restored.step <= last + 1
        assert int(restored.state["step"]) == restored.step == restored.meta["step"]
        np.testing.assert_array_equal(restored.state["params"]["x"], float(restored.step))


_TWO_PROCESSES = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
import buckets
from dlm_jax.store import Checkpoints
from dlm_jax.store.files import located
buckets.let_orbax_reach_s3()
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
shardings = {"params": {"x": NamedSharding(mesh, P("fsdp"))}, "step": NamedSharding(mesh, P())}
start = lambda: {"params": {"x": jnp.arange(32.0).reshape(8, 4)}, "step": jnp.int32(5)}
state = jax.jit(start, out_shardings=shardings)()
with Checkpoints(directory, keep=2) as checkpoints:
    meta = {"config": {"model": {}}, "tokenizer": {}}
    for step in (4, 5):
        assert checkpoints.save(step, state, meta | {"step": step})
    assert not checkpoints.save(5, state, {"step": 5})
    checkpoints.wait()
    assert checkpoints.steps() == [4, 5], checkpoints.steps()
    restored = checkpoints.restore(state)
    for shard in restored.state["params"]["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(32.0).reshape(8, 4)[shard.index])
    try:
        checkpoints.restore({"other": state["step"]})
    except ValueError as error:
        print(error)
    checkpoints.save(6, state, meta | {"step": 6})
    checkpoints.wait()
    if index == 1:
        for depth in ("d/*", "*/d/*"):
            for path in located(directory).glob(f"step_00000006/state/{depth}"):
                path.write_bytes(path.read_bytes()[:5])
    multihost_utils.sync_global_devices("damaged")
    assert checkpoints.restore(state, report=print).step == 5
"""


@pytest.mark.slow
def test_two_processes_save_what_one_process_restores(place):
    port, environment = tiny_run.free_port(), {}
    if not isinstance(place, Path):
        environment = buckets.environment()
    children = [_python(_TWO_PROCESSES, n, port, place, **environment) for n in range(2)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert "using step 5 instead" in outputs[0] and "using step" not in outputs[1]
    assert all("other is int32[] in this run but absent" in output for output in outputs)
    params, meta = load_params(place, report=lambda line: None)
    assert meta["step"] == 5
    np.testing.assert_array_equal(params["x"], np.arange(32.0).reshape(8, 4))


@pytest.mark.slow
def test_a_run_continues_from_a_bucket_and_samples_come_from_it(tmp_path):
    given = {"train__steps": 6, "train__checkpoint_every": 2, "train__eval_every": 0}
    expected = tiny_run.run(tmp_path / "whole", **given)
    with buckets.bucket() as url:
        given["train__checkpoint_dir"] = f"{url}/run"
        with pytest.MonkeyPatch.context() as patch:
            tiny_run.stop_after(3, patch)
            tiny_run.run(tmp_path / "one", **given)
        # Another machine, whose disk is empty.
        outcome = tiny_run.run(tmp_path / "two", **given)
        tiny_run.assert_same(outcome.state, expected.state)
        tiny_run.assert_same(load_params(f"{url}/run")[0], expected.state.params)


def test_errors_of_reads_that_end_after_a_failed_save_are_hidden_and_no_others(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda late: said.append(str(late.exc_value)))
    checkpoints.quiet_orbax.__wrapped__()
    for line in ("Event loop is closed", "a bug"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(line)))  # type: ignore[arg-type]
    assert said == ["a bug"]
