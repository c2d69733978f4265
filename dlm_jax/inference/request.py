"""Requests: prompts and settings, validated once and packed into arrays.

Given tokens are frozen, MASK marks holes, and draft tokens can be rewritten.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import SampleConfig, resolve
from dlm_jax.data import NO_MASK, Tokenizer
from dlm_jax.inference.candidates import HostSampler, shown
from dlm_jax.inference.model import Model
from dlm_jax.inference.own_rules import OwnRules, of_row, own_rules
from dlm_jax.inference.structure_checks import check_structure
from dlm_jax.sampling.noise.noise_rule import NoiseRule
from dlm_jax.sampling.propose import FillRule
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import AUTO, BUILT_IN, ModelFacts, Rules, RuleTable
from dlm_jax.sampling.transforms import LogitTransform
from dlm_jax.settings import UNSET, SettingError
from dlm_jax.structured import regex_of_schema

HOLE = re.compile(r"<hole(?::(-?\d+))?>")
"""The marker of a gap in a template. ``<hole:12>`` is a gap of 12 tokens, and ``<hole>`` is a gap
of ``gen_length`` tokens.
"""

_TYPO = re.compile(r"<\s*hole\b", re.IGNORECASE)

PROMPT_KEYS = ("prompt", "template", "tokens", "infill", "draft")


class Given(NamedTuple):
    """A canvas before the first step.

    Attributes:
      tokens: int32 ``[n]``, MASK at holes.
      is_draft: True at draft tokens; None if there are no draft tokens.
    """

    tokens: np.ndarray
    is_draft: np.ndarray | None


def make_canvas(
    tokenizer: Tokenizer,
    asked: Mapping[str, Any],
    *,
    gen_length: int,
    room: int,
    prefix_ids: Sequence[int] = (),
) -> Given:
    """Returns the canvas of a request.

    Args:
      tokenizer: the tokenizer of the model.
      asked: one of ``prompt`` (text before the generated tokens), ``template`` (text with `HOLE`
        markers) or ``tokens`` (ids). If ``infill`` is true, MASK tokens are holes and no tokens are
        appended. ``draft`` is a text to refine after the prompt.
      gen_length: number of new tokens after the prompt, and length of gaps without a number. With
        0, the new tokens fill the remaining space; none are added after a draft.
      room: maximum number of tokens of the row.
      prefix_ids: ids before a text (`Model.prefix_ids`); ``tokens`` are used unchanged.
    """
    kinds = [name for name in ("prompt", "template", "tokens") if asked.get(name) is not None]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} cannot be combined; pass only one of them")
    infill = asked.get("infill", False)
    if not isinstance(infill, bool):
        raise SettingError("infill", infill, "is not a bool", "use True or False")
    if infill and kinds != ["tokens"]:
        raise SettingError("infill", UNSET, "requires tokens", "pass tokens or a template")
    draft = asked.get("draft")
    if draft is not None and (infill or kinds == ["template"]):
        raise SettingError(
            "draft", UNSET, "follows a prompt", "do not combine it with template or infill"
        )
    for name in ("prompt", "template", "draft"):
        if asked.get(name) is not None:
            check_size(name, len(_text(name, asked[name])), room)
    if kinds == ["template"]:
        text = _text("template", asked["template"])
        given = _after(prefix_ids, _template(tokenizer, text, gen_length, room))
        return _check_room(Given(given, None), room, "template")
    if infill:
        given = _ids(tokenizer, asked["tokens"])
        if not (given == tokenizer.mask_id).any():
            raise ValueError(
                f"infill=True, but none of the tokens is MASK ({tokenizer.mask_id}); use MASK at "
                f"the positions to fill"
            )
        return _check_room(Given(given, None), room, "tokens")
    if kinds == ["tokens"]:
        given = _ids(tokenizer, asked["tokens"])
        if (given == tokenizer.mask_id).any():
            raise SettingError(
                "tokens",
                UNSET,
                f"contain MASK ({tokenizer.mask_id})",
                "set infill=True to fill it, or remove it",
            )
    else:
        prompt = asked.get("prompt")
        given = tokenizer.encode("" if prompt is None else _text("prompt", prompt))
        given = _after(prefix_ids, given)
    if draft is not None:
        return _with_draft(tokenizer, given, _text("draft", draft), gen_length, room)
    return Given(_continued(tokenizer, given, gen_length, room), None)


def _after(prefix_ids: Sequence[int], given: np.ndarray) -> np.ndarray:
    """The ids of a text at the start of a row."""
    return np.concatenate([np.array(prefix_ids, np.int32), given])


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SettingError(name, value, "is not a string", "put it in quotes")
    return value


_LONGEST_TOKEN = 128
"""Characters of the longest token in common vocabularies."""


def check_size(name: str, size: int, room: int) -> None:
    """Raises SettingError for a text whose `size` characters cannot be encoded in `room` tokens.

    Encoding a text takes about 0.4 s per MB, so its size is checked first.
    """
    if size > _LONGEST_TOKEN * room:
        raise SettingError(
            name,
            UNSET,
            f"of {size} characters exceeds the canvas of {room} tokens",
            "shorten it or raise max_length",
        )


def _ids(tokenizer: Tokenizer, tokens: Any) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
        is_fine = ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
    except ValueError:
        is_fine = False
    if not is_fine:
        raise SettingError("tokens", UNSET, "must be a non-empty list of ids")
    beyond = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if beyond.size:
        raise SettingError(
            "tokens",
            UNSET,
            f"contain id {beyond[0]}, outside the vocabulary of {tokenizer.vocab_size}",
            f"use 0 to {tokenizer.vocab_size - 1}",
        )
    return ids.astype(np.int32)


def _template(tokenizer: Tokenizer, text: str, gen_length: int, room: int) -> np.ndarray:
    for marker in _TYPO.finditer(text):
        if not HOLE.match(text, marker.start()):
            near = text[marker.start() : marker.start() + 12]
            raise ValueError(f"template: {near!r} is not a gap; write <hole:8> or <hole>")
    parts, end = [], 0
    for marker in HOLE.finditer(text):
        length = gen_length if marker[1] is None else int(marker[1])
        if length < 1:
            remedy = (
                "write <hole:8>, for example" if marker[1] else "set gen_length, or write <hole:8>"
            )
            raise ValueError(f"template: {marker[0]} is a gap of {length} tokens; {remedy}")
        if length > room:
            raise ValueError(
                f"template: {marker[0]} exceeds the canvas of {room}; shorten it or raise "
                "max_length"
            )
        parts += [tokenizer.encode(text[end : marker.start()]), _holes(tokenizer, length)]
        end = marker.end()
    if not parts:
        raise SettingError(
            "template", UNSET, "has no <hole>", "write <hole:8> for a gap of 8 tokens"
        )
    return np.concatenate([*parts, tokenizer.encode(text[end:])])


def _holes(tokenizer: Tokenizer, length: int) -> np.ndarray:
    return np.full(length, tokenizer.mask_id, np.int32)


def _check_room(given: Given, room: int, what: str) -> Given:
    if given.tokens.size > room:
        raise ValueError(
            f"{what} of {given.tokens.size} tokens, including holes, exceeds the canvas of {room}; "
            "shorten it or raise max_length"
        )
    return given


def _continued(
    tokenizer: Tokenizer, given: np.ndarray, gen_length: int, max_length: int
) -> np.ndarray:
    """Appends MASK to the ids of the prompt for every token to generate."""
    room = max_length - given.size
    if room < 1:
        raise SettingError(
            "prompt",
            UNSET,
            f"of {given.size} tokens leaves no space on the canvas of {max_length}",
            f"shorten it or raise max_length above {given.size}",
        )
    if gen_length > room:
        raise SettingError(
            "gen_length",
            gen_length,
            f"and a prompt of {given.size} tokens exceed the canvas of {max_length}",
            f"use gen_length={room} or less, or raise max_length",
        )
    return np.concatenate([given, _holes(tokenizer, gen_length or room)])


def _with_draft(
    tokenizer: Tokenizer, given: np.ndarray, text: str, gen_length: int, room: int
) -> Given:
    """Concatenates the ids of the prompt, the ids of the draft, and the requested holes."""
    draft = tokenizer.encode(text)
    if not draft.size:
        raise SettingError("draft", UNSET, "is empty", "pass text to refine, or remove it")
    tokens = np.concatenate([given, draft, _holes(tokenizer, min(gen_length, room + 1))])
    is_draft = np.zeros(tokens.size, bool)
    is_draft[given.size : given.size + draft.size] = True
    return _check_room(Given(tokens, is_draft), room, "prompt and draft")


def check_settings(model: Model, sample: SampleConfig) -> None:
    """Raises ValueError for settings that are invalid for the model."""
    if sample.max_new_tokens and not (sample.edit and sample.length_target_mode != "none"):
        raise SettingError(
            "max_new_tokens",
            sample.max_new_tokens,
            "is the target length of edits, which requires edit=True and a length_target_mode",
            f"otherwise, use gen_length={sample.max_new_tokens} and max_new_tokens=0",
        )
    facts = model.facts
    if facts.block_length:
        _check_blocks(facts, sample)
    is_noise = issubclass(sample.table.commit[sample.order], NoiseRule)
    if facts.canvas_length:
        _check_canvases(facts, sample, is_noise=is_noise)
    if not (model.process.is_masked or is_noise):
        name = "" if model.config is None else model.config.objective.process
        raise SettingError(
            "order",
            sample.order,
            f"fills holes, but the model was trained with objective.process={name!r}",
            "use order='posterior'",
        )
    for rule in sample.table.checks(sample):
        rule.check_model(sample, facts)
    sample.table.check_chain(sample, facts)


def _check_blocks(facts: ModelFacts, sample: SampleConfig) -> None:
    if facts.block_length % max(sample.block_length, 1) or sample.block_length < 1:
        raise SettingError(
            "block_length",
            sample.block_length,
            f"is neither the training value {facts.block_length} nor a divisor of it",
            "use 0 for the training value",
        )
    if sample.edits:
        raise SettingError(
            "edit",
            True,
            "moves tokens between blocks, which a block-causal model does not support",
            "use a bidirectional model",
        )


def _check_canvases(facts: ModelFacts, sample: SampleConfig, *, is_noise: bool) -> None:
    if not is_noise:
        raise SettingError(
            "order",
            sample.order,
            "fills holes, but the canvases of this model contain random tokens",
            "use order='entropy_renoise'",
        )
    if not 1 <= sample.block_length <= facts.canvas_length:
        raise SettingError(
            "block_length",
            sample.block_length,
            f"is outside the range 1 to {facts.canvas_length}, the canvas length",
            "use 0 for whole canvases",
        )


def check_trace(sample: SampleConfig) -> None:
    """Raises ValueError for settings that do not support traces and replay."""
    for rule in sample.table.checks(sample):
        rule.check_trace(sample)


def check_draft(sample: SampleConfig, given: Given) -> None:
    """Raises ValueError if no enabled rule refines the draft."""
    is_noise = issubclass(sample.table.commit[sample.order], NoiseRule)
    needs = 1 if sample.resample or sample.edits or sample.renoises or is_noise else 2
    if given.is_draft is not None and (not sample.refines or sample.steps < needs):
        raise SettingError(
            "draft",
            UNSET,
            "requires remasking, resampling, re-noising or edits, but none of them is enabled",
            "for example, use remask=scheduled, schedule=all and steps=8",
        )


def _check_bans(draft: np.ndarray, sample: SampleConfig, facts: ModelFacts) -> None:
    banned = np.intersect1d(draft, sample.table.banned(sample, facts))
    if banned.size:
        raise SettingError(
            "draft",
            UNSET,
            f"contains the ids {', '.join(map(str, banned))}, which are banned (logit_bias of "
            "-inf, ignore_eos, or ids without text)",
            "remove them or lift the ban",
        )


def check_canvas(request: Request, facts: ModelFacts, *, mask_id: int) -> None:
    """Raises ValueError if the canvas does not match the settings and the model.

    Possible causes are too few steps for the blocks with holes or draft tokens, banned ids in a
    draft, given tokens after a hole in a block-causal model, or a fill or cache rule that does not
    support the canvas.
    """
    sample = request.sample
    check_structure(sample, request.tokens, is_draft=request.is_draft, mask_id=mask_id)
    steps, block_length = sample.steps, sample.block_length
    is_open = request.is_open(mask_id)
    if request.is_draft is not None:
        _check_bans(request.tokens[request.is_draft & (request.tokens != mask_id)], sample, facts)
    (places,) = np.nonzero(is_open)
    if not places.size:
        return
    is_onward = facts.block_length or facts.canvas_length or mask_id == NO_MASK
    if is_onward and not is_open[places[0] :].all():
        kind = "a causal model without MASK" if mask_id == NO_MASK else "a model with canvases"
        kind = "a block-causal model" if facts.block_length else kind
        raise SettingError(
            "tokens",
            UNSET,
            f"are given after a hole, where {kind} does not attend to them",
            "put them before it, or use a bidirectional model",
        )
    if is_open[0] and not facts.predicts_first:
        raise SettingError(
            "prompt",
            UNSET,
            "is empty, but the model predicts each token from the tokens before it, and there is "
            "no BOS",
            "pass a prompt, or tokens that begin with a given id",
        )
    for rule in sample.table.of(sample):
        rule.check_canvas(sample, facts, is_open)
    if block_length == 0:
        return
    unit = facts.block_length or 1
    busy = np.unique((places - places[0] // unit * unit) // block_length).size
    if steps < busy:
        raise SettingError(
            "steps",
            steps,
            f"is less than the {busy} blocks of block_length={block_length} with holes",
            f"use steps={busy} or more",
        )


_LONGEST = 2**20
_HOST = ("host_sampler", "read_back")
_NOT_RULES = ("seed", "max_length", "trace", *_HOST, *PROMPT_KEYS)


@dataclass(frozen=True)
class Request:
    """One row to denoise.

    Attributes:
      tokens: int ``[n]``, the whole canvas: given tokens, the draft, and MASK at holes.
      sample: settings of the row, with at least one step for each block with holes. In a `Request`,
        ``fill="auto"`` is the parallel fill, because `make_requests` and `generate` resolve
        ``auto`` according to the heads of the model.
      seed: random seed of the row, in [0, 2**32).
      is_draft: True at draft tokens; None if there are no draft tokens.
      host_sampler: function that selects the tokens of the row from the candidates after its chain.
      read_back: whether the candidates of each token are recorded.
      capacity: maximum number of tokens of the row after edits; 0 means its current length.
      trace: whether each step is recorded.
      number: number of the row for host samplers, errors and results, greater than those of all
        earlier rows of its engine. Default: the next number.
    """

    tokens: np.ndarray
    sample: SampleConfig
    seed: int = 0
    is_draft: np.ndarray | None = None
    host_sampler: HostSampler | None = None
    read_back: bool = False
    capacity: int = 0
    trace: bool = False
    number: int | None = None

    @property
    def room(self) -> int:
        """Maximum number of positions of the row."""
        return max(self.tokens.size, self.capacity)

    @property
    def needs_host(self) -> bool:
        """True if Python must read the row at every step."""
        return self.read_back or self.host_sampler is not None

    def is_open(self, mask_id: int) -> np.ndarray:
        """True at the holes and at the tokens of a draft."""
        is_hole = self.tokens == mask_id
        return is_hole if self.is_draft is None else is_hole | self.is_draft

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise SettingError(
                "seed", self.seed, "is outside [0, 2**32)", "use a seed in this range"
            )
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise SettingError(
                "tokens", UNSET, f"have shape {self.tokens.shape}", "pass one non-empty row"
            )
        if self.is_draft is not None and self.is_draft.shape != self.tokens.shape:
            raise ValueError(
                f"is_draft has shape {self.is_draft.shape} and tokens has {self.tokens.shape}; "
                f"pass one value per token"
            )
        if self.host_sampler is not None and not callable(self.host_sampler):
            raise ValueError(
                f"host_sampler={shown(self.host_sampler)} is not callable; pass a function that "
                f"takes Candidates and returns one of their ids"
            )
        if not isinstance(self.read_back, bool):
            raise SettingError("read_back", self.read_back, "is not a bool", "use True or False")
        if not isinstance(self.trace, bool):
            raise SettingError("trace", self.trace, "is not a bool", "use True or False")
        if self.trace and self.needs_host:
            raise SettingError(
                "trace",
                True,
                "is not supported with host samplers and read-back",
                "remove them, or use trace=False",
            )
        if not 0 <= self.capacity < 2**31:
            raise ValueError(
                f"capacity={self.capacity} must be at least 0; use 0 for the current length"
            )


class Static(NamedTuple):
    """The static settings. Rows with the same static settings can run together."""

    table: RuleTable
    rules: tuple[Any, ...]
    draw: str
    is_guided: bool
    needs_host: bool
    is_traced: bool


def static_of(request: Request) -> Static:
    sample = request.sample
    rules = sample.table.static(sample)
    return Static(
        sample.table, rules, sample.draw, sample.guidance > 0, request.needs_host, request.trace
    )


def columns(requests: Sequence[Request], facts: ModelFacts) -> tuple[RowParams, Rules]:
    """Returns the parameters of requests with the same static settings, one row per request.

    The parameters are host arrays, which are passed directly to compiled functions. Separate
    transfers to the device would take most of the time needed to refill a slot.

    A row ends at its EOS, because tokens after EOS would be discarded. Edits can still move EOS, so
    a row with edits ends at EOS only with ``stop_at_eos``.
    """
    samples = [request.sample for request in requests]
    rows = [
        SimpleNamespace(
            **vars(sample) | {"stop_at_eos": sample.stop_at_eos or not sample.edits},
            seed=request.seed,
            capacity=request.capacity,
        )
        for request, sample in zip(requests, samples, strict=True)
    ]
    return RowParams.columns(rows, facts), samples[0].table.columns(samples, facts)


def group(requests: Sequence[Request]) -> dict[Static, list[int]]:
    """Groups the indices of requests that can run in the same program by static settings."""
    groups: dict[Static, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(static_of(request), []).append(index)
    return groups


Chains = dict[tuple[RuleTable, tuple[str, ...]], tuple[str, ...]]
"""The part of each chain that is in use."""


def chains_in_use(requests: Sequence[Request]) -> Chains:
    """Returns the chains of the requests without unused parts.

    A part is unused if no request with the same chain uses it. Unused parts have no effect, and a
    shorter chain compiles faster. Unused transforms that read ids after a truncation to a few
    candidates are kept. Without them, the rest of the chain would process only those candidates and
    draw other tokens, so a row would depend on the other rows of its batch.
    """
    used: dict[tuple[RuleTable, tuple[str, ...]], set[str]] = {}
    for sample in {id(request.sample): request.sample for request in requests}.values():
        used.setdefault((sample.table, sample.chain), set()).update(sample.table.in_use(sample))
    return {
        (table, chain): tuple(n for n in chain if n in names or n in _readers(table, chain))
        for (table, chain), names in used.items()
    }


def with_chain_in_use(sample: SampleConfig, chains: Chains) -> SampleConfig:
    """Returns the settings with their chain of `chains`, unless they use another part of it."""
    chain = chains.get((sample.table, sample.chain), sample.chain)
    others = {*(sample.chain or ())} - {*(chain or ())}
    return (
        sample if others.intersection(sample.table.in_use(sample)) else replace(sample, chain=chain)
    )


def only_chains_in_use(requests: Sequence[Request]) -> list[Request]:
    """Removes the unused parts from the chains of the requests; see `chains_in_use`."""
    chains = chains_in_use(requests)
    # Requests that share a settings object also share the shortened one.
    samples = {id(request.sample): request.sample for request in requests}
    shorter = {place: with_chain_in_use(one, chains) for place, one in samples.items()}
    return [replace(request, sample=shorter[id(request.sample)]) for request in requests]


def _readers(table: RuleTable, chain: Sequence[str]) -> set[str]:
    """Returns the names of transforms in a chain that read ids after a truncation to a few
    candidates.
    """
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
    """Returns the requests for one prompt. `first` is added to the seed unless the prompt has its
    own seed.

    `num_rows` is the total number of rows of all prompts. `known` caches resolved settings for
    other prompts with the same `model` and `common`.
    """
    if not isinstance(prompt, str | Mapping):
        raise SettingError("prompt", prompt, "is neither a string nor a mapping", "pass a string")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    asked = {"seed": 0, "max_length": None} | {**common, **own}
    text = {name: asked[name] for name in PROMPT_KEYS if name in asked}
    is_without = [text.get(name) is None for name in ("template", "tokens")]
    if model.first_ids and all(is_without) and _is_empty(text.get("prompt")):
        text |= {"prompt": None, "tokens": model.first_ids}
    seed = _integer("seed", asked["seed"]) + (0 if "seed" in own else first)
    room = room_of(model, asked["max_length"])
    host = {name: asked[name] for name in _HOST if name in asked}
    if "trace" in own:
        raise SettingError("trace", own["trace"], "applies to all rows", "pass it to the call")
    trace = asked.get("trace", False)
    layers = [{k: v for k, v in layer.items() if k not in _NOT_RULES} for layer in (common, own)]
    rules = own_rules(*layers, num_rows=first + num_samples if num_rows is None else num_rows)
    made: list[Request] = []
    for index in range(num_samples):
        if made and not rules.rows:
            made.append(replace(made[0], seed=seed + index))
            continue
        settings = of_row(rules, first + index)
        key = None if known is None or rules.rows else _key(layers[1], host)
        sample = None if key is None or known is None else known.get(key)
        if sample is None:
            sample = _settings(model, rules, settings, host)
            if key is not None and known is not None:
                known[key] = sample
        given = make_canvas(
            model.tokenizer,
            text,
            gen_length=sample.gen_length,
            room=room,
            prefix_ids=model.prefix_ids,
        )
        check_draft(sample, given)
        capacity = room if sample.inserts else 0
        request = Request(
            given.tokens,
            sample,
            seed + index,
            given.is_draft,
            **host,
            capacity=capacity,
            trace=trace,
        )
        if trace:
            check_trace(sample)
        check_canvas(request, model.facts, mask_id=model.tokenizer.mask_id)
        made.append(request)
    return made


_FORMATS = ("text", "json_object", "json_schema", "regex")


def pattern_of_format(form: Any) -> str | None:
    """Returns the regular expression of a ``response_format`` of OpenAI's protocol; None for text.

    Args:
      form: ``{"type": "text"}``, ``{"type": "json_object"}``, ``{"type": "json_schema",
        "json_schema": {"schema": ...}}`` or ``{"type": "regex", "regex": ...}``.

    Raises:
      ValueError: the format is malformed, or a schema cannot be used.
    """
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in _FORMATS:
        raise SettingError(
            "response_format", UNSET, "has no known type", f"use one of {', '.join(_FORMATS)}"
        )
    for name, value in form.items():
        if value is not None and name not in ("type", kind):
            raise SettingError(
                "response_format", UNSET, f"of type {kind} has {name[:60]!r}", "remove it"
            )
    if kind in ("json_schema", "regex") and form.get(kind) is None:
        raise SettingError("response_format", UNSET, f"lacks {kind}", "add it")
    if kind == "regex":
        if not isinstance(form["regex"], str):
            raise SettingError("response_format", UNSET, "has a regex that is not a string")
        return form["regex"] or None
    if kind != "json_schema":
        return regex_of_schema({"type": "object"}) if kind == "json_object" else None
    schema = form["json_schema"]
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise SettingError("response_format", UNSET, 'lacks "schema" in json_schema', "add it")
    return regex_of_schema(dict(schema["schema"]))


def structured(model: Model, settings: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns the settings of a request with a structure, with defaults with which it can run.

    `length` is the number of new tokens, or a limit of it.
    """
    fill = model.sample.table.fill.get(settings.get("fill", model.sample.fill))
    if fill is not None and fill.holds_structure:
        return {"order": "random_filled", "schedule": "linear", "ignore_eos": False, **settings}
    block = settings.get("block_length", model.sample.block_length)
    block = block or model.network.block_length
    steps = (length // block + 2) * block if block else length
    needed = {"order": "left_to_right", "schedule": "linear", "ignore_eos": False, "steps": steps}
    return {**needed, **settings}


def _is_empty(prompt: Any) -> bool:
    return prompt is None or (isinstance(prompt, str) and not prompt)


def _key(own: Mapping[str, Any], host: Mapping[str, Any]) -> Any:
    """Returns a key for the settings of a prompt, which includes their types and what the host
    does with its rows. The key is None if a setting is not a plain value.
    """
    plain = (bool, int, float, str, type(None))
    if not all(type(value) in plain for value in own.values()):
        return None
    # `repr` distinguishes 1, 1.0 and True, which are equal.
    return _needs(host), tuple(sorted((name, repr(value)) for name, value in own.items()))


def settings_of_call(model: Model, settings: Mapping[str, Any]) -> SampleConfig:
    """Returns the settings of the first row of a call."""
    asked = {name: value for name, value in settings.items() if name not in _NOT_RULES}
    rules = own_rules(asked, num_rows=1)
    return _settings(model, rules, of_row(rules, 0), settings)


def _needs(host: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether a row has a host sampler, and whether it has read-back."""
    return host.get("host_sampler") is not None, bool(host.get("read_back"))


def _settings(
    model: Model, rules: OwnRules, settings: dict[str, Any], host: Mapping[str, Any]
) -> SampleConfig:
    """Returns the settings of a row, resolved and checked against the model.

    `host` contains ``host_sampler`` and ``read_back``, if they are given. A host sampler draws the
    tokens itself and therefore replaces a recommended fill in waves. Read-back changes no token.
    """
    is_hosted, is_read = _needs(host)
    recommended = {name: getattr(model.sample, name) for name in model.sample.table.settings}
    own = (name for name in rules.table.transforms if name not in BUILT_IN.transforms)
    recommended["chain"] += tuple(name for name in own if name not in recommended["chain"])
    if not model.process.is_masked and recommended["order"] == "random":
        settings = {"order": "posterior"} | settings
    if settings.get("fill", recommended["fill"]) == AUTO:
        auto = _auto_fill(model, is_hosted=is_hosted)
        settings = auto | settings | {"fill": auto["fill"]}
    sample = resolve(recommended, settings, table=rules.table)
    if is_hosted and not rules.table.fill[sample.fill].allows_host:
        if "fill" in settings:
            raise SettingError(
                "fill",
                sample.fill,
                f"draws tokens {rules.table.fill[sample.fill].drawn}, which host samplers cannot "
                f"replace",
                "use fill='parallel'",
            )
        _warn_of_parallel(f"recommended {sample.fill!r}", stacklevel=6)
        sample = replace(sample, fill="parallel")
    used = rules.table.named("fill", sample)
    if is_read and used.sources is FillRule.sources:
        raise SettingError(
            "fill",
            used.name,
            f"draws tokens {used.drawn}, so that read-back cannot give the candidates of a token",
            "remove read_back, or use fill='parallel'",
        )
    if is_hosted and getattr(sample, "confidence_of", "clean") != "clean":
        raise SettingError(
            "confidence_of",
            sample.confidence_of,
            "requires state that host samplers do not keep",
            "use confidence_of='clean'",
        )
    if (is_hosted or is_read) and issubclass(rules.table.commit[sample.order], NoiseRule):
        raise SettingError(
            "order",
            sample.order,
            "writes tokens without host samplers and read-back",
            "remove host_sampler and read_back",
        )
    if isinstance(sample.structure, str) and sample.structure:
        sample = replace(sample, structure=model.structures.automaton(sample.structure))
    unit = model.network.block_length or model.network.canvas_length
    if unit and sample.block_length == 0:
        sample = replace(sample, block_length=unit)
    check_settings(model, sample)
    return sample


def _auto_fill(model: Model, *, is_hosted: bool) -> dict[str, Any]:
    """Returns what ``fill="auto"`` stands for: waves, the even positions of each before the odd
    ones, for a model of masked noise with a trained sampler head; parallel for other models.

    At both measured sizes and every number of steps, these waves gave as good texts as plain ones
    or better (benchmarks/results/sampler_head.md). The order is not replaced: ``random_filled`` was
    better for 1.6 million parameters and worse for 56 million, so a model recommends it by its own
    measurement.
    """
    if not model.fills_in_waves:
        return {"fill": "parallel"}
    if is_hosted:
        _warn_of_parallel("default 'wavefront'", stacklevel=7)
        return {"fill": "parallel"}
    return {"fill": "wavefront", "sampler_even_odd": True}


def _warn_of_parallel(replaced: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"fill='parallel' replaces the {replaced}, whose draws host samplers cannot replace",
        stacklevel=stacklevel,
    )


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SettingError(name, value, "is not an integer", "use an integer")
    return int(value)


def room_of(model: Model, max_length: Any) -> int:
    if max_length is None:
        return model.max_length
    if not 1 <= _integer("max_length", max_length) <= _LONGEST:
        raise SettingError("max_length", max_length, f"must be at least 1 and at most {_LONGEST}")
    return int(max_length)
