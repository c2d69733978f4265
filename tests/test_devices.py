"""The devices that a program is traced for are those it will run on, wherever it is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from dlm_jax import devices
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.partitions import make_mesh


def on(platform: str, size: int = 4) -> AbstractMesh:
    """A mesh of devices that need not be there."""
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    return AbstractMesh((size,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize(
    ("name", "platform"), [("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("cpu", "cpu")]
)
def test_the_platform_is_that_of_the_devices_in_use(name, platform):
    with jax.sharding.use_abstract_mesh(on(name)):
        assert devices.platform() == platform
    assert devices.platform() == jax.default_backend()


def test_a_trace_for_other_devices_is_not_taken_again():
    seen = []

    @jax.jit
    def inner(x):
        seen.append(devices.platform())
        return x

    for name in ("cpu", "tpu", "tpu"):
        with jax.sharding.use_abstract_mesh(on(name)):
            jax.eval_shape(inner, jnp.zeros(4))
    assert seen == ["cpu", "tpu"]


def test_one_device_of_this_process_is_named_by_nothing():
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    with devices.used(one):
        assert jax.sharding.get_abstract_mesh().empty
        assert devices.mesh_in_use() is None


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [("gpu", None, "highest"), ("gpu", "bfloat16", "bfloat16"), ("tpu", None, None)],
)
def test_exact_products_are_those_of_gpus_unless_the_user_chooses(platform, given, expected):
    with (
        jax.sharding.use_abstract_mesh(on(platform)),
        jax.default_matmul_precision(given),
        devices.exact(),
    ):
        assert jax.config.jax_default_matmul_precision == expected


def test_inside_a_shard_map_each_device_stands_alone():
    mesh = make_mesh(MeshConfig(fsdp=2))
    found = []

    def own(x):
        found.append(devices.mesh_in_use())
        return x

    with devices.used(mesh):
        assert devices.mesh_in_use() is not None
        jax.eval_shape(jax.shard_map(own, in_specs=P("data"), out_specs=P("data")), jnp.zeros(8))
    assert found == [None]
