"""Other programs that show the metrics of a run: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dlm_jax.config import TRACKERS

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes the records of a run as they are written to ``metrics.jsonl``."""

    def write(self, record: dict[str, Any]) -> None:
        """Shows a record, which has a ``kind`` and a ``step``."""
        ...

    def close(self) -> None:
        """Hands over what is left."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuses trackers whose package is not installed.

    Raises:
      ValueError: the line names the tracker and the package.
    """
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"train.trackers={name} needs {_PACKAGES[name]}, which is not installed; "
                f"pip install {_PACKAGES[name]}"
            )


def open_tracker(
    name: str, out_dir: Path, config: dict[str, Any], *, identity: str, step: int
) -> Tracker:
    """A tracker of a run that goes on after `step`; what it has beyond it is dropped."""
    return _OPEN[name](out_dir, config, identity, step)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by ``KIND/NAME``, without step and time."""
    return {
        f"{record['kind']}/{name}": float(value)
        for name, value in record.items()
        if name not in ("kind", "step", "time") and isinstance(value, int | float)
    }


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        # Imported late: protobuf takes half a second, and no run without it should wait.
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(out_dir / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases named after the directory; that of the identity there goes on."""

    def __init__(self, out_dir: Path, config: dict[str, Any], identity: str, step: int):
        name = hashlib.sha256(f"{out_dir.absolute()}{identity}".encode()).hexdigest()[:16]
        self._run = importlib.import_module("wandb").init(
            project="dlm_jax", name=out_dir.name, id=name, resume="allow", dir=str(out_dir),
            config=config,
        )  # fmt: skip

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


_OPEN: dict[str, Callable[[Path, dict[str, Any], str, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}
assert set(_OPEN) == set(TRACKERS) == set(_PACKAGES)
