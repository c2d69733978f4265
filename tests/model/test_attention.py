"""All forms of attention are one function: equal values and gradients at every length and mask."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax import devices
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.model import ops
from dlm_jax.model.attention import BesideClean, InBlocks, attend_beside_clean
from dlm_jax.model.kernels import mosaic, splash
from dlm_jax.model.kernels.mosaic import mosaic_rotary, mosaic_window
from dlm_jax.model.kernels.splash import splash_attention
from dlm_jax.model.kernels.triton import (
    TILE,
    triton_attention,
    triton_window,
    visible_tiles,
)
from dlm_jax.model.ops import causal
from dlm_jax.types import live_positions

MASKS = {"bidirectional": None, "causal": causal, "blocks": InBlocks(40)}
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
        seen = [j for j in range(max(1, int(length_B[b]))) if may_see is None or may_see(i, j)]
        scores = k[b, seen, h // shared] @ q[b, i, h] / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        y[b, i, h] = weights @ v[b, seen, h // shared] / weights.sum()
    return y


def _formula(platform):
    def run(*given, may_see):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "platform", lambda: platform)
            return ops.formula_attention(*given, may_see=may_see)

    return run


def _forms():
    return {
        "cpu": _formula("cpu"),
        "plain": _formula("other"),
        "splash": lambda *a, **k: splash_attention(*a, **k, interpret=True),
        "triton": lambda *a, **k: triton_attention(*a, **k, interpret=True),
    }


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("num_groups", [pytest.param(4, marks=pytest.mark.slow), 2])
def test_every_form_has_the_values_of_the_formula_and_the_same_gradients(
    mask, num_groups, monkeypatch
):
    # Several tiles of the splash kernel, of twice as many keys as queries without a mask.
    monkeypatch.setattr(splash, "_MAX_BLOCK", 128)
    monkeypatch.setattr(devices, "num_cores", lambda: 2)
    inputs, length_B, g = _inputs(num_groups)
    expected = _oracle(*inputs, length_B, MASKS[mask])
    is_live = live_positions(jnp.maximum(length_B, 1), POSITIONS)
    gradients = {}
    for name, form in _forms().items():
        if name == "triton" and mask != "blocks":
            continue

        @jax.jit
        def run(*inputs, form=form):
            y, pull = jax.vjp(lambda *a: form(*a, is_live, may_see=MASKS[mask]), *inputs)
            return y, pull(g)

        y, gradients[name] = run(*inputs)
        np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-5, err_msg=name)
    for name in gradients:
        for mine, theirs in zip(gradients[name], gradients["cpu"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4, err_msg=name)


# Masks of rows of four tiles, the number of streams of keys, and the number of visible tiles.
SPARSE = {
    "causal": (lambda tile: causal, 1, 4 * 5 // 2),
    "blocks": (lambda tile: InBlocks(tile // 32), 1, 4 * 5 // 2),
    "a block per tile": (InBlocks, 1, 4 * 5 // 2),
    # Noisy tiles of the diagonal, and clean ones below it; on it if they hold earlier blocks.
    "two streams": (lambda tile: BesideClean(tile // 32, 4 * tile), 2, 4 + 4 * 5 // 2),
    "streams of tiles": (lambda tile: BesideClean(tile, 4 * tile), 2, 4 + 4 * 3 // 2),
}


def _tiles_of_splash(monkeypatch, may_see, streams: int = 1, dtype: Any = jnp.bfloat16):
    """Numbers of tiles that the kernel computes for 4096 queries, forward and backward."""
    found = []

    def recorded(process):
        def run(*args, **more):
            found.append(process(*args, **more))
            return found[-1]

        return run

    for name in ("process_mask", "process_mask_dkv"):
        monkeypatch.setattr(
            splash_attention_mask_info, name, recorded(getattr(splash_attention_mask_info, name))
        )
    q = jax.ShapeDtypeStruct((1, 4096, 1, 128), dtype)
    k = jax.ShapeDtypeStruct((1, 4096 * streams, 1, 128), dtype)
    is_live = jax.ShapeDtypeStruct(k.shape[:2], bool)
    run = functools.partial(splash_attention, may_see=may_see, interpret=True)
    jax.eval_shape(run, q, k, k, is_live)
    return [np.count_nonzero(info.block_mask) for info, _ in found]


@pytest.mark.parametrize("what", list(SPARSE))
def test_kernels_compute_only_tiles_with_a_visible_pair(what, monkeypatch):
    """In tiles of 1024 on TPUs and of `TILE` on GPUs."""
    masked, streams, expected = SPARSE[what]
    assert visible_tiles(4 * TILE, streams * 4 * TILE, masked(TILE)).sum() == expected
    assert _tiles_of_splash(monkeypatch, masked(1024), streams) == [expected, expected]


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "expected"),
    [(1, 4, 2, (2, 2)), (3, 4, 4, (6, 2)), (2, 4, 2, (2, 4)), (1, 4, 1, (1, 4)), (1, 3, 3, (1, 3))],
)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_two_cores_share_odd_rows_by_halves_of_the_heads(
    rows, heads, groups, expected, num_cores, monkeypatch
):
    """The values are those of the formula, above, where the number of rows is odd."""
    found = []

    def computed(q, *_, **__):
        found.append((q.shape[0], q.shape[2]))
        return q

    monkeypatch.setattr(splash, "_of_rows", computed)
    q, k = (jax.random.normal(jax.random.key(0), (rows, 128, h, 8)) for h in (heads, groups))
    device = jax.sharding.AbstractDevice("any", num_cores, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        y = splash_attention(q, k, k, jnp.ones((rows, 128), bool))
    assert found == [expected if num_cores == 2 else (rows, heads)]
    np.testing.assert_array_equal(y, q)


_BIDIRECTIONAL = ops.attention
_IN_BLOCKS = functools.partial(ops.attention, may_see=InBlocks(32))
_TWO_STREAMS = functools.partial(attend_beside_clean, block_length=32)


def _on(platform: str) -> jax.sharding.AbstractMesh:
    kind = "TPU v5 lite" if platform == "tpu" else "any"
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )


def _traced(platform: str, dtype, positions: int = 256, size: int = 64, form=_BIDIRECTIONAL) -> str:
    shape = jax.ShapeDtypeStruct((2, positions, 2, size), dtype)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    with jax.sharding.use_abstract_mesh(_on(platform)):
        return str(jax.make_jaxpr(form)(shape, shape, shape, length))


def test_the_devices_in_use_choose_the_form(monkeypatch):
    def cudnn(q_BLHK, *rest):
        """Where there is no GPU, its own form cannot be traced."""
        assert not rest[-1]
        return jax.jit(lambda cudnn: cudnn)(q_BLHK)

    monkeypatch.setattr(ops, "cudnn_attention", cudnn)
    assert "pallas_call" in _traced("tpu", jnp.bfloat16)
    assert "name=<lambda>" in _traced("gpu", jnp.bfloat16)
    assert "pallas_call" in _traced("gpu", jnp.bfloat16, form=_IN_BLOCKS)
    for text in (
        _traced("gpu", jnp.float32, form=_IN_BLOCKS),
        _traced("gpu", jnp.bfloat16, positions=64, form=_IN_BLOCKS),
        _traced("gpu", jnp.bfloat16, size=24, form=_IN_BLOCKS),
        _traced("tpu", jnp.bfloat16, positions=64),
        _traced("gpu", jnp.float32),
        _traced("gpu", jnp.bfloat16, size=12),
        _traced("cpu", jnp.bfloat16),
    ):
        assert "pallas_call" not in text
        assert "name=<lambda>" not in text


def test_on_a_gpu_no_array_of_masked_attention_has_all_pairs():
    """Of two streams, the second of which is block-causal."""
    positions = 1024
    shape = jax.ShapeDtypeStruct((2, positions, 1, 16), jnp.bfloat16)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(q, k, v, g, length):
        y, pull = jax.vjp(lambda *a: _TWO_STREAMS(*a, length), q, k, v)
        return y, pull(g)

    with jax.sharding.use_abstract_mesh(_on("gpu")):
        traced = jax.jit(run).trace(shape, shape, shape, shape, length)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    sizes = [
        math.prod(map(int, x[:-1].split("x"))) for x in re.findall(r"tensor<((?:\d+x)+)", text)
    ]
    assert max(sizes) < positions**2 / 4


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
    case, has_masks, platform, monkeypatch
):
    """Rows of the cache in another order, and biases of each query or of all."""
    # Tiles of TPUs are longer than these windows.
    monkeypatch.setattr(mosaic, "_MAX_KEYS", 128)
    monkeypatch.setattr(mosaic, "_MAX_QUERIES", 48)
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
    kept = ops.CachedLayer(leaves, jnp.array(1), row_N, num_seen)
    expected = ops.window_attention(q, kept, own, seen)
    found = KERNELS[platform](
        q,
        leaves,
        own,
        seen,
        row_N,
        jnp.ones(rows, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        interpret=True,
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("positions", "is_shared", "mesh"),
    [(70, True, None), (70, False, None),
     pytest.param(64, True, {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
     (64, False, {"data": 2, "tensor": 2, "context": 2})],
)  # fmt: skip
def test_the_rotary_kernel_and_its_gradients_are_those_of_the_formula(
    positions, is_shared, mesh, has_norm, monkeypatch
):
    """In tiles of positions, with angles of each row or of all, and on several devices.

    The formula is computed in float32 throughout.
    """
    monkeypatch.setattr(mosaic, "_MAX_ELEMENTS", 32 * 4 * 128)
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
        return mosaic_rotary(x, scale, cos, sin, 1e-5 if has_norm else None, True)

    expected, shapes, compute = run(formula, x.astype(jnp.float32), *given[1:]), [], mosaic._rotary

    def noted(x, *rest, **more):
        shapes.append(x.shape)
        return compute(x, *rest, **more)

    monkeypatch.setattr(mosaic, "_rotary", noted)
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


@pytest.mark.parametrize(
    ("platform", "dtype", "positions", "size", "angles", "has_kernel"),
    [("tpu", jnp.bfloat16, 8, 128, 64, True), ("tpu", jnp.bfloat16, 8, 256, 128, True),
     ("tpu", jnp.bfloat16, 7, 128, 64, False), ("tpu", jnp.float32, 8, 128, 64, False),
     ("tpu", jnp.bfloat16, 8, 64, 32, False), ("tpu", jnp.bfloat16, 8, 128, 32, False),
     ("gpu", jnp.bfloat16, 8, 128, 64, False), ("cpu", jnp.bfloat16, 8, 128, 64, False)],
)  # fmt: skip
def test_heads_without_a_rotary_kernel_are_rotated_by_the_formula(
    platform, dtype, positions, size, angles, has_kernel
):
    x, table = jnp.zeros((1, positions, 2, size), dtype), jnp.zeros((positions, angles))
    for scale in (None, jnp.ones(size)):
        with jax.sharding.use_abstract_mesh(_on(platform)):
            text = str(jax.make_jaxpr(ops.rotate_heads)(x, table, table, scale))
        assert ("pallas_call" in text) == has_kernel


@pytest.mark.parametrize("platform", KERNELS)
def test_a_window_reads_no_copy_of_a_layer(platform):
    """Neither keys and values of a layer nor scores are arrays of the program."""
    rows, depth, heads, positions, window = 2, 3, 4, 256, 32
    leaf = jax.ShapeDtypeStruct((rows, depth, heads, positions, SIZE), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((rows, window, heads, SIZE), jnp.bfloat16)
    own = jax.ShapeDtypeStruct((rows, heads, window, SIZE), jnp.bfloat16)

    def run(q, leaves, own, layer):
        kept = ops.CachedLayer(leaves, layer, None, positions)
        seen = jnp.zeros((rows, 1, 1, positions)), jnp.zeros((rows, 1, 1, window))
        return ops.window_attention(q, kept, own, seen)

    with jax.sharding.use_abstract_mesh(_on(platform)):
        traced = jax.jit(run).trace(q, (leaf, leaf), (own, own), jax.ShapeDtypeStruct((), "int32"))
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",))
        text = lowered.as_text()
    assert ("triton" if platform == "gpu" else "tpu_custom_call") in text
    assert f"tensor<{rows}x{heads}x{positions}x{SIZE}xbf16>" not in text
    assert f"{window}x{positions}x" not in text


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    "shape", [pytest.param({"data": 4}, marks=pytest.mark.slow), {"data": 2, "tensor": 2}]
)
def test_each_device_attends_beside_its_own_rows_of_the_cache(shape, platform, monkeypatch):
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
    kept = ops.CachedLayer(leaves, jnp.array(2), row_N, 130)
    expected = ops.window_attention(q, kept, own, seen)
    kernel, shapes = KERNELS[platform], []

    def interpreted(q, *rest):
        shapes.append(q.shape)
        return kernel(q, *rest, interpret=True)

    monkeypatch.setattr(f"{kernel.__module__}.{kernel.__name__}", interpreted)
    monkeypatch.setattr(ops, "platform", lambda: platform)
    mesh = make_mesh(MeshConfig(**shape), jax.devices()[:4])

    @jax.jit
    def run(q, leaves, row_N, own, seen):
        with devices.used(mesh):
            kept = ops.CachedLayer(leaves, jnp.array(2), row_N, 130)
            return ops.window_attention(q, kept, own, seen)

    given = jax.device_put((q, leaves, row_N, own, seen), NamedSharding(mesh, PartitionSpec()))
    found = run(*given)
    assert shapes == [(4 // shape["data"], window, heads // shape.get("tensor", 1), SIZE)]
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize(
    ("platform", "dtype", "size", "num_seen", "has_kernel"),
    [("gpu", jnp.bfloat16, 16, TILE, True), ("gpu", jnp.float32, 16, TILE, False),
     ("gpu", jnp.bfloat16, 24, TILE, False), ("gpu", jnp.bfloat16, 16, TILE - 1, False),
     ("tpu", jnp.bfloat16, 24, 128, True), ("tpu", jnp.float32, 16, 128, False),
     ("tpu", jnp.bfloat16, 16, 127, False), ("cpu", jnp.bfloat16, 16, 128, False)],
)  # fmt: skip
def test_a_window_without_a_kernel_is_computed_by_the_formula(
    platform, dtype, size, num_seen, has_kernel
):
    leaf, own = jnp.zeros((1, 1, 1, 128, size), dtype), jnp.zeros((1, 1, 4, size), dtype)
    q, seen = jnp.zeros((1, 4, 1, size), dtype), (jnp.zeros((1, 1, 1, n)) for n in (num_seen, 4))

    def run(q, leaf, own, seen):
        kept = ops.CachedLayer((leaf, leaf), jnp.array(0), None, num_seen)
        return ops.window_attention(q, kept, (own, own), seen)

    with jax.sharding.use_abstract_mesh(_on(platform)):
        text = str(jax.make_jaxpr(run)(q, leaf, own, tuple(seen)))
    assert ("pallas_call" in text) == has_kernel
