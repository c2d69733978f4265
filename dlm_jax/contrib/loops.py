"""What the training loops of `dlm_jax.contrib` share: metrics, checkpoints and flags.

The loops train on one device in one process. The directory ``train.out_dir`` has the metrics
(``metrics.jsonl``), checkpoints of parameters and optimiser, from which the same command resumes,
and at the end the trained model (``model.safetensors``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import dlm_jax.config
from dlm_jax.settings import require
from dlm_jax.training import Batch, Task

Params = dict[str, Any]
MODEL, METRICS = "model.safetensors", "metrics.jsonl"


class LoopState(NamedTuple):
    """What a loop trains and saves."""

    params: Params
    opt_state: Any

    def updated(self, optimizer: optax.GradientTransformation, grads: Params) -> LoopState:
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        params: Any = optax.apply_updates(self.params, updates)
        return LoopState(params, opt_state)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    task: Task,
    state: LoopState,
    take_step: Callable[[LoopState, Batch, int], tuple[LoopState, dict[str, Any]]],
    *,
    settings: Any,
    stride: int = 1,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
    report: Callable[[str], None] = say,
) -> Params:
    """Trains up to ``train.steps`` from the newest checkpoint, and returns the parameters.

    Args:
      task: the training, whose config has the intervals in ``[train]``.
      state: state before the first step.
      take_step: ``(state, batch, step) -> (state, metrics)``, for a step counted from 0.
      settings: a dataclass; a run continues only with the same settings and config.
      stride: number of steps that one call of `take_step` takes, with one batch.
      evaluate: ``(params) -> metrics``, called every ``train.eval_every`` steps and at the end.
      report: called with one line per record of the metrics.

    Raises:
      ValueError: the directory has another run, or a step is not finite.
    """
    train = task.config.train
    out_dir = Path(train.out_dir).absolute()
    _check_same(out_dir, task.config, settings)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(out_dir / "checkpoints", options=options) as saved:
        first = saved.latest_step() or 0
        if first:
            state = saved.restore(first, args=ocp.args.StandardRestore(state))
        metrics = out_dir / METRICS
        # A killed process may leave a part of a last line, without a newline.
        *lines, _ = metrics.read_text().split("\n") if metrics.exists() else [""]
        _replace(metrics, "".join(f"{s}\n" for s in lines if json.loads(s)["step"] <= first))

        def record(kind: str, step: int, figures: dict[str, Any]) -> None:
            line = {"kind": kind, "step": step} | {k: float(v) for k, v in figures.items()}
            with metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = ", ".join(f"{name} {value:.4g}" for name, value in list(line.items())[2:])
            report(f"step {step}: {shown}")

        batches = task.batches(first // stride)
        for step in range(first, train.steps, stride):
            state, figures = take_step(state, next(batches), step)
            done = step + stride

            def is_due(every: int, step: int = step, done: int = done) -> bool:
                return done >= train.steps or (every > 0 and step // every < done // every)

            if is_due(train.log_every):
                figures = jax.device_get(figures)
                if not np.isfinite(list(figures.values())).all():
                    raise ValueError(f"step {done} is not finite: {figures}; lower [optim]")
                record("train", done, figures)
            if evaluate is not None and is_due(train.eval_every):
                record("evaluation", done, evaluate(state.params))
            if is_due(train.checkpoint_every):
                if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
                    raise ValueError(f"step {done}: a parameter is not finite; lower [optim]")
                saved.save(done, args=ocp.args.StandardSave(state))
    task.save(state.params, out_dir / MODEL)
    return state.params


def _check_same(out_dir: Path, config: Any, settings: Any) -> None:
    """Creates the directory, or raises ValueError if it has a run with other settings, or if the
    config has settings that the loops do not read.
    """
    for key, value in dlm_jax.config.flat(dlm_jax.config.differing(config)).items():
        unread = ("data.pack", "optim.ema_decay", "train.accumulate")
        is_read = key not in unread and key[:5] != "mesh."
        require(is_read, key, value, "is not supported by this loop", "leave it out")
    here = dlm_jax.config.to_dict(config) | {"loop": dataclasses.asdict(settings)}
    here = dlm_jax.config.flat(json.loads(json.dumps(here)))
    here.pop("train.out_dir")
    path = out_dir / "config.json"
    there = json.loads(path.read_text()) if path.exists() else here
    for key, value in here.items():
        why = f"differs from {there.get(key)!r} of the run in {out_dir}"
        require(there.get(key) == value, key, value, why, "use another train.out_dir")
    out_dir.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(here))


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text)
    temporary.replace(path)


def program(
    argv: Sequence[str] | None,
    name: str,
    settings: type,
    train: Callable[[argparse.Namespace, Any, Any], Any],
    **flags: str,
) -> int:
    """Runs a module of `dlm_jax.contrib` as a program, and returns its exit code: 2 for input that
    it refuses.

    Args:
      argv: the arguments.
      name: the name of the module.
      settings: the dataclass of its settings, each of which is a flag.
      train: ``(args, config, settings) -> result``.
      flags: required flags, with what stands for their values.
    """
    parser = argparse.ArgumentParser(prog=f"python -m dlm_jax.contrib.{name}")
    for flag, value in flags.items():
        parser.add_argument(f"--{flag}", required=True, metavar=value)
    parser.add_argument("--config", metavar="FILE", help="TOML file, or name of a shipped config")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the config")
    for field in dataclasses.fields(settings):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        kind: Any = type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"({default})")
    args = parser.parse_args(argv)
    try:
        for pair in args.keys:
            require("=" in pair, "KEY=VALUE", pair, "has no value", "write it as KEY=VALUE")
        config = dlm_jax.config.load(args.config, dict(pair.split("=", 1) for pair in args.keys))
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(settings)}
        train(args, config, settings(**given))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
