"""Requests: prompts and settings, validated once and packed into arrays.

Given tokens are frozen, MASK marks holes, and draft tokens can be rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from dlm_jax.data import NO_MASK, Tokenizer
from dlm_jax.inference.host import HostSampler, shown
from dlm_jax.inference.model import Model
from dlm_jax.sampling.commit.orders import QuotaRule
from dlm_jax.sampling.params import (
    SamplingParams,
    given_settings,
    layered,
    resolve,
)
from dlm_jax.sampling.positions import steps_needed
from dlm_jax.sampling.program import RowParams
from dlm_jax.sampling.propose import Constrained, FillRule, Parallel
from dlm_jax.sampling.rules import AUTO, BUILT_IN, ModelFacts, Rules, RuleTable, with_rules
from dlm_jax.sampling.transforms import TopK
from dlm_jax.sampling.transforms.structure import automaton_of
from dlm_jax.sampling.transforms.transform import Pointwise
from dlm_jax.settings import UNSET, SettingError, require
from dlm_jax.structured import regex_of_schema
from dlm_jax.structured.automaton import Automaton

HOLE = re.compile(r"<hole(?::(-?\d+))?>")
"""The marker of a gap in a template. ``<hole:12>`` is a gap of 12 tokens, and ``<hole>`` is a gap
of ``gen_length`` tokens.
"""

_LONGEST_TOKEN = 128
"""Characters of the longest token in common vocabularies."""
_LONGEST = 2**20
_MOST_KNOWN = 4096

PROMPT_KEYS = ("prompt", "template", "tokens", "infill", "draft")
_HOST = ("host_sampler", "read_back")
_NOT_SETTINGS = ("seed", "max_length", "trace", *_HOST, *PROMPT_KEYS)


def make_canvas(
    tokenizer: Tokenizer,
    asked: Mapping[str, Any],
    *,
    gen_length: int,
    room: int,
    prefix_ids: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the canvas of a request, int32 with MASK at holes, and where it has draft tokens
    (None without a draft).

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
    kind, infill, draft = (*kinds, "prompt")[0], asked.get("infill", False), asked.get("draft")
    require(isinstance(infill, bool), "infill", infill, "is not a bool", "use True or False")
    why, remedy = "requires tokens", "pass tokens or a template"
    require(not infill or kind == "tokens", "infill", UNSET, why, remedy)
    is_infill = infill or kind == "template"
    why, remedy = "follows a prompt", "do not combine it with template or infill"
    require(draft is None or not is_infill, "draft", UNSET, why, remedy)
    for name in ("prompt", "template", "draft"):
        if (text := asked.get(name)) is not None:
            require(isinstance(text, str), name, text, "is not a string", "put it in quotes")
            check_size(name, len(text), room)
    mask_id, is_draft = tokenizer.mask_id, None
    if kind == "tokens":
        tokens = _ids(tokenizer, asked["tokens"])
        remedy = "use MASK at the positions to fill" if infill else "set infill=True to fill it"
        why = f"contain {'no ' * infill}MASK ({mask_id})"
        require((mask_id in tokens) == infill, "tokens", UNSET, why, remedy)
    else:
        given, text = asked.get(kind) or "", np.zeros(0, np.int32)
        if kind == "template":
            text = _template(tokenizer, given, gen_length, room)
        elif given:
            text = tokenizer.encode(given)
        tokens = np.concatenate([np.array(prefix_ids, np.int32), text])
    left = room - tokens.size
    if draft is not None:
        text, more = tokenizer.encode(draft), min(gen_length, room + 1)
        require(text.size > 0, "draft", UNSET, "is empty", "pass text to refine, or remove it")
        is_draft = np.repeat([False, True, False], [tokens.size, text.size, more])
        tokens = np.concatenate([tokens, text, np.full(more, mask_id, np.int32)])
    elif not is_infill:
        why = f"of {tokens.size} tokens leaves no space on the canvas of {room}"
        remedy = f"shorten it or raise max_length above {tokens.size}"
        require(left > 0, "prompt", UNSET, why, remedy)
        why = f"and a prompt of {tokens.size} tokens exceed the canvas of {room}"
        remedy = f"use gen_length={left} or less, or raise max_length"
        require(gen_length <= left, "gen_length", gen_length, why, remedy)
        tokens = np.concatenate([tokens, np.full(gen_length or left, mask_id, np.int32)])
    why = f"of {tokens.size} tokens, including holes, exceeds the canvas of {room}"
    name, why = (kind, why) if draft is None else ("prompt", f"and draft {why}")
    require(tokens.size <= room, name, UNSET, why, "shorten it or raise max_length")
    return tokens, is_draft


def check_size(name: str, size: int, room: int) -> None:
    """Raises SettingError for a text whose `size` characters cannot be encoded in `room` tokens.

    Encoding a text takes about 0.4 s per MB, so its size is checked first.
    """
    why = f"of {size} characters exceeds the canvas of {room} tokens"
    require(size <= _LONGEST_TOKEN * room, name, UNSET, why, "shorten it or raise max_length")


def _ids(tokenizer: Tokenizer, tokens: Any) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
        is_fine = ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
    except ValueError:
        is_fine = False
    require(is_fine, "tokens", UNSET, "must be a non-empty list of ids")
    size = tokenizer.vocab_size
    for id_ in ids[(ids < 0) | (ids >= size)][:1]:
        why = f"contain id {id_}, outside the vocabulary of {size}"
        raise SettingError("tokens", UNSET, why, f"use 0 to {size - 1}")
    return ids.astype(np.int32)


def _template(tokenizer: Tokenizer, text: str, gen_length: int, room: int) -> np.ndarray:
    parts, end = [], 0
    for marker in HOLE.finditer(text):
        length = gen_length if marker[1] is None else int(marker[1])
        if not 1 <= length <= room:
            raise ValueError(
                f"template: {marker[0]} is a gap of {length} tokens, outside 1 to {room}, the "
                "canvas; write <hole:8>, or set gen_length"
            )
        parts.append(tokenizer.encode(text[end : marker.start()]))
        parts.append(np.full(length, tokenizer.mask_id, np.int32))
        end = marker.end()
    remedy = "write <hole:8> for a gap of 8 tokens"
    require(bool(parts), "template", UNSET, "has no <hole>", remedy)
    return np.concatenate([*parts, tokenizer.encode(text[end:])])


def check_settings(model: Model, sample: SamplingParams) -> None:
    """Raises ValueError for settings that are invalid for the model."""
    facts, block = model.facts, sample.block_length
    require(
        not sample.max_new_tokens or (sample.edit and sample.length_target_mode != "none"),
        "max_new_tokens",
        sample.max_new_tokens,
        "is the target length of edits, which requires edit=True and a length_target_mode",
        f"otherwise, use gen_length={sample.max_new_tokens} and max_new_tokens=0",
    )
    if facts.block_length:
        why = f"is neither the training value {facts.block_length} nor a divisor of it"
        is_divisor = block >= 1 and facts.block_length % block == 0
        require(is_divisor, "block_length", block, why, "use 0 for the training value")
        why = "moves tokens between blocks, which a block-causal model does not support"
        require(not sample.edits, "edit", True, why, "use a bidirectional model")
    if facts.canvas_length:
        why = "fills holes, but the canvases of this model contain random tokens"
        require(sample.is_noise, "order", sample.order, why, "use order='entropy_renoise'")
        why = f"is outside the range 1 to {facts.canvas_length}, the canvas length"
        is_inside = 1 <= block <= facts.canvas_length
        require(is_inside, "block_length", block, why, "use 0 for whole canvases")
    process = "" if model.config is None else model.config.objective.process
    why = f"fills holes, but the model was trained with objective.process={process!r}"
    is_fine = model.process.is_masked or sample.is_noise
    require(is_fine, "order", sample.order, why, "use order='posterior'")
    sample.table.check_model(sample, facts)


def check_canvas(request: Request, facts: ModelFacts, *, mask_id: int) -> None:
    """Raises ValueError if the canvas does not match the settings and the model.

    Possible causes are too few steps for the blocks with holes or draft tokens, banned ids in a
    draft, given tokens after a hole in a block-causal model, a structure that cannot be completed,
    or a fill or cache rule that does not support the canvas.
    """
    sample, tokens = request.sample, request.tokens
    if isinstance(sample.structure, Automaton):
        _check_structure(request, sample.structure, mask_id)
    if request.is_draft is not None:
        draft = tokens[request.is_draft & (tokens != mask_id)]
        banned = np.intersect1d(draft, sample.table.banned(sample, facts))
        why = f"contains the ids {', '.join(map(str, banned))}, which are banned (logit_bias of "
        why += "-inf, ignore_eos, or ids without text)"
        require(not banned.size, "draft", UNSET, why, "remove them or lift the ban")
    is_open = request.is_open(mask_id)
    (places,) = np.nonzero(is_open)
    if not places.size:
        return
    if facts.block_length or facts.canvas_length or mask_id == NO_MASK:
        kind = "a causal model without MASK" if mask_id == NO_MASK else "a model with canvases"
        kind = "a block-causal model" if facts.block_length else kind
        why = f"are given after a hole, where {kind} does not attend to them"
        remedy = "put them before it, or use a bidirectional model"
        require(bool(is_open[places[0] :].all()), "tokens", UNSET, why, remedy)
    require(
        facts.predicts_first or not is_open[0],
        "prompt",
        UNSET,
        "is empty, but the model predicts each token from the tokens before it, and there is no "
        "BOS",
        "pass a prompt, or tokens that begin with a given id",
    )
    for rule in sample.table.of(sample):
        rule.check_canvas(sample, facts, is_open)
    if length := sample.block_length:
        unit = facts.block_length or 1
        busy = np.unique((places - places[0] // unit * unit) // length).size
        why = f"is less than the {busy} blocks of block_length={length} with holes"
        require(sample.steps >= busy, "steps", sample.steps, why, f"use steps={busy} or more")


def _check_structure(request: Request, automaton: Automaton, mask_id: int) -> None:
    """Raises ValueError if a request can violate its structure or cannot complete it."""
    sample, tokens = request.sample, request.tokens
    (holes,) = np.nonzero(tokens == mask_id)
    if issubclass(sample.table.named("fill", sample), Constrained):
        why = "can violate the structure"
        require(request.is_draft is None, "draft", UNSET, why, "remove one of them")
        automaton = automaton_of(sample)
    else:
        is_quota = issubclass(sample.table.commit[sample.order], QuotaRule)
        why = f"requires one token per step, which order={sample.order!r} with "
        why += f"schedule={sample.schedule!r} does not guarantee"
        is_single, remedy = is_quota and sample.schedule == "linear", "use order='left_to_right'"
        require(is_single, "structure", UNSET, why, remedy, "order")
        if holes.size:
            needed = steps_needed(holes, sample.block_length, holes[0])
            why = f"is less than the {needed} steps that a structure requires, one token per step"
            require(sample.steps >= needed, "steps", sample.steps, why, f"use steps={needed}")
    if not holes.size:
        return
    tokens = tokens[holes[0] :]
    if (tokens == mask_id).all():
        fewest = automaton.fewest_S[automaton.start]
        why, remedy = (
            f"requires at least {fewest} new tokens, but gen_length={tokens.size}",
            "raise it",
        )
        require(fewest <= tokens.size, "structure", UNSET, why, remedy, "gen_length")
        return
    states = np.arange(len(automaton.next_SC)) == automaton.start
    for token in tokens.tolist():
        states = automaton.after(states, None if token == mask_id else token)
    can_end = bool((states & automaton.is_final_S).any())
    require(can_end, "structure", UNSET, "cannot match the given text and its holes")


class Static(NamedTuple):
    """The static settings. Rows with the same static settings can run together."""

    table: RuleTable
    rules: tuple[Any, ...]
    is_guided: bool
    needs_host: bool
    is_traced: bool


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
    """

    tokens: np.ndarray
    sample: SamplingParams
    seed: int = 0
    is_draft: np.ndarray | None = None
    host_sampler: HostSampler | None = None
    read_back: bool = False
    capacity: int = 0
    trace: bool = False

    @property
    def room(self) -> int:
        """Maximum number of positions of the row."""
        return max(self.tokens.size, self.capacity)

    @property
    def needs_host(self) -> bool:
        """True if Python must read the row at every step."""
        return self.read_back or self.host_sampler is not None

    @property
    def static(self) -> Static:
        sample, table = self.sample, self.sample.table
        return Static(
            table=table,
            rules=table.static(sample),
            is_guided=sample.guidance > 0,
            needs_host=self.needs_host,
            is_traced=self.trace,
        )

    def is_open(self, mask_id: int) -> np.ndarray:
        """True at the holes and at the tokens of a draft."""
        is_hole = self.tokens == mask_id
        return is_hole if self.is_draft is None else is_hole | self.is_draft

    def __post_init__(self) -> None:
        why = "is outside [0, 2**32)"
        require(0 <= self.seed < 2**32, "seed", self.seed, why, "use a seed in this range")
        shape, is_row = self.tokens.shape, self.tokens.ndim == 1 and self.tokens.size > 0
        require(is_row, "tokens", UNSET, f"have shape {shape}", "pass one non-empty row")
        if self.host_sampler is not None and not callable(self.host_sampler):
            raise ValueError(
                f"host_sampler={shown(self.host_sampler)} is not callable; pass a function that "
                f"takes Candidates and returns one of their ids"
            )
        for name in ("read_back", "trace"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "is not a bool", "use True or False")
        if self.trace and self.needs_host:
            why = "is not supported with host samplers and read-back"
            raise SettingError("trace", True, why, "remove them, or use trace=False")


