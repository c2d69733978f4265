"""Fill rules, which propose candidates for the open positions of a step, and the parallel fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import DrawnTokens, Proposal
from dlm_jax.sampling.draw import argmax, log_prob
from dlm_jax.sampling.positions import TrunkOutput, at_places, chunk_size, fold, put, returned
from dlm_jax.sampling.transforms.bias import LogitBias
from dlm_jax.sampling.transforms.chain import Chain, chain
from dlm_jax.sampling.transforms.default_chain import chain_of, sample_logits
from dlm_jax.sampling.transforms.transform import At, Context
from dlm_jax.settings import Rule, SettingError, rule
from dlm_jax.types import Network, Params, live_positions


class Wanted(NamedTuple):
    """The inputs of a fill: the values to compute, and the canvas.

    Attributes:
      is_open_BL: True where a candidate is needed. The current token at such a position is not
        visible.
      is_seen_BL: True at tokens that candidates at neighbouring positions are conditioned on.
      tokens_BL: int32 canvas.
      length_B: int32, number of live positions in each row.
      is_scored_BL: True where ``total_BL`` is needed in addition to the positions that the writer
          scores; None if there are no such positions.
      keeps_best: True if ``best_BL`` is also needed; static.
      preference_BL: uint32, priority of each position when scores are tied; see
        `dlm_jax.sampling.commit.commit_rule.preferences`.
      rule_state: the leaves of the commit rule's state that belong to the positions.
      is_given_BL: True at given tokens; None if unknown.
      is_traced: True if `Filled.drawn` is needed; static.
      signal_BLD: self-conditioning signal of the previous step, or None.
      is_joint: True if all candidates must be drawn jointly, also those that a fill would draw
        independently to start from; static.
    """

    is_open_BL: jax.Array
    is_seen_BL: jax.Array
    tokens_BL: jax.Array
    length_B: jax.Array
    is_scored_BL: jax.Array | None = None
    keeps_best: bool = False
    preference_BL: jax.Array | None = None
    rule_state: tuple[jax.Array, ...] = ()
    is_given_BL: jax.Array | None = None
    is_traced: bool = False
    signal_BLD: jax.Array | None = None
    is_joint: bool = False


class Reader(NamedTuple):
    """The network and its output in this step, as read by a fill.

    Attributes:
      network: the model as pure functions.
      params: the network's parameters.
      output: the output of the trunk in this step.
      chunk: number of positions per readout; static.
    """

    network: Network
    params: Params
    output: TrunkOutput
    chunk: int

    def logits(self, places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of the LM head at places ``row * L + index``."""
        return self.output.logits(self.network, self.params, places_N)


class Drawn(NamedTuple):
    """Statistics of the draws of a step, ``[B, L]``. Values at positions without a candidate are
    undefined.

    Attributes:
      logprob_BL: float32 log-probability in nats of the candidate under the distribution it was
        drawn from (LM head or sampler head, after the row's chain); 0 in greedy rows.
      entropy_BL: float32 entropy in nats of the clean logits of the head that the candidate was
        drawn from.
      level_BL: int32, order within the fill. A candidate depends on the candidates of lower levels.
    """

    logprob_BL: jax.Array
    entropy_BL: jax.Array
    level_BL: jax.Array


class Filled(NamedTuple):
    """Candidates for the open positions, with statistics.

    Attributes:
      proposal: the candidates.
      is_finite_B: False for rows in which the clean logits of some position contain NaN or +inf, or
        are all -inf.
      counts: int32 ``[B]`` each, the fill's counts, keyed by the field names of `Counters`.
      total_BL: float32, log-normaliser of the LM head at positions where the head was read; None if
        not needed.
      best_BL: int32, most likely id under the LM head other than the scored id; -1 if this id is
        banned. None if not needed.
      rule_state: `Wanted.rule_state`, updated with the logits of this step.
      drawn: record of the draws; None if not needed.
      signal_BLD: self-conditioning signal after the reads of this step; None if not needed.
    """

    proposal: Proposal
    is_finite_B: jax.Array
    counts: Mapping[str, jax.Array] = {}
    total_BL: jax.Array | None = None
    best_BL: jax.Array | None = None
    rule_state: tuple[jax.Array, ...] = ()
    drawn: Drawn | None = None
    signal_BLD: jax.Array | None = None

    @property
    def tokens_BL(self) -> jax.Array:
        """The candidates."""
        return self.proposal.tokens_BL


