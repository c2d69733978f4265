"""What the layout of a compiled training step must be, read from the program's own text."""

from __future__ import annotations

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
    module = _reader().parse(text)
    fused = {module.called(x) for body in module.computations.values() for x in body
             if x.kind == "fusion"}  # fmt: skip
    return [x for name, body in module.computations.items() if name not in fused for x in body]


def whole_activations(text: str, sizes: Sizes) -> list[str]:
    """Float arrays with all rows and all positions of the batch on one device."""
    return _found(text, lambda shape: _holds(shape, sizes.rows, sizes.positions))


def moved_activations(text: str, sizes: Sizes) -> list[str]:
    """Collectives that move float arrays with the positions of rows."""
    names = (sizes.positions, sizes.positions * sizes.own_rows, sizes.positions * sizes.rows)
    return [
        f"{x.kind} {x.type} {x.source}"
        for x in operations(text)
        if x.kind.removesuffix("-start") in _reader().KINDS
        for shape in x.shapes
        if shape.dtype in _FLOATS and len(shape.dims) > 1 and set(names) & set(shape.dims)
    ]


def _holds(shape: Any, rows: int, positions: int) -> bool:
    dims = list(shape.dims)
    return rows * positions in dims or (rows in dims and positions in dims)


def _found(text: str, is_bad) -> list[str]:
    return [
        f"{x.kind} {shape.dtype}{list(shape.dims)} {x.source}"
        for x in operations(text)
        for shape in x.shapes
        if shape.dtype in _FLOATS and is_bad(shape)
    ]
