"""Figures of a run: a JSON-lines file that grows with it, and the picture of its losses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO


class MetricsLog:
    """Appends one JSON object per line; reopening at a step drops the lines beyond it.

    A run that is killed has logged steps that it has not saved; on resuming they are taken
    again, so their lines (and a half-written last one) are removed first.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_records(self._path) if record["step"] <= step]
        replace_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file: TextIO = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, **record: Any) -> None:
        """Appends a record, which must have a ``step``, and hands it to the operating system."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a metrics file in order, without a half-written last line; none if missing.

    Raises:
      ValueError: a line is no record; the file is another program's, or damaged.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            if not {"kind", "step"} <= record.keys():
                raise ValueError
        except (ValueError, AttributeError):
            raise ValueError(
                f"{path} line {number} is not a record of metrics; move the file away"
            ) from None
        records.append(record)
    return records


def replace_text(path: Path, text: str) -> None:
    """Writes `text` so that the file is either the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, target)


CLOCK = frozenset(
    ("time", "tokens_per_second", "step_seconds", "input_seconds", "device_seconds",
     "host_seconds", "flop_utilisation", "device_memory_bytes")
)  # fmt: skip
"""What a record of training says of the machine: all of it differs from run to run."""

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
