"""PC-Sampler: prefers early positions and penalises frequent tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, fact, most, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.rule_tools import (
    CONFIDENCE,
    SCHEDULE,
    Confident,
    Measure,
    Quota,
    QuotaRule,
    place_of_largest,
)
from dlm_jax.settings import SettingError, check_ids

_LEAST = 1e-10


def _shares(value: Any) -> tuple[tuple[int, float], ...]:
    """The pairs in a mapping or in a sequence of pairs."""
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        found = tuple((int(id_), float(share)) for id_, share in pairs)
    except (TypeError, ValueError, OverflowError):
        raise SettingError("common_ids", value, "is not a mapping", "use {12: 0.05}") from None
    if any(share < 0 for _, share in found) or not sum(share for _, share in found) <= 1:
        raise SettingError(
            "common_ids",
            value,
            "has a negative frequency, or frequencies with a sum above 1",
            "use {}",
        )
    if len({id_ for id_, _ in found}) < len(found):
        raise SettingError("common_ids", value, "names an id twice", "add up its shares")
    return found


@rule
class PositionAware(Confident):
    """Commits a quota of holes with the highest ``exp(-lambda i) min(-p ln f, alpha)``.

    Here i is the index of the position, p is the probability of its candidate, and f is the
    relative frequency of that token in a corpus (Huang et al. 2025, PC-Sampler, equations 5 to 7).
    """

    about = "a quota of the holes, ranked by position, probability and token rarity"
    log_prob = certain

    decay_B: jax.Array = per_row(
        Setting(
            "position_decay",
            0.25,
            "order=position_aware: decay rate of the weight exp(-decay i) of position i, >= 0",
            low=0.0,
            high=1e3,
        )
    )
    limit_B: jax.Array = per_row(
        Setting(
            "information_limit",
            10.0,
            "order=position_aware: upper bound on -p ln f of a token, > 0",
            low=1e-6,
            high=1e6,
        )
    )
    common: tuple[tuple[int, float], ...] = static(
        Setting(
            "common_ids",
            (),
            "order=position_aware: frequencies of ids in the corpus, such as 12:0.05,30:0.2; all "
            "other ids share the rest evenly",
            parse=_shares,
            hint=Mapping[int, float] | tuple[tuple[int, float], ...],
        )
    )
    quota: Quota = static(SCHEDULE)
    confidence: Measure = static(CONFIDENCE)
    vocab_size: int = fact("vocab_size", 0)

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        QuotaRule.check(row)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises ValueError if a frequency is given for an id outside the vocabulary."""
        super().check_model(row, facts)
        check_ids("common_ids", (id_ for id_, _ in row.common_ids), facts.vocab_size)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_hole_BL = context.is_hole_BL
        rest = 1.0 - sum(share for _, share in self.common)
        share_BL = rest / max(self.vocab_size - len(self.common), 1)
        for id_, share in self.common:
            share_BL = jnp.where(proposal.tokens_BL == id_, share, share_BL)
        rare_BL = -jnp.log(jnp.maximum(share_BL, _LEAST))
        share_BL = jax.nn.sigmoid(proposal.confidence_BL)
        counts_BL = jnp.minimum(share_BL * rare_BL, self.limit_B[:, None])
        first_B1 = place_of_largest(is_hole_BL)[:, None]
        place_BL = jnp.arange(is_hole_BL.shape[1])[None] - first_B1
        score_BL = jnp.log(counts_BL) - self.decay_B[:, None] * place_BL
        return most(score_BL, is_hole_BL, self.quota(context), context.preference_BL, 1.0), state
