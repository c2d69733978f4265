"""Sharding on a mesh: a partition for each parameter path, for each kind of activation, and for the
rows of a batch.

``data`` splits the batch. ``fsdp`` splits the batch, the parameters and their optimiser state.
``tensor`` splits the matrices inside a layer. ``expert`` splits the experts of a layer, and the
batch elsewhere. ``context`` splits the positions of a row.

By default, the compiler propagates the sharding of the parameters. With ``fsdp``, this would split
hidden vectors by feature: every chip would have all rows, and every product would require a sum
over all chips. Every activation that a layer returns therefore has a sharding constraint.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.config import MeshConfig
from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.mesh import arranged, shape_of
from dlm_jax.types import Params

ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""

PLACES: dict[str, P] = {
    # [B, L, D]: hidden vectors, residual updates, and their gradients.
    "hidden": P(ROWS, "context", None),
    # [B, L, H, K]: queries and the output of attention.
    "queries": P(ROWS, "context", "tensor", None),
    # [B, L, G, K]: keys and values; a query needs all keys and values of its row.
    "keys": P(ROWS, None, "tensor", None),
    # [B, L, F]: inside an MLP.
    "inner": P(ROWS, "context", "tensor"),
    # [B, L, ...]: inputs and outputs of the loss; chips that have the same row split its positions.
    "losses": P(ROWS, ("context", "tensor")),
    # [B, L]: tokens; each chip embeds the tokens that it stores.
    "tokens": P(ROWS, "context"),
    # [B, ...]: tokens, lengths and metrics per row.
    "rows": P(ROWS),
}
"""Partition of each kind of activation."""


def fitting(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """`spec` without mesh axes that are missing or whose size does not divide the dimension."""

    def fit(axes: Any, size: int) -> Any:
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        names = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        if not names or size % math.prod(mesh.shape[name] for name in names):
            return None
        return names[0] if len(names) == 1 else names

    return P(*(fit(axes, size) for axes, size in zip(spec, shape, strict=False)))


def pin(x: jax.Array, kind: str) -> jax.Array:
    """Constrains `x` and its gradient to the partition of `kind` in `PLACES`."""
    if kind not in PLACES:
        raise ValueError(f"activation {kind!r} has no partition; add it to PLACES")
    mesh = mesh_in_use()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(PLACES[kind], x.shape, mesh))


def on_own_rows(compute: Callable[..., Any], *rows: Any) -> Any:
    """Runs ``compute(*rows)`` on pytrees of rows, so that each device computes its own rows.

    The first axis of every leaf indexes rows or parts of rows.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return compute(*rows)
    common = math.gcd(*(leaf.shape[0] for leaf in jax.tree.leaves(rows)))
    spec = fitting(PLACES["rows"], (common,), mesh)
    return jax.shard_map(compute, in_specs=spec, out_specs=spec, check_vma=False)(*rows)


