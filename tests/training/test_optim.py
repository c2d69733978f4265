from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases
import toy

from dlm_jax.config import HeadsConfig, OptimConfig
from dlm_jax.distributed.partitions import path_name
from dlm_jax.heads import CRITIC, MAIN, SAMPLER
from dlm_jax.model.transformer import build
from dlm_jax.training.optimisers import (
    learning_rate,
    make_groups,
    optimizer_of_stage,
)
from dlm_jax.types import Axes

CONFIG = OptimConfig(learning_rate=0.5, warmup_steps=4, final_ratio=0.1)
STEPS = 24
NAMES = ["muon", "adamw"]


def _random(tree, seed, scale=1.0):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        scale * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


@functools.cache
def _compiled(config: OptimConfig):
    optimizer = toy.optimizer(config, num_steps=STEPS)

    def last_update(many_grads):
        state = optimizer.init(toy.params())
        for grads in many_grads:
            updates, state = optimizer.update(grads, state, toy.params())
        return updates

    return jax.jit(last_update)


MIXTURE = toy.config(
    activation="swiglu", experts=4, experts_per_token=2, expert_width=6, shared_width=4,
    dense_layers=1, router_bias="choice", qkv_bias=True,
)  # fmt: skip


CANVASES = toy.config(
    attention_type="canvas", block_length=8, attention_window=16, start_id=0, depth=4, full_every=2,
    activation="geglu",
)  # fmt: skip

ARCHITECTURES = {
    "toy": toy.config(),
    "older": toy.config(activation="gelu", qkv_bias=True, tied_head=False),
    "mixture": MIXTURE,
    "full": CANVASES,
    "gemma": dataclasses.replace(CANVASES, experts=4, experts_per_token=2, expert_width=6),
    "heads": toy.config(add_sampler_head=True, add_critic_head=True),
    "adapters": toy.config(lora_rank=2, lora_targets=("query", "down", "mask")),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_matrix_decays_and_is_muons_and_each_scale_and_bias_is_not(name):
    """Matrices have two axes in a layer; tables, maps to logits, routers and adapters are none."""
    config = ARCHITECTURES[name]
    network = build(config)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    expected = {
        path
        for path, leaf in leaves.items()
        if leaf.ndim - ("blocks" in path) >= 2
        and path not in ("embedding", "head/kernel")
        and "router" not in path
        and not path.startswith("adapters/")
    }
    assert toy.matrices(network) == expected
    if config.full_every and not config.experts:
        assert sum(path.startswith("full_blocks/") for path in expected) == 6
    muon = toy.optimizer(OptimConfig(name="muon"), num_steps=STEPS, network=network)
    state = jax.eval_shape(muon.init, shapes)[1].inner_states
    for group, paths in (("muon", expected), ("adam", leaves.keys() - expected)):
        moments = jax.tree_util.tree_flatten_with_path(state[group])[0]
        ends = [
            path for path in leaves for end, _ in moments if path_name(end).endswith(f"/mu/{path}")
        ]
        assert set(ends) == paths and len(ends) == len(paths)
    adamw = toy.optimizer(
        OptimConfig(name="adamw", weight_decay=0.5), num_steps=STEPS, network=network
    )
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    updates, _ = adamw.update(zeros, adamw.init(ones), ones)
    moved = {
        path_name(p): bool(x.any()) for p, x in jax.tree_util.tree_flatten_with_path(updates)[0]
    }
    assert {path for path, is_moved in moved.items() if is_moved} == expected


def _shapes(tree):
    return jax.tree.map(lambda shape: jnp.zeros(shape), tree, is_leaf=lambda x: type(x) is tuple)


@pytest.mark.parametrize(
    ("shapes", "matrices"),
    [
        ({"blocks": {"w": (3, 8, 8), "bias": (3, 8), "gain": (3,)}}, {"blocks/w"}),
        ({"blocks": {"mlp": {"w": (3, 8, 6)}, "norm": {"scale": (3, 8)}}}, {"blocks/mlp/w"}),
        ({"layers": [{"w": (8, 6), "bias": (6,)}] * 2}, {"layers/0/w", "layers/1/w"}),
        ({"embedding": (12, 8), "w": (8, 8), "out": {"kernel": (8, 12)}}, {"w"}),
        ({"taps": (9, 8, 8), "norm": (8,)}, {"taps"}),
    ],
)  # fmt: skip
def test_the_matrices_of_an_undeclared_network_have_two_axes_besides_the_layers(shapes, matrices):
    assert toy.matrices(_network(_shapes(shapes))) == matrices


def _network(params, axes=None):
    return dataclasses.replace(toy.network(), init=lambda key: params, axes=axes)


def test_the_matrices_of_a_network_are_those_that_it_declares():
    params = _shapes({"table": {"w": (6, 8), "v": (6, 8)}, "other": (8, 8), "my_head": (8, 12)})
    own = {"table": {"w": Axes(), "v": Axes(is_matrix=True)}}
    found = toy.matrices(_network(params, lambda shapes: own))
    assert found == {"table/v", "other", "my_head"}
    with pytest.raises(ValueError, match=r"^table/v has no Axes"):
        toy.matrices(_network(params, lambda shapes: {"table": {"w": Axes()}}))


def _updates(config: OptimConfig, grads_of_steps):
    """The update of the last step, by path, when these gradients came one after the other."""
    updates = _compiled(config)(list(grads_of_steps))
    return {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]}


