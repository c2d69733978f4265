"""The Transformer, built with Flax NNX and exposed as pure functions.

NNX declares and initialises the parameters; it is not used outside `model/`. `build` returns a
`dlm_jax.types.Network` over a plain nested dict of float32 arrays. Layers are stacked along a
leading axis and run in one `jax.lax.scan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import pin
from dlm_jax.heads import HEADS, BuiltInHead
from dlm_jax.model.attention import (
    apart,
    attend,
    attend_beside_clean,
    attend_in_blocks,
    attention_weights,
    rotary_angles,
    turned,
)
from dlm_jax.model.cached import cached_trunk, one_later, shifted
from dlm_jax.model.canvas import Canvases, stacks_of
from dlm_jax.model.context import attend_beside_gathered, noisy_in_order, paired, pieces_of
from dlm_jax.model.experts import Experts
from dlm_jax.model.kernels import cpu
from dlm_jax.model.layers import (
    GATES,
    Linear,
    Norm,
    declared,
    embed,
    parameter,
    rematerialised,
    unit_norm,
)
from dlm_jax.model.lora import GROUP, applied, stacks, with_adapters
from dlm_jax.randomness import key_of
from dlm_jax.types import Axes, Inside, Network, Params


def head_layers(head: BuiltInHead, config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Dict:
    """The layers of a built-in head."""
    linear = functools.partial(Linear, bias=False, rngs=rngs)
    norm = functools.partial(Norm, kind=config.norm, epsilon=config.norm_epsilon)
    return nnx.Dict(head.layers(config, linear, norm))


class Attention(nnx.Module):
    """Multi-head attention over the live positions, with RoPE and optional QK-norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_full: bool = False):
        self.head_size = (config.full_head_size if is_full else 0) or config.size_of_head
        self.scale, self.value_epsilon = config.attention_scale, config.norm_epsilon
        self.norms_value = config.value_norm
        self.is_causal = config.attention_type == "causal"
        self.block_length = config.block_length
        all_heads = config.heads * self.head_size
        groups = (config.full_kv_heads if is_full else 0) or config.kv_heads or config.heads
        kv_width = groups * self.head_size
        project = functools.partial(
            Linear,
            config.width,
            scale=1.0,
            bias=config.qkv_bias,
            rngs=rngs,
            axes=("embed", "heads"),
        )
        self.query = project(all_heads)
        self.key = project(kv_width)
        self.value = None if is_full and config.full_value_from_key else project(kv_width)
        self.out = Linear(
            all_heads, config.width, scale=0.0, bias=False, rngs=rngs, axes=("heads", "embed")
        )
        norm = functools.partial(Norm, self.head_size, kind="rms", epsilon=config.norm_epsilon)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def project(
        self, x_BLD: jax.Array, angles: Any, keys: str = "keys"
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries ``[B, L, H, K]``, keys and values ``[B, L, G, K]``, rotated by `angles`.

        The keys are cached in this normalised and rotated form. `keys` is the partition of keys and
        values, a key of `dlm_jax.distributed.partitions.PLACES`.
        """

        def heads(x: jax.Array) -> jax.Array:
            return apart(x).reshape(*x.shape[:2], -1, self.head_size)

        q = heads(checkpoint_name(self.query(x_BLD), "query"))
        k = heads(checkpoint_name(self.key(x_BLD), "key"))
        v = k if self.value is None else heads(checkpoint_name(self.value(x_BLD), "value"))
        if self.norms_value:
            v = unit_norm(v, self.value_epsilon)
        q, k = (
            turned(x, *angles)
            if norm is None
            else turned(x, *angles, scale_K=norm.scale[...], epsilon=norm.epsilon)
            for x, norm in ((q, self.query_norm), (k, self.key_norm))
        )
        if self.scale:
            # The kernels divide by the square root of the head size.
            q = (q.astype(jnp.float32) * (self.scale * self.head_size**0.5)).astype(q.dtype)
        return pin(q, "queries"), pin(k, keys), pin(v, keys)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, length_B: jax.Array) -> jax.Array:
        """Attention output for whole rows, ``[B, L, H, K]``."""
        if self.block_length:
            return attend_in_blocks(q, k, v, length_B, block_length=self.block_length)
        return attend(q, k, v, length_B, is_causal=self.is_causal)

    def weights(self, q: jax.Array, k: jax.Array, length_B: jax.Array) -> jax.Array:
        """The weights of `attend`, ``[B, H, L, L]``."""
        return attention_weights(
            q, k, length_B, is_causal=self.is_causal, block_length=self.block_length
        )

    def join(self, y_BLHK: jax.Array) -> jax.Array:
        """The heads' outputs projected to ``[B, L, D]``."""
        y_BLHK = pin(y_BLHK, "queries")
        return self.out(y_BLHK.reshape(*y_BLHK.shape[:2], -1))


class Mlp(nnx.Module):
    """The position-wise MLP, with squared ReLU (So et al. 2021), GELU, or a gate (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        is_gated = config.is_gated
        inner = config.inner_width
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        into = functools.partial(linear, config.width, inner, scale=1.0, axes=("embed", "mlp"))
        self.gate = into() if is_gated else None
        self.up = into()
        self.down = linear(inner, config.width, scale=0.0, axes=("mlp", "embed"))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        up = checkpoint_name(self.up(x_BLD), "up")
        if self.gate is not None:
            gate = checkpoint_name(self.gate(x_BLD), "gate")
            inner = GATES[self.activation](gate) * up
        elif self.activation == "gelu":
            inner = jax.nn.gelu(up)
        else:
            inner = jnp.square(jax.nn.relu(up))
        return self.down(pin(inner, "inner"))


class Block(nnx.Module):
    """A pre-norm Transformer block: attention, then the MLP, each added to its input.

    With ``config.experts``, a mixture of experts replaces the MLP (unless `is_dense`) or, with
    ``config.experts_beside``, is added to its output. With ``config.post_norms``, the outputs of
    attention and of the MLP are also normalised.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        is_dense: bool = False,
        is_full: bool = False,
    ):
        norm = functools.partial(Norm, config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, is_full=is_full)
        self.mlp_norm = norm()
        is_beside = config.experts_beside
        make_mlp = Experts if config.experts and not is_dense and not is_beside else Mlp
        self.mlp = make_mlp(config, rngs=rngs)
        has_posts = config.post_norms
        self.attention_out_norm = norm() if has_posts else None
        self.mlp_out_norm = norm() if has_posts else None
        self.experts = Experts(config, rngs=rngs) if is_beside else None
        self.experts_norm = norm() if is_beside else None
        self.dense_out_norm = norm() if is_beside else None
        self.experts_out_norm = norm() if is_beside else None
        has_scales = config.layer_scales
        self.text_scale = parameter(jnp.ones(1, jnp.float32), None) if has_scales else None
        self.canvas_scale = parameter(jnp.ones(1, jnp.float32), None) if has_scales else None

    def __call__(self, x_BLD: jax.Array, length_B: jax.Array, angles: Any) -> jax.Array:
        """Hidden vectors after the block, ``[B, L, D]``."""
        return self.around(x_BLD, angles, lambda q, k, v: self.attention.attend(q, k, v, length_B))

    def around(
        self,
        x_BLD: jax.Array,
        angles: Any,
        attend: Callable[..., jax.Array],
        keys: str = "keys",
    ) -> jax.Array:
        """Hidden vectors after the block; `attend` maps ``(q, k, v)`` to ``[B, L, H, K]``.

        `keys` is as in `Attention.project`.
        """
        x_BLD = pin(x_BLD, "hidden")
        q, k, v = self.attention.project(self.attention_norm(x_BLD), angles, keys)
        y_BLD = self.attention.join(attend(q, k, v))
        if self.attention_out_norm is not None:
            y_BLD = self.attention_out_norm(y_BLD)
        x_BLD = checkpoint_name(x_BLD + y_BLD, "middle")
        return pin(x_BLD + self._update(x_BLD), "hidden")

    def behind(
        self,
        x_BLD: jax.Array,
        angles: Any,
        attend: Callable[..., jax.Array],
        is_canvas_BL: jax.Array,
    ) -> jax.Array:
        """Like `around`, but multiplies the output by the block's scale if the block has scales.

        Text positions and canvas positions have different scales; `is_canvas_BL` can be ``[B, 1]``.
        """
        x_BLD = self.around(x_BLD, angles, attend)
        if self.text_scale is None or self.canvas_scale is None:
            return x_BLD
        of_canvas, of_text = self.canvas_scale[...][None, None], self.text_scale[...][None, None]
        scale_BL1 = jnp.where(is_canvas_BL[:, :, None], of_canvas, of_text)
        return x_BLD * scale_BL1.astype(x_BLD.dtype)

    def _update(self, x_BLD: jax.Array) -> jax.Array:
        """The output of the MLP, plus the output of ``experts`` if the block has both."""
        y_BLD = self.mlp(self.mlp_norm(x_BLD))
        if self.experts is not None:
            assert self.experts_norm and self.dense_out_norm and self.experts_out_norm
            of_experts_BLD = self.experts(self.experts_norm(x_BLD), x_BLD)
            y_BLD = self.dense_out_norm(y_BLD) + self.experts_out_norm(of_experts_BLD)
        return y_BLD if self.mlp_out_norm is None else self.mlp_out_norm(y_BLD)