def columns(requests: Sequence[Request], facts: ModelFacts) -> tuple[RowParams, Rules]:
    """Returns the parameters of requests with the same static settings, one row per request.

    The parameters are host arrays, which are passed directly to compiled functions. Separate
    transfers to the device would take most of the time needed to refill a slot.

    A row ends at its EOS, because tokens after EOS would be discarded. A row with
    edits goes on, because edits can still move EOS.
    """
    samples = [request.sample for request in requests]
    rows = RowParams.columns(samples, facts)
    rows = replace(
        rows,
        stops_at_eos_B=~np.array([sample.edits for sample in samples]),
        seed_B=np.array([request.seed for request in requests], np.uint32),
        capacity_B=np.array([request.capacity for request in requests], np.int32),
    )
    return rows, samples[0].table.columns(samples, facts)


def chain_shortener(requests: Sequence[Request]) -> Callable[[Request], Request]:
    """Returns a function that removes the parts of a chain that none of the `requests` with the
    same chain uses. A request that uses another part keeps its whole chain.

    Unused parts have no effect, and a shorter chain compiles faster. Unused transforms that read
    ids after a truncation to a few candidates are kept. Without them, the rest of the chain would
    process only those candidates and draw other tokens, so a row would depend on the other rows of
    its batch.
    """
    used: dict[Any, set[str]] = {}
    for sample in {id(request.sample): request.sample for request in requests}.values():
        used.setdefault((sample.table, sample.chain), set()).update(sample.table.in_use(sample))
    for (table, chain), names in used.items():
        is_cut = False
        for name in chain:
            cls = table.transforms[name]
            if is_cut and not issubclass(cls, Pointwise):
                names.add(name)
            is_cut |= cls is TopK
    # Requests that share a settings object also share the shortened one.
    shorter = WeakKeyDictionary[SamplingParams, SamplingParams]()

    def shorten(request: Request) -> Request:
        sample = request.sample
        if sample not in shorter:
            names, whole = used.get((sample.table, sample.chain), ()), {*sample.chain}
            is_known = not (whole.difference(names) & {*sample.table.in_use(sample)})
            chain = [name for name in sample.chain if name in (names if is_known else whole)]
            shorter[sample] = replace(sample, chain=tuple(chain))
        return replace(request, sample=shorter[sample])

    return shorten


