"""Checksums of what is kept, and digests of the code that it was made with.

JSON lines carry their own checksum, so that a damaged one is found when it is read back: the last
key of a line is ``crc``, the CRC32, in hex, of the line's JSON without that key.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import zlib
from pathlib import Path

_ENDING = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
_ENDING_BYTES = len(', "crc": "00000000"}')


class Damaged(ValueError):
    """A line that is not what was written."""


def with_crc(line: bytes) -> bytes:
    """The line of a JSON object that has a key, without line end, with its checksum."""
    return b'%s, "crc": "%08x"}' % (line[:-1], zlib.crc32(line))


def has_crc(line: bytes) -> bool:
    """Whether the line ends like one of `with_crc`, right or wrong."""
    return _ENDING.fullmatch(line[-_ENDING_BYTES:]) is not None


def without_crc(line: bytes) -> bytes:
    """The line that was given to `with_crc`.

    Every single-bit flip is found, and every burst of up to 32 bits.

    Raises:
      Damaged: there is no checksum at its end, or a wrong one.
    """
    ending = _ENDING.fullmatch(line[-_ENDING_BYTES:])
    if ending is None:
        raise Damaged("it has no checksum")
    plain = line[:-_ENDING_BYTES] + b"}"
    if zlib.crc32(plain) != int(ending[1], 16):
        raise Damaged("its checksum is wrong")
    return plain


def source_digest(code: object) -> str | None:
    """16 hex digits of the file that a function, class or module is written in.

    A module whole, as a function may call its others; modules that it imports do not count. None:
    there is no file, since it was typed in or is compiled.
    """
    try:
        file = inspect.getsourcefile(code)  # type: ignore[arg-type]
        content = None if file is None else Path(file).read_bytes()
    except (OSError, TypeError):
        return None
    return None if content is None else hashlib.sha256(content).hexdigest()[:16]
