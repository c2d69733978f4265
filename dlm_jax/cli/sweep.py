"""Sweeps: one run for each combination of values of some settings."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlm_jax.config import Config
from dlm_jax.training import Outcome
from dlm_jax.training.metrics import DOWN, METRICS, read_records, wall_of

Point = dict[str, str]
"""Texts of the settings of one run, by dotted key."""

_PLACES = ("out_dir", "checkpoint_dir")


def grid(settings: Sequence[str]) -> list[Point]:
    """All combinations of ``KEY=VALUE,VALUE`` texts; the last key varies fastest.

    Raises:
      ValueError: a text has another form, or a key or value occurs twice.
    """
    axes: dict[str, list[str]] = {}
    for text in settings:
        key, _, values = text.partition("=")
        axis, where = values.split(","), f"command line: --sweep {text}"
        if not all((key, *axis)):
            raise ValueError(f"{where} is not KEY=VALUE,VALUE; write train.seed=0,1, say")
        if key in axes or len(set(axis)) < len(axis):
            raise ValueError(f"{where} repeats a key or a value; give each once")
        if key in [f"train.{place}" for place in _PLACES]:
            raise ValueError(f"{where}: every run has its own {key}; remove it")
        axes[key] = axis
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def runs(
    settings: Sequence[str], overrides: Mapping[str, str], load: Callable[[Point], Config]
) -> list[tuple[Point, Config]]:
    """The points of the grid and their configs, each with its own directories, named by the point.

    Args:
      settings: arguments of ``--sweep``.
      overrides: texts of the other flags.
      load: the config with some settings replaced.

    Raises:
      ValueError: a setting is invalid or also given as a flag, or two runs have one directory.
    """
    found = []
    for point in grid(settings):
        if both := sorted(point.keys() & overrides.keys()):
            raise ValueError(
                f"command line: --{both[0]} and --sweep {both[0]} both set it; use one"
            )
        config = load(point)
        name = re.sub(r"[^\w.,=+-]", "_", ",".join(f"{k}={v}" for k, v in point.items()))
        places = {place: getattr(config.train, place) for place in _PLACES}
        own = {place: f"{path.rstrip('/')}/{name}" for place, path in places.items() if path}
        found.append((point, dataclasses.replace(
            config, train=dataclasses.replace(config.train, **own)
        )))  # fmt: skip
    if len({config.train.out_dir for _, config in found}) < len(found):
        raise ValueError("command line: --sweep has values that name one directory; change them")
    return found


def row(point: Point, outcome: Outcome) -> dict[str, str]:
    """The row of a run: its settings, steps, last evaluation, and seconds without those down."""
    figure, records = outcome.run.task.figure, read_records(outcome.run.out_dir / METRICS)
    last: dict[str, Any] = records[-1] if records else {}
    wall = wall_of(last)
    is_known = outcome.reason == "finished" and figure in last
    shown = f"{last[figure]:.4f}" if is_known else outcome.reason
    seconds = sum(wall.values()) - wall.get(DOWN, 0.0)
    return point | {"steps": str(outcome.step), figure: shown, "seconds": f"{seconds:.1f}"}


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table with aligned columns."""
    names = list(dict.fromkeys(name for one in rows for name in one))
    lines = [names, ["---"] * len(names), *([one.get(name, "") for name in names] for one in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
