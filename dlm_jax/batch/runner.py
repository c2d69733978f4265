"""Samples a file of requests, which are read a bounded number ahead, and writes the results."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import dlm_jax.config as configs
from dlm_jax.batch.json_lines import Line
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import (
    Request,
    chain_shortener,
    make_requests,
    pattern_of_format,
    structured,
)
from dlm_jax.inference.results import Row, TextReader, stops_of
from dlm_jax.sampling.rules import classes_of, with_rules
from dlm_jax.store.files import own_source
from dlm_jax.store.weights import digest_of
from dlm_jax.types import Status

READ_AHEAD = 1024
"""Number of rows that are read before the first step, and that may wait for a slot."""

_PYTHON_ONLY = {"rules", "transforms", "commit", "trace", "host_sampler", "read_back"}


def describe_model(model: Model) -> dict[str, Any]:
    """A description that identifies the model, including all parameters, in a fingerprint."""
    tokenizer = model.tokenizer.to_json()
    network: Any = ""
    if model.is_custom:
        heads = model.network.heads.values()
        parts = [*vars(model.network).values(), *heads]
        parts += [part for head in heads if not callable(head) for part in vars(head).values()]
        network = sorted({own_source(part) for part in parts if callable(part)})
    return {
        "network": network,
        "config": None if model.config is None else configs.to_dict(model.config),
        "tokenizer": hashlib.sha256(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest(),
        "eos_ids": model.eos_ids,
        "max_length": model.max_length,
        "sample": describe_settings(vars(model.sample)),
        "params": digest_of(model.params),
    }


def run_requests(
    model: Model,
    lines: Iterable[Line],
    write: Callable[[dict[str, Any], int], Any],
    *,
    done: Container[int] = (),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
    read_ahead: int = READ_AHEAD,
) -> tuple[str, ...]:
    """Runs the lines and calls `write` with results as rows finish. Returns the canvas and the
    number of slots of each program that ran.

    A result has ``line``, the number of the line, its ``id`` if it has one, and ``text``,
    ``tokens``, ``length``, ``steps``, ``status``, ``seconds`` (in a slot) and counters
    (``forwards``, ``waves``, and other nonzero `Counters`), or ``error``. Tokens of a line do not
    depend on other lines, their order or restarts. Host samplers and read-back are not supported.

    Lines are read while the rows run, so that memory does not grow with their number. If all rows
    fit into `read_ahead`, each program has the smallest size that holds its rows; otherwise all
    have `batch_size` slots. The programs follow from the lines, `batch_size` and `read_ahead`
    alone, so a resumed run uses those of the interrupted one.

    Args:
      model: a model from `load`.
      lines: all lines of this process in order, including finished lines, because they determine
        the shapes of the programs. If the model's devices belong to several processes, pass the
        lines of all processes; each process runs its part.
      write: called with each result and the number of tokens generated for it.
      done: the numbers of the lines that have a result already.
      seed: a line without a seed has the seed ``seed + line.number - 1``.
      settings: default settings for all lines, in the form of a line's settings.
      batch_size: maximum number of slots per program.
      read_ahead: maximum number of rows that wait for a slot.
    """
    running: dict[int, Accepted] = {}

    def requests(engine: Engine) -> Iterator[Request | None]:
        """The rows of this process without a result. None stands for all other rows."""
        coming = accept_lines(model, lines, seed=seed, settings=settings or {})
        # The first rows determine the programs and which parts of the chains are in use.
        first = list(itertools.islice(coming, read_ahead))
        known = [one.request for one in first if one.request is not None]
        shorten = chain_shortener(known)
        engine.reserve([*map(shorten, known)], is_part=len(first) == read_ahead)
        index, count = engine.share
        for place, one in enumerate(itertools.chain(first, coming)):
            number, request = one.line.number, one.request
            if request is not None:
                request = shorten(request)
                if place >= read_ahead:
                    engine.reserve([request], is_part=True)
            if number % count != index or number in done:
                yield None
                continue
            if request is None:
                write(one.line.names | {"error": one.error}, 0)
            else:
                running[place] = one
            yield request

    with Engine(model, batch_size=batch_size, sizes=[batch_size], max_waiting=read_ahead) as engine:
        for row in engine.run(requests(engine)):
            if row.error is not None:
                raise row.error
            write(*_result(model, running.pop(row.number), row))
    return engine.report().programs


class Accepted(NamedTuple):
    """A line with its request, or the reason why it cannot run, and with the texts and ids that end
    its generated text.
    """

    line: Line
    request: Request | None = None
    error: str = ""
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


def accept_lines(
    model: Model,
    lines: Iterable[Line],
    *,
    seed: int = 0,
    settings: Mapping[str, Any],
) -> Iterator[Accepted]:
    """Yields each line with its request or its error."""
    known: dict[Any, Any] = {}
    declared = with_rules(settings.get("rules")).settings.values()
    lists = {"tokens", *(setting.name for setting in declared if setting.is_list)}
    for line in lines:
        common = dict(settings) | {"seed": (seed + line.number - 1) % 2**32}
        own = dict(line.settings)
        try:
            if line.error is not None:
                raise ValueError(line.error)
            for name in _PYTHON_ONLY & own.keys():
                raise ValueError(f"{name} is not a setting of a request; pass it to the program")
            stop, stop_token_ids = own.pop("stop", None), own.pop("stop_token_ids", None)
            stops, stop_ids = stops_of(model.tokenizer, stop, stop_token_ids)
            own = _with_format(model, common, own)
            if (stops or stop_ids) and own.get("structure"):
                raise ValueError("stop can truncate a structure; remove one of them")
            for name, value in own.items():
                if isinstance(value, list):
                    if name not in lists:
                        raise ValueError(f"{name} is a list; a request has one value")
                    own[name] = tuple(tuple(x) if isinstance(x, list) else x for x in value)
            (request,) = make_requests(model, own, common, known=known)
            if (stops or stop_ids) and TextReader(model, request).is_infill:
                raise ValueError("stop has no effect on an infill; remove it")
            yield Accepted(line, request, stops=stops, stop_ids=stop_ids)
        except ValueError as error:
            where, said = f"line {line.number}", " ".join(str(error).split())
            yield Accepted(line, error=said if where in said else f"{where}: {said}")


def _with_format(model: Model, common: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The settings of a line with its ``response_format`` or ``structure`` as on the server: as a
    structure, with the defaults that it needs.
    """
    form = own.pop("response_format", None)
    pattern = None if form is None else pattern_of_format(form)
    if pattern is not None:
        if "structure" in own:
            raise ValueError("structure is another name of response_format; pass one of them")
        own["structure"] = pattern
    return structured(model, common, own) if own.get("structure") else own


