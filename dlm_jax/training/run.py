"""Starts and resumes runs: resolved config, checks, and initial state."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax import devices
from dlm_jax.config import Config, MeshConfig, ModelConfig, Trait
from dlm_jax.config.schema import INIT
from dlm_jax.data import (
    CharacterTokenizer,
    Corpus,
    HubTokenizer,
    Setup,
    Tokenizer,
    from_json,
    load_corpus,
    train_batches,
    validation_windows,
)
from dlm_jax.data.corpus import MakeTokenizer
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import device_bytes, fsdp_for, require_room
from dlm_jax.distributed.partitions import (
    batch_sharding,
    make_mesh,
    map_named,
    named_leaves,
    share_of_batch,
)
from dlm_jax.distributed.processes import check_same_everywhere, on_first_process
from dlm_jax.heads import MAIN, Head
from dlm_jax.model.lora import GROUP, MASK_ROW
from dlm_jax.published import (
    KEPT,
    ChatTemplate,
    fetched,
    is_published,
    read_chat,
    read_kept,
    read_model,
    read_published,
    read_shape,
    saved_chat,
)
from dlm_jax.randomness import check_settings, fingerprint, key_of
from dlm_jax.settings import SettingError, require
from dlm_jax.store import Checkpoints, load_any, load_meta, not_finite
from dlm_jax.store.checkpoints import LocalCheckpoints, complete_steps
from dlm_jax.store.files import (
    Damaged,
    DirectoryLock,
    check_bucket,
    is_remote,
    located,
    own_source,
    program_facts,
    write_whole,
)
from dlm_jax.store.weights import path_of_model, save_weights
from dlm_jax.training.checks import (
    CONFIG,
    check_begins_anew,
    check_model_fits,
    check_parts,
    check_same_run,
    check_writable,
    facts_of,
    growth,
    make_directory,
)
from dlm_jax.training.metrics import METRICS, WallClock, check_metrics, check_trackers
from dlm_jax.training.tasks import (
    MakeHead,
    MakeNetwork,
    MakeObjective,
    MakeOptimizer,
    Task,
    make_task,
)
from dlm_jax.training.train_step import (
    Stage,
    TrainState,
    check_adds_up,
)
from dlm_jax.types import Network, Params


def checkpoints_of(config: Config) -> str:
    """The location of the checkpoints of a run: a directory, or a URL."""
    return config.train.checkpoint_dir or str(Path(config.train.out_dir) / "checkpoints")


def write_config(config: Config, out_dir: Path) -> None:
    """Writes ``config.toml``, for users and ``--config``, unless it is unchanged.

    Resumed runs instead read the config from the checkpoints, which have checksums.
    """
    header = (
        "The settings of this run.\n"
        "To resume: python train.py --resume DIRECTORY\n"
        "To train the same model from scratch: python train.py --config THIS_FILE --train.out_dir "
        "ELSEWHERE"
    )
    text, path = configs.to_toml(config, header=header), out_dir / CONFIG
    try:
        is_there = path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        write_whole(path, text.encode())


def _checkpoints_beside(out_dir: Path) -> str:
    """The ``train.checkpoint_dir`` of the run in `out_dir`; empty if unset or unknown."""
    try:
        return configs.load(str(out_dir / CONFIG)).train.checkpoint_dir
    except ValueError:
        return ""


def config_of_run(out_dir: Path) -> Config:
    """The config of the run in `out_dir` at its last save, for resuming the run.

    The checkpoints are in `out_dir` or in ``train.checkpoint_dir`` of its ``config.toml``.

    Raises:
      ValueError: no usable checkpoint exists.
    """
    try:
        meta = load_meta(_checkpoints_beside(out_dir) or out_dir, report=lambda line: None)
    except ValueError as error:
        started = out_dir / CONFIG
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


def _init_path(config: Config) -> str:
    """The local path of ``train.init_from``; a model on the Hub is downloaded."""
    return os.fspath(fetched(config.train.init_from, "train.init_from"))


def adopted(config: Config) -> tuple[Config, Tokenizer | None]:
    """The config with ``[model]`` from the published directory in train.init_from, and its
    tokenizer.

    Settings of ``[model]`` with their default value are read from the directory. Other settings
    must match the directory. The config determines whether and how a causal model is converted to a
    diffusion model. A converted model has a MASK, whose embedding adapters also train if the causal
    model had none.

    Returns:
      The new config and the tokenizer, or the unchanged config and None if train.init_from is not a
      published directory.

    Raises:
      ValueError: the directory is unusable, or the config describes a different model.
    """
    source = _init_path(config)
    if not source or not is_published(source):
        return config, None
    theirs, tokenizer = read_shape(
        Path(source), config.train.ignore_config, adds_mask=_adds_mask(config.model)
    )
    default, settings = ModelConfig(), {}
    is_turned = theirs.attention_type == "causal" != config.model.attention_type
    own = Trait.OWN | (Trait.TURNED if is_turned else Trait.NONE)
    for name, traits in ModelConfig.traits.items():
        ours, other = getattr(config.model, name), getattr(theirs, name)
        settings[name] = ours if traits & own else other
        if not traits & own and ours not in (other, getattr(default, name)):
            raise ValueError(
                f"train.init_from={source} has model.{name}={other!r}, but the config has "
                f"{ours!r}; remove it"
            )
    is_new = theirs.attention_type == "causal" and tokenizer.mask_id == theirs.vocab_size - 1
    if settings["lora_rank"] and is_new and _adds_mask(config.model):
        targets = dict.fromkeys((*settings["lora_targets"], MASK_ROW))
        settings["lora_targets"] = tuple(targets)
    model = ModelConfig(**settings)
    return dataclasses.replace(config, model=model), tokenizer


def _adds_mask(model: ModelConfig) -> bool:
    """Whether a run of `model` adds MASK to a published model without one. A causal model needs
    none.
    """
    return model.attention_type != "causal"


_SHOWN = 8
# The parameters with a vocabulary axis, and the index of that axis.
_AXES = {"embedding": 0, "head/kernel": 1}


def tokenizer_of(
    config: Config, *, report: Callable[[str], None]
) -> str | Tokenizer | MakeTokenizer:
    """The tokenizer that ``data.tokenizer`` selects, as an argument for `load_corpus`.

    ``init`` selects the tokenizer of ``train.init_from``, or of the resumed run. Missing characters
    of the corpus are added to a character tokenizer and reported.

    Raises:
      ValueError: the model does not exist, or the corpus has new characters and
        ``data.new_characters`` is ``refuse`` or ``heads.train_main`` is False.
    """
    if config.data.tokenizer != INIT:
        return config.data.tokenizer
    with Checkpoints(checkpoints_of(config), keep=1) as saved:
        if on_first_process(saved.steps):
            return from_json(saved.read_meta(report=lambda line: None)["tokenizer"])
    theirs = from_json(load_meta(path_of_model(_init_path(config)), report=report)["tokenizer"])
    if not isinstance(theirs, CharacterTokenizer):
        return theirs
    return lambda text: _extended(theirs, text, config, report)


def _load_chat(config: Config, tokenizer: HubTokenizer) -> ChatTemplate | None:
    """The chat template of ``train.init_from``, or of the resumed run; None if there is none."""
    source = _init_path(config)
    if source and is_published(source):
        return read_chat(Path(source), tokenizer)
    with Checkpoints(checkpoints_of(config), keep=1) as saved:
        if on_first_process(saved.steps):
            return saved_chat(saved.read_meta(report=lambda line: None), tokenizer)
    if not source:
        return None
    return saved_chat(load_meta(path_of_model(source), report=lambda line: None), tokenizer)


def _extended(
    theirs: CharacterTokenizer, text: str, config: Config, report: Callable[[str], None]
) -> CharacterTokenizer:
    known = set(theirs.characters)
    new = {character: count for character, count in Counter(text).items() if character not in known}
    if not new:
        return theirs
    often = sorted(new, key=lambda character: (-new[character], character))
    shown = ", ".join(f"{c!a} (U+{ord(c):04X}, {new[c]:,} times)" for c in often[:_SHOWN])
    more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
    what = (
        f"{len(new)} characters of the text are" if len(new) > 1 else "1 character of the text is"
    )
    line = f"{what} new to train.init_from={config.train.init_from}: {shown}{more}"
    if config.data.new_characters == "refuse":
        raise ValueError(f"{line}; remove them, or use data.new_characters=add")
    if not config.heads.train_main:
        raise ValueError(
            f"{line}; heads.train_main=False would not train them; remove them, or set it to true"
        )
    report(f"{line}; added with fresh embeddings")
    return CharacterTokenizer("".join(sorted(known | set(new))))


def places_of(theirs: Tokenizer, ours: Tokenizer) -> np.ndarray | None:
    """The id in `ours` of each token of `theirs`, int32 ``[V]``.

    The result is None if one of the tokenizers is not a character tokenizer, or if `ours` lacks
    characters of `theirs`.
    """
    if not isinstance(theirs, CharacterTokenizer) or not isinstance(ours, CharacterTokenizer):
        return None
    if not set(theirs.characters) <= set(ours.characters):
        return None
    here = {character: id_ for id_, character in enumerate(ours.characters)}
    # Special tokens follow the characters in a fixed order; see `dlm_jax.data.tokenizers`.
    text = [here[character] for character in theirs.characters]
    specials = [ours.num_text_ids + i for i in range(theirs.vocab_size - theirs.num_text_ids)]
    return np.array([*text, *specials], np.int32)


def renumbered(params: Params, fresh: Params, places: np.ndarray) -> Params:
    """The trained `params`, with the token vectors moved to the new ids `places` (see `places_of`).

    The vectors of ids without a trained vector are those of `fresh`.
    """

    def move(name: str, given: Any) -> Any:
        own: Any = fresh
        for part in name.split("/") if name in _AXES else ():
            own = own.get(part) if isinstance(own, dict) else None
        if name not in _AXES or own is None:
            return given
        axis = _AXES[name]
        fits = given.shape[axis] == places.size and given.shape[1 - axis] == own.shape[1 - axis]
        if not fits:
            return given  # the caller rejects a wrong shape
        if not own.is_fully_addressable:
            own = multihost_utils.process_allgather(own, tiled=True)
        whole = np.array(own, np.float32)
        whole[(slice(None),) * axis + (places,)] = np.asarray(given, np.float32)
        return whole

    return map_named(move, params)


def load_resolved(config: Config, *, report: Callable[[str], None]) -> tuple[Config, Corpus]:
    """Returns the config, with adopted settings and the corpus's vocabulary size, and the corpus.

    Raises:
      ValueError: the corpus or its tokenizer is invalid, or ``model.vocab_size`` is too small.
    """
    config, adopted_tokenizer = adopted(config)
    tokenizer = adopted_tokenizer or tokenizer_of(config, report=report)
    data, chat = config.data, None
    if isinstance(tokenizer, HubTokenizer):
        chat = _load_chat(config, tokenizer)
    corpus = load_corpus(
        data.source,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        held_out=data.held_out,
        cache_dir=data.cache_dir or None,
        layout=data.layout,
        tail=data.tail,
        weights=data.weights,
        start_id=config.model.start_id if config.model.attention_type == "causal" else None,
        chat=chat,
    )
    if chat is not None:
        corpus = dataclasses.replace(corpus, chat_template=chat.source)
    return _with_vocabulary(config, corpus), corpus


def _with_vocabulary(config: Config, corpus: Corpus) -> Config:
    needed = corpus.tokenizer.vocab_size
    size = config.model.vocab_size or needed
    if size < needed:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the tokenizer's {needed}; use 0 or {needed}"
        )
    if config.model.lora_rank and MASK_ROW in config.model.lora_targets:
        mask_id = corpus.tokenizer.mask_id
        require(
            mask_id == size - 1,
            "model.lora_targets",
            MASK_ROW,
            f"is the embedding of the last id, but MASK is id {mask_id} of {size}",
            "remove it",
        )
    start = config.model.start_id
    if config.model.has_start and start < 0:
        start = corpus.tokenizer.mask_id
    model = dataclasses.replace(config.model, vocab_size=size, start_id=start)
    return dataclasses.replace(config, model=model)


def mesh_config(
    config: Config, devices: Sequence[Any], num_bytes: Callable[[], float] | None = None
) -> MeshConfig:
    """Returns the mesh of `config` for the devices of all processes.

    A value of 0 for ``mesh.fsdp`` is resolved from the size of the training state, which
    `num_bytes` computes (see `state_bytes`). Without `num_bytes`, it is left unresolved if it
    depends on this size.
    """
    mesh = config.mesh
    memory = device_bytes(devices[0])
    if mesh.fsdp > 0 or not memory:
        return mesh
    num_slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    inner = mesh.tensor * mesh.expert * mesh.context * num_slices
    if mesh.data == -1:
        if num_bytes is None:
            return mesh
        split = max(1, len(devices) // inner)
        fsdp = fsdp_for(num_bytes() / mesh.tensor, memory, split)
    else:
        # `fsdp` must cover the devices that the other axes leave, so that the mesh contains all.
        fsdp = max(1, len(devices) // (mesh.tensor * mesh.expert * mesh.context * mesh.data))
    return dataclasses.replace(mesh, fsdp=fsdp)


def state_bytes(task: Task) -> int:
    """The size in bytes of the training state of a task on all devices: parameters, optimiser and
    moving average.
    """
    leaves = jax.tree.leaves(task.abstract_state())
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def begin_with(
    source: str,
    fresh: Params,
    tokenizer: Tokenizer,
    *,
    model: ModelConfig,
    report: Callable[[str], None],
    mask_like: str = "",
    ignore: Sequence[str] = (),
) -> Params:
    """The parameters of a trained model. Heads that are not in the model are freshly initialised.

    Args:
      source: ``train.init_from``, a run or a weights file; if empty, the result is `fresh`.
      fresh: fresh parameters.
      tokenizer: tokenizer of the new run, which is that of the trained model, possibly with more
        characters.
      model: model config of the new run.
      report: called with one-line messages about fresh or omitted heads.
      mask_like: ``train.mask_like``.
      ignore: ``train.ignore_config``.

    Raises:
      ValueError: the model does not exist, differs in its tokenizer, its shape or a setting that
        affects training, or has a config that this version cannot read.
    """
    if not source:
        return fresh
    where = f"train.init_from={source}"
    if is_published(source):
        adds_mask = _adds_mask(model)
        return _begin_published(source, fresh, tokenizer, adds_mask, mask_like, ignore, report)
    for name, value in (("mask_like", mask_like), ("ignore_config", ignore)):
        if value:
            raise SettingError(
                f"train.{name}",
                value,
                "has no effect, because train.init_from is not a published model",
                "remove it",
            )
    params, meta = load_any(source, report=report)
    if (broken := not_finite(params)) is not None:
        raise ValueError(f"{where}: its parameter {broken} is not finite; use another model")
    if meta["tokenizer"] != tokenizer.to_json():
        places = places_of(from_json(meta["tokenizer"]), tokenizer)
        if places is None:
            raise ValueError(f"{where} has a different tokenizer; use data.tokenizer=init")
        params = renumbered(params, fresh, places)
    _check_settings(where, configs.from_saved(meta, where=where).model, model)
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
    own = {name: tree for name, tree in fresh.items() if name not in lacking}
    return fresh | _laid_out(where, own, {name: params[name] for name in own})


def _check_settings(where: str, theirs: ModelConfig, model: ModelConfig) -> None:
    for key in configs.keys(Trait.UNSEEN):
        name = key.removeprefix("model.")
        given, ours = getattr(theirs, name), getattr(model, name)
        if given != ours:
            raise ValueError(
                f"{where} has model.{name}={given!r}, but the config has {ours!r}; "
                "use the [model] of its run"
            )


def _laid_out(where: str, own: Params, given: Params) -> Params:
    """The given parameters with the dtypes and shardings of this run."""

    def take(path: str, own: jax.Array, given: Any) -> jax.Array:
        if given.shape != own.shape:
            raise ValueError(
                f"{where} has {path} of shape {given.shape}, but the config requires "
                f"{own.shape}; use the [model] of the other run"
            )
        return jax.device_put(np.asarray(given, own.dtype), own.sharding)

    for name in own:
        if jax.tree.structure(given[name]) != jax.tree.structure(own[name]):
            raise ValueError(f"{where} has a different kind of {name}; use the [model] of its run")
    return map_named(take, own, given)


def _begin_published(
    source: str,
    fresh: Params,
    tokenizer: Tokenizer,
    adds_mask: bool,
    mask_like: str,
    ignore: Sequence[str],
    report: Callable[[str], None],
) -> Params:
    own = {path: leaf.sharding for path, leaf in named_leaves(fresh)}
    found = read_published(
        source,
        dtype="float32",
        place=lambda path, shape: own.get(path),
        ignore=ignore,
        adds_mask=adds_mask,
        mask_like=mask_like,
    )
    given = found.params
    is_new = adds_mask and tokenizer.mask_id >= read_model(Path(source), ignore)[1].vocab_size
    if mask_like or is_new:
        begins = f"that of {mask_like}" if mask_like else "the mean of the others"
        report(
            f"train.init_from={source} has no MASK; MASK is added as id {tokenizer.mask_id}, whose "
            f"embedding is {begins}"
        )
    lacking = [name for name in fresh if name not in given]
    if "head" in lacking or set(given) - set(fresh):
        raise ValueError(
            f"train.init_from={source} has a different kind of head; remove model.tied_head"
        )
    if lacking:
        report(
            f"train.init_from={source} lacks {', '.join(lacking)}, which are freshly initialised"
        )
    return fresh | given


FOLDER = "best"
"""Name of the checkpoint directory of the best model, in ``train.checkpoint_dir`` if set and
otherwise in ``train.out_dir``. The directory contains one checkpoint."""


class Best:
    """Saves the parameters with the best evaluation to ``best`` in the directory of a run.

    A resumed run keeps its best model if the evaluations use the same windows. If the run resumes
    from a step before the best evaluation, it repeats the same steps. A new run removes the best
    model of a run that has the same config and no checkpoints. Every process of a run creates one
    instance and calls the same methods in the same order.

    For `meta` see `Run`, and for `check` see `Checkpoints`.

    Raises:
      ValueError: `FOLDER` is not a directory or contains the best model of another run.
    """

    def __init__(
        self,
        config: Config,
        meta: dict[str, Any],
        *,
        is_new: bool,
        check: Callable[[], None] = lambda: None,
    ):
        root = located(config.train.checkpoint_dir or config.train.out_dir) / FOLDER
        self._checkpoints = Checkpoints(root, keep=1, check=check)
        self._measured_on = [config.train.eval_windows, config.train.batch_size]
        self._is_stale = False
        try:
            self.figure = self._read(meta, is_new)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Removes the best model of an earlier run that has the same config and no checkpoints."""
        if self._is_stale:
            self._checkpoints.remove_from(0)
            self._is_stale = False

    def offer(self, step: int, figure: float, params: Params, meta: dict[str, Any]) -> bool:
        """Starts a save of the evaluated parameters and `meta` if `figure` at this step is the
        lowest so far, and returns whether it is the lowest. Non-finite values are never the best.
        """
        if not math.isfinite(figure) or (self.figure is not None and figure >= self.figure):
            return False
        self._checkpoints.remove_from(step)
        best = {"best": {"figure": figure, "measured_on": self._measured_on}}
        self._checkpoints.save(step, {"params": params}, meta | best)
        self.figure = figure
        return True

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self) -> None:
        """Stops all threads. A save without a later `wait` can be lost."""
        self._checkpoints.close(together=False)

    def _read(self, meta: dict[str, Any], is_new: bool) -> float | None:
        """The value of the saved model; None if there is no saved model or if other windows were
        used.
        """
        if not on_first_process(self._checkpoints.steps):
            return None
        try:
            found = self._checkpoints.read_meta(report=lambda line: None)
        except ValueError:
            return None  # the saved model is damaged; the next evaluation replaces it
        if found.get("run", "") != meta["run"]:
            self._check_may_go(meta, found, is_new)
            self._is_stale = True
            return None
        best = found.get("best", {})
        return best.get("figure") if best.get("measured_on") == self._measured_on else None

    def _check_may_go(self, meta: dict[str, Any], found: dict[str, Any], is_new: bool) -> None:
        """Raises ValueError unless this run repeats the run that saved the model."""
        try:
            if not is_new:
                raise ValueError(
                    f"the model belongs to run {found.get('run')}, but this run is {meta['run']}"
                )
            check_same_run(meta, found)
        except ValueError as error:
            raise ValueError(
                f"{self._checkpoints.directory} has the best model of another run ({error}); "
                "move the directory elsewhere, or use another train.out_dir"
            ) from None


@dataclasses.dataclass(frozen=True)
class Run:
    """A prepared run: the resolved config and the objects created from it.

    ``state`` is fresh or from the newest checkpoint, and ``saved`` contains the JSON metadata of
    that checkpoint (empty if fresh). ``meta`` is saved with every state. It contains a random
    identity of the run (which is also stored in the best model and the metrics), the names of
    custom parts (network, objective and heads), the sources of randomness, the version and source
    code of the program, and what the run keeps of a published model (`read_kept`). The noise of all
    steps is derived from ``noise_key``.
    """

    setup: Setup
    corpus: Corpus
    task: Task
    meta: dict[str, Any]
    state: TrainState
    saved: dict[str, Any]
    first_step: int
    noise_key: jax.Array
    checkpoints: Checkpoints
    best: Best
    clock: WallClock
    local: LocalCheckpoints | None = None

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def network(self) -> Network:
        return self.task.network

    @property
    def mesh(self) -> Mesh:
        return self.setup.mesh

    @property
    def out_dir(self) -> Path:
        return Path(self.config.train.out_dir)


def prepare(
    config: Config,
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    optimizer: optax.GradientTransformation | MakeOptimizer | None = None,
    schedule: optax.Schedule | None = None,
    report: Callable[[str], None],
    clock: WallClock | None = None,
) -> Run:
    """Prepares the run of `config`. Resumes if the directory contains checkpoints.

    The arguments are as in `dlm_jax.training.train`, and `clock` times the run from its start (by
    default, now). A ``model.vocab_size`` of 0 is replaced by the vocabulary size of the tokenizer.

    Raises:
      ValueError: the data is invalid, the batch or mesh does not fit the devices, or the directory
        contains another run or other files.
    """
    clock = clock or WallClock()
    asked, mesh = config, _checked_mesh(config)
    clock.charge("devices")
    parts = network, objective, heads, optimizer, schedule
    setup, corpus = _setup_of(config, mesh, *parts, report=report)
    clock.charge("data")
    config = setup.config
    task = make_task(setup, *parts)
    meta = {
        "run": "",
        "config": configs.to_dict(config),
        "tokenizer": corpus.tokenizer.to_json(),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "own": _names_of(network, objective, heads) | _optimiser_names(task, optimizer),
        "randomness": fingerprint(),
        "program": program_facts(),
    }
    if corpus.chat_template:
        meta["chat_template"] = corpus.chat_template
    check_same_everywhere(_sources_of([network, objective, *heads, optimizer, schedule]))
    init_key, noise_key = jax.random.split(key_of(config.train.seed))
    out_dir, lock = Path(config.train.out_dir), DirectoryLock()
    with contextlib.ExitStack() as undo:
        checkpoints = Checkpoints(
            checkpoints_of(config), keep=config.train.keep_checkpoints, check=lock.check
        )
        undo.callback(checkpoints.close)
        checkpoints.when_closed.callback(lock.release)
        places = {"train.out_dir": out_dir, "train.checkpoint_dir": checkpoints.directory}
        local = _local_of(config, checkpoints, report)
        has_saved = on_first_process(lambda: _lock_those_there(lock, places) or checkpoints.steps())
        continued = _continued(task, meta, checkpoints if has_saved else None, local, report)
        state, saved = continued or (_begun(task, meta, init_key, report=report), {})
        jax.block_until_ready(state)
        clock.charge("restore")
        if config.train.accumulate > 1 and (objective is not None or heads):
            _check_adds_up(setup, task, state)
        best = Best(config, meta, is_new=not saved, check=lock.check)
        checkpoints.when_closed.callback(best.close)
        if saved:
            on_first_process(lambda: check_metrics(out_dir / METRICS, meta["run"]))
        else:
            on_first_process(lambda: check_begins_anew(asked, out_dir))
        make_directory("train.out_dir", out_dir)
        step = int(state.step)
        if step < config.train.steps:
            on_first_process(lambda: _acquire(lock, places, is_new=not saved))
            best.begin()
            on_first_process(lambda: write_config(asked, out_dir))
        undo.pop_all()
    made = setup, corpus, task, meta, state, saved, step, noise_key, checkpoints, best
    return Run(*made, clock, local)


def _setup_of(
    config: Config,
    mesh: Mesh,
    network: Network | MakeNetwork | None,
    *parts: Any,
    report: Callable[[str], None],
) -> tuple[Setup, Corpus]:
    """The setup of a run, and its corpus. A custom network is not checked against the mesh.

    `network` and `parts` are arguments of `make_task`.
    """
    config, corpus = load_resolved(config, report=report)
    check_same_everywhere({"data.source": corpus.sha256})
    setup = Setup(config, corpus.tokenizer, mesh)
    if network is not None:
        return setup, corpus

    def num_bytes() -> float:
        return state_bytes(make_task(setup, network, *parts))

    resolved = make_mesh(mesh_config(config, list(mesh.devices.flat), num_bytes))
    check_model_fits(config, resolved)
    return dataclasses.replace(setup, mesh=resolved), corpus


@dataclasses.dataclass(frozen=True)
class Problem:
    """The training of a config as pure functions, for a custom loop.

    All heads are trained, and only `save` writes a file.
    """

    setup: Setup
    corpus: Corpus
    task: Task

    @property
    def network(self) -> Network:
        return self.task.network

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of the model and its heads."""
        return self.network.init(key)

    def start(self, key: jax.Array, report: Callable[[str], None] = lambda line: None) -> Params:
        """The parameters with which a run starts: those of ``train.init_from`` with fresh heads, or
        fresh ones.
        """
        return _initial_params(self.task, self.init(key), report)

    def optimizer(self) -> optax.GradientTransformation:
        """The optimiser of ``[optim]`` and ``[heads]`` for ``train.steps`` steps."""
        return self.task.optimizer(self.task.stage(self.setup.config.train.steps))

    def loss(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> jax.Array:
        """The loss of a training step, a float32 scalar in nats per token.

        Args:
          params: parameters, as returned by `init`.
          batch: rows, as yielded by `batches`.
          key: key for all noise of the run, from ``jax.random.key``.
          step: step counted from 0, which determines the noise and the weights of ramped losses.
        """
        return self._parts(params, batch, key, step)[0](params)

    def gradient(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike = 0
    ) -> tuple[jax.Array, Params]:
        """`loss` and its gradient with respect to `params`, which is zero for parameters that are
        never trained.
        """
        compute, trained = self._parts(params, batch, key, step)
        loss, grads = jax.value_and_grad(compute)(trained)
        zeros = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in params}
        return loss, zeros | grads

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """An infinite iterator over the batches of the run that starts at `start_step`."""
        train = self.setup.config.train
        for rows in train_batches(
            self.corpus.train_rows,
            seq_len=self.setup.config.data.seq_len,
            batch_size=train.batch_size,
            seed=train.seed,
            start_step=start_step,
        ):
            yield Batch(*(jnp.asarray(rows[name]) for name in ("tokens", "length", "given")))

    def held_out(self) -> dict[str, np.ndarray]:
        """The held-out rows of an evaluation: ``tokens`` int32 ``[N, L]``, ``length`` and ``given``
        ``[N]``. N is a multiple of the batch size, and the last rows may be empty.
        """
        return held_out_rows(self.setup.config, self.corpus)

    def save(self, params: Params, path: str | PathLike[str]) -> None:
        """Writes a weights file, which `dlm_jax.load` and ``train.init_from`` accept."""
        config, corpus = self.setup.config, self.corpus
        meta = {
            "config": configs.to_dict(config),
            "tokenizer": corpus.tokenizer.to_json(),
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        }
        save_weights(path, params, meta)

    def _parts(
        self, params: Params, batch: Batch, key: jax.Array, step: jax.typing.ArrayLike
    ) -> tuple[Callable[[Params], jax.Array], Params]:
        """The loss as a function of the trained parameters, and these parameters."""
        stage = self.task.stage(self.setup.config.train.steps)
        step_loss, step = self.task.loss(stage), jnp.asarray(step, jnp.int32)
        trained, held = step_loss.split(params)

        def compute(trained: Params) -> jax.Array:
            with devices.used(self.setup.mesh):
                drawn = step_loss.draw(batch, key, step)
                return step_loss(held | trained, drawn, step)[0]

        return compute, trained


def held_out_rows(config: Config, corpus: Corpus) -> dict[str, np.ndarray]:
    """The held-out rows of an evaluation, padded to whole batches."""
    return validation_windows(
        corpus.val_rows,
        seq_len=config.data.seq_len,
        pad_id=corpus.tokenizer.pad_id,
        max_windows=config.train.eval_windows,
        multiple_of=config.train.batch_size,
    )


def problem(
    config: Config | str | PathLike[str],
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Problem:
    """The training of a config, for a custom loop. Arguments and errors are as for `train`."""
    if not isinstance(config, Config):
        config = configs.load(str(config))
    mesh = _checked_mesh(config)
    setup, corpus = _setup_of(config, mesh, network, objective, heads, report=report)
    return Problem(setup, corpus, make_task(setup, network, objective, heads))


def _local_of(
    config: Config, checkpoints: Checkpoints, report: Callable[[str], None]
) -> LocalCheckpoints | None:
    """The local checkpoints of a run, closed with its shared checkpoints; None if unset.

    Their directory is named after that of the shared checkpoints, so runs do not share it.
    """
    if not config.train.local_checkpoint_dir:
        return None
    name = hashlib.sha256(str(checkpoints.directory).encode()).hexdigest()[:16]
    index = jax.process_index()

    def report_own(line: str) -> None:
        # The lines of `report` appear on process 0 only.
        report(line) if index == 0 else print(f"process {index}: {line}", file=sys.stderr)

    local = LocalCheckpoints(Path(config.train.local_checkpoint_dir) / name, report_own)
    checkpoints.when_closed.callback(local.close)
    return local


def _continued(
    task: Task,
    meta: dict[str, Any],
    checkpoints: Checkpoints | None,
    local: LocalCheckpoints | None,
    report: Callable[[str], None],
) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest state and metadata of the existing run, whose identity is copied to `meta`.

    A local checkpoint is used unless a shared one is newer. The result is None if neither exists.
    """
    abstract = task.abstract_state()
    step = None if local is None else local.newest(abstract)
    shared: dict[str, Any] = {}
    if checkpoints is not None:
        try:
            shared = checkpoints.read_meta(report=report)
        except ValueError as error:
            if step is None:
                raise
            report(f"{error}; the local checkpoint of step {step} is used")
    if shared:
        check_same_run(meta, shared)
    restored = None
    while local is not None and step is not None and step >= shared.get("step", 0):
        saved = local.read_meta(step=step)
        try:
            check_same_run(meta, saved)
        except ValueError as error:
            raise ValueError(f"{local.directory}: {error}; or remove the directory") from None
        if shared.get("run", saved["run"]) != saved["run"]:
            raise ValueError(
                f"{local.directory} has checkpoints of run {saved['run']}, but the checkpoints "
                f"belong to run {shared['run']}; remove the directory"
            )
        try:
            restored = local.restore(abstract, step=step)
        except Damaged as error:
            local.report(f"the local checkpoint of step {step} is not used: {error}")
            step = local.newest(abstract)
            continue
        report(f"step {step} is restored from train.local_checkpoint_dir")
        break
    if restored is None and checkpoints is not None:
        restored = checkpoints.restore(abstract, report=report)
        check_same_run(meta, restored.meta)
    if restored is None:
        return None
    step, state, saved = restored
    meta |= {name: saved[name] for name in ("run", *KEPT) if name in saved}
    if line := growth(task.setup.config, saved, step):
        report(line)
    return state, saved


def _begun(
    task: Task, meta: dict[str, Any], key: jax.Array, *, report: Callable[[str], None]
) -> TrainState:
    """The state before the first step of a new run, with a new random identity."""
    meta["run"] = on_first_process(lambda: secrets.token_hex(8))
    meta |= _kept(task.setup.config, report)
    config, mesh = task.setup.config, task.setup.mesh
    shares = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(task.abstract_state())
    ]
    require_room(
        sum(shares),
        mesh.devices.flat,
        "the training state",
        "use a smaller [model], or split it over more devices with mesh.fsdp",
    )
    state = task.fresh_state(key)
    if not config.train.init_from:
        return state
    return state.begun_with(_initial_params(task, state.params, report))


def _initial_params(task: Task, fresh: Params, report: Callable[[str], None]) -> Params:
    """The parameters with which a run starts: those of ``train.init_from``, or fresh ones."""
    config = task.setup.config
    return begin_with(
        _init_path(config),
        fresh,
        task.setup.tokenizer,
        model=config.model,
        report=report,
        mask_like=config.train.mask_like,
        ignore=config.train.ignore_config,
    )


def _kept(config: Config, report: Callable[[str], None]) -> dict[str, Any]:
    """What the run keeps of the published model in train.init_from, or of the one from which the
    run in train.init_from was trained, as metadata; empty if there is none.
    """
    source = _init_path(config)
    if not source:
        return {}
    if is_published(source):
        return read_kept(Path(source), config.train.ignore_config)
    theirs = load_meta(path_of_model(source), report=report)
    return {name: theirs[name] for name in KEPT if name in theirs}


def _checked_mesh(config: Config) -> Mesh:
    """The mesh of a config, after all checks that do not need data."""
    check_same_everywhere(facts_of(config))
    check_settings()
    mesh = make_mesh(mesh_config(config, jax.devices()))
    compiler.options("train", mesh, config.mesh.compiler_options)
    share_of_batch(batch_sharding(mesh, config.train.batch_size), config.train.batch_size)
    check_parts(config, mesh)
    check_writable("train.out_dir", Path(config.train.out_dir))
    check_trackers(config.train.trackers)
    if local := config.train.local_checkpoint_dir:
        if is_remote(local):
            raise SettingError(
                "train.local_checkpoint_dir",
                local,
                "is a URL",
                "name a directory on the disk of each host",
            )
        check_writable("train.local_checkpoint_dir", Path(local))
    where = checkpoints_of(config)
    on_first_process(lambda: check_bucket("train.checkpoint_dir", where))
    if config.train.checkpoint_dir and not is_remote(where):
        check_writable("train.checkpoint_dir", Path(located(where)))
    return mesh


def _lock_those_there(lock: DirectoryLock, places: dict[str, Path]) -> None:
    """Locks the existing local directories against changes by other runs."""
    for setting, path in places.items():
        if not is_remote(path) and path.is_dir():
            lock.lock(path, setting)


def _acquire(lock: DirectoryLock, places: dict[str, Path], *, is_new: bool) -> None:
    """Creates and locks the directories. Directories that cannot be locked are claimed.

    Raises:
      ValueError: another run owns a directory or has saved a checkpoint since the last check.
    """
    checkpoints = places["train.checkpoint_dir"]

    def check_still_new() -> None:
        if is_new and complete_steps(checkpoints):
            raise ValueError(
                f"train.checkpoint_dir={checkpoints} contains checkpoints of a run that started at "
                "the same time; restart"
            )

    for setting, path in places.items():
        make_directory(setting, path)
    unlocked = [path for setting, path in places.items() if not lock.lock(path, setting)]
    # A claim ends the run that owns the directory, so a rejected run must not claim it.
    check_still_new()
    for path in unlocked:
        lock.claim(path)
    if unlocked:
        check_still_new()


def _check_adds_up(setup: Setup, task: Task, state: TrainState) -> None:
    """Raises ValueError if custom losses of any stage cannot be computed in microbatches."""
    groups = dict.fromkeys((MAIN, *(head.group for head in task.heads)))
    if not setup.config.heads.train_main:
        del groups[MAIN]
    stage = Stage(tuple(groups), setup.config.model.lora_rank > 0)
    check_adds_up(
        task.loss(stage),
        state.params,
        mesh=setup.mesh,
        seq_len=setup.config.data.seq_len,
        token_ids=setup.text_ids,
    )


def _name(made: Any) -> str:
    return getattr(made, "name", None) or getattr(made, "__qualname__", type(made).__name__)


def _sources_of(parts: Sequence[Any]) -> dict[str, str]:
    """The source code of the custom parts of a run, which all processes must share."""
    return {f"source code of {_name(part)}": own_source(part) for part in parts if part}


def _names_of(network: Any, objective: Any, heads: Sequence[Any]) -> dict[str, Any]:
    """The names of custom parts, which checkpoints store."""
    own = {"network": network and _name(network), "objective": objective and _name(objective)}
    return {part: found for part, found in own.items() if found} | (
        {"heads": [_name(head) for head in heads]} if heads else {}
    )


def _optimiser_names(task: Task, optimizer: Any) -> dict[str, str]:
    """The names of a custom optimiser (with the types of its state) and of a custom schedule."""
    names = {} if task.schedule is None else {"schedule": _name(task.schedule)}
    if task.own_optimizer is None:
        return names
    is_made = isinstance(optimizer, optax.GradientTransformation)
    found: list[str] = []

    def note(part: Any) -> bool:
        if hasattr(part, "_fields"):
            found.append(type(part).__name__)
        return False

    jax.tree.leaves(task.abstract_state().opt_state, is_leaf=note)
    kinds = ", ".join(dict.fromkeys(found)) or "no state"
    name = _name(optimizer.update if is_made else optimizer)
    return names | {"optimizer": f"{name} of {kinds}"}
