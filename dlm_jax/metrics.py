"""Figures of a run: a JSON-lines file that grows with it, and the picture of its losses."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from dlm_jax.checksums import Damaged, has_crc, with_crc, without_crc
from dlm_jax.storage import remove_leftovers, replacing

METRICS = "metrics.jsonl"
PICTURE = "loss.png"


class MetricsLog:
    """Appends one JSON object per line, with its checksum; reopening drops the lines beyond a step.

    A run that is killed has logged steps that it has not saved; on resuming they are taken
    again, so their lines (and a half-written last one) are removed first. Lines that an earlier
    version wrote without a checksum get theirs then.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # What a kill left of this file, or of those beside it.
        for name in (self._path.name, PICTURE, "config.toml"):
            remove_leftovers(self._path.with_name(name))
        kept = [record for record in read_records(self._path) if record["step"] <= step]
        replace_text(self._path, "".join(map(_line, kept)))
        self._file: TextIO = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, **record: Any) -> None:
        """Appends a record, which must have a ``step``, and hands it to the operating system.

        Raises:
          OSError: it cannot be written, because the disk is full, say; with the file's name.
        """
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Closes the file."""
        # What could not be written is tried again, and was told of.
        with contextlib.suppress(OSError):
            self._file.close()


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a metrics file in order, without a half-written last line; none if missing.

    A file none of whose lines has a checksum is an earlier version's, and is taken as it is if its
    records hold numbers.

    Raises:
      ValueError: a line is no record, or its checksum is wrong; the file is another program's, or
        damaged.
    """
    try:
        *lines, last = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    # A whole line whose end is gone: the end was damaged, for a line is written with it.
    if any(has_crc(last[:end]) for end in (len(last), -1)):
        lines.append(last)
    is_old = not any(map(has_crc, lines))
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line, is_old=is_old))
        except Damaged as error:
            raise ValueError(
                f"{path} line {number} is damaged: {error}; remove that line, or move the file away"
            ) from None
        except (ValueError, RecursionError):
            raise ValueError(
                f"{path} line {number} is not a record of metrics; move the file away"
            ) from None
    return records


def check_metrics(path: Path, identity: str, *, is_new: bool) -> None:
    """Refuses a metrics file that a run of this identity cannot go on with.

    A run that is new drops all lines: it has taken no step yet.

    Raises:
      ValueError: a line is of another run, or see `read_records`.
    """
    runs = {record.get("run", "") for record in read_records(path)}
    if not is_new and (others := runs - {identity}):
        raise ValueError(
            f"{path} is of another run ({min(others) or 'unnamed'}) than the checkpoints "
            f"({identity or 'unnamed'}); move what is not of this run elsewhere"
        )


def _line(record: dict[str, Any]) -> str:
    return with_crc(json.dumps(record).encode()).decode() + "\n"


def _record(line: bytes, *, is_old: bool) -> dict[str, Any]:
    """The record of a line; ValueError if it is none."""
    record = json.loads(line if is_old else without_crc(line))
    if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
        raise ValueError
    numbers = [value for name, value in record.items() if name != "kind"]
    if not isinstance(record["kind"], str) or not isinstance(record["step"], int):
        raise ValueError
    if is_old and not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError
    return record


def replace_text(path: Path, text: str) -> None:
    """Writes `text` so that the file is either the old one or the new one, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


class LossPicture:
    """The picture of a run's losses, ``loss.png``, beside its metrics.

    One that cannot be drawn costs the run nothing: it is told of, once.
    """

    def __init__(self, out_dir: Path, held_out: str, unit: str, *, report: Callable[[str], None]):
        self._out_dir, self._held_out, self._unit = out_dir, held_out, unit
        self._report: Callable[[str], None] | None = report

    def draw(self) -> None:
        """Draws what the metrics hold by now."""
        try:
            plot_losses(
                read_records(self._out_dir / METRICS),
                self._out_dir / PICTURE,
                held_out=self._held_out,
                unit=self._unit,
            )
        except Exception as error:  # whatever the drawing library may raise
            if self._report is not None:
                why = " ".join(str(error).split()) or type(error).__name__
                self._report(f"warning: {PICTURE} cannot be drawn ({why}); the training goes on")
            self._report = None


def plot_losses(
    records: list[dict[str, Any]],
    path: str | os.PathLike[str],
    *,
    held_out: str = "bound",
    unit: str = "nats per token",
) -> None:
    """Draws the training loss and each of its parts over the steps to a PNG.

    Nothing is drawn without records of training.

    Args:
      records: of a metrics file.
      path: of the picture.
      held_out: figure of the evaluations that is drawn beside them.
      unit: of all of them.
    """
    curves = loss_curves(records, held_out)
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
    axes.set(xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png")


CLOCK = frozenset(
    ("time", "tokens_per_second", "step_seconds", "input_seconds", "device_seconds",
     "host_seconds", "flop_utilisation", "device_memory_bytes", "run")
)  # fmt: skip
"""What a record says of the machine and of the run's identity: it differs from run to run."""

_NO_LOSSES = ("kind", "step", "param_norm", "learning_rate", *CLOCK)


def _is_loss(name: str) -> bool:
    """Whether that figure of a record of training is the loss or a part of it."""
    is_other = name in _NO_LOSSES or name.startswith("grad_norm")
    return not is_other and not name.endswith(("_alpha", "_learning_rate"))


def loss_curves(
    records: list[dict[str, Any]], held_out: str
) -> dict[str, tuple[list[int], list[float]]]:
    """(steps, values) by label: the training loss, each part of it, the held-out figure."""
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
            add(f"held-out {held_out.replace('_', '-')}", record["step"], record[held_out])
    order = {"training loss": curves.pop("training loss")}
    return order | dict(sorted(curves.items()))
