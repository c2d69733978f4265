"""Commit rules, which select the proposed tokens that a step writes into the canvas.

A rule is a frozen pytree whose static values are metadata and whose per-row settings are ``[B]``
leaves. Each call processes the whole batch, and rows are independent. Scores that differ only by
rounding are treated as ties, because their order can differ between compiled programs (see
`TOLERANCE`). Probabilities are compared by their log-odds, which keep the order of probabilities
that round to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.randomness import salted
from dlm_jax.sampling.vocab import TOLERANCE, ordered
from dlm_jax.settings import Rule

WithState = tuple[jax.Array, Any]
"""What a method of a rule returns: a value, and the new state of the rule."""


class DrawnTokens(NamedTuple):
    """The candidates of N positions, as `CommitRule.score` receives them.

    Attributes:
      ids_N: int32 ids.
      row_N: int32, the row of each position.
      logprob_N: float32 log-probability in nats of the ids under the clean logits.
      filter_logits: ``() -> [N, V]``, the logits that the candidates are drawn from, after all
        transforms.
    """

    ids_N: jax.Array
    row_N: jax.Array
    logprob_N: jax.Array
    filter_logits: Callable[[], jax.Array]


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
      attention_BLL: float32 attention from each live position (axis 1) to each position (axis 2) in
        the forward pass of the step; None in `eligible`, and unless the rule needs it.
    """

    is_hole_BL: jax.Array
    first_holes_B: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    key_B: jax.Array
    is_token_BL: jax.Array
    written_BL: jax.Array | None = None
    preference_BL: jax.Array | None = None
    attention_BLL: jax.Array | None = None


class Proposal(NamedTuple):
    """Candidates for the open positions. Values at other positions are undefined.

    Attributes:
      tokens_BL: int32 candidate ids.
      logprob_BL: float32 log-probability of the candidate under the clean logits.
      final_logprob_BL: float32, log-probability of the candidate under the logits it was drawn
        from, after all transforms; 0 if no transform of the row reads it.
      confidence_BL: float32, the result of the rule's `score`; for a `CommitRule`, higher is more
        confident.
    """

    tokens_BL: jax.Array
    logprob_BL: jax.Array
    final_logprob_BL: jax.Array
    confidence_BL: jax.Array


class StepRule(Rule):
    """A rule that runs once per step, has a state and is selected by name.

    Attributes:
      needs: inputs that the rule reads. An attribute of the class, or a static field.
    """

    needs: tuple[str, ...] = ()

    def init(self, num_rows: int, num_positions: int) -> Any:
        """The state before the first step; empty by default.

        Leaves ``[B, L, ...]`` belong to the positions: they move with edits, and a position starts
        again where a token is remasked or inserted. Leaves ``[B, ...]`` belong to the rows, and
        change in rows that take a step.
        """
        return ()

    def is_active(self) -> jax.Array:
        """True ``[B]`` for the rows that use the rule; all rows by default."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return True


class OrderRule(StepRule):
    """The rule that ``order`` selects: a `CommitRule`, or a `NoiseRule` for models of other noise.

    It can need ``attention:N``, the attention of the final N blocks of the Transformer, averaged
    over blocks and heads, and ``candidates``, if its `score` stores values of the candidates. If it
    has a method ``step(program, params, state) -> state``, the loop calls it in place of the step
    of MASK (docs/own_rules.md).
    """

    rewrites: Any = None

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        """The score of N tokens, float32 ``[N]``, and the new state of their positions."""
        raise NotImplementedError


def head_of(needs: tuple[str, ...]) -> str:
    """The name of the head among the `needs` of a rule; empty if there is none."""
    return next((need.removeprefix("head:") for need in needs if need.startswith("head:")), "")


def attention_blocks(needs: tuple[str, ...]) -> int:
    """The number of blocks whose attention is among the `needs` of a rule; 0 for none."""
    return sum(int(need[len("attention:") :]) for need in needs if need.startswith("attention:"))


class CommitRule(OrderRule, ABC):
    """Selects the eligible positions that a step commits. Only `select` is required.

    At the last step of a block, the loop also commits every remaining hole. The rule's state is any
    pytree, which `init` creates and `score` and `select` return.

    Attributes:
      rewrites: None, or for a rule whose `select` can also select written tokens of the block, the
        maximum number of steps that a block without holes continues: a number, or a field
        ``per_row``. Candidates are then drawn for written tokens as well, and a block ends after a
        step that starts without holes and rewrites nothing.
    """

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """True at the holes that this step can commit, ``[B, L]``.

        Logits are computed only at these holes.
        """
        return context.is_hole_BL

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        """The confidence of N candidates, float32 ``[N]``, and the new state of their positions.

        By default, the confidence is the log-odds of the candidate's probability under the clean
        logits `logits_NV`. `state_N` has leaves ``[N, ...]``; leaves that belong to the rows are
        those of the positions' rows, and `score` does not change them.
        """
        return log_odds(drawn.logprob_N), state_N

    @abstractmethod
    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        """True at the positions to commit, ``[B, L]``, and the new state. Ineligible positions are
        ignored.
        """

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        """Log-probability ``[B]`` in nats of this choice, given all inputs of `select` except
        ``context.key_B``. The first three arguments are those that `select` received.

        A rule that does not use this key returns 0 (see `dlm_jax.certain`). Random tie-breaking is
        not included. Traces require this method.
        """
        raise NotImplementedError


_Input = jax.Array | tuple[Any, ...]


def certain(self: Any, *inputs: _Input, **named: _Input) -> jax.Array:
    """The ``log_prob`` of a commit rule or remask rule without random choices, as in
    ``log_prob = certain``.
    """
    is_chosen_BL = (*inputs, *named.values())[-1]
    assert isinstance(is_chosen_BL, jax.Array)
    return jnp.zeros(is_chosen_BL.shape[0], jnp.float32)


def most_confident(context: CommitContext, proposal: Proposal, count_B: jax.Array) -> jax.Array:
    """True at the `count_B` most confident holes in each row; see `most`."""
    return most(proposal.confidence_BL, context.is_hole_BL, count_B, context.preference_BL, 1.0)


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
    (see `dlm_jax.sampling.vocab.log_prob`).
    """
    return logprob - jnp.log(-jnp.expm1(logprob))


def log_odds_of(probability: jax.Array) -> jax.Array:
    """``ln p - ln(1 - p)`` of a setting, such as a threshold; infinite at 0 and 1."""
    return jnp.log(probability) - jnp.log1p(-probability)


_TIES_SALT = 0x74696573


_Number = jax.Array | float


def reaches(score: jax.Array, bound: _Number, scale: _Number = 0.0) -> jax.Array:
    """True where a score is at least a bound; see `TOLERANCE`."""
    return score >= bound - _slack(bound, scale)


def exceeds(score: jax.Array, bound: _Number, scale: _Number = 0.0) -> jax.Array:
    """True where a score is strictly above a bound; see `TOLERANCE`."""
    return score > bound + _slack(bound, scale)


def _slack(bound: _Number, scale: _Number) -> jax.Array:
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
    scale: _Number = 0.0,
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
