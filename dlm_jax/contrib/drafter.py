"""A small network that drafts a block of tokens from the hidden vectors of a causal model.

The drafter reads the last tokens and the hidden vectors of the frozen trunk that predicted them (as
EAGLE, 2024). A linear map for each position to draft is its start, and layers of attention over
these tokens are added. Its LM head is the trunk's, for the most frequent ids only. Two more heads
make the tokens of a block fit each other: a sampler head, as that of the core, and a Markov head, a
bias of low rank given the token before (as DSpark, 2026).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dlm_jax import CachedTrunk, Model, Network
from dlm_jax.sampling import key_of
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.settings import check_ids

GROUP = "drafter_head"
"""The name of the drafter's parameters among those of the model."""
PARTS = ("trunk", "sampler", "markov")
"""The parts of the drafter: its layers, and the heads on their hidden vectors."""
Params = Any


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The sizes of a drafter.

    Attributes:
      block_length: maximum number of drafted tokens, ``K``.
      context: number of last tokens, with their hidden vectors, that a block reads, ``C``.
      near: number of these that the linear maps read, ``R``.
      depth: number of layers.
      heads: attention heads per layer, which share their keys and values.
      inner: width of the MLPs.
      rank: rank of the Markov head's bias.
      neighbors: number of neighbours that the sampler head reads on each side.
    """

    block_length: int = 8
    context: int = 8
    near: int = 2
    depth: int = 1
    heads: int = 9
    inner: int = 512
    rank: int = 256
    neighbors: int = 2


def init(key: jax.Array, shape: DraftShape, width: int, scale_D: Any = 1.0) -> Params:
    """New parameters; layers start as the identity, and both heads as the LM head.

    `scale_D` are the root mean squares of the trunk's hidden vectors.
    """
    keys = iter(jax.random.split(key, 8 + 6 * shape.depth))
    size, narrow, side = shape.block_length, width // shape.heads, 2 * shape.neighbors

    def matrix(fan_in: int, *fan_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (fan_in, *fan_out)) / fan_in**0.5

    def layer() -> Params:
        return {
            "attention_norm": jnp.ones(width), "mlp_norm": jnp.ones(width),
            "query": matrix(width, width), "key": matrix(2 * width, narrow),
            "value": matrix(2 * width, narrow), "out": jnp.zeros((width, width)),
            "gate": matrix(width, shape.inner), "up": matrix(width, shape.inner),
            "down": jnp.zeros((shape.inner, width)),
        }  # fmt: skip

    return {
        "trunk": {
            "near": matrix(2 * shape.near * width, width), "far": matrix(width, size, width),
            "start": jnp.zeros((size, width)), "place": jnp.zeros((shape.context, 2 * width)),
            "layers": [layer() for _ in range(shape.depth)],
            "scale": jnp.broadcast_to(jnp.asarray(scale_D, jnp.float32), width),
        },
        "sampler": {
            "inner": matrix((1 + side) * width, width), "inner_norm": jnp.ones(width),
            "out": jnp.zeros((width, width)),
        },
        "markov": {"first": matrix(width, shape.rank), "second": jnp.zeros((shape.rank, width))},
    }  # fmt: skip


def norm(x: jax.Array, scale: jax.Array | float) -> jax.Array:
    """RMS norm."""
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * jnp.broadcast_to(scale, x.shape)


def hidden(
    shape: DraftShape, params: Params, context_NCD: jax.Array, vector_NCD: jax.Array
) -> jax.Array:
    """Hidden vectors ``[N, K, D]`` of the positions to draft.

    Args:
      shape: the sizes.
      params: the parameters of the part ``trunk``.
      context_NCD: the trunk's hidden vectors that predicted the last tokens, in order; zeros where
        there is none.
      vector_NCD: embeddings of these tokens, scaled as all embeddings that are read; zeros where
        there is none.
    """
    pair_NCE = pairs(context_NCD, vector_NCD)
    near_ND = near(shape, pair_NCE) @ params["near"]
    x_NKD = jnp.einsum("nd,dke->nke", near_ND, params["far"]) + params["start"][None]
    pair_NCE = pair_NCE + params["place"][None]
    for layer in params["layers"]:
        query_NKHF = norm(x_NKD, layer["attention_norm"]) @ layer["query"]
        query_NKHF = query_NKHF.reshape(*x_NKD.shape[:2], shape.heads, -1)
        key_NCF, value_NCF = pair_NCE @ layer["key"], pair_NCE @ layer["value"]
        score_NKHC = jnp.einsum("nkhf,ncf->nkhc", query_NKHF, key_NCF) / key_NCF.shape[2] ** 0.5
        y_NKHF = jnp.einsum("nkhc,ncf->nkhf", jax.nn.softmax(score_NKHC, axis=3), value_NCF)
        x_NKD = x_NKD + y_NKHF.reshape(x_NKD.shape) @ layer["out"]
        y_NKD = norm(x_NKD, layer["mlp_norm"])
        y_NKI = jax.nn.silu(y_NKD @ layer["gate"]) * (y_NKD @ layer["up"])
        x_NKD = x_NKD + y_NKI @ layer["down"]
    return x_NKD * params["scale"][None, None]


def pairs(context_NCD: jax.Array, vector_NCD: jax.Array) -> jax.Array:
    """What a block reads ``[N, C, 2 D]``: the normalised hidden vectors beside the embeddings."""
    context_NCD = context_NCD.astype(jnp.float32)  # the squares of bfloat16 vectors lose digits
    return jnp.concatenate([norm(context_NCD, 1.0), vector_NCD], axis=2)


def near(shape: DraftShape, pair_NCE: jax.Array) -> jax.Array:
    """What the linear maps read: the last pairs of a hidden vector and an embedding."""
    return pair_NCE[:, -shape.near :].reshape(len(pair_NCE), -1)


def sampler_features(
    params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
) -> jax.Array:
    """What the sampler head reads out: the hidden vector and an MLP over it and its neighbours,
    which are embeddings, nearest first, and zeros where there is none.
    """
    parts = (left_NCD, norm(hidden_ND, 1.0), right_NCD)
    x_ND = jnp.concatenate([x.reshape(len(hidden_ND), -1) for x in parts], axis=1)
    x_ND = norm(jax.nn.silu(x_ND @ params["inner"]), params["inner_norm"])
    return hidden_ND + x_ND @ params["out"]


def markov_features(params: Params, left_ND: jax.Array, hidden_ND: jax.Array) -> jax.Array:
    """What the Markov head reads out, given the embedding of the token before: the bias of each
    token is the product of its embedding and of a vector of low rank.
    """
    return hidden_ND + jax.nn.silu(left_ND @ params["first"]) @ params["second"]


@dataclass(frozen=True)
class Drafter:
    """The functions of a drafter over the parameters of a model; `Network.heads` has it as
    ``drafter``.

    Attributes:
      shape: its sizes.
      block: ``(params, context_NCD, ids_NC) -> hidden_NKD``: `hidden` for the ids of the last
        tokens; -1 where there is none.
      network: what fills read: `Network.embed`, `Network.readout`, and the heads ``sampler`` and
        ``markov``, ``(params, ids_N, hidden_ND) -> logits_NV`` given the ids before each position.
    """

    shape: DraftShape
    block: Callable[..., jax.Array]
    network: Network


@functools.lru_cache(maxsize=32)
def with_drafts(network: Network, shape: DraftShape) -> Network:
    """The network with a drafter among its heads, whose cache also has the hidden vectors."""
    base = network.cached
    assert base is not None

    def embed(params: Params, ids: jax.Array) -> jax.Array:
        vectors = network.embed(params, ids).astype(jnp.float32)
        return vectors * params[GROUP]["scale"]

    def readout(params: Params, features_ND: jax.Array) -> jax.Array:
        few_NM = (features_ND @ params[GROUP]["table"].T).astype(jnp.float32)
        none_NV = jnp.full((len(features_ND), network.vocab_size), -jnp.inf)
        return none_NV.at[:, params[GROUP]["ids"]].set(few_NM)

    def block(params: Params, context_NCD: jax.Array, ids_NC: jax.Array) -> jax.Array:
        vector_NCD = embed(params, jnp.maximum(ids_NC, 0)) * (ids_NC >= 0)[:, :, None]
        return hidden(shape, params[GROUP]["trunk"], context_NCD, vector_NCD)

    def sampler(
        params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
    ) -> jax.Array:
        head = params[GROUP]["sampler"]
        return readout(params, sampler_features(head, left_NCD, hidden_ND, right_NCD))

    def markov(params: Params, ids_N: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        head = params[GROUP]["markov"]
        return readout(params, markov_features(head, embed(params, ids_N), hidden_ND))

    inner = replace(
        network, embed=embed, readout=readout, logits_of=None, cached=None,
        heads={"sampler": SamplerReadout(sampler, shape.neighbors), "markov": markov},
    )  # fmt: skip
    return replace(
        network,
        cached=_with_hidden(base),
        heads={**network.heads, "drafter": Drafter(shape, block, inner)},
    )


def _with_hidden(base: CachedTrunk) -> CachedTrunk:
    """The cached trunk, with the hidden vectors of all positions in its cache, ``[B, L, D]``."""

    def init(params: Params, num_rows: int, num_positions: int) -> Any:
        tokens = jax.ShapeDtypeStruct((num_rows, num_positions), jnp.int32)
        lengths = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
        like = jax.eval_shape(base.whole, params, tokens, lengths)[0]
        return base.init(params, num_rows, num_positions), jnp.zeros(like.shape, like.dtype)

    def whole(params: Params, tokens_NL: jax.Array, length_N: jax.Array) -> Any:
        hidden_NLD, update = base.whole(params, tokens_NL, length_N)
        return hidden_NLD, (update, hidden_NLD)

    def window(params: Params, cache: Any, *given: Any, **sizes: Any) -> Any:
        hidden_NWD, update = base.window(params, cache[0], *given, **sizes)
        return hidden_NWD, (update, hidden_NWD)

    def store(cache: Any, update: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        (cached, old_BLD), (piece, new_NWD) = cache, update
        row_N1 = (jnp.arange(len(place_N)) if row_N is None else row_N)[:, None]
        at_NW = place_N[:, None] + jnp.arange(new_NWD.shape[1])[None]
        return base.store(cached, piece, row_N, place_N), old_BLD.at[row_N1, at_NW].set(new_NWD)

    return replace(base, init=init, whole=whole, window=window, store=store)


def add(model: Model, params: Params, shape: DraftShape, ids: Any) -> Model:
    """The model with a drafter, whose parameters are those of `init`, for the drafted `ids`.

    Raises:
      ValueError: the model is not causal or has no cache, the ids are outside the vocabulary, or
        the parameters do not fit the model and the shape.
    """
    if not model.is_causal or model.network.cached is None:
        raise ValueError(
            "a drafter requires a causal model with a cache, which verifies its drafts; use a "
            "model with attention_type='causal'"
        )
    if "drafter" in model.network.heads:
        raise ValueError("the model has a drafter; add another one to the model without it")
    check_ids("ids", np.asarray(ids).tolist(), model.network.vocab_size)
    ids = jnp.asarray(ids, jnp.int32)
    head_MD = head_rows(model, ids)
    _check_shape(shape, params, head_MD.shape[1])
    vectors = model.network.embed(model.params, ids).astype(jnp.float32)
    more = {"ids": ids, "table": head_MD, "scale": jax.lax.rsqrt(jnp.mean(vectors**2))}
    return replace(
        model,
        network=with_drafts(model.network, shape),
        params={**model.params, GROUP: jax.tree.map(jnp.asarray, {**params, **more})},
    )


def _check_shape(shape: DraftShape, params: Params, width: int) -> None:
    if shape.block_length < 2 or width % shape.heads:
        raise ValueError(
            f"the drafter's shape has block_length={shape.block_length} and heads={shape.heads}; "
            f"use blocks of 2 or more, and a number of heads that divides the width {width}"
        )
    like = jax.eval_shape(lambda key: init(key, shape, width), key_of(0))
    if _shapes(params) != _shapes(like):
        raise ValueError("the drafter's parameters do not fit its shape and the model's width")


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    return {_name(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def head_rows(model: Model, ids: jax.Array) -> jax.Array:
    """The rows ``[M, D]`` of the model's LM head of these ids: its logits of the identity.

    The LM head is linear, as without ``model.logit_cap``.
    """
    width = model.network.embed(model.params, ids[:1]).shape[1]
    read = jax.jit(model.network.readout)
    return read(model.params, jnp.eye(width, dtype=jnp.float32)).T[ids]


def probe(model: Model) -> np.ndarray:
    """Some values of each parameter of the model, by which a drafter recognises its model in any
    dtype.
    """
    leaves = jax.tree.leaves({n: tree for n, tree in model.params.items() if n != GROUP})
    some = [leaf.reshape(-1)[:: max(1, leaf.size // 64)][:64] for leaf in leaves]
    return np.concatenate([np.asarray(x, np.float32) for x in some])


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes the drafter of a model in float16, with what identifies its model and vocabulary.

    Raises:
      ValueError: the model has no drafter.
    """
    if "drafter" not in model.network.heads:
        raise ValueError("the model has no drafter; add one by dlm_jax.contrib.drafter.add")
    drafter: Drafter = model.network.heads["drafter"]
    params = model.params[GROUP]
    flat = {"ids": np.asarray(params["ids"]), "base": probe(model)}
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path({n: params[n] for n in PARTS}):
        flat[_name(leaf_path)] = np.asarray(leaf, np.float16)
    facts = {"vocabulary": model.vocabulary, "shape": json.dumps(asdict(drafter.shape))}
    save_file(flat, Path(path), facts)


