"""The rules of a step, with their slots and tables, and the model properties that rules read."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

from dlm_jax.sampling.commit import COMMIT_RULES, CommitRule
from dlm_jax.sampling.commit.commit_rule import OrderRule, attention_blocks, head_of
from dlm_jax.sampling.commit.orders import NoiseSchedule
from dlm_jax.sampling.edits import EDIT_RULES, EditRule
from dlm_jax.sampling.kv_cache import KV_CACHES, Exact, KVCache
from dlm_jax.sampling.noise import NOISE_RULES, NoiseProcess, NoiseRule
from dlm_jax.sampling.program import ROW_SETTINGS
from dlm_jax.sampling.propose import FILL_RULES, Constrained, FillRule
from dlm_jax.sampling.remask import REMASK_RULES, RemaskRule, Renoise
from dlm_jax.sampling.transforms import TRANSFORMS, Chain, LogitBias, LogitTransform, chain
from dlm_jax.sampling.transforms.structure import Structure
from dlm_jax.sampling.transforms.transform import refuse_memory
from dlm_jax.settings import (
    UNSET,
    Rule,
    Setting,
    SettingError,
    brief,
    check_ids,
    nearest,
    on_device,
    require,
    require_head,
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Properties of a model that rules read through fields declared with `fact`.

    Attributes:
      vocab_size: number of logits.
      banned_ids: ids that are never proposed: MASK, PAD, BOS and the padding of the vocabulary.
      eos_ids: ids that end a generation. If empty, ``ignore_eos`` causes a warning and is disabled.
      space_id: the id of the space; -1 for a vocabulary without one.
      noise: noise schedule used in training; None if there is none.
      heads: names of the model's heads, as in `Network.heads`.
      has_cache: True if the network supports cached keys and values.
      shows_maps: True if the network returns its attention maps.
      is_causal: True if the model is autoregressive.
      block_length: number of positions per block in a block-causal model; 0 for other models.
      process: forward process used in training; None if unknown.
      canvas_length: number of positions in a canvas of a network with canvases; 0 otherwise.
      predicts_first: True if the network predicts the first token of a row.
    """

    vocab_size: int
    banned_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    space_id: int = -1
    noise: NoiseSchedule | None = None
    heads: tuple[str, ...] = ()
    has_cache: bool = False
    is_causal: bool = False
    block_length: int = 0
    process: NoiseProcess | None = None
    canvas_length: int = 0
    shows_maps: bool = False
    predicts_first: bool = True


class Rules(NamedTuple):
    """The rules of a step, by slot, with the parameters of each row.

    Attributes:
      chain: logit transforms.
      commit: commit rule, or the noise rule of a step of noise.
      fill: fill rule, which draws candidates.
      remask: remask rule, if any.
      edit: edit rule, if any.
      renoise: re-noise before each forward pass, if any.
      cache: KV cache, if any. Without one, each forward pass computes all positions.
    """

    chain: Chain
    commit: CommitRule | NoiseRule
    fill: FillRule
    remask: RemaskRule | None = None
    edit: EditRule | None = None
    renoise: Renoise | None = None
    cache: KVCache | None = None


AUTO = "auto"
"""Value of ``fill`` that selects a fill according to the model's heads."""
IGNORE_EOS = Setting("ignore_eos", False, "ban every id that ends a generation")
EDIT = Setting(
    "edit", False, "insert and delete tokens between steps, which changes the lengths of rows"
)
GEN_LENGTH = Setting(
    "gen_length",
    0,
    "number of new tokens per sample; 0 fills all remaining space",
    low=0,
    aliases=("max_tokens", "n_predict"),
)


class Slot(NamedTuple):
    """A slot of the step.

    Attributes:
      base: base class of the rules.
      selector: setting that selects the rule; empty if there is a single rule.
      by_use: True if the slot is empty for rows that do not use the rule.
    """

    base: type[Rule]
    selector: str = ""
    by_use: bool = False


