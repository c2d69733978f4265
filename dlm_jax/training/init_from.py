"""What a run takes from ``train.init_from``, or from its own checkpoints if it resumes.

``train.init_from`` names a published model, a run or a weights file. It determines parameters, and
for published models also ``[model]``, the tokenizer and the chat template.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.config import INIT, Config, ModelConfig
from dlm_jax.data import Corpus, HubTokenizer, Tokenizer, from_json, load_corpus
from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.hf import (
    KEPT,
    UNPUBLISHED,
    fetched,
    is_published,
    read_chat,
    read_kept,
    read_model,
    read_published,
    read_shape,
    saved_chat,
)
from dlm_jax.model.lora import GROUP, MASK_ROW
from dlm_jax.settings import require
from dlm_jax.store import Checkpoints, load_meta, load_params
from dlm_jax.store.weights import path_of_model
from dlm_jax.types import Params

Report = Callable[[str], None]

_CONVERTED = frozenset({"logit_alignment", "attention_type", "block_length", "start_id"})
"""Settings of ``[model]`` that a causal model does not define for the diffusion model that it is
converted to.
"""
_ANY = UNPUBLISHED | {"block_length", "vocab_size", "start_id", "head_size", "mlp_width"}
"""Settings of ``[model]`` that may differ from those of the model that a run begins with, as far as
the shapes of the parameters are equal.
"""


def load_data(config: Config, *, report: Report) -> tuple[Config, Corpus]:
    """The config with adopted settings and the vocabulary size of its corpus, and the corpus.

    With ``data.tokenizer=init``, the tokenizer and its chat template are those of
    ``train.init_from``, or of the resumed run.

    Raises:
      ValueError: the corpus or its tokenizer is invalid, or ``model.vocab_size`` is too small.
    """
    source, chat = local_source(config), None
    tokenizer: str | Tokenizer = config.data.tokenizer
    if source and is_published(source):
        config, tokenizer = adopt_model(config, source)
        chat = read_chat(Path(source), tokenizer)
    elif tokenizer == INIT:
        with Checkpoints(checkpoints_of(config), keep=1) as saved:
            is_resumed = on_first_process(lambda: saved.steps(complete=False))
            meta = saved.read_meta(report=lambda line: None) if is_resumed else {}
        meta = meta or load_meta(path_of_model(source), report=report)
        tokenizer = from_json(meta["tokenizer"])
        chat = saved_chat(meta, tokenizer)
    data, model = config.data, config.model
    corpus = load_corpus(
        data.source,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        held_out=data.held_out,
        cache_dir=data.cache_dir or None,
        layout=data.layout,
        pack=data.pack,
        tail=data.tail,
        weights=data.weights,
        start_id=model.start_id if model.attention_type == "causal" else None,
        chat=chat,
    )
    if chat is not None:
        corpus = dataclasses.replace(corpus, chat_template=chat.source)
    needed, mask_id = corpus.tokenizer.vocab_size, corpus.tokenizer.mask_id
    size = model.vocab_size or needed
    if size < needed:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {needed}; use 0 or {needed}"
        )
    if model.lora_rank and MASK_ROW in model.lora_targets:
        require(
            mask_id == size - 1,
            "model.lora_targets",
            MASK_ROW,
            f"is the embedding of the last id, but MASK is id {mask_id} of {size}",
            "remove it",
        )
    start = mask_id if model.has_start and model.start_id < 0 else model.start_id
    model = dataclasses.replace(model, vocab_size=size, start_id=start)
    return dataclasses.replace(config, model=model), corpus


def adopt_model(config: Config, source: str) -> tuple[Config, HubTokenizer]:
    """The config with ``[model]`` from the published directory `source`, and its tokenizer.

    Settings of ``[model]`` with their default value are read from the directory. Other settings
    must match the directory. The config determines whether and how a causal model is converted to a
    diffusion model. A converted model has a MASK, whose embedding adapters also train if the causal
    model had none.

    Raises:
      ValueError: the directory is unusable, or the config describes a different model.
    """
    theirs, tokenizer = read_shape(
        Path(source), config.train.ignore_config, adds_mask=_adds_mask(config.model)
    )
    default, settings = ModelConfig(), {}
    is_converted = theirs.attention_type == "causal" != config.model.attention_type
    ours_alone = UNPUBLISHED | (_CONVERTED if is_converted else set())
    for name in ModelConfig.declared:
        ours, other = getattr(config.model, name), getattr(theirs, name)
        settings[name] = ours if name in ours_alone else other
        if name not in ours_alone and ours not in (other, getattr(default, name)):
            raise ValueError(
                f"train.init_from={source} has model.{name}={other!r}, but the config has "
                f"{ours!r}; remove it"
            )
    is_new = theirs.attention_type == "causal" and tokenizer.mask_id == theirs.vocab_size - 1
    if settings["lora_rank"] and is_new and _adds_mask(config.model):
        targets = dict.fromkeys((*settings["lora_targets"], MASK_ROW))
        settings["lora_targets"] = tuple(targets)
    return dataclasses.replace(config, model=ModelConfig(**settings)), tokenizer


def kept_of(config: Config, *, report: Report) -> dict[str, Any]:
    """The metadata that a new run keeps of the published model in ``train.init_from``."""
    source = local_source(config)
    if source and is_published(source):
        return read_kept(Path(source), config.train.ignore_config)
    theirs = load_meta(path_of_model(source), report=report) if source else {}
    return {name: theirs[name] for name in KEPT if name in theirs}


def checkpoints_of(config: Config) -> str:
    """The location of the checkpoints of a run: a directory, or a URL."""
    return config.train.checkpoint_dir or str(Path(config.train.out_dir) / "checkpoints")


def load_initial_params(
    config: Config, fresh: Params, tokenizer: Tokenizer, *, report: Report
) -> Params:
    """The parameters of ``train.init_from``, or the `fresh` ones if it is empty. Heads that the
    trained model lacks are fresh.

    Args:
      config: config of the new run.
      fresh: fresh parameters, which determine dtypes and shardings.
      tokenizer: tokenizer of the new run, which is that of the trained model.
      report: called with one-line messages about fresh or omitted heads.

    Raises:
      ValueError: the model does not exist, differs in its tokenizer, its shape or a setting that
        affects training, or has a config that this version cannot read.
    """
    source, train = local_source(config), config.train
    if not source:
        return fresh
    where = f"train.init_from={source}"
    if is_published(source):
        return _load_published(source, config, fresh, tokenizer, report)
    why = "has no effect, because train.init_from is not a published model"
    require(not train.ignore_config, "train.ignore_config", train.ignore_config, why, "remove it")
    leaves = dict(named_leaves(fresh))

    def check(meta: dict[str, Any]) -> None:
        if meta["tokenizer"] != tokenizer.to_json():
            raise ValueError(f"{where} has a different tokenizer; use data.tokenizer=init")
        model = configs.from_saved(meta, where=where).model
        for name in ModelConfig.declared:
            theirs, ours = getattr(model, name), getattr(config.model, name)
            if theirs != ours and name not in _ANY:
                raise ValueError(
                    f"{where} has model.{name}={theirs!r}, but the config has {ours!r}; "
                    "use the [model] of its run"
                )

    def place(path: str, theirs: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        ours = leaves.get(path)
        if ours is None:
            return theirs
        if theirs.shape != ours.shape:
            raise ValueError(
                f"{where} has {path} of shape {theirs.shape}, but the config requires "
                f"{ours.shape}; use the [model] of the other run"
            )
        return jax.ShapeDtypeStruct(ours.shape, ours.dtype, sharding=ours.sharding)

    params, _ = load_params(source, check, place=place, report=report)
    lacking = [name for name in fresh if name not in params]
    ignored = [name for name in params if name not in fresh]
    for name in (*lacking, *ignored):
        if not name.endswith("_head") and name != GROUP:
            raise ValueError(
                f"{where} is a different kind of model: only one of the two has {name}"
            )
    if lacking:
        report(f"{where} lacks {', '.join(lacking)}, which are freshly initialised")
    if ignored:
        report(f"{where} has {', '.join(ignored)}, which are ignored")
    shared = {name: params[name] for name in fresh if name in params}
    for name, tree in shared.items():
        if jax.tree.structure(tree) != jax.tree.structure(fresh[name]):
            raise ValueError(f"{where} has a different kind of {name}; use the [model] of its run")
    return fresh | shared


def _load_published(
    source: str, config: Config, fresh: Params, tokenizer: Tokenizer, report: Report
) -> Params:
    """The parameters of a published model, read in the shardings of `fresh`."""
    train, shardings = config.train, {path: leaf.sharding for path, leaf in named_leaves(fresh)}
    params = read_published(
        source,
        dtype="float32",
        place=lambda path, shape: shardings.get(path),
        ignore=train.ignore_config,
        adds_mask=_adds_mask(config.model),
    ).params
    theirs = read_model(Path(source), train.ignore_config)[1]
    if _adds_mask(config.model) and tokenizer.mask_id >= theirs.vocab_size:
        report(
            f"train.init_from={source} has no MASK; MASK is added as id {tokenizer.mask_id}, whose "
            "embedding is the mean of the others"
        )
    lacking = [name for name in fresh if name not in params]
    if "head" in lacking or set(params) - set(fresh):
        raise ValueError(
            f"train.init_from={source} has a different kind of head; remove model.tied_head"
        )
    if lacking:
        report(
            f"train.init_from={source} lacks {', '.join(lacking)}, which are freshly initialised"
        )
    return fresh | params


def local_source(config: Config) -> str:
    """The local path of ``train.init_from``; a model on the Hub is downloaded."""
    return os.fspath(fetched(config.train.init_from, "train.init_from"))


def _adds_mask(model: ModelConfig) -> bool:
    """Whether a run adds MASK to a published model without one. A causal model needs none."""
    return model.attention_type != "causal"
