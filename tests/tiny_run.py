"""The one tiny training run that the tests share."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import dlm_jax.config as configs
import dlm_jax.training.trainer
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.training.metrics import CLOCK, read_records
from dlm_jax.training.trainer import Outcome, Trainer, prepare, run_loop

ROOT = Path(__file__).parent.parent
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40
FLAGS = {
    "model.depth": "2",
    "model.width": "16",
    "model.heads": "2",
    "data.seq_len": "16",
    "optim.warmup_steps": "2",
    "train.steps": "24",
    "train.batch_size": "8",
    "train.log_every": "3",
    "train.eval_every": "6",
    "train.eval_windows": "4",
    "train.checkpoint_every": "4",
    "train.trackers": "",
    "sample.steps": "4",
}

RATES = ("learning_rate", "adam_learning_rate")
"""Learning rates in its metrics: those of muon."""


@functools.cache
def _shared_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="dlm_jax_tests_"))


def text_file() -> Path:
    path = _shared_folder() / "text.txt"
    if not path.exists():
        path.write_text(TEXT)
    return path


def flags(out_dir: Path, **changes: object) -> dict[str, str]:
    """Config flags; in `changes` a double underscore stands for the dot."""
    given = {
        "data.source": str(text_file()),
        "data.cache_dir": str(_shared_folder() / "tokens"),
        "train.out_dir": str(out_dir),
    }
    changed = {name.replace("__", "."): str(value) for name, value in changes.items()}
    return FLAGS | given | changed


@contextlib.contextmanager
def on_devices(count: int) -> Iterator[None]:
    """Runs prepared inside see only so many of the simulated devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dlm_jax.training.trainer,
            "make_mesh",
            lambda config: make_mesh(config, jax.devices()[:count]),
        )
        yield


def run(
    out_dir: Path, *, devices: int = 1, report=lambda line: None, show_sample=None, **changes
) -> Outcome:
    """Prepares the tiny run, new or continued, and trains it."""
    with on_devices(devices):
        prepared = prepare(configs.load(None, flags(out_dir, **changes)), report=report)
    with prepared.checkpoints:
        return run_loop(prepared, show_sample=show_sample)


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Sends SIGTERM to this process while the next run takes `step`."""
    take_step = Trainer.take_step

    def stopped(loop: Trainer) -> None:
        take_step(loop)
        if loop.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Trainer, "take_step", stopped)


def records(out_dir: Path) -> list[dict]:
    """The metrics of a run without the figures that depend on the clock."""
    found = read_records(out_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in found]


def assert_same(left, right) -> None:
    """Both trees are equal, bit for bit."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), left, right)


def program(*arguments: object, script: str = "train.py", **environment: str) -> subprocess.Popen:
    """Starts a script of the project as its users do, with caches of its own."""
    given = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "DLM_JAX_CACHE": str(_shared_folder() / "tokens"),
        "XDG_CACHE_HOME": str(_shared_folder()),
    }
    child = subprocess.Popen(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=given | environment,
    )
    # One whose test has failed does not run on for ever.
    atexit.register(child.kill)
    return child


def needs(number: signal.Signals) -> None:
    """Skips a test of a signal that whoever started it told it to ignore, as nohup does."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
