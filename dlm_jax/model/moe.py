"""The MLP of a mixture of experts: a router and grouped products.

There is no capacity limit, so rows are independent. The mesh axis ``expert`` shards the experts,
and ``tensor`` shards the inner dimension of each expert. Each device applies its own experts to the
tokens of all devices along these axes, and the outputs are summed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from dlm_jax.config import ModelConfig
from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import PLACES, fitting
from dlm_jax.model.layers import GATES, Linear, Mlp, parameter, unit_norm


class Experts(nnx.Module):
    """A mixture of gated experts, with an optional shared expert for all tokens.

    Router scores are computed in float32. The parameters of the experts are stacked: ``[E, D, F]``
    for gate and up, ``[E, F, D]`` for down.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, inner, num = config.width, config.expert_width, config.experts
        self.router = Linear(width, num, scale=1.0, rngs=rngs, is_matrix=False)
        has_bias = config.router_bias != "none"
        self.router_bias = parameter(jnp.zeros(num, jnp.float32), None) if has_bias else None

        def drawn(fan_in: int, fan_out: int, scale: float, *names: str) -> nnx.Param:
            draw = jax.random.normal(rngs.params(), (num, fan_in, fan_out), jnp.float32)
            return parameter(draw * (scale * fan_in**-0.5), "experts", *names, is_matrix=True)

        self.expert_gate = drawn(width, inner, 1.0, "embed", "mlp")
        self.expert_up = drawn(width, inner, 1.0, "embed", "mlp")
        self.expert_down = drawn(inner, width, 0.0, "mlp", "embed")
        shared = config.shared_width
        self.shared = Mlp(config, rngs=rngs, inner=shared) if shared else None
        has_scales = config.attention_type == "canvas"
        self.router_scale = parameter(jnp.ones(width, jnp.float32), None) if has_scales else None
        self.output_scale = parameter(jnp.ones(num, jnp.float32), None) if has_scales else None

    def __call__(self, x_BLD: jax.Array, routed_by_BLD: jax.Array | None = None) -> jax.Array:
        """Weighted sum of the outputs of each token's experts, ``[B, L, D]``.

        The input of the router is `routed_by_BLD`, or `x_BLD` if `routed_by_BLD` is None.
        """
        x_ND = (x_BLD if routed_by_BLD is None else routed_by_BLD).reshape(-1, x_BLD.shape[-1])
        if self.router_scale is not None:
            x_ND = unit_norm(x_ND, self.config.norm_epsilon)
            scale_D = self.router_scale[...] * x_ND.shape[-1] ** -0.5
            x_ND = x_ND * scale_D[None].astype(x_ND.dtype)
        kernel_DE = self.router.kernel[...].astype(jnp.float32)
        logits_NE = jnp.matmul(
            x_ND.astype(jnp.float32), kernel_DE, precision=jax.lax.Precision.HIGHEST
        )
        bias_E = None if self.router_bias is None else self.router_bias[...].astype(jnp.float32)
        ids_NK, weights_NK = route(self.config, logits_NE, bias_E)
        if self.output_scale is not None:
            weights_NK *= self.output_scale[...].astype(jnp.float32)[ids_NK]
        kernels = tuple(
            kernel[...].astype(x_BLD.dtype)
            for kernel in (self.expert_gate, self.expert_up, self.expert_down)
        )
        ids_BLK, weights_BLK = (x.reshape(*x_BLD.shape[:2], -1) for x in (ids_NK, weights_NK))
        y_BLD = mixture(kernels, x_BLD, ids_BLK, weights_BLK, GATES[self.config.activation])
        return y_BLD if self.shared is None else y_BLD + self.shared(x_BLD)