def load(model: Model, path: str | os.PathLike[str]) -> Model:
    """The model with the drafter of a file from `save`.

    Raises:
      ValueError: the file is missing or no drafter, or was trained for another model or vocabulary,
        or the model is not causal.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path or 'the path of the drafter'} is not a file; pass a drafter")
    try:
        with safe_open(path, "numpy") as file:
            names, facts = file.keys(), file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in names}
        shape = DraftShape(**json.loads(facts["shape"]))
        base, width = flat["base"], len(flat["trunk.scale"])
        like = jax.eval_shape(lambda key: init(key, shape, width), key_of(0))
        params = jax.tree_util.tree_map_with_path(
            lambda at, _: jnp.asarray(flat[_name(at)], jnp.float32), like
        )
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} is not a drafter; use a file from dlm_jax.contrib.drafter.save"
        ) from None
    remedy = "use the one that it was trained for"
    if facts.get("vocabulary") != model.vocabulary:
        raise ValueError(f"{path} was trained for another vocabulary; {remedy}")
    here = probe(model)
    if base.shape != here.shape or np.abs(base - here).mean() > 0.02 * np.abs(base).mean():
        raise ValueError(f"{path} is a drafter that was trained for another model; {remedy}")
    return add(model, params, shape, flat["ids"])