def _result(model: Model, one: Accepted, row: Row) -> tuple[dict[str, Any], int]:
    """The result of a row, which ends after its stop, and the number of generated tokens."""
    if row.status is Status.NON_FINITE:
        why = f"the model's logits are not finite after {row.steps} steps"
        error = f"line {one.line.number}: {why}"
        return one.line.names | {"error": error, "status": "non_finite"}, 0
    decode = model.tokenizer.decode
    if (one.stops or one.stop_ids) and one.request is not None:
        reader = TextReader(model, one.request, one.stops, one.stop_ids)
        text, places, _ = reader.whole(row)
        row, text = row.first(places.stop), decode(row.tokens[: reader.start]) + text
    else:
        text = decode(row.tokens)
    always = {"forwards", "waves"}
    always |= {"insertions", "deletions", "lost"} if row.origin is not None else set()
    counters = row.counters._asdict().items()
    result = one.line.names | {
        "text": text,
        "tokens": row.tokens.tolist(),
        "length": int(row.tokens.size),
        "steps": row.steps,
        "status": row.status.name.lower(),
        "seconds": round(row.seconds, 3),
        **{name: count for name, count in counters if count or name in always},
    }
    return result, row.num_generated


def describe_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON values for a fingerprint; custom code is represented by its source."""

    def told(value: Any) -> str:
        if callable(value):
            return own_source(value)
        return f"{type(value).__qualname__} {value!r}"

    plain = dict(settings)
    if plain.get("rules") is not None:
        plain["rules"] = [*classes_of(plain["rules"])]
    return json.loads(json.dumps(plain, default=told))
