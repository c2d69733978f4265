"""Kinds of requests: those that one compiled program can run side by side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from dlm_jax.inference.request import Request, columns, static_of
from dlm_jax.inference.results import canvas_size
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import ModelFacts, Rules

_REMEMBERED = 512


class Kind:
    """Requests that agree in what is compiled in, in the canvas, and in the widths of their lists.

    The parameters of any of them are packed to the same shapes, so that nothing compiles when a
    slot takes another one.

    Args:
      requests: some that it is to hold, which agree in what is static. The longest list of any
        setting, such as a bias, decides how wide it is.
      facts: what their rules may know of the model.
      canvas: positions.

    Attributes:
      static: what is compiled in.
      canvas: positions.
      key: equal for kinds that run in the same program.

    Raises:
      ValueError: a request may fill more than the canvas.
    """

    def __init__(self, requests: Sequence[Request], facts: ModelFacts, canvas: int):
        longest = max(request.room for request in requests)
        if canvas < longest:
            raise ValueError(
                f"canvas={canvas} is less than the {longest} positions that a request may fill; "
                f"use {canvas_size(longest)}"
            )
        self.static, self.canvas, self._facts = static_of(requests[0]), canvas, facts
        self._shapes = self._pack_shapes(requests)
        self._anchors = self._widest(requests, self._shapes)
        self._members = {request.sample for request in requests}
        self._known: OrderedDict[Hashable, bool] = OrderedDict()
        self.key: Hashable = (self.static, canvas, self._shapes)

    def holds(self, request: Request) -> bool:
        """Whether a request that agrees in what is static fits the canvas and the widths."""
        if request.room > self.canvas:
            return False
        if request.sample in self._members:
            return True
        found = self._known.get(request.sample)
        if found is None:
            found = self._pack_shapes([request, *self._anchors]) == self._shapes
            self._known[request.sample] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def pack(self, requests: Sequence[Request]) -> tuple[RowParams, Rules]:
        """The parameters of requests that it holds: arrays of the host with one row for each.

        For none of them those of some request, which idle slots may have.
        """
        packed = columns([*requests, *self._anchors], self._facts)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: max(1, len(requests))], packed)

    def _pack_shapes(self, requests: Sequence[Request]) -> Hashable:
        return _shapes(columns(requests, self._facts))

    def _widest(self, requests: Sequence[Request], shapes: Hashable) -> list[Request]:
        """Few of the requests that are packed to the same shapes as all of them."""
        if len(requests) == 1 or self._pack_shapes(requests[:1]) == shapes:
            return [requests[0]]
        middle = len(requests) // 2
        halves = [
            (half, self._pack_shapes(half)) for half in (requests[:middle], requests[middle:])
        ]
        for half, found in halves:
            if found == shapes:
                return self._widest(half, shapes)
        return [request for half, found in halves for request in self._widest(half, found)]


def _shapes(packed: Any) -> Hashable:
    """What the program of such arrays is compiled for, but for the number of rows."""
    leaves, tree = jax.tree.flatten(packed)
    return tree, tuple((leaf.shape[1:], np.dtype(leaf.dtype).name) for leaf in leaves)


def slot_count(rows: int, batch_size: int, shares: int = 1) -> int:
    """Static number of slots for `rows` waiting rows: a power of two, `batch_size` at most.

    Rounded up to a multiple of `shares`, the parts into which devices split them.
    """
    slots = min(batch_size, 1 << (rows - 1).bit_length())
    return -(-slots // shares) * shares
