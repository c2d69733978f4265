"""Metrics of a run: a JSON lines file, a plot of the losses, trackers, rates and the wall clock.

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
from statistics import median
from typing import Any

import jax
import jax.monitoring

from dlm_jax.distributed.mesh import CHIPS
from dlm_jax.store.files import remove_leftovers, replacing, said, write_whole

METRICS = "metrics.jsonl"
PICTURE = "loss.png"

STEPS, LOST, DOWN = "steps", "lost", "down"
PARTS = (
    STEPS, "import", "devices", "data", "restore", "compile", "evaluation", "sample", "checkpoint",
    "other", LOST, DOWN,
)  # fmt: skip
"""Parts of the wall time of a run."""

CLOCK = frozenset(f"wall_{part}" for part in PARTS).union(
    ("time", "run", "goodput", "flop_utilisation", "device_memory_bytes"),
    ("step_seconds", "input_seconds", "device_seconds", "host_seconds"),
    ("tokens_per_second", "pipeline_tokens_per_second"),
)
"""Fields of a record that describe the machine and the identity of the run."""

_NO_LOSSES = ("kind", "step", "param_norm", "learning_rate", *CLOCK)


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
        records = read_records(self._path)
        self.last = records[-1] if records else {}
        valid = [record for record in records if record["step"] <= step]
        write_whole(self._path, "".join(f"{json.dumps(record)}\n" for record in valid).encode())
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, **record: Any) -> None:
        """Appends a record and flushes it to the operating system. The record must have a ``step``.

        Raises:
          OSError: the write failed, for example on a full disk. The message names the file.
        """
        try:
            self._file.write(f"{json.dumps(record)}\n")
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
            record = json.loads(line)
            is_record = isinstance(record["kind"], str) and isinstance(record["step"], int)
        except (ValueError, RecursionError, TypeError, LookupError):
            is_record = False
        if not is_record:
            raise ValueError(f"{path} line {number} is not a record of metrics; move the file away")
        records.append(record)
    return records


def check_metrics(path: Path, identity: str) -> None:
    """Raises ValueError if the run with this identity cannot continue the metrics file."""
    runs = {record.get("run", "") for record in read_records(path)}
    if others := runs - {identity}:
        raise ValueError(
            f"{path} contains metrics of run {min(others) or 'unnamed'}, but the checkpoints "
            f"belong to run {identity or 'unnamed'}; move the metrics of the other run elsewhere"
        )


def loss_curves(records: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The steps and values of each curve, keyed by label: the training loss, its parts, and the
    held-out bound.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {"training loss": ([], [])}
    for record in records:
        values = {}
        if record["kind"] == "train":
            values = {name: value for name, value in record.items() if _is_loss(name)}
            values["training loss"] = values.pop("loss")
        elif record["kind"] == "evaluation":
            values = {"held-out bound": record["bound"]}
        for label, value in values.items():
            curve = curves.setdefault(label, ([], []))
            curve[0].append(record["step"])
            curve[1].append(value)
    if not curves["training loss"][0]:
        return {}
    return {"training loss": curves.pop("training loss")} | dict(sorted(curves.items()))


def _is_loss(name: str) -> bool:
    is_other = name in _NO_LOSSES or name.startswith("grad_norm")
    return not is_other and not name.endswith(("_alpha", "_learning_rate"))


def plot_losses(records: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
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
    plot_losses(read_records(out_dir / METRICS), out_dir / PICTURE)


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"train.trackers={name} requires {_PACKAGES[name]}, which is not installed; "
                f"pip install 'dlm_jax[{name}]'"
            )


class _TensorBoard:
    """Writes event files to ``tensorboard/`` in the directory of the run."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        # Imported here, because importing protobuf takes half a second.
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(out_dir / "tensorboard"), purge_step=step + 1)
        self.close = self._writer.close

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class _Wandb:
    """A Weights & Biases run named after the directory. A run with the same identity is resumed."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        self._run = importlib.import_module("wandb").init(
            project="dlm_jax",
            name=out_dir.name,
            id=hashlib.sha256(f"{out_dir.absolute()}{identity}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(out_dir),
            config=config,
        )
        self.close = self._run.finish

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)


_TRACKERS: dict[str, Callable[[Path, dict[str, Any], str, int], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}
"""Functions ``(out_dir, config, identity, step) -> tracker`` by tracker name, for a run that
continues after `step`.

Records of later steps are dropped. A tracker has the methods ``write(step, figures)`` and
``close()``.
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
        if not self._is_on:
            return
        record |= {"time": round(time.time(), 3), "run": self._identity}
        self._log.write(**record)
        figures = {
            f"{record['kind']}/{name}": float(value)
            for name, value in record.items()
            if name not in ("kind", "step", "time") and isinstance(value, int | float)
        }
        for tracker in list(self._trackers):
            with self._reporting(f"{type(tracker).__name__} fails", tracker):
                tracker.write(record["step"], figures)

    def draw(self) -> None:
        """Plots the losses of the run so far; see `plot_run`.

        The whole metrics file is read, so this is not called during a run.
        """
        if self._is_on:
            with self._reporting(f"{PICTURE} cannot be drawn"):
                plot_run(self._out_dir)

    def close(self) -> None:
        if self._is_on:
            self._log.close()
            for tracker in list(self._trackers):
                with self._reporting(f"{type(tracker).__name__} fails", tracker):
                    tracker.close()

    @contextlib.contextmanager
    def _reporting(self, what: str, tracker: Any = None) -> Iterator[None]:
        """Reports an exception in the context, after which the tracker is no longer used."""
        try:
            yield
        except Exception as error:  # not KeyboardInterrupt, after which a tracker is still closed
            if tracker is not None:
                self._trackers.remove(tracker)
            self._report(f"warning: {what} ({said(error)}); training continues")


