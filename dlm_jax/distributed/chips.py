"""What an accelerator can do at best: the vendors' figures, by the kind that JAX reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip.

    Attributes:
      name: as in the name of a topology.
      flops: products in bfloat16, FLOP/s.
      clock: cycles/s that the compiler counts in.
      memory: bytes.
      bandwidth: of the memory, bytes/s.
      link: of the links along one dimension of the torus, both directions together, bytes/s.
      torus: how many chips a dimension has at least where its ends are joined; 0: never.
    """

    name: str
    flops: float
    clock: float
    memory: float
    bandwidth: float
    link: float
    torus: int


CHIPS: dict[str, Chip] = {
    "TPU v5": Chip("v5p", 459e12, 1.75e9, 95.0 * 2**30, 2.765e12, 1.8e11, 4),
    "TPU v5 lite": Chip("v5e", 197e12, 1.5e9, 15.75 * 2**30, 8.1e11, 9.0e10, 16),
    "TPU v6 lite": Chip("v6e", 918e12, 1.75e9, 31.25 * 2**30, 1.6e12, 1.8e11, 16),
}
"""Chips by what JAX calls them.

Sources: the system architecture pages of Cloud TPU for v5p, v5e and v6e; the clock is the
compiler's own.
"""