def only_chains_in_use(requests: Sequence[Request]) -> list[Request]:
    """Removes the unused parts from the chains of the requests; see `chain_shortener`."""
    return [*map(chain_shortener(requests), requests)]


def make_requests(
    model: Model,
    prompt: str | Mapping[str, Any],
    common: Mapping[str, Any],
    first: int = 0,
    num_samples: int = 1,
    known: dict[Any, SamplingParams] | None = None,
) -> list[Request]:
    """Returns the requests for one prompt. `first` is added to the seed unless the prompt has its
    own seed.

    `known` caches resolved settings for other prompts with the same `model` and `common`, but for
    those with a structure.
    """
    if not isinstance(prompt, str | Mapping):
        raise SettingError("prompt", prompt, "is neither a string nor a mapping", "pass a string")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    if "trace" in own:
        raise SettingError("trace", own["trace"], "applies to all rows", "pass it to the call")
    asked = {"seed": 0, "max_length": None, "trace": False} | {**common, **own}
    text = {name: asked[name] for name in PROMPT_KEYS if name in asked}
    is_without = all(text.get(name) is None for name in ("template", "tokens"))
    if model.first_ids and is_without and text.get("prompt") in (None, ""):
        text |= {"prompt": None, "tokens": model.first_ids}
    seed = _integer("seed", asked["seed"]) + (0 if "seed" in own else first)
    room, trace = room_of(model, asked["max_length"]), asked["trace"]
    host = {name: asked[name] for name in _HOST if name in asked}
    layers = [{k: v for k, v in x.items() if k not in _NOT_SETTINGS} for x in (common, own)]
    table, settings = given_settings(*layers)
    known, key = {} if known is None else known, None
    if all(type(x) in (bool, int, float, str, type(None)) for x in layers[1].values()):
        # `repr` distinguishes 1, 1.0 and True, which are equal.
        needs = host.get("host_sampler") is not None, bool(host.get("read_back"))
        key = needs, repr(sorted(layers[1].items()))
    if len(known) > _MOST_KNOWN:
        known.clear()
    sample = known.get(key)
    if sample is None:
        sample = _resolved(model, table, settings, host)
        # An automaton takes up to 16 MiB, and `Structures` caches them already.
        if key is not None and not sample.structure:
            known[key] = sample
    tokens, is_draft = make_canvas(
        model.tokenizer,
        text,
        gen_length=sample.gen_length,
        room=room,
        prefix_ids=model.prefix_ids,
    )
    # The first step of a draft only reads it, unless the row rewrites tokens at every step.
    is_once = sample.resample or sample.edits or sample.renoises or sample.is_noise
    is_refined = sample.refines and (is_once or sample.steps > 1)
    why = "requires remasking, resampling, re-noising or edits, but none of them is enabled"
    remedy = "for example, use remask=scheduled, schedule=all and steps=8"
    require(is_draft is None or is_refined, "draft", UNSET, why, remedy)
    capacity = room if sample.edits else 0
    request = Request(tokens, sample, seed, is_draft, **host, capacity=capacity, trace=trace)
    if trace:
        sample.table.check_trace(sample)
    check_canvas(request, model.facts, mask_id=model.tokenizer.mask_id)
    return [replace(request, seed=seed + index) for index in range(num_samples)]


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
        why = "has no known type"
        raise SettingError("response_format", UNSET, why, f"use one of {', '.join(_FORMATS)}")
    for name in [k for k, v in form.items() if v is not None and k not in ("type", kind)]:
        why = f"of type {kind} has {name[:60]!r}"
        raise SettingError("response_format", UNSET, why, "remove it")
    value: Any = form.get(kind)
    if kind == "regex":
        require(isinstance(value, str), "response_format", UNSET, "lacks regex, a string", "add it")
    if kind in ("text", "regex"):
        return value or None if kind == "regex" else None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        schema = value.get("schema") if isinstance(value, Mapping) else None
    why = 'lacks "schema" in json_schema'
    require(isinstance(schema, Mapping), "response_format", UNSET, why, "add it")
    return regex_of_schema(schema)


