"""Checks before a run starts: batches, directories, and existing runs in the same directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax.config import FREE, Config
from dlm_jax.diffusion.processes import noise_process
from dlm_jax.distributed.partitions import batch_sharding
from dlm_jax.heads import HEADS
from dlm_jax.randomness import settings
from dlm_jax.settings import require
from dlm_jax.store.files import program_facts
from dlm_jax.training.metrics import METRICS, read_records
from dlm_jax.training.optimisers import learning_rate

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


def check_parts(config: Config, mesh: Mesh) -> None:
    """Raises ValueError if the rows of a microbatch cannot be divided evenly among the devices."""
    part = config.train.batch_size // config.train.accumulate
    try:
        batch_sharding(mesh, part)
    except ValueError:
        if config.train.accumulate == 1:
            raise
        raise ValueError(
            f"train.accumulate={config.train.accumulate} gives microbatches of {part} rows, which "
            "are not divisible by the number of devices across which the batch is split; lower it"
        ) from None


def check_model_fits(config: Config, mesh: Mesh) -> None:
    """Raises ValueError if the size of a Transformer axis is not divisible by its mesh axis."""
    model, positions = config.model, config.data.seq_len
    sizes = {
        "tensor": {"model.heads": model.heads, "inner size of the MLP": model.inner_width},
        "fsdp": {"model.width": model.width},
        "context": {"data.seq_len": positions},
    }
    for axis, split in sizes.items():
        count = mesh.shape.get(axis, 1)
        for name, size in split.items():
            if size % count:
                fits = [n for n in range(1, count) if size % n == 0 and mesh.size % n == 0]
                raise ValueError(
                    f"mesh.{axis}={count} does not divide {name}={size}; use {max(fits)}"
                )
    experts = mesh.shape.get("expert", 1)
    if experts > 1 and (not model.experts or model.experts % experts):
        raise ValueError(
            f"mesh.expert={experts} splits experts, but the model of the config has "
            f"{model.experts or 'none'}; use 1 or a divisor of their number"
        )
    context, kind = mesh.shape.get("context", 1), model.attention_type
    if context > 1 and kind not in ("bidirectional", "block_causal"):
        raise ValueError(
            f"mesh.context={context} requires model.attention_type='bidirectional' or "
            f"'block_causal', not {kind!r}; use 1"
        )
    if context > 1 and kind == "block_causal" and positions % (2 * context * model.block_length):
        raise ValueError(
            f"mesh.context={context} splits data.seq_len={positions} into {2 * context} pieces, "
            f"which must be multiples of model.block_length={model.block_length}; use another "
            f"mesh.context, or a data.seq_len that {2 * context * model.block_length} divides"
        )


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
