"""What Orbax may log: nothing that is raised as well."""

from __future__ import annotations

import logging


def quiet_orbax() -> None:
    """Lets Orbax tell of warnings alone."""
    # Orbax narrates every save at INFO through absl, which an application may have turned on. What
    # fails in its threads it logs with a traceback and raises where the save is waited for.
    logging.getLogger("absl").setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_not_raised_too not in logger.filters:
            logger.addFilter(_is_not_raised_too)


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        return not record.exc_info or "Error writing" not in str(record.exc_info[1])
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
