"""Training objectives, which define the network inputs and targets of a batch.

An `Objective` draws all noise for the whole batch before the network runs. The noise therefore does
not depend on how the batch is split into microbatches, and the weights are known before the first
microbatch runs. `draw_all` divides the rows of a batch among several objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import ObjectiveConfig
from dlm_jax.objectives import corruption
from dlm_jax.objectives.corruption import Schedule, mask_independently, stratified_times
from dlm_jax.objectives.losses import Loss
from dlm_jax.types import (
    Network,
    Params,
    left_of,
    live_positions,
    packed,
    returned,
    right_of,
    unpacked,
)

USUAL_MISPRINTS = ObjectiveConfig.misprint_kinds


class Batch(NamedTuple):
    """Rows to train on.

    Several texts can stand one after another in a *packed* row; numbers are then those of the
    texts, ``[B, T]``, and 0 for missing texts. `Objective.draw` receives rows of one text.

    Attributes:
      tokens_BL: int32, clean tokens.
      length_B: int32, number of live tokens in each row.
      given_B: int32, number of leading tokens that are given, such as a prompt. Given tokens are
        shown unchanged and not predicted.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    given_B: jax.Array

    def is_free_BL(self) -> jax.Array:
        if self.length_B.ndim == 2:
            return packed(self.unpacked().is_free_BL(), self.length_B)
        place_1L = jnp.arange(self.tokens_BL.shape[1])[None]
        return (place_1L < self.length_B[:, None]) & (place_1L >= self.given_B[:, None])

    def unpacked(self) -> Batch:
        """The texts of packed rows in rows of their own; other rows unchanged."""
        if self.length_B.ndim == 1:
            return self
        numbers = self.length_B.reshape(-1), self.given_B.reshape(-1)
        return Batch(unpacked(self.tokens_BL, self.length_B), *numbers)

    def with_first_given(self) -> Batch:
        """The rows, with at least their first token given."""
        return self._replace(given_B=jnp.maximum(self.given_B, 1))


class Drawn(NamedTuple):
    """What an objective draws for a batch before the network runs.

    Each leaf is ``[B, ...]`` or a scalar; scalars are totals over the whole batch.

    Attributes:
      batch: the rows to predict.
      shown_BL: int32, canvas that the trunk reads.
      weight_BL: float32, weight of the cross-entropy at each position; 0 where nothing is
        predicted.
      total: float32 scalar, divisor of the weighted sum.
      noise: what else the loss reads. In the batch of a step, a dict of what each objective and
        each head drew, keyed by name; for the loss of a head, the result of its `draw`.
      hidden_BLD: for heads, the output of the trunk for `shown_BL`.
    """

    batch: Batch
    shown_BL: jax.Array
    weight_BL: jax.Array
    total: jax.Array
    noise: Any = ()
    hidden_BLD: Any = None

    def is_supervised_BL(self) -> jax.Array:
        """True at the positions where an objective predicts the token."""
        return self.weight_BL > 0

    def packed(self, num_rows: int) -> Drawn:
        """What was drawn for rows of one text, ``[B * T, ...]``, for `num_rows` packed rows.

        Values of positions are then ``[B, L, ...]``, and values of texts ``[B, T, ...]``.
        """
        length_BT = self.batch.length_B.reshape(num_rows, -1)

        def pack(x: Any) -> Any:
            if isinstance(x, Drawn):
                return x.packed(num_rows)
            if jnp.ndim(x) == 0:
                return x
            if x.shape[:2] == self.shown_BL.shape:
                return packed(x, length_BT)
            return x.reshape(num_rows, -1, *x.shape[1:])

        is_leaf = lambda x: isinstance(x, Drawn) and x is not self  # noqa: E731
        return jax.tree.map(pack, self, is_leaf=is_leaf)


@dataclass(frozen=True)
class Objective:
    """An objective of training.

    Attributes:
      draw: ``(batch, key) -> drawn``, a `Drawn` with all random values, drawn for the whole batch
        before it is split into microbatches. Rows of other objectives have length 0. An objective
        with its own `loss` can draw another pytree, whose leaves are ``[B, ...]`` or scalars; heads
        then read the true rows, of which they learn nothing.
      loss: ``(network, params, drawn) -> (sum, weight)`` or a `Loss`, which can run the network any
        number of times. None means the weighted cross-entropy of the tokens of ``drawn.batch``
        given ``drawn.shown_BL``, for which all such objectives and the heads share one pass of the
        trunk.
      share: fraction of the rows (rounded) and of the loss; those of a run add up to 1.
    """

    draw: Callable[[Batch, jax.Array], Any]
    loss: Callable[[Network, Params, Any], Loss | tuple[jax.Array, jax.Array]] | None = None
    share: float = 1.0


