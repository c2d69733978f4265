"""Lossless drafting: a drafter writes a block, and the causal model verifies it in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import (
    CommitRule,
    Counters,
    FillRule,
    KVCache,
    Setting,
    Wavefront,
    per_row,
    rule,
    static,
)
from dlm_jax.contrib.drafter import Drafter, Params
from dlm_jax.contrib.speculative import accept, chain_probabilities, check_chain
from dlm_jax.sampling import (
    GIVEN,
    NEVER,
    at_places,
    fold,
    grown_logits,
    place_of_largest,
    put,
    salted,
    vocab,
)
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.forward import forward
from dlm_jax.sampling.positions import TrunkOutput
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose import FillInput, FillOutput, Parallel
from dlm_jax.sampling.state import (
    State,
    end_step,
    step_chain,
    step_keys,
    visible_context,
)
from dlm_jax.sampling.transforms import At, Context
from dlm_jax.settings import require, require_values

_SALT, _DRAFT_SALT = 0x76657269, 0x64726674
_NEEDS: dict[str, tuple[Any, ...]] = {
    "cache": ("drafts",), "fill": ("parallel", "auto"), "remask": ("none",), "resample": (False,),
    "guidance": (0.0,), "block_length": (0, 1), "structure": ("",),
}  # fmt: skip


DRAFTS = {
    "parallel": "independently of each other",
    "markov": "from left to right by the Markov head, given the token before",
    "waves": "from left to right by the sampler head, given its neighbours",
    "free_waves": "greedy rows: in waves by the sampler head, from the most confident position",
}
"""How the tokens of a block are drafted."""


class Markov(FillRule):
    """Draws from left to right, each token given the one before, by a head ``markov``."""

    def propose(self, fill: FillInput) -> FillOutput:
        place_1L = jnp.arange(fill.tokens_BL.shape[1])[None]
        level_BL = jnp.broadcast_to(place_1L, fill.tokens_BL.shape)

        def draw(out: FillOutput, places_N: jax.Array, is_real_N: jax.Array) -> FillOutput:
            shown_BL = jnp.where(fill.is_open_BL, out.proposal.tokens_BL, fill.tokens_BL)
            logits_NV = _markov_logits(fill, shown_BL, places_N)
            return fill.draw(out, places_N, is_real_N, logits_NV, logits_NV)

        out = fold(fill.is_open_BL, fill.chunk, draw, fill.start(), level_BL=level_BL)
        return out._replace(level_BL=level_BL)

    def logits(
        self, fill: FillInput, tokens_BL: jax.Array, level_BL: jax.Array
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        shown_BL = jnp.where(fill.is_open_BL, tokens_BL, fill.tokens_BL)
        return lambda places_N, is_real_N: _markov_logits(fill, shown_BL, places_N)


def _markov_logits(fill: FillInput, shown_BL: jax.Array, places_N: jax.Array) -> jax.Array:
    left_N = at_places(shown_BL, jnp.maximum(places_N - 1, 0))
    head = fill.network.heads["markov"]
    return fill.output.read(lambda hidden_ND: head(fill.params, left_N, hidden_ND), places_N)


class FreeWaves(Wavefront):
    """Waves from the most confident position of each row.

    Given tokens are neighbours, but start no wave.
    """

    def propose(self, fill: FillInput) -> FillOutput:
        def draw(out: FillOutput, places_N: jax.Array, is_real_N: jax.Array) -> FillOutput:
            return fill.draw(out, places_N, is_real_N, fill.logits(places_N))

        out = fold(fill.is_open_BL, fill.chunk, draw, fill.start())
        sure_BL = jnp.where(fill.is_open_BL, out.proposal.logprob_BL, -jnp.inf)
        place_1L, first_B1 = jnp.arange(sure_BL.shape[1])[None], place_of_largest(sure_BL)[:, None]
        is_grown_BL = fill.is_open_BL & (place_1L != first_B1)
        level_BL = jnp.where(fill.is_open_BL, 2 * jnp.abs(place_1L - first_B1), NEVER)
        level_BL = jnp.where(fill.is_seen_BL, GIVEN, level_BL)
        grown = grown_logits(fill, level_BL, self.temperature_B)

        def grow(out: FillOutput, places_N: jax.Array, is_real_N: jax.Array) -> FillOutput:
            return fill.draw(out, places_N, is_real_N, *grown(out.proposal.tokens_BL, places_N))

        out = fold(is_grown_BL, fill.chunk, grow, out, level_BL=level_BL)
        return out._replace(level_BL=level_BL)


@rule
class Drafts(KVCache):
    """Computes the drafts of each row and the position behind them, and caches all keys and values.

    Those of accepted drafts stay valid, so that no token is computed twice.
    """

    about = "all tokens; computes the next drafts; exact, for order='drafted'"

    size: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def check(cls, row: Any) -> None:
        require(
            row.order == "drafted", "cache", "drafts", "requires order='drafted'", "use 'exact'"
        )

    def read(
        self, block: Any, first_B: jax.Array, num_positions: int
    ) -> tuple[jax.Array, jax.Array, int]:
        return first_B, first_B + self.size, min(self.size, num_positions)

    def refresh(self, block: Any, begin_B: jax.Array, valid_B: jax.Array) -> tuple[jax.Array, None]:
        return valid_B != begin_B, None


class Verified(NamedTuple):
    """The positions of each row's block, ``[B, W]``, or some of them, ``[N]``."""

    is_accepted: jax.Array
    is_draft: jax.Array  # a draft was verified here
    token: jax.Array  # int32: the accepted draft, or what the model draws instead
    logprob: jax.Array  # float32, of the token under the model's clean logits
    is_fine: jax.Array  # False if the model's logits are not finite or allow no id


