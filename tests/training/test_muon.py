from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from dlm_jax import devices
from dlm_jax.config import MeshConfig, OptimConfig
from dlm_jax.distributed.partitions import make_mesh, path_name, shardings
from dlm_jax.training.optimisers import learning_rate, make_optimizer, orthogonalized

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


_MATRICES = {
    *(f"blocks/attention/{name}/kernel" for name in ("query", "key", "out")),
    *(f"dense_blocks/mlp/{name}/kernel" for name in ("up", "down")),
    "blocks/experts/expert_up", "blocks/experts/expert_down",
}  # fmt: skip


def _paths(params, value):
    return jax.tree_util.tree_map_with_path(lambda path, _: value(path_name(path)), params)


def _optax() -> optax.GradientTransformation:
    """Optax's own Muon, as its documentation composes it."""
    rate = functools.partial(learning_rate, config=CONFIG, num_steps=STEPS)
    stacked = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    muon = contrib.muon(
        rate(CONFIG.learning_rate), beta=CONFIG.muon_momentum, weight_decay=CONFIG.weight_decay,
        adam_b1=CONFIG.b1, adam_b2=CONFIG.b2, adam_learning_rate=rate(CONFIG.adam_learning_rate),
        muon_weight_dimension_numbers=lambda params: _paths(
            params, lambda path: stacked if path in _MATRICES else None
        ),
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(CONFIG.clip), muon)


def _updates(optimizer, mesh=None):
    params = _tree(0)
    state = optimizer.init(params)

    def update(grads, state):
        with devices.used(mesh):
            return optimizer.update(grads, state, params)

    place = None if mesh is None else (shardings(params, mesh), shardings(state, mesh))
    run = jax.jit(update) if place is None else jax.jit(update, in_shardings=place)
    found = []
    for seed in (1, 2):
        updates, state = run(_tree(seed), state)
        found.append(updates)
    return jax.device_get((found, state))


def test_on_one_device_it_is_optax_bit_for_bit_with_the_same_state():
    ours, theirs = (
        _updates(make_optimizer(CONFIG, num_steps=STEPS, matrices=_MATRICES)),
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
    optimizer = make_optimizer(CONFIG, num_steps=STEPS, matrices=_MATRICES)
    over = make_mesh(mesh, jax.devices()[:num_devices])
    ours, theirs = _updates(optimizer, over), _updates(optimizer)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(theirs[0]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), ours[0], theirs[0]
    )


def test_no_device_multiplies_more_than_its_own_matrices():
    """Nine matrices of one shape on eight devices: two each, and not nine."""
    tree = {"blocks": {"mlp": {"up": {"kernel": np.ones((9, 8, 24), np.float32) / 20}}}}
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))

    def run(tree):
        with devices.used(mesh):
            return orthogonalized(tree, devices.mesh_in_use())

    text = jax.jit(run, in_shardings=(shardings(tree, mesh),)).lower(tree).compile().as_text()
    assert "f32[2,8,8]" in text
    assert "f32[9,8,8]" not in text
