"""Repairs over time: the text of a row after every step, with insertions, deletions and changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

import dlm_jax
from benchmarks.repairs import KINDS, Repair
from dlm_jax.inference.model import Model
from dlm_jax.viewing.frames import Frame, Kind, changes, frame_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {Kind.INSERTED: "tab:green", Kind.FRESH: "tab:blue", Kind.REWRITTEN: "tab:orange"}
_WIDTH, _HEIGHT = 0.085, 0.21


def draw(model: Model, repairs: Sequence[Repair], settings: dict[str, Any], path: str) -> None:
    """Draws the first repaired row and the first row not repaired of each kind of damage."""
    prompts = [{"prompt": repair.prompt, "draft": repair.damaged} for repair in repairs]
    frames: dict[int, list[Frame]] = {index: [] for index in range(len(repairs))}
    for rows in dlm_jax.stream(model, prompts, **settings):
        for index, row in rows.items():
            frames[index].append(frame_of(index, row, mask_id=model.tokenizer.mask_id))
    chosen = []
    for kind in KINDS:
        own = [index for index, repair in enumerate(repairs) if repair.kind == kind]
        right = [
            index for index in own if _text(model, frames[index][-1]) == _whole(repairs[index])
        ]
        chosen += [(index, "repaired") for index in right[:1]]
        chosen += [(index, "not repaired") for index in own if index not in right][:1]
    heights = [2 + len(_moments(frames[index])) for index, _ in chosen]
    figure, axis = plt.subplots(figsize=(8.6, _HEIGHT * sum(heights)))
    axis.set_axis_off()
    axis.set_xlim(0, 8.6 / _WIDTH)
    axis.set_ylim(sum(heights), 0)
    line = 0
    for (index, how), height in zip(chosen, heights, strict=True):
        title = f"{repairs[index].kind}, {how}; it was {repairs[index].original!r}"
        axis.text(0, line + 0.6, title, fontsize=7, weight="bold")
        for number, (before, frame) in enumerate(_moments(frames[index]), 1):
            _row(axis, model, before, frame, line + number + 0.6, len(repairs[index].prompt))
        line += height
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


def _moments(frames: Sequence[Frame]) -> list[tuple[Frame | None, Frame]]:
    """The first frame, and each frame that differs from the previous one."""
    found: list[tuple[Frame | None, Frame]] = [(None, frames[0])]
    for before, after in zip(frames, frames[1:], strict=False):
        what = changes(before, after)
        if what.deleted.size or any(what.count(kind) for kind in COLORS):
            found.append((before, after))
    return found


def _row(axis: Any, model: Model, before: Frame | None, frame: Frame, y: float, skip: int) -> None:
    what = changes(before, frame)
    axis.text(0, y, f"{frame.step}", fontsize=7, color="gray")
    kinds = what.kinds if before is not None else [Kind.KEPT] * len(frame.tokens)
    for place in range(skip, len(frame.tokens)):
        sign = "□" if frame.is_hole[place] else model.tokenizer.decode([int(frame.tokens[place])])
        kind = Kind(kinds[place])
        axis.text(3 + place - skip, y, {"\n": "↵", " ": "·"}.get(sign, sign), fontsize=7,
                  family="monospace", color=COLORS.get(kind, "black"),
                  weight="bold" if kind in COLORS else "normal")  # fmt: skip
    for place in what.deleted:
        behind = np.flatnonzero(what.origin > place)
        gone = behind[0] if behind.size else len(frame.tokens)
        axis.plot([2.9 + gone - skip], [y - 0.05], marker="^", color="tab:red", markersize=3)


def _text(model: Model, frame: Frame) -> str:
    return model.tokenizer.decode(frame.tokens)


def _whole(repair: Repair) -> str:
    return repair.prompt + repair.original
