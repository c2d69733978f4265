"""Logs: one JSON object per line on standard error; texts only where they are asked for."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

LOGGER = logging.getLogger("dlm_jax.serving")


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        told |= getattr(record, "told", {})
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def start_logs() -> None:
    """Sends what the server and uvicorn say to standard error, in lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, least in ((LOGGER.name, logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_answer(event: str, **told: Any) -> None:
    """Logs an answer; numbers of seconds to a tenth of a millisecond."""
    if LOGGER.isEnabledFor(logging.INFO):
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}
        LOGGER.info(event, extra={"told": shown})
