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
from typing import Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

import dlm_jax.config
from dlm_jax.distributed.mesh import CHIPS, Chip
from dlm_jax.training.plan import Plan, dry_run

Mode = Literal["roof", "cycles"]
"""How the time of an operation without matrix products is estimated.

``roof`` divides the bytes by the full bandwidth, which is optimistic. ``cycles`` is the compiler's
estimate in cycles, which is pessimistic for vector operations.
"""

_SIZES: dict[str, float] = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5,
}  # fmt: skip
"""Bytes per element of each type."""
_UNTIMED = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "optimization-barrier", "copy-start", "copy-done"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "copy", "reshape", "convert")
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter"),
    *("all-to-all", "collective-permute", "ragged-all-to-all"),
)
_KERNEL_SHARE = 0.55
"""The fraction of peak performance that Pallas attention kernels reach."""
_KERNEL_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
"""Number of matrix products of an attention kernel, by its name. A backward pass in a single kernel
has five."""


class Operation(NamedTuple):
    """One operation of a program. The operands are names; the operand of a constant or parameter is
    the text in its parentheses. `type` is the XLA type of its result.
    """

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


Program = dict[str, dict[str, Operation]]
"""The operations of each computation, in order, by their names; that of the entry is ``ENTRY``."""

_HEAD = re.compile(r"^(ENTRY|%[\w.\-]+) .*\{\s*$")
_START = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")


def parse(text: str) -> Program:
    """Parses the text of ``compiled.as_text()``."""
    program, body = Program(), dict[str, Operation]()
    for line in _whole_lines(text):
        if (head := _HEAD.match(line)) and "=" not in line.split("(")[0]:
            body = program[head[1].removeprefix("%")] = {}
        elif start := _START.match(line):
            body[start[1]] = _operation(start[1], line[start.end() :])
    return program


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
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    kind, end = rest[:opening], _closing(rest, opening)
    inside = rest[opening + 1 : end]
    is_text = kind in ("constant", "parameter")
    operands = (inside,) if is_text else tuple(_NAME.findall(inside))
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


def shapes_of(type_: str) -> list[tuple[str, tuple[int, ...], bool]]:
    """The element type and the sizes of the arrays in an XLA type, and whether each is in main
    memory; other values, such as tokens, are skipped.
    """
    found = []
    for dtype, sizes, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", type_):
        if dtype in _SIZES:
            # The memory spaces S(1) and above are not main memory.
            found.append((dtype, tuple(_numbers(sizes)), not re.search(r"S\([1-9]", layout)))
    return found


def num_bytes(type_: str, *, in_memory: bool = False) -> float:
    """The bytes of the arrays in an XLA type, or of those in main memory."""
    shapes = shapes_of(type_)
    return sum(_SIZES[d] * math.prod(s) for d, s, is_main in shapes if is_main or not in_memory)


def _sizes(type_: str) -> tuple[int, ...]:
    return shapes_of(type_)[0][1]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def trip_count(program: Program, loop: Operation, body: Mapping[str, Operation]) -> int | None:
    """Number of iterations of a ``while`` of a computation; None if its bound is no constant."""
    if known := loop.attribute(r'known_trip_count"?:?\{"?n"?:?"?(\d+)'):
        return int(known)
    condition = program[loop.attribute(r"condition=%([\w.\-]+)") or ""]
    # The bound is a constant of the condition, or of the carry.
    start = body.get(loop.operands[0])
    carried = start.operands if start is not None and start.kind == "tuple" else ()
    read = {name for one in condition.values() for name in one.operands if one.kind in _READERS}
    bounds = []
    for one in condition.values():
        source: Operation | None = one
        if one.kind == "get-tuple-element" and one.name in read:
            place = int(one.attribute(r"index=(\d+)") or 0)
            source = body.get(carried[place]) if place < len(carried) else None
            while source and source.kind in ("copy", "bitcast", "copy-done", "copy-start"):
                source = body.get(source.operands[0])
        if source and source.kind == "constant" and re.fullmatch(r"[1-9]\d*", source.operands[0]):
            bounds.append(int(source.operands[0]))
    return bounds[0] if len(bounds) == 1 else None


_READERS = ("compare", "fusion")


