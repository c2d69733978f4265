"""The Transformer, built with Flax NNX and exposed as pure functions.

NNX is used to declare and initialise parameters; it is not used outside `model/`. `build` returns a
`dlm_jax.types.Network` over a plain nested dict of float32 arrays whose layers are stacked along a
leading axis and run by one `jax.lax.scan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import pin
from dlm_jax.model.attention import (
    attend,
    attend_in_blocks,
    attention_weights,
    rotary_angles,
    turned,
)
from dlm_jax.model.cached import cached_trunk, one_later, shifted
from dlm_jax.model.experts import Experts
from dlm_jax.model.kernels import cpu
from dlm_jax.model.layers import Linear, Norm, embed, rematerialised
from dlm_jax.model.lora import applied, stacks, with_adapters
from dlm_jax.randomness import key_of
from dlm_jax.types import Inside, Network, Params, live_positions


class SamplerHead(nnx.Module):
    """A two-layer MLP over a position's hidden vector and the embeddings of its neighbours.

    Its features are read out by the LM head. It reads ``model.sampler_context`` neighbours on each
    side, by default one. With
    ``model.sampler_residual`` the second layer, without SiLU and zero at first, adds to the hidden
    vector.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, inner = config.width, config.sampler_width or config.width
        self.is_residual = config.sampler_residual
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        norm = functools.partial(Norm, kind=config.norm, epsilon=config.norm_epsilon)
        self.inner = linear((1 + 2 * config.sampler_context) * width, inner, scale=1.0)
        self.inner_norm = norm(inner)
        self.out = linear(inner, width, scale=0.0 if self.is_residual else 1.0)
        self.out_norm = norm(width)

    def __call__(self, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array):
        """Features ``[N, D]``; nearest neighbours first, a zero vector for a missing one."""
        num = hidden_ND.shape[0]
        sides = (left_NCD.reshape(num, -1), hidden_ND, right_NCD.reshape(num, -1))
        together = jnp.concatenate([x.astype(hidden_ND.dtype) for x in sides], axis=1)
        return self._features(self.inner(together), hidden_ND)

    def sides(self, vector_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Contributions of vectors to the first layer, per neighbour: left and right ``[V, C, H]``.

        The layer is linear, so these tables save most of its work if few tokens serve many
        positions.
        """
        kernel = self.inner.kernel[...].astype(vector_VD.dtype)
        num, width = vector_VD.shape
        reach = (kernel.shape[0] // width - 1) // 2
        parts = kernel.reshape(1 + 2 * reach, width, -1)

        def table(parts_CDH: jax.Array) -> jax.Array:
            flat = vector_VD @ jnp.moveaxis(parts_CDH, 0, 1).reshape(width, -1)
            return flat.reshape(num, reach, -1)

        return table(parts[:reach]), table(parts[reach + 1 :])

    def from_sides(self, sides_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        """Features ``[N, D]`` from the summed contributions of the neighbours."""
        kernel = self.inner.kernel[...].astype(hidden_ND.dtype)
        width = hidden_ND.shape[1]
        first = (kernel.shape[0] - width) // 2
        own_NH = hidden_ND @ kernel[first : first + width]
        return self._features(own_NH + sides_NH.astype(hidden_ND.dtype), hidden_ND)

    def _features(self, inner_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        x_ND = self.inner_norm(jax.nn.silu(inner_NH))
        if self.is_residual:
            return self.out_norm(hidden_ND + self.out(x_ND))
        return self.out_norm(jax.nn.silu(self.out(x_ND)))


class CriticHead(nnx.Module):
    """A linear map from a hidden vector to the logit that the token there is wrong."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.out = Linear(config.width, 1, scale=0.0, bias=False, rngs=rngs)

    def __call__(self, hidden_ND: jax.Array) -> jax.Array:
        """Logits, float32 ``[N]``."""
        return self.out(hidden_ND)[..., 0].astype(jnp.float32)


class ScorerHead(nnx.Module):
    """The logit of the share of a row's tokens that are corrupted, from their mean vector."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.inner = Linear(config.width, config.width, scale=1.0, bias=True, rngs=rngs)
        self.out = Linear(config.width, 1, scale=0.0, bias=True, rngs=rngs)

    def __call__(self, hidden_BLD: jax.Array, is_live_BL: jax.Array) -> jax.Array:
        """Logits, float32 ``[B]``."""
        live = is_live_BL[:, :, None]
        total_BD = jnp.sum(jnp.where(live, hidden_BLD.astype(jnp.float32), 0.0), axis=1)
        mean_BD = total_BD / jnp.maximum(jnp.sum(live, axis=1), 1)
        return self.out(jax.nn.silu(self.inner(mean_BD)))[:, 0]


HEADS: dict[str, Any] = {
    "sampler_head": SamplerHead,
    "critic_head": CriticHead,
    "scorer_head": ScorerHead,
}


def heads_of(config: ModelConfig) -> tuple[str, ...]:
    """Names of the parameter groups of its heads, in the order they are drawn."""
    has = {
        "sampler_head": config.add_sampler_head,
        "critic_head": config.add_critic_head,
        "scorer_head": config.mode == "sequence_scorer",
    }
    return tuple(name for name in HEADS if has[name])


class Attention(nnx.Module):
    """Multi-head attention over ``length`` positions with RoPE and optional QK-norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.head_size = config.size_of_head
        self.is_causal = config.attention_type == "causal"
        self.block_length = config.block_length
        all_heads = config.heads * self.head_size
        kv_width = (config.kv_heads or config.heads) * self.head_size
        bias = config.qkv_bias
        self.query = Linear(config.width, all_heads, scale=1.0, bias=bias, rngs=rngs)
        self.key = Linear(config.width, kv_width, scale=1.0, bias=bias, rngs=rngs)
        self.value = Linear(config.width, kv_width, scale=1.0, bias=bias, rngs=rngs)
        self.out = Linear(all_heads, config.width, scale=0.0, bias=False, rngs=rngs)
        norm = functools.partial(Norm, self.head_size, kind="rms", epsilon=config.norm_epsilon)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def project(self, x_BLD: jax.Array, angles: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries ``[B, L, H, K]``, keys and values ``[B, L, G, K]`` at positions of those angles.

        Keys are cached in this form: normalised and rotated.
        """

        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, self.head_size)

        q, k, v = heads(self.query(x_BLD)), heads(self.key(x_BLD)), heads(self.value(x_BLD))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = turned(q, *angles), turned(k, *angles)
        return pin(q, "queries"), pin(k, "keys"), pin(v, "keys")

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, length_B: jax.Array) -> jax.Array:
        """Attention output of whole rows, ``[B, L, H, K]``."""
        if self.block_length:
            return attend_in_blocks(q, k, v, length_B, block_length=self.block_length)
        return attend(q, k, v, length_B, is_causal=self.is_causal)

    def weights(self, q: jax.Array, k: jax.Array, length_B: jax.Array) -> jax.Array:
        """The weights of `attend`, ``[B, H, L, L]``."""
        return attention_weights(
            q, k, length_B, is_causal=self.is_causal, block_length=self.block_length
        )

    def join(self, y_BLHK: jax.Array) -> jax.Array:
        """Output projection ``[B, L, D]`` of the heads."""
        y_BLHK = pin(y_BLHK, "queries")
        return self.out(y_BLHK.reshape(*y_BLHK.shape[:2], -1))


class Mlp(nnx.Module):
    """The position-wise MLP: squared ReLU (So et al. 2021), GELU, or SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        is_gated = config.activation == "swiglu"
        inner = config.inner_width
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        self.gate = linear(config.width, inner, scale=1.0) if is_gated else None
        self.up = linear(config.width, inner, scale=1.0)
        self.down = linear(inner, config.width, scale=0.0)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        up = self.up(x_BLD)
        if self.gate is not None:
            inner = jax.nn.silu(self.gate(x_BLD)) * up
        elif self.activation == "gelu":
            inner = jax.nn.gelu(up)
        else:
            inner = jnp.square(jax.nn.relu(up))
        return self.down(pin(inner, "inner"))


class Block(nnx.Module):
    """A pre-norm Transformer block: attention, then the MLP, each added to its input.

    With ``config.experts``, a mixture of experts replaces the MLP unless `is_dense`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_dense: bool = False):
        norm = functools.partial(Norm, config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm()
        make_mlp = Experts if config.experts and not is_dense else Mlp
        self.mlp = make_mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, length_B: jax.Array, angles: Any) -> jax.Array:
        """Hidden vectors after the block, ``[B, L, D]``."""
        return self.around(x_BLD, angles, lambda q, k, v: self.attention.attend(q, k, v, length_B))

    def around(self, x_BLD: jax.Array, angles: Any, attend: Callable[..., jax.Array]) -> jax.Array:
        """Hidden vectors after the block with that attention ``(q, k, v) -> [B, L, H, K]``."""
        x_BLD = pin(x_BLD, "hidden")
        q, k, v = self.attention.project(self.attention_norm(x_BLD), angles)
        x_BLD = x_BLD + self.attention.join(attend(q, k, v))
        return pin(x_BLD + self.mlp(self.mlp_norm(x_BLD)), "hidden")


class Transformer(nnx.Module):
    """Parameters of the whole model; `blocks` are stacked along a leading axis of ``depth``.

    If the blocks have experts, `dense_blocks` are the first ``dense_layers``, which have none.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
        self.embedding = nnx.Param(table * 0.02)

        def stacked(depth: int, is_dense: bool) -> Block:
            @nnx.split_rngs(splits=depth)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs, is_dense=is_dense)

            return blocks(rngs)

        num_dense = config.dense_layers
        self.dense_blocks = stacked(num_dense, True) if num_dense else None
        self.blocks = stacked(config.depth - num_dense, False)
        self.norm = Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.head = (
            None
            if config.tied_head
            else Linear(config.width, config.vocab_size, scale=0.02, bias=False, rngs=rngs)
        )
        # Drawn last, so that the other parameters are the same with and without heads.
        for name, head in HEADS.items():
            setattr(self, name, head(config, rngs=rngs) if name in heads_of(config) else None)


@functools.cache
def build(config: ModelConfig) -> Network:
    """The network of `config` as pure functions; equal configs return the same `Network`.

    The input of a causal network is shifted right by one, after ``start_id``: the output at a
    position depends only on the tokens before it and predicts the token there.
    """
    if config.vocab_size < 1:
        raise ValueError("model.vocab_size=0 is unresolved; set it to the tokenizer's vocabulary")
    is_causal = config.attention_type == "causal"
    if is_causal and config.start_id < 0:
        raise ValueError("model.start_id=-1 is unresolved; set it to the tokenizer's MASK")
    dtype = jnp.dtype(config.compute_dtype)
    # The graph definitions have structure but no arrays; parameters are plain dicts of arrays.
    module_of = _block_modules(config)
    norm_graph, _ = nnx.split(
        nnx.eval_shape(lambda: Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon))
    )

    def init(key: jax.Array) -> Params:
        model = Transformer(config, rngs=nnx.Rngs(params=key))
        return with_adapters(key, nnx.to_pure_dict(nnx.state(model, nnx.Param)), config)

    def vectors_of(params: Params, ids: jax.Array) -> jax.Array:
        return embed(params, ids).astype(dtype)

    def final_norm(params: Params, x_BLD: jax.Array) -> jax.Array:
        return nnx.merge(norm_graph, params["norm"])(x_BLD)

    run_block = rematerialised(
        lambda x_BLD, block, context: module_of(block)(x_BLD, *context), config.remat
    )

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        if is_causal:
            tokens_BL = shifted(tokens_BL, config.start_id)
        size = config.rotary_size
        angles = rotary_angles(tokens_BL.shape[1], size, config.rope_theta)
        x_BLD = vectors_of(params, tokens_BL)
        for blocks in stacks(params):
            x_BLD = cpu.run_blocks(run_block, x_BLD, blocks, (length_B, angles))
        x_BLD = final_norm(params, x_BLD)
        return one_later(x_BLD) if config.logit_alignment == "shifted" else x_BLD, cache

    readout, logits_of = _readouts(config)
    cached = None
    if config.mode == "language_model":
        cached = cached_trunk(config, vectors_of, module_of, final_norm)
    return Network(
        init, trunk, embed, readout, config.vocab_size, logits_of=logits_of,
        cached=cached,
        inside=_inside_of(config, vectors_of, module_of), **_head_functions(config, readout),
    )  # fmt: skip


