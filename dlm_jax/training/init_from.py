"""How a run begins: with fresh or given parameters, or where it stopped.

``train.init_from`` names a published model, a run or a weights file. It determines parameters, and
for published models also ``[model]``, the tokenizer and the chat template. A resumed run must be
the run of its checkpoints, its best model and its metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dlm_jax.config as configs
from dlm_jax.config import FREE, INIT, Config, ModelConfig
from dlm_jax.data import Corpus, HubTokenizer, Tokenizer, from_json, load_corpus
from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.heads.critic import READS
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
from dlm_jax.randomness import settings
from dlm_jax.settings import require
from dlm_jax.store import Checkpoints, load_meta, load_params
from dlm_jax.store.files import Damaged, program_facts, write_whole
from dlm_jax.store.weights import path_of_model
from dlm_jax.training.metrics import METRICS, read_records
from dlm_jax.types import Params

CONFIG = "config.toml"
"""Name of the config file of a run."""
BEST = "best"
"""Name of the checkpoint directory of the best model, in ``train.checkpoint_dir`` if set and
otherwise in ``train.out_dir``. The directory contains one checkpoint."""

LOCAL = frozenset({"data.source", "data.cache_dir"})
"""Settings that may differ between the processes of a run."""

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
    if not (source := local_source(config)):
        return fresh
    where = f"train.init_from={source}"
    load = _load_published if is_published(source) else _load_saved
    params = load(source, config, dict(named_leaves(fresh)), tokenizer, report)
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


def _load_saved(
    source: str, config: Config, fresh: dict[str, Any], tokenizer: Tokenizer, report: Report
) -> Params:
    """The parameters of a run or weights file, in the dtypes and shardings of `fresh`, by path."""
    where = f"train.init_from={source}"

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
        ours = fresh.get(path)
        if ours is None:
            return theirs
        if theirs.shape != ours.shape:
            raise ValueError(
                f"{where} has {path} of shape {theirs.shape}, but the config requires "
                f"{ours.shape}; use the [model] of the other run"
            )
        return jax.ShapeDtypeStruct(ours.shape, ours.dtype, sharding=ours.sharding)

    return load_params(source, check, place=place, report=report)[0]


def _load_published(
    source: str, config: Config, fresh: dict[str, Any], tokenizer: Tokenizer, report: Report
) -> Params:
    """The parameters of a published model, in the shardings of `fresh`, by path."""
    train = config.train
    params = read_published(
        source,
        dtype="float32",
        place=lambda path, shape: fresh[path].sharding if path in fresh else None,
        ignore=train.ignore_config,
        adds_mask=_adds_mask(config.model),
    ).params
    theirs = read_model(Path(source), train.ignore_config)[1]
    if _adds_mask(config.model) and tokenizer.mask_id >= theirs.vocab_size:
        report(
            f"train.init_from={source} has no MASK; MASK is added as id {tokenizer.mask_id}, whose "
            "embedding is the mean of the others"
        )
    return params


def local_source(config: Config) -> str:
    """The local path of ``train.init_from``; a model on the Hub is downloaded."""
    return os.fspath(fetched(config.train.init_from, "train.init_from"))


def _adds_mask(model: ModelConfig) -> bool:
    """Whether a run adds MASK to a published model without one. A causal model needs none."""
    return model.attention_type != "causal"


def facts_of(config: Config) -> dict[str, Any]:
    """Values that all processes of a run must share: the program, the config without local paths,
    the version of JAX, and its settings.
    """
    flat = configs.flat(configs.to_dict(config))
    facts = {key: value for key, value in flat.items() if key not in LOCAL}
    return program_facts() | facts | {"version of jax": jax.__version__} | settings()


def part_name(kind: str, part: Any) -> Any:
    """The name of a custom part of a run, by which a resumed run knows it; of heads, a list.

    An optimizer or a schedule is a closure, whose numbers and inner functions are a digest in its
    name.
    """
    if kind == "heads":
        return list(part)
    part = part.update if isinstance(part, optax.GradientTransformation) else part
    name = getattr(part, "__qualname__", type(part).__name__)
    if kind not in ("optimizer", "schedule"):
        return name
    digest = hashlib.sha256(json.dumps(_contents(part)).encode()).hexdigest()[:8]
    return f"{name.removesuffix('.<locals>.update_fn')} {digest}"


def _contents(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The numbers and names in a function, its closure and its defaults, as nested lists."""
    if id(value) in above:
        return "recursion"
    above = (*above, id(value))
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    if isinstance(value, Mapping):
        return [[str(key), _contents(one, above)] for key, one in value.items()]
    if isinstance(value, tuple | list):
        return [_contents(one, above) for one in value]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if not inspect.isfunction(value):
        value = inspect.unwrap(value)  # the function in `jax.jit`
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not inspect.isfunction(value):
        return name
    inside: list[Any] = [value.__defaults__, value.__kwdefaults__]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value
            inside.append(cell.cell_contents)
    return [name, _contents(inside, above)]


def config_of_run(out_dir: Path) -> Config:
    """The config of the run in `out_dir` at its last save, for resuming the run.

    The checkpoints are in `out_dir` or in ``train.checkpoint_dir`` of its ``config.toml``.

    Raises:
      ValueError: no usable checkpoint exists.
    """
    started = out_dir / CONFIG
    try:
        place = configs.load(str(started)).train.checkpoint_dir
    except ValueError:
        place = ""
    try:
        meta = load_meta(place or out_dir, report=lambda line: None)
    except ValueError as error:
        advice = f"; restart it with --config {started}" if started.is_file() else ""
        raise ValueError(f"--resume {out_dir}: {error}{advice}") from None
    config = configs.from_saved(meta, where=f"--resume {out_dir}")
    train = dataclasses.replace(config.train, out_dir=str(out_dir))
    # Values determined by the text are not part of the config.
    tokenizer, model = from_json(meta["tokenizer"]), config.model
    if model.vocab_size == tokenizer.vocab_size:
        model = dataclasses.replace(model, vocab_size=0)
    if model.start_id == tokenizer.mask_id:
        model = dataclasses.replace(model, start_id=-1)
    return dataclasses.replace(config, train=train, model=model)


