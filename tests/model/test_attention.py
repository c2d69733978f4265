"""All forms of attention are one function: equal values and gradients at every length and mask."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax import devices
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.model import ops
from dlm_jax.model.kernels import tpu
from dlm_jax.model.kernels.tpu import mosaic_rotary, mosaic_window, splash_attention
from dlm_jax.model.kernels.triton import (
    TILE,
    triton_attention,
    triton_window,
    visible_tiles,
)
from dlm_jax.model.ops import causal
from dlm_jax.model.transformer import BesideClean, InBlocks
from dlm_jax.types import live_positions, text_starts

MASKS = {"bidirectional": None, "causal": causal, "blocks": InBlocks(40)}
TEXTS = np.array([[70, 0, 80], [1, 60, 0], [0, 0, 0]])
"""Lengths of the texts of packed rows."""
ROWS, POSITIONS, HEADS, SIZE = 3, 150, 4, 16


def _inputs(num_groups: int):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(ROWS, POSITIONS, h, SIZE) for h in (HEADS, num_groups, num_groups, HEADS)]
    q, k, v, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return (q, k, v), jnp.array([POSITIONS, 61, 0]), g


def _oracle(q, k, v, length_B, may_see):
    """The formula, one query at a time in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y, shared = np.zeros(q.shape), HEADS // k.shape[2]
    for b, i, h in np.ndindex(ROWS, POSITIONS, HEADS):
        seen = range(max(1, int(length_B[b]))) if length_B.ndim == 1 else _text_of(i, length_B[b])
        seen = [j for j in seen if may_see is None or may_see(i, j)]
        scores = k[b, seen, h // shared] @ q[b, i, h] / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        y[b, i, h] = weights @ v[b, seen, h // shared] / weights.sum()
    return y


def _text_of(place, lengths):
    """The positions of the text at `place`, or those behind the last text."""
    ends = [0, *np.cumsum(lengths), POSITIONS]
    return next(range(a, b) for a, b in zip(ends, ends[1:], strict=False) if a <= place < b)


def _formula(platform, most_queries=POSITIONS):
    def run(*given, may_see):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "platform", lambda: platform)
            patch.setattr(ops, "_MOST_QUERIES", most_queries)
            return ops.formula_attention(*given, may_see=may_see)

    return run


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas interprets the kernels, which works on any device."""
    call = pallas.pallas_call
    form = lambda *given, **options: call(*given, **options | {"interpret": True})  # noqa: E731
    monkeypatch.setattr(pallas, "pallas_call", form)


def _forms():
    return {
        "cpu": _formula("cpu"),
        "plain": _formula("other"),
        "slices": _formula("cpu", 64),
        "splash": splash_attention,
        "triton": triton_attention,
    }


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("num_groups", [pytest.param(4, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_form_has_the_values_of_the_formula_and_the_same_gradients(
    is_packed, mask, num_groups, monkeypatch, interpreted
):
    if is_packed and mask == "blocks":
        pytest.skip("not supported")
    # Several tiles of the splash kernel, of twice as many keys as queries without a mask.
    monkeypatch.setattr(tpu, "_MAX_BLOCK", 128)
    monkeypatch.setattr(tpu, "num_cores", lambda: 2)
    inputs, length_B, g = _inputs(num_groups)
    texts = (live_positions(jnp.maximum(length_B, 1), POSITIONS),)
    if is_packed:
        length_B = TEXTS
        texts = (1 + text_starts(jnp.asarray(TEXTS), POSITIONS),) * 2
    expected = _oracle(*inputs, length_B, MASKS[mask])
    gradients = {}
    for name, form in _forms().items():
        may_see = MASKS[mask]
        if name == "triton" and is_packed:
            may_see = may_see or ops.unmasked
        elif name == "triton" and mask != "blocks":
            continue

        @jax.jit
        def run(*inputs, form=form, may_see=may_see):
            y, pull = jax.vjp(lambda *a: form(*a, *texts, may_see=may_see), *inputs)
            return y, pull(g)

        y, gradients[name] = run(*inputs)
        np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-5, err_msg=name)
    for name in gradients:
        for mine, theirs in zip(gradients[name], gradients["cpu"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("may_see", [None, causal])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_kernels_of_packed_rows_get_the_texts_of_the_formula(
    platform, may_see, monkeypatch, interpreted
):
    length_BT = jnp.array([[100, 0, 90], [1, 255, 0]])
    keys = jax.random.split(jax.random.key(1), 3)
    qkv = [jax.random.normal(key, (2, 256, 2, SIZE), jnp.bfloat16) for key in keys]
    given = *(x.astype(jnp.float32) for x in qkv), length_BT
    expected = ops.attention(*given, may_see=may_see)
    monkeypatch.setattr(ops, "platform", lambda: platform)
    attend = functools.partial(ops.attention, may_see=may_see)
    assert "pallas_call" in str(jax.make_jaxpr(attend)(*qkv, length_BT))
    found = attend(*qkv, length_BT).astype(jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=3e-2, atol=3e-2)


# Masks of rows of four tiles, the number of streams of keys, and the number of visible tiles.
SPARSE = {
    "causal": (causal, 1, 4 * 5 // 2),
    "blocks": (InBlocks(TILE // 32), 1, 4 * 5 // 2),
    "a block per tile": (InBlocks(TILE), 1, 4 * 5 // 2),
    # Noisy tiles of the diagonal, and clean ones below it; on it if they hold earlier blocks.
    "two streams": (BesideClean(TILE // 32, 4 * TILE), 2, 4 + 4 * 5 // 2),
    "streams of tiles": (BesideClean(TILE, 4 * TILE), 2, 4 + 4 * 3 // 2),
}


@pytest.mark.parametrize("what", list(SPARSE))
def test_kernels_compute_only_tiles_with_a_visible_pair(what):
    masked, streams, expected = SPARSE[what]
    assert visible_tiles(4 * TILE, streams * 4 * TILE, masked).sum() == expected


def _on(platform: str) -> jax.sharding.AbstractMesh:
    kind = "TPU v5 lite" if platform == "tpu" else "any"
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )


def _attend(dtype, positions=256, size=64, may_see=None):
    x = jnp.zeros((2, positions, 2, size), dtype)
    return ops.attention(x, x, x, jnp.full(2, positions), may_see=may_see)


def _rotate(dtype, positions=8, size=128, angles=64, has_norm=True):
    x, table = jnp.zeros((1, positions, 2, size), dtype), jnp.zeros((positions, angles))
    return ops.rotate_heads(x, table, table, jnp.ones(size) if has_norm else None)


def _window(dtype, size, num_seen):
    leaf, own = jnp.zeros((1, 1, 1, 128, size), dtype), jnp.zeros((1, 1, 4, size), dtype)
    q, seen = jnp.zeros((1, 4, 1, size), dtype), (jnp.zeros((1, 1, 1, n)) for n in (num_seen, 4))
    return ops.window_attention(q, (leaf, leaf), (own, own), tuple(seen), layer=jnp.array(0))


HALF, BLOCKS = jnp.bfloat16, InBlocks(32)
CHOICES = [
    (_attend, "tpu", (HALF,), "pallas_call"), (_attend, "tpu", (HALF, 64), ""),
    (_attend, "gpu", (HALF,), "cudnn"), (_attend, "gpu", (jnp.float32,), ""),
    (_attend, "gpu", (HALF, 256, 12), ""), (_attend, "cpu", (HALF,), ""),
    (_attend, "gpu", (HALF, 256, 64, BLOCKS), "pallas_call"),
    (_attend, "gpu", (jnp.float32, 256, 64, BLOCKS), ""),
    (_attend, "gpu", (HALF, 64, 64, BLOCKS), ""), (_attend, "gpu", (HALF, 256, 24, BLOCKS), ""),
    (_rotate, "tpu", (HALF,), "pallas_call"), (_rotate, "tpu", (HALF, 8, 256, 128), "pallas_call"),
    (_rotate, "tpu", (HALF, 8, 128, 64, False), "pallas_call"), (_rotate, "tpu", (HALF, 7), ""),
    (_rotate, "tpu", (jnp.float32,), ""), (_rotate, "tpu", (HALF, 8, 64, 32), ""),
    (_rotate, "tpu", (HALF, 8, 128, 32), ""), (_rotate, "gpu", (HALF,), ""),
    (_window, "gpu", (HALF, 16, TILE), "pallas_call"),
    (_window, "tpu", (HALF, 24, 128), "pallas_call"),
    (_window, "gpu", (HALF, 24, TILE), ""), (_window, "gpu", (HALF, 16, TILE - 1), ""),
    (_window, "gpu", (jnp.float32, 16, TILE), ""), (_window, "tpu", (jnp.float32, 16, 128), ""),
    (_window, "tpu", (HALF, 16, 127), ""), (_window, "cpu", (HALF, 16, 128), ""),
]  # fmt: skip


@pytest.mark.parametrize(("form", "platform", "given", "kernel"), CHOICES)
def test_the_devices_in_use_choose_the_form(form, platform, given, kernel, monkeypatch):
    def cudnn(q_BLHK, *rest):
        """Where there is no GPU, its own form cannot be traced."""
        return jax.jit(lambda cudnn: cudnn)(q_BLHK)

    monkeypatch.setattr(ops, "cudnn_attention", cudnn)
    with jax.sharding.use_abstract_mesh(_on(platform)):
        text = str(jax.make_jaxpr(lambda: form(*given))())
    assert ("pallas_call" in text) == (kernel == "pallas_call")
    assert ("name=<lambda>" in text) == (kernel == "cudnn")


# The kernels of a window, by platform.
KERNELS = {"gpu": triton_window, "tpu": mosaic_window}
# Queries, heads, groups, cached positions, those that the window may attend to.
WINDOWS = {
    "a tile": (32, 4, 4, TILE, TILE),
    "some tiles, groups": (32, 4, 2, 150, 150),
    "one query": (1, 4, 2, 150, TILE + 1),
    "tiles of queries": (70, 2, 2, 200, 130),
}


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("has_masks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_window_kernel_reads_a_layer_of_the_cache_as_the_formula_does(
    case, has_masks, platform, monkeypatch, interpreted
):
    """Rows of the cache in another order, and biases of each query or of all."""
    # Tiles of TPUs are longer than these windows.
    monkeypatch.setattr(tpu, "_MAX_KEYS", 128)
    monkeypatch.setattr(tpu, "_MAX_QUERIES", 48)
    num_queries, heads, groups, positions, num_seen = WINDOWS[case]
    rows, draw = 2, np.random.default_rng(3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    q = normal(rows, num_queries, heads, SIZE)
    leaves = normal(3, 2, groups, positions, SIZE), normal(3, 2, groups, positions, SIZE)
    own = normal(rows, groups, num_queries, SIZE), normal(rows, groups, num_queries, SIZE)
    masks = num_queries if has_masks else 1
    seen = tuple(
        jnp.where(normal(rows, 1, masks, size) < 0, 0.0, -1e30).at[..., 0].set(0.0)
        for size in (num_seen, num_queries)
    )
    if has_masks:  # the same for the heads of a group
        seen = tuple(jnp.tile(bias, (1, 1, heads // groups, 1)) for bias in seen)
    row_N = jnp.array([2, 0])
    expected = ops.window_attention(q, leaves, own, seen, layer=jnp.array(1), row_B=row_N)
    layer_N, group_N = jnp.ones(rows, jnp.int32), jnp.zeros(rows, jnp.int32)
    found = KERNELS[platform](q, leaves, own, seen, row_N, layer_N, group_N)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("positions", "is_shared", "mesh"),
    [(70, True, None), (70, False, None),
     pytest.param(64, True, {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
     (64, False, {"data": 2, "tensor": 2, "context": 2})],
)  # fmt: skip
def test_the_rotary_kernel_and_its_gradients_are_those_of_the_formula(
    positions, is_shared, mesh, has_norm, monkeypatch, interpreted
):
    """In tiles of positions, with angles of each row or of all, and on several devices.

    The formula is computed in float32 throughout.
    """
    monkeypatch.setattr(tpu, "_MAX_ELEMENTS", 32 * 4 * 128)
    draw = np.random.default_rng(5)
    x, g = (jnp.asarray(draw.normal(size=(2, positions, 4, 128)), jnp.bfloat16) for _ in range(2))
    angle = draw.uniform(size=(1 if is_shared else 2, positions, 64))
    cos, sin = (jnp.asarray(of(angle), jnp.float32) for of in (np.cos, np.sin))
    given = x, cos, sin, jnp.asarray(draw.uniform(0.5, 2, 128), jnp.float32)

    def run(rotate, x, cos, sin, scale):
        y, pull = jax.vjp(lambda x, scale: rotate(x, cos, sin, scale), x, scale)
        return y, *pull(g.astype(y.dtype))

    def formula(x, cos, sin, scale):
        return ops.rotate_heads(x, cos, sin, scale if has_norm else None, 1e-5)

    def kernel(x, cos, sin, scale):
        return mosaic_rotary(x, scale, cos, sin, 1e-5 if has_norm else None)

    expected, shapes, compute = run(formula, x.astype(jnp.float32), *given[1:]), [], tpu._rotary

    def noted(x, *rest, **more):
        shapes.append(x.shape)
        return compute(x, *rest, **more)

    monkeypatch.setattr(tpu, "_rotary", noted)
    if mesh is None:
        found = run(kernel, *given)
        assert shapes == 2 * [(2, positions, 4 * 128)]
    else:
        placed = make_mesh(MeshConfig(**mesh), jax.devices()[: math.prod(mesh.values())])

        def on_mesh(*given):
            with devices.used(placed):
                return run(kernel, *given)

        found = jax.jit(on_mesh)(*jax.device_put(given, NamedSharding(placed, PartitionSpec())))
        assert shapes == 2 * [(1, positions // mesh.get("context", 1), 2 * 128)]
    for one, other, tolerance in zip(found, expected, (1e-2, 1e-2, 1e-4), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    "shape", [pytest.param({"data": 4}, marks=pytest.mark.slow), {"data": 2, "tensor": 2}]
)
def test_each_device_attends_beside_its_own_rows_of_the_cache(
    shape, platform, monkeypatch, interpreted
):
    """Fewer rows than the cache has, in bfloat16, with grouped heads."""
    rows, window, heads, groups, positions = 8, 32, 4, 2, 140
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    leaves = tuple(normal(rows, 3, groups, positions, SIZE) for _ in range(2))
    q = normal(4, window, heads, SIZE)
    own = normal(4, groups, window, SIZE), normal(4, groups, window, SIZE)
    seen = jnp.zeros((4, 1, 1, 130)), jnp.zeros((4, 1, 1, window))
    # Each of two or four devices owns the rows that it reads.
    row_N = jnp.array([1, 2, 4, 7] if shape["data"] == 4 else [3, 0, 5, 6])
    expected = ops.window_attention(q, leaves, own, seen, layer=jnp.array(2), row_B=row_N)
    kernel, shapes = KERNELS[platform], []

    def noted(q, *rest):
        shapes.append(q.shape)
        return kernel(q, *rest)

    monkeypatch.setattr(f"{kernel.__module__}.{kernel.__name__}", noted)
    monkeypatch.setattr(ops, "platform", lambda: platform)
    mesh = make_mesh(MeshConfig(**shape), jax.devices()[:4])

    @jax.jit
    def run(q, leaves, row_N, own, seen):
        with devices.used(mesh):
            return ops.window_attention(q, leaves, own, seen, layer=jnp.array(2), row_B=row_N)

    given = jax.device_put((q, leaves, row_N, own, seen), NamedSharding(mesh, PartitionSpec()))
    found = run(*given)
    assert shapes == [(4 // shape["data"], window, heads // shape.get("tensor", 1), SIZE)]
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )
