"""The identity of a run: what its processes and its checkpoints must agree on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import dlm_jax.config as configs
from dlm_jax.config import FREE, Config
from dlm_jax.heads import HEADS
from dlm_jax.objectives.processes import noise_process
from dlm_jax.randomness import settings
from dlm_jax.settings import require
from dlm_jax.store.files import program_facts, write_whole
from dlm_jax.training.metrics import METRICS, read_records
from dlm_jax.training.optimisers import learning_rate
from dlm_jax.training.tasks import Task

CONFIG = "config.toml"
"""Name of the config file of a run."""

LOCAL = frozenset({"data.source", "data.cache_dir", "train.local_checkpoint_dir"})
"""Settings that may differ between the processes of a run."""
ONCE_SAVED = frozenset({"data.source", "train.init_from", "train.mask_like", "train.ignore_config"})
"""Settings that a resumed run may change only after its first checkpoint."""


def check_process(config: Config) -> None:
    """Raises SettingError if the forward process does not exist or does not fit other settings."""
    objective, name = config.objective, config.objective.process
    if noise_process(objective).is_masked:
        return
    for key, value in {
        "denoising_share": 0,
        "proofreading_share": 0,
        "time_weight": True,
        "normaliser": "tokens",
    }.items():
        given, why = getattr(objective, key), f"requires objective.process='masked', not {name!r}"
        require(given == value, f"objective.{key}", given, why, f"use {value!r}")
    for why, is_refused in {
        "model.attention_type='causal'": config.model.attention_type == "causal",
        "heads.sampler_trunk_share": config.heads.sampler_trunk_share > 0,
    }.items():
        why = f"is not supported with {why}"
        require(not is_refused, "objective.process", name, why, "use 'masked'")


def check_writable(setting: str, directory: Path) -> None:
    """Raises ValueError if a local directory is not writable, without creating the directory."""
    nearest = next(filter(os.path.exists, (directory, *directory.absolute().parents)))
    if not nearest.is_dir():
        raise ValueError(
            f"{setting}={directory} cannot be a directory, because {nearest} is a file; "
            "choose another directory"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}={directory} is not writable; choose another directory")


def make_directory(setting: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{setting}={directory} cannot be created ({error.strerror or error}); choose another "
            f"directory"
        ) from None


def facts_of(config: Config) -> dict[str, Any]:
    """Values that all processes of a run must share: the program, the config without local paths,
    the version of JAX, and its settings.
    """
    flat = configs.flat(configs.to_dict(config))
    facts = {key: value for key, value in flat.items() if key not in LOCAL}
    # All processes look for local checkpoints together.
    facts["train.local_checkpoint_dir is set"] = bool(config.train.local_checkpoint_dir)
    return program_facts() | facts | {"version of jax": jax.__version__} | settings()


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


def check_same_run(meta: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError if settings or data would change the result of a resumed run.

    Both arguments are metadata, see `Run`: of this run, and of the checkpoints in the directory.
    """
    configs.from_saved(
        saved, where=f"the run in train.out_dir={meta['config']['train']['out_dir']}"
    )
    if found := _difference(json.loads(json.dumps(meta)), saved):  # JSON has no tuples
        what, remedy = found
        raise ValueError(
            f"train.out_dir={meta['config']['train']['out_dir']} has a run {what}; {remedy} to "
            f"resume it, or use another train.out_dir"
        )


def _difference(meta: dict[str, Any], saved: dict[str, Any]) -> tuple[str, str] | None:
    """The first difference, as a description of the other run and a remedy; None if equal."""
    if saved["corpus"]["sha256"] != meta["corpus"]["sha256"]:
        text = f"that was trained on a different text from {meta['corpus']['name']}"
        return text, "set data.source to the text of the other run"
    drawn, draws = saved["randomness"], meta["randomness"]
    if drawn["draws"] != draws["draws"]:
        there, here = (found["version of jax"] for found in (drawn, draws))
        what = f"that used jax {there}, which draws different random numbers from jax {here}"
        return what, f"use jax {there}"
    here, there = configs.flat(meta["config"]), configs.flat(saved["config"])
    # A head may be trained on rows that were filled with the recommended settings.
    heads = [head for head in HEADS if here[f"model.{head.switch}"]]
    trained = tuple(f"sample.{key}" for head in heads for key in head.sampling)
    fixed = (set(there) - FREE).union(trained)
    differing = [key for key in there if key in fixed and here.get(key) != there[key]]
    steps, most = here["train.steps"], there["train.steps"]
    if steps < most:
        what = f"with train.steps={most}, but this run has {steps}"
        return what, f"raise train.steps to {most} or more"
    if differing:
        # The tokenizer determines the vocabulary size, so the error names the tokenizer.
        key = min(differing, key=lambda key: key == "model.vocab_size")
        what = f"with {key}={there[key]!r}, but this run has {here.get(key)!r}"
        return what, f"set {key}={there[key]!r}"
    # If the tokenizer file has changed, the tokenizers differ although the configs are equal.
    if saved["tokenizer"] != meta["tokenizer"]:
        return "with a different tokenizer", "use that tokenizer"
    if saved.get("chat_template") not in (None, meta.get("chat_template")):
        return "with a different chat template", "use that template"
    for part in saved["own"] | meta["own"]:
        before, now = saved["own"].get(part), meta["own"].get(part)
        if before != now:
            return f"whose {part} is {before}, but here it is {now}", "pass the same"
    return None


def check_begins_anew(asked: Config, out_dir: Path) -> None:
    """Raises ValueError if the directory contains a run without checkpoints and with another
    config.

    A run with the same config restarts in the directory and discards the old metrics. A directory
    without metrics can be reused.

    Args:
      asked: config of the new run, without values that depend on the data.
      out_dir: ``train.out_dir``.
    """
    path, config_path = out_dir / METRICS, out_dir / CONFIG
    if not read_records(path):
        return
    try:
        there = configs.flat(configs.to_dict(configs.load(str(config_path))))
    except ValueError as error:
        why = f"its config is unknown: {error}"
    else:
        here = configs.flat(configs.to_dict(asked))
        # Without a checkpoint, there is no checksum of the text to compare.
        fixed = (set(here) - FREE) | ONCE_SAVED
        differing = [key for key in here if key in fixed and here[key] != there[key]]
        if not differing:
            return
        key = differing[0]
        why = f"{config_path} has {key}={there[key]!r}, but this run has {here[key]!r}"
    raise ValueError(
        f"train.out_dir={out_dir} contains metrics of another run without checkpoints ({why}); "
        f"move {path} elsewhere, or use another train.out_dir"
    )


def growth(config: Config, saved: dict[str, Any], step: int) -> str:
    """A message about the effect of extending a run to more steps, or an empty string.

    `saved` is the metadata of the checkpoint of `step` from which the run resumes, see `Run`.
    """
    before, after = saved["config"]["train"]["steps"], config.train.steps
    if before == after or saved["own"].keys() & {"optimizer", "schedule"}:
        return ""
    old, new = (
        np.asarray(learning_rate(config.optim.learning_rate, config.optim, num_steps=n)(step))
        for n in (before, after)
    )
    return (
        f"train.steps increases from {before} to {after}: the learning rate now decays until "
        f"step {after}, so at step {step} it is {new:.3g} instead of {old:.3g}; the result differs "
        f"from a run of {after} steps"
    )


def part_name(part: Any) -> str:
    """The name of a custom part of a run."""
    return getattr(part, "name", None) or getattr(part, "__qualname__", type(part).__name__)


def names_of_parts(
    task: Task, network: Any, objective: Any, heads: Sequence[Any], optimizer: Any
) -> dict[str, Any]:
    """The names of the custom parts of a run, which checkpoints store. That of an optimiser has the
    types of its state.
    """
    parts = {"network": network, "objective": objective, "schedule": task.schedule}
    names: dict[str, Any] = {
        name: part_name(part) for name, part in parts.items() if part is not None
    }
    if heads:
        names["heads"] = [part_name(head) for head in heads]
    if task.own_optimizer is not None:
        types: list[str] = []

        def note(part: Any) -> bool:
            if hasattr(part, "_fields"):
                types.append(type(part).__name__)
            return False

        jax.tree.leaves(task.abstract_state().opt_state, is_leaf=note)
        is_made = isinstance(optimizer, optax.GradientTransformation)
        name = part_name(optimizer.update if is_made else optimizer)
        names["optimizer"] = f"{name} of {', '.join(dict.fromkeys(types)) or 'no state'}"
    return names
