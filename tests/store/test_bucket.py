"""Checkpoints in buckets keep what `test_store` says of those on disks."""

from __future__ import annotations

import errno
import functools
import gc
import subprocess
import sys
from pathlib import Path

import buckets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.store import Checkpoints, files, load_params
from dlm_jax.store.files import check_bucket, copy_whole, located, replacing

pytestmark = pytest.mark.filterwarnings("default")

META = {"config": {"x": 1}}


@pytest.fixture
def s3():
    with buckets.bucket() as url:
        yield url


def _state(step: int) -> dict:
    return {
        "params": {
            "blocks": {"kernel": jnp.arange(48.0).reshape(8, 6) * step},
            "half": jnp.full((3,), step, jnp.bfloat16),
        },
        "count": jnp.int32(step),
        "key": jax.random.key(step),
    }


def _abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _assert_same(left, right):
    def plain(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b)), left, right)


def test_what_was_saved_is_restored_and_only_the_newest_are_kept(s3):
    root = f"{s3}/run/checkpoints"
    with Checkpoints(root, keep=2) as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, _state(step), {**META, "step": step})
        assert not checkpoints.save(3, _state(3), META)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        with pytest.raises(ValueError, match="step=1 is before step 3"):
            checkpoints.save(1, _state(1), META)
        restored = checkpoints.restore(_abstract(_state(0)))
    assert (restored.step, restored.meta) == (3, {**META, "step": 3})
    _assert_same(restored.state, _state(3))
    left = {
        str(path).removeprefix(root).split("/")[1] for path in buckets.files_under(located(root))
    }
    assert left == {".keep", "step_00000002", "step_00000003"}
    params, meta = load_params(f"{s3}/run", step=2)
    _assert_same(params, _state(2)["params"])
    assert meta["step"] == 2


def test_a_state_may_be_donated_while_it_is_written(s3):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"params": {"x": step(jnp.zeros((64, 64)))}}
    with Checkpoints(s3, keep=1) as checkpoints:
        checkpoints.save(1, state, META)
        state = {"params": {"x": step(state["params"]["x"])}}
    np.testing.assert_array_equal(load_params(s3)[0]["x"], 1.0)


def test_a_checkpoint_of_one_mesh_is_restored_onto_any(s3):
    value = jnp.arange(64.0).reshape(8, 8)

    def placed(shape, spec):
        mesh = jax.make_mesh(
            shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
        )  # fmt: skip
        return NamedSharding(mesh, spec)

    with Checkpoints(s3, keep=9) as checkpoints:
        places = [((4, 2), P("a", "b")), ((2, 4), P(None, "b")), ((8, 1), P())]
        for number, (shape, spec) in enumerate(places):
            array = jax.device_put(value, placed(shape, spec))
            checkpoints.save(number, {"params": {"x": array}}, META)
            for other in places:
                wanted = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=placed(*other))
                found = checkpoints.restore({"params": {"x": wanted}}).state["params"]["x"]
                np.testing.assert_array_equal(found, value)
                assert found.sharding == wanted.sharding


def _object(root: str, name: str):
    return next(path for path in buckets.files_under(located(root)) if str(path).endswith(name))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("flip", "largest"),
        ("missing", "commit_success.txt"),
        *(
            pytest.param(damage, name, marks=pytest.mark.slow)
            for damage, name in [
                ("flip", "manifest.ocdbt"), ("flip", "manifest/metadata"), ("missing", "largest"),
                ("missing", "manifest.ocdbt"), ("missing", "manifest/metadata"),
            ]
        ),
    ],
)  # fmt: skip
def test_damage_is_found_and_the_checkpoint_before_is_used(s3, name, damage):
    state = lambda step: _state(step) | {"large": jax.random.normal(jax.random.key(step), (64, 64))}  # noqa: E731
    with Checkpoints(s3, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), META)
    paths = buckets.files_under(located(f"{s3}/step_00000002"))
    contents = {path: path.read_bytes() for path in paths}
    largest = max(map(len, contents.values()))
    for path, content in contents.items():
        is_it = len(content) == largest if name == "largest" else str(path).endswith(name)
        if is_it and damage == "missing":
            path.unlink()
        elif is_it:
            middle = len(content) // 2
            path.write_bytes(
                content[:middle] + bytes([content[middle] ^ 8]) + content[middle + 1 :]
            )
    lines: list[str] = []
    with Checkpoints(s3, keep=2) as checkpoints:
        restored = checkpoints.restore(_abstract(state(0)), report=lines.append)
        _assert_same(restored.state, state(restored.step))
        assert restored.step == 1
        assert checkpoints.save(2, state(5), META), "the damaged one is replaced"
        checkpoints.wait()
        _assert_same(checkpoints.restore(_abstract(state(0))).state, state(5))
    # Without its last object, a bucket holds no checkpoint, only what a save left unfinished.
    assert damage == "missing" and name == "commit_success.txt" or "damaged" in lines[0]