class SelfConditioning(nnx.Module):
    """Adds the previous step's predictions to canvas embeddings (Chen et al. 2022)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.mlp = Mlp(config, rngs=rngs)
        self.epsilon = config.norm_epsilon

    def __call__(self, x_BLD: jax.Array, signal_BLD: jax.Array) -> jax.Array:
        """The normalised sum of the embeddings and the transformed signal, ``[B, L, D]``."""
        return unit_norm(x_BLD + self.mlp(self.norm(signal_BLD)), self.epsilon)


class Transformer(nnx.Module):
    """The whole model; `blocks` are stacked along a leading axis.

    In a model with experts, `dense_blocks` are the first ``dense_layers`` layers, without experts.
    With ``full_every``, `full_blocks` are the layers that attend to all positions.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
        self.embedding = parameter(table * 0.02, "vocab", "embed")

        def stacked(depth: int, is_dense: bool, is_full: bool = False) -> Block:
            @nnx.split_rngs(splits=depth)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs, is_dense=is_dense, is_full=is_full)

            return blocks(rngs)

        num_dense, num_full = config.dense_layers, len(config.layers["full_blocks"])
        self.dense_blocks = stacked(num_dense, True) if num_dense else None
        self.blocks = stacked(config.depth - num_dense - num_full, False)
        self.full_blocks = stacked(num_full, False, True) if num_full else None
        self.norm = Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.head = (
            None
            if config.tied_head
            else Linear(
                config.width,
                config.vocab_size,
                scale=0.02,
                bias=False,
                rngs=rngs,
                axes=("embed", "vocab"),
                is_matrix=False,
            )
        )
        has_signal = config.self_conditioning
        self.self_conditioning = SelfConditioning(config, rngs=rngs) if has_signal else None
        # Heads are initialised last, so that the other parameters do not depend on them.
        for head in HEADS:
            is_added = head.is_added(config)
            setattr(self, head.name, head_layers(head, config, rngs=rngs) if is_added else None)


