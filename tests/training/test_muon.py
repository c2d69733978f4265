from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from dlm_jax import devices
from dlm_jax.config import MeshConfig, OptimConfig
from dlm_jax.distributed.partitions import make_mesh, shardings
from dlm_jax.training.optimisers import learning_rate, make_optimizer, orthogonalized, rates_of
from dlm_jax.types import Axes

CONFIG = OptimConfig(weight_decay=0.1)
STEPS = 100


def _tree(seed: int):
    rng = np.random.default_rng(seed)

    def kernel(*shape):
        return {"kernel": rng.standard_normal(shape).astype(np.float32)}

    attention = {"query": kernel(3, 8, 8), "key": kernel(3, 8, 4), "out": kernel(3, 8, 8)}
    mlp = {"up": kernel(3, 8, 24), "down": kernel(3, 24, 8)}
    experts = {"router": kernel(3, 8, 4), "expert_up": kernel(3, 4, 8, 24)["kernel"],
               "expert_down": kernel(3, 4, 24, 8)["kernel"]}  # fmt: skip
    table = rng.standard_normal((12, 8)).astype(np.float32)
    blocks = {"attention": attention, "experts": experts}
    return {"dense_blocks": {"mlp": mlp}, "blocks": blocks, "embedding": table}


def _matrix(*names):
    return Axes(("layers", *names), is_matrix=True)


INTO, ONTO = {"kernel": _matrix("embed", "mlp")}, {"kernel": _matrix("mlp", "embed")}
AXES = {
    "dense_blocks": {"mlp": {"up": INTO, "down": ONTO}},
    "blocks": {
        "attention": {"query": INTO, "key": INTO, "out": ONTO},
        "experts": {
            "router": {"kernel": Axes()},
            "expert_up": _matrix("experts", "embed", "mlp"),
            "expert_down": _matrix("experts", "mlp", "embed"),
        },
    },
    "embedding": Axes(("vocab", "embed")),
}
RATES = rates_of(CONFIG, num_steps=STEPS)


def _optax() -> optax.GradientTransformation:
    """Optax's own Muon, as its documentation composes it."""
    rate = functools.partial(learning_rate, config=CONFIG, num_steps=STEPS)
    stacked = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    muon = contrib.muon(
        rate(CONFIG.learning_rate), beta=0.95, weight_decay=CONFIG.weight_decay,
        adam_b1=0.9, adam_b2=0.95, adam_learning_rate=rate(CONFIG.adam_learning_rate),
        muon_weight_dimension_numbers=jax.tree.map(
            lambda axes: stacked if axes.is_matrix else None, AXES
        ),
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(CONFIG.clip), muon)


def _updates(optimizer, mesh=None):
    params = _tree(0)
    state = optimizer.init(params)

    def update(grads, state):
        with devices.used(mesh):
            return optimizer.update(grads, state, params)

    trees = params, state
    place = None if mesh is None else tuple(shardings(tree, AXES, mesh) for tree in trees)
    run = jax.jit(update) if place is None else jax.jit(update, in_shardings=place)
    found = []
    for seed in (1, 2):
        updates, state = run(_tree(seed), state)
        found.append(updates)
    return jax.device_get((found, state))


def test_on_one_device_it_is_optax_bit_for_bit_with_the_same_state():
    ours, theirs = (
        _updates(make_optimizer(CONFIG, RATES, axes=AXES)),
        _updates(_optax()),
    )
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    ("mesh", "num_devices"),
    [
        (MeshConfig(data=2, fsdp=2, tensor=2), 8),
        *(
            pytest.param(mesh, num_devices, marks=pytest.mark.slow)
            for mesh, num_devices in [
                (MeshConfig(data=8), 8), (MeshConfig(fsdp=2, tensor=4), 8),
                (MeshConfig(data=2, expert=2), 4), (MeshConfig(expert=2, tensor=2), 4),
            ]
        ),
    ],
)  # fmt: skip
def test_dealt_out_over_devices_the_updates_are_those_of_one(mesh, num_devices):
    optimizer = make_optimizer(CONFIG, RATES, axes=AXES)
    over = make_mesh(mesh, jax.devices()[:num_devices])
    ours, theirs = _updates(optimizer, over), _updates(optimizer)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(theirs[0]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), ours[0], theirs[0]
    )


def test_no_device_multiplies_more_than_its_own_matrices():
    """Nine matrices of one shape on eight devices: two each, and not nine."""
    tree = {"blocks": {"mlp": {"up": {"kernel": np.ones((9, 8, 24), np.float32) / 20}}}}
    axes, mesh = {"blocks": {"mlp": {"up": INTO}}}, make_mesh(MeshConfig(data=4, fsdp=2))

    def run(tree):
        with devices.used(mesh):
            return orthogonalized(tree, axes, devices.mesh_in_use())

    places = shardings(tree, axes, mesh)
    text = jax.jit(run, in_shardings=(places,)).lower(tree).compile().as_text()
    assert "f32[2,8,8]" in text
    assert "f32[9,8,8]" not in text