# Latest batches whose median time is the rate of the pipeline, and bytes of a token in a batch.
_READS, _BYTES = 100, 4

# Dense bfloat16 FLOP/s of one GPU, from the data sheets of the vendor.
_GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops(device: Any) -> float | None:
    """The peak bfloat16 FLOP/s of a device; None if unknown, for example for a CPU."""
    if device.device_kind in CHIPS:
        return CHIPS[device.device_kind].flops
    return next((peak for name, peak in _GPUS.items() if name in device.device_kind), None)


class Meter:
    """Measures the rates of training steps between records.

    Args:
      tokens: tokens of a batch, which all processes read in `shares` parts.
      shares: number of parts.
      flops: FLOPs of the model in a step, see `dlm_jax.training.plan.model_flops`.
      devices: the devices of all processes.
    """

    def __init__(self, tokens: int, shares: int, flops: float, devices: Sequence[Any]):
        self._tokens, self._tokens_here, self._flops = tokens, tokens / shares, flops
        peak = peak_flops(devices[0])
        self._peak = None if peak is None else peak * len(devices)
        self._reads = collections.deque[float](maxlen=_READS)
        self._waits = {"input": 0.0, "device": 0.0}

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Counts the time in the context as waiting for `what`: ``input`` or ``device``."""
        start = time.time()
        yield
        self._waits[what] += max(0.0, time.time() - start)

    def read(self, seconds: float) -> None:
        """Adds the time that the pipeline took for one batch of this process."""
        self._reads.append(seconds)

    def rates(self, figures: dict[str, float]) -> str:
        """A line with the data rate that the steps of `figures` need, and that of the pipeline."""
        busy = figures["step_seconds"] - figures["input_seconds"]
        needs = self._tokens_here / max(busy, 1e-9)
        reads = figures["pipeline_tokens_per_second"]
        return (
            f"data per host: a step needs {needs:,.0f} tokens/s ({needs * _BYTES / 1e6:.2f} MB/s), "
            f"the pipeline delivers {reads:,.0f} ({reads * _BYTES / 1e6:.2f} MB/s)"
        )

    def figures(self, steps: int, seconds: float) -> dict[str, float]:
        """Metrics of the steps since the last call.

        `seconds` is the total time of these steps; the times in the result are per step.

        ``step_seconds`` is the sum of ``input_seconds`` (waiting for rows), ``device_seconds``
        (waiting for the devices while the host is idle) and ``host_seconds`` (everything else).
        ``pipeline_tokens_per_second`` is the rate at which this host could read its rows.
        ``flop_utilisation`` is model FLOP/s divided by the peak FLOP/s of the devices, if the peak
        is known. ``device_memory_bytes`` is the peak memory use of the fullest device of this
        process, if the backend reports it.
        """
        waits, self._waits = self._waits, dict.fromkeys(self._waits, 0.0)
        figures = {
            "tokens_per_second": steps * self._tokens / seconds,
            "step_seconds": seconds / steps,
            "input_seconds": waits["input"] / steps,
            "device_seconds": waits["device"] / steps,
            "host_seconds": max(0.0, seconds - sum(waits.values())) / steps,
            "pipeline_tokens_per_second": self._tokens_here / max(median(self._reads), 1e-9),
        }
        if self._peak is not None:
            figures["flop_utilisation"] = steps * self._flops / seconds / self._peak
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        in_use = [one.get("peak_bytes_in_use", one.get("bytes_in_use", 0)) for one in stats]
        if any(in_use):
            figures["device_memory_bytes"] = float(max(in_use))
        return figures


def wall_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part in a record of the metrics or the metadata of a checkpoint."""
    return {part: record[f"wall_{part}"] for part in PARTS if f"wall_{part}" in record}


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
        self._seconds[part] = self.seconds(part) + now - self._mark
        self._mark = now

    def seconds(self, part: str) -> float:
        """The seconds that have been assigned to a part in this process."""
        return self._seconds.get(part, 0.0)

    def idle(self) -> float:
        """The seconds that have been assigned to anything but steps in this process."""
        return sum(self._seconds.values()) - self.seconds(STEPS)

    def resume(self, saved: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Adds the time of the earlier processes of the run.

        Args:
          saved: metadata of the restored checkpoint; empty without a checkpoint.
          last: last record of the metrics, including the records of lost steps; empty if none.
        """
        self._earlier = wall_of(saved)
        if records := [one for one in (saved, last) if wall_of(one)]:
            newest = max(records, key=lambda one: one["time"])
            seen, earlier = wall_of(newest), self._earlier
            up, saved_up = (sum(wall.values()) - wall.get(DOWN, 0.0) for wall in (seen, earlier))
            earlier[LOST] = earlier.get(LOST, 0.0) + max(0.0, up - saved_up)
            earlier[DOWN] = seen.get(DOWN, 0.0) + max(0.0, self._start - newest["time"])

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