def test_the_rate_rises_by_equal_parts_to_the_peak_and_falls_along_a_cosine():
    rate = learning_rate(0.5, CONFIG, num_steps=STEPS)
    warm = [float(rate(step)) for step in range(5)]
    np.testing.assert_allclose(warm, [0.1, 0.2, 0.3, 0.4, 0.5], rtol=1e-6)
    for step in range(4, STEPS):
        turn = np.pi * (step - 4) / (STEPS - 4)
        expected = 0.05 + (0.5 - 0.05) * (1 + np.cos(turn)) / 2
        np.testing.assert_allclose(float(rate(step)), expected, rtol=1e-5)
    np.testing.assert_allclose(float(rate(STEPS)), 0.05, rtol=1e-6)


def test_adamw_is_optax_adamw_on_the_clipped_gradients():
    params, grads = toy.params(), _random(toy.params(), 1)
    config = OptimConfig(name="adamw", learning_rate=0.01, warmup_steps=0, weight_decay=0.0)
    norm = optax.tree.norm(grads)
    reference = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.0)
    expected, _ = jax.jit(reference.update)(
        jax.tree.map(lambda g: g / norm, grads), jax.jit(reference.init)(params), params
    )
    ours = _updates(config, [grads])
    for path, leaf in jax.tree_util.tree_flatten_with_path(expected)[0]:
        np.testing.assert_allclose(ours[path_name(path)], leaf, rtol=1e-4)


GROUPS = (MAIN, SAMPLER, CRITIC)
OPTIM = OptimConfig(name="adamw", learning_rate=0.5, warmup_steps=2, final_ratio=0.1, clip=1.0)
HEADS = HeadsConfig(
    start_sampler_iteration=3,
    start_critic_iteration=5,
    learning_rate=0.25,
    warmup_steps=1,
    clip=0.5,
    weight_decay=0.2,
)
"""What the three groups are trained with: nothing is the same for the model and the heads."""


@functools.cache
def _three_groups():
    """One matrix for each group, with the paths of a real model."""
    matrices = np.random.default_rng(0).standard_normal((3, 1, 4, 4)).astype(np.float32)
    main, sampler, critic = map(jnp.asarray, matrices)
    return {
        "blocks": {"up": {"kernel": main}},
        SAMPLER: {"inner": {"kernel": sampler}},
        CRITIC: {"out": {"kernel": critic}},
    }


def _by_group(tree) -> dict[str, np.ndarray]:
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    main, sampler, critic = (leaves[path] for path in sorted(leaves, key=_place_in_groups))
    return {MAIN: np.asarray(main), SAMPLER: np.asarray(sampler), CRITIC: np.asarray(critic)}


def _place_in_groups(path: str) -> int:
    return (SAMPLER in path) + 2 * (CRITIC in path)