_HELP = "; ".join(f"{name} ({text})" for name, text in DRAFTS.items())


@rule
class Drafted(CommitRule):
    """Drafts the next tokens and verifies them by the causal model, in one pass per step.

    The draft x of a position is drawn from q, the drafter's prediction given the drafts that its
    fill reads. One forward pass computes p, the model's prediction of each of these tokens given
    all tokens before it, and of the next one. From left to right, each x is accepted with
    probability ``min(1, p(x) / q(x))``; at the first rejected one, a token is drawn from ``max(p -
    q, 0)``, and behind the last accepted one from p (Leviathan et al. 2023, algorithm 1). Both p
    and q are taken after the row's chain. So the text follows the law of one token at a time, for
    any drafter.

    This requires that q of a position depends on no later draft: the acceptance of a draft says
    something about the drafts that it was drawn beside. Waves in any order are therefore refused
    for rows that sample; a greedy text is exact for any draft.

    A step writes between one and ``K + 1`` tokens, and computes K + 1 positions whatever the number
    of drafts. In the first step of a row, the drafter knows the last tokens alone, because no
    hidden vector is cached yet. `State.counters` has the verified drafts as ``filled``.
    """

    name = "drafted"
    about = "a draft of several tokens, verified by the causal model in one pass"

    length_B: jax.Array = per_row(
        Setting("draft_length", 0, "drafted: number of drafts, at most the block; 0: the block", 0)
    )
    confidence_B: jax.Array = per_row(
        Setting(
            "draft_confidence", 0.0, "drafted: ends drafts where the best token is less probable",
            low=0.0, high=1.0,
        )
    )  # fmt: skip
    is_verified_B: jax.Array = per_row(
        Setting(
            "draft_verified",
            True,
            "drafted: verify drafts; otherwise all of them are written",
            activates=False,
        )
    )
    draft_by: str = static(
        Setting("draft_by", "waves", f"drafted: {_HELP}", choices={name: name for name in DRAFTS})
    )

    @classmethod
    def check(cls, row: Any) -> None:
        require_values(row, _NEEDS, "is not supported with order='drafted'")
        for name, is_on in (("edit", row.edits), ("renoise_start", row.renoises)):
            why = "is not supported with order='drafted'"
            require(not is_on, name, getattr(row, name), why, "leave it at its default")
        is_exact = row.draft_by != "free_waves" or row.is_greedy or not row.draft_verified
        why = "drafts beside later drafts, whose verification is exact for temperature=0 only"
        require(is_exact, "draft_by", row.draft_by, why, "use draft_by='waves'")
        why = "follows the steps, of which order='drafted' takes fewer"
        is_constant = row.temperature_end in (-1, row.temperature)
        require(is_constant, "temperature_end", row.temperature_end, why, "leave it at its default")
        check_chain(row, "order='drafted'")

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        why = "requires a causal model with a drafter, which this model lacks"
        is_fine = facts.is_causal and "drafter" in facts.heads
        require(is_fine, "order", "drafted", why, "add one by dlm_jax.contrib.drafter.load")

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        least = int(is_open.sum())
        why = f"is less than the {least} that order='drafted' takes if no draft is accepted"
        require(row.steps >= least, "steps", row.steps, why, f"use steps={least} or more")

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Any:
        """Not called, because the rule has its own step."""
        raise NotImplementedError

    def step(self, program: Program, params: Params, state: State) -> State:
        """One step of every running row; other rows remain bitwise unchanged."""
        drafter: Drafter = program.network.heads["drafter"]
        size, canvas = drafter.shape.block_length, state.canvas
        num_rows, num_positions = canvas.tokens_BL.shape
        runs_B, row_B1 = state.is_running_B, jnp.arange(num_rows)[:, None]
        context, key_B = visible_context(state, mask_id=program.mask_id), step_keys(state)[0]
        chain = step_chain(state)
        chain_state = chain.init(context, state.chain_state)

        # The holes to write: those from the first one up to the next given token.
        is_hole_BL = ~canvas.frozen_BL & runs_B[:, None] & (canvas.tokens_BL == program.mask_id)
        first_B = jnp.where(jnp.any(is_hole_BL, axis=1), place_of_largest(is_hole_BL), 0)
        first_B = first_B.astype(jnp.int32)
        place_BW = first_B[:, None] + jnp.arange(size + 1)[None]
        inside_BW = jnp.minimum(place_BW, num_positions - 1)
        is_run_BW = is_hole_BL[row_B1, inside_BW] & (place_BW < num_positions)
        is_run_BW = jnp.cumprod(is_run_BW, axis=1) > 0
        # The last hole is left to the model, which draws a token behind the accepted drafts.
        limit_B = jnp.where(self.length_B > 0, self.length_B, size)
        count_B = jnp.minimum(limit_B, jnp.sum(is_run_BW, axis=1) - 1)

        # Draft, on a canvas of the last token and the block.
        fill_rule, fill = self.draft_input(program, params, state, first_B, count_B)
        filled = fill_rule.propose(fill)
        drafts_BM, level_BM = filled.proposal.tokens_BL, filled.level_BL
        if level_BM is None:
            level_BM = jnp.zeros_like(drafts_BM)
        drawn_from = fill_rule.logits(fill, drafts_BM, level_BM)
        draft_BK = drafts_BM[:, 1:]
        is_draft_BW = jnp.arange(size + 1)[None] < count_B[:, None]

        # Forward, over the drafts and the position behind them.
        at_BW = jnp.where(is_draft_BW, place_BW, num_positions)
        shown_BL = canvas.tokens_BL.at[row_B1, at_BW[:, :-1]].set(draft_BK, mode="drop")
        shown = state._replace(
            canvas=canvas._replace(tokens_BL=shown_BL),
            rules=state.rules._replace(cache=Drafts(size + 1)),
        )
        is_first_BL = jnp.arange(num_positions)[None] == first_B[:, None]
        output, cache, counters = forward(program, params, shown, is_first_BL & is_hole_BL)

        # Verify.
        zero_BW = jnp.zeros(place_BW.shape, jnp.int32)
        no_BW = zero_BW > 0
        start = Verified(no_BW, no_BW, zero_BW, zero_BW.astype(jnp.float32), no_BW)

        def verify(done: Verified, places_N: jax.Array, is_real_N: jax.Array) -> Verified:
            row_N, offset_N = jnp.divmod(places_N, size + 1)
            index_N = inside_BW[row_N, offset_N]
            key_N = salted(jax.vmap(jax.random.fold_in)(key_B[row_N], index_N), _SALT)
            at = At(row_N, index_N, key_N, is_real_N)
            is_draft_N = is_draft_BW[row_N, offset_N]
            draft_N = jnp.pad(draft_BK, ((0, 0), (0, 1)))[row_N, offset_N]
            clean_NV = output.logits(program.network, params, row_N * num_positions + index_N)
            # The draft at an offset is on its canvas one place later.
            draft_place_N = row_N * (size + 1) + jnp.minimum(offset_N + 1, size)
            p_NV = chain_probabilities(chain, chain_state, clean_NV, at)
            # The keys are those of the draft, so that random transforms are the same.
            head_NV = drawn_from(draft_place_N, is_real_N)
            draft_at = fill.at(draft_place_N, is_real_N)
            q_NV = chain_probabilities(fill.chain, fill.chain_state, head_NV, draft_at)
            # Whether a draft counts does not depend on the draft itself, or the law would change.
            sureness_N = jnp.max(jax.nn.softmax(head_NV, axis=1), axis=1)
            is_draft_N &= sureness_N >= self.confidence_B[row_N]
            q_NV = jnp.where(is_draft_N[:, None], q_NV, 0.0)
            is_accepted_N, other_N = accept(p_NV, q_NV, draft_N, key_N)
            is_accepted_N = is_draft_N & (is_accepted_N | ~self.is_verified_B[row_N])
            token_N = jnp.where(is_accepted_N, draft_N, other_N)
            logprob_N = vocab.log_prob(clean_NV, token_N)
            is_fine_N = jnp.isfinite(logprob_N) & jnp.any(p_NV > 0, axis=1)
            new = Verified(is_accepted_N, is_draft_N, token_N, logprob_N, is_fine_N)
            return put(done, places_N, is_real_N, new)

        is_read_BW = is_run_BW & (jnp.arange(size + 1)[None] <= count_B[:, None])
        verified = fold(is_read_BW, program.chunk, verify, start)
        count_B = jnp.sum(jnp.cumprod(verified.is_draft, axis=1), axis=1)

        # Commit the accepted drafts and one more token, up to the first EOS.
        accepted_B = jnp.sum(jnp.cumprod(verified.is_accepted, axis=1), axis=1)
        is_written_BW = is_read_BW & (jnp.arange(size + 1)[None] <= accepted_B[:, None])
        is_end_BW = jnp.isin(verified.token, jnp.array(program.eos_ids, jnp.int32)) & is_written_BW
        is_written_BW &= jnp.cumsum(is_end_BW, axis=1) - is_end_BW == 0
        is_finite_B = jnp.all(verified.is_fine | ~is_written_BW, axis=1)
        is_written_BW &= is_finite_B[:, None]
        at_BW = jnp.where(is_written_BW, place_BW, num_positions)

        def write(old_BL: jax.Array, new_BW: jax.Array) -> jax.Array:
            return old_BL.at[row_B1, at_BW].set(new_BW, mode="drop")

        written_B = jnp.sum(is_written_BW, axis=1)
        counters = counters.plus(Counters(filled=jnp.where(runs_B, count_B, 0), **filled.counts))
        assert cache is not None
        valid_B = jnp.where(runs_B, first_B + written_B, cache.valid_B).astype(jnp.int32)
        state = state._replace(
            canvas=canvas._replace(tokens_BL=write(canvas.tokens_BL, verified.token)),
            logprob_BL=write(state.logprob_BL, verified.logprob),
            committed_BL=write(
                state.committed_BL, jnp.broadcast_to(state.step_B[:, None], at_BW.shape)
            ),
            cache=cache._replace(valid_B=valid_B),
            counters=state.counters.plus(counters),
        )
        no_B = jnp.zeros_like(runs_B)
        return end_step(
            program, state, runs_B, is_finite_B=is_finite_B, stays_B=no_B, changes_B=no_B
        )

    def draft_input(
        self, program: Program, params: Params, state: State, first_B: jax.Array, count_B: jax.Array
    ) -> tuple[FillRule, FillInput]:
        """The fill of a canvas ``[B, 1 + K]``: the last token, and a hole for each draft."""
        drafter: Drafter = program.network.heads["drafter"]
        shape, tokens_BL = drafter.shape, state.canvas.tokens_BL
        assert state.cache is not None
        hidden_BLD = state.cache.kv_cache[1]
        row_B1 = jnp.arange(tokens_BL.shape[0])[:, None]
        place_BC = first_B[:, None] - shape.context + jnp.arange(shape.context)[None]
        # The first position of a row has no prediction, and so no hidden vector.
        is_there_BC = (place_BC >= 1) & (place_BC < state.cache.valid_B[:, None])
        context_BCD = hidden_BLD[row_B1, jnp.maximum(place_BC, 0)]
        context_BCD = jnp.where(is_there_BC[:, :, None], context_BCD, 0.0)
        ids_BC = jnp.where(place_BC >= 0, tokens_BL[row_B1, jnp.maximum(place_BC, 0)], -1)
        last_B = jnp.maximum(ids_BC[:, -1], 0)
        hidden_BKD = drafter.block(params, context_BCD, ids_BC)
        hidden_BMD = jnp.pad(hidden_BKD, ((0, 0), (1, 0), (0, 0)))

        shown_BM = jnp.pad(last_B[:, None], ((0, 0), (0, shape.block_length)))
        offset_1M = jnp.arange(shape.block_length + 1)[None]
        is_open_BM = (offset_1M >= 1) & (offset_1M <= count_B[:, None])
        is_seen_BM = jnp.broadcast_to(offset_1M == 0, is_open_BM.shape)
        length_B = jnp.full(len(first_B), shape.block_length + 1, jnp.int32)
        context = Context(shown_BM, jnp.full_like(shown_BM, -1), is_seen_BM, length_B)
        key_B, chain = salted(step_keys(state)[0], _DRAFT_SALT), step_chain(state)
        fill = FillInput(
            network=drafter.network,
            params=params,
            output=TrunkOutput(hidden_BMD),
            chunk=min(program.chunk, shown_BM.size),
            tokens_BL=shown_BM,
            length_B=length_B,
            is_open_BL=is_open_BM,
            is_seen_BL=is_seen_BM,
            chain=chain,
            chain_state=chain.init(context, state.chain_state),
            key_B=key_B,
            banned_ids=program.banned_ids,
        )
        ones_B, no_B = jnp.ones(len(first_B)), jnp.zeros(len(first_B), bool)
        if self.draft_by in ("parallel", "markov"):
            return (Parallel() if self.draft_by == "parallel" else Markov()), fill
        waves = Wavefront if self.draft_by == "waves" else FreeWaves
        rule = waves(0.01 * ones_B, no_B, temperature_B=ones_B, is_one_sided_B=no_B)
        return rule, fill
