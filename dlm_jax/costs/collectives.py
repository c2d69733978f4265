"""How long collectives take on a torus of chips, and how much they move."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from dlm_jax.distributed.chips import Chip

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all",
)  # fmt: skip


@dataclass(frozen=True)
class Torus:
    """Where the devices of a program stand.

    Attributes:
      chip: their kind.
      places: coordinates by the number of the device in the program.
      sizes: of the dimensions.
    """

    chip: Chip
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def bandwidth(self, group: list[int]) -> float:
        """Bytes/s into a chip of a group: the links of every dimension in which it is spread.

        A dimension counts twice where the group goes all the way round.
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
    """(bytes that a chip receives or sends, seconds) of a collective alone on its links.

    An all-reduce counts as a reduce-scatter and an all-gather.
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
    # An all-to-all crosses a torus in many hops; a quarter of the time stands for the mean.
    return size, size / speed / (4 if "all-to-all" in kind else 1)


def first_group(attributes: str, num_devices: int) -> list[int]:
    """The devices that exchange with each other in the first group of a collective."""
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
