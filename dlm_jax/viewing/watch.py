"""Shows a canvas in a terminal as lines of cells, with one visible glyph per character."""

from __future__ import annotations

import math
import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TextIO

from dlm_jax.settings import SettingError
from dlm_jax.viewing.frames import Changes, Frame, Kind, Pieces, changes

# Replacements for glyphs that the stream's encoding does not have.
_PLAIN = {"░": "_", "▒": "~", "⏎": "\\n", "␉": "\\t", "⟨": "<", "⟩": ">", "…": "..."}
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Cell(NamedTuple):
    """A glyph, its width in terminal columns, its kind, and whether a line ends after the glyph."""

    sign: str
    columns: int
    kind: Kind
    ends_line: bool = False


def cells(frame: Frame, seen: Changes, pieces: Pieces, encoding: str) -> Iterator[Cell]:
    """The cells of a canvas: one cell per hole and per character.

    A character that consists of several tokens has the largest `Kind` among them.
    """

    def cell(char: str, kind: Kind) -> Cell:
        return Cell(*_sign(char, encoding), kind, char == "\n")

    kinds = [Kind(kind) for kind in seen.kinds.tolist()]
    for piece in pieces.split(frame.tokens, frame.is_hole):
        kind = max(kinds[piece.start : piece.stop])
        if not piece.text:
            yield cell("▒" if kind is Kind.REMASKED else "░", kind)
        for index, char in enumerate(piece.text):
            if index == 0 and unicodedata.combining(char):
                yield cell("◌", kind)  # a combining accent must not attach to the previous glyph
            yield cell(char, kind)


@lru_cache(maxsize=4096)
def _sign(char: str, encoding: str) -> tuple[str, int]:
    """The glyph for `char`, and its width in columns."""
    if char == "\n":
        sign = "⏎"
    elif char < " ":
        sign = chr(0x2400 + ord(char))
    elif unicodedata.category(char) in _UNSEEN:
        sign = "\ufffd"
    else:
        sign = char
    if not writes(sign, encoding):
        sign = _PLAIN.get(sign, "?")
        return sign, len(sign)
    if unicodedata.combining(char):
        return sign, 0
    return sign, 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def writes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def wrap(canvas: Iterator[Cell], width: int) -> list[list[Cell]]:
    """Wraps cells into lines of at most `width` columns, after a space or hole if possible.

    A space at the start of a wrapped line is dropped. There is always room for the glyph that marks
    a line end.
    """
    lines: list[list[Cell]] = []
    line: list[Cell] = []
    used = 0
    for cell in canvas:
        if not cell.ends_line and used + cell.columns > width - 2:
            at = len(line) if cell.sign == " " else _last_break(line)
            lines.append(line[:at])
            line = line[at:]
            used = sum(kept.columns for kept in line)
            if cell.sign == " " and not line:
                continue
        line.append(cell)
        used += cell.columns
        if cell.ends_line:
            lines.append(line)
            line, used = [], 0
    return [*lines, line] if line else lines


def _last_break(line: list[Cell]) -> int:
    """The index at which to break `line`: after the last space or hole, or at the end."""
    for at in range(len(line), 0, -1):
        if line[at - 1].sign == " " or line[at - 1].kind in (Kind.HOLE, Kind.REMASKED):
            return at
    return len(line)


def paint(line: list[Cell], style: Callable[[Kind], str]) -> str:
    """The line as text, with kinds shown by terminal styles; an empty style has no effect."""
    out, last = [], ""
    for cell in line:
        code = style(cell.kind)
        if code != last:
            out.append("\x1b[0m" if last else "")
            out.append(f"\x1b[{code}m" if code else "")
            last = code
        out.append(cell.sign)
    return "".join(out) + ("\x1b[0m" if last else "")


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
_MIN_WIDTH = 16
# Seconds per step, slow enough to follow, and total seconds above which steps are shown faster.
_PACE = 0.15
_LONGEST = 12.0
# The minimum number of lines shown for a row: a header and three lines of text.
_MIN_LINES = 4


def pace_of(steps: int) -> float:
    """Seconds to show each step of a row with this many steps."""
    return min(_PACE, _LONGEST / max(steps, 1))


