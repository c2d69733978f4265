"""A limit on the work of compiling one structure, counted in elementary operations."""

from __future__ import annotations

MOST_OPERATIONS = 1 << 23
"""Maximum number of elementary operations that compile one structure: about two seconds of a core.

One operation is a step of a loop in Python, or 64 elements of an array."""


class Budget:
    """Counts elementary operations up to a limit.

    The count depends on the structure alone and not on the clock, so every machine refuses the same
    structures.
    """

    def __init__(self, limit: int = MOST_OPERATIONS):
        self._limit = self._left = limit

    def spend(self, count: int) -> None:
        """Counts operations before they run.

        Raises:
          ValueError: the operations exceed the limit.
        """
        self._left -= count
        if self._left < 0:
            raise ValueError(
                f"compiling it takes more than {self._limit} operations; use smaller or fewer "
                f"repeats, alternatives and optional parts"
            )

    def spend_elements(self, count: int) -> None:
        """Counts operations on elements of arrays."""
        self.spend(1 + count // 64)
