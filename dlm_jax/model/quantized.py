"""8-bit integer matrices in the blocks, for sampling and scoring.

Each output channel of a matrix has a scale: its largest magnitude divided by 127 (symmetric, round
to nearest). With ``int8``, activations in the compute dtype are multiplied by these integers. With
``int8_dynamic``, every input vector is also scaled by its largest magnitude and rounded to 8 bits,
and the matrix product uses integers (LLM.int8(), Dettmers et al. 2022, without its treatment of
outliers). Embeddings, the LM head, norms, biases and the other heads are not quantised. On the
shipped model, 8-bit embeddings would raise the likelihood bound by 0.06%; the 8-bit matrices of all
blocks raise it by 0.13%.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.model import ops
from dlm_jax.pytree import pytree
from dlm_jax.settings import SettingError, nearest
from dlm_jax.types import LAYERS, Params

KINDS = ("int8", "int8_dynamic")
"""Values of ``quantize``: weights only, or weights and their inputs."""

_MOST = 127


@pytree
class Quantized:
    """A matrix or a stack of matrices ``[..., D, F]``, stored as ``values * scales``.

    Attributes:
      values: int8 ``[..., D, F]``, in [-127, 127].
      scales: float32 ``[..., F]``.
      is_dynamic: whether the matrix's inputs are also rounded to int8.
    """

    values: Any
    scales: Any
    is_dynamic: bool = field(default=False, metadata={"static": True})


def quantized_kernel(kernel: jax.Array, is_dynamic: bool = False) -> Quantized:
    """Quantises a matrix or a stack of matrices to 8 bits; the error is at most half the scale."""
    most = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=-2)
    scales = jnp.where(most > 0, most / _MOST, 1.0)
    values = jnp.round(kernel.astype(jnp.float32) / scales[..., None, :])
    return Quantized(values.astype(jnp.int8), scales, is_dynamic)


def product(x: jax.Array, kernel: jax.Array | Quantized) -> jax.Array:
    """``x @ kernel`` in the dtype of `x`, shape ``[..., F]``."""
    if not isinstance(kernel, Quantized):
        return ops.linear(x, kernel.astype(x.dtype))

    def sums(x: jax.Array, values_DF: jax.Array, dtype: Any) -> jax.Array:
        contracted = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, values_DF, contracted, preferred_element_type=dtype)

    scales = kernel.scales.reshape(*(1,) * (x.ndim - 1), -1)
    if not kernel.is_dynamic:
        return (sums(x, kernel.values.astype(x.dtype), jnp.float32) * scales).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(x32), axis=-1, keepdims=True)
    size = jnp.where(most > 0, most / _MOST, 1.0)
    y = sums(jnp.round(x32 / size).astype(jnp.int8), kernel.values, jnp.int32)
    return (y.astype(jnp.float32) * size * scales).astype(x.dtype)


def check_kind(kind: str) -> None:
    """Raises SettingError for a value that is not one of `KINDS`."""
    if kind not in KINDS:
        raise SettingError("quantize", kind, "is unknown", nearest(kind, KINDS))


def quantizer(kind: str, axes: Params) -> Callable[[str, Any], Any]:
    """A function ``(path, parameter) -> parameter`` that quantises matrices in stacks of layers.
    `axes` are the `Axes` of all parameters.

    Raises:
      SettingError: the kind is unknown, or a matrix has no rule, as in the experts and in custom
        networks; the message names the parameter.
    """
    check_kind(kind)
    by_path = dict(named_leaves(axes))

    def of_leaf(path: str, leaf: Any) -> Any:
        names, is_expert = by_path[path].names, "experts" in by_path[path].names
        if not by_path[path].is_matrix or (names and LAYERS not in names):
            return leaf
        if names and not is_expert:
            return _in_place(leaf, kind == "int8_dynamic")
        raise SettingError(
            "quantize",
            kind,
            f"has no rule for the parameter {path!r}",
            f"remove quantize, or use a model {'without experts' if is_expert else 'of [model]'}",
        )

    return of_leaf


def _in_place(kernel: Any, is_dynamic: bool) -> Quantized:
    """Quantises a matrix on its devices; maps arrays to arrays, and shapes to shapes."""
    make = functools.partial(quantized_kernel, is_dynamic=is_dynamic)
    values = channels = kernel.sharding
    if isinstance(values, NamedSharding):
        spec = (*values.spec, *[None] * (kernel.ndim - len(values.spec)))
        channels = NamedSharding(values.mesh, P(*spec[:-2], spec[-1]))
    if isinstance(kernel, jax.Array):
        return jax.jit(make, out_shardings=Quantized(values, channels, is_dynamic))(kernel)
    shape = jax.eval_shape(make, kernel)
    return Quantized(
        shape.values.update(sharding=values), shape.scales.update(sharding=channels), is_dynamic
    )


def is_quantized(params: Params) -> bool:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Quantized))
    return any(isinstance(leaf, Quantized) for leaf in leaves)


def quantized(params: Params, kind: str, axes: Params) -> Params:
    """Quantises the matrices of the blocks in `params`, which contains arrays or shapes."""
    return map_named(quantizer(kind, axes), params)
