"""Samples a file of requests, which are read a bounded number ahead, and writes the results."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import dlm_jax.config as configs
from dlm_jax.batch.json_lines import Key, Line
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import TextReader, stops_of
from dlm_jax.inference.request import (
    Request,
    chain_shortener,
    make_requests,
    pattern_of_format,
    structured,
)
from dlm_jax.inference.results import Row
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
    done: Container[Key] = (),
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
    read_ahead: int = READ_AHEAD,
    on_start: Callable[[Engine], Any] | None = None,
) -> tuple[str, ...]:
    """Runs the lines and calls `write` with results as rows finish. Returns the canvas and the
    number of slots of each program that ran.

    A result has ``id``, ``text``, ``tokens``, ``length``, ``steps``, ``status``, ``seconds`` (in a
    slot) and counters (``forwards``, ``waves``, and other nonzero `Counters`), or ``id`` and
    ``error``. A line with several samples has one result per sample, numbered from 0 in ``sample``.
    Tokens of a line do not depend on other lines, their order or restarts. Host samplers
    and read-back are not supported.

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
      done: the keys of results that exist already.
      seed: seed of the first row. Sample i of a line without a seed has the seed ``seed +
        line.first + i``; sample i of a line with a seed has the line's seed plus i.
      settings: default settings for all lines, in the form of a line's settings.
      batch_size: maximum number of slots per program.
      read_ahead: maximum number of rows that wait for a slot.
      on_start: called once with the engine, before anything is read or compiled.
    """
    accepted: dict[int, tuple[Accepted, int]] = {}

    def write_result(line: Line, sample: int, result: dict[str, Any], num_tokens: int = 0) -> None:
        name = {"id": line.id} | ({"sample": sample} if line.num_samples > 1 else {})
        write(name | result, num_tokens)

    def requests(engine: Engine) -> Iterator[Request | None]:
        """The rows of this process without a result. None stands for all other rows."""
        lines_ = accept_lines(model, lines, seed=seed, settings=settings or {})
        coming = ((one, sample) for one in lines_ for sample in range(one.line.num_samples))
        # The first rows determine the programs and which parts of the chains are in use.
        first = list(itertools.islice(coming, read_ahead))
        known = [one.request for one, _ in first if one.request is not None]
        shorten = chain_shortener(known)
        engine.reserve([*map(shorten, known)], is_part=len(first) == read_ahead)
        index, count = engine.share
        for place, (one, sample) in enumerate(itertools.chain(first, coming)):
            line, request = one.line, one.request
            if request is not None:
                number, own_seed = line.first + sample, request.seed + sample
                request = replace(shorten(request), seed=own_seed, number=number)
                if place >= read_ahead:
                    engine.reserve([request], is_part=True)
            if line.number % count != index or line.key(sample) in done:
                yield None
                continue
            if request is None:
                write_result(line, sample, {"error": one.error})
            else:
                accepted[line.first + sample] = one, sample
            yield request

    with Engine(model, batch_size=batch_size, sizes=[batch_size], max_waiting=read_ahead) as engine:
        if on_start is not None:
            on_start(engine)
        for row in engine.run(requests(engine)):
            if row.error is not None:
                raise row.error
            one, sample = accepted.pop(row.number)
            if row.status is Status.NON_FINITE:
                why = f"the model's logits are not finite after {row.steps} steps"
                error = {"error": f"line {one.line.number}: {why}", "status": "non_finite"}
                write_result(one.line, sample, error)
            else:
                write_result(one.line, sample, *_result(model, one, row))
    return engine.report().programs


class Accepted(NamedTuple):
    """A line with the request of its first sample, or the reason why it cannot run, and with the
    texts and ids that end its generated text.
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
    lists = {setting.name for setting in declared if setting.is_list}
    for line in lines:
        common = dict(settings) | {"seed": (seed + line.first) % 2**32}
        given = dict(line.settings)
        try:
            if line.error is not None:
                raise ValueError(line.error)
            for name in _PYTHON_ONLY & given.keys():
                raise ValueError(f"{name} is not a setting of a request; pass it to the program")
            stops, stop_ids = stops_of(
                model.tokenizer, given.pop("stop", None), given.pop("stop_token_ids", None)
            )
            own = _from_json(_with_format(model, common, given), lists)
            if (stops or stop_ids) and own.get("structure"):
                raise ValueError("stop can truncate a structure; remove one of them")
            (request,) = make_requests(model, own, common, known=known)
            if (stops or stop_ids) and TextReader(model, request).is_infill:
                raise ValueError("stop has no effect on an infill; remove it")
            replace(request, seed=request.seed + line.num_samples - 1)  # checks the last seed
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
    if pattern is not None and "structure" in own:
        raise ValueError("structure is another name of response_format; pass one of them")
    pattern = own.get("structure") if pattern is None else pattern
    if not pattern:
        return own
    settings = {**common, **own}
    length = settings.get("gen_length") or settings.get("max_length") or model.max_length
    if type(length) is not int:
        return own | {"structure": pattern}  # its own check refuses the length
    return structured(model, common, own, pattern, length)


def _from_json(settings: Mapping[str, Any], lists: Collection[str]) -> dict[str, Any]:
    """The settings with lists as tuples; ValueError for a list if its setting is not in `lists`."""
    found = dict(settings)
    for name, value in settings.items():
        if not isinstance(value, list) or name == "tokens":
            continue
        if name not in lists:
            raise ValueError(f"{name} is a list; a request has one value")
        found[name] = tuple(tuple(one) if isinstance(one, list) else one for one in value)
    return found


def _result(model: Model, one: Accepted, row: Row) -> tuple[dict[str, Any], int]:
    """The result of a row, which ends after its stop, and the number of generated tokens."""
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
    result = {
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