MAIN = "main"
"""The name of the group of all parameters that do not belong to a head."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head on the trunk: an objective of its own parameters, which reads what the objectives of
    the model drew. Heads are passed by name, which is that of their parameters and ends in
    ``_head``. Optimiser groups, stages, metrics (without ``_head``) and checkpoints use this name.

    Attributes:
      loss: ``(network, params, drawn) -> (sum, weight)`` or a `Loss`. `drawn` is the `Drawn` of the
        batch, with what `draw` returned as ``noise`` and the trunk's output as ``hidden_BLD``. Only
        the head's own parameters have a gradient, unless it `trains_trunk`. ``network.heads`` lacks
        the heads that do not train yet.
      draw: ``(drawn, key) -> noise``, a pytree of random values and totals, drawn for the whole
        batch before it is split into microbatches. Each leaf is ``[B, ...]`` or a scalar.
      init: ``(key) -> params``; None if `Network.init` creates the parameters.
      trains_trunk: whether the gradient flows into other parameters. If False, the other parameters
        are bitwise equal to those of a run without the head.
      start: first step at which the head can train, and that of its learning rate.
      weight: factor of the loss, or a function of the step, whose values are metrics with
        ``_alpha``. The head trains from the first step on, not before `start`, at which it is not
        0: even with the weight 0, a loss changes the rounding of the others.
    """

    loss: Callable[[Network, Params, Drawn], Loss | tuple[jax.Array, jax.Array]]
    draw: Callable[[Drawn, jax.Array], Any] = lambda drawn, key: ()
    init: Callable[[jax.Array], Params] | None = None
    trains_trunk: bool = False
    start: int = 0
    weight: float | Callable[[jax.Array], jax.Array] = 1.0

    def weight_at(self, step: jax.Array) -> jax.Array | float:
        """The weight of the loss at a step."""
        return self.weight(step) if callable(self.weight) else self.weight


SMALLEST_TIME = 1e-3


def elbo(
    batch: Batch,
    key: jax.Array,
    *,
    schedule: Schedule,
    mask_id: int,
    block_length: int = 0,
    over: str = "tokens",
    is_weighted: bool = True,
) -> Drawn:
    """One-sample estimate of the continuous-time negative ELBO of masked diffusion, per token.

    The bound is ``E_t [ -alpha'(t) / (1 - alpha(t)) * sum of the hidden tokens' cross-entropy ]``,
    with one low-discrepancy time per row (Shi et al. 2024, equation 6; Sahoo et al. 2024, equation
    11), or per block in a block-causal model. The bound of a block-causal model is the sum over its
    blocks, each conditioned on the clean blocks before it (Arriola et al. 2025, Block diffusion,
    equation 6). Times below 1e-3 are not drawn; they contribute at most 1.6e-3 to the bound.

    Two arguments select other losses. `over` is the divisor of the sum. ``tokens``: the number of
    all tokens that are not given (pre-training of LLaDA, Nie et al. 2025, algorithm 1); ``rows``:
    the number of such tokens in each row, followed by the mean over rows (instruction tuning of
    LLaDA, algorithm 2); ``masked``: the number of hidden tokens (Dream). Without `is_weighted`,
    tokens have equal weights, as in LLaDA2 and Fast-dLLM v2.
    """
    time_key, mask_key = jax.random.split(key)
    is_free_BL = batch.is_free_BL()
    num_rows, num_positions = is_free_BL.shape
    t = times_of(time_key, num_rows, num_positions, block_length, smallest=SMALLEST_TIME)
    is_masked_BL = mask_independently(mask_key, schedule.masked_ratio(t), is_free_BL)
    weight = schedule.weight(t) if is_weighted else jnp.ones_like(t)
    weight_BL = jnp.where(is_masked_BL, weight if weight.ndim == 2 else weight[:, None], 0.0)
    free_B = jnp.sum(is_free_BL, axis=1)
    total = jnp.sum(free_B)
    if over == "rows":
        weight_BL /= jnp.maximum(free_B, 1)[:, None]
        total = jnp.sum(free_B > 0)
    elif over == "masked":
        total = jnp.sum(is_masked_BL)
    shown_BL = jnp.where(is_masked_BL, mask_id, batch.tokens_BL)
    return Drawn(batch, shown_BL, weight_BL, total.astype(jnp.float32))


