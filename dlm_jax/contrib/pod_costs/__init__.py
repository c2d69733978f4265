"""Estimates of the run time of compiled programs, in particular for TPUs that are not there.

``python -m dlm_jax.contrib.pod_costs --config FILE --topology v5p:4x4x4`` estimates a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from dlm_jax.contrib.pod_costs.costs import KINDS, Cost, Mode, Module, Torus, cost, parse
from dlm_jax.distributed.mesh import CHIPS, Chip
from dlm_jax.training.plan import Plan

__all__ = [
    "KINDS", "Cost", "Mode", "Module", "Torus", "cost", "cost_of_plan", "parse", "torus_of",
    "utilisation",
]  # fmt: skip

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
