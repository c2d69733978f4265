"""Forward processes: their interface, the noise of each, and the terms of their bound.

A process noises each free position independently. At level ``v`` in [0, 1], a position shows its
own token with probability ``alpha(v)``, MASK with probability ``mask(v)``, and, with probability
``text(v)``, an id drawn uniformly from the noise ids, which can be the true id. If ``c(k)`` is the
probability of noise ``k``, the distribution of the shown token is ``q_v(. | x) = alpha_v x + c_v``,
as in the interpolating process of GIDD (von Rutte et al. 2025, equation 3). Masked diffusion is the
case ``c = mask``, and uniform diffusion is the case ``c = text``.

For every process, the level at a time is the ``masked_ratio`` of the noise schedule.

`process_elbo` is the objective of networks that read a whole row, and `canvas_denoising` that of
networks with canvases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import ObjectiveConfig
from dlm_jax.objectives.corruption import Schedule, show, stratified_times
from dlm_jax.objectives.losses import (
    Loss,
    at_positions,
    cross_entropy,
    hidden_of,
    read_logits,
)
from dlm_jax.objectives.objective import SMALLEST_TIME, Batch, Drawn, Objective, times_of
from dlm_jax.types import Network, Params

HIGHEST_LEVEL = 1.0 - 1e-4
"""Levels in a bound are clipped to this value, because the terms of the bound are 0 / 0 at 1."""


_MAX_LOGITS = 2**24
"""Logits that are computed at once for the self-conditioning signal."""


class Shares(NamedTuple):
    """The probabilities of the token shown at a position, given the noise level. They add up to 1.

    Attributes:
      clean: probability of the position's own token.
      mask: probability of MASK.
      text: probability of an id drawn uniformly from the noise ids.
    """

    clean: jax.Array
    mask: jax.Array
    text: jax.Array


class Noise(NamedTuple):
    """The noise of each position in a bound, as float32 arrays of equal shape.

    Attributes:
      clean: ``alpha``.
      text: ``c(k)``, the same for each noise id.
      shown: ``c(z)`` of the shown id.
      weight: factor by which `divergence` is multiplied.
      is_first: True for the step to level 0.
    """

    clean: jax.Array
    text: jax.Array
    shown: jax.Array
    weight: jax.Array
    is_first: jax.Array


@dataclass(frozen=True)
class Process:
    """A forward process, defined by its `shares`.

    Attributes:
      name: value of ``objective.process``.
      shares: ``(level) -> Shares`` at levels in [0, 1], a differentiable function. All tokens are
        clean at level 0, and none are clean at level 1. The shares at level 1 define the prior.
      is_masked: whether MASK is the only noise, so that all visible tokens are correct.
      mask_id: id of MASK; as `noise_ids`, only read by what noises tokens.
      noise_ids: the ids that can be noise.
    """

    name: str
    shares: Callable[[jax.Array], Shares]
    is_masked: bool = False
    mask_id: int = -1
    noise_ids: tuple[int, ...] = ()

    def rates(self, level: jax.Array) -> Shares:
        """Forward rates of the noise per unit of level, multiplied by ``alpha``. ``text`` is the
        total rate of all noise ids.

        The values are ``alpha c' - alpha' c``. Divided by ``alpha``, they are the rates of jumps
        into noise ``k``, which do not depend on the previous token (GIDD, proposition 3.4).
        """
        now, slope = jax.jvp(self.shares, (level,), (jnp.ones_like(level),))
        mask, text = (
            jnp.maximum(now.clean * d - slope.clean * c, 0.0)
            for c, d in ((now.mask, slope.mask), (now.text, slope.text))
        )
        return Shares(jnp.zeros_like(mask), mask, text)

    def sample(
        self,
        key: jax.Array,
        tokens_BL: jax.Array,
        level: jax.Array,
        is_free_BL: jax.Array,
    ) -> jax.Array:
        """Noised tokens, int32 ``[B, L]``. Free positions are noised at their level; other
        positions are unchanged.

        The level is ``[B]`` or ``[B, L]``.
        """
        shares = self.shares(level if level.ndim == 2 else level[:, None])
        return show(
            key,
            tokens_BL,
            is_free_BL,
            mask_share=shares.mask,
            random_share=shares.text,
            mask_id=self.mask_id,
            random_ids=self.noise_ids,
        )

    def noise(
        self,
        tokens_BL: jax.Array,
        shown_BL: jax.Array,
        level: jax.Array,
        speed: jax.Array,
        is_first: jax.Array,
    ) -> Noise:
        """The `Noise` of the noised tokens `shown_BL` (from `sample`), ``[B, L]``.

        `level` (at most `HIGHEST_LEVEL`), `speed` and `is_first` are ``[B]`` or ``[B, L]``. `speed`
        is the derivative of the level with respect to time. `is_first` is True where the term
        belongs to the step to level 0; its weight is `speed`.
        """
        level, speed, is_first = (
            jnp.broadcast_to(x if x.ndim == 2 else x[:, None], tokens_BL.shape)
            for x in (level, speed, is_first)
        )
        now, rates = self.shares(level), self.rates(level)
        is_mask_BL = shown_BL == self.mask_id
        is_noise_BL = is_among(self.noise_ids, shown_BL)

        def of_shown(mask: jax.Array, text: jax.Array) -> jax.Array:
            found_BL = jnp.where(is_noise_BL, text / len(self.noise_ids), 0.0)
            return jnp.where(is_mask_BL, mask, found_BL)

        shown = of_shown(now.mask, now.text)
        chance = jnp.where(shown_BL == tokens_BL, now.clean, 0.0) + shown
        # The rate is multiplied by alpha, and `divergence` is divided by it.
        weight = speed * of_shown(rates.mask, rates.text) / jnp.maximum(chance, 1e-30)
        return Noise(
            now.clean,
            now.text / len(self.noise_ids),
            shown,
            jnp.where(is_first, speed, weight),
            is_first,
        )


def _masked(level: jax.Array) -> Shares:
    """Replaces each free token with MASK; the probability equals the level (Sahoo et al. 2024,
    MDLM). The bound is the weighted cross-entropy of `dlm_jax.objectives.objective.elbo`.
    """
    return Shares(1.0 - level, level, jnp.zeros_like(level))


def _uniform(level: jax.Array) -> Shares:
    """Replaces each free token with a uniform noise id; the probability equals the level.

    Every token can change during sampling (Schiff et al. 2024, UDLM, section 4). As in GIDD, the
    network is not conditioned on the level.
    """
    return Shares(1.0 - level, jnp.zeros_like(level), level)


def _mixed(level: jax.Array) -> Shares:
    """A mixture of MASK and uniform noise. The probability of uniform noise is 0 at levels 0 and 1,
    and p = 0.1 at level 1/2.

    At level ``v``, the probabilities are ``alpha = (1 - v) / C``, ``mask = v / C`` and ``text = B
    sqrt(v (1 - v)) / C``, where ``C = 1 + B sqrt(v (1 - v))`` and ``B = 2 p / (1 - p)`` (von Rutte
    et al. 2025, GIDD, section 4.1 with gamma = 1).
    """
    most = 2.0 * 0.1 / (1.0 - 0.1)
    product = level * (1.0 - level)
    # The slope of a square root is infinite at the ends.
    is_inside = product > 0
    root = jnp.where(is_inside, jnp.sqrt(jnp.where(is_inside, product, 1.0)), 0.0)
    total = 1.0 + most * root
    return Shares((1.0 - level) / total, level / total, most * root / total)


PROCESSES: Mapping[str, Process] = {
    "masked": Process("masked", _masked, is_masked=True),
    "uniform": Process("uniform", _uniform),
    "mixed": Process("mixed", _mixed),
}
"""Processes by ``objective.process``."""


def noise_process(objective: ObjectiveConfig, **ids: Any) -> Process:
    """The forward process of a config; `ids` are its ``mask_id`` and ``noise_ids``."""
    return dataclasses.replace(PROCESSES[objective.process], **ids)


def is_among(ids: tuple[int, ...], tokens: jax.Array) -> jax.Array:
    """True where a token is one of the ids. The test is fast if the ids are contiguous or few."""
    first, last = min(ids), max(ids)
    if last - first + 1 == len(set(ids)):
        return (tokens >= first) & (tokens <= last)
    return jnp.isin(tokens, jnp.asarray(ids, tokens.dtype))


def divergence(
    logits_NV: jax.Array,
    clean_N: jax.Array,
    shown_N: jax.Array,
    noise: Noise,
    *,
    noise_ids: tuple[int, ...],
) -> jax.Array:
    """The term of each position in the bound, divided by ``alpha``; float32 ``[N]``, in nats.

    The term is ``(KL(q(. | x) || q(. | p)) + q(z | x) / q(z | p) - ln(q(z | x) / q(z | p)) - 1) /
    alpha``, where ``q(. | p)`` are the marginals under the predicted distribution of the token.
    Multiplied by the forward rate into z and divided by ``q(z | x)``, it is the integrand of the
    continuous-time negative ELBO (GIDD, theorem 3.5). For masked diffusion, the integrand is the
    cross-entropy. For uniform diffusion, it is that of UDLM (Schiff et al. 2024, equation 18).
    Where ``is_first`` is True, the term is ``-ln p(x | z)`` of the reverse step to level 0. The
    logits are -inf at MASK, and `noise` is the `Process.noise` of these positions.
    """
    first, last = min(noise_ids), max(noise_ids)
    total_N = jax.nn.logsumexp(logits_NV, axis=1)

    def log_p(ids_N: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits_NV, ids_N[:, None], axis=1)[:, 0] - total_N

    alpha_N, text_N = noise.clean, noise.text
    log_true_N = log_p(clean_N)
    true_N, seen_N = jnp.exp(log_true_N), jnp.exp(log_p(shown_N))
    is_same_N = clean_N == shown_N
    # The term of the true token.
    own_N = jnp.where(is_among(noise_ids, clean_N), text_N, 0.0)
    has_own_N = own_N > 0
    gain_N = jnp.log1p(
        alpha_N * (1.0 - true_N) / jnp.where(has_own_N, alpha_N * true_N + own_N, 1.0)
    )
    kl_N = (alpha_N + own_N) * jnp.where(has_own_N, gain_N, -log_true_N)
    # The terms of the other noise ids, which all have the same noise.
    ratio_N = jnp.where(text_N > 0, alpha_N / jnp.where(text_N > 0, text_N, 1.0), 0.0)
    p_NV = jnp.exp(logits_NV[:, first : last + 1] - total_N[:, None])
    if last - first + 1 > len(noise_ids):
        is_noise_V = np.isin(np.arange(first, last + 1), noise_ids)
        p_NV = jnp.where(is_noise_V[None], p_NV, 0.0)
    others_N = jnp.sum(jnp.log1p(ratio_N[:, None] * p_NV), axis=1)
    others_N -= jnp.where(has_own_N, jnp.log1p(ratio_N * true_N), 0.0)
    kl_N -= text_N * others_N
    # The terms of the shown id.
    model_N = jnp.maximum(alpha_N * seen_N + noise.shown, 1e-30)
    excess_N = alpha_N * (is_same_N - seen_N) / model_N
    # Where a readout is padded, all values of the noise are 0.
    term_N = (kl_N + excess_N - jnp.log1p(excess_N)) / jnp.maximum(alpha_N, 1e-30)
    data_N = jnp.maximum(jnp.where(is_same_N, alpha_N, 0.0) + noise.shown, 1e-30)
    last_N = jnp.log(model_N) - jnp.log(data_N) - log_true_N
    return jnp.where(noise.is_first, last_N, term_N)


def noised_at(
    process: Process,
    batch: Batch,
    key: jax.Array,
    t: jax.Array,
    *,
    schedule: Schedule,
) -> Drawn:
    """The batch noised at times in [0, 1], given per row ``[B]`` or per position ``[B, L]``.

    With one key per row, ``[B]``, the noise of a row depends only on its key. At times up to 1e-3,
    the term is that of a single step to time 0, divided by 1e-3, so that the mean over uniform
    times is a bound for any network.
    """
    is_first = t <= SMALLEST_TIME
    t = jnp.maximum(t, SMALLEST_TIME)
    level = jnp.minimum(schedule.masked_ratio(t), HIGHEST_LEVEL)
    speed = jnp.where(is_first, 1.0 / SMALLEST_TIME, schedule.weight(t) * schedule.masked_ratio(t))
    is_free_BL = batch.is_free_BL()
    if key.ndim:
        shown_BL = jax.vmap(lambda key, *row: process.sample(key, *(x[None] for x in row))[0])(
            key, batch.tokens_BL, level, is_free_BL
        )
    else:
        shown_BL = process.sample(key, batch.tokens_BL, level, is_free_BL)
    noise = process.noise(batch.tokens_BL, shown_BL, level, speed, is_first)
    noise = noise._replace(weight=jnp.where(is_free_BL, noise.weight, 0.0))
    total = jnp.sum(is_free_BL).astype(jnp.float32)
    return Drawn(batch, shown_BL, noise.weight, total, noise)


def process_costs(process: Process, network: Network, params: Params, drawn: Drawn) -> jax.Array:
    """The contribution of each position to the bound at its time, in nats ``[B, L]``. See
    `divergence`.
    """
    batch, shown_BL, noise = drawn.batch, drawn.shown_BL, drawn.noise
    if network.behind is None:
        hidden_BLD = hidden_of(network, params, shown_BL, batch.tokens_BL, batch.length_B)
    else:  # one canvas after the given tokens
        hidden_BLD = network.behind(params, shown_BL, batch.length_B, batch.given_B)

    def cost(params: Params, hidden_BLD: jax.Array, *given: jax.Array) -> jax.Array:
        logits_NV = read_logits(
            network, network.readout, process.mask_id, params, [hidden_BLD], given[0].ndim
        )
        clean_N, shown_N, *noise_N = (x.reshape(-1) for x in given)
        term_N = divergence(
            logits_NV, clean_N, shown_N, Noise(*noise_N), noise_ids=process.noise_ids
        )
        return term_N.reshape(given[0].shape)

    is_read_BL = noise.weight > 0
    term_BL = at_positions(
        cost,
        params,
        (hidden_BLD, batch.tokens_BL, shown_BL, *noise),
        vocab_size=network.vocab_size,
        is_read_BL=is_read_BL,
    )
    return jnp.where(is_read_BL, noise.weight * term_BL, 0.0)


def process_elbo(process: Process, *, schedule: Schedule, block_length: int = 0) -> Objective:
    """One-sample estimate of the continuous-time negative ELBO of any process, per token.

    Times are low-discrepancy, as in `elbo`. `noised_at` describes the terms at times below 1e-3.
    """

    def draw(batch: Batch, key: jax.Array) -> Drawn:
        time_key, noise_key = jax.random.split(key)
        num_rows, num_positions = batch.tokens_BL.shape
        t = times_of(time_key, num_rows, num_positions, block_length)
        return noised_at(process, batch, noise_key, t, schedule=schedule)

    def loss(network: Network, params: Params, drawn: Drawn) -> Loss:
        return Loss(jnp.sum(process_costs(process, network, params, drawn)), drawn.total)

    return Objective(draw, loss)


def canvas_denoising(
    process: Process,
    *,
    schedule: Schedule,
    canvas_length: int,
    text_weight: float,
    conditioned_share: float,
) -> Objective:
    """Cross-entropy of the true tokens of a canvas, plus that of the next token of the text.

    The free tokens of a row are divided into canvases from the first one on. One of them, drawn
    uniformly, is noised at a low-discrepancy time, and the tokens after it are dropped. Both parts
    of the loss are means over their tokens, and the second has the weight `text_weight`. The recipe
    is that of DiffusionGemma's fine-tuning.

    In a fraction `conditioned_share` of the rows, the network also reads its own prediction for the
    same canvas, through which no gradient flows. A network without `Network.signal` ignores it.
    """

    def draw(batch: Batch, key: jax.Array) -> Drawn:
        """Rows that end with their canvas, of which all tokens before it are given.

        ``noise`` has the text positions whose next token is predicted, their number in the whole
        batch, and the rows that are self-conditioned.
        """
        time_key, place_key, noise_key, row_key = jax.random.split(key, 4)
        num_rows, num_positions = batch.tokens_BL.shape
        free_B = jnp.maximum(batch.length_B - batch.given_B, 0)
        count_B = -(-free_B // canvas_length)
        number_B = jnp.floor(jax.random.uniform(place_key, (num_rows,)) * count_B)
        start_B = batch.given_B + canvas_length * number_B.astype(jnp.int32)
        end_B = jnp.minimum(batch.length_B, start_B + canvas_length)
        is_before_BL = jnp.arange(num_positions)[None] + 1 < start_B[:, None]
        is_text_BL = is_before_BL & jnp.roll(batch.is_free_BL(), -1, axis=1)
        rows = Batch(batch.tokens_BL, end_B, start_B)
        is_canvas_BL = rows.is_free_BL()
        level_B = schedule.masked_ratio(stratified_times(time_key, num_rows))
        shown_BL = process.sample(noise_key, batch.tokens_BL, level_B, is_canvas_BL)
        is_conditioned_B = jax.random.bernoulli(row_key, conditioned_share, (num_rows,))
        weight_BL = is_canvas_BL.astype(jnp.float32)
        num_text = jnp.sum(is_text_BL).astype(jnp.float32)
        noise = is_text_BL, num_text, is_conditioned_B
        return Drawn(rows, shown_BL, weight_BL, jnp.sum(weight_BL), noise)

    def loss(network: Network, params: Params, drawn: Drawn) -> Loss:
        assert network.behind is not None, "the network has canvases"
        tokens_BL, length_B, start_B = drawn.batch
        is_text_BL, num_text, is_conditioned_B = drawn.noise
        is_canvas_BL, rows = drawn.is_supervised_BL(), (drawn.shown_BL, length_B, start_B)
        signal_BLD, signal = None, network.signal
        if conditioned_share > 0 and signal is not None:
            held = jax.lax.stop_gradient(params)
            first_BLD = network.behind(held, *rows)

            def signal_of(hidden_BD: jax.Array) -> jax.Array:
                logits_BV = network.readout(held, hidden_BD)
                return signal(held, logits_BV.at[:, process.mask_id].set(-jnp.inf))

            size = max(1, _MAX_LOGITS // (network.vocab_size * first_BLD.shape[0]))
            signal_LBD = jax.lax.map(signal_of, jnp.moveaxis(first_BLD, 1, 0), batch_size=size)
            signal_BLD = jnp.moveaxis(signal_LBD, 0, 1)
            signal_BLD = jnp.where(is_conditioned_B[:, None, None], signal_BLD, 0)
        nats_BL = cross_entropy(
            network,
            params,
            network.behind(params, *rows, signal_BLD),
            jnp.where(is_text_BL, jnp.roll(tokens_BL, -1, axis=1), tokens_BL),
            mask_id=process.mask_id,
            is_read_BL=is_canvas_BL | is_text_BL,
        )
        of_canvas, of_text = (
            jnp.sum(jnp.where(is_in_BL, nats_BL, 0.0)) for is_in_BL in (is_canvas_BL, is_text_BL)
        )
        # The second sum is rescaled to the weight of the first, so that both are means.
        scale = text_weight * drawn.total / jnp.maximum(num_text, 1.0)
        figures = {"canvas": (of_canvas, drawn.total), "next_token": (of_text, num_text)}
        return Loss(of_canvas + scale * of_text, drawn.total, figures)

    return Objective(draw, loss)
