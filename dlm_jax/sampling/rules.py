"""The kinds of rules that fill the slots of a step, by name, and their packing from settings."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from dlm_jax.sampling.cache import CACHE_RULES, CacheRule
from dlm_jax.sampling.commit import COMMIT_RULES, CommitRule
from dlm_jax.sampling.draw import METHODS
from dlm_jax.sampling.edits import EDIT_RULES, EditRule
from dlm_jax.sampling.facts import ModelFacts
from dlm_jax.sampling.propose import FILL_RULES, FillRule
from dlm_jax.sampling.remask import REMASK_RULES, RemaskRule, Renoise
from dlm_jax.sampling.row import ROW_SETTINGS
from dlm_jax.sampling.transforms import TRANSFORMS, Chain, LogitBias, LogitTransform, chain
from dlm_jax.sampling.transforms.structure import Structure
from dlm_jax.settings import Rule, Setting, brief, nearest, on_device, static_values


class Rules(NamedTuple):
    """What fills the slots of a step, with the parameters of each row.

    Attributes:
      chain: logit transforms.
      commit: commit rule.
      fill: how candidates are drawn.
      remask: remask rule; None for none.
      edit: what is inserted and deleted; None for nothing.
      renoise: what is overwritten before each forward; None for nothing.
      cache: which positions a forward computes, beside what is kept; None for all.
    """

    chain: Chain
    commit: CommitRule
    fill: FillRule
    remask: RemaskRule | None = None
    edit: EditRule | None = None
    renoise: Renoise | None = None
    cache: CacheRule | None = None

    def refines(self, resamples_B: jax.Array) -> jax.Array:
        """True ``[B]`` for rows that change tokens which are there, not holes alone."""
        for slot in (self.remask, self.edit, self.renoise):
            if slot is not None:
                resamples_B = resamples_B | slot.is_active()
        return resamples_B

    def goes_on(self, resamples_B: jax.Array) -> jax.Array:
        """True ``[B]`` where a block without holes waits for its last step."""
        on_B = self._replace(remask=None).refines(resamples_B)
        return on_B if self.remask is None else on_B | self.remask.goes_on()


AUTO = "auto"
"""The fill that follows from the model's heads."""
IGNORE_EOS = Setting("ignore_eos", False, "bans every id that ends a generation")
EDIT = Setting("edit", False, "insert and delete tokens between the steps; lengths change")
DRAW = Setting(
    "draw", "inverse_cdf",
    "how a token is drawn: inverse_cdf (the faster) or gumbel (as others do)",
    choices={name: name for name in METHODS},
)  # fmt: skip
GEN_LENGTH = Setting(
    "gen_length", 0, "new tokens of one sample; 0: as many as the canvas has room for", low=0
)


