"""The page that replays a generation: a self-contained HTML file, made from `Frame`s."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.viewing.frames import Frame, Kind, changes, piece_reader

# Probabilities below exp(-20), -inf and NaN are shown as 0.
_LEAST_LOGPROB = -20.0


def write_trace(
    path: str | PathLike[str],
    rows: Iterable[Sequence[Frame]],
    decode: Callable[[Any], str],
    *,
    title: str,
    names: Mapping[int, str] | None = None,
) -> int:
    """Writes the page to `path` atomically and returns its size in bytes.

    The page works offline and needs no other files. Each frame is stored as changes since the
    previous frame, with log-probabilities rounded to 0.01 nats.

    Args:
      path: path of the page; an existing file is replaced.
      rows: the frames of each row, in step order.
      decode: maps a sequence of ids to text, with U+FFFD for incomplete characters.
      title: heading of the page.
      names: labels for ids without text, such as ``{eos_id: "⟨eos⟩"}``.
    """
    # The JSON is ASCII, without characters that could end the script element or start markup.
    data = json.dumps(trace_data(rows, piece_reader(decode, names)), separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    parts = {"title": html.escape(title), "data": data}
    template = resources.files("dlm_jax.viewing").joinpath("trace.html").read_text("utf-8")
    text = re.sub(r"\{\{(title|data)\}\}", lambda match: parts[match[1]], template)
    # Lone surrogates become question marks.
    content = text.encode("utf-8", errors="replace")
    temporary = Path(f"{os.fspath(path)}.writing")
    temporary.write_bytes(content)
    temporary.replace(path)
    return len(content)


def trace_data(rows: Iterable[Sequence[Frame]], piece: Callable[[int], str]) -> dict[str, Any]:
    """The data for the page's script, as a JSON dict.

    ``pieces`` maps ids to texts. Each row has ``row`` and ``frames``; see `_frame_data`.
    """
    ids: set[int] = set()
    out = []
    for frames in rows:
        befores = [None, *frames[:-1]]
        data = [_frame_data(*pair) for pair in zip(befores, frames, strict=True)]
        out.append({"row": frames[0].row, "frames": data})
        ids.update(*(frame.tokens[~frame.is_hole].tolist() for frame in frames))
    return {"pieces": {str(token): piece(token) for token in sorted(ids)}, "rows": out}


def _frame_data(before: Frame | None, after: Frame) -> dict[str, Any]:
    """The changes from `before` to `after`.

    The keys are ``s`` step, ``S`` status, ``T`` total number of steps, ``o`` previous positions as
    runs ``first position, count`` (inserted positions have the first position -1), and ``d``
    deleted positions of `before`. For changed positions, the keys are ``p`` distance from the
    previous changed position, ``t`` id (-1 for a hole), ``k`` kind, ``c`` step of the commit, and
    ``l`` log-probability times -100. Except for ``s``, empty or unchanged keys are omitted. A list
    of equal values is written as a single value.
    """
    kinds, deleted, origin = changes(before, after)
    now = _columns(after)
    is_told = np.ones(kinds.size, bool)
    if before is not None and before.tokens.size:
        is_told = (origin < 0) | (now != _columns(before)[:, origin]).any(axis=0)
        base = np.where(before.is_hole, Kind.HOLE, Kind.KEPT)  # the kinds without changes
        is_told |= kinds != np.where(before.is_frozen, Kind.GIVEN, base)[origin]
    places = np.flatnonzero(is_told)
    data: dict[str, Any] = {"s": after.step}
    if before is None or before.status != after.status:
        data["S"] = after.status
    if after.steps is not None and (before is None or before.steps != after.steps):
        data["T"] = after.steps
    if before is not None and not np.array_equal(origin, np.arange(before.tokens.size)):
        data["o"] = _runs(origin)
    if deleted.size:
        data["d"] = deleted.tolist()
    if places.size:
        data["p"] = np.diff(places, prepend=0).tolist()
        columns = {"t": now[0], "k": kinds, "c": now[1], "l": now[2]}
        data |= {key: _short(column[places]) for key, column in columns.items()}
    return data


def _columns(frame: Frame) -> np.ndarray:
    """Per position: id (-1 at a hole), step of the commit, and stored log-probability."""
    logprobs = np.nan_to_num(
        frame.logprobs, nan=_LEAST_LOGPROB, neginf=_LEAST_LOGPROB, posinf=0.0
    ).clip(_LEAST_LOGPROB, 0)
    return np.stack(
        [
            np.where(frame.is_hole, -1, frame.tokens),
            frame.committed,
            np.rint(-100 * logprobs).astype(np.int32),
        ]
    )


def _runs(origin: np.ndarray) -> list[int]:
    """Runs of `origin` that ascend by one or are all -1, as ``first, count, first, count, ...``."""
    is_new = origin < 0
    breaks = (np.diff(origin) != ~is_new[1:]) | (is_new[1:] != is_new[:-1])
    starts = np.flatnonzero(np.concatenate([[True], breaks])) if origin.size else np.zeros(0, int)
    counts = np.diff(starts, append=origin.size)
    return np.stack([origin[starts], counts], axis=1).ravel().tolist()


def _short(column: np.ndarray) -> Any:
    """The column as a list, or as a single value if all values are equal."""
    return column[0].item() if (column == column[0]).all() else column.tolist()
