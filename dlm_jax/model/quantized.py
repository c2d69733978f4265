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

from dlm_jax.distributed.partitions import map_named
from dlm_jax.model import ops
from dlm_jax.model.lora import STACKS
from dlm_jax.pytree import pytree
from dlm_jax.settings import SettingError, nearest
from dlm_jax.types import Params

KINDS = ("int8", "int8_dynamic")
"""Values of ``quantize``: weights only, or weights and their inputs."""

_MOST = 127

_KEPT = ("embedding", "head", "norm", "self_conditioning")


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
    lead = (1,) * (x.ndim - 1)
    scales = kernel.scales.reshape(*lead, -1)
    if not kernel.is_dynamic:
        y = _sum_of_products(x, kernel.values.astype(x.dtype), jnp.float32)
        return (y * scales).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(x32), axis=-1, keepdims=True)
    size = jnp.where(most > 0, most / _MOST, 1.0)
    whole = jnp.round(x32 / size).astype(jnp.int8)
    y = _sum_of_products(whole, kernel.values, jnp.int32)
    return (y.astype(jnp.float32) * size * scales).astype(x.dtype)


def _sum_of_products(x: jax.Array, kernel_DF: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(
        x, kernel_DF, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype
    )


def check_kind(kind: str) -> None:
    """Raises SettingError for a value that is not one of `KINDS`."""
    if kind not in KINDS:
        raise SettingError("quantize", kind, "is unknown", nearest(kind, KINDS))


def quantizer(kind: str) -> Callable[[str, Any], Any]:
    """A function ``(path, parameter) -> parameter`` that quantises the matrices of the blocks.

    Raises:
      SettingError: if a parameter has no rule, as in the experts and in custom networks; the
        message names the parameter.
    """
    check_kind(kind)

    def of_leaf(path: str, leaf: Any) -> Any:
        stack, last = path.split("/")[0], path.split("/")[-1]
        is_in_block, is_expert = stack in STACKS, last.startswith("expert_")
        if is_in_block and last == "kernel":
            return _in_place(leaf, kind == "int8_dynamic")
        if stack in _KEPT or stack.endswith("_head") or (is_in_block and not is_expert):
            return leaf
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


def quantized(params: Params, kind: str) -> Params:
    """Quantises the matrices of the blocks in `params`, which contains arrays or shapes."""
    return map_named(quantizer(kind), params)
