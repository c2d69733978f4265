"""Compiled loops, kept for the next that ask for the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from weakref import WeakValueDictionary

from dlm_jax.distributed.rows import split_rows
from dlm_jax.inference.host import HostLoop
from dlm_jax.inference.kinds import Kind
from dlm_jax.inference.model import Model
from dlm_jax.model import cpu
from dlm_jax.sampling.advance import Advance

Loop = Advance | HostLoop

_LAST_USED = 64
_alive: WeakValueDictionary[Hashable, Loop] = WeakValueDictionary()
_last_used: OrderedDict[Hashable, Loop] = OrderedDict()


def loop_of(model: Model, kind: Kind, num_slots: int) -> Loop:
    """The loop for requests of a kind in so many slots, one for each number that is compiled.

    The same object for equal arguments, so that nothing compiles twice, as long as somebody holds
    it or it is among the 64 last used of the process.
    """
    static = kind.static
    rows = None if static.needs_host else split_rows(model.params)
    program = model.program(static.draw, static.is_guided, rows=rows)
    key = (program, kind.key, num_slots)
    loop = _alive.get(key)
    if loop is None:
        make = HostLoop if static.needs_host else Advance
        loop = make(program, compiler_options=cpu.compiler_options(is_training=False))
        _alive[key] = loop
    _last_used[key] = loop
    _last_used.move_to_end(key)
    while len(_last_used) > _LAST_USED:
        _last_used.popitem(last=False)
    return loop


class Programs:
    """The loops that an engine holds: at most `limit`.

    Args:
      model: whose loops they are.
      limit: at least 1.
    """

    def __init__(self, model: Model, limit: int):
        self._model, self._limit = model, limit
        self._held: OrderedDict[Hashable, tuple[Loop, str]] = OrderedDict()

    @property
    def shapes(self) -> tuple[str, ...]:
        """Slots and canvas of each, the one used last at the end."""
        return tuple(shape for _, shape in self._held.values())

    def has(self, kind: Kind, num_slots: int) -> bool:
        """Whether that loop is held."""
        return (kind.key, num_slots) in self._held

    def clear(self) -> None:
        """Holds none any more."""
        self._held.clear()

    def get(self, kind: Kind, num_slots: int, in_use: Collection[Hashable]) -> Loop | None:
        """The loop of a kind; None if all that are held are in use, and no more may be.

        Args:
          kind: of its requests.
          num_slots: rows that run at once.
          in_use: `(kind.key, num_slots)` of those that may not be dropped for it.
        """
        key = (kind.key, num_slots)
        if key not in self._held:
            while len(self._held) >= self._limit:
                idle = next((held for held in self._held if held not in in_use), None)
                if idle is None:
                    return None
                del self._held[idle]
            host = " host" if kind.static.needs_host else ""
            shape = f"rows={num_slots} canvas={kind.canvas}{host}"
            self._held[key] = (loop_of(self._model, kind, num_slots), shape)
        self._held.move_to_end(key)
        return self._held[key][0]