@functools.cache
def _grouped(stage: frozenset[str], heads: HeadsConfig = HEADS):
    records = cases.records(heads)
    config = cases.config({"steps": STEPS}, optim=OPTIM, heads=heads)
    axes = jax.tree.map(lambda _: Axes(is_matrix=True), _three_groups())
    optimizer = optimizer_of_stage(make_groups(config, records, axes), tuple(stage))
    return optimizer.init, jax.jit(optimizer.update)


def _stage_of(step: int) -> frozenset[str]:
    starts = {MAIN: 0, SAMPLER: 3, CRITIC: 5}
    return frozenset(name for name, start in starts.items() if step >= start)


def test_each_head_has_a_schedule_of_its_own_that_begins_where_it_does():
    """Adam moves by its rate where the gradient stays the same."""
    plain = dataclasses.replace(HEADS, weight_decay=0.0)
    params, grads = _three_groups(), jax.tree.map(jnp.sign, _three_groups())
    state = _grouped(_stage_of(0), plain)[0](params)

    def rate(step: int, peak: float, warmup: int, start: int) -> float:
        if step < start:
            return 0.0
        step, length = step - start, STEPS - start
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        turn = np.pi * (step - warmup) / (length - warmup)
        return peak * (0.1 + 0.9 * (1 + np.cos(turn)) / 2)

    for step in range(STEPS):
        updates, state = _grouped(_stage_of(step), plain)[1](grads, state, params)
        expected = {
            MAIN: rate(step, 0.5, 2, 0),
            SAMPLER: rate(step, 0.25, 1, 3),
            CRITIC: rate(step, 0.25, 1, 5),
        }
        for group, update in _by_group(updates).items():
            moved = np.abs(update)
            np.testing.assert_allclose(moved, expected[group], rtol=1e-4, err_msg=f"{group} {step}")


def test_groups_that_do_not_train_keep_parameters_and_state_whatever_their_gradient():
    params = _three_groups()
    for stage in ({MAIN}, {SAMPLER}, {MAIN, CRITIC}):
        init, update = _grouped(frozenset(stage))
        begun = init(params)
        updates, state = update(_random(params, 1), begun, params)
        for group, change in _by_group(updates).items():
            assert np.any(change) == (group in stage), group
            before, after = (s.inner_states[group] for s in (begun, state))
            assert jax.tree.structure(before) == jax.tree.structure(after)
            same = [
                np.array_equal(a, b)
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            ]
            assert not any(same) if group in stage else all(same), group


def test_the_gradient_of_a_group_is_clipped_by_its_own_norm_and_moves_no_other():
    params = _three_groups()
    init, update = _grouped(frozenset(GROUPS))
    small = _random(params, 1, scale=1e-3)
    expected, _ = update(small, init(params), params)
    for group, clip in ((MAIN, 1.0), (SAMPLER, 0.5), (CRITIC, 0.5)):
        place = GROUPS.index(group)
        grads = jax.tree_util.tree_map_with_path(
            lambda path, x, at=place: 1e4 * x if _place_in_groups(path_name(path)) == at else x,
            small,
        )
        updates, state = update(grads, init(params), params)
        for other in set(GROUPS) - {group}:
            ours, theirs = _by_group(updates)[other], _by_group(expected)[other]
            np.testing.assert_array_equal(ours, theirs)
        (mean,) = [
            x
            for path, x in jax.tree_util.tree_flatten_with_path(state.inner_states[group])[0]
            if "/mu/" in path_name(path)
        ]
        np.testing.assert_allclose(np.linalg.norm(mean), (1 - 0.9) * clip, rtol=1e-4)


def test_the_weight_decay_of_heads_is_theirs_alone():
    params = _three_groups()
    plain, decayed = (
        _by_group(update(_random(params, 1), init(params), params)[0])
        for init, update in (
            _grouped(frozenset(GROUPS), dataclasses.replace(HEADS, weight_decay=decay))
            for decay in (0.0, 0.2)
        )
    )
    for group, rate in ((MAIN, 0.0), (SAMPLER, 0.125), (CRITIC, 0.125)):
        expected = -rate * 0.2 * _by_group(params)[group]
        np.testing.assert_allclose(decayed[group] - plain[group], expected, atol=1e-6)
