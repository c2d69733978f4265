"""A row to generate: its canvas and settings, resolved and checked once before tracing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import SampleConfig, resolve
from dlm_jax.inference import prompts
from dlm_jax.inference.candidates import HostSampler, shown
from dlm_jax.inference.checks import check_canvas, check_draft, check_settings
from dlm_jax.inference.model import Model
from dlm_jax.inference.own_rules import OwnRules, of_row, own_rules
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import AUTO, ModelFacts, Rules, RuleTable
from dlm_jax.sampling.transforms import LogitTransform
from dlm_jax.settings import on_device

_LONGEST = 2**20
_HOST = ("host_sampler", "read_back")
_NOT_RULES = ("seed", "max_length", *_HOST, *prompts.KEYS)


@dataclass(frozen=True)
class Request:
    """One row to denoise.

    Attributes:
      tokens: int ``[n]``, the whole canvas: given tokens, a draft's, and MASK at the holes.
      sample: its settings; at least one step for each block with holes. ``fill="auto"`` is the
        parallel fill: `make_requests` and `generate` resolve it by the model's heads.
      seed: of the row's randomness, in [0, 2**32).
      is_draft: True at tokens that stand there to be refined; None is nowhere.
      host_sampler: chooses the row's tokens among the candidates that its chain leaves.
      read_back: whether it is kept how each token came about.
      capacity: tokens that edits may grow it to; 0, or less than it has, is as many as it has.
    """

    tokens: np.ndarray
    sample: SampleConfig
    seed: int = 0
    is_draft: np.ndarray | None = None
    host_sampler: HostSampler | None = None
    read_back: bool = False
    capacity: int = 0

    @property
    def room(self) -> int:
        """Positions that the row may come to fill."""
        return max(self.tokens.size, self.capacity)

    @property
    def needs_host(self) -> bool:
        """Whether the row must be looked at from Python at every step."""
        return self.read_back or self.host_sampler is not None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32); use a smaller one")
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(
                f"tokens have shape {self.tokens.shape}; give one row that is not empty"
            )
        if self.is_draft is not None and self.is_draft.shape != self.tokens.shape:
            raise ValueError(
                f"is_draft has shape {self.is_draft.shape} and tokens {self.tokens.shape}; give "
                "one value for each token"
            )
        if self.host_sampler is not None and not callable(self.host_sampler):
            raise ValueError(
                f"host_sampler={shown(self.host_sampler)} is not callable; give a function that "
                "takes Candidates and returns one of their ids"
            )
        if not isinstance(self.read_back, bool):
            raise ValueError(f"read_back={self.read_back!r} is not a bool; use True or False")
        if not 0 <= self.capacity < 2**31:
            raise ValueError(
                f"capacity={self.capacity} must be at least 0; use 0 for as many as it has"
            )


class Static(NamedTuple):
    """What is compiled in: rows that agree in it run together."""

    table: RuleTable
    rules: tuple[Any, ...]
    draw: str
    is_guided: bool
    needs_host: bool


def static_of(request: Request) -> Static:
    """What is compiled in for a request."""
    sample = request.sample
    rules = sample.table.static(sample)
    return Static(sample.table, rules, sample.draw, sample.guidance > 0, request.needs_host)


def pack(requests: Sequence[Request], facts: ModelFacts) -> tuple[RowParams, Rules]:
    """What `columns` makes, on the device."""
    return on_device(columns(requests, facts))


def columns(requests: Sequence[Request], facts: ModelFacts) -> tuple[RowParams, Rules]:
    """The parameters of requests that agree in what is static, one row each.

    They are arrays of the host, which a call of a compiled function takes as they are: to put each
    of them on the device first takes most of the time in which a slot gets another request.

    A row ends with its text, as what would follow EOS is cut off; edits may still move that, and
    such a row ends there if it is asked to.
    """
    samples = [request.sample for request in requests]
    rows = [
        SimpleNamespace(
            **vars(sample) | {"stop_at_eos": sample.stop_at_eos or not sample.edits},
            seed=request.seed, capacity=request.capacity,
        )
        for request, sample in zip(requests, samples, strict=True)
    ]  # fmt: skip
    return RowParams.columns(rows, facts), samples[0].table.columns(samples, facts)


def group(requests: Sequence[Request]) -> dict[Static, list[int]]:
    """Places of the requests that can run in the same program."""
    groups: dict[Static, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(static_of(request), []).append(index)
    return groups


def only_chains_in_use(requests: Sequence[Request]) -> list[Request]:
    """The requests with those parts of their chain that any of the same chain asks for.

    The others change nothing, and a shorter chain compiles faster. What reads ids behind a cut to
    few candidates stays: without it the rest of the chain would run on those alone and draw other
    tokens, so that a row would depend on those beside it.
    """
    used: dict[tuple[Any, ...], set[str]] = {}
    for sample in {id(request.sample): request.sample for request in requests}.values():
        used.setdefault((sample.table, sample.chain), set()).update(sample.table.in_use(sample))
    kept = {
        (table, chain): tuple(n for n in chain if n in names or n in _readers(table, chain))
        for (table, chain), names in used.items()
    }
    # Requests share their settings where they can, and so they do afterwards.
    shorter = {id(r.sample): r.sample for r in requests}
    shorter = {
        place: replace(sample, chain=kept[sample.table, sample.chain])
        for place, sample in shorter.items()
    }
    return [replace(request, sample=shorter[id(request.sample)]) for request in requests]


def _readers(table: RuleTable, chain: Sequence[str]) -> set[str]:
    """The names of a chain that read ids behind a cut to few candidates."""
    found: set[str] = set()
    is_cut = False
    for name in chain:
        classes = table.transforms[name]
        if is_cut and not all(cls.ignores_ids for cls in classes):
            found.add(name)
        is_cut |= any(cls.count is not LogitTransform.count for cls in classes)
    return found


def make_requests(
    model: Model,
    prompt: str | Mapping[str, Any],
    common: Mapping[str, Any],
    first: int = 0,
    num_samples: int = 1,
    num_rows: int | None = None,
    known: dict[Any, SampleConfig] | None = None,
) -> list[Request]:
    """The rows of one prompt; `first` is added to the seed unless the prompt has its own.

    `num_rows` is the number of rows of all prompts, if others follow. `known` remembers settings
    that were resolved, for other prompts under the same `model` and `common`.

    Raises:
      ValueError: a setting is unknown or out of range, or the prompt does not fit or cannot be
        encoded.
    """
    if not isinstance(prompt, str | Mapping):
        raise ValueError(f"prompt={prompt!r} is neither a text nor a mapping; put it in quotes")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    asked = {"seed": 0, "max_length": None} | {**common, **own}
    text = {name: asked[name] for name in prompts.KEYS if name in asked}
    seed = _integer("seed", asked["seed"]) + (0 if "seed" in own else first)
    room = _room(model, asked["max_length"])
    host = {name: asked[name] for name in _HOST if name in asked}
    layers = [{k: v for k, v in layer.items() if k not in _NOT_RULES} for layer in (common, own)]
    rules = own_rules(*layers, num_rows=first + num_samples if num_rows is None else num_rows)
    made: list[Request] = []
    for index in range(num_samples):
        if made and not rules.has_rows:
            made.append(replace(made[0], seed=seed + index))
            continue
        settings = of_row(rules, first + index)
        key = None if known is None or rules.has_rows else _key(layers[1], host)
        sample = None if key is None or known is None else known.get(key)
        if sample is None:
            sample = _settings(model, rules, settings, needs_host=any(host.values()))
            if key is not None and known is not None:
                known[key] = sample
        given = prompts.make_canvas(model.tokenizer, text, gen_length=sample.gen_length, room=room)
        check_draft(sample, given)
        capacity = room if sample.inserts else 0
        request = Request(given.tokens, sample, seed + index, given.is_draft, **host,
                          capacity=capacity)  # fmt: skip
        check_canvas(request, model.facts, mask_id=model.tokenizer.mask_id)
        made.append(request)
    return made


def _key(own: Mapping[str, Any], host: Mapping[str, Any]) -> Any:
    """What tells a prompt's own settings from others, types and whether the host looks at its rows
    included; None for any but plain.
    """
    plain = (bool, int, float, str, type(None))
    if not all(type(value) in plain for value in own.values()):
        return None
    # As text, for 1, 1.0 and True are equal.
    return any(host.values()), tuple(sorted((name, repr(value)) for name, value in own.items()))


def settings_of_call(
    model: Model, settings: Mapping[str, Any], *, needs_host: bool = False
) -> SampleConfig:
    """The settings of a call as they hold for its first row.

    `needs_host` is whether its rows have a host sampler or read-back.

    Raises:
      ValueError: a setting is unknown or out of range.
    """
    asked = {name: value for name, value in settings.items() if name not in _NOT_RULES}
    rules = own_rules(asked, num_rows=1)
    return _settings(model, rules, of_row(rules, 0), needs_host=needs_host)


def _settings(
    model: Model, rules: OwnRules, settings: dict[str, Any], *, needs_host: bool
) -> SampleConfig:
    """The settings of a row, resolved and checked against the model."""
    recommended = {name: getattr(model.sample, name) for name in model.sample.table.settings}
    recommended["chain"] += tuple(n for n in rules.transforms if n not in recommended["chain"])
    if settings.get("fill", recommended["fill"]) == AUTO:
        settings = settings | _auto_fill(model, recommended, settings, needs_host=needs_host)
    sample = resolve(recommended, settings, table=rules.table)
    if needs_host and not rules.table.fill[sample.fill].allows_host:
        if "fill" in settings:
            raise ValueError(
                f"fill={sample.fill!r} draws tokens in waves, where no host sampler or read-back "
                "can look; use fill='parallel'"
            )
        _warn_of_parallel(f"recommended {sample.fill!r}", stacklevel=6)
        sample = replace(sample, fill="parallel")
    if needs_host and getattr(sample, "confidence_of", "clean") != "clean":
        raise ValueError(
            f"confidence_of={sample.confidence_of!r} reads what no host sampler or read-back "
            "leaves; use confidence_of='clean'"
        )
    if isinstance(sample.structure, str) and sample.structure:
        sample = replace(sample, structure=model.structures.automaton(sample.structure))
    if model.network.block_length and sample.block_length == 0:
        sample = replace(sample, block_length=model.network.block_length)
    check_settings(model, sample)
    return sample


def _auto_fill(
    model: Model, recommended: Mapping[str, Any], given: Mapping[str, Any], *, needs_host: bool
) -> dict[str, Any]:
    """The fill of a model without a recommended one, and the order that goes with it.

    Among orders that commit at random, the one that fills every hole first wrote the best texts at
    every budget (docs/sampler_head.md, "Beside rules that need no training").
    """
    if not model.fills_in_waves:
        return {"fill": "parallel"}
    if needs_host:
        _warn_of_parallel("'wavefront' of its sampler head", stacklevel=7)
        return {"fill": "parallel"}
    if "order" not in given and recommended["order"] == "random":
        return {"fill": "wavefront", "order": "random_filled"}
    return {"fill": "wavefront"}


def _warn_of_parallel(replaced: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"fill='parallel' replaces the {replaced}, which draws tokens where no host sampler or "
        "read-back can look",
        stacklevel=stacklevel,
    )


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r} is not an integer; use one")
    return int(value)


def _room(model: Model, max_length: Any) -> int:
    if max_length is None:
        return model.max_length
    if not 1 <= _integer("max_length", max_length) <= _LONGEST:
        raise ValueError(f"max_length={max_length} must be at least 1 and at most {_LONGEST}")
    return int(max_length)
