"""Shows canvases in a terminal while they are denoised, with one visible glyph per character."""

from __future__ import annotations

import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from dlm_jax.viewing.frames import Changes, Frame, Kind, changes, piece_reader

# Colours come from the terminal's palette, so that they follow the theme. New tokens are also
# underlined, so that a new space is visible.
_STYLES = {
    Kind.GIVEN: "2",
    Kind.HOLE: "90",
    Kind.KEPT: "",
    Kind.FRESH: "1;4;36",
    Kind.REWRITTEN: "1;4;35",
    Kind.REMASKED: "31",
    Kind.INSERTED: "1;4;32",
}
_ROWS = 4
"""Maximum number of rows to draw; the first rows of a call are drawn."""

Cell = tuple[str, Kind]
"""A glyph and its kind."""


class Watch:
    """Shows the rows after each step, in place on a terminal, or else as successive blocks.

    Args:
      decode: maps a sequence of ids to text, with U+FFFD for incomplete characters.
      stream: stream to write to.
      width: number of columns; None means the current width of the terminal.
      height: maximum number of lines to draw in place; None means the height of the terminal.
      names: labels for ids without text, such as ``{eos_id: "⟨eos⟩"}``.
      pace: minimum seconds between two drawings on a terminal; there is no wait on other streams.

    Attributes:
      waited: total seconds spent waiting between drawings.
    """

    def __init__(
        self,
        decode: Callable[[Any], str],
        stream: TextIO,
        *,
        width: int | None = None,
        height: int | None = None,
        names: Mapping[int, str] | None = None,
        pace: float = 0.0,
    ):
        self._piece, self._stream = piece_reader(decode, names), stream
        self._is_terminal, self._size = stream.isatty(), (width, height)
        self._before: dict[int, Frame] = {}
        self._drawn = 0
        self._pace, self._next = (pace if self._is_terminal else 0.0), 0.0
        self.waited = 0.0

    def show(self, frames: Sequence[Frame]) -> None:
        """Draws one frame per row over the previous drawing; no effect without frames.

        Each frame is compared with the row's frame in the previous call, if there is one.
        """
        if not frames:
            return
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            size = shutil.get_terminal_size()
        width, height = self._size[0] or size.columns, self._size[1] or size.lines or 24
        # More lines than the terminal has would leave fragments in the scroll-back. Three lines are
        # the cursor's, a blank one, and "and N more rows"; a row has at least four.
        shown, room = min(len(frames), _ROWS), 1 << 30
        if self._is_terminal:
            shown = max(1, min(shown, (height - 2) // 5))
            room = max((height - 2) // shown - 1, 2)
        blocks = [self._block(frame, width, room) for frame in frames[:shown]]
        if hidden := len(frames) - shown:
            blocks.append([f"and {hidden} more row{'s' if hidden > 1 else ''}"])
        lines = [line for block in blocks for line in [*block, ""]]
        text = "".join(f"{line}\n" for line in lines)
        if self._is_terminal:
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            text = f"\r{up}" + "".join(f"{line}\x1b[K\n" for line in lines[:-1]) + "\x1b[J"
            self._drawn = len(lines) - 1
        rest = self._next - time.monotonic()
        if rest > 0:
            time.sleep(rest)
            self.waited += rest
        self._next = time.monotonic() + self._pace
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()
        self._before = {frame.row: frame for frame in frames}

    def _block(self, frame: Frame, width: int, room: int) -> list[str]:
        seen = changes(self._before.get(frame.row), frame)
        lines = wrapped(frame, seen, self._piece, width - 1)
        header = _header(frame, seen)
        if len(lines) > room - 1:
            is_new = [any(kind not in (Kind.GIVEN, Kind.KEPT) for _, kind in ln) for ln in lines]
            first = min(is_new.index(True) if any(is_new) else 0, len(lines) - room + 1)
            header += f"  lines {first + 1}-{first + room - 1} of {len(lines)}"
            lines = lines[first : first + room - 1]
        header = header[: width - 1]
        if not self._is_terminal or os.environ.get("NO_COLOR"):
            return [header, *("".join(sign for sign, _ in line) for line in lines)]
        return [f"\x1b[1m{header}\x1b[0m", *map(_painted, lines)]


def wrapped(
    frame: Frame, seen: Changes, piece: Callable[[int], str], width: int
) -> list[list[Cell]]:
    """The lines of a canvas, of at most `width` columns: a cell per hole and per character."""
    lines: list[list[Cell]] = [[]]
    used = 0
    for token, is_hole, number in zip(frame.tokens, frame.is_hole, seen.kinds, strict=True):
        kind = Kind(int(number))
        hole = "▒" if kind is Kind.REMASKED else "░"
        for char in hole if is_hole else piece(int(token)):
            sign = _glyph(char)
            columns = 2 if unicodedata.east_asian_width(sign) in "WF" else 1
            if used + columns > width:
                lines.append([])
                used = 0
            lines[-1].append((sign, kind))
            used += columns
            if char == "\n":
                lines.append([])
                used = 0
    return lines if lines[-1] else lines[:-1]


def _glyph(char: str) -> str:
    """What shows a character, without moving the cursor or joining the previous glyph."""
    if char == "\n":
        return "⏎"
    if char < " ":
        return chr(0x2400 + ord(char))
    is_hidden = unicodedata.combining(char) or unicodedata.category(char)[0] in "CM"
    is_hidden = is_hidden or unicodedata.category(char) in ("Zl", "Zp")
    return "\ufffd" if is_hidden else char


def _painted(line: Sequence[Cell]) -> str:
    out, last = [], ""
    for sign, kind in line:
        style = _STYLES[kind]
        if style != last:
            out.append("\x1b[0m" * bool(last) + f"\x1b[{style}m" * bool(style))
        out.append(sign)
        last = style
    return "".join(out) + "\x1b[0m" * bool(last)


def _header(frame: Frame, seen: Changes) -> str:
    """The header of a row: progress, and the changes since the previous frame."""
    total = "" if frame.steps is None else f"/{frame.steps}"
    parts = [f"row {frame.row}", f"step {frame.step}{total}", f"holes {int(frame.is_hole.sum())}"]
    for kind in (Kind.FRESH, Kind.REWRITTEN, Kind.REMASKED, Kind.INSERTED):
        if count := seen.count(kind):
            parts.append(f"{kind.name.lower()} {count}")
    if seen.deleted.size:
        parts.append(f"deleted {seen.deleted.size}")
    return "  ".join(parts if frame.status == "running" else [*parts, frame.status])
