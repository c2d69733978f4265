"""The devices that a program samples on: one, a mesh of them, or those of several hosts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import dlm_jax.config as configs
from dlm_jax.config import MeshConfig
from dlm_jax.distributed.processes import gathered
from dlm_jax.distributed.rows import OwnRows, num_shares, split_rows
from dlm_jax.distributed.sharding import make_mesh
from dlm_jax.types import Params


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh, ``--mesh.data`` and so on."""
    group = parser.add_argument_group(
        "mesh", "Splits rows and parameters over devices; one device if none of these is given."
    )
    for field in dataclasses.fields(MeshConfig):
        group.add_argument(
            f"--mesh.{field.name}", metavar=field.name.upper(), default=argparse.SUPPRESS,
            help=field.metadata["help"],
        )  # fmt: skip


def mesh_of(overrides: Mapping[str, str], *, is_distributed: bool) -> Mesh | None:
    """The mesh that flags ask for; None for the first device alone.

    Raises:
      ValueError: the axes do not multiply to the number of devices, or are no numbers.
    """
    asked = {name: text for name, text in overrides.items() if name.startswith("mesh.")}
    if not asked and not is_distributed:
        return None
    return make_mesh(configs.load(None, asked).mesh)


def check_batch(params: Params, batch_size: int) -> None:
    """Raises ValueError unless the devices that split the rows divide the batch."""
    shares = num_shares(split_rows(params))
    if batch_size % shares:
        raise ValueError(
            f"--batch-size {batch_size} is not divisible by the {shares} devices that split the "
            f"rows; use {max(1, round(batch_size / shares)) * shares}"
        )


def share_of_host(params: Params) -> tuple[int, int, bool]:
    """Which share of the rows this process has, of how many, and whether it tells the results.

    Processes that split only the parameters between them have the same share, and the first of
    them tells.
    """
    rows = split_rows(params)
    index, count = OwnRows(rows, num_shares(rows)).share
    if jax.process_count() == 1:
        return 0, 1, True
    shares: list[Any] = gathered(index)
    return index, count, shares.index(index) == jax.process_index()
