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


def plot_losses(records: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draws training loss and held-out bound over the steps to a PNG; nothing without records.

    For a sequence scorer the held-out cross-entropy is drawn, which its loss is too.
    """
    train = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "evaluation"]
    if not train:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [record["step"] for record in train]
    losses = [record["loss"] for record in train]
    axes.plot(steps, losses, linewidth=0.8, alpha=0.5, label="training loss")
    is_scorer = any("cross_entropy" in record for record in held_out)
    figure_of = "cross_entropy" if is_scorer else "bound"
    if held_out:
        axes.plot(
            [record["step"] for record in held_out],
            [record[figure_of] for record in held_out],
            marker="o",
            markersize=3,
            label=f"held-out {figure_of.replace('_', '-')} (last {held_out[-1][figure_of]:.3f})",
        )
    axes.set(xlabel="step", ylabel="nats per text" if is_scorer else "nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, target)