SLOTS: Mapping[str, Slot] = {
    "transforms": Slot(LogitTransform, "chain"),
    "structure": Slot(Structure, by_use=True),
    "commit": Slot(OrderRule, "order"),
    "fill": Slot(FillRule, "fill"),
    "remask": Slot(RemaskRule, "remask"),
    "edit": Slot(EditRule, "edit_scoring", by_use=True),
    "cache": Slot(KVCache, "cache"),
    "renoise": Slot(Renoise, by_use=True),
}
"""The slots of a step, keyed by the names of their tables. `Rules` has a field for each slot except
transforms."""
_TRACED = (
    ("commit", CommitRule.log_prob),
    ("fill", FillRule.logits),
    ("remask", RemaskRule.log_prob),
)
"""What the rule in a slot must define for a trace."""


@dataclass(frozen=True, eq=False)
class RuleTable:
    """Rules keyed by name, with one table per slot. The rules define all settings of a request."""

    transforms: Mapping[str, type[LogitTransform]]
    commit: Mapping[str, type[OrderRule]]
    fill: Mapping[str, type[FillRule]]
    remask: Mapping[str, type[RemaskRule]]
    edit: Mapping[str, type[EditRule]]
    cache: Mapping[str, type[KVCache]]
    renoise: Mapping[str, type[Renoise]]
    structure: Mapping[str, type[Structure]]

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """All settings of a request, keyed by name.

        Raises:
          ValueError: if two rules declare the same setting with different definitions.
        """
        auto = (
            "wavefront for a model of masked noise with a trained sampler head, with "
            "sampler_even_odd unless that is given; parallel for other models"
        )
        off = {"none": ""}
        order, fill = "rule for the holes that a step commits", "rule for the candidates of a step"
        remask = "rule for the tokens that become holes after a step"
        edit, cache = "rule for insertions and deletions", "keys and values cached between steps"
        chosen = (
            _choice("order", "random", order, self.commit, aliases=("remasking", "alg")),
            _choice("fill", AUTO, fill, self.fill, {AUTO: auto}),
            _choice("remask", "none", remask, self.remask, off),
            _choice("edit_scoring", "uncertainty", f"edit: {edit}", self.edit),
            _choice("cache", "none", cache, self.cache, off),
            Setting(
                "chain",
                tuple(self.transforms),
                "logit transforms in order of application",
                parse=self._parse_chain,
                hint=tuple[str, ...],
                aliases=("samplers",),
            ),
        )
        rules = (cls for slot in SLOTS for cls in getattr(self, slot).values())
        declared = (setting for cls in rules for setting in cls.settings())
        settings: dict[str, Setting] = {}
        for setting in (GEN_LENGTH, *ROW_SETTINGS, *chosen, EDIT, *declared, IGNORE_EOS):
            if settings.setdefault(setting.name, setting) is not setting:
                raise ValueError(
                    f"setting {setting.name!r} is declared twice with different definitions; "
                    f"share one Setting, or rename one"
                )
        return settings

    @functools.cached_property
    def request_settings(self) -> dict[str, Setting]:
        """The settings that flags, keys and fields of requests can set."""
        return {name: s for name, s in self.settings.items() if not s.is_preset}

    def name_of(self, slot: str, cls: type[Rule]) -> str:
        """The name of a rule; empty if it is not in the table."""
        return next((name for name, known in getattr(self, slot).items() if known is cls), "")

    def named(self, slot: str, row: Any) -> Any:
        """The rule class in a slot for a row with these settings, or None.

        `AUTO` resolves to the parallel fill, and a constrained fill of a row without structure to
        its `Constrained.otherwise`. The structure slot is empty if the fill enforces the structure,
        and the edit slot without ``edit``.
        """
        if slot == "edit" and not row.edit:
            return None
        known, (base, selector, by_use) = getattr(self, slot), SLOTS[slot]
        name = getattr(row, selector) if selector else next(iter(known))
        cls = known.get("parallel" if name == AUTO else name)
        if base is FillRule and issubclass(cls, Constrained) and row.structure == "":
            return known[cls.otherwise]
        if base is Structure and issubclass(self.named("fill", row), Constrained):
            return None
        return None if cls is None or (by_use and not cls.is_used(row)) else cls

    def chained(self, row: Any) -> tuple[type[LogitTransform], ...]:
        """The transforms in a row's chain."""
        return tuple(self.transforms[name] for name in row.chain)

    def of(self, row: Any) -> tuple[type[Rule], ...]:
        """All rules of a row with these settings."""
        rules = (self.named(slot, row) for slot in (*Rules._fields[1:], "structure"))
        return (*(cls for cls in rules if cls is not None), *self.chained(row))

    def check(self, row: Any) -> None:
        """Raises ValueError for contradictory settings of a row."""
        why = f"moves tokens, which cache={row.cache!r} does not support"
        require(row.cache == "none" or not row.edits, "edit", True, why, "use cache='none'")
        why = f"computes no attention maps, which order={row.order!r} requires"
        is_fine = row.cache == "none" or not attention_blocks(self.commit[row.order].needs)
        require(is_fine, "cache", row.cache, why, "use cache='none'")
        for rule in self.of(row):
            rule.check(row)

    def check_model(self, row: Any, facts: ModelFacts) -> None:
        """Raises ValueError for settings of a row that a model does not support: heads, attention
        maps or a cache that it lacks, and what the rules and the chain refuse.
        """
        for slot, instead in (("commit", ""), ("fill", "use fill='parallel'"), ("remask", "")):
            rule = self.named(slot, row)
            if rule is not None and (head := head_of(rule.needs)):
                require_head(head, facts, SLOTS[slot].selector, rule.name, instead)
        why = "requires attention maps, which this network does not return"
        is_fine = facts.shows_maps or not attention_blocks(self.commit[row.order].needs)
        require(is_fine, "order", row.order, why, "set Network.inside, or use another rule")
        why = "requires a network that supports a cache (Network.cached)"
        is_fine = facts.has_cache or row.cache == "none"
        require(is_fine, "cache", row.cache, why, "use cache='none'")
        for rule in self.of(row):
            rule.check_model(row, facts)
        self.check_chain(row, facts)

    def steps_itself(self, row: Any) -> bool:
        """Whether a row takes another step than that of MASK, which a host cannot join."""
        order = self.commit[row.order]
        return issubclass(order, NoiseRule) or hasattr(order, "step")

    def check_trace(self, row: Any) -> None:
        """Raises ValueError for settings of a row without a trace. A replay computes exact values,
        without a cache, of draws whose distributions the rules define.
        """
        is_exact = row.cache == "none" or issubclass(self.cache[row.cache], Exact)
        for is_fine, name, why in (
            (not self.steps_itself(row), "order", "it also writes tokens that are not candidates"),
            (not row.edits, "edit", "edits are not random draws"),
            (not row.renoises, "renoise_start", "re-noise writes tokens that are not drawn"),
            (is_exact, "cache", "a replay computes exact values"),
        ):
            value = getattr(row, name)
            require(is_fine, name, value, f"has no trace: {why}", "leave it at its default")
        for slot, undefined in _TRACED:
            rule, name = self.named(slot, row), undefined.__name__
            is_defined = rule is None or getattr(rule, name) is not undefined
            selector, why = SLOTS[slot].selector, f"has no trace: it does not define {name}()"
            value = getattr(row, selector)
            require(is_defined, selector, value, why, "define it, or use another rule")
        refuse_memory(row, "has no trace, because it depends on the parameters")

    def static(self, row: Any) -> tuple[Any, ...]:
        """The static settings of the rules of a row."""
        return (row.chain, *((cls, cls.static_values(row)) for cls in self.of(row)))

    def pack(self, rows: Sequence[Any], facts: ModelFacts) -> Rules:
        """The result of `columns` on the device."""
        return on_device(self.columns(rows, facts))

    def columns(self, rows: Sequence[Any], facts: ModelFacts) -> Rules:
        """The rules for rows with the same static settings, with parameters in host arrays."""
        classes = (self.named(slot, rows[0]) for slot in Rules._fields[1:])
        rules: list[Any] = [None if cls is None else cls.columns(rows, facts) for cls in classes]
        return Rules(self.chain_columns(rows, facts), *rules)

    def chain_columns(self, rows: Sequence[Any], facts: ModelFacts) -> Chain:
        """The chain for rows with the same transforms, starting with a ban on ``facts.banned_ids``.

        Bans (including ``ignore_eos`` and biases of -inf) always come first, so that no truncation
        leaves only banned candidates in a row. An id in ``banned_ids`` that also ends a generation
        remains allowed unless the row ignores EOS. Candidates that violate the row's structure are
        removed next. The rows must have passed `check_chain`.
        """
        pairs = [[(token, -math.inf) for token in self.banned(row, facts)] for row in rows]
        first = self.named("structure", rows[0])
        classes = (*([first] if first else []), *self.chained(rows[0]))
        bans = LogitBias.of_pairs(pairs, facts.vocab_size)
        return chain(bans, *(cls.columns(rows, facts) for cls in classes))

    def in_use(self, row: Any) -> tuple[str, ...]:
        """The names of the non-neutral transforms in a row's chain.

        Programs whose requests are known in advance can omit the other transforms. The shorter
        chain compiles faster and gives exactly the same tokens, because neutral transforms are the
        identity.
        """
        return tuple(name for name in row.chain if self.transforms[name].is_used(row))

    def banned(self, row: Any, facts: ModelFacts) -> list[int]:
        """Ids that a row never proposes, in ascending order."""
        eos = frozenset(facts.eos_ids)
        ban = frozenset(facts.banned_ids) - eos
        ban |= {token for token, bias in row.logit_bias if bias == -math.inf}
        return sorted(ban | eos if row.ignore_eos else ban)

    def check_chain(self, row: Any, facts: ModelFacts) -> None:
        """Raises ValueError for a chain that a model with the given `facts` does not support.

        The chain is not supported if an id lies outside the vocabulary, if all ids are banned, or
        if a setting is given but its transform is missing from the chain.
        """
        for name in self.transforms.keys() - row.chain:
            for setting in self.transforms[name].settings():
                value = getattr(row, setting.name)
                if setting.activates and value != setting.default:
                    why = f"requires {name!r}, which the chain lacks"
                    remedy = f"add it to the chain, or set {setting.name}={setting.default!r}"
                    raise SettingError(setting.name, value, why, remedy)
        biased = [id_ for id_, _ in row.logit_bias]
        for what, ids in (
            ("banned_ids", frozenset(facts.banned_ids) - frozenset(facts.eos_ids)),
            ("eos_ids", facts.eos_ids),
            ("logit_bias", biased),
            ("dry_breakers", row.dry_breakers),
        ):
            check_ids(what, ids, facts.vocab_size)
        if not facts.eos_ids and row.ignore_eos:
            warnings.warn("ignore_eos is disabled: the vocabulary has no EOS token", stacklevel=3)
        if len(self.banned(row, facts)) >= facts.vocab_size:
            raise ValueError(f"all {facts.vocab_size} tokens are banned; allow at least one")

    def _parse_chain(self, names: Any) -> tuple[str, ...]:
        is_list = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
        require(is_list, "chain", names, "is not a list of names", "for example, use ['top_k']")
        for name in names:
            if name not in self.transforms:
                why = f"has unknown name {brief(name)}"
                raise SettingError("chain", UNSET, why, nearest(name[:60], tuple(self.transforms)))
            count = list(names).count(name)
            require(count == 1, "chain", UNSET, f"has {name!r} {count} times", "name it once")
        return tuple(names)


