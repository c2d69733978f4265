"""Training objectives, which define the network inputs and targets of a batch.

An objective draws all noise for the whole batch before the network runs. The noise therefore does
not depend on how the batch is split into microbatches, and the weights are known before the first
microbatch runs. A `NetworkObjective` runs the network itself. A `Mixture` divides the rows of a
batch among several objectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import MISPRINTS, ObjectiveConfig
from dlm_jax.diffusion import corruption
from dlm_jax.diffusion.corruption import (
    Schedule,
    mask_independently,
    stratified_times,
)
from dlm_jax.diffusion.losses import Loss, cross_entropy, hidden_of, read_out
from dlm_jax.diffusion.processes import (
    HIGHEST_LEVEL,
    Noise,
    Process,
    divergence,
)
from dlm_jax.types import Network, Params, left_of, live_positions, right_of

USUAL_MISPRINTS = ObjectiveConfig.misprint_kinds


class Batch(NamedTuple):
    """Rows to train on.

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
        place_1L = jnp.arange(self.tokens_BL.shape[1])[None]
        return (place_1L < self.length_B[:, None]) & (place_1L >= self.given_B[:, None])

    def with_first_given(self) -> Batch:
        """The rows, with at least their first token given."""
        return self._replace(given_B=jnp.maximum(self.given_B, 1))


class Example(NamedTuple):
    """The network inputs and targets of a batch.

    Attributes:
      shown_BL: int32, canvas that the trunk reads.
      weight_BL: float32, weight of the cross-entropy at each position; 0 where nothing is
        predicted.
      total: float32 scalar, divisor of the weighted sum.
      truth: the target rows, if they differ from the batch.
    """

    shown_BL: jax.Array
    weight_BL: jax.Array
    total: jax.Array
    truth: Batch | None = None


Objective = Callable[[Batch, jax.Array], Example]
"""``(batch, key) -> Example``. Rows of other objectives have length 0."""


_SMALLEST_TIME = 1e-3


def elbo(
    batch: Batch,
    key: jax.Array,
    *,
    schedule: Schedule,
    mask_id: int,
    block_length: int = 0,
    over: str = "tokens",
    is_weighted: bool = True,
) -> Example:
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
    t = _times(time_key, num_rows, num_positions, block_length, smallest=_SMALLEST_TIME)
    is_masked_BL = mask_independently(mask_key, schedule.masked_ratio(t), is_free_BL)
    weight = schedule.weight(t) if is_weighted else jnp.ones_like(t)
    return elbo_at(batch, is_masked_BL, weight, mask_id=mask_id, over=over)


