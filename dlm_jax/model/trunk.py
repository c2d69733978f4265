"""What the architectures share: parameters, embedding, LM head, stacks of layers, and the cache.

Flax NNX declares and initialises the parameters; it is not used outside `model/`. Parameters are a
plain nested dict of float32 arrays. The layers of a stack have a leading axis and run in one loop,
which compiles one layer.

The cache has one leaf for the keys and one for the values of each stack, ``[B, layers, G, L, K]``
in the compute dtype, which attention reads in place. If the layers are unrolled, each layer has its
own leaves, ``[B, G, L K]``, which the CPU compiler does not transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.devices import is_concrete
from dlm_jax.distributed.partitions import on_own_share
from dlm_jax.heads import HEADS
from dlm_jax.model import ops
from dlm_jax.model.kernels import shared_bias
from dlm_jax.model.layers import Linear, Norm, declared, kv_shape, parameter, rotary_angles
from dlm_jax.model.lora import GROUP, MASK_ROW, applied, stacks_of, with_adapters
from dlm_jax.model.ops import KeyValue, by_group
from dlm_jax.randomness import key_of
from dlm_jax.types import Axes, Network, Params, Window

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines ``[L, K/2]``, or ``[B, L, K/2]`` if positions differ between rows."""


def embed(params: Params, ids: jax.Array) -> jax.Array:
    """The embedding of each id, with the adapter of the last id if there is one.

    If the table is sharded by feature, the table is gathered instead of the embeddings. An id
    outside the table, such as the MASK of a causal model without one, has a finite embedding.
    """

    def look_up(params: Params, ids: jax.Array) -> jax.Array:
        return jnp.take(params["embedding"], ids, axis=0, mode="clip")

    if ids.ndim == 2:
        vectors = on_own_share(look_up, params, (ids,), kind="tokens")
    else:
        vectors = look_up(params, ids)
    adapter = params.get(GROUP, {}).get(MASK_ROW)
    if adapter is None:
        return vectors
    is_last = ids == params["embedding"].shape[0] - 1
    return vectors + jnp.where(is_last[..., None], adapter["row"], 0).astype(vectors.dtype)