def times_of(
    key: jax.Array, num_rows: int, num_positions: int, block_length: int, *, smallest: float = 0.0
) -> jax.Array:
    """Low-discrepancy times ``[B]``, or ``[B, L]`` for the blocks of a block-causal model."""
    if not block_length:
        return stratified_times(key, num_rows, smallest=smallest)
    num_blocks = -(-num_positions // block_length)
    t_P = stratified_times(key, num_rows * num_blocks, smallest=smallest)
    # The strata of the blocks in a row are far apart, so that each row covers all times.
    t_BN = t_P.reshape(num_blocks, num_rows).T
    return jnp.repeat(t_BN, block_length, axis=1)[:, :num_positions]


def denoising(
    batch: Batch,
    key: jax.Array,
    *,
    settings: ObjectiveConfig,
    mask_id: int,
    random_ids: tuple[int, ...],
) -> Drawn:
    """Plain cross-entropy at the positions that a corruption pattern selects.

    Each row uses one pattern, drawn uniformly. ``random`` and ``sticky`` select a fraction of the
    row that is uniform on (0, 1]. With identity targets, every free position is predicted, whether
    or not it is selected.
    """
    is_free_BL = batch.is_free_BL()
    num_rows = is_free_BL.shape[0]
    choice_key, ratio_key, show_key, *keys = jax.random.split(key, 3 + len(settings.patterns))
    ratio_B = 1.0 - jax.random.uniform(ratio_key, (num_rows,))
    select = {
        "random": lambda key: mask_independently(key, ratio_B, is_free_BL),
        "sticky": lambda key: corruption.select_sticky(
            key, ratio_B, is_free_BL, alone=0.03, beside=0.3
        ),
        "span": lambda key: corruption.select_spans(key, is_free_BL, count=settings.span_count),
    }
    choice_B = jax.random.randint(choice_key, (num_rows,), 0, len(settings.patterns))
    is_selected_BL = jnp.zeros_like(is_free_BL)
    for number, (name, pattern_key) in enumerate(zip(settings.patterns, keys, strict=True)):
        is_selected_BL |= select[name](pattern_key) & (choice_B == number)[:, None]
    shown_BL = corruption.show(
        show_key,
        batch.tokens_BL,
        is_selected_BL,
        mask_share=settings.mask_share,
        random_share=settings.random_share,
        mask_id=mask_id,
        random_ids=random_ids,
    )
    is_predicted_BL = is_free_BL if settings.identity_targets else is_selected_BL
    weight_BL = is_predicted_BL.astype(jnp.float32)
    return Drawn(batch, shown_BL, weight_BL, jnp.sum(weight_BL))


def misprint(
    key: jax.Array,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_free_BL: jax.Array,
    ratio_B: jax.Array,
    *,
    kinds: Sequence[str] = USUAL_MISPRINTS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Misprints each free position with the probability of its row.

    A token is removed (*missing*), replaced (*wrong*), preceded by an extra token (*stray*), or
    swapped with the next token (*transposed*). *missing_pair* and *wrong_pair* also apply to the
    next token, and *stray_pair* inserts two tokens. Half of the stray tokens repeat the preceding
    tokens. The other stray tokens and all wrong tokens are drawn from the row. A stray token never
    follows a missing token, and a stray token that equals its successor is not a misprint. If the
    next token is given or is itself misprinted, it is not changed and no transposition occurs.

    `is_free_BL` is True at live tokens that can be misprinted. `kinds` are names from
    `dlm_jax.config.MISPRINTS`, drawn uniformly; a name that occurs twice is twice as likely.

    Returns:
      The int32 canvas ``[B, L]``, the target of each position, and the number of live tokens in
      each row, at most the length of the canvas. At the position after a missing token, the target
      is the missing token. At a stray token, it is the next correct token. At all other positions,
      it is the correct token.
    """
    num_positions = tokens_BL.shape[1]
    hit_key, kind_key, other_key, double_key = jax.random.split(key, 4)
    is_hit_BL = (jax.random.uniform(hit_key, tokens_BL.shape) < ratio_B[:, None]) & is_free_BL
    kind_BL = jax.random.randint(kind_key, tokens_BL.shape, 0, len(kinds))
    # The second token in a pair must be free and not misprinted itself.
    is_second_BL = is_free_BL & ~is_hit_BL

    def of(name: str) -> jax.Array:
        numbers = [number for number, kind in enumerate(kinds) if kind == name]
        if not numbers:
            return jnp.zeros_like(is_hit_BL)
        return is_hit_BL & jnp.isin(kind_BL, jnp.array(numbers))

    def with_pairs(name: str) -> jax.Array:
        is_pair_BL = of(f"{name}_pair")
        return of(name) | is_pair_BL | (left_of(is_pair_BL, False) & is_second_BL)

    is_missing_BL = with_pairs("missing")
    may_stray_BL = ~left_of(is_missing_BL, False)
    is_stray_BL = (of("stray") | of("stray_pair")) & may_stray_BL

    # What is printed for each token, and before it: wrong and stray tokens are from the row.
    place_BL = jnp.floor(jax.random.uniform(other_key, tokens_BL.shape) * length_B[:, None])
    other_BL = jnp.take_along_axis(tokens_BL, place_BL.astype(jnp.int32), axis=1)
    is_double_BL = jax.random.bernoulli(double_key, 0.5, tokens_BL.shape)
    before_BL = jnp.where(is_double_BL, left_of(tokens_BL, 0), other_BL)
    # The first token has no previous token to repeat.
    before_BL = before_BL.at[:, 0].set(other_BL[:, 0])
    printed_BL = jnp.where(with_pairs("wrong"), other_BL, tokens_BL)
    if "transposed" in kinds:
        is_swapped_BL = of("transposed") & right_of(is_second_BL, False)
        printed_BL = jnp.where(is_swapped_BL, right_of(tokens_BL, 0), printed_BL)
        printed_BL = jnp.where(left_of(is_swapped_BL, False), left_of(tokens_BL, 0), printed_BL)

    # The target of a printed token is the successor of the printed token before it.
    is_printed_BL = live_positions(length_B, num_positions) & ~is_missing_BL
    index_BL = jnp.broadcast_to(jnp.arange(num_positions), tokens_BL.shape)
    last_BL = jax.lax.cummax(jnp.where(is_printed_BL, index_BL, -1), axis=1)
    due_BL = jnp.take_along_axis(tokens_BL, left_of(last_BL, -1) + 1, axis=1)

    number_BL = is_printed_BL.astype(jnp.int32) + is_stray_BL
    has_pairs, has_two_strays_BL = "stray_pair" in kinds, of("stray_pair") & may_stray_BL
    if has_pairs:
        number_BL += has_two_strays_BL
    until_BL = jnp.cumsum(number_BL, axis=1)
    printed_at_BL = jnp.where(is_printed_BL, until_BL - 1, num_positions)
    stray_at_BL = jnp.where(is_stray_BL, until_BL - 2, num_positions)
    shown_BL = _put(_put(tokens_BL, printed_at_BL, printed_BL), stray_at_BL, before_BL)
    true_BL = _put(_put(tokens_BL, printed_at_BL, due_BL), stray_at_BL, tokens_BL)
    if has_pairs:
        first_BL = jnp.where(is_double_BL, left_of(left_of(tokens_BL, 0), 0), left_of(other_BL, 0))
        first_BL = first_BL.at[:, :2].set(other_BL[:, :2])
        pair_at_BL = jnp.where(has_two_strays_BL, until_BL - 3, num_positions)
        shown_BL = _put(shown_BL, pair_at_BL, first_BL)
        true_BL = _put(true_BL, pair_at_BL, tokens_BL)
    # The target of a token that follows a stray token is that token itself.
    return shown_BL, true_BL, jnp.minimum(until_BL[:, -1], num_positions)


def _put(old_BL: jax.Array, at_BL: jax.Array, new_BL: jax.Array) -> jax.Array:
    """The array with new values at the given positions of each row, if they are in the row."""
    return jax.vmap(lambda old_L, at_L, new_L: old_L.at[at_L].set(new_L, mode="drop"))(
        old_BL, at_BL, new_BL
    )


def proofreading(
    batch: Batch,
    key: jax.Array,
    *,
    max_ratio: float,
    mask_id: int,
    kinds: tuple[str, ...] = USUAL_MISPRINTS,
    masked_rows: float = 0.5,
) -> Drawn:
    """Plain cross-entropy of the correct token at every free position of misprinted rows.

    The probability of a misprint in each row is uniform on (0, max_ratio]. In a fraction
    `masked_rows` of the rows, some positions are also replaced by MASK; their fraction is drawn
    uniformly from (0, 1]. The targets are those of `misprint`. Rows that become longer than the
    canvas are truncated.
    """
    ratio_key, print_key, share_key, mask_key = jax.random.split(key, 4)
    num_rows = batch.tokens_BL.shape[0]
    ratio_B = max_ratio * (1.0 - jax.random.uniform(ratio_key, (num_rows,)))
    printed_BL, true_BL, length_B = misprint(
        print_key, batch.tokens_BL, batch.length_B, batch.is_free_BL(), ratio_B, kinds=kinds
    )
    truth = batch._replace(tokens_BL=true_BL, length_B=length_B)
    place_B = jax.random.uniform(share_key, (num_rows,))
    share_B = jnp.where(place_B < masked_rows, 1.0 - place_B / max(masked_rows, 1e-9), 0.0)
    is_free_BL = truth.is_free_BL()
    is_masked_BL = mask_independently(mask_key, share_B, is_free_BL)
    weight_BL = is_free_BL.astype(jnp.float32)
    shown_BL = jnp.where(is_masked_BL, mask_id, printed_BL)
    return Drawn(truth, shown_BL, weight_BL, jnp.sum(weight_BL))


def next_token(batch: Batch, predicts_first: bool = True) -> Drawn:
    """The objective of a causal model: every free token is predicted from the tokens to its left.

    `predicts_first` is that of the network (`Network.predicts_first`).
    """
    predicted = batch if predicts_first else batch.with_first_given()
    weight_BL = predicted.is_free_BL().astype(jnp.float32)
    return Drawn(batch, batch.tokens_BL, weight_BL, jnp.sum(weight_BL))


def at_random_length(batch: Batch, key: jax.Array, *, share: float) -> Batch:
    """Cuts the rows of the batch to one length, uniform on 1..L, with probability `share`.

    Cut batches also train the model on short canvases. LLaDA (Nie et al. 2025, section 2.2) cuts 1%
    of its batches.
    """
    happens_key, length_key = jax.random.split(key)
    num_positions = batch.tokens_BL.shape[1]
    limit = jnp.where(
        jax.random.uniform(happens_key) < share,
        jax.random.randint(length_key, (), 1, num_positions + 1),
        num_positions,
    )
    return batch._replace(length_B=jnp.minimum(batch.length_B, limit))


def owners(objectives: Mapping[str, Objective], num_rows: int) -> np.ndarray:
    """The index of the objective of each row of a batch. Objectives are interleaved."""
    middle = (np.arange(num_rows) + 0.5) / num_rows
    # Multiples of the golden ratio spread the rows of every objective over the batch.
    spread = np.argsort(np.argsort((np.arange(num_rows) * 0.618034) % 1.0))
    bounds = np.cumsum([objective.share for objective in objectives.values()])[:-1]
    return np.searchsorted(bounds, middle[spread], side="right")


def draw_all(
    objectives: Mapping[str, Objective], batch: Batch, key: jax.Array, *, cut: float = 0.0
) -> Drawn:
    """The batch of a step, each row of which is noised by one objective. The noise depends only on
    `key`.

    ``noise`` has what each objective drew: with its own loss, all of it, otherwise its weights and
    their total. The rows, canvases and weights of all objectives are merged. `cut` is the
    probability that the batch is cut (`at_random_length`).
    """
    length_key, *keys = jax.random.split(key, 1 + len(objectives))
    if cut > 0:
        batch = at_random_length(batch, length_key, share=cut)
    shape = batch.tokens_BL.shape
    merged, noise = Drawn(batch, batch.tokens_BL, jnp.zeros(shape), jnp.zeros(())), {}
    owner_B = owners(objectives, shape[0])
    for number, (name, objective) in enumerate(objectives.items()):
        is_own_B = owner_B == number
        own = batch._replace(length_B=jnp.where(is_own_B, batch.length_B, 0))
        drawn = objective.draw(own, keys[number])
        if not isinstance(drawn, Drawn):
            if objective.loss is None:
                raise ValueError(
                    f"{name}.draw returned a {type(drawn).__name__}; return a Drawn, or pass "
                    "Objective(draw, loss)"
                )
            noise[name] = drawn
            continue
        returned(drawn.shown_BL, name, "draw(...).shown_BL", "B, L", shape, jnp.int32)
        returned(drawn.weight_BL, name, "draw(...).weight_BL", "B, L", shape, float)
        total = jnp.asarray(drawn.total, jnp.float32)
        returned(total, name, "draw(...).total", "", (), float)
        noise[name] = (drawn.weight_BL, total) if objective.loss is None else drawn

        def choose(new: jax.Array, old: jax.Array, is_new_B: Any = is_own_B) -> jax.Array:
            return jnp.where(is_new_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        merged = Drawn(
            Batch(*map(choose, drawn.batch, merged.batch)),
            choose(drawn.shown_BL, merged.shown_BL),
            jnp.where(drawn.weight_BL > 0, drawn.weight_BL, merged.weight_BL),
            merged.total + total,
        )
    return merged._replace(noise=noise)
