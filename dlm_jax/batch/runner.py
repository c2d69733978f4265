"""Samples a file of requests, which are read a bounded number ahead, and writes the results."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import dlm_jax.config as configs
from dlm_jax.batch.json_lines import KeyTable, Line
from dlm_jax.distributed.partitions import digest_of, spans_processes, split_rows
from dlm_jax.inference.candidates import HostSampler
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import TextReader, stops_of
from dlm_jax.inference.request import (
    Request,
    chains_in_use,
    make_requests,
    pattern_of_format,
    structured,
    with_chain_in_use,
)
from dlm_jax.inference.results import Row
from dlm_jax.sampling.rules import classes_of, with_rules
from dlm_jax.store.files import own_source
from dlm_jax.types import Status

READ_AHEAD = 1024
"""Number of rows that are read before the first step, and that may wait for a slot."""

_HOST = ("host_sampler", "read_back")
_PYTHON_ONLY = {"rules", "transforms", "commit", "trace"}
_MOST_SETTINGS = 4096


class Sink(Protocol):
    """A store of results; `done` has the keys of the stored results."""

    @property
    def done(self) -> KeyTable: ...

    def write(self, result: Mapping[str, Any]) -> None: ...


class RunReport(NamedTuple):
    """Statistics of a run.

    Attributes:
      rows: number of rows finished in this run.
      errors: number of requests that ended in an error in this run.
      tokens: number of tokens generated in this run, excluding rows with errors.
      occupancy: fraction of slot steps that had a row; 1 if no row ran.
      programs: canvas and number of slots of each program that ran.
    """

    rows: int
    errors: int
    tokens: int
    occupancy: float
    programs: tuple[str, ...]


def describe_model(model: Model) -> dict[str, Any]:
    """A description that identifies the model in a fingerprint.

    The description covers config, tokenizer, ids, settings, all parameters, and the source of a
    custom network.
    """
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
    results: Sink,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
    read_ahead: int = READ_AHEAD,
    host_samplers: Callable[[str], HostSampler] | None = None,
    max_candidates: int = 64,
    on_start: Callable[[Engine], Any] | None = None,
    on_result: Callable[[Mapping[str, Any], int], Any] | None = None,
) -> RunReport:
    """Runs the lines that have no result in `results` yet, and writes results as rows finish.

    A result has ``id``, ``text``, ``tokens``, ``length``, ``steps``, ``status``, ``seconds`` (in a
    slot) and counters (``forwards``, ``waves``, and other nonzero `Counters`), or ``id`` and
    ``error``. A line with several samples has one result per sample, numbered from 0 in ``sample``.
    ``read_back`` (see `Written.to_json`) is present if the line requests it. A line's tokens do not
    depend on other lines, on the order of lines or on restarts.

    Lines are read while the rows run, so that memory does not grow with their number. If all rows
    fit into `read_ahead`, each program has the smallest size that holds its rows; otherwise all
    have `batch_size` slots. The programs follow from the lines, `batch_size` and `read_ahead`
    alone, so a resumed run uses those of the interrupted one.

    Args:
      model: a model from `load`.
      lines: all lines of this process in order, including finished lines, because they determine
        the shapes of the programs. If the model's devices belong to several processes, pass the
        lines of all processes; each process runs its part.
      results: the store to which results are written.
      seed: seed of the first row. Sample i of a line without a seed has the seed ``seed +
        line.first + i``; sample i of a line with a seed has the line's seed plus i.
      settings: default settings for all lines, in the form of a line's settings.
      batch_size: maximum number of slots per program.
      read_ahead: maximum number of rows that wait for a slot.
      host_samplers: maps a line's ``host_sampler`` to a function; raises ValueError for names that
        are not allowed. If None, host samplers are not allowed.
      max_candidates: maximum number of candidates per position for host samplers and read-back.
      on_start: called once with the engine, before anything is read or compiled.
      on_result: called with each written result and the number of tokens generated for it.
    """
    errors = rows = tokens = 0
    accepted: dict[int, tuple[Accepted, int]] = {}

    def write(result: dict[str, Any], num_tokens: int) -> None:
        nonlocal errors, rows, tokens
        is_error = "error" in result
        results.write(result)
        if on_result is not None:
            on_result(result, 0 if is_error else num_tokens)
        errors, rows = errors + is_error, rows + (not is_error)
        tokens += 0 if is_error else num_tokens

    def requests(engine: Engine) -> Iterator[Request | None]:
        """The rows of this process without a result. None stands for all other rows."""
        index, count = engine.share
        coming = accept_lines(
            model,
            lines,
            seed=seed,
            settings=settings or {},
            host_samplers=host_samplers,
            max_candidates=max_candidates,
        )
        for line, sample, request in _planned(engine, coming, read_ahead):
            key = line.line.keys[sample]
            if line.line.number % count != index or key in results.done:
                yield None
            elif request is None:
                write(line.named(sample) | {"error": line.error}, 0)
                yield None
            else:
                accepted[line.line.first + sample] = line, sample
                yield request

    with Engine(
        model,
        batch_size=batch_size,
        sizes=[batch_size],
        max_waiting=read_ahead,
        max_candidates=max_candidates,
    ) as engine:
        if on_start is not None:
            on_start(engine)
        for ended in engine.turns(requests(engine)):
            for row in ended:
                line, sample = accepted.pop(row.number)
                row, text = _upto_stop(model, line, row)
                write(_result(line, sample, row, text), row.num_generated)
        report = engine.report()
    return RunReport(rows, errors, tokens, report.occupancy, report.programs)


class Accepted(NamedTuple):
    """A line with the request of its first sample, or the reason why it cannot run.

    Attributes:
      line: the line.
      request: the request of the first sample; None if the line cannot run.
      error: the reason; empty if the line can run.
      read_back: number of candidates to read back.
      stops: texts that end the generated text.
      stop_ids: ids that end the generated text.
    """

    line: Line
    request: Request | None = None
    error: str = ""
    read_back: int = 0
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def sample(self, index: int) -> Request | None:
        """The request of a sample, with its own seed and number."""
        request = self.request
        if request is None:
            return None
        return replace(request, seed=request.seed + index, number=self.line.first + index)

    def named(self, sample: int) -> dict[str, Any]:
        """The part of a sample's result that identifies it."""
        return {"id": self.line.id} | ({"sample": sample} if self.line.num_samples > 1 else {})


