"""The program that renders chat templates in a separate process, which `chat` starts.

A template can loop forever or allocate too much memory, and a thread cannot interrupt it. A process
can be killed and can have a memory limit. This program starts fast because it imports nothing from
the package. Each line of standard input is a JSON object with ``source``, ``values`` (null to
compile only) and ``now`` (the time that the template reads, in seconds), and each line of standard
output is ``{"text": ...}`` or ``{"error": ...}``. ``mark`` is written at the ends of
``{% generation %}``, which marks the model's answers in training programs.

Templates have the extensions of transformers: ``raise_exception``, ``strftime_now``,
``{% generation %}``, and ``tojson`` with arguments of `json.dumps`.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 1 << 24
_MEMORY = 1 << 30
_SECONDS = 120  # limit per request if the parent process is gone


def main() -> None:
    """Serves one request per input line until the end of input."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # the system has no such limits
    print("{}", flush=True)
    for line in sys.stdin:
        signal.alarm(_SECONDS)
        try:
            line = json.dumps({"text": _rendered(**json.loads(line))})
        except MemoryError:
            line = json.dumps({"error": f"it uses more than {_MEMORY >> 20} MiB"})
        # A template may raise any exception.
        except Exception as error:
            reason = " ".join(str(error)[:2000].split())
            line = json.dumps({"error": reason or type(error).__name__})
        signal.alarm(0)
        print(line, flush=True)


def _rendered(source: str, values: dict[str, Any] | None, now: float = 0.0, mark: str = "") -> str:
    if mark and mark in json.dumps(values, ensure_ascii=False):
        raise ValueError(f"they contain U+{ord(mark):04X}, which is not a character; remove it")
    global _mark
    template, size, parts, _mark = _compiled(source), 0, [], mark
    clock = {"strftime_now": datetime.fromtimestamp(now).strftime}
    for part in () if values is None else template.generate(clock | values):
        size += len(part)
        if size > MOST_CHARACTERS:
            raise ValueError(f"its text is longer than {MOST_CHARACTERS:,} characters")
        parts.append(part)
    return "".join(parts)


_mark = ""


class _Generation(Extension):
    """``{% generation %}``, which writes the mark before and after its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return f"{_mark}{caller()}{_mark}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


if __name__ == "__main__":
    main()
