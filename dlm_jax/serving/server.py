"""Serves a model over HTTP: ``python -m dlm_jax.serve --checkpoint DIR --port 8000``.

The server implements the OpenAI protocol (docs/serving.md): /v1/completions, /v1/chat/completions,
/v1/infill, /v1/models, /health and /metrics. It listens on 127.0.0.1
unless --host is given. If the environment variable named by --api-key-env is set, clients must send
its value as the key. The server requires the extra ``serve``: ``pip install dlm_jax[serve]``.

After SIGTERM or Ctrl-C, the server rejects new requests and waits at most --drain seconds for
running requests. Standard output contains one line, the address; logs go to standard error, one
JSON object per line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dlm_jax
from dlm_jax import AsyncEngine, Engine, Model
from dlm_jax.cli.common import (
    COUNT,
    PRESET,
    Parser,
    add_mesh_flags,
    add_model_flags,
    heads_line,
    import_rules,
    load_model,
    mesh_of,
    model_name,
    naming_flags,
    read_text,
    start_jax,
    whole,
)
from dlm_jax.cli.ends import End, check_output, emit, program, refusals
from dlm_jax.config import layered, params_of, parse_flags, sample_settings
from dlm_jax.hf.chat import ChatTemplate, check_template
from dlm_jax.inference.request import settings_of_call
from dlm_jax.sampling.rules import with_rules
from dlm_jax.serving.app import make_app
from dlm_jax.serving.http import LOGGER, Server, listening, start_logs
from dlm_jax.serving.protocol import Options
from dlm_jax.settings import Rule

_HOSTS = ("127.0.0.1", "[::1]", "localhost")


def make_parser() -> Parser:
    parser = Parser(prog="python -m dlm_jax.serve", description=__doc__)
    add: Callable[..., object] = parser.add_argument
    add_model_flags(parser)
    add("--model-name", metavar="NAME", help="name for clients; default: that of the checkpoint")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    add("--port", type=whole(0, 65535), default=8000, help="port to listen on (8000); 0: any")
    name = "DLM_JAX_API_KEY"
    add("--api-key-env", default=name, metavar="NAME", help=f"variable with the key ({name})")
    add("--slots", type=COUNT, default=64, metavar="B", help="rows that run in parallel (64)")
    one = "run all rows in one program: texts are bit-identical under any load, but slower alone"
    add("--one-size", action="store_true", help=one)
    add("--preset", metavar="NAME", help=PRESET)
    default = "default value of a request setting; repeatable"
    add("--default", action="append", default=[], metavar="NAME=VALUE", help=default)
    rules = "modules with rules (A,B); their settings become fields of requests"
    add("--rules", metavar="MODULES", help=rules)
    add("--chat-template", metavar="FILE", help="Jinja template that formats conversations")
    add("--max-waiting", type=COUNT, default=1024, metavar="N", help="maximum waiting rows (1024)")
    add("--max-rows", type=COUNT, default=128, metavar="N", help="maximum rows of a request (128)")
    add("--max-steps", type=COUNT, default=4096, metavar="N", help="maximum steps of a row (4096)")
    most = "maximum seconds per answer, including waiting (600)"
    add("--max-seconds", type=COUNT, default=600, metavar="S", help=most)
    drain = "maximum seconds that a stopped server waits for running requests (30)"
    add("--drain", type=COUNT, default=30, metavar="S", help=drain)
    warm = "compile programs when requests need them, not those of ordinary requests at startup"
    add("--no-warm-up", action="store_true", help=warm)
    add("--version", action="version", version=f"dlm_jax {dlm_jax.__version__}")
    add_mesh_flags(parser)
    return parser


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    # A structure is compiled in Python: the loops of the server and the engine wait less for it.
    sys.setswitchinterval(1e-3)
    with contextlib.ExitStack() as undo:
        served, sock = _served(argv, undo)
        served.run(sockets=[sock])
    return End.DONE


def _served(argv: Sequence[str] | None, undo: contextlib.ExitStack) -> tuple[Server, socket.socket]:
    """Creates the server from the flags, and its socket, which `undo` closes."""
    with refusals(), naming_flags():
        check_output()
        args, overrides = parse_flags(make_parser(), argv)
        key = os.environ.get(args.api_key_env)
        if key is not None and not key.strip():
            raise ValueError(f"--api-key-env: {args.api_key_env} is empty; set or unset it")
        sock = undo.enter_context(contextlib.closing(listening(args.host, args.port)))
        model = load_model(args, mesh_of(overrides, is_distributed=False))
        if args.chat_template is not None:
            model = _with_template(model, args.chat_template)
        preset = model.preset(args.preset) if args.preset else {}
        defaults = _defaults(model, preset, args.default, import_rules(args.rules))
        heads = heads_line(model, settings_of_call(model, defaults))
        is_local = args.host in ("127.0.0.1", "::1", "localhost")
        if key is None and not is_local:
            print(
                f"warning: --host {args.host} without a key: anyone can send requests; set "
                f"{args.api_key_env}",
                file=sys.stderr,
            )
        has_length = any(re.match(r"\s*gen.length\s*=", text) for text in args.default)
        options = Options(
            name=args.model_name or model_name(args),
            max_rows=args.max_rows,
            max_waiting=args.max_waiting,
            max_seconds=args.max_seconds,
            max_steps=args.max_steps,
            key=key,
            warms_up=not args.no_warm_up,
            defaults=defaults,
            length=(defaults["gen_length"] or model.max_length) if has_length else 16,
            hosts=_HOSTS if key is None and is_local else (),
        )
        engine = Engine(
            model,
            batch_size=args.slots,
            sizes=(args.slots,) if args.one_size else None,
            max_waiting=None,
        )
        app = make_app(AsyncEngine(engine), options)
    start_logs()
    LOGGER.info(heads)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    emit(f"http://{shown}:{port}")
    return Server(app, drain=args.drain), sock


def _defaults(
    model: Model, settings: dict[str, Any], texts: Sequence[str], rules: Sequence[type[Rule]]
) -> dict[str, Any]:
    """The settings of a preset, overridden by those of ``--default``, and the custom rules. The
    result is validated.
    """
    own: dict[str, str] = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not is_given:
            raise ValueError(f"--default {text} has no value; write --default temperature=0.7")
        own[name.strip().replace("-", "_")] = value
    settings = settings | ({"rules": list(rules)} if rules else {})
    if not own:
        return settings
    table = with_rules(rules)
    try:
        settings = layered(settings, sample_settings(own, params_of(table)), table=table)
        settings_of_call(model, settings)
    except ValueError as error:
        why = re.sub("^(command line: )?(--)?", "", str(error))
        raise ValueError(f"--default {' --default '.join(texts)}: {why}") from None
    return settings


def _with_template(model: Model, path: str) -> Model:
    """The model with the chat template of a file."""
    source = read_text(path, "--chat-template")
    check_template(source, f"--chat-template {path}")
    return dataclasses.replace(model, chat=ChatTemplate(source, model.tokenizer))


if __name__ == "__main__":
    raise SystemExit(main())
