from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.store import Checkpoints, load_params
from dlm_jax.store.checkpoints import quiet_orbax, step_path
from dlm_jax.store.manifest import checksums

MANIFEST = "manifest/metadata"
ROOT = Path(__file__).parents[2]
META = {"config": {"model": {"depth": 2}}, "tokenizer": "byte", "data": {"next": [1, 2]}}


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


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _save(directory: Path, *steps: int, keep: int = 2) -> Path:
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, _state(step), {**META, "step": step})
    return step_path(directory, steps[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2; tests that change files work on a copy."""
    directory = tmp_path_factory.mktemp("saved")
    _save(directory, 1, 2)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_what_is_restored_is_what_was_saved_bit_for_bit(saved: Path):
    with Checkpoints(saved, keep=2) as checkpoints:
        for step in (2, 1):
            restored = checkpoints.restore(_abstract(_state(0)), step=step)
            _assert_same(restored.state, _state(step))
            assert (restored.step, restored.meta) == (step, {**META, "step": step})
        assert checkpoints.restore(_abstract(_state(0))).step == 2
        assert checkpoints.read_meta()["step"] == 2


def test_a_state_donated_right_after_saving_is_saved_as_it_was(tmp_path: Path):
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    value = jnp.arange(4_000_000.0)
    expected = np.array(value)
    step(value + 0)  # compiled beforehand, so that the steps below run while the save is writing
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, {"x": value}, {})
        for _ in range(5):
            value = step(value)
        restored = checkpoints.restore({"x": jax.ShapeDtypeStruct((4_000_000,), jnp.float32)})
    np.testing.assert_array_equal(restored.state["x"], expected)


def test_a_state_saved_on_one_mesh_is_restored_on_another(tmp_path: Path):
    def mesh_of(*shape: int) -> jax.sharding.Mesh:
        count = int(np.prod(shape))
        return jax.make_mesh(
            shape, ("data", "fsdp"), (AxisType.Auto,) * 2, devices=jax.devices()[:count]
        )

    def spec_of(leaf: jax.Array) -> P:
        return P("fsdp") if leaf.ndim == 2 else P()

    state = _state(3)
    here = mesh_of(1, 8)
    placed = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(here, spec_of(x))), state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, placed, META)
        for there in (mesh_of(2, 2), mesh_of(8, 1), mesh_of(1, 1)):
            wanted = jax.tree.map(
                lambda x, mesh=there: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x))
                ),
                state,
            )
            restored = checkpoints.restore(wanted).state
            _assert_same(restored, state)
            assert jax.tree.all(
                jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, wanted)
            )
    _assert_same(load_params(tmp_path)[0], state.params)


def test_params_are_read_without_the_rest_or_knowing_the_architecture(saved: Path):
    params, meta = load_params(saved)
    _assert_same(params, _state(2).params)
    assert meta["step"] == 2
    assert load_params(saved, step=1)[1]["step"] == 1


def test_params_are_found_below_the_directory_of_a_run(tmp_path: Path):
    _save(tmp_path / "run" / "checkpoints", 1)
    _assert_same(load_params(tmp_path / "run")[0], _state(1).params)


def test_params_follow_the_shapes_built_from_the_meta(saved: Path):
    def abstract_params(meta: dict[str, Any]) -> Any:
        assert meta["config"] == META["config"]
        return _abstract(_state(0).params)

    _assert_same(load_params(saved, abstract_params)[0], _state(2).params)
    with pytest.raises(ValueError, match=r"params/blocks/kernel is float32\[8,7\] .*\[8,6\]"):
        load_params(saved, lambda meta: _abstract(_state(0, width=7).params))


def test_another_architecture_is_refused_naming_the_first_parameter(saved: Path):
    good = _abstract(_state(0))
    other_dtype = good._replace(step=jax.ShapeDtypeStruct((), jnp.int8))
    without = good._replace(params={"blocks": good.params["blocks"]})
    more = good._replace(params={**good.params, "critic": good.step})
    cases = [
        (_abstract(_state(0, width=7)), r"params/blocks/kernel is float32\[8,7\] .*float32\[8,6\]"),
        (other_dtype, r"step is int8\[\] .*int32\[\]"),
        (without, r"params/embedding is absent .*float32\[16,1\]"),
        (more, r"params/critic is int32\[\] .*absent"),
    ]
    with Checkpoints(saved, keep=2) as checkpoints:
        for wanted, message in cases:
            with pytest.raises(ValueError, match=message + ".*use the training config") as error:
                checkpoints.restore(wanted)
            assert "\n" not in str(error.value)


def test_random_bit_flips_are_detected_and_the_previous_checkpoint_is_used(copy: Path):
    rng = random.Random(0)
    stored = _files(copy / "step_00000002")
    detected = 0
    for _ in range(20):
        path = rng.choice(stored)
        original = path.read_bytes()
        flipped = bytearray(original)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        lines: list[str] = []
        with Checkpoints(copy, keep=2) as checkpoints:
            restored = checkpoints.restore(_abstract(_state(0)), report=lines.append)
            again = checkpoints.read_meta(report=lines.append)
        # A flip in bytes that are not read does no harm.
        _assert_same(restored.state, _state(restored.step))
        assert restored.meta == again == {**META, "step": restored.step}
        assert len(lines) == (restored.step == 1)
        for line in lines:
            detected += 1
            assert "\n" not in line and "using step 1" in line
            assert str(copy / "step_00000002") in line
        path.write_bytes(original)
    assert detected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32"])
@pytest.mark.parametrize("size", [(), (5,), (3, 4, 2), (600, 600)])
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


def test_no_deleted_or_shortened_file_changes_what_is_loaded(copy: Path):
    steps = set()
    for path in _files(copy / "step_00000002"):
        original = path.read_bytes()
        for damage in (path.unlink, lambda path=path: path.write_bytes(path.read_bytes()[:-1])):
            damage()
            params, meta = load_params(copy, report=lambda line: None)
            _assert_same(params, _state(meta["step"]).params)
            steps.add(meta["step"])
            path.write_bytes(original)
    assert 1 in steps


def test_damage_without_a_fallback_is_one_line_with_a_remedy(copy: Path):
    shutil.rmtree(copy / "step_00000002" / "state")
    with pytest.raises(ValueError, match="cannot be read.*; try another step"):
        load_params(copy, step=2)
    (copy / "step_00000001" / MANIFEST).unlink()
    with Checkpoints(copy, keep=2) as checkpoints:
        with pytest.raises(ValueError, match="no usable checkpoint.*; restart") as error:
            checkpoints.restore(_abstract(_state(0)))
    assert "\n" not in str(error.value)


def test_training_goes_on_from_the_fallback_and_sets_the_damaged_one_aside(copy: Path):
    (copy / "step_00000002" / MANIFEST).write_bytes(b"{}")
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.restore(_abstract(_state(0)), report=lambda line: None).step == 1
        assert checkpoints.save(2, _state(2), META)
        checkpoints.wait()
        _assert_same(checkpoints.restore(_abstract(_state(0)), step=2).state, _state(2))
        assert checkpoints.steps() == [1, 2]
    assert (copy / "step_00000002.damaged").is_dir()


def _directory(kind: str, copy: Path) -> Path:
    path = copy.parent / "case"
    if kind == "file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
    if kind == "foreign":
        (path / "2024").mkdir()
    if kind == "unfinished":
        (path / "step_00000001.orbax-checkpoint-tmp").mkdir()
    if kind == "one step":
        return copy / "step_00000001"
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "does not exist; check the path"),
        ("file", "is a file, .*; pass a directory"),
        ("empty", "is empty; train until"),
        ("foreign", "is not a checkpoint directory .*; check"),
        ("unfinished", "only an unfinished checkpoint; train"),
        ("one step", "is a single checkpoint; pass its parent directory"),
    ],
)
def test_a_directory_without_checkpoints_is_named_with_a_remedy(
    kind: str, message: str, copy: Path
):
    path = _directory(kind, copy)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message) as error:
        load_params(path)
    assert "\n" not in str(error.value)


def test_another_format_or_step_is_refused_with_a_remedy(copy: Path):
    with pytest.raises(ValueError, match=r"step=7 in .*existing steps are \[1, 2\]"):
        load_params(copy, step=7)
    for facts, message in [
        ({"format": 99, "versions": "jax 1"}, "has format 99, but this program reads 2; use the"),
        (None, "was written by dlm_jax 0.2, which this version does not read; continue the run"),
    ]:
        path = copy / "step_00000002"
        if facts is None:
            (path / MANIFEST).unlink()
            (path / "manifest.json").touch()
        else:
            crc = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
            (path / MANIFEST).write_text(json.dumps(facts | {"crc": crc}))
        with pytest.raises(ValueError, match=message) as error:
            load_params(copy)
        assert "\n" not in str(error.value)
    with Checkpoints(copy, keep=1) as checkpoints:
        assert checkpoints.steps() == [1, 2]


def test_bad_arguments_are_refused_and_nothing_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match="keep=0.*use 1"):
        Checkpoints(tmp_path / "a", keep=0)
    with pytest.raises(ValueError, match="ftp://bucket is a URL of an unknown kind"):
        Checkpoints("ftp://bucket", keep=1)
    with Checkpoints(tmp_path / "a", keep=1) as checkpoints:
        for step, state, meta, message in [
            (-1, _state(0), {}, "step=-1 .*start at 0"),
            (0, {"step": 3}, {}, "state step is a int; use a JAX array"),
            (0, _state(0), {"x": object()}, "meta is not JSON .*; use"),
        ]:
            with pytest.raises(ValueError, match=message):
                checkpoints.save(step, state, meta)
    assert list(tmp_path.iterdir()) == []


def test_a_complete_step_is_not_saved_again_nor_an_older_one(copy: Path):
    before = {path: path.read_bytes() for path in _files(copy)}
    with Checkpoints(copy, keep=2) as checkpoints:
        assert not checkpoints.save(2, _state(9), META)
        with pytest.raises(ValueError, match="step=0 is before step 2"):
            checkpoints.save(0, _state(0), META)
    assert {path: path.read_bytes() for path in _files(copy)} == before


def test_the_newest_are_kept_and_other_files_are_left_alone(tmp_path: Path):
    (tmp_path / "2024").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step_00000001.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "step_00000001.orbax-checkpoint-tmp-5").mkdir()
    (tmp_path / ".deleted" / "step_00000001").mkdir(parents=True)
    _save(tmp_path, 1, 2, 3, 10, keep=3)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"2024", "notes.txt", "step_00000002", "step_00000003", "step_00000010"}


@pytest.mark.parametrize(("step", "left"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2, 3])])
def test_starting_again_from_a_step_removes_it_and_later_ones(tmp_path: Path, step, left):
    _save(tmp_path, 1, 2, 3, keep=3)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.remove_from(step)
        assert checkpoints.steps() == left


def test_files_and_links_in_the_place_of_directories_stop_no_save(tmp_path: Path):
    (tmp_path / "linked").mkdir()
    _save(tmp_path / "linked", 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "step_00000001").symlink_to(tmp_path / "linked" / "step_00000001")
    for name in ("step_00000002", "step_00000002.damaged", ".deleted"):
        (root / name).touch()
    (root / "step_00000003").symlink_to(tmp_path / "nowhere")
    (root / "step_00000003.orbax-checkpoint-tmp").symlink_to(tmp_path / "linked")
    _save(root, 2, 3, keep=1)
    assert load_params(root)[1]["step"] == 3
    names = {path.name for path in root.iterdir()}
    assert names == {"step_00000003", "step_00000002.damaged", "step_00000003.damaged"}
    assert load_params(tmp_path / "linked")[1]["step"] == 1, "what is linked to stays"


@pytest.mark.parametrize("fault", ["rename", "prune", "delete"])
def test_a_failure_at_any_moment_leaves_a_good_checkpoint(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail_halfway(path: Path, **kwargs: Any) -> None:
        if path.exists():
            next(path.glob(f"**/{MANIFEST}")).unlink()
            fail()

    _save(tmp_path, 1, keep=1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with monkeypatch.context() as patch:
            if fault == "rename":
                patch.setattr(os, "rename", fail)
            elif fault == "prune":
                patch.setattr(os, "replace", fail)
            else:
                patch.setattr("dlm_jax.store.files.shutil.rmtree", fail_halfway)
            checkpoints.save(2, _state(2), {**META, "step": 2})
            with pytest.raises(OSError, match="No space left"):
                checkpoints.wait()
        for step in checkpoints.steps():
            assert load_params(tmp_path, step=step)[1]["step"] == step
        expected = 1 if fault == "rename" else 2
        restored = checkpoints.restore(_abstract(_state(0)))
        assert restored.step == expected
        _assert_same(restored.state, _state(expected))
        assert checkpoints.save(3, _state(3), META)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_no_thread_and_no_chatter_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    before = set(threading.enumerate())
    caplog.set_level(logging.INFO)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, _state(1), META)
    load_params(tmp_path)
    deadline = time.monotonic() + 5  # Orbax's event loops end their idle threads a moment later
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert checkpoints.steps() == [1]
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")


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


def test_orbax_logs_what_it_does_not_raise_and_nothing_else_is_held_back(caplog):
    quiet_orbax()
    logger = logging.getLogger("absl")
    for level, path in ((40, "orbax/x.py"), (30, "orbax/x.py"), (40, "own/x.py")):
        logger.handle(logging.LogRecord("absl", level, path, 1, f"{level} {path}", (), None))
    assert caplog.messages == ["30 orbax/x.py", "40 own/x.py"]


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


def _python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


def test_a_process_killed_at_any_moment_leaves_a_state_that_was_saved(tmp_path: Path):
    rng = random.Random(0)
    abstract = {
        "params": {"x": jax.ShapeDtypeStruct((64, 65), jnp.float32)},
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    for _ in range(4):
        with _python(_SAVE_FOREVER, tmp_path) as child:
            assert child.stdout is not None
            begun = int(child.stdout.readline())
            begun = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            child.send_signal(signal.SIGKILL)
            begun = max([begun, *map(int, child.stdout.read().split())])
        lines: list[str] = []
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            restored = checkpoints.restore(abstract, report=lines.append)
        assert lines == []
        assert begun - 1 <= restored.step <= begun + 1
        assert int(restored.state["step"]) == restored.step == restored.meta["step"]
        np.testing.assert_array_equal(restored.state["params"]["x"], float(restored.step))


_TWO_PROCESSES = """
import sys, jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
from dlm_jax.store import Checkpoints
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
shardings = {"params": {"x": NamedSharding(mesh, P("fsdp"))}, "step": NamedSharding(mesh, P())}
start = lambda: {"params": {"x": jnp.arange(32.0).reshape(8, 4)}, "step": jnp.int32(5)}
state = jax.jit(start, out_shardings=shardings)()
with Checkpoints(directory, keep=1) as checkpoints:
    try:
        checkpoints.save(4, {"x": jnp.ones(3)}, {})
    except ValueError as error:
        print(error)
    for step in (4, 5):
        assert checkpoints.save(step, state, {"step": step})
    assert not checkpoints.save(5, state, {"step": 5})
    checkpoints.wait()
    assert checkpoints.steps() == [5], checkpoints.steps()
    restored = checkpoints.restore(state)
    for shard in restored.state["params"]["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(32.0).reshape(8, 4)[shard.index])
    try:
        checkpoints.restore({"other": state["step"]})
    except ValueError as error:
        print(error)
    checkpoints.save(6, state, {"step": 6})
with Checkpoints(directory + "/more", keep=2) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state, {"step": step})
    checkpoints.wait()
    if index == 1:
        for path in Path(directory, "more", "step_00000002", "state").rglob("d/*"):
            path.write_bytes(path.read_bytes()[:5])
    multihost_utils.sync_global_devices("damaged")
    assert checkpoints.restore(state, report=print).step == 1
"""


@pytest.mark.slow
def test_two_processes_save_what_one_process_restores(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_python(_TWO_PROCESSES, index, port, tmp_path) for index in range(2)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert "using step 1 instead" in outputs[0] and "using step 1" not in outputs[1]
    for output in outputs:
        assert "state x is in one process only" in output
        assert "other is int32[] in this run but absent" in output
    params, meta = load_params(tmp_path)
    assert meta == {"step": 6}
    np.testing.assert_array_equal(params["x"], np.arange(32.0).reshape(8, 4))