def on_own_share(
    compute: Callable[..., jax.Array], params: Params, arrays: tuple[jax.Array, ...], *, kind: str
) -> jax.Array:
    """Runs ``compute(params, *arrays)``, so that each device computes its own shard of the arrays.

    The parameters that `compute` reads are gathered once, outside any loop in `compute`, and their
    gradient is summed over the devices once, in the parameters' dtype.

    Args:
      compute: a function that is independent along the axes that `kind` splits. The result of the
          function is split like the arrays.
      params: all parameters; only those that `compute` reads are moved.
      arrays: arrays with equal leading dimensions, split as in `PLACES[kind]`.
      kind: a key of `PLACES`, for both the arrays and the result.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return compute(params, *arrays)
    lead: tuple[int, ...] = min((tuple(x.shape) for x in arrays), key=len)
    spec = with_trivial(fitting(PLACES[kind], lead, mesh), mesh)
    leaves, structure = jax.tree.flatten(params)
    read = _leaves_read(compute, leaves, structure, arrays)

    def of_share(given: list[jax.Array], *own: jax.Array) -> jax.Array:
        merged = [*leaves]
        for place, leaf in zip(read, given, strict=True):
            merged[place] = leaf
        return compute(jax.tree.unflatten(structure, merged), *own)

    split = jax.shard_map(
        of_share, in_specs=(P(), *[spec] * len(arrays)), out_specs=spec, check_vma=False
    )
    return split([leaves[place] for place in read], *arrays)


def with_trivial(spec: P, mesh: Mesh | AbstractMesh) -> P:
    """`spec` with all mesh axes of size one added.

    Gradients would otherwise be summed over these axes. Such sums move no data but prevent fusion.
    """
    first = spec[0] if spec else None
    named = (first,) if isinstance(first, str) else tuple(first or ())
    trivial = tuple(name for name, size in mesh.shape.items() if size == 1)
    return P((*named, *trivial) or None, *spec[1:])


def _leaves_read(
    compute: Callable[..., jax.Array], leaves: list[Any], structure: Any, arrays: tuple[Any, ...]
) -> list[int]:
    """Indices of the leaves that `compute` reads."""

    def flat(*inputs: jax.Array) -> jax.Array:
        given, own = inputs[: len(leaves)], inputs[len(leaves) :]
        return compute(jax.tree.unflatten(structure, given), *own)

    jaxpr = jax.make_jaxpr(flat)(*leaves, *arrays).jaxpr
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    return [place for place, x in enumerate(jaxpr.invars[: len(leaves)]) if id(x) in used]


RULES: tuple[tuple[str, P], ...] = (
    (r"embedding$", P("tensor", "fsdp")),
    (r"(^|/)head/kernel$", P("fsdp", "tensor")),
    (r"blocks/.*/(query|key|value|up|gate)/kernel$", P(None, "fsdp", "tensor")),
    (r"blocks/.*/(out|down)/kernel$", P(None, "tensor", "fsdp")),
    (r"blocks/.*/(query|key|value)/bias$", P(None, "tensor")),
    (r"blocks/.*/expert_(gate|up)$", P(None, "expert", "fsdp", "tensor")),
    (r"blocks/.*/expert_down$", P(None, "expert", "tensor", "fsdp")),
    (r"self_conditioning/mlp/(up|gate)/kernel$", P("fsdp", "tensor")),
    (r"self_conditioning/mlp/down/kernel$", P("tensor", "fsdp")),
    # These parameters are small and therefore replicated.
    (r"blocks/.*/router(/kernel|_bias)$", P()),
    (r"blocks/.*_scale$", P()),
    (r"(^|/)adapters/", P()),
    (r"sampler_head/inner/kernel$", P("fsdp", "tensor")),
    (r"sampler_head/out/kernel$", P("tensor", "fsdp")),
    (r"(^|/)(norm|\w+_norm)/(scale|bias)$", P()),
    # The parameters of other heads are small and therefore replicated.
    (r"(^|/)\w+_head/", P()),
)
"""(path pattern, partition) pairs; the first match applies. The path of an optimiser moment ends
with the path of its parameter. Every device has the whole of a parameter without a match."""

_SHOWN = 8


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh over `devices`, by default all devices of all processes.

    The axes are ``data``, ``fsdp`` and ``tensor``, plus ``expert`` and ``context`` if used.
    """
    devices = jax.devices() if devices is None else devices
    num_slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    shape = shape_of(config, len(devices), num_slices)
    return Mesh(arranged(devices, shape), tuple(shape), (AxisType.Auto,) * len(shape))


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Sharding of ``[B, ...]`` arrays over the axes that split the batch."""
    axes = tuple(axis for axis in ROWS if axis in mesh.shape)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        raise ValueError(
            f"train.batch_size={batch_size} is not divisible by the {shards} devices across which "
            f"the batch is split; use {shards * max(1, round(batch_size / shards))}"
        )
    return NamedSharding(mesh, P(axes))


def share_of_batch(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """Returns (index, count): this process provides part `index` of `count` equal parts of the
    batch.

    Processes across which only parameters or matrices are split provide the same part.
    """
    spans = sharding.addressable_devices_indices_map((batch_size,)).values()
    starts = {(span or (slice(None),))[0].indices(batch_size)[:2] for span in spans}
    first, last = min(start for start, _ in starts), max(stop for _, stop in starts)
    size = last - first
    if sum(stop - start for start, stop in starts) != size or batch_size % size or first % size:
        raise ValueError(
            "mesh: the batch rows of this process are not an equal share of the batch; make "
            "mesh.data * mesh.fsdp a multiple or a divisor of the number of processes"
        )
    return first // size, batch_size // size


def partition(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """Partition of the parameter at `path` (``a/b/c``).

    A dimension that is not divisible by its mesh axis is replicated, and so is a parameter that no
    rule of `RULES` matches (`replicated_by_default`).
    """
    spec = _rule_of(path)
    return P() if spec is None else fitting(spec, shape, mesh)


def _rule_of(path: str) -> P | None:
    return next((spec for pattern, spec in RULES if re.search(pattern, path)), None)


def replicated_by_default(params: Params, mesh: Mesh) -> str:
    """A line that names the matrices without a sharding rule; empty if there are none.

    `params` are arrays or shapes. A single device needs no rules.
    """
    leaves = named_leaves(params)
    names = [path for path, leaf in leaves if leaf.ndim > 1 and _rule_of(path) is None]
    if not names or mesh.size == 1:
        return ""
    shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return f"without a sharding rule, and therefore whole on each of {mesh.size} devices: {shown}"


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Sharding of every leaf of a training state, whose leaves are arrays or their shapes."""
    return map_named(
        lambda path, leaf: NamedSharding(mesh, partition(path, leaf.shape, mesh)), tree
    )


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as ``a/b/c``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The path (``a/b/c``) and the value of each leaf of a pytree."""
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` of a function that also takes the path (``a/b/c``) of a leaf."""
    return jax.tree.map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
    )