def accept_lines(
    model: Model,
    lines: Iterable[Line],
    *,
    seed: int = 0,
    settings: Mapping[str, Any],
    host_samplers: Callable[[str], HostSampler] | None = None,
    max_candidates: int = 64,
) -> Iterator[Accepted]:
    """Yields each line with its request or its error."""
    known: dict[Any, Any] = {}
    declared = with_rules(settings.get("rules")).settings.values()
    lists = {setting.name for setting in declared if setting.is_list}
    for line in lines:
        if len(known) > _MOST_SETTINGS:
            known.clear()
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
            sampler, size = _host_settings(model, host_samplers, max_candidates, common | own)
            own |= {"host_sampler": sampler, "read_back": size > 0}
            (request,) = make_requests(model, own, common, known=known)
            if (stops or stop_ids) and TextReader(model, request).is_infill:
                raise ValueError("stop has no effect on an infill; remove it")
            accepted = Accepted(line, request, "", size, stops, stop_ids)
            accepted.sample(line.num_samples - 1)  # checks the last seed
        except ValueError as error:
            accepted = Accepted(line, error=_error(line, error))
        yield accepted


def _planned(
    engine: Engine, lines: Iterable[Accepted], read_ahead: int
) -> Iterator[tuple[Accepted, int, Request | None]]:
    """Yields each sample with its request, whose program is reserved.

    The first rows determine which parts of the chains are in use. A later row that uses another
    part keeps the whole chain.
    """
    coming = ((line, index) for line in lines for index in range(line.line.num_samples))
    first = list(itertools.islice(coming, read_ahead))
    requests = [line.request for line, _ in first if line.request is not None]
    chains = chains_in_use(requests)
    # Requests that share a settings object also share the shortened one.
    shared = functools.lru_cache(_MOST_SETTINGS)(lambda sample: with_chain_in_use(sample, chains))

    def shorten(request: Request) -> Request:
        # A structure may be a large automaton, which is not cached.
        short = shared.__wrapped__ if request.sample.structure else shared
        return replace(request, sample=short(request.sample))

    is_part = len(first) == read_ahead
    engine.reserve([shorten(request) for request in requests], is_part=is_part)
    for place, (line, index) in enumerate(itertools.chain(first, coming)):
        request = line.sample(index)
        if request is not None:
            request = shorten(request)
            if place >= read_ahead:
                engine.reserve([request], is_part=True)
        yield line, index, request


