"""Metrics of a run: a JSON lines file, trackers, and a plot of the losses."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_jax.distributed.mesh import CHIPS
from dlm_jax.store.files import replacing, said, write_whole

METRICS = "metrics.jsonl"
PICTURE = "loss.png"

Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]

CLOCK = frozenset(
    ("time", "run", "tokens_per_second", "step_seconds", "input_seconds")
    + ("flop_utilisation", "device_memory_bytes")
)
"""Fields of a record that describe the machine and the identity of the run."""

# Dense bfloat16 FLOP/s of one GPU, from the data sheets of the vendor.
_GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops(device: Any) -> float | None:
    """The peak bfloat16 FLOP/s of a device; None if unknown, for example for a CPU."""
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].flops
    return next((peak for name, peak in _GPUS.items() if name in device.device_kind), None)


class MetricsLog:
    """Appends one JSON object per line, and passes the numbers on to trackers.

    A killed run may have logged steps after `step` that were not saved. A resumed run repeats these
    steps, so their lines and a partial last line are removed first. A tracker is a pair of
    functions, ``write(step, figures)`` and ``close()``. One that fails is reported in one line and
    no longer used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int,
        trackers: Mapping[str, Callable[[], Tracker]] | None = None,
        report: Callable[[str], None] = print,
    ):
        self._path, self._report = Path(path), report
        self._trackers: dict[str, Tracker] = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        valid = [record for record in read_records(self._path) if record["step"] <= step]
        write_whole(self._path, "".join(f"{json.dumps(record)}\n" for record in valid).encode())
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        for name, open_tracker in (trackers or {}).items():
            with self._reporting(name):
                self._trackers[name] = open_tracker()

    def write(self, **record: Any) -> None:
        """Appends a record and flushes it to the operating system. The record must have a ``kind``
        and a ``step``.

        Raises:
          OSError: the write failed, for example on a full disk. The message names the file.
        """
        try:
            self._file.write(f"{json.dumps(record)}\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        figures = {
            f"{record['kind']}/{name}": float(value)
            for name, value in record.items()
            if name not in ("kind", "step", "time") and isinstance(value, int | float)
        }
        for name, (write, _) in list(self._trackers.items()):
            with self._reporting(name):
                write(record["step"], figures)

    def close(self) -> None:
        # Closing retries a failed write, whose failure has already been reported.
        with contextlib.suppress(OSError):
            self._file.close()
        for name, (_, close) in list(self._trackers.items()):
            with self._reporting(name):
                close()

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # not KeyboardInterrupt, after which a tracker is still closed
            self._trackers.pop(name, None)
            self._report(f"warning: {name} fails ({said(error)}); training continues")


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics file in order, without a partial last line; empty if there is no
    file.

    Raises:
      ValueError: a line is not a record, because the file belongs to another program.
    """
    try:
        # Each line is written together with its newline, so a last line without one is partial.
        *lines, _ = Path(path).read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            is_record = isinstance(record["kind"], str) and isinstance(record["step"], int)
        except (ValueError, RecursionError, TypeError, LookupError):
            is_record = False
        if not is_record:
            raise ValueError(f"{path} line {number} is not a record of metrics; move the file away")
        records.append(record)
    return records


def plot_losses(records: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Plots the training loss and the held-out bound over the steps as a PNG.

    Raises:
      ValueError: matplotlib (extra ``plots``) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("matplotlib is not installed; pip install 'dlm_jax[plots]'") from None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for kind, name, label, style in (
        ("train", "loss", "training loss", "-"),
        ("evaluation", "bound", "held-out bound", "o-"),
    ):
        points = [(record["step"], record[name]) for record in records if record["kind"] == kind]
        if points:
            label = f"{label} (last {points[-1][1]:.3f})"
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _tensorboard(out_dir: Path, config: dict[str, Any], identity: str, step: int) -> Tracker:
    """Writes event files to ``tensorboard/`` in the directory of the run."""
    # Imported here, because importing protobuf takes half a second.
    make_writer = importlib.import_module("tensorboardX").SummaryWriter
    writer = make_writer(str(out_dir / "tensorboard"), purge_step=step + 1)

    def write(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close


def _wandb(out_dir: Path, config: dict[str, Any], identity: str, step: int) -> Tracker:
    """A Weights & Biases run named after the directory. A run with the same identity is resumed."""
    run = importlib.import_module("wandb").init(
        project="dlm_jax",
        name=out_dir.name,
        id=hashlib.sha256(f"{out_dir.absolute()}{identity}".encode()).hexdigest()[:16],
        resume="allow",
        dir=str(out_dir),
        config=config,
    )
    return lambda step, figures: run.log(figures, step=step), run.finish


TRACKERS = {"tensorboard": ("tensorboardX", _tensorboard), "wandb": ("wandb", _wandb)}
"""By ``train.trackers``: the package that a tracker needs, and the function that opens it."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError if the package of a tracker is not installed."""
    for name in names:
        package, _ = TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"train.trackers={name} requires {package}, which is not installed; "
                f"pip install 'dlm_jax[{name}]'"
            )
