"""Metrics of a run: a JSON lines file, a plot of the losses, trackers, and the wall clock.

Goodput is the share of the wall time of a run that its kept training steps take.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.monitoring

from dlm_jax.store.files import (
    remove_leftovers,
    replacing,
    said,
    write_whole,
)

METRICS = "metrics.jsonl"
PICTURE = "loss.png"

STEPS, LOST, DOWN = "steps", "lost", "down"
PARTS = (
    STEPS, "import", "devices", "data", "restore", "compile", "evaluation", "sample", "checkpoint",
    "other", LOST, DOWN,
)  # fmt: skip
"""Parts of the wall time of a run."""


class MetricsLog:
    """Appends one JSON object per line. Lines of steps after `step` are dropped
    when the file is opened.

    A killed run may have logged steps that were not saved. A resumed run repeats these steps, so
    their lines and a partial last line are removed first. ``last`` is the last record before the
    removal, or empty.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Remove the temporary files of a killed run.
        for name in (self._path.name, PICTURE, "config.toml"):
            remove_leftovers(self._path.with_name(name))
        found = read_records(self._path)
        self.last = found[-1] if found else {}
        kept = [record for record in found if record["step"] <= step]
        write_whole(self._path, "".join(map(_line, kept)).encode())
        self._file: TextIO = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, **record: Any) -> None:
        """Appends a record and flushes it to the operating system. The record must have a ``step``.

        Raises:
          OSError: the write failed, for example on a full disk. The message names the file.
        """
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        # Closing retries a failed write, whose failure has already been reported.
        with contextlib.suppress(OSError):
            self._file.close()


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics file in order, without a partial last line; empty if there is no
    file.

    Raises:
      ValueError: a line is not a record, because the file belongs to another program.
    """
    try:
        # Each line is written together with its newline, so a last line without one is partial.
        *lines, _ = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line))
        except (ValueError, RecursionError):
            raise ValueError(
                f"{path} line {number} is not a record of metrics; move the file away"
            ) from None
    return records


def check_metrics(path: Path, identity: str) -> None:
    """Raises ValueError if the run with this identity cannot continue the metrics file."""
    runs = {record.get("run", "") for record in read_records(path)}
    if others := runs - {identity}:
        raise ValueError(
            f"{path} contains metrics of run {min(others) or 'unnamed'}, but the checkpoints "
            f"belong to run {identity or 'unnamed'}; move the metrics of the other run elsewhere"
        )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
        raise ValueError
    if not isinstance(record["kind"], str) or not isinstance(record["step"], int):
        raise ValueError
    return record


def plot_losses(
    records: list[dict[str, Any]],
    path: str | os.PathLike[str],
) -> None:
    """Plots the training loss, each of its parts and the held-out bound over the steps as a PNG.

    Nothing is plotted without training records. Requires matplotlib (extra ``plots``).
    """
    curves = loss_curves(records)
    if not curves:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, (steps, values) in curves.items():
        style: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.5}
        if label.startswith("held-out"):
            style = {"marker": "o", "markersize": 3}
            label = f"{label} (last {values[-1]:.3f})"
        axes.plot(steps, values, label=label, **style)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png")


def plot_run(out_dir: Path) -> None:
    """Plots the metrics of the run in a directory in its ``loss.png``; see `plot_losses`.

    Raises:
      ValueError: matplotlib is not installed, or the metrics are damaged.
    """
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ValueError("matplotlib is not installed; pip install 'dlm_jax[plots]'") from None
    records = read_records(out_dir / METRICS)
    plot_losses(records, out_dir / PICTURE)


CLOCK = frozenset(
    (
        "time",
        "tokens_per_second",
        "step_seconds",
        "input_seconds",
        "device_seconds",
        "host_seconds",
        "flop_utilisation",
        "device_memory_bytes",
        "run",
        "goodput",
        "pipeline_tokens_per_second",
        *(f"wall_{part}" for part in PARTS),
    )
)
"""Fields of a record that describe the machine and the identity of the run."""

_NO_LOSSES = ("kind", "step", "param_norm", "learning_rate", *CLOCK)


def _is_loss(name: str) -> bool:
    is_other = name in _NO_LOSSES or name.startswith("grad_norm")
    return not is_other and not name.endswith(("_alpha", "_learning_rate"))


def loss_curves(records: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The steps and values of each curve, keyed by label: the training loss, its parts, and the
    held-out bound.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}

    def add(label: str, step: int, value: float) -> None:
        steps, values = curves.setdefault(label, ([], []))
        steps.append(step)
        values.append(value)

    for record in records:
        if record["kind"] == "train":
            for name in filter(_is_loss, record):
                add("training loss" if name == "loss" else name, record["step"], record[name])
    if not curves:
        return {}
    for record in records:
        if record["kind"] == "evaluation":
            add("held-out bound", record["step"], record["bound"])
    order = {"training loss": curves.pop("training loss")}
    return order | dict(sorted(curves.items()))


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"train.trackers={name} requires {_PACKAGES[name]}, which is not installed; "
                f"pip install 'dlm_jax[{name}]'"
            )


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers in a record, except step and time, by name ``KIND/NAME``."""
    return {
        f"{record['kind']}/{name}": float(value)
        for name, value in record.items()
        if name not in ("kind", "step", "time") and isinstance(value, int | float)
    }


