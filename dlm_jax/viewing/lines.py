"""The canvas as lines of terminal cells: one visible sign for every character, then wrapped."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from dlm_jax.viewing.frames import Changes, Frame, Kind
from dlm_jax.viewing.pieces import Pieces

# What a stream that cannot write a sign gets in its place.
_PLAIN = {"░": "_", "▒": "~", "⏎": "\\n", "␉": "\\t", "⟨": "<", "⟩": ">", "…": "..."}
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Cell(NamedTuple):
    """A sign, the terminal columns it takes, its kind, and whether a line ends after it."""

    sign: str
    columns: int
    kind: Kind
    ends_line: bool = False


def cells(frame: Frame, seen: Changes, pieces: Pieces, encoding: str) -> Iterator[Cell]:
    """The cells of a canvas; one per hole, and for each character one that cannot harm a terminal.

    A character spread over several tokens takes the kind of the one that changed most.
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
                yield cell("◌", kind)  # an accent must not land on a sign that is not its own
            yield cell(char, kind)


@lru_cache(maxsize=4096)
def _sign(char: str, encoding: str) -> tuple[str, int]:
    """What stands for `char`, and its width in columns."""
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
    """True if `encoding` has all characters of `text`."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def wrap(canvas: Iterator[Cell], width: int) -> list[list[Cell]]:
    """Lines of at most `width` columns, broken after a space or a hole where there is one.

    A space that would begin a wrapped line is left out, as in a book. The sign of a line's end
    always has room, so it never stands alone on a line.
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
    """Where to cut `line`: after its last space or hole, else at its end."""
    for at in range(len(line), 0, -1):
        if line[at - 1].sign == " " or line[at - 1].kind in (Kind.HOLE, Kind.REMASKED):
            return at
    return len(line)


def paint(line: list[Cell], style: Callable[[Kind], str]) -> str:
    """The line as text, its kinds in the terminal's styles; an empty style switches nothing."""
    out, last = [], ""
    for cell in line:
        code = style(cell.kind)
        if code != last:
            out.append("\x1b[0m" if last else "")
            out.append(f"\x1b[{code}m" if code else "")
            last = code
        out.append(cell.sign)
    return "".join(out) + ("\x1b[0m" if last else "")