def _host_settings(
    model: Model,
    samplers: Callable[[str], HostSampler] | None,
    max_candidates: int,
    settings: Mapping[str, Any],
) -> tuple[HostSampler | None, int]:
    """A line's host sampler and number of candidates to read back."""
    name, size = settings.get("host_sampler"), settings.get("read_back") or 0
    size = max_candidates if size is True else size
    if type(size) is not int or not 0 <= size <= max_candidates:
        raise ValueError(
            f"read_back={size!r} is not an integer in [1, {max_candidates}], the number of "
            "candidates sent to the host; use fewer or raise max_candidates"
        )
    if (name is not None or size) and spans_processes(split_rows(model.params)):
        raise ValueError(
            "host_sampler and read_back need whole rows in one process; remove them, or run "
            "the file in processes that do not share a mesh"
        )
    if name is None:
        return None, size
    if samplers is None or not isinstance(name, str):
        raise ValueError(
            f'host_sampler={name!r} is not allowed; write "module:function" and allow its module'
        )
    return samplers(name), size


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
    settings = configs.layered(common, own)
    length = settings.get("gen_length") or settings.get("max_length") or model.max_length
    needed = structured(model, settings, length)
    return (
        {name: needed[name] for name in needed if name not in common} | own | {"structure": pattern}
    )


def _from_json(settings: Mapping[str, Any], lists: Collection[str]) -> dict[str, Any]:
    """The settings with lists as tuples; ValueError for a list if its setting is not in `lists`."""
    found = dict(settings)
    for name, value in settings.items():
        if not isinstance(value, list) or name in ("tokens", *_HOST):
            continue
        if name not in lists:
            raise ValueError(f"{name} is a list; a request has one value")
        found[name] = tuple(tuple(one) if isinstance(one, list) else one for one in value)
    return found


def _error(line: Line, error: Exception) -> str:
    where, said = f"line {line.number}", " ".join(str(error).split())
    return said if where in said else f"{where}: {said}"


def _upto_stop(model: Model, line: Accepted, row: Row) -> tuple[Row, str]:
    """Truncates a row after its stop, if it has one, and returns it with its text."""
    if not line.stops and not line.stop_ids:
        return row, model.tokenizer.decode(row.tokens)
    assert line.request is not None
    reader = TextReader(model, line.request, line.stops, line.stop_ids)
    text, places, _ = reader.whole(row)
    return row.first(places.stop), model.tokenizer.decode(row.tokens[: reader.start]) + text


def _result(line: Accepted, sample: int, row: Row, text: str) -> dict[str, Any]:
    named, status = line.named(sample), {"status": row.status.name.lower()}
    error = row.error
    if row.is_lost and error is not None:
        raise error
    if row.status is Status.NON_FINITE:
        error = ValueError(f"the model's logits are not finite after {row.steps} steps")
    if error is not None:
        return named | {"error": _error(line.line, error)} | status
    always = {"forwards", "waves"}
    always |= {"insertions", "deletions", "lost"} if row.origin is not None else set()
    counted = {name: n for name, n in row.counters._asdict().items() if n or name in always}
    if line.read_back:
        counted["read_back"] = [record.to_json(line.read_back) for record in row.read_back]
    return {
        **named,
        "text": text,
        "tokens": row.tokens.tolist(),
        "length": int(row.tokens.size),
        "steps": row.steps,
        **status,
        "seconds": round(row.seconds, 3),
        **counted,
    }


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