@dataclass(frozen=True, eq=False)
class RuleTable:
    """Rules by name, one table for each kind; every setting of a request follows from it."""

    transforms: Mapping[str, tuple[type[LogitTransform], ...]]
    commit: Mapping[str, type[CommitRule]]
    fill: Mapping[str, type[FillRule]]
    remask: Mapping[str, type[RemaskRule]]
    edit: Mapping[str, type[EditRule]]
    cache: Mapping[str, type[CacheRule]]

    def selectors(self) -> tuple[Setting, ...]:
        """The settings that choose rules by name."""
        return (
            _choice("order", "random", self.commit,
                "which holes a step commits. A quota: low_confidence (the surest; LLaDA's default, "
                "which collapses to spaces and line ends when a small model begins on an empty "
                "canvas: docs/design.md), entropy, margin, random, left_to_right, random_filled "
                "(random, out of candidates for all holes). As many as are sure enough: threshold, "
                "factor, entropy_bound; joint_threshold, which rewrites what it wrote, too. As the "
                "noise process does: ancestral"),
            _choice("fill", AUTO, (AUTO, *self.fill),
                "how a step's candidates are drawn: each blind to the others (parallel), in waves "
                "by the sampler head, which sees its neighbours (wavefront), or as a draft that a "
                "block-causal model verifies token by token (speculative); auto is wavefront for "
                "a model with a trained sampler head, with order=random_filled unless an order is "
                "given, and parallel for any other"),
            _choice("remask", "none", ("none", *self.remask),
                "what becomes a hole again after a step: none; scheduled (a share of the tokens "
                "most likely wrong), scheduled_threshold (all above a wrongness); remdm_cap, "
                "remdm_rescale, remdm_conf"),
            _choice("edit_scoring", "uncertainty", self.edit,
                "edit: what speaks for an insertion: uncertainty (of the tokens beside the gap), "
                "or lead (of the likeliest token over the one behind the gap), for models trained "
                "to proofread; or likelihood: insertions, deletions and replacements are tried, "
                "and the one that counts most is made"),
            _choice("cache", "none", ("none", *self.cache),
                "keys and values that are kept from step to step: none; exact (of finished blocks, "
                "causal and block-causal models); prefix, dual (of all before the block, or before "
                "and behind it: approximate, bidirectional models)"),
            Setting("chain", tuple(self.transforms), "logit transforms, in the order they run",
                parse=self._parsed_chain, hint=tuple[str, ...]),
        )  # fmt: skip

    def rules(self) -> tuple[type[Rule], ...]:
        """All rules."""
        transforms = (cls for classes in self.transforms.values() for cls in classes)
        named = (self.commit, self.fill, self.remask, self.edit, self.cache)
        return (
            *transforms,
            Structure,
            *(cls for table in named for cls in table.values()),
            Renoise,
        )

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """All settings of a request by name.

        Raises:
          ValueError: two rules declare one differently.
        """
        found: dict[str, Setting] = {}
        own = (s for cls in self.rules() for s in cls.settings())
        for setting in (GEN_LENGTH, *ROW_SETTINGS, *self.selectors(), DRAW, EDIT, *own, IGNORE_EOS):
            if found.setdefault(setting.name, setting) is not setting:
                raise ValueError(
                    f"setting {setting.name!r} is declared twice, differently; share one Setting, "
                    "or give one of them another name"
                )
        return found

    def fills(self, row: Any) -> type[FillRule]:
        """The fill of a row with these settings; `AUTO` is the parallel one of the table."""
        return self.fill["parallel" if row.fill == AUTO else row.fill]

    def remasks(self, row: Any) -> type[RemaskRule] | None:
        """The remask rule that a row with these settings names, if any."""
        return None if row.remask == "none" else self.remask[row.remask]

    def edits(self, row: Any) -> type[EditRule] | None:
        """The edit rule of a row with these settings, if its length may change."""
        edit = self.edit[row.edit_scoring]
        return edit if edit.is_used(row) else None

    def renoises(self, row: Any) -> type[Renoise] | None:
        """Re-noise, if a row with these settings asks for it."""
        return Renoise if Renoise.is_used(row) else None

    def structures(self, row: Any) -> type[Structure] | None:
        """What holds a row with these settings to a language, if it asks for one."""
        return Structure if Structure.is_used(row) else None

    def caches(self, row: Any) -> type[CacheRule] | None:
        """The cache rule that a row with these settings names, if any."""
        return None if row.cache == "none" else self.cache[row.cache]

    def of(self, row: Any) -> tuple[type[Rule], ...]:
        """The rules that a row with these settings names, but for the transforms of its chain."""
        found = (self.commit[row.order], self.fills(row), self.remasks(row), self.edits(row),
                 self.renoises(row), self.caches(row), self.structures(row))  # fmt: skip
        return tuple(cls for cls in found if cls is not None)

    def checks(self, row: Any) -> tuple[type[Rule], ...]:
        """The rules whose `Rule.check` a row with these settings must pass."""
        chained = (cls for name in row.chain for cls in self.transforms[name])
        return (*self.of(row), *chained)

    def static(self, row: Any) -> tuple[Any, ...]:
        """What is compiled in for a row with these settings: equal rows may share a program."""
        named = tuple((cls, static_values(cls, row)) for cls in self.of(row))
        transforms = (cls for name in row.chain for cls in self.transforms[name])
        kept = tuple((cls, static_values(cls, row)) for cls in transforms)
        return (named, row.chain, kept, row.draw, row.guidance > 0)

    def pack(self, rows: Sequence[Any], facts: ModelFacts) -> Rules:
        """What `columns` makes, on the device."""
        return on_device(self.columns(rows, facts))

    def columns(self, rows: Sequence[Any], facts: ModelFacts) -> Rules:
        """The rules of rows that agree in what is static, with parameters in arrays of the host."""
        first = rows[0]
        optional = (
            self.remasks(first), self.edits(first), self.renoises(first), self.caches(first)
        )  # fmt: skip
        return Rules(
            self.chain_columns(rows, facts),
            self.commit[first.order].columns(rows, facts),
            self.fills(first).columns(rows, facts),
            *(None if cls is None else cls.columns(rows, facts) for cls in optional),
        )

    def pack_chain(self, rows: Sequence[Any], facts: ModelFacts) -> Chain:
        """What `chain_columns` makes, on the device."""
        return on_device(self.chain_columns(rows, facts))

    def chain_columns(self, rows: Sequence[Any], facts: ModelFacts) -> Chain:
        """The chain of rows that name the same transforms, behind a ban of ``facts.banned_ids``.

        Bans (also those of ``ignore_eos`` and of a bias of -inf) come first whatever the order, so
        that no truncation can leave a row with banned candidates only. An id of ``banned_ids``
        that also ends generation stays allowed, unless the row ignores it. What does not fit
        the row's structure is left out next.

        Raises:
          ValueError: what `check` refuses.
        """
        bans = [self.check_chain(row, facts) for row in rows]
        pairs = [[(token, -math.inf) for token in ban] for ban in bans]
        parts: list[tuple[str, Any]] = [("bans", LogitBias.of_pairs(pairs, facts.vocab_size))]
        if self.structures(rows[0]) is not None:
            parts.append(("structure", Structure.columns(rows, facts)))
        for name in rows[0].chain:
            parts.extend((name, cls.columns(rows, facts)) for cls in self.transforms[name])
        return chain(*(t for _, t in parts), names=tuple(name for name, _ in parts))

    def in_use(self, row: Any) -> tuple[str, ...]:
        """The names of a row's chain that change anything.

        For programs that run one kind of row: a shorter chain compiles faster and, neutral
        transforms being the identity, gives the same tokens bit for bit.
        """
        return tuple(
            name for name in row.chain if any(t.is_used(row) for t in self.transforms[name])
        )

    def check_chain(self, row: Any, facts: ModelFacts) -> list[int]:
        """Ids that a row may not propose.

        Raises:
          ValueError: an id outside the vocabulary, a row that may draw nothing, or a setting whose
            transform the chain lacks.
        """
        self._check_complete(row)
        eos = frozenset(facts.eos_ids)
        banned = frozenset(facts.banned_ids) - eos
        biases: tuple[tuple[int, float], ...] = tuple(row.logit_bias)
        for what, ids in (
            ("banned_ids", banned), ("eos_ids", eos), ("logit_bias", [id_ for id_, _ in biases]),
            ("dry_breakers", row.dry_breakers),
        ):  # fmt: skip
            _check_ids(what, ids, facts.vocab_size)
        if not eos and row.ignore_eos:
            warnings.warn("ignore_eos is off: the vocabulary has no EOS token", stacklevel=3)
        ban = banned | {token for token, bias in biases if bias == -math.inf}
        ban |= eos if row.ignore_eos else frozenset()
        if len(ban) >= facts.vocab_size:
            raise ValueError(f"all {facts.vocab_size} tokens are banned; allow at least one")
        return sorted(ban)

    def _check_complete(self, row: Any) -> None:
        """Raises ValueError for a setting whose transform the chain lacks."""
        for name, classes in self.transforms.items():
            if name in row.chain:
                continue
            for setting in (s for cls in classes for s in cls.settings() if s.activates):
                value = getattr(row, setting.name)
                is_asked = value != setting.default and any(cls.is_used(row) for cls in classes)
                if is_asked:
                    raise ValueError(
                        f"{setting.name}={value!r} needs {name!r}, which the chain lacks; add it "
                        f"to the chain or leave {setting.name} at its default"
                    )

    def _parsed_chain(self, names: Any) -> tuple[str, ...]:
        is_list = isinstance(names, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in names):
            raise ValueError(f"chain={brief(names)} is not a list of names; use ['top_k'], say")
        for name in names:
            if name not in self.transforms:
                known = tuple(self.transforms)
                raise ValueError(
                    f"chain has unknown name {brief(name)}; {nearest(name[:60], known)}"
                )
            if list(names).count(name) > 1:
                raise ValueError(
                    f"chain has {name!r} {list(names).count(name)} times; name it once"
                )
        return tuple(names)


BUILT_IN = RuleTable(TRANSFORMS, COMMIT_RULES, FILL_RULES, REMASK_RULES, EDIT_RULES, CACHE_RULES)
"""The rules of this package."""


def _choice(name: str, default: str, known: Iterable[str], help: str) -> Setting:
    return Setting(name, default, help, choices={choice: choice for choice in known})


def _check_ids(what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{what} names id {token}, outside the vocabulary of {vocab_size}; "
                f"use 0 to {vocab_size - 1}"
            )
