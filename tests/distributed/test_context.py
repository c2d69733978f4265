"""Two streams over ``context``: the numbers of one device, and no noisy key or value on the way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax import devices
from dlm_jax.config import Config, DataConfig, MeshConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.model import context, ops
from dlm_jax.model.attention import attend_beside_clean
from dlm_jax.model.context import (
    BesideGathered,
    RowPieces,
    attend_beside_gathered,
    paired,
    pieces_of,
)
from dlm_jax.training.plan import check_model_fits

BLOCK, ROWS, HEADS, GROUPS, SIZE = 3, 4, 4, 2, 8
LENGTH = jnp.array([24, 17, 5, 24])


def _mesh(**axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[: int(np.prod(list(axes.values())))])


def _streams(positions: int, rows: int = ROWS):
    """Queries, keys and values of a noisy and a clean stream, and a gradient: ``[B, L, ...]``."""
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = [(rows, positions, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [
        [jax.random.normal(key, shape) for key in pair]
        for shape, *pair in zip(shapes, keys[::2], keys[1::2], strict=True)
    ]


def _gathered(mesh, pieces: RowPieces, length_B, block_length: int):
    """The attention of paired rows and its gradients, as a function of one dictionary."""

    def run(given):
        with devices.used(mesh):
            y, pull = jax.vjp(
                lambda *qkv: attend_beside_gathered(
                    *qkv, length_B, block_length=block_length, pieces=pieces
                ),
                *(given[name] for name in "qkv"),
            )
            return y, pull(given["g"])

    return jax.jit(run)


def _inputs(mesh, streams, pieces: RowPieces):
    """The streams as paired rows that are split over the mesh."""
    spec = NamedSharding(mesh, P("data", "context"))
    return {
        name: jax.device_put(jax.vmap(
            lambda noisy, clean: paired(noisy, clean, pieces), in_axes=2, out_axes=2
        )(*(x.reshape(*x.shape[:2], -1) for x in pair)).reshape(-1, *pair[0].shape[1:]), spec)
        for name, pair in zip("qkvg", streams, strict=True)
    }  # fmt: skip


def _in_order(x_PLHK, pieces: RowPieces):
    """Paired rows as the rows of `attend_beside_clean`: all noisy, then all clean."""
    order = np.argsort(pieces.position(np.arange(pieces.num_positions)))
    return np.concatenate([x_PLHK[::2], x_PLHK[1::2]])[:, order]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_position_is_on_one_device_and_all_devices_see_as_many_pairs(count):
    pieces = RowPieces(48 * count, count)
    position = pieces.position(np.arange(pieces.num_positions))
    assert sorted(position) == list(range(pieces.num_positions))
    may_see = BesideGathered(4, pieces)
    query, key = np.arange(2 * pieces.num_positions), np.arange(pieces.num_positions + pieces.own)
    seen = may_see(query[:, None], key[None]).reshape(count, -1).sum(axis=1)
    assert len(set(seen)) == 1
    # Each stream sees half of the pairs, and its own block.
    assert seen.sum() == pieces.num_positions * (pieces.num_positions + 4)


def test_a_model_has_the_outputs_and_gradients_of_one_device_on_a_mesh():
    network = toy.build(toy.config(attention_type="block_causal", block_length=BLOCK, depth=1))
    params, rng = toy.random_params(network), np.random.default_rng(0)
    clean_BL = jnp.asarray(rng.integers(0, toy.SPACE, (ROWS, 24)), jnp.int32)
    shown_BL = jnp.where(jnp.asarray(rng.random((ROWS, 24)) < 0.5), toy.MASK, clean_BL)
    is_live_BL1 = (jnp.arange(24)[None] < LENGTH[:, None])[:, :, None]
    g_BLD = jnp.where(is_live_BL1, jnp.asarray(rng.normal(size=(ROWS, 24, 16))), 0.0)

    def total(params, mesh):
        with devices.used(mesh):
            assert (pieces_of(24, BLOCK) is None) == (mesh is None)
            assert network.beside_clean is not None
            x_BLD = network.beside_clean(params, shown_BL, clean_BL, LENGTH)
            return jnp.sum(x_BLD * g_BLD)

    step = jax.jit(jax.value_and_grad(total), static_argnums=1)
    expected = step(params, None)
    mesh = _mesh(data=2, context=2, tensor=2)
    found = step(jax.device_put(params, shardings(params, axes_of(network), mesh)), mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected
    )


def test_only_clean_keys_and_values_are_gathered_and_only_their_gradients_are_summed():
    pod_costs = pytest.importorskip("dlm_jax.contrib.pod_costs", reason="it reads programs")
    mesh, pieces = _mesh(data=2, context=4), RowPieces(24, 4)
    inputs = _inputs(mesh, _streams(24), pieces)
    module = pod_costs.parse(
        _gathered(mesh, pieces, LENGTH, BLOCK).lower(inputs).compile().as_text()
    )
    found = [
        (x.kind.removesuffix("-start"), x.type.split("{")[0])
        for body in module.computations.values() for x in body
        if x.kind.removesuffix("-start") in pod_costs.KINDS and "f32[" in x.type
    ]  # fmt: skip
    # Keys and values, and their gradients one head at a time.
    gathered = ("all-gather", f"f32[2,24,{GROUPS},{SIZE}]")
    summed = ("reduce-scatter", f"f32[1,2,6,{SIZE}]")
    assert sorted(found) == [gathered] * 2 + [summed] * 2 * GROUPS


@pytest.mark.parametrize(("remat", "times"), [("attention", 2), ("attention+gathered", 1)])
def test_gathered_keys_are_kept_for_the_backward_pass_if_named(remat, times):
    pod_costs = pytest.importorskip("dlm_jax.contrib.pod_costs", reason="it reads programs")
    kind = {"attention_type": "block_causal", "block_length": BLOCK}
    network = toy.build(toy.config(depth=1, remat=remat, **kind))
    mesh = _mesh(data=2, context=4)
    params = toy.random_params(network)
    params = jax.device_put(params, shardings(params, axes_of(network), mesh))

    def total(params):
        with devices.used(mesh):
            tokens_BL = jnp.zeros((ROWS, 24), jnp.int32)
            return network.beside_clean(params, tokens_BL, tokens_BL, LENGTH).sum()

    text = jax.jit(jax.grad(total)).lower(params).compile().as_text()
    keys = f"f32[2,24,{GROUPS},{SIZE}]"
    found = [x for body in pod_costs.parse(text).computations.values() for x in body
             if x.kind.removesuffix("-start") == "all-gather" and keys in x.type]  # fmt: skip
    assert len(found) == 2 * times


@pytest.mark.slow
def test_the_kernel_on_split_positions_has_the_values_and_gradients_of_the_formula(monkeypatch):
    positions, block = 512, 64
    mesh, pieces = _mesh(data=1, context=2), RowPieces(positions, 2)
    kernel = functools.partial(context.splash_kernel, interpret=True)
    monkeypatch.setattr(ops, "uses_splash", lambda _: True)
    monkeypatch.setattr(context, "splash_kernel", kernel)
    streams, length_B = _streams(positions, 2), jnp.array([positions, 17])
    y, pull = jax.vjp(
        lambda *qkv: attend_beside_clean(*qkv, length_B, block_length=block),
        *(jnp.concatenate(pair) for pair in streams[:3]),
    )
    is_live = (jnp.arange(positions)[None] < length_B[:, None])[:, :, None, None]
    streams[3] = [jnp.where(is_live, x, 0.0) for x in streams[3]]
    expected = y, pull(jnp.concatenate(streams[3]))
    inputs = _inputs(mesh, streams, pieces)
    found = jax.device_get(_gathered(mesh, pieces, length_B, block)(inputs))
    is_live = np.concatenate([is_live, is_live])
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine = np.where(is_live, _in_order(mine, pieces), 0.0)
        theirs = np.where(is_live, theirs, 0.0)
        np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"attention_type": "causal"}, "mesh.context=2 requires "),
        ({"attention_type": "block_causal", "block_length": 5},
         "mesh.context=2 does not divide data.seq_len=24, which must be a multiple of 20; use "),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_split_are_refused_by_name(model, line):
    order = SamplingParams(order="left_to_right")
    config = Config(model=toy.config(**model), data=DataConfig(seq_len=24), sample=order)
    with pytest.raises(ValueError, match=f"^{line}[^\n]+$"):
        check_model_fits(config.model, config.data.seq_len, _mesh(data=1, context=2))
