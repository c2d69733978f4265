"""The config of a run as it lies in its directory, and as its checkpoints hold it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import dlm_jax.config as configs
from dlm_jax.checkpoint import load_meta
from dlm_jax.config import Config
from dlm_jax.data import from_json
from dlm_jax.metrics import replace_text

NAME = "config.toml"


def checkpoints_of(config: Config) -> str:
    """Where the checkpoints of a run lie: a directory, or a URL."""
    return config.train.checkpoint_dir or str(Path(config.train.out_dir) / "checkpoints")


def write_config(config: Config, out_dir: Path) -> None:
    """Writes ``config.toml``, which people and ``--config`` read; one that is the same stays.

    To go on, a run reads its checkpoints, whose checksums tell damage.
    """
    header = (
        "What this run was asked for.\n"
        "To go on: python train.py --resume DIRECTORY\n"
        "To train the same anew: python train.py --config THIS_FILE --train.out_dir ELSEWHERE"
    )
    text, path = configs.to_toml(config, header=header), out_dir / NAME
    try:
        is_there = path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        replace_text(path, text)


def _checkpoints_beside(out_dir: Path) -> str:
    """The ``train.checkpoint_dir`` of the run in `out_dir`; empty if it is not set or not known."""
    try:
        return configs.load(str(out_dir / NAME)).train.checkpoint_dir
    except ValueError:
        return ""


def config_of_run(out_dir: Path) -> Config:
    """What the run in `out_dir` was asked for when it saved last, to be continued there.

    Its checkpoints lie there, or where its ``config.toml`` says (``train.checkpoint_dir``).

    Raises:
      ValueError: nothing usable is there.
    """
    try:
        meta = load_meta(_checkpoints_beside(out_dir) or out_dir, report=lambda line: None)
    except ValueError as error:
        started = out_dir / NAME
        advice = f"; start it again with --config {started}" if started.is_file() else ""
        raise ValueError(f"--resume {out_dir}: {error}{advice}") from None
    config = configs.from_dict(meta["config"], where=f"--resume {out_dir}")
    train = dataclasses.replace(config.train, out_dir=str(out_dir))
    # What follows from the text is not asked for.
    tokenizer, model = from_json(meta["tokenizer"]), config.model
    if model.vocab_size == tokenizer.vocab_size:
        model = dataclasses.replace(model, vocab_size=0)
    if model.start_id == tokenizer.mask_id:
        model = dataclasses.replace(model, start_id=-1)
    return dataclasses.replace(config, train=train, model=model)