def split_rows(params: Params) -> NamedSharding | None:
    """Sharding of rows over the devices of `params`, along the axes `data` and `fsdp`.

    The result is None for a single device.
    """
    mesh = getattr(_sharding_of(params), "mesh", None)
    if mesh is None or mesh.size == 1:
        return None
    axes = tuple(axis for axis in ROWS if axis in mesh.axis_names)
    return NamedSharding(mesh, P(axes))


def num_shares(rows: NamedSharding | None) -> int:
    """Number of parts into which `split_rows` splits the rows; 1 if the rows are not split."""
    return 1 if rows is None else math.prod(rows.mesh.shape[axis] for axis in rows.spec[0])


def spans_processes(rows: NamedSharding | None) -> bool:
    """Returns whether several processes own the devices and must run every step together."""
    return rows is not None and bool(rows.mesh.is_multi_process)


def placement(rows: NamedSharding | None, params: Params) -> jax.sharding.Sharding | None:
    """Placement of the state: sharded like `rows`, or replicated on the devices of the parameters.

    A compiled call preserves this placement, which avoids a second compilation.
    """
    if rows is not None:
        return rows
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P())
    return sharding


class OwnRows:
    """The rows of a batch that this process provides and reads. A single process has all rows.

    Attributes:
      share: (index of this process's part of the rows, number of parts); processes across which
        only parameters are split have the same part.
      count: number of rows of this process.
    """

    def __init__(self, home: jax.sharding.Sharding | None, num_rows: int):
        self._home, self._num_rows = home, num_rows
        self.share = (0, 1)
        if isinstance(home, NamedSharding) and home.mesh.is_multi_process:
            self.share = share_of_batch(home, num_rows)
        self.count = num_rows // self.share[1]

    def place(self, tree: Any) -> Any:
        """Arrays on the devices, assembled from the rows of each process."""
        home = self._home
        if self.share[1] == 1 or not isinstance(home, NamedSharding):
            return jax.device_put(tree, home)

        def place(leaf: np.ndarray) -> jax.Array:
            shape = (self._num_rows, *leaf.shape[1:])
            return jax.make_array_from_process_local_data(home, np.asarray(leaf), shape)

        return jax.tree.map(place, tree)

    def passed(self, tree: Any) -> Any:
        """Host arrays in a form that a compiled call accepts.

        On a single device, the arrays are returned unchanged, because a compiled call transfers
        host arrays 20 times as fast as a separate transfer.
        """
        return self.place(tree) if isinstance(self._home, NamedSharding) else tree

    def fetch(self, tree: Any) -> Any:
        """Rows of this process, copied from the devices to the host."""
        if self.share[1] == 1:
            return jax.device_get(tree)
        return jax.tree.map(self._fetch, tree)

    def _fetch(self, leaf: jax.Array) -> np.ndarray:
        parts = {shard.index[0].start or 0: shard for shard in leaf.addressable_shards}
        return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])


def digest_of(params: Params) -> str:
    """A digest (16 hex digits) of a pytree of arrays with any sharding.

    Each device reads its own part without copying. Two sums over all elements are hashed; each
    element contributes its bit pattern times an odd number derived from its index. A change to a
    single element is therefore always detected.
    """
    leaves = jax.tree.leaves(params)
    mesh = getattr(_sharding_of(params), "mesh", None)
    everywhere = None if mesh is None else NamedSharding(mesh, P())
    sums = jax.jit(
        lambda leaves: jnp.stack([_sums(leaf) for leaf in leaves]), out_shardings=everywhere
    )(leaves)
    told = "".join(f"{leaf.shape} {leaf.dtype}" for leaf in leaves).encode()
    return hashlib.sha256(told + np.asarray(sums).astype("<u4").tobytes()).hexdigest()[:16]


def _sums(leaf: jax.Array) -> jax.Array:
    """Two sums over the bits of an array, uint32 ``[2]``, independent of the sharding."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * jnp.uint32(size % 2**32) + along

    # The multiplications spread the differences between neighbouring indices over all bits.
    mixed = place * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
    return jnp.stack(
        [
            jnp.sum(words * (factor | 1), dtype=jnp.uint32)
            for factor in (mixed, (mixed >> 16) | (mixed << 16))
        ]
    )


def _sharding_of(params: Params) -> jax.sharding.Sharding | None:
    """The sharding of the first parameter that has one; None if no parameter is on a device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return next((sharding for sharding in shardings if sharding is not None), None)