@functools.cache
def build(config: ModelConfig) -> Network:
    """Builds the network of `config` as pure functions; calls with equal configs return the same
    `Network`.

    The input of a causal network is ``start_id`` followed by all tokens except the last. The output
    at a position depends only on earlier tokens and predicts the token at that position. With
    shifted predictions, the input is the tokens themselves, and the output at a position is that of
    the token before it, so the first token has no prediction (`Network.predicts_first`).
    """
    if config.vocab_size < 1:
        raise ValueError("model.vocab_size=0 is unresolved; set it to the tokenizer's vocabulary")
    if config.has_start and config.start_id < 0:
        raise ValueError("model.start_id=-1 is unresolved; set it to the tokenizer's MASK")
    dtype = jnp.dtype(config.compute_dtype)
    # Graph definitions contain structure but no arrays; parameters are plain dicts of arrays.
    module_of = _block_modules(config)
    norm_graph, _ = nnx.split(
        nnx.eval_shape(lambda: Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon))
    )

    def init(key: jax.Array) -> Params:
        model = Transformer(config, rngs=nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return with_adapters(key, params, declared(model), config)

    @functools.cache
    def of_layers() -> Params:
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=key_of(0))))
        return declared(model)

    def axes(params: Params) -> Params:
        adapters = jax.tree.map(lambda _: Axes(), params.get(GROUP))
        return {
            name: tree for name, tree in {**of_layers(), GROUP: adapters}.items() if name in params
        }

    def vectors_of(params: Params, ids: jax.Array) -> jax.Array:
        vectors = embed(params, ids).astype(dtype)
        if config.embedding_scaled:
            vectors = vectors * jnp.asarray(config.width**0.5, dtype)
        return vectors

    def final_norm(params: Params, x_BLD: jax.Array) -> jax.Array:
        return nnx.merge(norm_graph, params["norm"])(x_BLD)

    run_block = rematerialised(
        lambda x_BLD, block, context: module_of(block)(x_BLD, *context), config
    )

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        if config.has_start:
            tokens_BL = shifted(tokens_BL, config.start_id)
        size = config.rotary_size
        angles = rotary_angles(tokens_BL.shape[1], size, config.rope_theta, config.rope_scaling)
        x_BLD = vectors_of(params, tokens_BL)
        for blocks in stacks(params):
            x_BLD = cpu.run_blocks(run_block, x_BLD, blocks, (length_B, angles))
        x_BLD = final_norm(params, x_BLD)
        return one_later(x_BLD) if config.logit_alignment == "shifted" else x_BLD, cache

    readout, logits_of = _readouts(config)
    if config.attention_type == "canvas":
        return Network(
            init=init,
            embed=embed,
            readout=readout,
            vocab_size=config.vocab_size,
            logits_of=logits_of,
            axes=axes,
            **_canvases(config, vectors_of, module_of, final_norm).functions(),
        )
    return Network(
        init,
        trunk,
        embed,
        readout,
        config.vocab_size,
        logits_of=logits_of,
        cached=cached_trunk(config, vectors_of, module_of, final_norm),
        beside_clean=(
            _beside_clean_of(config, vectors_of, module_of, final_norm)
            if config.attention_type == "block_causal"
            else None
        ),
        axes=axes,
        inside=_inside_of(config, vectors_of, module_of, final_norm),
        heads={
            head.key: _head_function(head, config, readout)
            for head in HEADS
            if head.is_added(config)
        },
        predicts_first=config.predicts_first,
    )


