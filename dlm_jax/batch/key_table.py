"""Tables of keys in a temporary file, so that memory does not grow with the number of requests."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Set

Id = str | int
Key = Id | tuple[Id, int]
"""The key of a result: the line's id, with the sample number if there are several samples."""

Place = tuple[int, int, int]

_CACHE_KIB = 1 << 15


class KeyTable(Set[Key]):
    """A set of keys, each with three integers, in a private file that the system removes."""

    def __init__(self) -> None:
        self._count = 0
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._file.execute("PRAGMA journal_mode = OFF")
        self._file.execute(
            "CREATE TABLE keys (key TEXT PRIMARY KEY, a INTEGER, b INTEGER, c INTEGER) "
            "WITHOUT ROWID"
        )
        self._file.execute("BEGIN")

    def add(self, key: Key, place: Place = (0, 0, 0)) -> bool:
        """Adds a key, unless it is in the table. Returns whether it was added."""
        added = self._file.execute(
            "INSERT OR IGNORE INTO keys VALUES (?, ?, ?, ?)", (json.dumps(key), *place)
        )
        self._count += added.rowcount
        return added.rowcount > 0

    def place(self, key: Key) -> Place | None:
        """Returns the integers of a key; None if it is not in the table."""
        found = self._file.execute("SELECT a, b, c FROM keys WHERE key = ?", (json.dumps(key),))
        return found.fetchone()

    def __contains__(self, key: object) -> bool:
        return self.place(key) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        for (text,) in self._file.execute("SELECT key FROM keys"):
            key = json.loads(text)
            yield tuple(key) if isinstance(key, list) else key
