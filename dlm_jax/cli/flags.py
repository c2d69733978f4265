"""What the programs say of their flags in refusals, and of their speed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Lets a refusal of what a flag gave name the flag: ``top_p=2`` is ``--top-p=2`` there.

    Wrap what was given by flags alone; a file's own lines name the file.
    """
    try:
        yield
    except ValueError as error:
        match = re.match(r"[a-z]\w*(?==)", str(error))
        if match is None:
            raise
        flag = "--" + match[0].replace("_", "-")
        raise ValueError(f"{flag}{str(error)[match.end() :]}") from None


def speeds(tokens: int, seconds: float, compiling: float) -> str:
    """Tokens per second with the time spent compiling, and without it."""
    without = max(seconds - compiling, 1e-6)
    return (
        f"{tokens / max(seconds, 1e-6):,.0f} tokens/s with {compiling:.2f} s of compilation, "
        f"{tokens / without:,.0f} without"
    )