def _beside_clean_of(
    config: ModelConfig,
    vectors_of: Callable[[Params, jax.Array], jax.Array],
    module_of: Callable[[Params], Any],
    final_norm: Callable[[Params, jax.Array], jax.Array],
) -> Callable[..., jax.Array]:
    """Makes `Network.beside_clean`, which runs the noisy and the clean rows side by side."""

    def beside_clean(
        params: Params,
        shown_BL: jax.Array,
        clean_BL: jax.Array,
        length_B: jax.Array,
        *,
        block_length: int = config.block_length,
    ) -> jax.Array:
        num_positions = shown_BL.shape[1]
        pieces = pieces_of(num_positions, block_length)
        angles = rotary_angles(
            num_positions, config.rotary_size, config.rope_theta, config.rope_scaling
        )
        attend, keys = attend_beside_clean, "keys"
        if pieces is None:
            tokens = jnp.concatenate([shown_BL, clean_BL])
        else:
            tokens = paired(shown_BL, clean_BL, pieces)
            position_L = pieces.position(np.arange(num_positions))
            angles = tuple(table_LK[position_L] for table_LK in angles)
            attend = functools.partial(attend_beside_gathered, pieces=pieces)
            keys = "queries"

        def layer(x: jax.Array, block: Params, context: tuple[Any, ...]) -> jax.Array:
            length_B, turns = context
            return module_of(block).around(
                x,
                turns,
                lambda q, k, v: attend(q, k, v, length_B, block_length=block_length),
                keys,
            )

        layer = rematerialised(layer, config)
        x = vectors_of(params, tokens)
        for blocks in stacks(params):
            x = cpu.run_blocks(layer, x, blocks, (length_B, angles))
        x = x[: shown_BL.shape[0]] if pieces is None else noisy_in_order(x, pieces)
        x_BLD = final_norm(params, x)
        return one_later(x_BLD) if config.logit_alignment == "shifted" else x_BLD

    return beside_clean