class Watch:
    """Shows the rows after each step, in place on a terminal, or else as successive blocks.

    Args:
      decode: maps a sequence of ids to text, with U+FFFD for incomplete characters.
      stream: stream to write to.
      width: number of columns; None means the current width of the terminal.
      height: maximum number of lines to draw in place; None means the height of the terminal.
      use_colour: whether to use colour; None uses colour on a terminal unless NO_COLOR is set.
      rows_shown: maximum number of rows to draw; the first rows of a call are drawn.
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
        use_colour: bool | None = None,
        rows_shown: int = 4,
        names: Mapping[int, str] | None = None,
        pace: float = 0.0,
    ):
        if width is not None and width < _MIN_WIDTH:
            raise SettingError(
                "width", width, "is too narrow to read", f"use at least {_MIN_WIDTH}"
            )
        if rows_shown < 1:
            raise SettingError("rows_shown", rows_shown, "shows nothing", "use at least 1")
        self._pieces = Pieces(decode, names)
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        if use_colour is None:
            use_colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._use_colour = use_colour
        self._size = (width, height)
        self._rows_shown = rows_shown
        self._before: dict[int, Frame] = {}
        self._drawn = 0
        self._pace = pace if self._is_terminal else 0.0
        self._last = -math.inf
        self.waited = 0.0

    def show(self, frames: Sequence[Frame]) -> None:
        """Draws one frame per row over the previous drawing; no effect without frames.

        Each frame is compared with the row's frame in the previous call, if there is one.
        """
        if not frames:
            return
        width, height = self._measure()
        shown, room = self._share(len(frames), height)
        blocks = [self._block(frame, width, room) for frame in frames[:shown]]
        hidden = len(frames) - shown
        if hidden:
            blocks.append([f"and {hidden} more row{'s' if hidden > 1 else ''}"])
        lines = [line for block in blocks for line in [*block, ""]]
        if self._is_terminal:
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            text = f"\r{up}" + "".join(f"{line}\x1b[K\n" for line in lines[:-1]) + "\x1b[J"
            self._drawn = len(lines) - 1
        else:
            text = "".join(f"{line}\n" for line in lines)
        self._wait()
        self._stream.write(text)
        self._stream.flush()
        self._before = {frame.row: frame for frame in frames}

    def _wait(self) -> None:
        """Waits until the previous drawing has been visible for at least `pace` seconds."""
        rest = self._last + self._pace - time.monotonic()
        if rest > 0:
            time.sleep(rest)
            self.waited += rest
        self._last = time.monotonic()

    def _measure(self) -> tuple[int, int | None]:
        """The number of columns and lines of the stream; lines are None except on a terminal."""
        width, height = self._size
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (AttributeError, OSError, ValueError):
            size = shutil.get_terminal_size((80, 24))
        height = height or size.lines or 24
        return max(width or size.columns, _MIN_WIDTH), height if self._is_terminal else None

    def _share(self, num_rows: int, height: int | None) -> tuple[int, int | None]:
        """The number of rows to draw, and the maximum number of lines per row (None for no limit).

        Drawing more lines than the terminal has would leave fragments in the scroll-back.
        """
        shown = min(num_rows, self._rows_shown)
        if height is None:
            return shown, None
        height -= 3  # the cursor's line, a blank line, and "and N more rows"
        shown = max(1, min(shown, (height + 1) // (_MIN_LINES + 1)))
        return shown, max((height + 1) // shown - 1, 2)

    def _block(self, frame: Frame, width: int, room: int | None) -> list[str]:
        before = self._before.get(frame.row)
        if before is not None and before.step > frame.step:
            before = None  # another row now has this number
        seen = changes(before, frame)
        lines = wrap(cells(frame, seen, self._pieces, self._encoding), width)
        header = _header(frame, seen)
        if room is not None and len(lines) > room - 1:
            is_new = [any(cell.kind not in (Kind.GIVEN, Kind.KEPT) for cell in ln) for ln in lines]
            first = is_new.index(True) if any(is_new) else 0
            first = min(first, len(lines) - room + 1)
            header += f"  lines {first + 1}-{first + room - 1} of {len(lines)}"
            lines = lines[first : first + room - 1]
        bold, plain = ("\x1b[1m", "\x1b[0m") if self._use_colour else ("", "")
        style = _STYLES.__getitem__ if self._use_colour else lambda _: ""
        return [bold + header[: width - 1] + plain, *(paint(line, style) for line in lines)]


def _header(frame: Frame, seen: Changes) -> str:
    """The header of a row: progress, and the changes since the previous frame."""
    total = "" if frame.steps is None else f"/{frame.steps}"
    parts = [f"row {frame.row}", f"step {frame.step}{total}", f"holes {int(frame.is_hole.sum())}"]
    for kind in (Kind.FRESH, Kind.REWRITTEN, Kind.REMASKED, Kind.INSERTED):
        if count := seen.count(kind):
            parts.append(f"{kind.name.lower()} {count}")
    if seen.deleted.size:
        parts.append(f"deleted {seen.deleted.size}")
    if frame.status != "running":
        parts.append(frame.status)
    return "  ".join(parts)