class Source(NamedTuple):
    """The distribution from which some of the candidates were drawn.

    Attributes:
      is_from_BL: True at these candidates.
      chunk: number of positions per readout; static.
      logits: ``(places_N) -> logits_NV``, logits before the chain, at places ``row * L + index``.
      is_grown: True if the sampler head computed the logits; static.
    """

    is_from_BL: jax.Array
    chunk: int
    logits: Callable[[jax.Array], jax.Array]
    is_grown: bool = False


class FillRule(Rule):
    """Proposes a candidate for every open position of a step. Only `propose` is required."""

    required: ClassVar[tuple[str, ...]] = ("propose",)

    allows_host: ClassVar[bool] = False
    """True if host samplers can draw other candidates between the proposal and the commit."""

    forwards: ClassVar[int] = 0
    """Number of additional forward passes of the trunk per step."""

    holds_structure: ClassVar[bool] = False
    """True if the candidates match a row's structure even without the structure transform."""

    drawn: ClassVar[str] = "in waves"
    """Description of the draws, for the errors of a fill that does not support host samplers or
    read-back."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs that the rule reads: ``head:sampler``, if candidates are drawn from a sampler head."""

    otherwise: ClassVar[str] = "parallel"
    """Name of the fill for rows that do not use this fill."""

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """True if a row with these settings uses this fill instead of `otherwise`."""
        return True

    @classmethod
    def check_trace(cls, row: Any) -> None:
        if cls.sources is FillRule.sources:
            raise SettingError(
                "fill",
                cls.name,
                "has no trace: it does not define the distributions of its draws",
                "use fill='parallel', or define sources()",
            )

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The candidates. The proposal is undefined at positions that are not open."""
        raise NotImplementedError

    def sources(
        self, reader: Reader, canvas_BL: jax.Array, tokens_BL: jax.Array, level_BL: jax.Array
    ) -> tuple[Source, ...]:
        """The logits that recorded candidates were drawn from, for the replay of traces and for
        read-back.

        `canvas_BL` is the input of the forward pass, `tokens_BL` are the candidates (-1 where none
        was drawn), and `level_BL` is `Drawn.level_BL`; int32 ``[B, L]`` each.
        """
        raise NotImplementedError


def check_filled(fill: FillRule, filled: Filled, shape: tuple[int, ...]) -> Filled:
    """Returns the output of a fill after checking shapes and dtypes. Errors name the fill."""
    kinds = Proposal(jnp.int32, *[jnp.float32] * 3)
    for name, value, kind in zip(Proposal._fields, filled.proposal, kinds, strict=True):
        returned(value, fill, f"propose(...).proposal.{name}", "B, L", shape, kind)
    returned(filled.is_finite_B, fill, "propose(...).is_finite_B", "B", shape[:1], bool)
    return filled


def at_of_places(
    places_N: jax.Array,
    is_real_N: jax.Array,
    is_grown_N: jax.Array | None,
    *,
    key_B: jax.Array,
    num_positions: int,
) -> At:
    """The positions at the places ``row * L + index``. A position's key is derived from the row's
    key and the position's index on the canvas.
    """
    row_N, index_N = places_N // num_positions, places_N % num_positions
    key_N = jax.vmap(jax.random.fold_in)(key_B[row_N], index_N)
    return At(row_N, index_N, key_N, is_real_N, is_grown_N)


class TokenDraws(NamedTuple):
    """Drawn tokens of a canvas.

    Attributes:
      tokens_BL: int32, the canvas with a drawn token at each open position.
      logprob_BL: float32, log-probability in nats of each drawn token under the distribution that
        it was drawn from, after the chain; 0 elsewhere.
    """

    tokens_BL: jax.Array
    logprob_BL: jax.Array


def draw_tokens(
    tokens_BL: jax.Array,
    key_B: jax.Array,
    *,
    length_B: jax.Array,
    is_seen_BL: jax.Array,
    params: Mapping[str, Any] | Chain | None,
    banned_ids: tuple[int, ...],
    vocab_size: int,
) -> tuple[TokenDraws, Callable[..., TokenDraws]]:
    """The canvas before the first draw, and ``(draws, places_N, is_real_N, clean_NV,
    drawable_NV=None) -> draws``, which writes tokens drawn by `sample_logits`.
    """
    num_rows, num_positions = tokens_BL.shape
    ids_BK = jnp.broadcast_to(jnp.array(banned_ids, jnp.int32), (num_rows, len(banned_ids)))
    bans = LogitBias(ids_BK, jnp.full(ids_BK.shape, -jnp.inf))
    full = chain(bans, chain_of({} if params is None else params, num_rows, vocab_size))
    context = Context(tokens_BL, jnp.zeros_like(tokens_BL), is_seen_BL, length_B)
    prepared = full.prepare(full.init(num_rows), context)

    def draw(
        draws: TokenDraws,
        places_N: jax.Array,
        is_real_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None = None,
    ) -> TokenDraws:
        is_grown_N = None if drawable_NV is None else is_real_N
        at = at_of_places(places_N, is_real_N, is_grown_N, key_B=key_B, num_positions=num_positions)
        from_NV = clean_NV if drawable_NV is None else drawable_NV
        new = TokenDraws(*sample_logits(from_NV, full, at.key_N, at=at, prepared=prepared))
        return put(draws, places_N, is_real_N, new)

    return TokenDraws(tokens_BL, jnp.zeros(tokens_BL.shape, jnp.float32)), draw


def parallel_fill(
    params: Params,
    hidden_BLD: jax.Array,
    tokens_BL: jax.Array,
    key_B: jax.Array,
    *,
    network: Network,
    is_open_BL: jax.Array,
    length_B: jax.Array | None = None,
    settings: Mapping[str, Any] | Chain | None = None,
    banned_ids: tuple[int, ...] = (),
    chunk: int | None = None,
) -> TokenDraws:
    """The canvas with a token at each open position, drawn independently from the LM head.

    The arguments are those of `wavefront_fill`. The cost is proportional to the number of open
    positions, and no ``[B, L, V]`` array exists.
    """
    if length_B is None:
        length_B = jnp.full(tokens_BL.shape[0], tokens_BL.shape[1], jnp.int32)
    is_seen_BL = live_positions(length_B, tokens_BL.shape[1]) & ~is_open_BL
    draws, draw = draw_tokens(
        tokens_BL,
        key_B,
        length_B=length_B,
        is_seen_BL=is_seen_BL,
        params=settings,
        banned_ids=banned_ids,
        vocab_size=network.vocab_size,
    )
    output = TrunkOutput(hidden_BLD)

    def draw_chunk(draws: TokenDraws, places_N: jax.Array, is_real_N: jax.Array) -> TokenDraws:
        return draw(draws, places_N, is_real_N, output.logits(network, params, places_N))

    return fold(is_open_BL, chunk or chunk_size(network.vocab_size), draw_chunk, draws)


def no_candidates(wanted: Wanted) -> Filled:
    """The result of a fill before the first readout."""
    shape = wanted.is_open_BL.shape
    zeros_BL, none_BL = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    return Filled(
        Proposal(none_BL, zeros_BL, zeros_BL, zeros_BL),
        jnp.ones(shape[0], jnp.bool_),
        total_BL=None if wanted.is_scored_BL is None else zeros_BL,
        best_BL=none_BL if wanted.keeps_best else None,
        rule_state=wanted.rule_state,
        drawn=Drawn(zeros_BL, zeros_BL, none_BL) if wanted.is_traced else None,
        signal_BLD=wanted.signal_BLD,
    )


Score = Callable[[jax.Array, At, jax.Array, DrawnTokens], tuple[jax.Array, tuple[jax.Array, ...]]]
"""See `CandidateWriter.score`."""


@dataclass(frozen=True, kw_only=True)
class CandidateWriter:
    """Draws candidates from clean logits and writes them to their positions.

    Attributes:
      chain: logit transforms applied to the clean logits before the draw.
      prepared: results of `Chain.prepare` for this step.
      key_B: random key of each row for this step. A position's key is derived from the row's key
        and the position's index on the canvas.
      own_BL: existing tokens to score instead of drawing a candidate, -1 elsewhere; None if there
        are none.
      num_positions: ``L``.
      score: ``(places_N, at, logits_NV, drawn) -> (score_N, rule_state_N)``, the scores of the
        candidates for the rule of the step, and the new state of their positions.
      method: draw method.
      banned_ids: ids excluded from ``best_BL``, in addition to the row's banned ids.
      signal: ``(logits_NV) -> vectors_ND``, which computes the self-conditioning signal from the
        logits of the draw; None for a network without a signal.
    """

    chain: Chain
    prepared: Any
    key_B: jax.Array
    own_BL: jax.Array | None
    num_positions: int
    score: Score
    method: str
    banned_ids: tuple[int, ...] = ()
    signal: Callable[[jax.Array], jax.Array] | None = None

    def at(
        self, places_N: jax.Array, is_real_N: jax.Array, is_grown_N: jax.Array | None = None
    ) -> At:
        """The positions at the places ``row * L + index``, with their keys."""
        return at_of_places(
            places_N, is_real_N, is_grown_N, key_B=self.key_B, num_positions=self.num_positions
        )

    def write(
        self,
        found: Filled,
        places_N: jax.Array,
        is_real_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None = None,
    ) -> Filled:
        """Adds candidates to `found` at the real places ``row * L + index``.

        Candidates are drawn from `drawable_NV` after the chain and are scored under `clean_NV`. If
        `drawable_NV` is None, candidates are drawn from the clean logits, which are those of the LM
        head.
        """
        own_N = None if self.own_BL is None else at_places(self.own_BL, places_N)
        is_drawn_N = is_real_N if own_N is None else is_real_N & (own_N < 0)
        is_grown_N = None if drawable_NV is None else is_drawn_N
        at = self.at(places_N, is_drawn_N, is_grown_N)
        from_NV = clean_NV if drawable_NV is None else drawable_NV
        ids_N, final_N = sample_logits(
            from_NV,
            self.chain,
            at.key_N,
            at=at,
            prepared=self.prepared,
            method=self.method,
            is_scored=None,
        )
        if own_N is not None:
            ids_N = jnp.where(own_N >= 0, own_N, ids_N)
        logprob_N = log_prob(clean_NV, ids_N)
        is_fine_N = (jnp.isfinite(logprob_N) & jnp.isfinite(final_N)) | ~is_real_N
        total_BL, best_BL = found.total_BL, found.best_BL
        if total_BL is not None and drawable_NV is None:
            # The compiler shares these sums with `log_prob`.
            max_N, weight_NC = vocab.exp_columns(clean_NV.astype(jnp.float32))
            total_N = max_N + jnp.log(weight_NC.sum(-1))
            total_BL = put(total_BL, places_N, is_real_N, total_N)
            if best_BL is not None:
                other_NV = clean_NV
                if own_N is not None:
                    ids_1V = jnp.arange(clean_NV.shape[1])[None]
                    other_NV = jnp.where(ids_1V == own_N[:, None], -jnp.inf, clean_NV)
                best_N = argmax(other_NV)
                banned_1K = jnp.array(self.banned_ids, jnp.int32)[None]
                is_banned_N = jnp.any(best_N[:, None] == banned_1K, axis=1)
                is_banned_N |= self.chain.forbids(best_N, at.row_N)
                best_N = jnp.where(is_banned_N, -1, best_N)
                best_BL = put(best_BL, places_N, is_real_N, best_N)
            # Existing tokens can have probability 0, but drawn tokens cannot.
            is_fine_N |= ~is_drawn_N & jnp.isfinite(total_N)
        drawn = found.drawn
        if drawn is not None:
            policy_N = self.policy(from_NV, ids_N, at)
            entropy_N = vocab.count_and_entropy(clean_NV.astype(jnp.float32))[1]
            pair = drawn.logprob_BL, drawn.entropy_BL
            policy_BL, entropy_BL = put(pair, places_N, is_real_N, (policy_N, entropy_N))
            drawn = drawn._replace(logprob_BL=policy_BL, entropy_BL=entropy_BL)
        signal_BLD, final_NV = found.signal_BLD, None
        if self.signal is not None:
            final_NV = self.chain.apply(self.prepared, clean_NV, at)
            signal_BLD = put(signal_BLD, places_N, is_real_N, self.signal(final_NV))
        inputs = places_N, clean_NV, drawable_NV, ids_N, logprob_N, at
        sure_N, rule_state_N = self._score(*inputs, final_NV)
        proposal = Proposal(ids_N, logprob_N, final_N, sure_N)
        return found._replace(
            proposal=put(found.proposal, places_N, is_real_N, proposal),
            is_finite_B=found.is_finite_B.at[at.row_N].min(is_fine_N),
            total_BL=total_BL,
            best_BL=best_BL,
            rule_state=put(found.rule_state, places_N, is_real_N, rule_state_N),
            drawn=drawn,
            signal_BLD=signal_BLD,
        )

    def scored(
        self, clean_NV: jax.Array, ids_NK: jax.Array, at: At, drawable_NV: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability and confidence of K candidates per position, ``[N, K]``.

        The arguments are those of `write`.
        """
        places_N = at.row_N * self.num_positions + at.index_N

        def of_one(ids_N: jax.Array) -> tuple[jax.Array, jax.Array]:
            logprob_N = log_prob(clean_NV, ids_N)
            sure_N, _ = self._score(places_N, clean_NV, drawable_NV, ids_N, logprob_N, at)
            return logprob_N, sure_N

        return jax.vmap(of_one, in_axes=1, out_axes=1)(ids_NK)

    def policy(self, drawable_NV: jax.Array, ids_N: jax.Array, at: At) -> jax.Array:
        """Log-probability ``[N]`` of drawing these ids, given the logits before the chain.

        The result is 0 in greedy rows, which do not sample.
        """
        final_NV = self.chain.apply(self.prepared, drawable_NV, at)
        return jnp.where(self.chain.is_greedy(at), 0.0, log_prob(final_NV, ids_N))

    def _score(
        self,
        places_N: jax.Array,
        clean_NV: jax.Array,
        drawable_NV: jax.Array | None,
        ids_N: jax.Array,
        logprob_N: jax.Array,
        at: At,
        final_NV: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The result of `score`. `final_NV` are the clean logits after the chain, if known."""

        def filter_logits() -> jax.Array:
            if drawable_NV is None and final_NV is not None:
                return final_NV
            drawable = clean_NV if drawable_NV is None else drawable_NV
            return self.chain.apply(self.prepared, drawable, at)

        drawn = DrawnTokens(
            ids_N=ids_N, row_N=at.row_N, logprob_N=logprob_N, filter_logits=filter_logits
        )
        return self.score(places_N, at, clean_NV, drawn)


@rule
class Parallel(FillRule):
    """Draws a candidate for every open position from the LM head, independently of other positions.

    The open positions of all rows are gathered and processed in chunks. The cost is therefore
    proportional to the number of open positions, and no ``[B, L, V]`` array exists. The key of a
    draw is derived from the row's key and the position's index on the canvas.
    """

    about = "independently of each other"
    allows_host = True

    def propose(self, reader: Reader, writer: CandidateWriter, wanted: Wanted) -> Filled:
        """The proposal, with zeros at positions that are not open."""
        own_BL = writer.own_BL
        is_read_BL = wanted.is_open_BL if own_BL is None else wanted.is_open_BL | (own_BL >= 0)

        def draw(found: Filled, places_N: jax.Array, is_real_N: jax.Array) -> Filled:
            return writer.write(found, places_N, is_real_N, reader.logits(places_N))

        return fold(is_read_BL, reader.chunk, draw, no_candidates(wanted))

    def sources(
        self, reader: Reader, canvas_BL: jax.Array, tokens_BL: jax.Array, level_BL: jax.Array
    ) -> tuple[Source, ...]:
        return (Source(tokens_BL >= 0, reader.chunk, reader.logits),)
