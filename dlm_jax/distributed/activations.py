"""Where activations live: a partition for each kind by its name, beside those of the parameters.

Left to itself the compiler carries the split of the parameters over to what is computed from them:
with `fsdp` it splits hidden vectors by feature, every chip holds all rows, and each product ends in
a sum over all chips. So every activation that a layer hands on is pinned to its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import mesh_in_use
from dlm_jax.types import Params

ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""

PLACES: dict[str, P] = {
    # [B, L, D]: hidden vectors, what a layer adds to them, and their gradients.
    "hidden": P(ROWS, "context", None),
    # [B, L, H, K]: queries and the output of attention.
    "queries": P(ROWS, "context", "tensor", None),
    # [B, L, G, K]: keys and values; each query needs those of its whole row.
    "keys": P(ROWS, None, "tensor", None),
    # [B, L, F]: inside an MLP.
    "inner": P(ROWS, "context", "tensor"),
    # [B, L, ...]: what the loss reads and returns; the chips that share a row deal out its
    # positions.
    "losses": P(ROWS, ("context", "tensor")),
    # [B, L]: tokens, whose rows of the embedding table are looked up where they lie.
    "tokens": P(ROWS, "context"),
    # [B, ...]: tokens, lengths and figures by row.
    "rows": P(ROWS),
}
"""Partition of each kind of activation: the one place that says where they live."""


def fitting(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """`spec` without the axes that the mesh lacks or that do not divide their dimension."""

    def fit(axes: Any, size: int) -> Any:
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        names = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
        if not names or size % math.prod(mesh.shape[name] for name in names):
            return None
        return names[0] if len(names) == 1 else names

    return P(*(fit(axes, size) for axes, size in zip(spec, shape, strict=False)))


def pin(x: jax.Array, kind: str) -> jax.Array:
    """`x`, and its gradient, in the place that `PLACES` names for this kind of activation.

    Raises:
      ValueError: no such kind.
    """
    if kind not in PLACES:
        raise ValueError(f"activation {kind!r} has no place; add it to PLACES")
    mesh = mesh_in_use()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(PLACES[kind], x.shape, mesh))


def on_own_rows(compute: Callable[..., Any], *rows: Any) -> Any:
    """``compute(*rows)`` of pytrees of rows, on every device for its own of them.

    Every leaf begins with the axis of the rows, or with as many parts as the rows have.
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
    """``compute(params, *arrays)`` on every device for its own share of the arrays.

    The parameters that `compute` reads are gathered once, whatever loops it runs over them, and
    their gradient is summed over the devices once, in their own type.

    Args:
      compute: treats what `kind` splits independently; its result is split as its arrays are.
      params: any of them; those it does not read stay where they are.
      arrays: with the same leading dimensions, those that `kind` splits.
      kind: of the arrays and of the result, a name in `PLACES`.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return compute(params, *arrays)
    lead: tuple[int, ...] = min((tuple(x.shape) for x in arrays), key=len)
    spec = _with_trivial(fitting(PLACES[kind], lead, mesh), mesh)
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


def _with_trivial(spec: P, mesh: Mesh | AbstractMesh) -> P:
    """`spec` with the axes of one device, over which gradients would be summed if it left them out.

    Such sums move nothing, and stand in the way of what the compiler fuses.
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
