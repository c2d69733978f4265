"""Commit rules, which select the proposed tokens that a step writes into the canvas.

A rule is a frozen pytree whose static values are metadata and whose per-row settings are ``[B]``
leaves. Each call processes the whole batch, and rows are independent. Scores that differ only by
rounding are treated as ties, because their order can differ between compiled programs (see
`TOLERANCE`). Probabilities are compared by their log-odds, which keep the order of probabilities
that round to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.randomness import salted
from dlm_jax.sampling.vocab import TOLERANCE, ordered
from dlm_jax.settings import Rule, SettingError, require_head


class RuleMemory(NamedTuple):
    """The state of a rule between steps. None of its arrays has a vocabulary axis.

    Attributes:
      places: per-position arrays ``[B, L, ...]``, updated at positions whose logits are read.
      rows: per-row arrays ``[B, ...]``, updated at the end of each step that the row takes.
    """

    places: Any = None
    rows: Any = None


class Standing(NamedTuple):
    """The current canvas and uniform noise for its positions, for rules that renew tokens.

    Attributes:
      tokens_BL: int32 canvas.
      is_mask_BL: True at MASK.
      is_noise_BL: True at tokens whose ids are noise ids of the row. The noise ids of a row are all
        ids that can be written in the row.
      random_BL: int32, one of the row's noise ids per position, drawn uniformly for this step.
      num_ids_B: int32, number of noise ids of the row.
      mask_id: the id of MASK.
    """

    tokens_BL: jax.Array
    is_mask_BL: jax.Array
    is_noise_BL: jax.Array
    random_BL: jax.Array
    num_ids_B: jax.Array
    mask_id: int


class CommitContext(NamedTuple):
    """The current block of each row at the start of a step.

    Attributes:
      is_hole_BL: True at the writable positions of the block in running rows: these are the holes
        or, in rows that resample, all unfrozen positions.
      first_holes_B: int32, number of holes in the block before its first step.
      step_B: int32, number of steps taken in the block.
      steps_B: int32, total number of steps for the block, at least 1.
      key_B: random key of each row for this step, used only by the rule.
      is_token_BL: True at all live tokens of the canvas except MASK.
      written_BL: int32 generated tokens of the block, -1 elsewhere; None unless the rule
        `rewrites`.
      preference_BL: uint32, priority of each position when scores are tied; see `preferences`.
      memory: state of the rule; in `CommitRule.select` it includes this step's observations.
      standing: current content of the positions; None unless the rule `renews`.
      attention_BLL: float32 attention from each live position (axis 1) to each position (axis 2) in
        the forward pass of the step; None if the rule's `map_blocks` is 0.
      wrong_BL: float32 probability that each current token is wrong, according to the head that the
        rule reads, for the canvas with candidates at MASK; None if the rule reads no head.
    """

    is_hole_BL: jax.Array
    first_holes_B: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    key_B: jax.Array
    is_token_BL: jax.Array
    written_BL: jax.Array | None = None
    preference_BL: jax.Array | None = None
    memory: RuleMemory = RuleMemory()
    standing: Standing | None = None
    attention_BLL: jax.Array | None = None
    wrong_BL: jax.Array | None = None


class Proposal(NamedTuple):
    """Candidates for the open positions. Values at other positions are undefined.

    Attributes:
      tokens_BL: int32 candidate ids.
      logprob_BL: float32 log-probability of the candidate under the clean logits.
      final_logprob_BL: float32, log-probability of the candidate under the logits it was drawn
        from, after all transforms; 0 if no transform of the row reads it.
      confidence_BL: float32, the result of the rule's `measure`; higher is more confident. If the
          rule `renews`, this is the confidence of the current token. If the candidates are a joint
          draw, the confidence is 1 where the current token is the candidate, and otherwise 0.
    """

    tokens_BL: jax.Array
    logprob_BL: jax.Array
    final_logprob_BL: jax.Array
    confidence_BL: jax.Array


class CommitRule(Rule):
    """Selects the eligible positions that a step commits. Only `select` is required.

    At the last step of a block, the loop also commits every remaining hole.

    Attributes:
      rewrites: True if `select` can also select written tokens of the block. Candidates are then
        drawn for these tokens as well, and a block ends after a step that starts without holes and
        rewrites nothing, or after `patience` steps that start without holes.
      renews: True if the rule also writes tokens other than candidates, at open positions that it
        does not select; see `renewed` and `begin`.
      scale: smallest magnitude assumed for the terms of `measure` when `TOLERANCE` is applied: 1
        for log-odds, logarithms and differences.
      remembers_ids: True if the memory that `observe` returns depends on the candidates.
      map_blocks: number of final Transformer blocks whose attention, averaged over blocks and
        heads, the rule reads; 0 for none.
    """

    required: ClassVar[tuple[str, ...]] = ("select",)
    rewrites: ClassVar[bool] = False
    renews: ClassVar[bool] = False
    scale: ClassVar[float] = 1.0
    map_blocks: ClassVar[int] = 0
    remembers_ids: ClassVar[bool] = False

    reads_head: str = ""
    """Name of the head in `Network.heads` whose sigmoid is ``context.wrong_BL``; static. It costs a
    forward pass in rows with MASK."""

    @classmethod
    def check(cls, row: Any) -> None:
        """Raises if the rule reads attention maps or a head and the row has a cache."""
        for reads, why in (
            (cls.reads_head, f"is not supported with order={cls.name!r}, which reads whole rows"),
            (cls.map_blocks, f"computes no attention maps, which order={cls.name!r} requires"),
        ):
            if reads and row.cache != "none":
                raise SettingError("cache", row.cache, why, "use cache='none'")

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises if the network lacks the head or the attention maps that the rule reads."""
        if cls.reads_head:
            require_head(cls.reads_head, facts, "order", cls.name)
        if cls.map_blocks and not facts.shows_maps:
            raise SettingError(
                "order", cls.name, "requires attention maps, which this network does not return",
                "set Network.inside, or use order='threshold'",
            )  # fmt: skip

    def patience(self) -> jax.Array:
        """Maximum number of steps ``[B]`` in a block without holes, if the rule `rewrites`."""
        raise NotImplementedError

    def eligible(self, context: CommitContext) -> jax.Array:
        """True at the holes that this step can commit, ``[B, L]``.

        Logits are computed only at these holes.
        """
        return context.is_hole_BL

    def measure(self, logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
        """Confidence of each candidate, float32 ``[N]``, computed from the clean logits and the
        candidate's log-probability; the log-odds of its probability by default.
        """
        return log_odds(logprob_N)

    def shown(self, confidence: jax.Array) -> jax.Array:
        """The values that traces record for the confidences of `measure`: the probabilities, if
        the rule uses the default measure.
        """
        is_default = type(self).measure is CommitRule.measure
        return jax.nn.sigmoid(confidence) if is_default else confidence

    def start_memory(self, num_rows: int, num_positions: int) -> RuleMemory:
        """The memory before the first step; empty by default."""
        return RuleMemory()

    def observe(
        self,
        kept: Any,
        row_N: jax.Array,
        logits_NV: jax.Array,
        ids_N: jax.Array,
        logprob_N: jax.Array,
    ) -> tuple[Any, jax.Array]:
        """Returns the memory of N positions, updated with their logits, and their confidence.

        `kept` is the previous memory with leaves ``[N, ...]``, and `ids_N` are the candidates. This
        method is called instead of `measure` if the rule has a per-position `RuleMemory`.
        """
        return kept, self.measure(logits_NV, logprob_N)

    def remember(
        self, context: CommitContext, proposal: Proposal, is_committed_BL: jax.Array
    ) -> Any:
        """The per-row memory after the commits of a step; unchanged by default."""
        return context.memory.rows

    def weighed(self, logits_NV: jax.Array, filtered: Callable[[], jax.Array]) -> jax.Array | None:
        """Logits ``[N, V]`` for `measure`; None for the clean logits.

        `filtered` returns the logits that candidates are drawn from, after all transforms.
        """
        return None

    def select(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """True at the positions to commit, ``[B, L]``. Ineligible positions are ignored."""
        raise NotImplementedError

    def surest(self, context: CommitContext, proposal: Proposal, count_B: jax.Array) -> jax.Array:
        """True at the `count_B` most confident holes in each row; see `most`."""
        return most(
            proposal.confidence_BL, context.is_hole_BL, count_B, context.preference_BL, self.scale
        )

    def begin(self, standing: Standing, key_B: jax.Array) -> jax.Array:
        """Tokens ``[B, L]`` for the holes of rows before their first step, if the rule `renews`."""
        return standing.tokens_BL

    def finished(self, memory: RuleMemory) -> jax.Array | None:
        """True ``[B]`` for rows whose block ends with this step, if the rule `renews`; None if no
        block ends.
        """
        return None

    def renewed(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """Tokens ``[B, L]`` for the open positions that are not selected, if the rule `renews`."""
        assert context.standing is not None, "the rule renews"
        return context.standing.tokens_BL

    @classmethod
    def check_trace(cls, row: Any) -> None:
        if cls.log_chance is CommitRule.log_chance:
            raise SettingError(
                "order", cls.name, "has no trace: it does not define log_chance()",
                "define it, or use order='random'",
            )  # fmt: skip

    def log_chance(
        self, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        """Log-probability ``[B]`` in nats of this choice, given all inputs of `select` except
        ``context.key_B``. The context and the proposal are those that `select` received.

        A rule that does not use this key returns 0 (see `dlm_jax.certain`). Random tie-breaking is
        not included. Traces require this method.
        """
        raise NotImplementedError


_Input = jax.Array | tuple[Any, ...]


def certain(self: Any, *inputs: _Input, **named: _Input) -> jax.Array:
    """The ``log_chance`` of a commit rule or remask rule without random choices, as in
    ``log_chance = certain``.
    """
    is_chosen_BL = (*inputs, *named.values())[-1]
    assert isinstance(is_chosen_BL, jax.Array)
    return jnp.zeros(is_chosen_BL.shape[0], jnp.float32)


def log_subset(is_open_BL: jax.Array, is_chosen_BL: jax.Array) -> jax.Array:
    """Log-probability ``[B]`` of this subset among all subsets of its size.

    The result, ``-ln C(n, k)``, is a sum of the logarithms of the factors of ``C(n, k)``, because
    differences of log-factorials lose precision.
    """
    num_B1 = jnp.sum(is_open_BL, axis=1, keepdims=True)
    chosen_B1 = jnp.sum(is_open_BL & is_chosen_BL, axis=1, keepdims=True)
    place_1L = jnp.arange(is_open_BL.shape[1])[None]
    is_factor_BL = place_1L < chosen_B1
    factor_BL = jnp.where(is_factor_BL, (chosen_B1 - place_1L) / (num_B1 - place_1L), 1.0)
    return jnp.sum(jnp.log(factor_BL), axis=1)


def log_each(is_open_BL: jax.Array, is_chosen_BL: jax.Array, chance_BL: jax.Array) -> jax.Array:
    """Log-probability ``[B]`` of this subset if open positions are chosen independently."""
    own_BL = jnp.where(is_chosen_BL, jnp.log(chance_BL), jnp.log1p(-chance_BL))
    return jnp.sum(jnp.where(is_open_BL, own_BL, 0.0), axis=1)


def log_odds(logprob: jax.Array) -> jax.Array:
    """``ln p - ln(1 - p)``, given ``ln p``.

    float32 probabilities near 1 are all equal, but their log-odds are not, if ``ln p`` is accurate
    (see `dlm_jax.sampling.draw.log_prob`).
    """
    return logprob - jnp.log(-jnp.expm1(logprob))


def log_odds_of(probability: jax.Array) -> jax.Array:
    """``ln p - ln(1 - p)`` of a setting, such as a threshold; infinite at 0 and 1."""
    return jnp.log(probability) - jnp.log1p(-probability)


_TIES_SALT = 0x74696573


def reaches(
    score: jax.Array, bound: jax.Array | float, scale: jax.Array | float = 0.0
) -> jax.Array:
    """True where a score is at least a bound; see `TOLERANCE`."""
    return score >= bound - _slack(bound, scale)


def exceeds(
    score: jax.Array, bound: jax.Array | float, scale: jax.Array | float = 0.0
) -> jax.Array:
    """True where a score is strictly above a bound; see `TOLERANCE`."""
    return score > bound + _slack(bound, scale)


def _slack(bound: jax.Array | float, scale: jax.Array | float) -> jax.Array:
    size = jnp.maximum(jnp.abs(bound), scale)
    return jnp.where(jnp.isfinite(size), TOLERANCE * size, 0.0)


def preferences(key_B: jax.Array, prefers_lower_B: jax.Array, num_positions: int) -> jax.Array:
    """Positive uint32 numbers ``[B, L]`` that break ties: the position with the highest number
    wins.

    In rows with `prefers_lower_B`, the numbers descend from left to right. In all other rows, they
    are drawn at random from the row's key, independently of the canvas length.
    """
    tie_key_B = salted(key_B, _TIES_SALT)
    random_BL = jax.vmap(lambda key: jax.random.bits(key, (num_positions,)))(tie_key_B)
    lower_1L = jnp.uint32(0) - (4 * jnp.arange(1, num_positions + 1, dtype=jnp.uint32))[None]
    return jnp.where(prefers_lower_B[:, None], lower_1L, random_BL | jnp.uint32(4))


def most(
    score_BL: jax.Array,
    is_open_BL: jax.Array,
    count_B: jax.Array,
    preference_BL: jax.Array | None = None,
    scale: jax.Array | float = 0.0,
) -> jax.Array:
    """True at the `count_B` open positions with the highest scores in each row, or at all open
    positions if there are fewer.

    Ties (see `TOLERANCE`) are broken by descending `preference_BL` from `preferences`. Pass None if
    the scores are identical in every program; lower positions then win ties. `scale` is the
    smallest magnitude assumed for the terms of a score: 1.0 for log-odds, and for differences of
    probabilities, log-probabilities and entropies; 0.0 for probabilities.
    """
    score_BL = jnp.where(jnp.isnan(score_BL), -jnp.inf, score_BL)
    order_BL = ordered(jnp.where(score_BL == 0, 0.0, score_BL))  # -0.0 equals 0.0
    rank_BL = jnp.where(is_open_BL, order_BL, jnp.uint32(0))
    if preference_BL is None:
        return _highest(rank_BL, count_B)
    is_reached_BL = is_open_BL & (rank_BL >= _last(rank_BL, count_B)[:, None])
    last_B1 = jnp.min(jnp.where(is_reached_BL, score_BL, jnp.inf), axis=1, keepdims=True)
    is_above_BL = is_open_BL & exceeds(score_BL, last_B1, scale)
    is_tied_BL = is_open_BL & ~is_above_BL & reaches(score_BL, last_B1, scale)
    room_B = count_B - jnp.sum(is_above_BL, axis=1)

    def preferred() -> jax.Array:
        return _highest(jnp.where(is_tied_BL, preference_BL, jnp.uint32(0)), room_B)

    if platform() != "cpu":
        # A condition over all rows would require a collective if the rows are sharded.
        return is_above_BL | preferred()
    is_any = jnp.any(jnp.sum(is_tied_BL, axis=1) > room_B)
    return is_above_BL | jax.lax.cond(is_any, preferred, lambda: is_tied_BL)


def _highest(rank_BL: jax.Array, count_B: jax.Array) -> jax.Array:
    """True at the `count_B` highest numbers above 0 in each row; lower positions win ties."""
    last_B1 = _last(rank_BL, count_B)[:, None]
    is_above_BL = rank_BL > last_B1
    is_last_BL = (rank_BL == last_B1) & (rank_BL > 0)
    room_B = count_B - jnp.sum(is_above_BL, axis=1)
    return is_above_BL | (is_last_BL & (jnp.cumsum(is_last_BL, axis=1) <= room_B[:, None]))


def _last(rank_BL: jax.Array, count_B: jax.Array) -> jax.Array:
    """uint32 ``[B]``: the `count_B`-th largest number in each row; 0 if fewer numbers are above 0.
    The number is computed bit by bit, because a sort on CPU takes 5 times as long for 16 x 256
    numbers and 13 times as long for 64 x 1024.
    """

    def with_bit(place: jax.Array, last_B: jax.Array) -> jax.Array:
        higher_B = last_B | (jnp.uint32(1 << 31) >> place.astype(jnp.uint32))
        num_reach_B = jnp.sum(rank_BL >= higher_B[:, None], axis=1)
        return jnp.where(num_reach_B >= count_B, higher_B, last_B)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(count_B.shape, jnp.uint32))


def uniform(key_B: jax.Array, num_positions: int) -> jax.Array:
    """One uniform random number per position, ``[B, L]``, which depends only on the row's key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (num_positions,)))(key_B)
