"""Exact log-probabilities of the tokens of a text, in a decoding order.

Tokens are decoded one at a time, each from the canvas with the previously decoded tokens. Rows
share the canvases of their common prefixes: those that differ in their last token alone share all
forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.diffusion.losses import unpredicted
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.scoring import compiled
from dlm_jax.sampling import positions
from dlm_jax.settings import SettingError
from dlm_jax.types import Network, Params

ORDERS = ("left_to_right", "mean")
"""Decoding orders. ``mean`` averages the probability over all orders."""


class DecodingRow(NamedTuple):
    """A row of tokens, int32 ``[n]``, and the positions to decode, in order.

    A MASK token at any other position remains a hole.
    """

    ids: np.ndarray
    places: Sequence[int]


class Stopped(Exception):
    """Raised when the caller cancels the remaining batches."""


def order_logprobs(
    model: Model,
    rows: Sequence[DecodingRow],
    *,
    order: str = "left_to_right",
    batch_size: int = 32,
    num_rows: int | None = None,
) -> np.ndarray:
    """Returns the log-probability in nats of the tokens at the `places` of each row, float64
    ``[N]``.

    ``left_to_right`` decodes the places in the given order. ``mean`` returns the log of the mean
    probability over all orders, computed from ``2^n - 1`` canvases. Identical canvases run only
    once.

    Every program has `num_rows` rows; None uses the smallest sufficient power of two, up to
    `batch_size`.
    """
    _check_holes(model)
    if order not in ORDERS:
        raise SettingError("order", order, "is unknown", f"use {' or '.join(ORDERS)}")
    read = _in_order if order == "left_to_right" else _in_all_orders
    mask_id = model.tokenizer.mask_id
    canvases = _Canvases()
    asked = [read(row, mask_id, canvases) for row in rows]
    values = canvases.run(model, batch_size, num_rows)
    if order == "left_to_right":
        return np.array([values[own].sum() for own in asked])
    return np.array([_mean_over_orders(values[own]) for own in asked])


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats of the n tokens of a text, each given the tokens before it.

    Attributes:
      ids: int32 ``[n]``, the tokens.
      logprobs: float32 ``[n]``, NaN at the first token if the network does not predict it
        (`Network.predicts_first`).
      top_ids: int32 ``[n, K]``, the most likely ids at each position, most likely first.
      top_logprobs: float32 ``[n, K]``.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def token_logprobs(
    model: Model,
    texts: Sequence[np.ndarray],
    *,
    num_top: int = 1,
    batch_size: int = 32,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the tokens of each text, given as ids.

    A causal model takes one forward pass per text, and the values sum to the exact likelihood
    (of the tokens after the first, if the network does not predict the first one).
    Other models decode the text from left to right, as in `order_logprobs`: token
    i is read from the canvas on which token i and all later tokens are MASK, so a text of n tokens
    takes n forward passes, and the values sum to the likelihood of the text under this order, given
    n. MASK is excluded, as in the losses, and no id that is never written is among the most likely
    ones.

    `goes_on` is called before each batch. If it returns False, no further batches run, and
    `Stopped` is raised.
    """
    _check_holes(model)
    run = compiled(
        _read_top,
        model.network,
        model.compiler_options,
        mask_id=unpredicted(model.network, model.tokenizer.mask_id),
        banned_ids=model.banned_ids,
        num_top=min(num_top, model.network.vocab_size - len(model.banned_ids)),
    )
    canvases: dict[int, list[tuple[int, range]]] = {}
    for number, ids in enumerate(texts):
        at = range(len(ids))
        places = [at] if model.is_causal else [at[place : place + 1] for place in at]
        size = canvas_size(len(ids), is_shared=True)
        canvases.setdefault(size, []).extend((number, some) for some in places)
    parts: list[list[Any]] = [[] for _ in texts]
    for size, own in sorted(canvases.items()):
        count = min(batch_size, _power_of_two(len(own)))
        for first in range(0, len(own), count):
            if not goes_on():
                raise Stopped
            asked = own[first : first + count]
            tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
            length = np.ones(count, np.int32)
            place, wanted = np.zeros((2, size if model.is_causal else 1, count), np.int32)
            for row, (number, some) in enumerate(asked):
                ids = texts[number]
                tokens[row, : len(ids)], length[row] = ids, len(ids)
                place[: len(some), row] = some
                wanted[: len(some), row] = ids[some.start : some.stop]
                if not model.is_causal:
                    tokens[row, some.start : len(ids)] = model.tokenizer.mask_id
            found = jax.device_get(run(model.params, tokens, length, place, wanted))
            for row, (number, some) in enumerate(asked):
                parts[number].append([values[: len(some), row] for values in found])
    made = []
    for ids, own in zip(texts, parts, strict=True):
        columns = [np.concatenate(column) for column in zip(*own, strict=True)]
        if not model.network.predicts_first:
            columns[0][:1] = np.nan
        made.append(TokenLogprobs(np.asarray(ids, np.int32), *columns))
    return made


def _in_order(row: DecodingRow, mask_id: int, canvases: _Canvases) -> list[int]:
    """Returns the indices of the log-probabilities of a row's tokens, one per place."""
    places = np.asarray(row.places)
    found = []
    for count, place in enumerate(places):
        shown = row.ids.copy()
        shown[places[count:]] = mask_id
        found.append(canvases.read(shown, int(place), int(row.ids[place])))
    return found