_HEADER = (
    "The settings of this run.\n"
    "To resume: python train.py --resume DIRECTORY\n"
    "To train the same model from scratch: python train.py --config THIS_FILE --train.out_dir "
    "ELSEWHERE"
)


def write_config(config: Config, out_dir: Path) -> None:
    """Writes ``config.toml``, for users and ``--config``, unless it is unchanged.

    Resumed runs instead read the config from the checkpoints, which have checksums.
    """
    path, content = out_dir / CONFIG, configs.to_toml(config, header=_HEADER).encode()
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)


def has_config(config: Config, out_dir: Path) -> bool:
    """Whether the directory has this config, except for keys that a resumed run may change."""
    try:
        saved = configs.load(str(out_dir / CONFIG))
    except ValueError:
        return False
    here, there = (configs.flat(configs.to_dict(one)) for one in (config, saved))
    # A run without checkpoints would read these again.
    once = {"data.source", "train.init_from", "train.ignore_config"}
    return all(here[key] == there[key] for key in here if key not in FREE - once)


def check_same_run(meta: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError if settings or data would change the result of a resumed run.

    Both arguments are metadata, see `Run`: of this run, and of the checkpoints in the directory.
    """
    where = f"train.out_dir={meta['config']['train']['out_dir']}"
    configs.from_saved(saved, where=f"the run in {where}")
    meta = json.loads(json.dumps(meta))

    def require_same(is_same: bool, what: str, remedy: str) -> None:
        if not is_same:
            raise ValueError(
                f"{where} has a run {what}; {remedy} to resume it, or use another train.out_dir"
            )

    what = f"that was trained on a different text from {meta['corpus']['name']}"
    is_same = saved["corpus"]["sha256"] == meta["corpus"]["sha256"]
    require_same(is_same, what, "set data.source to the text of the other run")
    then, now = saved["randomness"], meta["randomness"]
    before, after = then["version of jax"], now["version of jax"]
    what = f"that used jax {before}, which draws different random numbers from jax {after}"
    require_same(then["draws"] == now["draws"], what, f"use jax {before}")
    here, there = configs.flat(meta["config"]), configs.flat(saved["config"])
    steps, most = here["train.steps"], there["train.steps"]
    what = f"with train.steps={most}, but this run has {steps}"
    require_same(steps >= most, what, f"raise train.steps to {most} or more")
    # The critic may be trained on rows that were filled with the recommended settings.
    reads = READS if here["model.add_critic_head"] else ()
    fixed = (set(there) - FREE) | {f"sample.{key}" for key in reads}
    # The tokenizer determines the vocabulary size, so the error names the tokenizer.
    for key in sorted(fixed, key=lambda key: (key == "model.vocab_size", key)):
        what = f"with {key}={there[key]!r}, but this run has {here.get(key)!r}"
        require_same(here.get(key) == there[key], what, f"set {key}={there[key]!r}")
    # If the tokenizer file has changed, the tokenizers differ although the configs are equal.
    is_same = saved["tokenizer"] == meta["tokenizer"]
    require_same(is_same, "with a different tokenizer", "use that tokenizer")
    is_same = saved.get("chat_template") in (None, meta.get("chat_template"))
    require_same(is_same, "with a different chat template", "use that template")
    for part in saved["own"] | meta["own"]:
        before, after = saved["own"].get(part), meta["own"].get(part)
        what = f"whose {part} is {before}, but here it is {after}"
        require_same(before == after, what, "pass the same")


def check_identity(
    best: Checkpoints, config: Config, meta: dict[str, Any], *, starts_again: bool
) -> float:
    """The figure of the best model so far, infinite if there is none to compare with.

    A damaged model, and one that was measured on other windows, will be replaced by that of the
    next evaluation.

    Args:
      best: checkpoints of the best model.
      config: config of the run.
      meta: metadata of the run, see `Run`.
      starts_again: whether the run replaces one of the same config that left no checkpoint. It must
        also have the text and the parts of the best model that it discards.

    Raises:
      ValueError: the run would continue or discard the best model or the metrics of another run.
    """
    path, figure = Path(config.train.out_dir) / METRICS, math.inf
    identity = meta["run"]

    def others() -> set[str]:
        return {record.get("run", "") for record in read_records(path)} - {identity}

    if on_first_process(best.steps):
        with contextlib.suppress(Damaged):
            there = best.read_meta(report=lambda line: None)
            if there.get("run") != identity:
                try:
                    if not starts_again:
                        raise ValueError("a run with checkpoints has its own best model")
                    check_same_run(meta, there)
                except ValueError:
                    raise ValueError(
                        f"{best.directory} has the best model of another run; move the directory "
                        "elsewhere, or use another train.out_dir"
                    ) from None
            elif there["best"]["measured_on"] == windows_of(config):
                figure = there["best"]["figure"]
    if (runs := on_first_process(others)) and not starts_again:
        raise ValueError(
            f"{path} contains metrics of run {min(runs) or 'unnamed'}, which has other checkpoints "
            f"or another config; move it elsewhere, or use another train.out_dir"
        )
    return figure


def windows_of(config: Config) -> list[int]:
    """What the held-out windows of an evaluation depend on, besides the text."""
    return [config.train.eval_windows, config.train.batch_size]
