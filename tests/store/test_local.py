"""Laws of checkpoints on local disks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import tiny_run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.store import checkpoints as checkpoints_module
from dlm_jax.store.checkpoints import LocalCheckpoints, step_path
from dlm_jax.store.files import Damaged
from dlm_jax.store.manifest import plain

META = {"run": "a"}


def _state(step: int, num_devices: int = 8):
    mesh = jax.make_mesh(
        (num_devices,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:num_devices]
    )
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))
    return {
        "kernel": jax.device_put(jnp.arange(48.0).reshape(16, 3) / 7 + step, rows),
        "scale": jax.device_put(jnp.full(5, step / 3, jnp.bfloat16), whole),
        "step": jax.device_put(jnp.int32(step), whole),
        "key": jax.device_put(jax.random.key(step), whole),
    }


def _abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of the steps 2, 4 and 6, of which two are kept."""
    lines: list[str] = []
    checkpoints = LocalCheckpoints(tmp_path, lines.append)
    for step in (2, 4, 6):
        checkpoints.save(step, _state(step), META | {"step": step})
    checkpoints.wait()
    yield checkpoints, lines
    checkpoints.close()


def test_a_state_comes_back_bit_for_bit_with_its_shards(saved):
    checkpoints, lines = saved
    assert checkpoints.newest(_abstract(_state(0))) == 6
    found = checkpoints.restore(_abstract(_state(0)), step=6).state
    data = lambda tree: jax.tree.map(plain, tree)  # noqa: E731
    tiny_run.assert_same(data(found), data(_state(6)))
    assert jax.tree.map(lambda a: a.sharding, found) == jax.tree.map(
        lambda a: a.sharding, _state(6)
    )
    assert checkpoints.read_meta(step=6) == META | {"step": 6} and lines == []


def test_a_damaged_checkpoint_is_skipped_with_a_line(saved):
    checkpoints, lines = saved
    path = step_path(checkpoints.directory, 6) / "manifest" / "metadata"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    assert checkpoints.newest(_abstract(_state(0))) == 4
    assert len(lines) == 1 and "step 6" in lines[0] and "checksum" in lines[0]


def test_damaged_arrays_are_not_restored(saved):
    checkpoints, _ = saved
    for path in (step_path(checkpoints.directory, 6) / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes().replace(b"\x00", b"\x01"))
    abstract = _abstract(_state(0))
    assert checkpoints.newest(abstract) == 6
    with pytest.raises(Damaged, match="state (cannot be read|has a wrong checksum)"):
        checkpoints.restore(abstract, step=6)
    assert checkpoints.newest(abstract) == 4


def test_a_checkpoint_of_another_mesh_is_restored_where_a_process_has_its_shards(saved):
    checkpoints, _ = saved
    abstract = _abstract(_state(0, num_devices=4))
    assert checkpoints.newest(abstract) == 6
    data = lambda tree: jax.tree.map(plain, tree)  # noqa: E731
    tiny_run.assert_same(data(checkpoints.restore(abstract, step=6).state), data(_state(6)))
    assert checkpoints.newest({"kernel": _abstract(_state(0))["kernel"]}) is None


@pytest.mark.parametrize(
    ("others", "common"),
    [
        ({(2, "a"), (4, "a")}, 4), ({(4, "a"), (6, "a")}, 6), ({(2, "a")}, None), (set(), None),
        ({(4, "a"), (6, "another run")}, 4),
    ],
)  # fmt: skip
def test_only_a_step_that_all_hosts_have_is_restored(saved, monkeypatch, others, common):
    monkeypatch.setattr(checkpoints_module, "gathered", lambda own: [own, others])
    assert saved[0].newest(_abstract(_state(0))) == common


def test_a_failed_save_is_reported_and_later_steps_are_removed_before_they_are_repeated(saved):
    checkpoints, lines = saved
    checkpoints.save(5, _state(5), META)
    checkpoints.wait()
    assert len(lines) == 1 and lines[0].startswith("warning: no local checkpoint (step=5")
    checkpoints.remove_from(5)
    checkpoints.save(5, _state(5), META)
    checkpoints.wait()
    assert checkpoints.newest(_abstract(_state(0))) == 5
