"""What the layout of a compiled training step must be, read from the program's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

_FLOATS = ("bf16", "f16", "f32", "f64")


class Sizes(NamedTuple):
    """Numbers of which no two are equal, nor multiples of each other where it matters.

    Attributes:
      rows: of the batch.
      positions: of a row.
      vocabulary: number of logits.
      own_rows: rows of one device.
    """

    rows: int
    positions: int
    vocabulary: int
    own_rows: int


def _reader() -> Any:
    return pytest.importorskip("dlm_jax.contrib.pod_costs", reason="it reads programs")


def operations(text: str) -> list[Any]:
    """All operations of a program that make arrays in memory: those inside fusions do not."""
    program = _reader().parse(text)
    every = [x for body in program.values() for x in body.values()]
    fused = {x.attribute(r"calls=%([\w.\-]+)") for x in every if x.kind == "fusion"}
    return [x for name, body in program.items() if name not in fused for x in body.values()]


def whole_activations(text: str, sizes: Sizes) -> list[str]:
    """Float arrays with all rows and all positions of the batch on one device."""
    return _found(text, lambda dims: _holds(dims, sizes.rows, sizes.positions))


def moved_activations(text: str, sizes: Sizes) -> list[str]:
    """Collectives that move float arrays with the positions of rows."""
    names = (sizes.positions, sizes.positions * sizes.own_rows, sizes.positions * sizes.rows)
    return [
        f"{x.kind} {x.type} {_source(x)}"
        for x in operations(text)
        if x.kind.removesuffix("-start") in _reader().COLLECTIVES
        for dtype, dims, _ in shapes(x)
        if dtype in _FLOATS and len(dims) > 1 and set(names) & set(dims)
    ]


def shapes(operation: Any) -> list[tuple[str, tuple[int, ...], bool]]:
    """The arrays that an operation makes: element type, sizes, and whether they are in memory."""
    return _reader().shapes_of(operation.type)


def _source(operation: Any) -> str:
    return operation.attribute(r'op_name="([^"]*)"') or operation.kind


def _holds(dims: Sequence[int], rows: int, positions: int) -> bool:
    return rows * positions in dims or (rows in dims and positions in dims)


def _found(text: str, is_bad) -> list[str]:
    return [
        f"{x.kind} {dtype}{list(dims)} {_source(x)}"
        for x in operations(text)
        for dtype, dims, _ in shapes(x)
        if dtype in _FLOATS and is_bad(dims)
    ]