def product(operation: Operation, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """FLOPs of a ``dot`` or ``convolution`` of arrays of these sizes, counting each multiply-add as
    two. Taps of a window that meet padding or dilation do not count: XLA expresses batched products
    as convolutions whose windows are mostly dilation.
    """
    result = _sizes(operation.type)
    outputs = math.prod(result)
    if operation.kind == "dot":
        axes = operation.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * outputs * math.prod(left[axis] for axis in _numbers(axes))
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", operation.attributes)
    assert labels is not None
    lhs, kernel, out = labels.groups()
    flops = 2.0 * outputs * (math.prod(right) // right[kernel.index("o")])
    window = operation.attribute(r"window=\{([^}]*)\}") or ""

    def of_window(key: str, default: int) -> list[int]:
        found = re.search(rf"(?<![a-z_]){key}=([\dx]+)", window)
        return _numbers(found[1]) if found else [default] * len(sizes)

    found = re.search(r"(?<![a-z_])size=([\dx]+)", window)
    sizes = _numbers(found[1]) if found else []
    strides, steps = of_window("stride", 1), of_window("rhs_dilate", 1)
    dilations = of_window("lhs_dilate", 1)
    found = re.search(r"pad=([\d_x\-]+)", window)
    pads = [int(x.split("_")[0]) for x in found[1].split("x")] if found else [0] * len(sizes)
    for axis, size in enumerate(sizes):
        have, count = left[lhs.index(str(axis))], result[out.index(str(axis))]
        at = np.arange(count)[:, None] * strides[axis] - pads[axis]
        at = at + np.arange(size)[None] * steps[axis]
        is_met = (at >= 0) & (at % dilations[axis] == 0) & (at // dilations[axis] < have)
        flops *= is_met.sum() / count / size
    return float(flops)


@dataclass(frozen=True)
class Torus:
    """The layout of a program's devices: coordinates by device number, and dimension sizes."""

    chip: Chip
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def bandwidth(self, group: Sequence[int]) -> float:
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
        axes = re.findall(r"'([^']+)'=(\d+)", mesh[1])
        sizes = [int(size) for _, size in axes]
        ids = _numbers(mesh[2]) if mesh[2] else range(math.prod(sizes))
        used = re.findall(r"'([^']+)'", mesh[3])
        index = tuple(slice(None) if name in used else 0 for name, _ in axes)
        return np.reshape(ids, sizes)[index].reshape(-1).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        sizes = _numbers(iota[2])
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
        return ids.reshape(_numbers(iota[1]))[0].tolist()
    plain = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return _numbers(plain[1]) if plain else list(range(num_devices))


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
    return _Reader(parse(text), torus, mode, repeats or {}, kernels or {}).cost_of("ENTRY")


@dataclass
class _Reader:
    """Adds up the costs of the computations of a program."""

    program: Program
    torus: Torus
    mode: Mode
    repeats: Mapping[str, int]
    kernels: Mapping[str, float]
    costs: dict[str, Cost] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)

    def _called(self, operation: Operation, key: str) -> str | None:
        """The computation named by the attribute `key` of an operation; None if unknown."""
        name = operation.attribute(key + r"=%([\w.\-]+)")
        return name if name in self.program else None

    def cost_of(self, name: str) -> Cost:
        """The cost of a computation, whose operations overlap with collectives on the links."""
        if name in self.costs:
            return self.costs[name]
        body, found, links_free = self.program[name], Cost(), 0.0
        # End times of collectives, by the operation that started them, or by channel and size.
        ends: dict[object, float] = {}
        fused = {one.name: self._fused_collectives(one) for one in body.values()}
        last_user = {key: user for user, keys in fused.items() for key in keys}

        def send(kind: str, size: float, attributes: str) -> float:
            """Starts a collective as soon as the links are free; returns its end time."""
            nonlocal links_free
            size, seconds = moved(kind, size, attributes, self.torus)
            found.moved[kind] += size
            links_free = max(found.seconds, links_free) + seconds
            return links_free

        def wait(until: float) -> None:
            waited = max(0.0, until - found.seconds)
            found.exposed += waited
            found.seconds += waited

        for operation in body.values():
            kind = operation.kind
            base = kind.removesuffix("-start").removesuffix("-done")
            if kind == "while":
                *_, scope, _ = (
                    "",
                    "",
                    *(operation.attribute(r'op_name="([^"]*)"') or "").split("/"),
                )
                times = self.repeats.get(scope, trip_count(self.program, operation, body))
                found.unknown_loops += times is None
                if inner := self._called(operation, "body"):
                    found.add(self.cost_of(inner), 1 if times is None else times)
            elif kind == "conditional":
                # The most expensive branch counts.
                listed = operation.attribute(r"branch_computations=\{([^}]*)\}") or " ".join(
                    re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", operation.attributes)
                )
                costs = map(self.cost_of, _NAME.findall(listed))
                found.add(max(costs, key=lambda one: one.seconds))
            elif kind == "call":
                if inner := self._called(operation, "to_apply"):
                    found.add(self.cost_of(inner))
            elif kind == "async-start":
                inside = self.program.get(self._called(operation, "calls") or "", {}).values()
                first = next((x for x in inside if any(y in x.kind for y in COLLECTIVES)), None)
                if first is not None:
                    ends[operation.name] = send(first.kind, num_bytes(first.type), first.attributes)
            elif kind.endswith("-done") and (base == "async" or base in COLLECTIVES):
                wait(ends.pop(operation.operands[0], 0.0))
            elif base in COLLECTIVES:
                size = num_bytes(operation.type)
                given = sum(num_bytes(body[x].type) for x in operation.operands if x in body)
                # The type of a started collective includes inputs and outputs.
                if kind == "collective-permute-start":
                    size = given
                elif kind.endswith("-start") and base != "all-reduce":
                    size -= given
                end = send(base, size, operation.attributes)
                if kind.endswith("-start"):
                    ends[operation.name] = end
                else:
                    wait(end)
            elif kind == "custom-call" and "tpu_custom_call" in operation.attributes:
                found.add(self._kernel(operation, body))
            elif kind not in _UNTIMED:
                for key, one in fused[operation.name].items():
                    if key not in ends:
                        base = one.kind.removesuffix("-start")
                        ends[key] = send(base, num_bytes(one.type), one.attributes)
                found.add(self._compute(operation, body))
                for key in fused[operation.name]:
                    if last_user[key] == operation.name and key in ends:
                        wait(ends.pop(key))
        if ends:
            wait(links_free)
        self.costs[name] = found
        return found

    def _fused_collectives(self, operation: Operation) -> dict[tuple[str, float], Operation]:
        """The collectives inside a fusion, by channel and size."""
        name = self._called(operation, "calls") if operation.kind == "fusion" else None
        return {
            (one.attribute(r"channel_id=(\d+)") or one.name, num_bytes(one.type)): one
            for one in self.program.get(name or "", {}).values()
            if one.kind.removesuffix("-start") in COLLECTIVES
        }

    def _compute(self, operation: Operation, body: Mapping[str, Operation]) -> Cost:
        flops, chip = self._flops_of(operation, body), self.torus.chip
        size = self._bytes_of(operation, body)
        if self.mode == "roof":
            seconds = size / chip.bandwidth
        else:
            seconds = int(operation.attribute(r'"estimated_cycles":"(\d+)"') or 0) / chip.clock
        seconds = max(seconds, flops / chip.flops)
        return Cost(seconds=seconds, flops=flops, memory_bytes=size)

    def _flops_of(self, operation: Operation, body: Mapping[str, Operation]) -> float:
        """FLOPs of all matrix products and convolutions in an operation."""
        if operation.kind in ("dot", "convolution"):
            return product(operation, *(_sizes(body[x].type) for x in operation.operands[:2]))
        name = self._called(operation, "calls")
        if name is None and operation.kind == "call":
            name = self._called(operation, "to_apply")
        if name is None:
            return 0.0
        if name not in self.flops:
            inside = self.program[name]
            self.flops[name] = sum(
                self._flops_of(one, inside)
                for one in inside.values()
                if one.kind in ("dot", "convolution", "fusion", "call")
            )
        return self.flops[name]

    def _bytes_of(self, operation: Operation, body: Mapping[str, Operation]) -> float:
        """Bytes that an operation reads from and writes to main memory.

        Only the slices of a sliced operand count, also in nested fusions, and only the updates of
        an operand that is updated in place.
        """
        if operation.kind == "slice-done" or "AllocateBuffer" in operation.attributes:
            return 0.0
        given = [body[x].type if x in body else "" for x in operation.operands]
        written = num_bytes(operation.type, in_memory=True)
        if operation.kind in _SLICES:
            return 2 * written
        if operation.kind == "dynamic-update-slice":
            return 2 * num_bytes(given[1], in_memory=True)
        if operation.kind == "slice-start":  # the type names the operand before the result
            dtype, sizes, _ = shapes_of(operation.type)[1]
            return _SIZES[dtype] * math.prod(sizes)
        name = self._called(operation, "calls") if operation.kind == "fusion" else None
        if name is None:
            return written + sum(num_bytes(type_, in_memory=True) for type_ in given)
        inside, total, in_place = self.program[name], 0.0, 0.0
        parameters = {int(x.operands[0]): x for x in inside.values() if x.kind == "parameter"}
        for place, type_ in enumerate(given):
            size = num_bytes(type_, in_memory=True)
            uses = _uses(parameters[place].name, inside)
            if uses and all(
                use.kind == "dynamic-update-slice" and use.operands[0] == name for use, name in uses
            ):
                in_place += size
            else:
                total += min(size, self._read(parameters[place].name, inside))
        if in_place:
            written = max(0.0, written - in_place) + sum(
                num_bytes(inside[one.operands[1]].type)
                for one in inside.values()
                if one.kind == "dynamic-update-slice"
            )
        return total + written

    def _read(self, name: str, body: Mapping[str, Operation]) -> float:
        """The bytes of a value that a fusion reads, if it only slices the value; infinity
        otherwise.
        """
        total = 0.0
        for use, own in _uses(name, body):
            inner = self._called(use, "calls") if use.kind == "fusion" else None
            if use.kind in _SLICES:
                total += num_bytes(use.type)
            elif inner is not None:
                inside = self.program[inner]
                total += sum(
                    self._read(one.name, inside)
                    for one in inside.values()
                    if one.kind == "parameter" and use.operands[int(one.operands[0])] == own
                )
            else:
                return math.inf
        return total or math.inf

    def _kernel(self, operation: Operation, body: Mapping[str, Operation]) -> Cost:
        """The cost of a Pallas kernel: the one that it states, which may be less than its operands,
        or that of an attention kernel's matrix products.
        """
        chip, name = self.torus.chip, operation.name
        known = self.kernels.get(name, self.kernels.get(re.sub(r"\.\d+$", "", name)))
        found = re.findall(r'"(flops|bytes_accessed)":"(\d+)"', operation.attributes)
        stated = {key: int(number) for key, number in found}
        given = [body[x].type for x in operation.operands if x in body]
        if known is not None or stated:
            size = sum(num_bytes(x, in_memory=True) for x in [*given, operation.type])
            size = min(size, stated.get("bytes_accessed", math.inf))
            flops = stated.get("flops", 0)
            seconds = max(size / chip.bandwidth, flops / chip.flops)
            seconds = seconds if self.mode == "roof" else max(seconds, known or 0.0)
            return Cost(seconds=seconds, flops=flops, memory_bytes=size)
        text = name + operation.attributes
        # Integers describe masks.
        floats = [x[0][1] for x in map(shapes_of, given) if x and "f" in x[0][0]]
        matrices = [sizes for sizes in floats if len(sizes) >= 3 and sizes[-1] >= 64]
        if "splash" not in text or not matrices:
            return Cost()
        *heads, queries, width = matrices[0]
        keys = max(sizes[-2] for sizes in matrices[1:])
        which = next((key for key in ("fwd", "dkv") if key in text), "dq")
        results = [sizes for _, sizes, _ in shapes_of(operation.type) if len(sizes) > 2]
        num_results = sum(sizes[-2:] == (queries, width) for sizes in results)
        count = 5 if which == "dkv" and num_results >= 3 else _KERNEL_PRODUCTS[which]
        flops = 2.0 * count * queries * keys * width * math.prod(heads)
        return Cost(seconds=flops / (chip.flops * _KERNEL_SHARE), flops=flops)


def _uses(name: str, body: Mapping[str, Operation]) -> list[tuple[Operation, str]]:
    """The operations that read a value, directly or through views such as bitcasts, each with the
    name that it reads.
    """
    found: list[tuple[Operation, str]] = []
    for user in body.values():
        if name in user.operands and user.kind not in ("parameter", "constant"):
            through = _uses(user.name, body) if user.kind in _VIEWS else []
            found += through or [(user, name)]
    return found


_UNKNOWN = Chip("", 1e12, 1e9, 0.0, 1e12, 1e11, 0)
"""Placeholder for an unknown chip, for which operations and bytes are counted, without times."""


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


def estimates(plan: Plan) -> list[str]:
    """Lines with the collectives and times of a planned training step."""
    modes: dict[str, Mode] = {"at best": "roof", "at worst": "cycles"}
    costs = {name: cost_of_plan(plan, mode) for name, mode in modes.items()}
    best = costs["at best"]
    shown = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in best.moved.items())
    found = [
        f"executed     {best.flops / 1e12:.2f} TFLOP per device and step, with recomputation",
        f"collectives  {shown or 'none'} GiB per device and step",
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
