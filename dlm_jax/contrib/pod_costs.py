"""Estimates the run time of a compiled program from its XLA text, also for TPUs that are not there.

In the estimate, operations run in order, overlapping with collectives. A loop body counts once per
iteration. An asynchronous collective adds only the time that an operation waits for its result.
Use the estimates to compare programs, not to predict actual times.

``python -m dlm_jax.contrib.pod_costs --config FILE --topology v5p:4x4x4`` prints the plan of a run
(``train.py --dry-run``) and estimates of a step. At best, all operations except matrix products are
bound by memory; at worst, they take the compiler's estimate in cycles.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jax.sharding import Mesh

import dlm_jax.config
from dlm_jax.distributed.mesh import CHIPS, Chip
from dlm_jax.training.plan import Plan, dry_run

SIZES: dict[str, float] = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5,
}  # fmt: skip
"""Bytes per element of each type."""

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_START = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array in an XLA type; `in_memory` is True for arrays in main memory."""

    dtype: str
    dims: tuple[int, ...]
    in_memory: bool = True

    @property
    def num_bytes(self) -> float:
        return SIZES[self.dtype] * math.prod(self.dims)


@dataclass(frozen=True)
class Operation:
    """One operation of a program. The operands are names; the operand of a constant or parameter is
    the text in its parentheses.
    """

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def shapes(self) -> list[Shape]:
        return shapes_of(self.type)

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    @property
    def source(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or self.kind


@dataclass
class Module:
    """A program: its computations, keyed by name, each an ordered list of operations."""

    computations: dict[str, list[Operation]] = field(default_factory=dict)
    entry: str = ""

    def called(self, operation: Operation, key: str = "calls") -> str | None:
        """The computation named by the attribute `key` of an operation; None if unknown."""
        name = operation.attribute(key + r"=%([\w.\-]+)")
        return name if name in self.computations else None


def shapes_of(text: str) -> list[Shape]:
    """The arrays in an XLA type; other values, such as tokens, are skipped."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype in SIZES:
            numbers = tuple(int(size) for size in dims.split(",") if size)
            # The memory spaces S(1) and above are not main memory.
            found.append(Shape(dtype, numbers, re.search(r"S\([1-9]", layout or "") is None))
    return found


def num_bytes(text: str) -> float:
    return sum(shape.num_bytes for shape in shapes_of(text))


def _in_memory(text: str) -> float:
    return sum(shape.num_bytes for shape in shapes_of(text) if shape.in_memory)


def parse(text: str) -> Module:
    """Parses the text of ``compiled.as_text()``."""
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
    """The lines of the text; lines broken inside the metadata of a custom call are joined."""
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
    """Index of the bracket that closes the bracket at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "()":
            depth += 1 if text[place] == "(" else -1
            if depth == 0:
                return place
    return len(text) - 1


def trip_count(module: Module, loop: Operation, parent: list[Operation]) -> int | None:
    """Number of iterations of a ``while`` whose bound is a constant; None otherwise."""
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
    # The loop carry may contain the bound as a constant.
    here = {operation.name: operation for operation in parent}
    start = here.get(loop.operands[0])
    carried = start.operands if start is not None and start.kind == "tuple" else ()
    read = {name for one in condition if one.kind in ("compare", "fusion") for name in one.operands}
    bounds = []
    for operation in condition:
        place = int(operation.attribute(r"index=(\d+)") or 0)
        if (
            operation.name in read
            and operation.kind == "get-tuple-element"
            and place < len(carried)
        ):
            source = here.get(carried[place])
            while source and source.kind in ("copy", "bitcast", "copy-done", "copy-start"):
                source = here.get(source.operands[0])
            if (
                source
                and source.kind == "constant"
                and re.fullmatch(r"[1-9]\d*", source.operands[0])
            ):
                bounds.append(int(source.operands[0]))
    return bounds[0] if len(bounds) == 1 else None


Types = dict[str, str]
"""The type of each operation in a computation, by the operation's name."""

_UNTIMED = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "optimization-barrier", "copy-start", "copy-done"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_PLACE = ("bitcast", "copy", "reshape", "convert")


def products(module: Module, name: str, known: dict[str, float]) -> float:
    """FLOPs in all matrix products and convolutions in a computation; `known` caches results."""
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
    """FLOPs of one ``dot`` or ``convolution``, counting each multiply-add as two."""
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
    """The fraction of a convolution's window that is neither padding nor dilation.

    XLA expresses batched products as convolutions whose windows are mostly dilation.
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
    """Bytes that an operation reads from and writes to main memory.

    Only the slices of a sliced operand count, also in nested fusions, and only the updates of an
    operand that is updated in place.
    """
    if operation.kind == "slice-done" or "AllocateBuffer" in operation.attributes:
        return 0.0
    body = module.called(operation) if operation.kind == "fusion" else None
    if body is not None:
        return _fusion_bytes(operation, types, module.computations[body], module)
    written = _in_memory(operation.type)
    if operation.kind in _SLICES:
        return 2 * written
    if operation.kind == "dynamic-update-slice":
        return 2 * _in_memory(types.get(operation.operands[1], ""))
    if operation.kind == "slice-start":  # the type names the operand before the result
        return operation.shapes[1].num_bytes
    return written + sum(_in_memory(types[name]) for name in operation.operands if name in types)


def _fusion_bytes(
    operation: Operation, types: Types, body: list[Operation], module: Module
) -> float:
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
        if uses and all(_updates(use, parameter, by_name) for use in uses):
            in_place += size
        else:
            total += min(size, _read(parameter.name, body, module) if parameter else size)
    written = _in_memory(operation.type)
    updates = [inner for inner in body if inner.kind == "dynamic-update-slice"]
    if updates and in_place:
        written = max(0.0, written - in_place) + sum(
            num_bytes(by_name[inner.operands[1]].type)
            for inner in updates
            if inner.operands[1] in by_name
        )
    return total + written


def _read(name: str, body: list[Operation], module: Module) -> float:
    """The bytes of a value that a fusion reads, if it only slices the value; infinity otherwise."""
    users, total = _users(body), 0.0
    for use in users[name]:
        inner = module.called(use) if use.kind == "fusion" else None
        if use.kind in _SLICES:
            total += num_bytes(use.type)
        elif use.kind in _SAME_PLACE:
            total += _read(use.name, body, module)
        elif inner is not None:
            inside = module.computations[inner]
            total += sum(
                _read(x.name, inside, module)
                for x in inside
                if x.kind == "parameter" and use.operands[int(x.operands[0] or 0)] == name
            )
        else:
            return math.inf
    return total or math.inf


def _users(body: list[Operation]) -> dict[str, list[Operation]]:
    users: dict[str, list[Operation]] = collections.defaultdict(list)
    for operation in body:
        if operation.kind not in ("parameter", "constant"):
            for name in operation.operands:
                users[name].append(operation)
    return users


def _uses(name: str, users: dict[str, list[Operation]]) -> list[Operation]:
    """The operations that read a value, directly or through views such as bitcasts."""
    found: list[Operation] = []
    for user in users[name]:
        found += (_uses(user.name, users) or [user]) if user.kind in _SAME_PLACE else [user]
    return found


def _updates(use: Operation, parameter: Operation | None, by_name: dict[str, Operation]) -> bool:
    """Returns whether `use` writes part of the parameter in place."""
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


KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter"),
    *("all-to-all", "collective-permute", "ragged-all-to-all"),
)


@dataclass(frozen=True)
class Torus:
    """The layout of a program's devices: coordinates by device number, and dimension sizes."""

    chip: Chip
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def bandwidth(self, group: list[int]) -> float:
        """Bytes/s into a chip of a group, over the links along every dimension that the group
        spans.

        A dimension is counted twice if the group wraps around it.
        """
        places = [self.places[member] for member in group]
        total = 0.0
        for axis, size in enumerate(self.sizes):
            spread = len({place[axis] for place in places})
            if spread > 1:
                goes_round = spread == size and 0 < self.chip.torus <= size
                total += self.chip.link if goes_round else self.chip.link / 2
        return total or self.chip.link


def moved(kind: str, result_bytes: float, attributes: str, torus: Torus) -> tuple[float, float]:
    """Returns (bytes that a chip receives or sends, seconds) for a collective without contention.

    An all-reduce counts as a reduce-scatter followed by an all-gather.
    """
    if kind == "collective-permute":
        return result_bytes, result_bytes / (torus.chip.link / 2)
    group = first_group(attributes, len(torus.places))
    share, speed = (len(group) - 1) / len(group), torus.bandwidth(group)
    if kind == "all-reduce":
        size = 2 * result_bytes * share
    elif kind == "reduce-scatter":
        size = result_bytes * len(group) * share
    else:
        size = result_bytes * share
    # The mean path of an all-to-all on a torus is approximated by a quarter of the time.
    return size, size / speed / (4 if "all-to-all" in kind else 1)


def first_group(attributes: str, num_devices: int) -> list[int]:
    """The devices in the first group of a collective."""
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([\d,]*)\))? \{([^}]*)\}", attributes
    )
    if mesh:
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))]
        sizes = [size for _, size in axes]
        ids = _numbers(mesh.group(2)) if mesh.group(2) else list(range(math.prod(sizes)))
        used = re.findall(r"'([^']+)'", mesh.group(3))
        index = tuple(slice(None) if name in used else 0 for name, _ in axes)
        return np.array(ids).reshape(sizes)[index].reshape(-1).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        sizes = _numbers(iota.group(2))
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        if iota.group(3):
            ids = ids.transpose(_numbers(iota.group(3)))
        return ids.reshape(_numbers(iota.group(1)))[0].tolist()
    plain = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return _numbers(plain.group(1)) if plain else list(range(num_devices))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