def route(
    config: ModelConfig, logits_NE: jax.Array, bias_E: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The ids of each token's experts, int32 ``[N, K]``, and their weights, float32 ``[N, K]``.

    With groups, experts are selected only from the best groups. The score of a group is the sum of
    its two best scores (DeepSeek-V3, Liu et al. 2024, section 2.1.2, and LLaDA2). The lower id wins
    ties.
    """
    if config.router_score == "softmax":
        scores_NE = jax.nn.softmax(logits_NE, axis=-1)
    else:
        scores_NE = jax.nn.sigmoid(logits_NE)
    chosen_by_NE = scores_NE if bias_E is None else scores_NE + bias_E[None]
    weighed_by_NE = chosen_by_NE if config.router_bias == "weight" else scores_NE
    if config.router_groups_kept < config.router_groups:
        scores_NGE = chosen_by_NE.reshape(chosen_by_NE.shape[0], config.router_groups, -1)
        best_NG = jnp.sum(jax.lax.top_k(scores_NGE, 2)[0], axis=-1)
        _, best_NK = jax.lax.top_k(best_NG, config.router_groups_kept)
        group_11G = jnp.arange(config.router_groups)[None, None]
        is_best_NG = jnp.any(best_NK[:, :, None] == group_11G, axis=1)
        scores_NGE = jnp.where(is_best_NG[:, :, None], scores_NGE, -jnp.inf)
        chosen_by_NE = scores_NGE.reshape(chosen_by_NE.shape)
    _, ids_NK = jax.lax.top_k(chosen_by_NE, config.experts_per_token)
    weights_NK = jnp.take_along_axis(weighed_by_NE, ids_NK, axis=1)
    if config.router_normalised:
        weights_NK /= jnp.sum(weights_NK, axis=1, keepdims=True) + 1e-20
    return ids_NK, weights_NK * config.router_scale


def mixture(
    kernels: Any, x_BLD: jax.Array, ids_BLK: jax.Array, weights_BLK: jax.Array, gate: Any
) -> jax.Array:
    """Weighted sum of the outputs of each token's experts, for tokens that are sharded like hidden
    vectors. `kernels` are gate and up ``[E, D, F]`` and down ``[E, F, D]``, and `gate` is the
    activation.

    Each device sorts only the tokens of its ``expert`` group. The kernels are gathered over all
    mesh axes that shard rows, except ``expert``.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return _of_experts(kernels, x_BLD, ids_BLK, weights_BLK, gate=gate)
    rows = fitting(PLACES["hidden"], x_BLD.shape[:2], mesh)
    inward = fitting(P("expert", None, "tensor"), kernels[0].shape, mesh)
    outward = fitting(P("expert", "tensor", None), kernels[2].shape, mesh)
    splits_experts, splits_inner = inward[0] is not None, inward[2] is not None
    splits_rows = splits_experts and "expert" in (rows[0] or ())

    def of_share(kernels: Any, *own: Any) -> jax.Array:
        if splits_rows:
            own = tuple(jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in own)
        first = jax.lax.axis_index("expert") * kernels[0].shape[0] if splits_experts else None
        y_BLD = _of_experts(kernels, *own, gate=gate, first=first)
        if splits_inner:
            y_BLD = jax.lax.psum(y_BLD, "tensor")
        if splits_rows:
            return jax.lax.psum_scatter(y_BLD, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(y_BLD, "expert") if splits_experts else y_BLD

    specs = (inward, inward, outward), rows, rows, rows
    split = jax.shard_map(of_share, in_specs=specs, out_specs=rows, check_vma=False)
    return split(kernels, x_BLD, ids_BLK, weights_BLK)


def _of_experts(
    kernels: Any,
    x_BLD: jax.Array,
    ids_BLK: jax.Array,
    weights_BLK: jax.Array,
    *,
    gate: Any,
    first: jax.Array | None = None,
) -> jax.Array:
    """`mixture` of experts that are on one device, the first of which has the id `first`.

    Tokens are sorted by expert, so that each of the three projections is one grouped matrix
    product. None means that `kernels` has all experts; others contribute nothing.
    """
    x_ND, ids_NK, weights_NK = (a.reshape(-1, a.shape[-1]) for a in (x_BLD, ids_BLK, weights_BLK))
    gate_EDF, up_EDF, down_EFD = kernels
    num_experts, is_here_NK = gate_EDF.shape[0], None
    if first is not None:
        ids_NK = ids_NK - first
        is_here_NK = (ids_NK >= 0) & (ids_NK < num_experts)
        # Tokens for experts on other devices are sorted last, outside every group.
        ids_NK = jnp.where(is_here_NK, ids_NK, num_experts)
    order_P = jnp.argsort(ids_NK.reshape(-1), stable=True)
    sizes_E = jnp.bincount(ids_NK.reshape(-1), length=num_experts).astype(jnp.int32)
    x_PD = x_ND[order_P // ids_NK.shape[1]]
    inner_PF = gate(jax.lax.ragged_dot(x_PD, gate_EDF, sizes_E))
    inner_PF *= jax.lax.ragged_dot(x_PD, up_EDF, sizes_E)
    y_PD = jax.lax.ragged_dot(inner_PF, down_EFD, sizes_E)
    y_NKD = y_PD[jnp.argsort(order_P)].reshape(*ids_NK.shape, -1)
    if is_here_NK is not None:
        y_NKD = jnp.where(is_here_NK[:, :, None], y_NKD, 0)
    y_ND = jnp.sum(y_NKD * weights_NK[:, :, None], axis=1)
    return y_ND.astype(x_BLD.dtype).reshape(x_BLD.shape)
