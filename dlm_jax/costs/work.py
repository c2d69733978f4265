"""Floating-point products and bytes of memory that single operations need."""

from __future__ import annotations

import collections
import math
import re

from dlm_jax.costs.hlo import Module, Operation, Shape, shapes_of

Types = dict[str, str]
"""Types of the operations of a computation, by name."""

_FREE = frozenset({
    "bitcast", "get-tuple-element", "tuple", "parameter", "constant", "after-all", "partition-id",
    "copy-done", "optimization-barrier",
})  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_PLACE = ("bitcast", "copy", "reshape", "convert")


def products(module: Module, name: str, known: dict[str, float]) -> float:
    """FLOP of all matrix products and convolutions inside a computation; `known` is its memory."""
    if name in known:
        return known[name]
    body = module.computations[name]
    types = {operation.name: operation.type for operation in body}
    total = 0.0
    for operation in body:
        if operation.kind in ("dot", "convolution"):
            total += product(operation, types)
        if operation.kind in ("fusion", "call"):
            inner = module.called(operation) or module.called(operation, "to_apply")
            total += products(module, inner, known) if inner else 0.0
    known[name] = total
    return total


def product(operation: Operation, types: Types) -> float:
    """FLOP of one ``dot`` or ``convolution``: two for each multiplication."""
    outputs = math.prod(operation.shapes[0].dims)
    left, right = (_dims(types[name]) for name in operation.operands[:2])
    if operation.kind == "dot":
        axes = operation.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * outputs * math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    found = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", operation.attributes)
    assert found is not None
    lhs, kernel, out = found.groups()
    taps = math.prod(right) // right[kernel.index("o")]
    return 2.0 * outputs * taps * _share_of_taps(operation, left, lhs, out)


def _dims(text: str) -> tuple[int, ...]:
    return shapes_of(text)[0].dims


def _share_of_taps(operation: Operation, left: tuple[int, ...], lhs: str, out: str) -> float:
    """The share of a convolution's window that meets numbers and not padding or holes.

    XLA writes batched products as convolutions whose window mostly meets holes.
    """
    window = operation.attribute(r"window=\{([^}]*)\}")
    sizes = _window(window, "size")
    if not sizes:
        return 1.0
    count = len(sizes)
    strides = _window(window, "stride") or [1] * count
    dilations = _window(window, "lhs_dilate") or [1] * count
    steps = _window(window, "rhs_dilate") or [1] * count
    found = re.search(r"pad=([\d_x\-]+)", window or "")
    pads = [int(part.split("_")[0]) for part in found.group(1).split("x")] if found else [0] * count
    result, share = operation.shapes[0].dims, 1.0
    for axis, size in enumerate(sizes):
        have, outputs = left[lhs.index(str(axis))], result[out.index(str(axis))]
        starts = [place * strides[axis] - pads[axis] for place in range(outputs)]
        met = sum(
            1
            for start in starts
            for tap in range(size)
            if (at := start + tap * steps[axis]) >= 0
            and at % dilations[axis] == 0
            and at // dilations[axis] < have
        )
        share *= met / outputs / size
    return share


def _window(window: str | None, key: str) -> list[int]:
    found = re.search(rf"(?<![a-z_]){key}=([\dx]+)", window or "")
    return [int(size) for size in found.group(1).split("x")] if found else []


def memory_bytes(operation: Operation, types: Types, module: Module) -> float:
    """Bytes that an operation reads from and writes to the main memory.

    Of an operand that is sliced the slices count, of one that is updated in place the updates.
    """
    if operation.kind in _FREE:
        return 0.0
    body = module.called(operation) if operation.kind == "fusion" else None
    if body is not None:
        return _fusion_bytes(operation, types, module.computations[body])
    written = _in_memory(operation.type)
    if operation.kind in _SLICES:
        return 2 * written
    if operation.kind == "dynamic-update-slice":
        return 2 * _in_memory(types.get(operation.operands[1], ""))
    if operation.kind == "copy-start":
        return _in_memory(types.get(operation.operands[0], ""))
    return written + sum(_in_memory(types[name]) for name in operation.operands if name in types)


def _in_memory(text: str) -> float:
    return sum(shape.num_bytes for shape in shapes_of(text) if shape.in_memory)


def _fusion_bytes(operation: Operation, types: Types, body: list[Operation]) -> float:
    by_name = {inner.name: inner for inner in body}
    parameters = {int(x.operands[0] or 0): x for x in body if x.kind == "parameter"}
    users = _users(body)
    total, in_place = 0.0, 0.0
    for place, name in enumerate(operation.operands):
        size = _in_memory(types.get(name, ""))
        if not size:
            continue
        parameter = parameters.get(place)
        uses = _uses(parameter.name, users) if parameter else []
        if uses and all(use.kind in _SLICES for use in uses):
            total += min(size, sum(_bytes(use.shapes) for use in uses))
        elif uses and all(_updates(use, parameter, by_name) for use in uses):
            in_place += size
        else:
            total += size
    written = _in_memory(operation.type)
    updates = [inner for inner in body if inner.kind == "dynamic-update-slice"]
    if updates and in_place:
        written = max(0.0, written - in_place) + sum(
            _bytes(by_name[inner.operands[1]].shapes)
            for inner in updates
            if inner.operands[1] in by_name
        )
    return total + written


def _bytes(shapes: list[Shape]) -> float:
    return sum(shape.num_bytes for shape in shapes)


def _users(body: list[Operation]) -> dict[str, list[Operation]]:
    users: dict[str, list[Operation]] = collections.defaultdict(list)
    for operation in body:
        if operation.kind not in ("parameter", "constant"):
            for name in operation.operands:
                users[name].append(operation)
    return users


def _uses(name: str, users: dict[str, list[Operation]]) -> list[Operation]:
    """What reads a value, seen through operations that only look at it otherwise."""
    found: list[Operation] = []
    for user in users[name]:
        found += (_uses(user.name, users) or [user]) if user.kind in _SAME_PLACE else [user]
    return found


def _updates(use: Operation, parameter: Operation | None, by_name: dict[str, Operation]) -> bool:
    """Whether `use` writes a part of the parameter in place."""
    if use.kind != "dynamic-update-slice" or not use.operands or parameter is None:
        return False
    name = use.operands[0]
    for _ in range(6):
        if name == parameter.name or name not in by_name:
            break
        if by_name[name].kind not in ("bitcast", "copy", "reshape"):
            break
        name = by_name[name].operands[0]
    return name == parameter.name
