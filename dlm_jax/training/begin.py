"""A run that begins with the parameters of a trained model instead of fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax.config as configs
from dlm_jax.checkpoint import load_any, not_finite
from dlm_jax.config import ModelConfig
from dlm_jax.data import Tokenizer, from_json
from dlm_jax.distributed.sharding import path_name
from dlm_jax.model.lora import GROUP
from dlm_jax.published import is_published, read_published
from dlm_jax.training.step import TrainState
from dlm_jax.training.vocabulary import moved, places_of
from dlm_jax.types import Params

# Settings of a model that no shape of a parameter shows.
_TRAINED_FOR = (
    "heads", "kv_heads", "activation", "norm_epsilon", "rope_theta", "attention_type",
    "logit_alignment", "rotary_share", "experts_per_token", "router_score", "router_groups",
    "router_groups_kept", "router_bias", "router_normalised", "router_scale",
)  # fmt: skip


def begin_with(
    source: str,
    state: TrainState,
    tokenizer: Tokenizer,
    *,
    model: ModelConfig,
    report: Callable[[str], None],
) -> TrainState:
    """The fresh `state` with the parameters of a trained model; heads that it lacks stay fresh.

    Args:
      source: ``train.init_from``, a run or a weights file; empty leaves the state as it is.
      state: fresh.
      tokenizer: that of the new run: theirs, or theirs with more characters.
      model: that of the new run.
      report: takes one line about heads that begin fresh or are left out.

    Raises:
      ValueError: there is no model, or it has another tokenizer, shape, or setting that its
        parameters were trained for, or a config that this version cannot read.
    """
    if not source:
        return state
    where = f"train.init_from={source}"
    if is_published(source):
        return _begin_published(source, state, report)
    params, meta = load_any(source, report=report)
    if (broken := not_finite(params)) is not None:
        raise ValueError(f"{where}: its parameter {broken} is not finite; name another model")
    if meta["tokenizer"] != tokenizer.to_json():
        places = places_of(from_json(meta["tokenizer"]), tokenizer)
        if places is None:
            raise ValueError(f"{where} has another tokenizer; use data.tokenizer=init, which is it")
        params = moved(params, state.params, places)
    _check_settings(where, configs.from_dict(meta["config"], where=where).model, model)
    fresh = [name for name in state.params if name not in params]
    ignored = [name for name in params if name not in state.params]
    for name in (*fresh, *ignored):
        if not name.endswith("_head") and name != GROUP:
            raise ValueError(f"{where} is a model of another kind: {name} is in one of the two")
    if fresh:
        report(f"{where} lacks {', '.join(fresh)}, which begin fresh")
    if ignored:
        report(f"{where} has {', '.join(ignored)}, which are left out")
    own = {name: tree for name, tree in state.params.items() if name not in fresh}
    return _with_params(state, _laid_out(where, own, {name: params[name] for name in own}))


def _check_settings(where: str, theirs: ModelConfig, model: ModelConfig) -> None:
    """Raises ValueError where they have another setting that no shape of a parameter shows."""
    for name in _TRAINED_FOR:
        given, ours = getattr(theirs, name), getattr(model, name)
        if given != ours:
            raise ValueError(
                f"{where} has model.{name}={given!r}, and the config asks for {ours!r}; "
                "make [model] that of its run"
            )


def _laid_out(where: str, own: Params, given: Params) -> Params:
    """The given parameters, in the dtypes of our own and where those live."""

    def take(path: Any, own: jax.Array, given: Any) -> jax.Array:
        if given.shape != own.shape:
            raise ValueError(
                f"{where} has {path_name(path)} of shape {given.shape}, and the config asks for "
                f"{own.shape}; make [model] that of the other run"
            )
        return jax.device_put(np.asarray(given, own.dtype), own.sharding)

    for name in own:
        if jax.tree.structure(given[name]) != jax.tree.structure(own[name]):
            raise ValueError(f"{where} has another kind of {name}; make [model] that of its run")
    return jax.tree_util.tree_map_with_path(take, own, given)


def _with_params(state: TrainState, params: Params) -> TrainState:
    """The fresh `state` with these parameters in place of its own, averages included."""
    taken = state.params | params
    ema = None if state.ema is None else jax.tree.map(jnp.copy, taken)
    return state._replace(params=taken, ema=ema)


def _begin_published(source: str, state: TrainState, report: Callable[[str], None]) -> TrainState:
    """The fresh `state` with the parameters of a published directory, read where they live."""
    own = {path_name(path): leaf.sharding
           for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]}  # fmt: skip
    found = read_published(source, dtype="float32", place=lambda path, shape: own.get(path))
    given = found.params
    fresh = [name for name in state.params if name not in given]
    if "head" in fresh or set(given) - set(state.params):
        raise ValueError(
            f"train.init_from={source} has another kind of head; leave model.tied_head out"
        )
    if fresh:
        report(f"train.init_from={source} lacks {', '.join(fresh)}, which begin fresh")
    return _with_params(state, given)