class _TensorBoard:
    """Writes event files to ``tensorboard/`` in the directory of the run."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        # Imported here, because importing protobuf takes half a second.
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(out_dir / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A Weights & Biases run named after the directory. A run with the same identity is resumed."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        name = hashlib.sha256(f"{out_dir.absolute()}{identity}".encode()).hexdigest()[:16]
        self._run = importlib.import_module("wandb").init(
            project="dlm_jax",
            name=out_dir.name,
            id=name,
            resume="allow",
            dir=str(out_dir),
            config=config,
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[Path, dict[str, Any], str, int], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}
"""Functions ``(out_dir, config, identity, step) -> tracker`` by tracker name, for a run that
continues after `step`.

Records of later steps are dropped. A tracker has the methods ``write(record)`` and ``close()``.
"""


class Journal:
    """Writes the records of a run to ``metrics.jsonl`` and trackers, on the first process only.

    A failed tracker or plot is reported in one line and does not end the run. Records of steps
    after `step`, the last saved one, are dropped.

    ``last`` is the last record of the earlier processes of the run, or empty.
    """

    def __init__(
        self,
        out_dir: Path,
        config: dict[str, Any],
        identity: str,
        *,
        step: int,
        report: Callable[[str], None],
    ):
        self._out_dir, self._identity, self._report = out_dir, identity, report
        self._is_on = jax.process_index() == 0
        self._trackers: list[Any] = []
        self.last: dict[str, Any] = {}
        if self._is_on:
            self._log = MetricsLog(out_dir / METRICS, step=step)
            self.last = self._log.last
            for name in config["train"]["trackers"]:
                with self._reporting(f"{name} fails"):
                    self._trackers.append(_TRACKERS[name](out_dir, config, identity, step))

    def write(self, **record: Any) -> None:
        if self._is_on:
            record |= {"time": round(time.time(), 3), "run": self._identity}
            self._log.write(**record)
            for tracker in list(self._trackers):
                self._guarded(tracker, lambda tracker=tracker: tracker.write(record))

    def draw(self) -> None:
        """Plots the losses of the run so far; see `plot_run`.

        The whole metrics file is read, so this is not called during a run.
        """
        if self._is_on:
            with self._reporting(f"{PICTURE} cannot be drawn"):  # reports any exception
                plot_run(self._out_dir)

    def close(self) -> None:
        if self._is_on:
            self._log.close()
            for tracker in list(self._trackers):
                self._guarded(tracker, tracker.close)

    def _guarded(self, tracker: Any, act: Callable[[], Any]) -> None:
        """Calls `act`. If the call fails, the tracker is reported and disabled."""
        with self._reporting(f"{type(tracker).__name__} fails"):
            try:
                act()
            except Exception:  # not KeyboardInterrupt, after which the tracker is still closed
                self._trackers.remove(tracker)
                raise

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._report(f"warning: {what} ({said(error)}); training continues")


def wall_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part in a record of the metrics or the metadata of a checkpoint."""
    return {part: record[f"wall_{part}"] for part in PARTS if f"wall_{part}" in record}


def _without_down(wall: Mapping[str, float]) -> float:
    return sum(seconds for part, seconds in wall.items() if part != DOWN)


class WallClock:
    """Divides the wall time of a run since its first start among its activities.

    `charge` assigns the time since the previous call, so the parts add up to the wall time. The
    parts are saved in checkpoints. A restart restores the parts of its checkpoint: the steps after
    this checkpoint, which are repeated, are ``lost``, and the time between the last line of the
    metrics and the restart is ``down``. Only the parts of process 0 are saved and logged.

    Args:
      start: time at which the program started; by default now.
    """

    def __init__(self, start: float | None = None):
        self._start = self._mark = time.time() if start is None else start
        self._seconds: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        self._compiled_before = collections.Counter(_compilations())

    def charge(self, part: str) -> None:
        """Assigns the time since the previous call to one of `PARTS`."""
        now = max(time.time(), self._mark)
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def resume(self, saved: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Adds the time of the earlier processes of the run.

        Args:
          saved: metadata of the restored checkpoint; empty without a checkpoint.
          last: last record of the metrics, including the records of lost steps; empty if none.
        """
        kept = wall_of(saved)
        records = [one for one in (saved, last) if wall_of(one)]
        if records:
            newest = max(records, key=lambda one: one["time"])
            seen = wall_of(newest)
            lost = max(0.0, _without_down(seen) - _without_down(kept))
            kept[LOST] = kept.get(LOST, 0.0) + lost
            kept[DOWN] = seen.get(DOWN, 0.0) + max(0.0, self._start - newest["time"])
        self._earlier = kept

    def figures(self) -> dict[str, Any]:
        """``goodput``, a fraction, and ``wall_PART``, seconds up to ``time``, the last `charge`."""
        wall = collections.Counter(self._earlier)
        wall.update(self._seconds)
        share = wall[STEPS] / max(sum(wall.values()), 1e-9)
        parts = {f"wall_{part}": round(seconds, 3) for part, seconds in wall.items()}
        return {"goodput": share, "time": round(self._mark, 3), **parts}

    def first_step(self) -> str:
        """A line with the parts of the time from the start of this process to its first step."""
        made = _compilations() - self._compiled_before
        cached = f" ({made[_HIT]} of {made[_ASKED]} programs cached)" if made[_ASKED] else ""
        names = {STEPS: "step", "compile": f"compile{cached}"}
        parts = ", ".join(f"{names.get(p, p)} {s:.1f} s" for p, s in self._seconds.items())
        return f"first step after {sum(self._seconds.values()):.1f} s: {parts}"


_HIT = "/jax/compilation_cache/cache_hits"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"


@functools.cache
def _compilations() -> collections.Counter[str]:
    """Counts of JAX's events in this process since the first call."""
    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    return counts