def _in_all_orders(row: DecodingRow, mask_id: int, canvases: _Canvases) -> np.ndarray:
    """Returns the indices ``[2^n - 1, n]`` of the log-probability at each place for each set of
    decoded places.

    Bit i of a set is 1 if place i is decoded. Entries of decoded places are 0 and unused.
    """
    places = np.asarray(row.places)
    found = np.zeros((2 ** len(places) - 1, len(places)), int)
    for number in range(len(found)):
        is_hole = (number >> np.arange(len(places))) % 2 == 0
        shown = row.ids.copy()
        shown[places[is_hole]] = mask_id
        for i in np.flatnonzero(is_hole):
            found[number, i] = canvases.read(shown, int(places[i]), int(row.ids[places[i]]))
    return found


def _mean_over_orders(values_SN: np.ndarray) -> float:
    """Returns the log of the mean probability over all orders, given the log-probabilities at the
    indices of `_in_all_orders`.
    """
    num = values_SN.shape[1]
    reached = np.full(2**num, -np.inf)
    reached[0] = 0.0
    for written in range(2**num - 1):
        holes = [i for i in range(num) if not written >> i & 1]
        for i in holes:
            step = reached[written] + values_SN[written, i] - math.log(len(holes))
            reached[written | 1 << i] = np.logaddexp(reached[written | 1 << i], step)
    return float(reached[-1])


class _Canvases:
    """Canvases to run, and the ids whose log-probabilities are read from each canvas."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._wanted: list[dict[int, dict[int, int]]] = []
        self._known: dict[bytes, int] = {}
        self._reads: dict[tuple[int, int, int], int] = {}

    def read(self, shown: np.ndarray, place: int, id_: int) -> int:
        """Returns the index of the log-probability of an id at a position on a canvas."""
        number = self._known.setdefault(shown.tobytes(), len(self._tokens))
        if number == len(self._tokens):
            self._tokens.append(shown)
            self._wanted.append({})
        ids = self._wanted[number].setdefault(place, {})
        column = ids.setdefault(id_, len(ids))
        at = number, list(self._wanted[number]).index(place), column
        return self._reads.setdefault(at, len(self._reads))

    def run(self, model: Model, batch_size: int, num_rows: int | None) -> np.ndarray:
        """Runs the canvases and returns all log-probabilities by index, float64 ``[N]``."""
        num_places = _power_of_two(max(map(len, self._wanted)))
        num_ids = _power_of_two(max(len(ids) for own in self._wanted for ids in own.values()), 4)
        found = np.zeros((len(self._tokens), num_places, num_ids))
        run = compiled(
            _read, model.network, model.compiler_options, mask_id=model.tokenizer.mask_id
        )
        for places, size, count in self._batches(batch_size, num_rows):
            arrays = self._arrays(places, (count, size, num_places, num_ids), model)
            made = jax.device_get(run(model.params, *arrays))
            found[places] = np.moveaxis(made, 0, 1)[: len(places)]
        return found[tuple(np.array(list(self._reads)).T)]

    def _batches(
        self, batch_size: int, num_rows: int | None
    ) -> Iterator[tuple[list[int], int, int]]:
        """Yields the canvases of each batch, their padded length, and the number of rows of the
        program.
        """
        sizes: dict[int, list[int]] = {}
        for number, tokens in enumerate(self._tokens):
            sizes.setdefault(canvas_size(tokens.size, is_shared=True), []).append(number)
        for size, numbers in sorted(sizes.items()):
            count = num_rows or min(batch_size, _power_of_two(len(numbers)))
            for first in range(0, len(numbers), count):
                yield numbers[first : first + count], size, count

    def _arrays(
        self, numbers: Sequence[int], shape: tuple[int, int, int, int], model: Model
    ) -> tuple[np.ndarray, ...]:
        count, size, num_places, num_ids = shape
        tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
        length, place = np.ones(count, np.int32), np.zeros((num_places, count), np.int32)
        ids = np.zeros((num_places, count, num_ids), np.int32)
        for row, number in enumerate(numbers):
            own = self._tokens[number]
            tokens[row, : own.size], length[row] = own, own.size
            for p, (at, wanted) in enumerate(self._wanted[number].items()):
                place[p, row], ids[p, row, : len(wanted)] = at, list(wanted)
        return tokens, length, place, ids


def _read(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_PB: jax.Array,
    ids_PBK: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """Returns the log-probabilities in nats of ids at positions, ``[P, B, K]``. MASK is excluded,
    as in the losses.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(asked: tuple[jax.Array, jax.Array]) -> jax.Array:
        place_B, ids_BK = asked
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == unpredicted(network, mask_id)
        logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
        norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
        return jnp.take_along_axis(logits_BV, ids_BK, axis=1) - norm_B1

    return jax.lax.map(at, (place_PB, ids_PBK))


def _read_top(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_PB: jax.Array,
    id_PB: jax.Array,
    *,
    mask_id: int,
    banned_ids: tuple[int, ...],
    num_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities ``[P, B]`` of one id per position, and the `num_top` most
    likely ids with their log-probabilities, ``[P, B, K]``.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(asked: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        place_B, id_B = asked
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
        logprobs_BV = jax.nn.log_softmax(jnp.where(is_mask_1V, -jnp.inf, logits_BV))
        written_BV = logprobs_BV.at[:, np.array(banned_ids)].set(-jnp.inf)
        top_BK, ids_BK = jax.lax.top_k(written_BV, num_top)
        own_B = jnp.take_along_axis(logprobs_BV, id_B[:, None], axis=1)[:, 0]
        return own_B, ids_BK, top_BK

    return jax.lax.map(at, (place_PB, id_PB))


def _check_holes(model: Model) -> None:
    if not model.process.is_masked:
        raise ValueError(
            "tokens are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
        )


def _power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())
