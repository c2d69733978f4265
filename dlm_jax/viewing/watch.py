"""The terminal view of a running generation: rows that fill in place."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from dlm_jax.viewing.frames import Changes, Frame, Kind, changes
from dlm_jax.viewing.lines import cells, paint, wrap
from dlm_jax.viewing.pieces import Pieces

# Colours of the terminal's own palette, so that its theme decides. What is new is underlined as
# well: a fresh space must show.
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
# Long enough for the eye to follow, but a row of many steps is not to last much longer than this.
_PACE = 0.15
_LONGEST = 12.0
# A header and three lines of text: less of a row is not worth showing.
_MIN_LINES = 4


def pace_of(steps: int) -> float:
    """Seconds that each of so many steps should be seen for."""
    return min(_PACE, _LONGEST / max(steps, 1))


class Watch:
    """Shows the rows of each step, in place on a terminal, else one block of lines after another.

    Args:
      decode: text of a sequence of ids; U+FFFD where their bytes are no whole character.
      stream: where to write.
      width: columns; None asks the terminal each time.
      height: lines of the terminal, which what is drawn in place never exceeds; None asks it.
      use_colour: None is yes on a terminal unless the environment has NO_COLOR.
      rows_shown: rows to draw at most, the first of those given.
      names: what to show for ids that stand for no text, say ``{eos_id: "⟨eos⟩"}``.
      pace: seconds between two drawings on a terminal at least; elsewhere nothing waits.

    Attributes:
      waited: seconds spent on that so far.

    Raises:
      ValueError: `width` or `rows_shown` is too small.
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
            raise ValueError(f"width={width} is too narrow to read; use at least {_MIN_WIDTH}")
        if rows_shown < 1:
            raise ValueError(f"rows_shown={rows_shown} shows nothing; use at least 1")
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
        """Draws one frame per row, over what the last call drew; no frames draw nothing.

        A row is compared with its frame in the last call; without one there it is a new row.
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
        """Nothing, once the last drawing has been seen for long enough."""
        rest = self._last + self._pace - time.monotonic()
        if rest > 0:
            time.sleep(rest)
            self.waited += rest
        self._last = time.monotonic()

    def _measure(self) -> tuple[int, int | None]:
        """Columns and lines of the stream; lines are None where nothing is drawn in place."""
        width, height = self._size
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (AttributeError, OSError, ValueError):
            size = shutil.get_terminal_size((80, 24))
        height = height or size.lines or 24
        return max(width or size.columns, _MIN_WIDTH), height if self._is_terminal else None

    def _share(self, num_rows: int, height: int | None) -> tuple[int, int | None]:
        """How many rows to draw, and the lines each of them may take; None is as many as it has.

        Drawing more lines than the terminal has would leave torn copies in its scroll-back.
        """
        shown = min(num_rows, self._rows_shown)
        if height is None:
            return shown, None
        height -= 3  # the line of the cursor, and "and N more rows" below a blank one
        shown = max(1, min(shown, (height + 1) // (_MIN_LINES + 1)))
        return shown, max((height + 1) // shown - 1, 2)

    def _block(self, frame: Frame, width: int, room: int | None) -> list[str]:
        before = self._before.get(frame.row)
        if before is not None and before.step > frame.step:
            before = None  # the number was given to another row
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
    """The row, how far it is, and what this step did to it."""
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