def test_an_unfinished_save_is_no_checkpoint_and_goes_with_the_next(s3):
    calls: list[None] = []

    def check():
        calls.append(None)
        if len(calls) == 4:  # while the second save is completed
            raise OSError("the network is gone")

    with Checkpoints(s3, keep=3, check=check) as checkpoints:
        checkpoints.save(1, _state(1), META)
        checkpoints.wait()
        checkpoints.save(2, _state(2), META)
        with pytest.raises(OSError, match="the network is gone"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        assert checkpoints.restore(_abstract(_state(0))).step == 1
        checkpoints.save(3, _state(3), META)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    assert not [p for p in buckets.files_under(located(s3)) if "step_00000002" in str(p)]


def test_buckets_that_are_not_there_or_of_another_kind_are_refused_in_one_line(s3, monkeypatch):
    with pytest.raises(ValueError, match="train.checkpoint_dir=s3://no-such-pail/x does not exist"):
        check_bucket("train.checkpoint_dir", "s3://no-such-pail/x")
    with pytest.raises(ValueError, match="ftp://host/x is a URL of an unknown kind"):
        Checkpoints("ftp://host/x", keep=1)
    check_bucket("train.checkpoint_dir", f"{s3}/deep/inside")
    assert buckets.files_under(located(s3)) == []


def test_a_bucket_that_does_not_let_one_in_is_refused(s3, monkeypatch):
    def closed(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(located(s3)), "write_bytes", closed)
    with pytest.raises(ValueError, match=rf"{s3} is not allowed \(Access Denied\); check the read"):
        check_bucket("train.checkpoint_dir", s3)


_ONE_OF_TWO = """
import sys, jax, jax.numpy as jnp, numpy as np
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
    for step in (4, 5):
        assert checkpoints.save(step, state, {"step": step})
    checkpoints.wait()
    assert checkpoints.steps() == [5], checkpoints.steps()
    restored = checkpoints.restore(state)
    for shard in restored.state["params"]["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(32.0).reshape(8, 4)[shard.index])
"""


@pytest.mark.slow
def test_two_processes_save_what_one_restores(s3):
    port = tiny_run.free_port()
    root = str(Path(__file__).parent.parent.parent)
    run = functools.partial(
        subprocess.Popen, stderr=subprocess.PIPE, text=True,
        env=dict(tiny_run.os.environ) | buckets.environment()
        | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    children = [
        run([sys.executable, "-c", _ONE_OF_TWO, str(index), str(port), s3]) for index in range(2)
    ]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    params, meta = load_params(s3)
    assert meta == {"step": 5}
    np.testing.assert_array_equal(params["x"], np.arange(32.0).reshape(8, 4))


@pytest.mark.slow
def test_a_run_continues_from_a_bucket_and_samples_come_from_it(s3, tmp_path):
    given = {"train__steps": 6, "train__checkpoint_every": 2, "train__eval_every": 0}
    expected = tiny_run.run(tmp_path / "whole", **given)
    with pytest.MonkeyPatch.context() as patch:
        tiny_run.stop_after(3, patch)
        tiny_run.run(tmp_path / "one", train__checkpoint_dir=f"{s3}/run", **given)
    # Another machine, whose disk is empty.
    outcome = tiny_run.run(tmp_path / "two", train__checkpoint_dir=f"{s3}/run", **given)
    tiny_run.assert_same(outcome.state, expected.state)
    tiny_run.assert_same(load_params(f"{s3}/run")[0], expected.state.params)


def _fail_to_write(path, size):
    with replacing(path) as file:
        file.write(b"x" * size)
        raise RuntimeError("in the block")


@pytest.mark.parametrize("size", [100, 6 << 20])
def test_a_block_that_raises_leaves_the_object_as_it_was(s3, size):
    old, new = located(f"{s3}/old"), located(f"{s3}/new")
    old.write_bytes(b"thirty bytes that stay as is...")
    for path in (old, new):
        with pytest.raises(RuntimeError, match="in the block"):
            _fail_to_write(path, size)
        gc.collect()  # a file that is not closed is closed
    assert old.read_bytes() == b"thirty bytes that stay as is..."
    assert buckets.files_under(located(s3)) == [old]
    with replacing(old) as file:
        file.write(b"y" * size)
    assert old.read_bytes() == b"y" * size


def test_a_file_is_copied_to_a_bucket_whole_or_not_at_all(s3, tmp_path, monkeypatch):
    source, target = located(tmp_path / "source"), located(f"{s3}/target")
    source.write_bytes(b"z" * 1000)
    copy_whole(source, target)
    assert target.read_bytes() == b"z" * 1000

    def broken(file, path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(files, "_read", broken)
    source.write_bytes(b"new")
    with pytest.raises(OSError, match="Input/output error"):
        copy_whole(source, target)
    assert target.read_bytes() == b"z" * 1000