_NOT_SETTINGS = """
    batch_size checkpoint commit defaults draft edits every help host_sampler id infill inserts
    is_greedy is_noise max_candidates max_length model num_processes num_samples on_steps output
    process_id prompt prompts read_back refines remasks renoises report_chain rules seed table
    template tokens trace transforms version watch
"""
"""Names that requests, `SamplingParams` or ``sample.py`` already use."""

BUILT_IN = RuleTable(
    transforms=TRANSFORMS,
    commit={**COMMIT_RULES, **NOISE_RULES},
    fill=FILL_RULES,
    remask=REMASK_RULES,
    edit=EDIT_RULES,
    cache=KV_CACHES,
    renoise={Renoise.name: Renoise},
    structure={Structure.name: Structure},
)
"""The rules that this package provides."""


@functools.lru_cache(maxsize=64)
def _extended(classes: tuple[type[Rule], ...]) -> RuleTable:
    table = BUILT_IN
    for cls in classes:
        slot = _slot_of(cls)
        known: Mapping[str, Any] = getattr(table, slot)
        if known.get(cls.name, cls) is not cls or cls.name == "none":
            raise ValueError(
                f"rule {cls.__name__} has the name {cls.name!r}, which is already taken"
            )
        table = replace(table, **{slot: {**known, cls.name: cls}})
    # Every boolean setting also has a negated flag.
    opposites = {f"no_{name}" for name, s in table.settings.items() if s.kind is bool}
    aliases = {alias for s in BUILT_IN.settings.values() for alias in s.aliases}
    for name in table.settings.keys() - BUILT_IN.settings.keys():
        if name in {*_NOT_SETTINGS.split(), *opposites, *aliases} or not name.isidentifier():
            raise ValueError(f"a setting cannot have the name {name!r}; choose another")
    return table