Mode = Literal["roof", "cycles"]
"""How the time of an operation without matrix products is estimated.

``roof`` divides the bytes by the full bandwidth, which is optimistic. ``cycles`` is the compiler's
estimate in cycles, which is pessimistic for vector operations.
"""

# The fraction of peak performance that Pallas attention kernels reach.
_KERNEL_SHARE = 0.55
# Number of matrix products of an attention kernel, by its name. The forward pass has two products.
# The backward pass has five products in a single kernel, or four and three in two kernels.
_KERNEL_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
# A kernel's own estimate of its cost.
_STATED = re.compile(r'"(flops|bytes_accessed)":"(\d+)"')


@dataclass
class Cost:
    """The cost of a program, or of part of a program, on one device.

    Attributes:
      seconds: estimated time.
      exposed: seconds of this time spent waiting for collectives.
      flops: FLOPs in matrix products.
      memory_bytes: main-memory traffic in bytes.
      moved: bytes moved, by kind of collective.
      unknown_loops: number of loops with an unknown bound, whose bodies count once.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0
    moved: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    unknown_loops: int = 0

    def add(self, other: Cost, times: int = 1) -> None:
        for name in ("seconds", "exposed", "flops", "memory_bytes"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, size in other.moved.items():
            self.moved[kind] += times * size
        self.unknown_loops += other.unknown_loops


def cost(
    text: str,
    torus: Torus,
    mode: Mode = "roof",
    *,
    repeats: Mapping[str, int] | None = None,
    kernels: Mapping[str, float] | None = None,
) -> Cost:
    """The cost per device of a program, given the text ``compiled.as_text()``.

    Args:
      text: the program.
      torus: the devices.
      mode: see `Mode`.
      repeats: iterations of the loops that directly follow a `jax.named_scope` of this name,
        instead of their own bounds.
      kernels: seconds of Pallas kernels by their names, with or without number, for ``cycles``.
        Other kernels that state no cost, except attention kernels, count as free.
    """
    module = parse(text)
    return _Timeline(module, module.entry, torus, mode, repeats or {}, kernels or {}).read()


class _Timeline:
    """Schedules one computation, overlapping its operations with collectives on the links.

    `known` and `products` cache the costs of called computations.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        torus: Torus,
        mode: Mode,
        repeats: Mapping[str, int],
        kernels: Mapping[str, float],
    ):
        self.module, self.torus, self.repeats, self.kernels = module, torus, repeats, kernels
        self.mode: Mode = mode
        self.known: dict[str, Cost] = {}
        self.products: dict[str, float] = {}
        self.body = module.computations[name]
        self.types = {operation.name: operation.type for operation in self.body}
        self.cost = Cost()
        self.links_free = 0.0
        # End time of each collective, by the operation that started it.
        self.started: dict[str, float] = {}
        self.fused: dict[tuple[str, float], float] = {}
        self.last_user = {
            key: operation.name for operation in self.body for key, _ in self._fused_in(operation)
        }

    def _of(self, name: str) -> Cost:
        if name not in self.known:
            inner = _Timeline(self.module, name, self.torus, self.mode, self.repeats, self.kernels)
            inner.known, inner.products = self.known, self.products
            self.known[name] = inner.read()
        return self.known[name]

    def read(self) -> Cost:
        for operation in self.body:
            self._take(operation)
        if self.started and self.links_free > self.cost.seconds:
            self._wait(self.links_free)
        return self.cost

    def _take(self, operation: Operation) -> None:
        kind = operation.kind
        base = kind.removesuffix("-start").removesuffix("-done")
        if kind == "while":
            self._loop(operation)
        elif kind == "conditional":
            self._branches(operation)
        elif kind == "call":
            name = self.module.called(operation, "to_apply")
            self.cost.add(self._of(name) if name else Cost())
        elif kind in ("async-start", "async-done") or base in KINDS:
            self._collective(operation, base)
        elif kind == "custom-call" and "tpu_custom_call" in operation.attributes:
            self._kernel(operation)
        elif kind not in _UNTIMED:
            self._compute(operation)

    def _loop(self, operation: Operation) -> None:
        *_, scope, _ = ("", "", *operation.source.split("/"))
        times = self.repeats.get(scope, trip_count(self.module, operation, self.body))
        if times is None:
            self.cost.unknown_loops += 1
        body = self.module.called(operation, "body")
        if body is not None:
            self.cost.add(self._of(body), 1 if times is None else times)

    def _branches(self, operation: Operation) -> None:
        """Adds the cost of the most expensive branch only."""
        listed = operation.attribute(r"branch_computations=\{([^}]*)\}")
        names = (
            re.findall(r"%([\w.\-]+)", listed)
            if listed
            else re.findall(r"(?:true|false)_computation=%([\w.\-]+)", operation.attributes)
        )
        costs = [self._of(name) for name in names]
        self.cost.add(max(costs, key=lambda cost: cost.seconds))

    def _send(self, kind: str, size: float, attributes: str) -> float:
        """Starts a collective as soon as the links are free; returns its end time."""
        size, seconds = moved(kind, size, attributes, self.torus)
        self.cost.moved[kind] += size
        self.links_free = max(self.cost.seconds, self.links_free) + seconds
        return self.links_free

    def _wait(self, until: float) -> None:
        waited = max(0.0, until - self.cost.seconds)
        self.cost.exposed += waited
        self.cost.seconds += waited

    def _collective(self, operation: Operation, base: str) -> None:
        kind = operation.kind
        if kind.endswith("-done"):
            if operation.operands and operation.operands[0] in self.started:
                self._wait(self.started.pop(operation.operands[0]))
            return
        if kind == "async-start":
            name = self.module.called(operation)
            inside = self.module.computations[name] if name else []
            wrapped = [x for x in inside if any(one in x.kind for one in KINDS)]
            if wrapped:
                (first, *_), size = wrapped, num_bytes(wrapped[0].type)
                self.started[operation.name] = self._send(first.kind, size, first.attributes)
            return
        size = num_bytes(operation.type)
        if kind.endswith("-start"):
            # The type of a started collective includes inputs and outputs.
            given = sum(num_bytes(self.types[x]) for x in operation.operands if x in self.types)
            if base == "collective-permute":
                size = given
            elif base != "all-reduce":
                size -= given
            self.started[operation.name] = self._send(base, size, operation.attributes)
            return
        self._wait(self._send(base, size, operation.attributes))

    def _fused_in(self, operation: Operation) -> list[tuple[tuple[str, float], Operation]]:
        """The collectives inside a fusion, each with its channel and size."""
        name = self.module.called(operation) if operation.kind == "fusion" else None
        inside = self.module.computations[name] if name else []
        return [
            ((x.attribute(r"channel_id=(\d+)") or x.name, num_bytes(x.type)), x)
            for x in inside
            if x.kind.removesuffix("-start") in KINDS
        ]

    def _compute(self, operation: Operation) -> None:
        inside = self._fused_in(operation)
        flops = 0.0
        if operation.kind in ("dot", "convolution"):
            flops = product(operation, self.types)
        elif (name := self.module.called(operation)) is not None:
            flops = products(self.module, name, self.products)
        for key, collective in inside:
            if key not in self.fused:
                kind = collective.kind.removesuffix("-start")
                self.fused[key] = self._send(kind, key[1], collective.attributes)
        size = memory_bytes(operation, self.types, self.module)
        chip = self.torus.chip
        if self.mode == "roof":
            seconds = size / chip.bandwidth
        else:
            seconds = int(operation.attribute(r'"estimated_cycles":"(\d+)"') or 0) / chip.clock
        seconds = max(seconds, flops / chip.flops)
        self.cost.flops += flops
        self.cost.memory_bytes += size
        self.cost.seconds += seconds
        for key, _ in inside:
            if self.last_user.get(key) == operation.name and key in self.fused:
                self._wait(self.fused.pop(key))

    def _kernel(self, operation: Operation) -> None:
        """Adds the cost of a known kernel, or of an attention kernel's matrix products.

        A kernel that states its cost may read only a part of its operands.
        """
        of_all = self.kernels.get(re.sub(r"\.\d+$", "", operation.name))
        known = self.kernels.get(operation.name, of_all)
        stated = {name: int(x) for name, x in _STATED.findall(operation.attributes)}
        if known is not None or stated:
            given = sum(_in_memory(self.types[x]) for x in operation.operands if x in self.types)
            size = min(given + _in_memory(operation.type), stated.get("bytes_accessed", math.inf))
            flops = stated.get("flops", 0)
            seconds = max(size / self.torus.chip.bandwidth, flops / self.torus.chip.flops)
            self.cost.flops += flops
            self.cost.memory_bytes += size
            self.cost.seconds += seconds if self.mode == "roof" else max(seconds, known or 0.0)
            return
        text = operation.name + operation.attributes
        given = [shapes_of(self.types[name]) for name in operation.operands if name in self.types]
        # Integers describe masks.
        dims = [shapes[0].dims for shapes in given if shapes and "f" in shapes[0].dtype]
        matrices = [size for size in dims if len(size) >= 3 and size[-1] >= 64]
        if "splash" not in text or not matrices:
            return
        *heads, queries, width = matrices[0]
        keys = max(size[-2] for size in matrices[1:])
        which = next((name for name in ("fwd", "dkv") if name in text), "dq")
        outputs = [
            x for x in operation.shapes if len(x.dims) > 2 and x.dims[-2:] == (queries, width)
        ]
        count = 5 if which == "dkv" and len(outputs) >= 3 else _KERNEL_PRODUCTS[which]
        flops = 2.0 * count * queries * keys * width * math.prod(heads)
        self.cost.flops += flops
        self.cost.seconds += flops / (self.torus.chip.flops * _KERNEL_SHARE)


