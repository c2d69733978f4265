"""The scorer head, which predicts the corrupted fraction of a text.

Scored texts have no holes, so corrupted tokens are wrong tokens, never MASK. The fraction is called
the share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.diffusion.likelihood import half_width, plus_minus, ratio_and_error
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import Batch, MixedExample, ObjectiveConfig, denoising
from dlm_jax.heads.head import BuiltInHead, Head
from dlm_jax.types import Network, Params, live_positions

SCORER = "scorer_head"


def scorer_layers(config: Any, linear: Callable[..., Any], norm: Any) -> dict[str, Any]:
    """The layers from a row's mean hidden vector to its logit."""
    return {
        "inner": linear(config.width, config.width, scale=1.0, bias=True),
        "out": linear(config.width, 1, scale=0.0, bias=True),
    }


def scorer_function(config: Any, layers_of: Callable[[Params], Any], readout: Any) -> Any:
    """``(params, hidden_BLD, length_B) -> logit_B``, float32: the logit of the fraction of
    corrupted tokens in a row.
    """

    def scorer(params: Params, hidden_BLD: jax.Array, length_B: jax.Array) -> jax.Array:
        layers = layers_of(params)
        live = live_positions(length_B, hidden_BLD.shape[1])[:, :, None]
        total_BD = jnp.sum(jnp.where(live, hidden_BLD.astype(jnp.float32), 0.0), axis=1)
        mean_BD = total_BD / jnp.maximum(jnp.sum(live, axis=1), 1)
        return layers.out(jax.nn.silu(layers.inner(mean_BD)))[:, 0]

    return scorer


def scorer_head(setup: Any) -> Head:
    """The training of the scorer head, together with the trunk from the first step."""

    def draw(example: MixedExample, key: jax.Array) -> tuple[CorruptedRows, jax.Array]:
        """The corrupted rows with their shares, and the number of rows in the loss."""
        rows = corrupt(example.batch, key, setup.config.objective, setup.text_ids)
        return rows, jnp.sum(rows.weight_B)

    return Head(
        name=SCORER,
        metric="cross_entropy",
        draw=draw,
        loss=lambda inputs: scorer_loss(inputs.network, inputs.params, *inputs.noise),
        reads_hidden=False,
        trains_trunk=True,
        joins_main=True,
    )


SCORER_HEAD = BuiltInHead(
    name=SCORER,
    make=scorer_head,
    layers=scorer_layers,
    function=scorer_function,
    is_added=lambda model: model.mode == "sequence_scorer",
)
"""The scorer head, which predicts what fraction of a text is corrupted."""


class CorruptedRows(NamedTuple):
    """Rows for a scorer, with the true shares.

    Attributes:
      shown_BL: int32 canvas that the trunk reads.
      length_B: int32, number of live tokens in each row.
      share_B: float32 in [0, 1], fraction of the free positions with a wrong token.
      weight_B: float32, 1 for rows with a free position, 0 for other rows.
    """

    shown_BL: jax.Array
    length_B: jax.Array
    share_B: jax.Array
    weight_B: jax.Array


def corrupt(
    batch: Batch, key: jax.Array, how: ObjectiveConfig, random_ids: tuple[int, ...]
) -> CorruptedRows:
    """The batch with wrong tokens at some free positions, and the fraction of these positions.

    Each row uses one corruption pattern. For ``random`` and ``sticky``, the fraction is uniform up
    to ``max_ratio``. In half of the rows, the new tokens are drawn uniformly from `random_ids`. In
    the other half, they are copied from random positions in other rows. Copied tokens have the
    token frequencies of real text and can be detected only from context. A copied token that is not
    in `random_ids` (such as EOS) is replaced by a random id. A new token that equals the true token
    does not count as wrong.
    """
    pattern_key, kind_key, row_key, place_key = jax.random.split(key, 4)
    num_rows, num_positions = batch.tokens_BL.shape
    task = denoising(
        batch,
        pattern_key,
        mask_id=random_ids[0],
        random_ids=random_ids,
        settings=replace(how, mask_share=0.0, random_share=1.0, identity_targets=False),
    )
    # In a batch with a single row, tokens are copied from the row itself.
    step_BL = jax.random.randint(row_key, (num_rows, num_positions), 1, max(2, num_rows))
    other_BL = (jnp.arange(num_rows)[:, None] + step_BL) % num_rows
    uniform_BL = jax.random.uniform(place_key, (num_rows, num_positions))
    place_BL = jnp.floor(uniform_BL * batch.length_B[other_BL]).astype(jnp.int32)
    taken_BL = batch.tokens_BL[other_BL, place_BL]
    may_show = np.zeros(max(random_ids) + 1, bool)
    may_show[list(random_ids)] = True
    is_usable_BL = jnp.asarray(may_show).at[taken_BL].get(mode="fill", fill_value=False)
    takes_B = jax.random.bernoulli(kind_key, 0.5, (num_rows,))
    is_taken_BL = (task.weight_BL > 0) & takes_B[:, None] & is_usable_BL
    shown_BL = jnp.where(is_taken_BL, taken_BL, task.shown_BL)
    num_wrong_B = jnp.sum(shown_BL != batch.tokens_BL, axis=1)
    num_free_B = jnp.sum(batch.is_free_BL(), axis=1)
    return CorruptedRows(
        shown_BL=shown_BL,
        length_B=batch.length_B,
        share_B=num_wrong_B / jnp.maximum(num_free_B, 1),
        weight_B=(num_free_B > 0).astype(jnp.float32),
    )