def with_rules(rules: Any) -> RuleTable:
    """The built-in rules and those of `rules`, as in `classes_of`."""
    return _extended(tuple(dict.fromkeys(classes_of(rules))))


def classes_of(rules: Any) -> Sequence[type[Rule]]:
    """The rules that a module and its submodules define, or those of a list of classes and modules;
    none for None.
    """
    if rules is None:
        return ()
    if isinstance(rules, ModuleType):
        home, members = f"{rules.__name__}.", vars(rules).values()
        classes = [c for c in members if _is_rule(c) and f"{c.__module__}.".startswith(home)]
        if not classes:
            raise ValueError(f"rules={rules.__name__} defines no rule; see docs/own_rules.md")
        return classes
    if not isinstance(rules, list | tuple):
        remedy = "pass a list of classes or a module with classes"
        raise ValueError(f"rules is {shown_rule(rules)}; {remedy}")
    classes = []
    for cls in rules:
        if not isinstance(cls, ModuleType) and not _is_rule(cls):
            remedy = "pass modules, or classes decorated by dlm_jax.rule"
            raise ValueError(f"rules has {cls!r}, which is not a rule; {remedy}")
        classes += classes_of(cls) if isinstance(cls, ModuleType) else [cls]
    return classes


def base_name(base: type[Rule]) -> str:
    """The public name of the base class of a slot."""
    return "CommitRule or NoiseRule" if base is OrderRule else base.__name__


