"""The estimated time of a compiled program: its operations in their order, collectives beside them.

Loops count as often as they run. A collective that the compiler starts early costs only what is
left of it where its result is waited for. A measuring stick to compare programs with, not a promise
of what hardware does.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field
from typing import Literal

from dlm_jax.costs import work
from dlm_jax.costs.collectives import KINDS, Torus, moved
from dlm_jax.costs.hlo import Module, Operation, num_bytes, parse, shapes_of, trip_count

Mode = Literal["roof", "cycles"]
"""What bounds an operation without products: its bytes at full bandwidth, or the compiler's cycles.

The first is the better case, the second the compiler's own pessimistic figure for vector work.
"""

# The share of the peak that Pallas kernels for attention reach.
_KERNEL_SHARE = 0.55
# Products of a kernel by its name: two forward, five backward in one kernel, or four and three.
_KERNEL_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
_UNTIMED = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "optimization-barrier", "copy-start", "copy-done", "iota",
})  # fmt: skip


@dataclass
class Cost:
    """What a program, or a part of it, costs one device.

    Attributes:
      seconds: estimated.
      exposed: seconds of them that wait for collectives.
      collective_seconds: of all collectives, each alone on its links.
      flops: of matrix products.
      memory_bytes: to and from the main memory.
      moved: bytes by kind of collective.
      unknown_loops: loops whose bound is not known, which count once.
      parts: seconds by what was traced.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    collective_seconds: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0
    moved: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    unknown_loops: int = 0
    parts: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds a part that runs so often."""
        for name in ("seconds", "exposed", "collective_seconds", "flops", "memory_bytes"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for mine, theirs in ((self.moved, other.moved), (self.parts, other.parts)):
            for name, value in theirs.items():
                mine[name] += times * value
        self.unknown_loops += other.unknown_loops


def cost(text: str, torus: Torus, mode: Mode = "roof") -> Cost:
    """What the program that ``compiled.as_text()`` prints costs each of its devices."""
    module = parse(text)
    return _Reader(module, torus, mode).of(module.entry)


class _Reader:
    """Costs of the computations of a program, each read once."""

    def __init__(self, module: Module, torus: Torus, mode: Mode):
        self.module, self.torus, self.mode = module, torus, mode
        self.products: dict[str, float] = {}
        self._known: dict[str, Cost] = {}

    def of(self, name: str) -> Cost:
        if name not in self._known:
            self._known[name] = _Timeline(self, self.module.computations[name]).read()
        return self._known[name]


class _Timeline:
    """One computation, laid out in time: the device works while its links carry collectives."""

    def __init__(self, reader: _Reader, body: list[Operation]):
        self.reader, self.body = reader, body
        self.types = {operation.name: operation.type for operation in body}
        self.cost = Cost()
        self.links_free = 0.0
        # By the operation that a collective was started by: (when it ends, its kind).
        self.started: dict[str, tuple[float, str]] = {}
        self.fused: dict[tuple[str, float], float] = {}
        self.last_user = {
            key: operation.name for operation in body for key, _ in self._fused_in(operation)
        }

    def read(self) -> Cost:
        for operation in self.body:
            self._take(operation)
        if self.started and self.links_free > self.cost.seconds:
            self._wait(self.links_free, "what is under way at the end")
        return self.cost

    def _take(self, operation: Operation) -> None:
        kind = operation.kind
        base = kind.removesuffix("-start").removesuffix("-done")
        if kind == "while":
            self._loop(operation)
        elif kind == "conditional":
            self._branches(operation)
        elif kind == "call":
            name = self.reader.module.called(operation, "to_apply")
            self.cost.add(self.reader.of(name) if name else Cost())
        elif kind in ("async-start", "async-done") or base in KINDS:
            self._collective(operation, base)
        elif kind == "custom-call" and "tpu_custom_call" in operation.attributes:
            self._kernel(operation)
        elif kind not in _UNTIMED:
            self._compute(operation)

    def _loop(self, operation: Operation) -> None:
        times = trip_count(self.reader.module, operation, self.body)
        if times is None:
            self.cost.unknown_loops += 1
        body = self.reader.module.called(operation, "body")
        if body is not None:
            self.cost.add(self.reader.of(body), 1 if times is None else times)

    def _branches(self, operation: Operation) -> None:
        """The dearest branch counts."""
        listed = operation.attribute(r"branch_computations=\{([^}]*)\}")
        names = (
            re.findall(r"%([\w.\-]+)", listed)
            if listed
            else re.findall(r"(?:true|false)_computation=%([\w.\-]+)", operation.attributes)
        )
        costs = [self.reader.of(name) for name in names]
        self.cost.add(max(costs, key=lambda cost: cost.seconds))

    def _send(self, kind: str, size: float, attributes: str) -> float:
        """When a collective ends that starts as soon as the links are free."""
        size, seconds = moved(kind, size, attributes, self.reader.torus)
        self.cost.moved[kind] += size
        self.cost.collective_seconds += seconds
        self.links_free = max(self.cost.seconds, self.links_free) + seconds
        return self.links_free

    def _wait(self, until: float, kind: str) -> None:
        waited = max(0.0, until - self.cost.seconds)
        self.cost.exposed += waited
        self.cost.seconds += waited
        self.cost.parts[f"waiting for {kind}"] += waited

    def _collective(self, operation: Operation, base: str) -> None:
        kind = operation.kind
        if kind.endswith("-done"):
            if operation.operands and operation.operands[0] in self.started:
                self._wait(*self.started.pop(operation.operands[0]))
            return
        if kind == "async-start":
            name = self.reader.module.called(operation)
            inside = self.reader.module.computations[name] if name else []
            wrapped = [x for x in inside if any(one in x.kind for one in KINDS)]
            if wrapped:
                end = self._send(wrapped[0].kind, num_bytes(wrapped[0].type), wrapped[0].attributes)
                self.started[operation.name] = end, wrapped[0].kind
            return
        size = num_bytes(operation.type)
        if kind.endswith("-start"):
            # The type holds what goes in and what comes out.
            given = sum(num_bytes(self.types[x]) for x in operation.operands if x in self.types)
            if base == "collective-permute":
                size = given
            elif base != "all-reduce":
                size -= given
            self.started[operation.name] = self._send(base, size, operation.attributes), base
            return
        self._wait(self._send(base, size, operation.attributes), base)

    def _fused_in(self, operation: Operation) -> list[tuple[tuple[str, float], Operation]]:
        """Collectives inside a fusion, by their channel and size."""
        name = self.reader.module.called(operation) if operation.kind == "fusion" else None
        inside = self.reader.module.computations[name] if name else []
        return [
            ((x.attribute(r"channel_id=(\d+)") or x.name, num_bytes(x.type)), x)
            for x in inside
            if x.kind.removesuffix("-start") in KINDS
        ]

    def _compute(self, operation: Operation) -> None:
        reader, inside = self.reader, self._fused_in(operation)
        flops = 0.0
        if operation.kind in ("dot", "convolution"):
            flops = work.product(operation, self.types)
        elif (name := reader.module.called(operation)) is not None:
            flops = work.products(reader.module, name, reader.products)
        for key, collective in inside:
            if key not in self.fused:
                kind = collective.kind.removesuffix("-start")
                self.fused[key] = self._send(kind, key[1], collective.attributes)
        size = work.memory_bytes(operation, self.types, reader.module)
        chip = reader.torus.chip
        if reader.mode == "roof":
            seconds = size / chip.bandwidth
        else:
            seconds = int(operation.attribute(r'"estimated_cycles":"(\d+)"') or 0) / chip.clock
        seconds = max(seconds, flops / chip.flops)
        self.cost.flops += flops
        self.cost.memory_bytes += size
        self.cost.seconds += seconds
        if seconds:
            self.cost.parts[operation.source] += seconds
        for key, collective in inside:
            if self.last_user.get(key) == operation.name and key in self.fused:
                self._wait(self.fused.pop(key), collective.kind)

    def _kernel(self, operation: Operation) -> None:
        """A kernel for attention, by its products; any other counts nothing."""
        given = [shapes_of(self.types[name]) for name in operation.operands if name in self.types]
        dims = [shapes[0].dims for shapes in given if shapes]
        matrices = [size for size in dims if len(size) >= 3 and size[-1] >= 64]
        if "splash" not in operation.name + operation.attributes or not matrices:
            return
        *heads, queries, width = matrices[0]
        keys = max(size[-2] for size in matrices[1:])
        which = next(
            (x for x in ("fwd", "dkv") if x in operation.name + operation.attributes), "dq"
        )
        count = _KERNEL_PRODUCTS[which]
        whole = [
            x for x in operation.shapes if len(x.dims) >= 3 and x.dims[-2:] == (queries, width)
        ]
        if which == "dkv" and len(whole) >= 3:
            count = 5
        flops = 2.0 * count * queries * keys * width
        for size in heads:
            flops *= size
        seconds = flops / (self.reader.torus.chip.flops * _KERNEL_SHARE)
        self.cost.flops += flops
        self.cost.seconds += seconds
        self.cost.parts[f"kernel {re.sub(r'[.0-9]+$', '', operation.name)}"] += seconds