# Placeholder for an unknown chip, for which operations and bytes are counted, without times.
_UNKNOWN = Chip("", 1e12, 1e9, 0.0, 1e12, 1e11, 0)


def torus_of(mesh: Mesh) -> Torus:
    """The torus of the devices in `mesh`, with their coordinates. For unknown devices, only FLOPs
    and bytes are counted.
    """
    chip = CHIPS.get(mesh.devices.flat[0].device_kind)
    places = [tuple(getattr(device, "coords", (device.id,))) for device in mesh.devices.flat]
    sizes = tuple(max(axis) + 1 for axis in zip(*places, strict=True))
    return Torus(chip or _UNKNOWN, tuple(places), sizes)


def cost_of_plan(
    plan: Plan, mode: Mode = "roof", kernels: Mapping[str, float] | None = None
) -> Cost:
    """The cost of a planned training step per device; the arguments are as for `cost`."""
    return cost(plan.text, torus_of(plan.mesh), mode, kernels=kernels)


def utilisation(plan: Plan, found: Cost) -> float:
    """The estimated model FLOPs utilisation, as a fraction of the peak."""
    if plan.chip is None or not found.seconds:
        return math.nan
    return plan.flops / (plan.chip.flops * found.seconds)


_MODES: dict[str, Mode] = {"at best": "roof", "at worst": "cycles"}


