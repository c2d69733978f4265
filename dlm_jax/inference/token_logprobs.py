"""Exact log-probabilities of the tokens of a text, decoded one at a time.

Each token is read from the canvas with the previously decoded tokens. Identical canvases run only
once, so rows that differ in their last token alone share all forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.scoring import compiled
from dlm_jax.objectives.losses import unpredicted
from dlm_jax.sampling import positions
from dlm_jax.types import Network, Params


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
    rows: Iterable[DecodingRow],
    *,
    batch_size: int = 32,
    num_rows: int | None = None,
) -> np.ndarray:
    """Returns the log-probability in nats of the tokens at the `places` of each row, decoded in
    this order, float64 ``[N]``.

    Every program has `num_rows` rows; None uses the smallest sufficient power of two, up to
    `batch_size`.
    """
    _check_holes(model)
    canvases, reads = _Canvases(), []
    for row in rows:
        own, places = [], np.asarray(row.places)
        for count, place in enumerate(places.tolist()):
            shown = row.ids.copy()
            shown[places[count:]] = model.tokenizer.mask_id
            own += canvases.read(shown, [place], row.ids)
        reads.append(own)
    values = canvases.run(model, batch_size, num_rows)[0].astype(np.float64)
    return np.array([values[_columns(own)].sum() for own in reads])


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
    canvases, reads = _Canvases(), []
    texts = [np.asarray(ids, np.int32) for ids in texts]
    for ids in texts:
        own, at = [], range(ids.size)
        for places in [at] if model.is_causal else [at[n : n + 1] for n in at]:
            shown = ids.copy()
            if not model.is_causal:
                shown[places.start :] = model.tokenizer.mask_id
            own += canvases.read(shown, places, ids)
        reads.append(own)
    num_top = min(num_top, model.network.vocab_size - len(model.banned_ids))
    logprobs, top_ids, top_logprobs = canvases.run(
        model, batch_size, num_top=num_top, goes_on=goes_on
    )
    results = []
    for ids, own in zip(texts, reads, strict=True):
        number, place, _ = columns = _columns(own)
        logprobs_N = logprobs[columns]
        if not model.network.predicts_first:
            logprobs_N[:1] = np.nan
        results.append(
            TokenLogprobs(ids, logprobs_N, top_ids[number, place], top_logprobs[number, place])
        )
    return results


_Read = tuple[int, int, int]
"""The canvas, the place on the canvas and the id at the place that a log-probability is of."""


_Row = tuple[int, np.ndarray, dict[int, tuple[int, dict[int, int]]]]
"""The number of a canvas, its tokens, and the places that are read: for each position, the place
and the ids with their numbers.
"""


def _columns(reads: Sequence[_Read]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(reads, int).reshape(-1, 3).T)


class _Canvases:
    """Canvases to run, and the ids whose log-probabilities are read from each canvas."""

    def __init__(self) -> None:
        self._rows: dict[bytes, _Row] = {}

    def read(self, shown: np.ndarray, places: Sequence[int], ids: np.ndarray) -> list[_Read]:
        """Adds the canvas `shown`, from which the tokens `ids` are read at `places`."""
        number, _, known = self._rows.setdefault(shown.tobytes(), (len(self._rows), shown, {}))
        reads = []
        for place in places:
            column, at = known.setdefault(place, (len(known), {}))
            reads.append((number, column, at.setdefault(int(ids[place]), len(at))))
        return reads

    def run(
        self,
        model: Model,
        batch_size: int,
        num_rows: int | None = None,
        *,
        num_top: int = 0,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the log-probabilities by `_Read`, float32 ``[C, P, K]``, and the `num_top` most
        likely ids of each place with their log-probabilities, ``[C, P, num_top]``.
        """
        sizes: dict[int, list[_Row]] = {}
        for row in self._rows.values():
            sizes.setdefault(canvas_size(row[1].size, is_shared=True), []).append(row)
        most = max((len(known) for _, _, known in self._rows.values()), default=1)
        # A causal text is read at all positions of its canvas, so that few programs are compiled.
        most = max(sizes, default=1) if num_top and model.is_causal else _power_of_two(most)
        every = [ids for _, _, known in self._rows.values() for _, ids in known.values()]
        num_ids = _power_of_two(max(map(len, every), default=1), 4)
        found = [
            np.zeros((len(self._rows), most, size), dtype)
            for size, dtype in ((num_ids, np.float32), (num_top, np.int32), (num_top, np.float32))
        ]
        run = compiled(
            _read,
            model.network,
            model.compiler_options,
            mask_id=unpredicted(model.network, model.tokenizer.mask_id),
            banned_ids=model.banned_ids,
            num_top=num_top,
        )
        for size, rows in sorted(sizes.items()):
            count = num_rows or min(batch_size, _power_of_two(len(rows)))
            num_places = min(most, size)
            for first in range(0, len(rows), count):
                if not goes_on():
                    raise Stopped
                some = rows[first : first + count]
                tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
                length, place = np.ones(count, np.int32), np.zeros((num_places, count), np.int32)
                ids = np.zeros((num_places, count, num_ids), np.int32)
                for row, (_, shown, known) in enumerate(some):
                    tokens[row, : shown.size], length[row] = shown, shown.size
                    for column, (at, (_, wanted)) in enumerate(known.items()):
                        place[column, row], ids[column, row, : len(wanted)] = at, list(wanted)
                values = jax.device_get(run(model.params, tokens, length, place, ids))
                numbers = [number for number, _, _ in some]
                for table, value_PBK in zip(found, values, strict=True):
                    table[numbers, :num_places] = np.moveaxis(value_PBK, 0, 1)[: len(some)]
        return found[0], found[1], found[2]


def _read(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_PB: jax.Array,
    ids_PBK: jax.Array,
    *,
    mask_id: int,
    banned_ids: tuple[int, ...],
    num_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities in nats of ids at positions, ``[P, B, K]``, and the `num_top`
    most likely ids with their log-probabilities. MASK is excluded, as in the losses.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(asked: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        place_B, ids_BK = asked
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
        logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
        if not num_top:
            norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
            logprobs_BK = jnp.take_along_axis(logits_BV, ids_BK, axis=1) - norm_B1
            return logprobs_BK, ids_BK[:, :0], logprobs_BK[:, :0]
        logprobs_BV = jax.nn.log_softmax(logits_BV)
        written_BV = logprobs_BV.at[:, np.array(banned_ids, int)].set(-jnp.inf)
        top_BK, top_ids_BK = jax.lax.top_k(written_BV, num_top)
        return jnp.take_along_axis(logprobs_BV, ids_BK, axis=1), top_ids_BK, top_BK

    return jax.lax.map(at, (place_PB, ids_PBK))


def _check_holes(model: Model) -> None:
    if not model.process.is_masked:
        raise ValueError(
            "tokens are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
        )


def _power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())