def score(network: Network, params: Params, shown_BL: jax.Array, length_B: jax.Array) -> jax.Array:
    """Logits of the predicted shares, float32 ``[B]``."""
    hidden_BLD, _ = network.trunk(params, shown_BL, length_B, None)
    return network.heads["scorer"](params, hidden_BLD, length_B)


def scorer_loss(network: Network, params: Params, rows: CorruptedRows, total: jax.Array) -> Loss:
    """Binary cross-entropy (nats) per row, with the true share as the target.

    Like the squared error, the loss is minimal if the sigmoid of the logit equals the mean share.
    However, its gradient does not vanish for confident wrong scores. `total` is the number of rows
    in the loss, in the whole batch.
    """
    logit_B = score(network, params, rows.shown_BL, rows.length_B)
    return Loss(jnp.sum(rows.weight_B * binary_cross_entropy(logit_B, rows.share_B)), total)


def binary_cross_entropy(logit_B: jax.Array, share_B: jax.Array) -> jax.Array:
    """``-s log p - (1 - s) log(1 - p)`` in nats ``[B]``, where ``p`` is the sigmoid of the
    logit.
    """
    return jax.nn.softplus(logit_B) - share_B * logit_B


class Errors(NamedTuple):
    """Errors of a scorer for each row, float ``[B]``.

    Attributes:
      squared_B: squared difference between the predicted and the true share.
      cross_entropy_B: training loss, in nats.
      share_B: true share.
    """

    squared_B: jax.Array
    cross_entropy_B: jax.Array
    share_B: jax.Array


def errors(
    network: Network,
    params: Params,
    batch: Batch,
    number_B: jax.Array,
    key: jax.Array,
    *,
    how: ObjectiveConfig,
    random_ids: tuple[int, ...],
) -> Errors:
    """Errors of a scorer on the corrupted batch; 0 for rows without a free position.

    Wrong tokens can be copied from other rows, so the whole batch uses the same random key, which
    is derived from `key` and the index of the first row.
    """
    rows = corrupt(batch, jax.random.fold_in(key, number_B[0]), how, random_ids)
    logit_B = score(network, params, rows.shown_BL, rows.length_B)
    squared_B = jnp.square(jax.nn.sigmoid(logit_B) - rows.share_B)
    found = Errors(squared_B, binary_cross_entropy(logit_B, rows.share_B), rows.share_B)
    return jax.tree.map(lambda error_B: rows.weight_B * error_B, found)


def summary(found: Errors, free_N: np.ndarray) -> dict[str, float]:
    """Means over the rows with a free position, keyed by metric name.

    The metrics are ``squared_error`` with its ``standard_error`` (absent for a single row),
    ``constant_squared_error`` (the error of the best constant prediction), ``cross_entropy``, and
    ``windows``, the number of these rows.

    Args:
      found: errors of N rows.
      free_N: number of free positions in each row; not all 0.
    """
    squared_N, entropy_N, share_N = (np.asarray(x, np.float64)[free_N > 0] for x in found)
    mean, error = ratio_and_error(squared_N, np.ones(len(squared_N)))
    errors = {"standard_error": error} if len(squared_N) > 1 else {}
    return {
        "squared_error": mean,
        **errors,
        "constant_squared_error": float(share_N.var()),
        "cross_entropy": float(entropy_N.mean()),
        "windows": len(squared_N),
    }


def error_line(figures: dict[str, float]) -> str:
    """Formats a `summary` with the 95% interval of the error."""
    interval = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
    return (
        f"squared error {figures['squared_error']:.5f}{plus_minus(interval, 5)} of the corrupted "
        "share "
        f"({figures['constant_squared_error']:.5f} for the best constant)"
    )