def estimates(plan: Plan) -> list[str]:
    """Lines with the collectives and times of a planned training step."""
    costs = {name: cost_of_plan(plan, mode) for name, mode in _MODES.items()}
    best = costs["at best"]
    moved = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in best.moved.items())
    found = [
        f"executed     {best.flops / 1e12:.2f} TFLOP per device and step, with recomputation",
        f"collectives  {moved or 'none'} GiB per device and step",
    ]
    if plan.chip is None:
        return [*found, "step not estimated: the peak performance of this device is unknown"]
    tokens = plan.config.train.batch_size * plan.config.data.seq_len
    return found + [
        f"{name:<12} {one.seconds * 1e3:.1f} ms per step ({one.exposed * 1e3:.1f} waiting for "
        f"collectives), {100 * utilisation(plan, one):.1f}% of the peak, "
        f"{tokens / one.seconds:,.0f} tokens/s"
        for name, one in costs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 2 for input that it refuses."""
    name = "python -m dlm_jax.contrib.pod_costs"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="TOML file, or name of a shipped config")
    parser.add_argument("--topology", metavar="NAME", default="", help="such as v5p:4x4x4")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the config")
    args = parser.parse_args(argv)
    try:
        keys = dict(pair.split("=", 1) for pair in args.keys)
        plan = dry_run(dlm_jax.config.load(args.config, keys), args.topology)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*plan.lines(), *estimates(plan)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