def _inside_of(
    config: ModelConfig,
    vectors_of: Callable[[Params, jax.Array], jax.Array],
    module_of: Callable[[Params], Any],
    final_norm: Callable[[Params, jax.Array], jax.Array],
) -> Callable[[Params, jax.Array, jax.Array], Inside]:
    """Makes `Network.inside`, which runs the blocks one by one with plain attention."""

    def inside(params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> Inside:
        if config.has_start:
            tokens_BL = shifted(tokens_BL, config.start_id)
        angles = rotary_angles(
            tokens_BL.shape[1], config.rotary_size, config.rope_theta, config.rope_scaling
        )
        hidden, maps = [vectors_of(params, tokens_BL)], []
        for blocks in stacks(params):
            for number in range(jax.tree.leaves(blocks)[0].shape[0]):
                block = module_of(jax.tree.map(lambda leaf, at=number: leaf[at], blocks))

                def attended(q: Any, k: Any, v: Any, own: Attention = block.attention) -> Any:
                    maps.append(own.weights(q, k, length_B))
                    v_BLHK = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
                    return jnp.einsum("bhlm,bmhk->blhk", maps[-1].astype(v.dtype), v_BLHK)

                hidden.append(block.around(hidden[-1], angles, attended))
        final_BLD = final_norm(params, hidden[-1])
        if config.logit_alignment == "shifted":
            final_BLD = one_later(final_BLD)
        return Inside(jnp.stack(hidden, axis=1), jnp.stack(maps, axis=1), final_BLD)

    return inside


def _canvases(
    config: ModelConfig,
    vectors_of: Callable[[Params, jax.Array], jax.Array],
    module_of: Callable[[Params], Any],
    final_norm: Callable[[Params, jax.Array], jax.Array],
) -> Canvases:
    """The `Canvases` of `config`, which define the functions of a network with canvases."""
    full_of = _block_modules(config, is_full=True) if config.full_every else module_of
    conditioned = _conditioning(config) if config.self_conditioning else None
    layers = stacks_of(config, module_of, full_of)
    return Canvases(config, vectors_of, final_norm, conditioned, layers)


def _conditioning(config: ModelConfig) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """The function ``(params, x_BLD, signal_BLD) -> x_BLD`` that adds the signal to embeddings."""

    def make() -> SelfConditioning:
        return SelfConditioning(config, rngs=nnx.Rngs(params=key_of(0)))

    graph = nnx.split(nnx.eval_shape(make))[0]

    def conditioned(params: Params, x_BLD: jax.Array, signal_BLD: jax.Array) -> jax.Array:
        return nnx.merge(graph, params["self_conditioning"])(x_BLD, signal_BLD)

    return conditioned


def _readouts(config: ModelConfig) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """The functions `Network.readout` and `Network.logits_of` of the LM head."""
    cap = config.logit_cap

    def capped(logits: jax.Array) -> jax.Array:
        return cap * jnp.tanh(logits / cap) if cap else logits

    def readout(params: Params, hidden_ND: jax.Array) -> jax.Array:
        if config.tied_head:
            logits = cpu.linear_by_rows(hidden_ND, params["embedding"].astype(hidden_ND.dtype))
        else:
            logits = cpu.linear(hidden_ND, params["head"]["kernel"].astype(hidden_ND.dtype))
        return capped(logits.astype(jnp.float32))

    def logits_of(params: Params, hidden_ND: jax.Array, ids_NK: jax.Array) -> jax.Array:
        rows_VD = params["embedding"] if config.tied_head else params["head"]["kernel"].T
        columns_NKD = jnp.take(rows_VD, ids_NK, axis=0).astype(hidden_ND.dtype)
        logits_NK = jnp.matmul(columns_NKD, hidden_ND[:, :, None])[..., 0]
        return capped(logits_NK.astype(jnp.float32))

    return readout, logits_of


def _block_modules(config: ModelConfig, *, is_full: bool = False) -> Callable[[Params], Any]:
    """A function that maps the parameters of a block to the module of the block."""

    def graph(is_dense: bool) -> Any:
        def make() -> Block:
            rngs = nnx.Rngs(params=key_of(0))
            return Block(config, rngs=rngs, is_dense=is_dense, is_full=is_full)

        return nnx.split(nnx.eval_shape(make))[0]

    usual, dense = graph(False), graph(True)

    def module_of(block: Params) -> Any:
        return nnx.merge(dense if "up" in block["mlp"] else usual, applied(block, config))

    return module_of


def _head_function(
    head: BuiltInHead, config: ModelConfig, readout: Callable[..., jax.Array]
) -> Any:
    """The entry of a head in `Network.heads`."""
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: head_layers(head, config, rngs=nnx.Rngs(params=key_of(0))))
    )
    return head.function(config, lambda params: nnx.merge(graph, params[head.name]), readout)
