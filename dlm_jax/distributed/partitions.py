"""Sharding on a mesh: a partition for each logical axis of a parameter, for each kind of
activation, and for the rows of a batch.

``data`` splits the batch. ``fsdp`` splits the batch, the parameters and their optimiser state.
``tensor`` splits the matrices inside a layer. ``expert`` splits the experts of a layer, and the
batch elsewhere. ``context`` splits the positions of a row.

By default, the compiler propagates the sharding of the parameters. With ``fsdp``, this would split
hidden vectors by feature: every chip would have all rows, and every product would require a sum
over all chips. Every activation that a layer returns therefore has a sharding constraint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.config import MeshConfig
from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.mesh import ROWS, arranged, shape_of
from dlm_jax.randomness import key_of
from dlm_jax.types import LAYERS, Axes, Network, Params

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

    def fit(axes: Any, size: int) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        names = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        return () if size % math.prod(mesh.shape[name] for name in names) else names

    return P(*(fit(axes, size) for axes, size in zip(spec, shape, strict=False)))


def pin(x: jax.Array, kind: str) -> jax.Array:
    """Constrains `x` and its gradient to the partition of `kind` in `PLACES`."""
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
    first, *rest = fitting(PLACES[kind], lead, mesh)
    # Without the axes of size one, gradients would be summed over them. Such sums move no data but
    # prevent fusion.
    trivial = tuple(name for name, size in mesh.shape.items() if size == 1)
    named = (first,) if isinstance(first, str) else tuple(first or ())
    spec = P((*named, *trivial), *rest)
    leaves, structure = jax.tree.flatten(params)

    def flat(leaves: list[jax.Array], *own: jax.Array) -> jax.Array:
        return compute(jax.tree.unflatten(structure, leaves), *own)

    jaxpr = jax.make_jaxpr(flat)(leaves, *arrays).jaxpr
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    read = [place for place, x in enumerate(jaxpr.invars[: len(leaves)]) if id(x) in used]

    def of_share(given: list[jax.Array], *own: jax.Array) -> jax.Array:
        merged = dict(enumerate(leaves)) | dict(zip(read, given, strict=True))
        return flat(list(merged.values()), *own)

    split = jax.shard_map(
        of_share, in_specs=(P(), *[spec] * len(arrays)), out_specs=spec, check_vma=False
    )
    return split([leaves[place] for place in read], *arrays)


AXIS_RULES = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
}
"""The mesh axis that splits each logical axis of a parameter. Other axes are not split."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh over `devices`, by default all devices of all processes.

    The axes are ``data``, ``fsdp`` and ``tensor``, plus ``expert`` and ``context`` if used.
    """
    devices = jax.devices() if devices is None else devices
    num_slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    shape = shape_of(config, len(devices), num_slices)
    return Mesh(arranged(devices, shape), tuple(shape), (AxisType.Auto,) * len(shape))


def batch_sharding(mesh: Mesh, batch_size: int, accumulate: int = 1) -> NamedSharding:
    """Sharding of ``[B, ...]`` arrays over the axes that split the batch, or each of its
    `accumulate` microbatches.
    """
    axes = tuple(axis for axis in ROWS if axis in mesh.shape)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    parts = shards * accumulate
    if batch_size % parts:
        times = f" times train.accumulate={accumulate}" if accumulate > 1 else ""
        raise ValueError(
            f"train.batch_size={batch_size} is not divisible by the {shards} devices across which "
            f"the batch is split{times}; use {parts * max(1, round(batch_size / parts))}"
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


def axes_of(network: Network, params: Params | None = None) -> Params:
    """The `Axes` of each parameter in `params` (arrays or shapes), by default of `Network.init`.

    Parameters that `Network.axes` does not declare are whole on each device, and those with at
    least two axes besides the axis of the layers are matrices. The first axis numbers layers where
    all parameters under a name have it in common and one of them has more than two axes.
    Embeddings and maps to logits, which have an axis of the vocabulary, are not matrices, except in
    heads.

    Raises:
      ValueError: the declaration does not fit the parameters.
    """
    shapes = jax.eval_shape(network.init, key_of(0)) if params is None else params
    declared = {} if network.axes is None else network.axes(shapes)
    leaves = dict(named_leaves({name: shapes.get(name, ()) for name in declared}))
    axes_by_path = dict(named_leaves(declared))
    if other := leaves.keys() ^ axes_by_path.keys():
        raise ValueError(
            f"{min(other)} has no Axes (from Network.axes), or is no parameter; return the Axes of "
            "each parameter, or omit a top-level name"
        )
    for path, axes in axes_by_path.items():
        shape, unknown = leaves[path].shape, {*axes.names} - {*AXIS_RULES, LAYERS, None}
        if unknown or len(axes.names) not in (0, len(shape)):
            raise ValueError(
                f"the Axes {axes.names} do not fit the parameter {path!r} of shape {shape}; use "
                f"one of {', '.join(AXIS_RULES)}, {LAYERS} or None for each axis"
            )
    sizes = {name: 0 if name.endswith("_head") else network.vocab_size for name in shapes}
    return {name: _by_rank(shapes[name], size) for name, size in sizes.items()} | declared


def _by_rank(tree: Params, vocab_size: int, in_stack: bool = False) -> Params:
    if jax.tree_util.all_leaves([tree]):
        return Axes(is_matrix=tree.ndim - in_stack > 1 and vocab_size not in tree.shape)
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    in_stack |= len({shape[:1] for shape in shapes}) == 1 and max(map(len, shapes)) > 2
    return jax.tree.map(
        lambda part: _by_rank(part, vocab_size, in_stack), tree, is_leaf=lambda x: x is not tree
    )


def undeclared(network: Network, params: Params, num_devices: int) -> str:
    """A line about the parameters that `axes_of` judges by rank; empty if all are declared."""
    declared = {} if network.axes is None else network.axes(params)
    leaves = named_leaves({name: tree for name, tree in params.items() if name not in declared})
    if not leaves:
        return ""
    axes = dict(named_leaves(axes_of(network, params)))
    matrices = ", ".join(path for path, _ in leaves if axes[path].is_matrix) or "none"
    line = f"without Network.axes, matrices by rank: {matrices}"
    if num_devices == 1:
        return line
    return f"{line}; parameters without axes are whole on each of {num_devices} devices"


def partition(axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """Partition of a parameter; a dimension that its mesh axis does not divide is replicated."""
    split = [AXIS_RULES.get(name or "") for name in axes.names]
    return fitting(P(*split), shape, mesh) if any(split) and len(split) == len(shape) else P()


def shardings(tree: Any, axes: Params, mesh: Mesh) -> Any:
    """Sharding of every leaf of a training state, or of parameters, as arrays or shapes.

    `axes` are the `Axes` of the parameters. What mirrors a parameter in the state, such as a
    moment, is at the same path in a subtree and has the same sharding. Other leaves are replicated.
    """
    known = dict(jax.tree.leaves_with_path(axes))

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        ends = (path[start:] for start in range(len(path) + 1))
        mirrored = next((known[end] for end in ends if end in known), Axes())
        return NamedSharding(mesh, partition(mirrored, leaf.shape, mesh))

    return jax.tree.map_with_path(sharding, tree)


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

        def fetch(leaf: jax.Array) -> np.ndarray:
            parts = {shard.index[0].start or 0: shard for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(parts[start].data) for start in sorted(parts)])

        return jax.device_get(tree) if self.share[1] == 1 else jax.tree.map(fetch, tree)


def _sharding_of(params: Params) -> jax.sharding.Sharding | None:
    """The sharding of the first parameter that has one; None if no parameter is on a device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return next((sharding for sharding in shardings if sharding is not None), None)
