"""Drafts of a block-causal model, verified by the same model with blocks of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import FillRule, LogitTransform, rule
from dlm_jax.sampling import at_places, fold, logits, put, salted, steps_needed, vocab
from dlm_jax.sampling.propose import FillInput, FillOutput, Parallel
from dlm_jax.sampling.transforms import At, Chain
from dlm_jax.settings import UNSET, SettingError, require, require_values

_SALT = 0x73706563
_NEEDS = {
    "order": ("threshold",),
    "remask": ("none",),
    "resample": (False,),
    "guidance": (0.0,),
    "cache": ("none",),
    "threshold_alone": (0,),
    "threshold_least": (1,),
    "structure": ("",),
}
_Verified = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@rule
class Speculative(FillRule):
    """Drafts the open positions in parallel and verifies them token by token.

    The draft x at a position is drawn from q, the model's prediction for the block with its holes.
    A second forward pass with blocks of one token computes p, the prediction at every open position
    given the preceding drafts. From left to right, each draft x is accepted with probability
    ``min(1, p(x) / q(x))``. At the first rejected position, a token is drawn from ``max(p - q, 0)``
    instead, and the remaining positions stay open (Leviathan et al. 2023, Speculative decoding,
    algorithm 1). Both p and q are taken after the row's chain. The text therefore follows p, the
    distribution of decoding one token at a time, for any drafts.

    For ``order = "threshold"``, accepted candidates have the confidence of probability 1, and all
    others that of probability 0. A step writes at least one token. Each block needs one step per
    hole, because the last step of a block would write all remaining holes without verification.
    """

    about = "a draft, verified token by token by a block-causal model"

    @classmethod
    def check(cls, row: Any) -> None:
        what = "with fill='speculative', which verifies a draft of the whole row"
        require_values(row, _NEEDS, f"is not supported {what}")
        why, remedy = f"commits no or all drafts {what}", "for example, use threshold=0.9"
        commits_some = 0 < row.threshold < (1 if row.threshold_above else 2)
        require(commits_some, "threshold", row.threshold, why, remedy)
        for name, is_on in (("edit", row.edits), ("renoise_start", row.renoises)):
            require(not is_on, name, UNSET, f"is not supported {what}", "leave it at its default")
        check_chain(row, "fill='speculative'")

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        why = "requires model.attention_type='block_causal'"
        require(facts.block_length > 0, "fill", "speculative", why, "use fill='parallel'")

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        (holes,) = np.nonzero(is_open)
        begin = holes[0] // facts.block_length * facts.block_length
        needed = steps_needed(holes, row.block_length, begin)
        why = f"is less than the {needed} that fill='speculative' requires to verify every token"
        require(row.steps >= needed, "steps", row.steps, why, f"use steps={needed}")

    def propose(self, fill: FillInput) -> FillOutput:
        """The accepted candidates and a replacement for the first rejected one."""
        drafted = Parallel().propose(fill)
        is_open_BL, draft = fill.is_open_BL, drafted.proposal
        clean_BL = jnp.where(is_open_BL, draft.tokens_BL, fill.tokens_BL)
        network = fill.network
        assert network.beside_clean is not None
        # Positions that are not live contain PAD, which does not affect the positions read below.
        length_B = jnp.full(is_open_BL.shape[0], is_open_BL.shape[1], jnp.int32)
        hidden_BLD = network.beside_clean(
            fill.params, fill.tokens_BL, clean_BL, length_B, block_length=1
        )
        hidden_PD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])

        def true_logits(places_N: jax.Array) -> jax.Array:
            return logits(network, fill.params, hidden_PD[places_N])

        is_accepted_BL, other_BL, logprob_BL, other_logprob_BL = _verified(
            fill, clean_BL, true_logits
        )
        is_wrong_BL = is_open_BL & ~is_accepted_BL
        rank_BL = jnp.cumsum(is_wrong_BL, axis=1)
        is_first_BL = is_wrong_BL & (rank_BL == 1)
        is_taken_BL = is_open_BL & ((rank_BL == 0) | is_first_BL)
        proposal = draft._replace(
            tokens_BL=jnp.where(is_first_BL, other_BL, draft.tokens_BL),
            logprob_BL=jnp.where(is_first_BL, other_logprob_BL, logprob_BL),
            confidence_BL=jnp.where(is_taken_BL, jnp.inf, -jnp.inf),
        )
        forwards_B = jnp.any(is_open_BL, axis=1).astype(jnp.int32)
        return drafted._replace(proposal=proposal, counts={"forwards": forwards_B})


def _verified(
    fill: FillInput, draft_BL: jax.Array, true_logits: Callable[[jax.Array], jax.Array]
) -> _Verified:
    """True at accepted drafts, the replacements, and both log-probabilities; ``[B, L]`` each.

    The replacement is used if the draft is the first rejected one.
    """

    def verify(found: _Verified, places_N: jax.Array, is_real_N: jax.Array) -> _Verified:
        at = fill.at(places_N, is_real_N)
        draft_N = at_places(draft_BL, places_N)
        true_NV = true_logits(places_N)
        p_NV, q_NV = (
            chain_probabilities(fill.chain, fill.chain_state, logits_NV, at)
            for logits_NV in (true_NV, fill.logits(places_N))
        )
        is_accepted_N, other_N = accept(p_NV, q_NV, draft_N, salted(at.key_N, _SALT))
        made = (
            is_accepted_N,
            other_N,
            vocab.log_prob(true_NV, draft_N),
            vocab.log_prob(true_NV, other_N),
        )
        return put(found, places_N, is_real_N, made)

    zeros_BL = jnp.zeros(draft_BL.shape, jnp.float32)
    none = (zeros_BL > 0, zeros_BL.astype(jnp.int32), zeros_BL, zeros_BL)
    return fold(fill.is_open_BL, fill.chunk, verify, none)


def check_chain(row: Any, what: str) -> None:
    """Raises SettingError for a transform of the row that reads tokens of the same step."""
    for transform in row.table.chained(row):
        if transform.init is not LogitTransform.init and transform.is_used(row):
            name = next((s.name for s in transform.settings() if s.activates), transform.name)
            why = f"depends on the tokens of the same step, which {what} verifies at once"
            raise SettingError(name, getattr(row, name, UNSET), why, "leave it at its default")


def accept(
    p_NV: jax.Array, q_NV: jax.Array, draft_N: jax.Array, key_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """True where a draft from q is accepted, and the token that replaces it otherwise, so that the
    result follows p. A row of zeros in q has no draft: its token is drawn from p.
    """
    p_N, q_N = (jnp.take_along_axis(x, draft_N[:, None], axis=1)[:, 0] for x in (p_NV, q_NV))
    two = jax.vmap(jax.random.split)(key_N)
    uniform_N = jax.vmap(jax.random.uniform)(two[:, 0])
    rest_NV = jnp.maximum(p_NV - q_NV, 0.0)
    # If the residual max(p - q, 0) rounds to zero, p and q are equal.
    is_any_N1 = jnp.any(rest_NV > 0, axis=1, keepdims=True)
    other_N = vocab.draw(jnp.log(jnp.where(is_any_N1, rest_NV, p_NV)), two[:, 1])
    return uniform_N * q_N < p_N, other_N


def chain_probabilities(chain: Chain, chain_state: Any, logits_NV: jax.Array, at: At) -> jax.Array:
    """The probabilities after a chain; one-hot for a greedy row, zeros if no id is possible."""
    final_NV = chain.apply(chain_state, logits_NV, at)
    best_NV = jax.nn.one_hot(vocab.argmax(final_NV), final_NV.shape[1])
    is_greedy_N1 = chain.is_greedy(at)[:, None]
    is_possible_N1 = jnp.max(final_NV, axis=1, keepdims=True) > -jnp.inf  # False for NaN
    all_NV = jnp.where(is_greedy_N1, best_NV, jax.nn.softmax(final_NV, axis=1))
    return jnp.where(is_possible_N1, all_NV, 0.0)