def shown_rule(value: Any) -> str:
    """A value given for a rule, for an error message; rules with arrays are shown by class."""
    if isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _slot_of(cls: type[Rule]) -> str:
    """The slot of a custom rule; ValueError if the rule lacks what the slot requires."""
    slots = {name: slot.base for name, slot in SLOTS.items() if slot.selector}
    slot = next((name for name, base in slots.items() if issubclass(cls, base)), None)
    if slot is None or not _is_rule(cls):
        remedy = "decorate it with dlm_jax.rule and subclass one of "
        remedy += ", ".join(map(base_name, slots.values()))
        raise ValueError(f"rule {cls.__name__} has no kind; {remedy}")
    for name in sorted(vars(cls)["__abstractmethods__"]):
        owner = next(c for c in cls.__mro__ if name in vars(c))
        raise ValueError(f"rule {cls.__name__} lacks {name}(), which {owner.__name__} requires")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    per_row = [f.metadata["setting"] for f in fields if "column" in f.metadata]
    if slot == "transforms":
        per_row = [setting for setting in per_row if setting.activates and not setting.is_list]
    is_default = cls.is_active is slots[slot].is_active
    if slot in ("transforms", "remask", "edit") and is_default and not per_row:
        raise ValueError(
            f"rule {cls.__name__} has no per-row setting that enables it; declare one, or define "
            "is_active() and is_used()"
        )
    return slot


def _is_rule(cls: Any) -> bool:
    """True for the classes that `dlm_jax.settings.rule` decorates."""
    return isinstance(cls, type) and issubclass(cls, Rule) and vars(cls).get("identity") is cls


def _choice(
    name: str,
    default: str,
    what: str,
    rules: Mapping[str, type[Rule]],
    others: Mapping[str, str] = {},
    aliases: tuple[str, ...] = (),
) -> Setting:
    """A setting that selects a rule. The help text describes each rule."""
    about = {**others, **{choice: vars(cls).get("about", "") for choice, cls in rules.items()}}
    help = "; ".join(f"{n} ({text})" if text else n for n, text in about.items())
    choices = {choice: choice for choice in about}
    return Setting(name, default, f"{what}: {help}", choices=choices, aliases=aliases)
