"""Samples a file of requests and writes a file of results.

Requests are grouped by static settings and canvas size (a power of two), so that few programs
are compiled. Within a group, a free slot gets the next request.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import dlm_jax.config as configs
from dlm_jax.batch.request_file import Key, Line
from dlm_jax.batch.result_file import result_key
from dlm_jax.distributed.partitions import digest_of, spans_processes, split_rows
from dlm_jax.inference.candidates import HostSampler
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.own_rules import classes_of, with_rules
from dlm_jax.inference.reader import TextReader, stops_of
from dlm_jax.inference.request import (
    Request,
    make_requests,
    only_chains_in_use,
    pattern_of_format,
    static_of,
    structured,
)
from dlm_jax.inference.results import Row, canvas_size
from dlm_jax.store.files import own_source
from dlm_jax.types import Status

_HOST = ("host_sampler", "read_back")


class Sink(Protocol):
    """A store of results; `done` has the keys of the stored results."""

    done: set[Key]

    def write(self, result: Mapping[str, Any]) -> None: ...


class RunReport(NamedTuple):
    """Statistics of a run.

    Attributes:
      rows: number of rows finished in this run.
      errors: number of requests that ended in an error in this run.
      tokens: number of tokens generated in this run, excluding rows with errors.
      occupancy: fraction of slot steps that had a row while requests for the same program waited; 1
          if none waited.
      programs: canvas and number of slots of each program that ran.
    """

    rows: int
    errors: int
    tokens: int
    occupancy: float
    programs: tuple[str, ...]


class BatchPlan(NamedTuple):
    """The planned work of a run.

    Attributes:
      work: steps times positions for each unfinished row, by key; 0 for rejected rows.
      programs: canvas of each program that will run.
      compiling: returns the name of the program that is being compiled, or an empty string.
    """

    work: dict[Key, float]
    programs: tuple[str, ...]
    compiling: Callable[[], str]


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
    lines: Sequence[Line],
    results: Sink,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
    host_samplers: Callable[[str], HostSampler] | None = None,
    max_candidates: int = 64,
    on_plan: Callable[[BatchPlan], Any] | None = None,
    on_result: Callable[[Mapping[str, Any], int], Any] | None = None,
    on_turn: Callable[[Engine], Any] | None = None,
) -> RunReport:
    """Runs the lines that have no result in `results` yet, and writes results as rows finish.

    A result has ``id``, ``text``, ``tokens``, ``length``, ``steps``, ``status``, ``seconds`` (in a
    slot) and counters (``forwards``, ``waves``, and other nonzero `Counters`), or ``id`` and
    ``error``. A line with several samples has one result per sample, numbered from 0 in ``sample``.
    ``read_back`` (see `Written.to_json`) is present if the line requests it. A line's tokens do not
    depend on other lines, on the order of lines or on restarts.

    Args:
      model: a model from `load`.
      lines: all lines of this process, including finished lines, because they determine the shapes
        of the programs. If the model's devices belong to several processes, pass the lines of all
        processes; each process runs its part.
      results: the store to which results are written.
      seed: seed of the first row. Sample i of a line without a seed has the seed ``seed +
        line.first + i``; sample i of a line with a seed has the line's seed plus i.
      settings: default settings for all lines, in the form of a line's settings.
      batch_size: maximum number of slots per program.
      host_samplers: maps a line's ``host_sampler`` to a function; raises ValueError for names that
        are not allowed. If None, host samplers are not allowed.
      max_candidates: maximum number of candidates per position for host samplers and read-back.
      on_plan: called once with the plan, before anything is compiled.
      on_result: called with each written result and the number of tokens generated for it.
      on_turn: called with the engine after each turn.
    """
    hosted = functools.partial(_host_settings, model, host_samplers, max_candidates)
    found, asked, refused = _accepted(model, lines, seed, settings or {}, hosted)
    errors = rows = tokens = 0
    asked = only_chains_in_use(asked)
    with Engine(
        model, batch_size=batch_size, max_waiting=None, max_candidates=max_candidates
    ) as engine:
        # Finished lines are included, so that a resumed run uses the same programs.
        engine.reserve(asked)
        index, count = engine.share
        own = {key for line in lines if line.number % count == index for key in line.keys}
        own -= results.done
        if on_plan is not None:
            on_plan(BatchPlan(*_planned(found, refused, asked, own), lambda: engine.compiling))
        tell = on_result or (lambda result, new: None)
        for result in (result for result in refused if result_key(result) in own):
            results.write(result)
            tell(result, 0)
            errors += 1
        owners = {
            engine.submit(request, number=row.number): (row, request)
            for row, request in zip(found, asked, strict=True)
            if row.key in own
        }
        while engine.is_busy:
            for ticket, row in engine.step().finished.items():
                asked_row, request = owners.pop(ticket)
                row, text = _upto_stop(model, asked_row, request, row)
                result = _result(model, asked_row, row, text)
                is_error = "error" in result
                new = 0 if is_error else row.num_generated
                results.write(result)
                tell(result, new)
                errors, rows, tokens = errors + is_error, rows + (not is_error), tokens + new
            if on_turn is not None:
                on_turn(engine)
        report = engine.report()
    return RunReport(rows, errors, tokens, report.occupancy, report.programs)


class _Asked(NamedTuple):
    """A row to run: a line, its sample number, the number of candidates to read back, and the stops
    that end its text.
    """

    line: Line
    sample: int
    read_back: int
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.line.keys[self.sample]

    @property
    def number(self) -> int:
        """Index of the row in the file, regardless of which rows run."""
        return self.line.first + self.sample


def _host_settings(
    model: Model,
    samplers: Callable[[str], HostSampler] | None,
    max_candidates: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """A line's host settings, in the form of a request's settings, except that `read_back` is a
    number.
    """
    name, size = settings.get("host_sampler"), settings.get("read_back")
    if size is True:
        size = max_candidates
    if size is not None and type(size) not in (bool, int):
        raise ValueError(f"read_back={size!r} is not an integer; pass a number of candidates")
    if size and not 1 <= size <= max_candidates:
        raise ValueError(
            f"read_back={size} is outside [1, {max_candidates}], the number of "
            f"candidates sent to the host; use fewer or raise max_candidates"
        )
    if (name is not None or size) and spans_processes(split_rows(model.params)):
        raise ValueError(
            "host_sampler and read_back need whole rows in one process; remove them, or run "
            "the file in processes that do not share a mesh"
        )
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f'host_sampler={name!r} is not a string; write "module:function", or null for none'
        )
    if name is not None and samplers is None:
        raise ValueError(f"host_sampler={name!r} is not allowed; allow its module or remove it")
    sampler = None if name is None or samplers is None else samplers(name)
    return {"host_sampler": sampler, "read_back": int(size or 0)}


def _accepted(
    model: Model,
    lines: Sequence[Line],
    seed: int,
    settings: Mapping[str, Any],
    hosted: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> tuple[list[_Asked], list[Request], list[dict[str, Any]]]:
    """The rows that can run, their requests, and error results for all other rows."""
    found: list[_Asked] = []
    asked: list[Request] = []
    refused: list[dict[str, Any]] = []
    known: dict[Any, Any] = {}
    declared = with_rules(tuple(classes_of(settings.get("rules")))).settings.values()
    lists = {setting.name for setting in declared if setting.is_list}
    for line in lines:
        common = dict(settings) | {"seed": (seed + line.first) % 2**32}
        try:
            if line.error is not None:
                raise ValueError(line.error)
            given = dict(line.settings)
            stops, stop_ids = stops_of(
                model.tokenizer, given.pop("stop", None), given.pop("stop_token_ids", None)
            )
            own = _from_json(_with_format(model, common, given), lists)
            if (stops or stop_ids) and own.get("structure"):
                raise ValueError("stop can truncate a structure; remove one of them")
            host = hosted(common | own)
            size = host["read_back"]
            own |= host | {"read_back": size > 0}
            made = make_requests(model, own, common, num_samples=line.num_samples, known=known)
            if (stops or stop_ids) and TextReader(model, made[0]).is_infill:
                raise ValueError("stop has no effect on an infill; remove it")
            asked += made
        except ValueError as error:
            refused += [_identified(line, k) | _error(line, error) for k in range(line.num_samples)]
        else:
            found += [
                _Asked(line, sample, size, stops, stop_ids) for sample in range(line.num_samples)
            ]
    return found, asked, refused


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
    declared = with_rules(tuple(classes_of(common.get("rules")))).settings
    for name in ("fill", "block_length"):  # which `structured` reads
        if name in own:
            declared[name].checked(own[name])
    settings = configs.layered(common, own)
    length = settings.get("gen_length") or settings.get("max_length") or model.max_length
    needed = structured(model, settings, length)
    return {name: needed[name] for name in needed if name not in common} | own | {
        "structure": pattern
    }  # fmt: skip


def _identified(line: Line, sample: int) -> dict[str, Any]:
    return {"id": line.id} | ({"sample": sample} if line.num_samples > 1 else {})


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


def _error(line: Line, error: Exception) -> dict[str, str]:
    where, said = f"line {line.number}", " ".join(str(error).split())
    return {"error": said if where in said else f"{where}: {said}"}


def _planned(
    found: Sequence[_Asked],
    refused: Sequence[Mapping[str, Any]],
    asked: Sequence[Request],
    own: set[Key],
) -> tuple[dict[Key, float], tuple[str, ...]]:
    """The work of the rows in `own`, which is steps times canvas length, and their programs."""
    keys = (result_key(result) for result in refused)
    work = {key: 0.0 for key in keys if key is not None and key in own}
    programs: dict[Any, str] = {}
    for row, request in zip(found, asked, strict=True):
        if row.key in own:
            canvas = canvas_size(request.room, is_shared=True)
            work[row.key] = float(request.sample.steps * canvas)
            programs[static_of(request), canvas] = f"canvas={canvas}"
    return work, tuple(programs.values())


def _upto_stop(model: Model, asked: _Asked, request: Request, row: Row) -> tuple[Row, str]:
    """Truncates a row after its stop, if it has one, and returns it with its text."""
    if not asked.stops and not asked.stop_ids:
        return row, model.tokenizer.decode(row.tokens)
    reader = TextReader(model, request, asked.stops, asked.stop_ids)
    text, places, _ = reader.whole(row)
    return row.first(places.stop), model.tokenizer.decode(row.tokens[: reader.start]) + text


def _result(model: Model, asked: _Asked, row: Row, text: str) -> dict[str, Any]:
    named, status = _identified(asked.line, asked.sample), {"status": row.status.name.lower()}
    error = row.error
    if row.is_lost and error is not None:
        raise error
    if row.status is Status.NON_FINITE:
        error = ValueError(f"the model's logits are not finite after {row.steps} steps")
    if error is not None:
        return named | _error(asked.line, error) | status
    always = {"forwards", "waves"}
    always |= {"insertions", "deletions", "lost"} if row.origin is not None else set()
    counted = {name: n for name, n in row.counters._asdict().items() if n or name in always}
    if asked.read_back:
        counted["read_back"] = [record.to_json(asked.read_back) for record in row.read_back]
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