def _times(
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


def elbo_at(
    batch: Batch,
    is_masked_BL: jax.Array,
    weight: jax.Array,
    *,
    mask_id: int,
    over: str = "tokens",
) -> Example:
    """The example for given masks: ``weight`` times the cross-entropy of the hidden tokens.

    Weights are per row, ``[B]``, or per position, ``[B, L]``. `over` is as in `elbo`.
    """
    weight_BL = weight if weight.ndim == 2 else weight[:, None]
    weight_BL = jnp.where(is_masked_BL, weight_BL, 0.0)
    free_B = jnp.sum(batch.is_free_BL(), axis=1)
    total = jnp.sum(free_B)
    if over == "rows":
        weight_BL /= jnp.maximum(free_B, 1)[:, None]
        total = jnp.sum(free_B > 0)
    elif over == "masked":
        total = jnp.sum(is_masked_BL)
    shown_BL = jnp.where(is_masked_BL, mask_id, batch.tokens_BL)
    return Example(shown_BL, weight_BL, total.astype(jnp.float32))


def denoising(
    batch: Batch,
    key: jax.Array,
    *,
    settings: ObjectiveConfig,
    mask_id: int,
    random_ids: tuple[int, ...],
) -> Example:
    """Plain cross-entropy at the positions that a corruption pattern selects.

    Each row uses one pattern, drawn uniformly. ``random`` and ``sticky`` select a fraction of the
    row that is uniform on (0, max_ratio]. With identity targets, every free position is predicted,
    whether or not it is selected.
    """
    is_free_BL = batch.is_free_BL()
    num_rows = is_free_BL.shape[0]
    choice_key, ratio_key, show_key, *keys = jax.random.split(key, 3 + len(settings.patterns))
    ratio_B = settings.max_ratio * (1.0 - jax.random.uniform(ratio_key, (num_rows,)))
    select = {
        "random": lambda key: mask_independently(key, ratio_B, is_free_BL),
        "sticky": lambda key: corruption.select_sticky(
            key,
            ratio_B,
            is_free_BL,
            alone=settings.sticky_alone,
            beside=settings.sticky_beside,
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
    return Example(shown_BL, weight_BL, jnp.sum(weight_BL))


class Misprints(NamedTuple):
    """Misprinted rows.

    Attributes:
      shown_BL: int32 canvas.
      true_BL: int32, target of each position. At the position after a missing token, the target is
        the missing token. At a stray token, the target is the next correct token. At all other
        positions, the target is the correct token.
      length_B: int32, number of live tokens in each row, at most the length of the canvas.
    """

    shown_BL: jax.Array
    true_BL: jax.Array
    length_B: jax.Array


class _Damage(NamedTuple):
    """The corruption of each clean token. The last two fields are None if their kinds of misprints
    are not used.
    """

    is_missing_BL: jax.Array
    is_wrong_BL: jax.Array
    is_stray_BL: jax.Array
    is_swapped_BL: jax.Array | None
    has_two_strays_BL: jax.Array | None


def misprint(
    key: jax.Array,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_free_BL: jax.Array,
    ratio_B: jax.Array,
    *,
    kinds: Sequence[str] = USUAL_MISPRINTS,
) -> Misprints:
    """Misprints each free position with the probability of its row.

    A token is removed (*missing*), replaced (*wrong*), preceded by an extra token (*stray*), or
    swapped with the next token (*transposed*). *missing_pair* and *wrong_pair* also apply to the
    next token, and *stray_pair* inserts two tokens. Half of the stray tokens repeat the preceding
    tokens. The other stray tokens and all wrong tokens are drawn from the row. A stray token never
    follows a missing token, and a stray token that equals its successor is not a misprint. If the
    next token is given or is itself misprinted, it is not changed and no transposition occurs.

    `is_free_BL` is True at live tokens that can be misprinted. `kinds` are names from `MISPRINTS`,
    drawn uniformly; a name that occurs twice is twice as likely.
    """
    num_positions = tokens_BL.shape[1]
    hit_key, kind_key, other_key, double_key = jax.random.split(key, 4)
    is_hit_BL = (jax.random.uniform(hit_key, tokens_BL.shape) < ratio_B[:, None]) & is_free_BL
    kind_BL = jax.random.randint(kind_key, tokens_BL.shape, 0, len(kinds))
    damage = _damage(is_hit_BL, kind_BL, is_free_BL, kinds)

    place_BL = jnp.floor(jax.random.uniform(other_key, tokens_BL.shape) * length_B[:, None])
    other_BL = jnp.take_along_axis(tokens_BL, place_BL.astype(jnp.int32), axis=1)
    is_double_BL = jax.random.bernoulli(double_key, 0.5, tokens_BL.shape)
    before_BL = jnp.where(is_double_BL, left_of(tokens_BL, 0), other_BL)
    # The first token has no previous token to repeat.
    before_BL = before_BL.at[:, 0].set(other_BL[:, 0])
    printed_BL = _printed(tokens_BL, other_BL, damage)

    is_kept_BL = live_positions(length_B, num_positions) & ~damage.is_missing_BL
    due_BL = _due(tokens_BL, is_kept_BL)
    number_BL = is_kept_BL.astype(jnp.int32) + damage.is_stray_BL
    if damage.has_two_strays_BL is not None:
        number_BL += damage.has_two_strays_BL
    until_BL = jnp.cumsum(number_BL, axis=1)
    kept_BL = jnp.where(is_kept_BL, until_BL - 1, num_positions)
    stray_BL = jnp.where(damage.is_stray_BL, until_BL - 2, num_positions)
    shown_BL = _put(_put(tokens_BL, kept_BL, printed_BL), stray_BL, before_BL)
    true_BL = _put(_put(tokens_BL, kept_BL, due_BL), stray_BL, tokens_BL)
    if damage.has_two_strays_BL is not None:
        first_BL = jnp.where(is_double_BL, left_of(left_of(tokens_BL, 0), 0), left_of(other_BL, 0))
        first_BL = first_BL.at[:, :2].set(other_BL[:, :2])
        pair_BL = jnp.where(damage.has_two_strays_BL, until_BL - 3, num_positions)
        shown_BL, true_BL = _put(shown_BL, pair_BL, first_BL), _put(true_BL, pair_BL, tokens_BL)
    # The target of a kept token that follows a stray token is that token itself.
    return Misprints(shown_BL, true_BL, jnp.minimum(until_BL[:, -1], num_positions))


def _damage(
    is_hit_BL: jax.Array, kind_BL: jax.Array, is_free_BL: jax.Array, kinds: Sequence[str]
) -> _Damage:
    """The corruptions at the misprinted positions, given their kinds."""
    unknown = sorted(set(kinds) - set(MISPRINTS))
    if unknown:
        raise ValueError(f"kinds has {unknown[0]!r}; known are {', '.join(MISPRINTS)}")

    def of(name: str) -> jax.Array:
        if name not in kinds:
            return jnp.zeros_like(is_hit_BL)
        numbers = [number for number, kind in enumerate(kinds) if kind == name]
        return is_hit_BL & jnp.isin(kind_BL, jnp.array(numbers))

    # The second token in a pair must be free and not misprinted itself.
    is_second_BL = is_free_BL & ~is_hit_BL

    def with_pairs(name: str) -> jax.Array:
        is_pair_BL = of(f"{name}_pair")
        return of(name) | is_pair_BL | (left_of(is_pair_BL, False) & is_second_BL)

    is_missing_BL = with_pairs("missing")
    may_stray_BL = ~left_of(is_missing_BL, False)
    return _Damage(
        is_missing_BL,
        with_pairs("wrong"),
        (of("stray") | of("stray_pair")) & may_stray_BL,
        of("transposed") & right_of(is_second_BL, False) if "transposed" in kinds else None,
        of("stray_pair") & may_stray_BL if "stray_pair" in kinds else None,
    )


def _printed(tokens_BL: jax.Array, other_BL: jax.Array, damage: _Damage) -> jax.Array:
    """The shown token for each token that is not missing: the token itself, a wrong token, or the
    neighbour with which it is swapped.
    """
    printed_BL = jnp.where(damage.is_wrong_BL, other_BL, tokens_BL)
    if damage.is_swapped_BL is None:
        return printed_BL
    printed_BL = jnp.where(damage.is_swapped_BL, right_of(tokens_BL, 0), printed_BL)
    is_other_BL = left_of(damage.is_swapped_BL, False)
    return jnp.where(is_other_BL, left_of(tokens_BL, 0), printed_BL)


def _due(tokens_BL: jax.Array, is_kept_BL: jax.Array) -> jax.Array:
    """The target of each kept token: the successor of the previous kept token."""
    index_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    last_kept_BL = jax.lax.cummax(jnp.where(is_kept_BL, index_BL, -1), axis=1)
    return jnp.take_along_axis(tokens_BL, left_of(last_kept_BL, -1) + 1, axis=1)


def _put(old_BL: jax.Array, at_BL: jax.Array, new_BL: jax.Array) -> jax.Array:
    """Returns the array with new values at the given positions of each row. Positions beyond the
    row are ignored.
    """

    def one_row(old_L: jax.Array, at_L: jax.Array, new_L: jax.Array) -> jax.Array:
        return old_L.at[at_L].set(new_L, mode="drop")

    return jax.vmap(one_row)(old_BL, at_BL, new_BL)


def proofreading(
    batch: Batch,
    key: jax.Array,
    *,
    max_ratio: float,
    mask_id: int,
    kinds: tuple[str, ...] = USUAL_MISPRINTS,
    masked_rows: float = 0.5,
) -> Example:
    """Plain cross-entropy of the correct token at every free position of misprinted rows.

    The probability of a misprint in each row is uniform on (0, max_ratio]. In a fraction
    `masked_rows` of the rows, some positions are also replaced by MASK; their fraction is drawn
    uniformly from (0, 1]. The targets are those of `Misprints`. Rows that become longer than the
    canvas are truncated.
    """
    ratio_key, print_key, share_key, mask_key = jax.random.split(key, 4)
    num_rows = batch.tokens_BL.shape[0]
    ratio_B = max_ratio * (1.0 - jax.random.uniform(ratio_key, (num_rows,)))
    found = misprint(
        print_key, batch.tokens_BL, batch.length_B, batch.is_free_BL(), ratio_B, kinds=kinds
    )
    truth = batch._replace(tokens_BL=found.true_BL, length_B=found.length_B)
    place_B = jax.random.uniform(share_key, (num_rows,))
    share_B = jnp.where(place_B < masked_rows, 1.0 - place_B / max(masked_rows, 1e-9), 0.0)
    is_free_BL = truth.is_free_BL()
    is_masked_BL = mask_independently(mask_key, share_B, is_free_BL)
    weight_BL = is_free_BL.astype(jnp.float32)
    shown_BL = jnp.where(is_masked_BL, mask_id, found.shown_BL)
    return Example(shown_BL, weight_BL, jnp.sum(weight_BL), truth)


def next_token(batch: Batch, *, predicts_first: bool = True) -> Example:
    """The autoregressive example of a causal model: every free token is predicted from the tokens
    to its left.

    `predicts_first` is that of the network (`Network.predicts_first`).
    """
    batch = batch if predicts_first else batch.with_first_given()
    weight_BL = batch.is_free_BL().astype(jnp.float32)
    return Example(batch.tokens_BL, weight_BL, jnp.sum(weight_BL))


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


@dataclass(frozen=True)
class NetworkObjective:
    """An objective that runs the network itself, any number of times and on any inputs.

    Attributes:
      draw: ``(batch, key) -> noise``, a pytree of all random values, drawn for the whole batch
        before it is split into microbatches. Every leaf is ``[B, ...]`` or a scalar, such as the
        divisor of a loss. Rows of other objectives have length 0.
      loss: ``(network, params, noise) -> Loss``, differentiated with respect to all trained
        parameters.
      example: ``(noise) -> Example``, the canvas and the predicted positions that heads read. None
        shows the heads the true rows, of which they learn nothing.
    """

    draw: Callable[[Batch, jax.Array], Any]
    loss: Callable[[Network, Params, Any], Loss]
    example: Callable[[Any], Example] | None = None


class Noised(NamedTuple):
    """A batch with the noise of a forward process.

    Attributes:
      batch: the true rows.
      shown_BL: int32, the noised rows.
      noise: noise of each position in the bound; its weight is 0 where nothing is predicted.
      total: float32 scalar, number of free tokens in the whole batch.
    """

    batch: Batch
    shown_BL: jax.Array
    noise: Noise
    total: jax.Array


def noised_at(
    process: Process,
    batch: Batch,
    key: jax.Array,
    t: jax.Array,
    *,
    schedule: Schedule,
    mask_id: int,
    noise_ids: tuple[int, ...],
) -> Noised:
    """The batch noised at times in [0, 1], given per row ``[B]`` or per position ``[B, L]``.

    With one key per row, ``[B]``, the noise of a row depends only on its key. At times up to 1e-3,
    the term is that of a single step to time 0, divided by 1e-3, so that the mean over uniform
    times is a bound for any network.
    """
    is_first = t <= _SMALLEST_TIME
    t = jnp.maximum(t, _SMALLEST_TIME)
    level = jnp.minimum(schedule.masked_ratio(t), HIGHEST_LEVEL)
    speed = jnp.where(is_first, 1.0 / _SMALLEST_TIME, schedule.weight(t) * schedule.masked_ratio(t))
    is_free_BL = batch.is_free_BL()
    ids = {"mask_id": mask_id, "noise_ids": noise_ids}
    sample = functools.partial(process.sample, **ids)
    if key.ndim:
        shown_BL = jax.vmap(lambda key, *row: sample(key, *(x[None] for x in row))[0])(
            key, batch.tokens_BL, level, is_free_BL
        )
    else:
        shown_BL = sample(key, batch.tokens_BL, level, is_free_BL)
    noise = process.noise(batch.tokens_BL, shown_BL, level, speed, is_first, **ids)
    noise = noise._replace(weight=jnp.where(is_free_BL, noise.weight, 0.0))
    return Noised(batch, shown_BL, noise, jnp.sum(is_free_BL).astype(jnp.float32))


def process_costs(
    network: Network,
    params: Params,
    noised: Noised,
    *,
    mask_id: int,
    noise_ids: tuple[int, ...],
) -> jax.Array:
    """The contribution of each position to the bound at its time, in nats ``[B, L]``. See
    `divergence`.
    """
    batch, shown_BL, noise = noised.batch, noised.shown_BL, noised.noise
    if network.behind is None:
        hidden_BLD = hidden_of(network, params, shown_BL, batch.tokens_BL, batch.length_B)
    else:  # one canvas after the given tokens
        hidden_BLD = network.behind(params, shown_BL, batch.length_B, batch.given_B)

    def cost(logits_NV: jax.Array, *given: jax.Array) -> jax.Array:
        clean_N, shown_N, *noise_N = (x.reshape(-1) for x in given)
        return divergence(logits_NV, clean_N, shown_N, Noise(*noise_N), noise_ids=noise_ids)

    is_read_BL = noise.weight > 0
    term_BL = read_out(
        cost,
        network.readout,
        params,
        (hidden_BLD,),
        (batch.tokens_BL, shown_BL, *noise),
        vocab_size=network.vocab_size,
        mask_id=mask_id,
        is_read_BL=is_read_BL,
    )
    return jnp.where(is_read_BL, noise.weight * term_BL, 0.0)


def process_elbo(
    process: Process,
    *,
    schedule: Schedule,
    mask_id: int,
    noise_ids: tuple[int, ...],
    block_length: int = 0,
) -> NetworkObjective:
    """One-sample estimate of the continuous-time negative ELBO of any process, per token.

    Times are low-discrepancy, as in `elbo`. `noised_at` describes the terms at times below 1e-3.
    """

    def draw(batch: Batch, key: jax.Array) -> Noised:
        time_key, noise_key = jax.random.split(key)
        num_rows, num_positions = batch.tokens_BL.shape
        t = _times(time_key, num_rows, num_positions, block_length)
        return noised_at(
            process, batch, noise_key, t, schedule=schedule, mask_id=mask_id, noise_ids=noise_ids
        )

    def loss(network: Network, params: Params, noised: Noised) -> Loss:
        cost_BL = process_costs(network, params, noised, mask_id=mask_id, noise_ids=noise_ids)
        return Loss(jnp.sum(cost_BL), noised.total)

    def example(noised: Noised) -> Example:
        return Example(noised.shown_BL, noised.noise.weight, noised.total)

    return NetworkObjective(draw, loss, example=example)


class MixedExample(NamedTuple):
    """A batch with the examples of a mixture, in which each row belongs to one objective.

    Attributes:
      batch: the rows to predict.
      shown_BL: int32 canvas that the trunk reads.
      weights: weights of each objective, as in `Example`, float32 ``[B, L]``; 0 in the rows of
        other objectives.
      totals: divisors of each objective, as in `Example`, float32 scalars.
      noise: the noise of each `NetworkObjective`.
    """

    batch: Batch
    shown_BL: jax.Array
    weights: dict[str, jax.Array]
    totals: dict[str, jax.Array]
    noise: dict[str, Any]

    def is_supervised_BL(self) -> jax.Array:
        """True at the positions where an objective reads the LM head."""
        weights = [weight_BL > 0 for weight_BL in self.weights.values()]
        return jnp.any(jnp.stack(weights or [jnp.zeros(self.shown_BL.shape, bool)]), axis=0)


@dataclass(frozen=True)
class Mixture:
    """Objectives that are trained together, each on a fraction of the rows of every batch.

    Attributes:
      objectives: objectives, keyed by name.
      shares: fraction of the rows (rounded) and of the loss, keyed by name. The fractions add up to
        1.
      random_length_share: fraction of batches that are cut; see `at_random_length`.
    """

    objectives: Mapping[str, Objective | NetworkObjective] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    random_length_share: float = 0.0

    @property
    def reads_trunk(self) -> bool:
        """Whether an objective reads the output of the trunk for the shown canvas."""
        return any(not isinstance(one, NetworkObjective) for one in self.objectives.values())

    def example(self, batch: Batch, key: jax.Array) -> MixedExample:
        """The example of a batch, whose noise depends only on `key`."""
        length_key, *keys = jax.random.split(key, 1 + len(self.objectives))
        if self.random_length_share > 0:
            batch = at_random_length(batch, length_key, share=self.random_length_share)
        mixed = MixedExample(batch, batch.tokens_BL, {}, {}, {})
        owner_B = self._owners(batch.tokens_BL.shape[0])
        for number, (name, objective) in enumerate(self.objectives.items()):
            is_own_B = owner_B == number
            own = batch._replace(length_B=jnp.where(is_own_B, batch.length_B, 0))
            if isinstance(objective, NetworkObjective):
                noise = mixed.noise[name] = objective.draw(own, keys[number])
                if objective.example is not None:
                    mixed = _with_rows(mixed, name, is_own_B, objective.example(noise))
            else:
                mixed = _with_rows(mixed, name, is_own_B, objective(own, keys[number]))
        return mixed

    def losses(
        self,
        network: Network,
        params: Params,
        example: MixedExample,
        hidden_BLD: jax.Array | None,
        *,
        mask_id: int,
    ) -> dict[str, Loss]:
        """The loss of each objective on the example, keyed by name.

        `hidden_BLD` is the output of the trunk for ``example.shown_BL`` if `reads_trunk` is True.
        MASK is never predicted.
        """
        found = {}
        if hidden_BLD is not None:
            targets_BL = example.batch.tokens_BL
            nll_BL = cross_entropy(
                network,
                params,
                hidden_BLD,
                targets_BL,
                mask_id=mask_id,
                is_read_BL=example.is_supervised_BL(),
            )
            for name, weight_BL in example.weights.items():
                # Positions that are not predicted may contain MASK, whose cost is infinite.
                weighted_BL = jnp.where(weight_BL > 0, weight_BL * nll_BL, 0.0)
                found[name] = Loss(jnp.sum(weighted_BL), example.totals[name])
        for name, objective in self.objectives.items():
            if isinstance(objective, NetworkObjective):
                found[name] = objective.loss(network, params, example.noise[name])
        return {name: found[name] for name in self.objectives}

    def without_rows(self, num_rows: int) -> list[str]:
        """Names of the objectives that have no row in a batch after rounding."""
        counts = np.bincount(self._owners(num_rows), minlength=len(self.objectives))
        return [name for name, count in zip(self.objectives, counts, strict=True) if not count]

    def fills(self, num_rows: int, num_parts: int) -> bool:
        """Returns whether every objective has a row in each microbatch of a batch."""
        owner_B, names = self._owners(num_rows), range(len(self.objectives))
        return all(set(names) <= set(owner_B[part::num_parts]) for part in range(num_parts))

    def _owners(self, num_rows: int) -> np.ndarray:
        """The index of the objective of each row. Objectives are interleaved."""
        middle = (np.arange(num_rows) + 0.5) / num_rows
        # Multiples of the golden ratio spread the rows of every objective over the batch.
        spread = np.argsort(np.argsort((np.arange(num_rows) * 0.618034) % 1.0))
        bounds = np.cumsum(list(self.shares.values()))[:-1]
        return np.searchsorted(bounds, middle[spread], side="right")


def _with_rows(mixed: MixedExample, name: str, is_own_B: np.ndarray, example: Any) -> MixedExample:
    """Returns `mixed` with the example of one objective in the rows of that objective."""

    def choose(own: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(is_own_B.reshape(-1, *[1] * (own.ndim - 1)), own, other)

    batch = mixed.batch
    if example.truth is not None:
        batch = Batch(*map(choose, example.truth, batch))
    return mixed._replace(
        batch=batch,
        shown_BL=choose(example.shown_BL, mixed.shown_BL),
        weights=mixed.weights | {name: example.weight_BL},
        totals=mixed.totals | {name: example.total},
    )
