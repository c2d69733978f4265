"""What a request is refused with: the protocol's error object, which names the field."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

import pydantic

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class ApiError(Exception):
    """A request that is not answered as it was asked.

    Attributes:
      status: of HTTP.
      message: one line with the remedy.
      param: the field that is at fault; None if it is none.
      code: a word for programs; None: nothing beyond the status.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(HTTPStatus(self.status), kind)
        return {
            "error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip


def refused(message: str, param: str | None) -> ApiError:
    """The error of a request that is malformed."""
    return ApiError(400, message, param)


def stopping() -> ApiError:
    """The error of a request that still ran when the server's time to stop was up."""
    return ApiError(503, "the server stops; ask again once it is back", code="stopping")


def of_fields(error: pydantic.ValidationError) -> ApiError:
    """The refusal of what a model of pydantic found first."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, *rest = first["loc"] or ("",)
    # Behind the name pydantic says which member of a union it tried, which is no place.
    places = [f"[{part}]" for part in rest if isinstance(part, int)][:1]
    field = f"{name}{''.join(places)}"
    return refused(f"{field}: {first['msg']}", str(name) or None)


def of_value(
    error: ValueError, names: Mapping[str, str], known: Collection[str], other: str
) -> ApiError:
    """The refusal of a request that the library would not make.

    Args:
      error: whose line begins with the name of a setting, if it is about one.
      names: how the protocol calls some settings. A line calls them so where they have a value or
        an underscore; elsewhere "tokens" is a word, not a name.
      known: all settings.
      other: the field that a line without a setting is about.
    """
    line = " ".join(str(error).split())
    first = _NAME.match(line)
    found = first[0] if first else ""
    for ours, theirs in names.items():
        name = rf"\b{ours}\b" if "_" in ours else rf"\b{ours}(?==)"
        line = re.sub(name, theirs, line)
    return refused(line, names.get(found, found) if found in {*known, *names} else other)