def _inside_of(
    config: ModelConfig,
    vectors_of: Callable[[Params, jax.Array], jax.Array],
    module_of: Callable[[Params], Any],
) -> Callable[[Params, jax.Array, jax.Array], Inside]:
    """The function of `Network.inside`: the trunk, block by block, by the plain formula."""

    def inside(params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> Inside:
        if config.attention_type == "causal":
            tokens_BL = shifted(tokens_BL, config.start_id)
        angles = rotary_angles(tokens_BL.shape[1], config.rotary_size, config.rope_theta)
        hidden, maps = [vectors_of(params, tokens_BL)], []
        for blocks in stacks(params):
            for number in range(jax.tree.leaves(blocks)[0].shape[0]):
                block = module_of(jax.tree.map(lambda leaf, at=number: leaf[at], blocks))

                def attended(q: Any, k: Any, v: Any, own: Attention = block.attention) -> Any:
                    maps.append(own.weights(q, k, length_B))
                    v_BLHK = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
                    return jnp.einsum("bhlm,bmhk->blhk", maps[-1].astype(v.dtype), v_BLHK)

                hidden.append(block.around(hidden[-1], angles, attended))
        return Inside(jnp.stack(hidden, axis=1), jnp.stack(maps, axis=1))

    return inside


def _readouts(config: ModelConfig) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """`Network.readout` and `Network.logits_of` of the LM head."""

    def readout(params: Params, hidden_ND: jax.Array) -> jax.Array:
        if config.tied_head:
            kernel_DV = params["embedding"].T
        else:
            kernel_DV = params["head"]["kernel"]
        logits = cpu.linear(hidden_ND, kernel_DV.astype(hidden_ND.dtype))
        return logits.astype(jnp.float32)

    def logits_of(params: Params, hidden_ND: jax.Array, ids_NK: jax.Array) -> jax.Array:
        rows_VD = params["embedding"] if config.tied_head else params["head"]["kernel"].T
        columns_NKD = jnp.take(rows_VD, ids_NK, axis=0).astype(hidden_ND.dtype)
        logits_NK = jnp.matmul(columns_NKD, hidden_ND[:, :, None])[..., 0]
        return logits_NK.astype(jnp.float32)

    return readout, logits_of


def _block_modules(config: ModelConfig) -> Callable[[Params], Any]:
    """``(parameters) -> module`` of one block, of the kind that these parameters imply."""

    def graph(is_dense: bool) -> Any:
        def make() -> Block:
            return Block(config, rngs=nnx.Rngs(params=key_of(0)), is_dense=is_dense)

        return nnx.split(nnx.eval_shape(make))[0]

    usual, dense = graph(False), graph(True)

    def module_of(block: Params) -> Any:
        return nnx.merge(dense if "up" in block["mlp"] else usual, applied(block, config))

    return module_of


def _head_functions(config: ModelConfig, readout: Callable[..., jax.Array]) -> dict[str, Any]:
    """The functions of the heads of `config` in its `Network`."""

    def graph(name: str) -> Any:
        made = nnx.eval_shape(lambda: HEADS[name](config, rngs=nnx.Rngs(params=key_of(0))))
        return nnx.split(made)[0]

    graphs = {name: graph(name) for name in heads_of(config)}

    def head(name: str, params: Params) -> Any:
        return nnx.merge(graphs[name], params[name])

    def sampler_readout(
        params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
    ) -> jax.Array:
        return readout(params, head("sampler_head", params)(left_NCD, hidden_ND, right_NCD))

    def sampler_sides(params: Params, vectors_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return head("sampler_head", params).sides(vectors_VD)

    def sampler_from_sides(params: Params, sides_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        return readout(params, head("sampler_head", params).from_sides(sides_NH, hidden_ND))

    def critic(params: Params, hidden_ND: jax.Array) -> jax.Array:
        return head("critic_head", params)(hidden_ND)

    def scorer(params: Params, hidden_BLD: jax.Array, length_B: jax.Array) -> jax.Array:
        is_live_BL = live_positions(length_B, hidden_BLD.shape[1])
        return head("scorer_head", params)(hidden_BLD, is_live_BL)

    found: dict[str, Any] = {}
    if "sampler_head" in graphs:
        found |= {
            "sampler_readout": sampler_readout,
            "sampler_context": config.sampler_context,
            "sampler_sides": sampler_sides,
            "sampler_from_sides": sampler_from_sides,
        }
    if "critic_head" in graphs:
        found["critic"] = critic
    if "scorer_head" in graphs:
        found["scorer"] = scorer
    return found
