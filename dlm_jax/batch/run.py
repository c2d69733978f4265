"""A file of requests through a model, into a file of results.

Requests are grouped by what is compiled in and by the canvas that holds them, a power of two, so
that a few programs serve any lengths; inside a group a slot that ends takes the next request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

import dlm_jax.config as configs
from dlm_jax.batch.requests import Id, Line
from dlm_jax.distributed.rows import beginning
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, make_requests, only_chains_in_use, static_of
from dlm_jax.inference.results import Row, canvas_size
from dlm_jax.types import Status

_Listener = Callable[[Mapping[str, Any], int], Any]
_SAMPLED_BYTES = 1 << 16
_LISTS = ("logit_bias", "dry_breakers", "chain", "tokens")


class Sink(Protocol):
    """What takes the results of a run.

    Attributes:
      done: ids of those that it has.
    """

    done: set[Id]

    def write(self, result: Mapping[str, Any]) -> None:
        """Takes one more."""
        ...


class Report(NamedTuple):
    """What a run did.

    Attributes:
      rows: finished now.
      errors: requests that ended in an error now.
      tokens: generated now.
      occupancy: share of the slots' steps that a row took while requests of the same program
        waited; 1 if none did.
      programs: canvases and slots of the programs that ran.
    """

    rows: int
    errors: int
    tokens: int
    occupancy: float
    programs: tuple[str, ...]


class Plan(NamedTuple):
    """What a run is going to do.

    Attributes:
      work: of each request that is not done, by its id: steps times positions; 0 if it is refused.
      programs: canvases of the programs that will run.
    """

    work: dict[Id, float]
    programs: tuple[str, ...]


def describe_model(model: Model) -> dict[str, Any]:
    """What tells this model from others, for a fingerprint: config, tokenizer, and parameters.

    Of every parameter array the beginning counts, so that large models do not take long.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        digest.update(beginning(leaf, _SAMPLED_BYTES // leaf.dtype.itemsize).tobytes())
    return {
        "config": None if model.config is None else configs.to_dict(model.config),
        "vocab_size": model.tokenizer.vocab_size,
        "params": digest.hexdigest(),
    }


def run_requests(
    model: Model,
    lines: Sequence[Line],
    results: Sink,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
    on_plan: Callable[[Plan], Any] | None = None,
    on_result: _Listener | None = None,
    on_turn: Callable[[Engine], Any] | None = None,
) -> Report:
    """Writes the result of every line that `results` lacks, as soon as it is there.

    A result is ``id``, ``text``, ``tokens``, ``length``, ``steps``, ``status``, ``seconds`` (in a
    slot) and what was counted (``forwards``, ``waves``, and other `Counters` that are not 0); or
    ``id`` and ``error``. The tokens of a line depend on it alone: they are the same in any order,
    among any others, and after a restart.

    Args:
      model: from `load`.
      lines: of this process, those that are done too: they belong to the shapes of its programs. If
        the devices of the model belong to several processes, all lines, of which each runs its
        share.
      results: where the results go.
      seed: of line 1; a line that names none has the seed ``seed + number - 1``.
      settings: for lines that do not name them.
      batch_size: slots of a program at most.
      on_plan: told once, before anything is compiled, what will be done.
      on_result: told each result once it is written, and how many tokens were generated for it.
      on_turn: told the engine after each of its turns.
    """
    found, asked, refused = _accepted(model, lines, seed, settings or {})
    errors = rows = tokens = 0
    asked = only_chains_in_use(asked)
    with Engine(model, batch_size=batch_size, max_waiting=None) as engine:
        # Those that are done too: the programs are the same when a run is continued.
        engine.reserve(asked)
        index, count = engine.share
        own = {line.id for line in lines if line.number % count == index} - results.done
        if on_plan is not None:
            on_plan(_planned(found, refused, asked, own))
        for result in (result for result in refused if result["id"] in own):
            _write(results, result, 0, on_result)
            errors += 1
        owners = {
            engine.submit(request): line
            for line, request in zip(found, asked, strict=True)
            if line.id in own
        }
        while engine.is_busy:
            for ticket, row in engine.step().finished.items():
                new, result = row.num_generated, _result(model, owners.pop(ticket), row)
                _write(results, result, new, on_result)
                errors, tokens = errors + ("error" in result), tokens + new
                rows += "error" not in result
            if on_turn is not None:
                on_turn(engine)
        report = engine.report()
    return Report(rows, errors, tokens, report.occupancy, report.programs)


def _accepted(
    model: Model, lines: Sequence[Line], seed: int, settings: Mapping[str, Any]
) -> tuple[list[Line], list[Request], list[dict[str, Any]]]:
    """The lines that can be run with their requests, and the results of the others."""
    found: list[Line] = []
    asked: list[Request] = []
    refused: list[dict[str, Any]] = []
    known: dict[Any, Any] = {}
    for line in lines:
        common = dict(settings) | {"seed": (seed + line.number - 1) % 2**32}
        try:
            if line.error is not None:
                raise ValueError(line.error)
            asked += make_requests(model, _from_json(line.settings), common, known=known)
        except ValueError as error:
            refused.append({"id": line.id, "error": _in_line(line, str(error))})
        else:
            found.append(line)
    return found, asked, refused


def _from_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what JSON has no type for: ids as keys, tuples.

    Raises:
      ValueError: a value has the wrong shape.
    """
    found = dict(settings)
    for name, value in found.items():
        if isinstance(value, list) and name not in _LISTS:
            raise ValueError(f"{name} is a list; a request takes one value")
    bias = found.get("logit_bias")
    try:
        if isinstance(bias, Mapping):
            found["logit_bias"] = {int(token): value for token, value in bias.items()}
        elif bias is not None:
            found["logit_bias"] = tuple((token, value) for token, value in bias)
        for name, kind in (("dry_breakers", int), ("chain", str)):
            if name in found:
                found[name] = tuple(found[name])
                if not all(isinstance(item, kind) for item in found[name]):
                    raise TypeError
    except (TypeError, ValueError):
        raise ValueError(
            'logit_bias is {"12": -5.0}, dry_breakers are ids [3, 4], and chain is names ["top_k"]'
        ) from None
    return found


def _in_line(line: Line, error: str) -> str:
    where = f"line {line.number}"
    return error if where in error else f"{where}: {error}"


def _planned(
    found: Sequence[Line],
    refused: Sequence[Mapping[str, Any]],
    asked: Sequence[Request],
    own: set[Id],
) -> Plan:
    """The work of the lines in `own`: steps times canvas of each."""
    work = {result["id"]: 0.0 for result in refused if result["id"] in own}
    programs: dict[Any, str] = {}
    for line, request in zip(found, asked, strict=True):
        if line.id in own:
            canvas = canvas_size(request.room, is_shared=True)
            work[line.id] = float(request.sample.steps * canvas)
            programs[static_of(request), canvas] = f"canvas={canvas}"
    return Plan(work, tuple(programs.values()))


def _result(model: Model, line: Line, row: Row) -> dict[str, Any]:
    if row.status is Status.NON_FINITE:
        error = f"line {line.number}: the model's logits are not finite after {row.steps} steps"
        return {"id": line.id, "error": error, "status": row.status.name.lower()}
    if row.error is not None:
        raise row.error
    always = {
        "forwards",
        "waves",
        *(("insertions", "deletions", "lost") if row.origin is not None else ()),
    }
    counted = {name: n for name, n in row.counters._asdict().items() if n or name in always}
    return {
        "id": line.id,
        "text": model.tokenizer.decode(row.tokens),
        "tokens": row.tokens.tolist(),
        "length": int(row.tokens.size),
        "steps": row.steps,
        "status": row.status.name.lower(),
        "seconds": round(row.seconds, 3),
    } | counted


def _write(
    results: Sink,
    result: Mapping[str, Any],
    new: int,
    on_result: _Listener | None,
) -> None:
    results.write(result)
    if on_result is not None:
        on_result(result, new)


def describe_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as JSON can hold them, for a fingerprint."""
    return json.loads(json.dumps(settings, default=str))