def structured(model: Model, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the own settings of a request with a structure, and the defaults that it needs, for
    settings that neither `own` nor `common` gives.
    """
    table = with_rules(common.get("rules"))
    settings = layered(common, own, table=table)
    length = settings.get("gen_length") or settings.get("max_length") or model.max_length
    if type(length) is not int:
        return dict(own)  # its own check refuses the length
    for name in settings.keys() & {"fill", "block_length"}:
        table.settings[name].checked(settings[name])
    fill = table.fill.get(settings.get("fill", model.sample.fill))
    needed = {"order": "random_filled", "schedule": "linear", "ignore_eos": False}
    if fill is None or not issubclass(fill, Constrained):
        block = settings.get("block_length", model.sample.block_length)
        block = block or model.network.block_length
        steps = (length // block + 2) * block if block else length
        needed |= {"order": "left_to_right", "steps": steps}
    needed = {name: value for name, value in needed.items() if name not in common}
    return needed | dict(own)


def settings_of_call(model: Model, settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the settings of the first row of a call."""
    given = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    return _resolved(model, *given_settings(given), settings)


def _resolved(
    model: Model, table: RuleTable, given: Mapping[str, Any], host: Mapping[str, Any]
) -> SamplingParams:
    """Returns the settings of a row over the model's recommendations, checked against the model.

    `host` contains ``host_sampler`` and ``read_back``, if they are given. A host sampler draws the
    tokens itself, so a recommended fill yields to parallel. Read-back changes no token.

    ``fill="auto"`` becomes waves, the even positions of each before the odd ones, for a model of
    masked noise with a trained sampler head, and parallel for other models. At both measured sizes
    and every number of steps, these waves gave as good texts as plain ones or better
    (benchmarks/results/sampler_head.md). The order is not replaced: ``random_filled`` was better
    for 1.6 million parameters and worse for 56 million, so a model recommends it by its own
    measurement.
    """
    is_hosted, is_read = host.get("host_sampler") is not None, bool(host.get("read_back"))
    advised = {name: getattr(model.sample, name) for name in model.sample.table.settings}
    more = (name for name in table.transforms if name not in BUILT_IN.transforms)
    advised["chain"] += tuple(name for name in more if name not in advised["chain"])
    if not model.process.is_masked and advised["order"] == "random":
        advised["order"] = "posterior"
    if given.get("fill", advised["fill"]) == AUTO:
        given = {name: value for name, value in given.items() if name != "fill"}
        in_waves = model.fills_in_waves and not is_hosted
        advised["fill"] = "wavefront" if in_waves else "parallel"
        advised |= {"sampler_even_odd": True} if in_waves else {}
    if is_hosted:
        advised["fill"] = "parallel"
    unit = model.network.block_length or model.network.canvas_length
    length = given.get("block_length", advised["block_length"])
    if unit and type(length) is int and length == 0:
        given = {**given, "block_length": unit}
    sample = resolve(advised, given, table=table)
    used = table.named("fill", sample)
    why = "draws tokens together, which host samplers cannot replace"
    is_fine = not is_hosted or used is Parallel
    require(is_fine, "fill", sample.fill, why, "use fill='parallel'")
    why = "draws tokens together, so that read-back cannot give the candidates of a token"
    is_fine = not is_read or used.logits is not FillRule.logits
    require(is_fine, "fill", sample.fill, why, "remove read_back, or use fill='parallel'")
    source, why = getattr(sample, "confidence_of", "clean"), "requires state of the device"
    is_fine = not is_hosted or source == "clean"
    require(is_fine, "confidence_of", source, why, "use confidence_of='clean'")
    is_fine = not (table.steps_itself(sample) and (is_hosted or is_read))
    why = "writes tokens on the device"
    require(is_fine, "order", sample.order, why, "remove host_sampler and read_back")
    if isinstance(sample.structure, str) and sample.structure:
        sample = replace(sample, structure=model.structures.automaton(sample.structure))
    check_settings(model, sample)
    return sample


def require_count(name: str, value: Any) -> None:
    """Raises SettingError unless the value is an integer of at least 1."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_count, name, value, "must be an integer of at least 1")


def _integer(name: str, value: Any) -> int:
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    require(is_integer, name, value, "is not an integer", "use an integer")
    return int(value)


def room_of(model: Model, max_length: Any) -> int:
    """Returns the maximum number of tokens of a row."""
    if max_length is None:
        return model.max_length
    length = _integer("max_length", max_length)
    why = f"must be at least 1 and at most {_LONGEST}"
    require(1 <= length <= _LONGEST, "max_length", max_length, why)
    return length