@dataclass(frozen=True)
class Trunk:
    """The functions of a `Network` that architectures share. Subclasses define `block`."""

    config: ModelConfig

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        """The module of the top-level parameters `name`; for a stack of layers, one block."""
        config = self.config
        if name.endswith("blocks"):
            return self.block(name, rngs)
        if name == "norm":
            return Norm(config)
        if name == "head":
            size, axes = (config.width, config.vocab_size), ("embed", "vocab")
            return Linear(*size, scale=0.02, rngs=rngs, axes=axes, is_matrix=False)
        head, linear = HEADS[name.removesuffix("_head")], functools.partial(Linear, rngs=rngs)
        return nnx.Dict(head.layers(config, linear, functools.partial(Norm, config)))

    def block(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        """A block of the stack `name`."""
        raise NotImplementedError

    def module(self, name: str, params: Params) -> Any:
        """The module `name` with these parameters."""
        return nnx.merge(_graph(self, name), params)

    def init(self, key: jax.Array) -> Params:
        """New parameters; those of a stack have a leading axis of layers."""
        model = _parameters(self, nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return with_adapters(key, params, declared(model), self.config)

    def axes(self, params: Params) -> Params:
        """`Network.axes`."""
        adapters = jax.tree.map(lambda _: Axes(), params.get(GROUP))
        known = {**_axes(self), GROUP: adapters}
        return {name: tree for name, tree in known.items() if name in params}

    def embed(self, params: Params, ids: jax.Array) -> jax.Array:
        """The input vectors of the first block, in the compute dtype."""
        return embed(params, ids).astype(self.config.compute_dtype)

    def norm(self, params: Params, x_BLD: jax.Array) -> jax.Array:
        """The final norm."""
        return self.module("norm", params["norm"])(x_BLD)

    def angles(self, num_positions: int) -> dict[str, Angles]:
        """The rotary angles of each stack of layers."""
        config = self.config
        size, theta = config.rotary_size, config.rope_theta
        angles = rotary_angles(num_positions, size, theta, config.rope_scaling)
        return {name: angles for name, layers in config.layers.items() if layers}

    def capped(self, logits: jax.Array) -> jax.Array:
        """Float32 logits, limited to ``model.logit_cap``."""
        logits, cap = logits.astype(jnp.float32), self.config.logit_cap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def readout(self, params: Params, hidden_ND: jax.Array) -> jax.Array:
        """`Network.readout`: the LM head."""
        if self.config.tied_head:
            table_VD = params["embedding"].astype(hidden_ND.dtype)
            return self.capped(ops.linear_by_rows(hidden_ND, table_VD))
        return self.capped(ops.linear(hidden_ND, params["head"]["kernel"].astype(hidden_ND.dtype)))

    def logits_of(self, params: Params, hidden_ND: jax.Array, ids_NK: jax.Array) -> jax.Array:
        """`Network.logits_of`."""
        rows_VD = params["embedding"] if self.config.tied_head else params["head"]["kernel"].T
        columns_NKD = jnp.take(rows_VD, ids_NK, axis=0).astype(hidden_ND.dtype)
        return self.capped(jnp.matmul(columns_NKD, hidden_ND[:, :, None])[..., 0])

    def network(self, **functions: Any) -> Network:
        """The `Network` with the functions that all architectures share, and with others."""
        return Network(
            init=self.init,
            embed=embed,
            readout=self.readout,
            vocab_size=self.config.vocab_size,
            logits_of=self.logits_of,
            axes=self.axes,
            **functions,
        )

    @property
    def is_unrolled(self) -> bool:
        """Whether the layers are unrolled in the functions with a cache."""
        return self.config.attention_type != "canvas" and ops.unrolls_cache(self.config.depth)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers, each of some layers of every stack."""
        return len(self.config.layers["full_blocks"]) or 1

    def init_cache(self, params: Params, num_rows: int, num_positions: int) -> Any:
        """`CachedTrunk.init`."""
        del params
        cache, dtype = [], jnp.dtype(self.config.compute_dtype)
        for name, layers in self.config.layers.items():
            groups, size = kv_shape(self.config, is_full=name == "full_blocks")
            shape, number = (num_rows, len(layers), groups, num_positions, size), bool(layers)
            if self.is_unrolled:
                shape, number = (num_rows, groups, num_positions * size), len(layers)
            cache += [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(number)]
        return tuple(cache)

    def store(self, cache: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        """`CachedTrunk.store`."""
        axis, unit = (2, self.config.size_of_head) if self.is_unrolled else (3, 1)
        write = functools.partial(ops.write_rows, axis=axis, row_N=row_N, place_N=place_N * unit)
        # The layers share one trace.
        return jax.tree.map(jax.jit(write), cache, piece)

    def ready(self, params: Params) -> Params:
        """`CachedTrunk.ready`: the parameters of each layer, if the layers are unrolled."""
        if not self.is_unrolled or "layers" in params:
            return params
        layers = tuple(one for stack in stacks_of(params).values() for one in ops.slices(stack))
        if not all(map(is_concrete, jax.tree.leaves(layers))):
            # The barrier ensures that the layers are sliced once, not at every step.
            layers = jax.lax.optimization_barrier(layers)
        return params | {"layers": layers}

    def run_block(self, name: str, one: Params, *given: Any) -> jax.Array:
        """The output of a block of the stack `name` with the parameters of one layer."""
        y_BLD: jax.Array = self.module(name, applied(one, self.config))(*given)
        return y_BLD

    def run_layers(
        self,
        params: Params,
        x: jax.Array,
        angles: Mapping[str, Angles],
        attend: Callable[..., jax.Array],
        rows: Any,
        *context: Any,
    ) -> jax.Array:
        """The hidden vectors after all layers, in one loop, rematerialised by ``model.remat``.

        ``attend(name, q, k, v, rows)`` is the attention of a layer of the stack `name`; it must not
        close over traced arrays. Blocks also get `context`.

        The input of each block is always saved. ``none`` saves everything, and ``block`` nothing
        else, at the cost of a second forward pass. Names joined by ``+`` (see
        `dlm_jax.config.NAMED`) save the values with these names.
        """
        remat, policies = self.config.remat, jax.checkpoint_policies
        policy = policies.nothing_saveable
        if remat != "block":
            policy = policies.save_only_these_names(*remat.split("+"))
        stacks, num_groups = stacks_of(params), self.num_groups
        names = list(stacks)

        def run_group(x: jax.Array, stacks: dict[str, Params], given: Any) -> jax.Array:
            for name in names:

                def layer(x: jax.Array, one: Params, given: Any, name: str = name) -> jax.Array:
                    rows, context, angles = given

                    def attend_here(*qkv: jax.Array) -> jax.Array:
                        return attend(name, *qkv, rows)

                    return self.run_block(name, one, x, angles[name], attend_here, *context)

                if remat != "none":
                    layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
                x = ops.scan_layers(layer, x, stacks[name], given)
            return x

        given = rows, context, angles
        if num_groups == 1:
            return run_group(x, stacks, given)
        return ops.scan_layers(run_group, x, in_groups(stacks, num_groups), given)

    def run_cached(
        self,
        params: Params,
        x: jax.Array,
        angles: Mapping[str, Angles],
        attend: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
        cache: Any = None,
        *context: Any,
    ) -> tuple[jax.Array, Any]:
        """The hidden vectors after all layers and the final norm, and the update of the cache.

        ``attend(name, old, q, k, v)`` returns the output of attention and the keys and values to
        cache, for a layer of the stack `name`. ``old`` are cached keys and values, of this layer
        and None, or of all layers of the stack and the index of this one. Blocks also get
        `context`.
        """
        stacks, num_groups = stacks_of(params), self.num_groups
        names = list(stacks)

        def run(name: str, x: jax.Array, one: Params, old: Any) -> tuple[jax.Array, KeyValue]:
            new: list[jax.Array] = []

            def attend_here(*qkv: jax.Array) -> jax.Array:
                y, *pair = attend(name, old, *qkv)
                new.extend(map(by_group, pair))
                return y

            x = self.run_block(name, one, x, angles[name], attend_here, *context)
            if self.is_unrolled:
                new = [leaf.reshape(*leaf.shape[:2], -1) for leaf in new]
            return x, (new[0], new[1])

        if self.is_unrolled:
            flat, pieces = self.ready(params)["layers"], []
            for name in names:
                # The layers of a stack share one trace. The compiler inlines its calls.
                traced = jax.jit(functools.partial(run, name))
                for _ in self.config.layers[name]:
                    old = None if cache is None else (*cache[len(pieces)], None)
                    x, piece = traced(x, flat[len(pieces)], old)
                    pieces.append(piece)
            return self.norm(params, x), tuple(pieces)

        def run_group(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
            (stacks, number), pieces = given, []
            for at, name in enumerate(names):

                def layer(x: jax.Array, given: Any, at: int = at, name: str = name) -> Any:
                    one, index = given
                    return run(name, x, one, None if cache is None else (*cache[at], index))

                numbers = jnp.arange(len(self.config.layers[name]) // num_groups)
                numbers += number * numbers.size
                x, piece = jax.lax.scan(layer, x, (stacks[name], numbers))
                pieces.append(piece)
            return x, tuple(pieces)

        with jax.named_scope("layers"):
            if num_groups == 1:
                x, pieces = run_group(x, (stacks, 0))
            else:
                groups = in_groups(stacks, num_groups), jnp.arange(num_groups)
                x, pieces = jax.lax.scan(run_group, x, groups)
                pieces = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), pieces)
        pieces = jax.tree.map(lambda leaf: ops.as_it_lies(jnp.moveaxis(leaf, 0, 1)), pieces)
        return self.norm(params, x), pieces

    def attend_beside(
        self,
        window: Window,
        place_BW: jax.Array,
        length_B: jax.Array,
        row_B: jax.Array | None,
        num_seen: int,
        sees: Callable[[str, jax.Array, jax.Array], Any],
        *,
        first: int = 0,
    ) -> Callable[..., Any]:
        """`run_cached`'s ``attend`` of queries at `place_BW` beside the rows `row_B` of a cache.

        A query sees the first `num_seen` cached keys of its row outside the window, and the keys of
        the window, both from position `first` on and where ``sees(name, query, key)`` is True, for
        positions ``[B, W, 1]`` and ``[B, 1, M]`` in layers of the stack `name`.
        """
        begin_B1, end_B1 = window.begin_N[:, None], window.end_N[:, None]

        def bias(name: str, key_BM: jax.Array, *, is_new: bool) -> jax.Array:
            is_own_BM = (key_BM >= begin_B1) & (key_BM < end_B1)
            is_there_BM = (key_BM >= first) & (key_BM < length_B[:, None]) & (is_own_BM == is_new)
            is_seen = sees(name, place_BW[:, :, None], key_BM[:, None, :])
            num_groups = kv_shape(self.config, is_full=name == "full_blocks")[0]
            return shared_bias(is_there_BM[:, None, :] & is_seen, self.config.heads // num_groups)

        place_1L = jnp.arange(num_seen)[None]
        seen = {
            name: (bias(name, place_1L, is_new=False), bias(name, place_BW, is_new=True))
            for name, layers in self.config.layers.items()
            if layers
        }

        def attend(name: str, old: Any, *qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            (*leaves, layer), (q, k, v) = old, qkv
            if layer is None:
                leaves = [x.reshape(*x.shape[:2], -1, k.shape[-1]) for x in leaves]
            own = by_group(k), by_group(v)
            y = ops.window_attention(q, tuple(leaves), own, seen[name], layer=layer, row_B=row_B)
            return y, k, v

        return attend


def in_groups(stacks: Any, num_groups: int) -> Any:
    """The parameters of stacks, with the groups of layers as a further first axis."""
    return jax.tree.map(lambda x: x.reshape(num_groups, -1, *x.shape[1:]), stacks)


def _parameters(trunk: Trunk, rngs: nnx.Rngs) -> nnx.Dict:
    """All parameters of a model."""
    config = trunk.config
    table = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
    made: dict[str, Any] = {"embedding": parameter(table * 0.02, "vocab", "embed")}
    for name, layers in config.layers.items():
        if layers:
            # The blocks of a stack are one module whose parameters have a leading axis.
            split = nnx.split_rngs(splits=len(layers))
            made[name] = split(nnx.vmap(functools.partial(trunk.make, name)))(rngs)
    names = ["norm"] + ["head"] * (not config.tied_head)
    names += ["self_conditioning"] * (config.attention_type == "canvas")
    # Heads are initialised last, so that the other parameters do not depend on them.
    names += [f"{name}_head" for name in config.added_heads]
    return nnx.Dict(made | {name: trunk.make(name, rngs) for name in names})


@functools.lru_cache(maxsize=256)
def _graph(trunk: Trunk, name: str) -> Any:
    """The structure of the module `name`, without arrays."""
    made = nnx.eval_shape(lambda: trunk.make(name, nnx.Rngs(params=key_of(0))))
    return nnx.split(made)[0]


@functools.lru_cache(maxsize=256)
def _axes(trunk: Trunk) -> Params:
    return declared(nnx.eval_shape(lambda: _parameters(trunk, nnx.Rngs(params=key_of(0)))))
