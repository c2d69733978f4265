from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dlm_jax import devices
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.mesh import AXES
from dlm_jax.distributed.partitions import PLACES, fitting, make_mesh, on_own_share, pin

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize("kind", list(PLACES))
def test_every_place_splits_rows_first_and_names_axes_of_a_mesh(kind):
    spec = PLACES[kind]
    assert spec[0] == ("data", "fsdp", "expert")
    named = [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]
    assert set(named) <= set(AXES)
    assert len(set(named)) == len(named)


def test_axes_that_a_mesh_lacks_or_that_do_not_divide_are_left_out():
    mesh = make_mesh(CUBE)
    assert fitting(PLACES["hidden"], (8, 6, 4), mesh) == P(("data", "fsdp"), None, None)
    assert fitting(PLACES["hidden"], (6, 6, 4), mesh) == P(None, None, None)
    assert fitting(PLACES["queries"], (8, 6, 3, 4), mesh) == P(("data", "fsdp"), None, None, None)
    assert fitting(PLACES["losses"], (8, 6), mesh) == P(("data", "fsdp"), "tensor")


def test_a_pinned_array_lies_in_its_place_and_one_device_is_left_alone():
    mesh = make_mesh(CUBE)

    def pinned(x):
        with devices.used(mesh):
            return pin(x, "inner")

    x = jnp.arange(8 * 3 * 4.0).reshape(8, 3, 4)
    y = jax.jit(pinned)(jax.device_put(x, jax.sharding.NamedSharding(mesh, P())))
    assert y.sharding.spec == P(("data", "fsdp"), None, "tensor")
    np.testing.assert_array_equal(x, y)
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: pin(x, "inner"))(x))


def test_shares_give_the_values_and_gradients_of_the_whole_with_every_parameter_gathered_once():
    mesh = make_mesh(CUBE)
    params = {"kernel": jnp.arange(12.0).reshape(4, 3) / 7, "unread": jnp.ones((4, 4))}
    x = jnp.sin(jnp.arange(8 * 6 * 4.0)).reshape(8, 6, 4)

    def compute(params, x_BLD):
        def one(x_BD):
            return jnp.sum(jnp.tanh(x_BD @ params["kernel"]), axis=-1)

        return jax.lax.map(one, x_BLD.swapaxes(0, 1)).T

    def total(params, x):
        return jnp.sum(on_own_share(compute, params, (x,), kind="losses") ** 2)

    def on_mesh(params, x):
        with devices.used(mesh):
            return jax.value_and_grad(total, (0, 1))(params, x)

    expected = jax.value_and_grad(total, (0, 1))(params, x)
    place = jax.sharding.NamedSharding(mesh, P("fsdp"))
    split = {"kernel": jax.device_put(params["kernel"], place), "unread": params["unread"]}
    found = jax.jit(on_mesh)(split, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected
    )
    text = jax.jit(on_mesh).lower(split, x).compile().as_text()
    assert text.count("all-gather(") == 1
