"""The operations of a compiled program, read from the text that XLA prints of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

SIZES: dict[str, float] = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5,
}  # fmt: skip
"""Bytes of a number of each type."""

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_START = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array of a type.

    Attributes:
      dtype: as in `SIZES`.
      dims: its dimensions.
      in_memory: whether it lies in the chip's main memory and not in a faster one.
    """

    dtype: str
    dims: tuple[int, ...]
    in_memory: bool = True

    @property
    def num_bytes(self) -> float:
        """Its size."""
        return SIZES[self.dtype] * math.prod(self.dims)


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
      name: its own.
      kind: such as ``fusion``.
      type: of its result, as text.
      operands: names of what it reads; for a constant or parameter, the text in its brackets.
      attributes: what stands behind the brackets.
    """

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def shapes(self) -> list[Shape]:
        """The arrays of its result."""
        return shapes_of(self.type)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in its attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    @property
    def source(self) -> str:
        """The function that it was traced from."""
        return self.attribute(r'op_name="([^"]*)"') or self.kind


@dataclass
class Module:
    """A program: its computations by name, each a list of operations in their order."""

    computations: dict[str, list[Operation]] = field(default_factory=dict)
    entry: str = ""

    def called(self, operation: Operation, key: str = "calls") -> str | None:
        """The computation that an operation names under `key`, if the program has it."""
        name = operation.attribute(key + r"=%([\w.\-]+)")
        return name if name in self.computations else None


def shapes_of(text: str) -> list[Shape]:
    """The arrays that a type names; what is no array (a token) is left out."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype in SIZES:
            numbers = tuple(int(size) for size in dims.split(",") if size)
            # S(1) and above are the memories beside the main one.
            found.append(Shape(dtype, numbers, re.search(r"S\([1-9]", layout or "") is None))
    return found


def num_bytes(text: str) -> float:
    """Bytes of all arrays of a type."""
    return sum(shape.num_bytes for shape in shapes_of(text))


def parse(text: str) -> Module:
    """The program that ``compiled.as_text()`` prints."""
    module, current = Module(), None
    for line in _whole_lines(text):
        head = _HEAD.match(line)
        if head and "=" not in line.split("(")[0]:
            current = module.computations.setdefault(head.group(2), [])
            if head.group(1):
                module.entry = head.group(2)
            continue
        start = _START.match(line)
        if start and current is not None:
            current.append(_operation(start.group(1), line[start.end() :]))
        elif line.startswith("}"):
            current = None
    return module


def _whole_lines(text: str) -> list[str]:
    """Lines, with the breaks inside the metadata of custom calls mended."""
    lines: list[str] = []
    for line in text.split("\n"):
        begins = line.startswith((" ", "}", "%", "ENTRY", "HloModule", "\t"))
        goes_on = line.startswith(('"xprof', "}}")) or (line and not begins)
        if lines and goes_on and lines[-1].startswith("  "):
            lines[-1] += " " + line
        else:
            lines.append(line)
    return lines


def _operation(name: str, rest: str) -> Operation:
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
        type_, rest = rest[:end], rest[end:].lstrip()
    else:
        type_, _, rest = rest.partition(" ")
    opening = rest.find("(")
    kind, end = rest[:opening], _closing(rest, opening)
    inside = rest[opening + 1 : end]
    if kind in ("constant", "parameter"):
        operands: tuple[str, ...] = (inside,)
    else:
        operands = tuple(_NAME.findall(inside))
    return Operation(name, kind, type_, operands, rest[end + 1 :])


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "()":
            depth += 1 if text[place] == "(" else -1
            if depth == 0:
                return place
    return len(text) - 1


def trip_count(module: Module, loop: Operation, parent: list[Operation]) -> int | None:
    """How often the body of a ``while`` runs, if its bound is a constant."""
    known = loop.attribute(r'known_trip_count"?:?\{"?n"?:?"?(\d+)')
    if known:
        return int(known)
    name = module.called(loop, "condition")
    if name is None:
        return None
    condition = module.computations[name]
    constants = {
        operation.name: int(operation.operands[0])
        for operation in condition
        if operation.kind == "constant" and re.fullmatch(r"-?\d+", operation.operands[0])
    }
    for operation in condition:
        if operation.kind == "compare" and "direction=LT" in operation.attributes:
            bounds = [constants[name] for name in operation.operands if name in constants]
            if bounds:
                return bounds[0]
    if len(constants) == 1:
        return next(iter(constants.values()))
    return _carried_bound(condition, loop, parent)


def _carried_bound(
    condition: list[Operation], loop: Operation, parent: list[Operation]
) -> int | None:
    """The bound of a loop whose constant was moved into what the loop carries."""
    here = {operation.name: operation for operation in parent}
    start = here.get(loop.operands[0])
    if start is None or start.kind != "tuple":
        return None
    places = {
        operation.name: int(operation.attribute(r"index=(\d+)") or 0)
        for operation in condition
        if operation.kind == "get-tuple-element"
    }
    found = []
    for operation in condition:
        if operation.kind not in ("compare", "fusion"):
            continue
        for name in operation.operands:
            if name in places and places[name] < len(start.operands):
                source = here.get(start.operands[places[name]])
                for _ in range(5):
                    if source is None or source.kind not in (
                        "copy",
                        "bitcast",
                        "copy-done",
                        "copy-start",
                    ):
                        break
                    source = here.get(source.operands[0])
                if source is not None and source.kind == "constant":
                    found += [int(x) for x in re.findall(r"^\d+$", source.operands[0])]
    positive = [bound for bound in found if bound > 0]
    return positive[0] if len(positive) == 1 else None
