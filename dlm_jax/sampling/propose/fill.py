"""Fill rules, which propose candidates for the open positions of a step, and the parallel fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import DrawnTokens, OrderRule, Proposal
from dlm_jax.sampling.noise import NoiseRule
from dlm_jax.sampling.positions import (
    TrunkOutput,
    at_places,
    belongs_to_positions,
    fold,
    gather_state,
    put,
)
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.transform import At
from dlm_jax.sampling.vocab import argmax, log_prob
from dlm_jax.settings import Rule, rule
from dlm_jax.types import Network, Params, returned


class FillOutput(NamedTuple):
    """Candidates for the open positions, with statistics. The last three are None unless traced.

    Attributes:
      proposal: the candidates.
      is_finite_B: False for rows in which the clean logits of some position contain NaN or +inf, or
        are all -inf.
      counts: int32 ``[B]`` each, added to the fields of `Counters` with these names.
      total_BL: float32, log-normaliser of the LM head where the head was read, or None.
      best_BL: int32, most likely id under the LM head other than the existing token; -1 if this id
        is banned. None if not needed.
      rule_state: the input's `rule_state`, updated with the logits of this step.
      signal_BLD: self-conditioning signal after the reads of this step, or None.
      draw_logprob_BL: float32 log-probability in nats of the candidate under the distribution it
        was drawn from (LM head or sampler head, after the row's chain); 0 in greedy rows.
      entropy_BL: float32 entropy in nats of the clean logits of the head that drew the candidate.
      level_BL: int32, order within the fill. A candidate depends on the candidates of lower levels.
    """

    proposal: Proposal
    is_finite_B: jax.Array
    counts: Mapping[str, jax.Array] = {}
    total_BL: jax.Array | None = None
    best_BL: jax.Array | None = None
    rule_state: Any = ()
    signal_BLD: jax.Array | None = None
    draw_logprob_BL: Any = None
    entropy_BL: Any = None
    level_BL: Any = None


@dataclass(frozen=True, kw_only=True)
class FillInput:
    """The canvas and the output of the trunk in a step, and how candidates are drawn and scored.

    Attributes:
      network: the model as pure functions.
      params: the network's parameters.
      output: the output of the trunk.
      chunk: number of positions per readout.
      tokens_BL: int32 canvas.
      length_B: int32, number of live positions in each row.
      is_open_BL: True where a candidate is needed. The current token there is not visible.
      is_seen_BL: True at tokens that candidates at neighbouring positions are conditioned on.
      chain: logit transforms applied to the clean logits before the draw.
      chain_state: the states of the transforms for this step.
      key_B: typed random key of each row. The key of a position is ``fold_in(key, index)``.
      rule: the commit or noise rule, which scores the candidates; None scores them by their
        log-probability.
      rule_state: the state of that rule.
      preference_BL: uint32, priority of each position when scores are tied.
      own_BL: int32 existing tokens to score instead of drawing a candidate, -1 elsewhere; or None.
      is_scored_BL: True where `FillOutput.total_BL` is needed, or None.
      is_given_BL: True at given tokens; None if unknown.
      keeps_best: True if `FillOutput.best_BL` is needed, too.
      is_traced: True if the statistics of the draws are needed.
      banned_ids: ids that `FillOutput.best_BL` and starting positions ignore, as those of the row.
      signal_BLD: self-conditioning signal of the previous step, or None.
    """

    network: Network
    params: Params
    output: TrunkOutput
    chunk: int
    tokens_BL: jax.Array
    length_B: jax.Array
    is_open_BL: jax.Array
    is_seen_BL: jax.Array
    chain: Chain
    chain_state: Any
    key_B: jax.Array
    rule: OrderRule | None = None
    rule_state: Any = ()
    preference_BL: jax.Array | None = None
    own_BL: jax.Array | None = None
    is_scored_BL: jax.Array | None = None
    is_given_BL: jax.Array | None = None
    keeps_best: bool = False
    is_traced: bool = False
    banned_ids: tuple[int, ...] = ()
    signal_BLD: jax.Array | None = None

    @property
    def is_read_BL(self) -> jax.Array:
        """True at open positions and at existing tokens to score."""
        return self.is_open_BL if self.own_BL is None else self.is_open_BL | (self.own_BL >= 0)

    def logits(self, places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of the LM head at places ``row * L + index``."""
        return self.output.logits(self.network, self.params, places_N)

    def at(self, places_N: jax.Array, is_real_N: jax.Array) -> At:
        """The positions at the places ``row * L + index``, with their keys."""
        row_N, index_N = jnp.divmod(places_N, self.tokens_BL.shape[1])
        key_N = jax.vmap(jax.random.fold_in)(self.key_B[row_N], index_N)
        return At(row_N, index_N, key_N, is_real_N)

    def start(self) -> FillOutput:
        """The output before the first readout."""
        shape = self.is_open_BL.shape
        zeros_BL, none_BL = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
        out = FillOutput(
            Proposal(none_BL, zeros_BL, zeros_BL, zeros_BL),
            jnp.ones(shape[0], jnp.bool_),
            total_BL=None if self.is_scored_BL is None else zeros_BL,
            best_BL=none_BL if self.keeps_best else None,
            rule_state=self.rule_state,
            signal_BLD=self.signal_BLD,
        )
        if not self.is_traced:
            return out
        return out._replace(draw_logprob_BL=zeros_BL, entropy_BL=zeros_BL, level_BL=none_BL)

    def draw(
        self,
        out: FillOutput,
        places_N: jax.Array,
        is_real_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None = None,
    ) -> FillOutput:
        """The output with candidates at the real places ``row * L + index``, drawn from
        `drawable_NV` after the chain and scored under `clean_NV`. If it is None, they come
        from the clean logits, which are those of the LM head.
        """
        own_N = None if self.own_BL is None else at_places(self.own_BL, places_N)
        is_drawn_N = is_real_N if own_N is None else is_real_N & (own_N < 0)
        at = self.at(places_N, is_drawn_N)
        from_NV = clean_NV if drawable_NV is None else drawable_NV
        ids_N, final_logprob_N = self.chain.draw(self.chain_state, from_NV, at)
        if own_N is not None:
            ids_N = jnp.where(own_N >= 0, own_N, ids_N)
        new: dict[str, Any] = {}
        final_NV = None
        if self.signal_BLD is not None:
            assert self.network.signal is not None
            final_NV = self.chain.apply(self.chain_state, clean_NV, at)
            new["signal_BLD"] = self.network.signal(self.params, final_NV)
        logprob_N, score_N, rule_state_N = self.score_ids(
            clean_NV, ids_N, at, drawable_NV, final_NV
        )
        new["proposal"] = Proposal(ids_N, logprob_N, final_logprob_N, score_N)
        is_fine_N = jnp.isfinite(logprob_N) & (jnp.isfinite(final_logprob_N) | ~is_drawn_N)
        is_fine_N |= ~is_real_N
        if out.total_BL is not None and drawable_NV is None:
            # The compiler shares these sums with `log_prob`.
            max_N, weight_N = vocab.exp_sum(clean_NV.astype(jnp.float32))
            new["total_BL"] = total_N = max_N + jnp.log(weight_N)
            # Existing tokens can have probability 0, but drawn tokens cannot.
            is_fine_N |= ~is_drawn_N & jnp.isfinite(total_N)
            if out.best_BL is not None:
                new["best_BL"] = self._best(clean_NV, own_N, at)
        if self.is_traced:
            new["draw_logprob_BL"] = self.draw_logprob(from_NV, ids_N, at)
            new["entropy_BL"] = vocab.count_and_entropy(clean_NV.astype(jnp.float32))[1]

        def put_state(old: jax.Array, new_N: jax.Array) -> jax.Array:
            is_by_position = belongs_to_positions(old, self.tokens_BL.shape[1])
            return put(old, places_N, is_real_N, new_N) if is_by_position else old

        old = {name: getattr(out, name) for name in new}
        return out._replace(
            is_finite_B=out.is_finite_B.at[at.row_N].min(is_fine_N),
            rule_state=jax.tree.map(put_state, out.rule_state, rule_state_N),
            **put(old, places_N, is_real_N, new),
        )

    def _best(self, clean_NV: jax.Array, own_N: jax.Array | None, at: At) -> jax.Array:
        """Most likely ids other than the existing tokens; -1 where the id is banned."""
        if own_N is not None:
            is_own_NV = jnp.arange(clean_NV.shape[1])[None] == own_N[:, None]
            clean_NV = jnp.where(is_own_NV, -jnp.inf, clean_NV)
        best_N = argmax(clean_NV)
        banned_1K = jnp.array(self.banned_ids, jnp.int32)[None]
        is_banned_N = jnp.any(best_N[:, None] == banned_1K, axis=1)
        is_banned_BV = self.chain.banned(self.tokens_BL.shape[0], clean_NV.shape[1])
        is_banned_N |= is_banned_BV[at.row_N, best_N]
        return jnp.where(is_banned_N, -1, best_N)

    def score_ids(
        self,
        clean_NV: jax.Array,
        ids_N: jax.Array,
        at: At,
        drawable_NV: jax.Array | None = None,
        final_NV: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Log-probability and score of ids, and the new state of their positions.

        The other arguments are those of `draw`, and the clean logits after the chain, if known.
        """
        logprob_N = log_prob(clean_NV, ids_N)
        if self.rule is None:
            return logprob_N, logprob_N, ()

        def filter_logits() -> jax.Array:
            if drawable_NV is None and final_NV is not None:
                return final_NV
            from_NV = clean_NV if drawable_NV is None else drawable_NV
            return self.chain.apply(self.chain_state, from_NV, at)

        num_positions = self.tokens_BL.shape[1]
        places_N = at.row_N * num_positions + at.index_N
        logits_NV, drawn = clean_NV, DrawnTokens(ids_N, at.row_N, logprob_N, filter_logits)
        if isinstance(self.rule, NoiseRule):
            # The rule scores the current tokens, under the logits of the draws. A greedy row draws
            # its argmax with certainty.
            logits_NV, own_N = filter_logits(), at_places(self.tokens_BL, places_N)
            certain_N = jnp.where(own_N == ids_N, 0.0, -jnp.inf)
            own_logprob_N = jnp.where(
                self.chain.is_greedy(at), certain_N, log_prob(logits_NV, own_N)
            )
            drawn = drawn._replace(ids_N=own_N, logprob_N=own_logprob_N)
        state_N = gather_state(self.rule_state, places_N, num_positions)
        score_N, state_N = self.rule.score(state_N, logits_NV, drawn)
        returned(score_N, self.rule, "score", "N", ids_N.shape, jnp.float32)
        return logprob_N, score_N, state_N

    def draw_logprob(self, drawable_NV: jax.Array, ids_N: jax.Array, at: At) -> jax.Array:
        """Log-probability ``[N]`` of drawing these ids, given the logits before the chain.

        The result is 0 in greedy rows, which do not sample.
        """
        final_NV = self.chain.apply(self.chain_state, drawable_NV, at)
        return jnp.where(self.chain.is_greedy(at), 0.0, log_prob(final_NV, ids_N))


DrawLogits = Callable[[jax.Array, jax.Array], jax.Array]
"""``(places_N, is_real_N) -> logits_NV``; see `FillRule.logits`."""


class FillRule(Rule, ABC):
    """Proposes a candidate for every open position of a step. Only `propose` is required."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs that the rule reads: ``head:sampler``, if candidates are drawn from a sampler head."""

    @abstractmethod
    def propose(self, fill: FillInput) -> FillOutput:
        """The candidates. The proposal is undefined at positions that are not open."""

    def logits(self, fill: FillInput, tokens_BL: jax.Array, level_BL: jax.Array) -> DrawLogits:
        """The logits, before the chain, that recorded candidates were drawn from. Traces, their
        replay and read-back require this method. Replay alone would require a log-probability;
        read-back also requires the other candidates.

        `tokens_BL` are the candidates (-1 where none was drawn), and `level_BL` is
        `FillOutput.level_BL`; int32 ``[B, L]`` each.
        """
        raise NotImplementedError


@rule
class Parallel(FillRule):
    """Draws a candidate for every open position from the LM head, independently of other positions.

    The open positions of all rows are gathered and processed in chunks, so the cost is proportional
    to their number, and no ``[B, L, V]`` array exists.
    """

    about = "independently of each other"

    def propose(self, fill: FillInput) -> FillOutput:
        """The candidates, with zeros at positions that are not open."""

        def draw(out: FillOutput, places_N: jax.Array, is_real_N: jax.Array) -> FillOutput:
            return fill.draw(out, places_N, is_real_N, fill.logits(places_N))

        return fold(fill.is_read_BL, fill.chunk, draw, fill.start())

    def logits(self, fill: FillInput, tokens_BL: jax.Array, level_BL: jax.Array) -> DrawLogits:
        return lambda places_N, is_real_N: fill.logits(places_N)
