"""Likelihoods of texts and log-probabilities of their tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import devices
from dlm_jax.distributed import compiler
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.objectives.likelihood import Costs, costs, half_width, num_scored, ratio_and_error
from dlm_jax.objectives.losses import unpredicted
from dlm_jax.objectives.objective import Batch
from dlm_jax.randomness import key_of
from dlm_jax.sampling import positions
from dlm_jax.settings import SettingError
from dlm_jax.types import Network, Params

MOST_AT_ONCE = 1 << 16
"""Maximum number of rows per batch and of mask draws."""


@dataclass(frozen=True)
class Score:
    """Costs of N texts, given their prompts.

    Attributes:
      nats: float64 ``[N]``, cost of each text.
      tokens: int ``[N]``, number of scored tokens, without the prompt and without the first token
        of a row if the network does not predict it (`Network.predicts_first`).
      characters: int ``[N]``, number of characters of the text without the prompt.
      draw_error: float64 ``[N]``, standard error of the cost of each text due to the random masks;
        0 for exact likelihoods, NaN if a window of the text has only one draw.
      is_exact: whether ``nats`` is exact. If not, ``nats`` is an upper bound in expectation.
      num_draws: number of masks drawn per window.
    """

    nats: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray
    draw_error: np.ndarray
    is_exact: bool
    num_draws: int = 0

    @property
    def nats_per_token(self) -> tuple[float, float]:
        """The mean cost per token and its standard error.

        Texts are treated as independent. For a single text, the error is that due to the random
        masks.
        """
        return self._per(self.tokens, 1.0)

    @property
    def bits_per_character(self) -> tuple[float, float]:
        """The mean cost per character and its standard error, as for `nats_per_token`."""
        return self._per(self.characters, math.log(2.0))

    def interval(self, error: float) -> float:
        """Returns the half-width of the 95% confidence interval (Student's t) of a value with this
        standard error.
        """
        return half_width(error, len(self.nats) if len(self.nats) > 1 else self.num_draws)

    def _per(self, counts: np.ndarray, nats: float) -> tuple[float, float]:
        if not counts.any():
            return math.nan, math.nan
        ratio, error = ratio_and_error(self.nats / nats, counts)
        if len(self.nats) == 1:
            error = float(self.draw_error[0]) / nats / float(counts[0])
        return ratio, error


def score(
    model: Model,
    texts: str | Sequence[str],
    *,
    prompts: str | Sequence[str] | None = None,
    num_draws: int = 1,
    batch_size: int = 16,
    seed: int = 0,
) -> Score:
    """Scores each text, conditioned on its prompt if there is one.

    If a text without a prompt is longer than the model's canvas, it is split into windows, each
    scored without the previous windows. The cost of the text is the sum over its windows.

    A published causal model predicts a token only from the tokens before it. The first token of a
    text without a prompt therefore costs 0 and is not counted in `Score.tokens`, as in the loss of
    transformers. Each further window begins with the last token of the previous one, so that every
    other token is scored.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      texts: one or several non-empty texts.
      prompts: one prompt per text, visible to the model but not scored.
      num_draws: number of masks drawn per window; not used by a causal model.
      batch_size: number of windows per forward pass.
      seed: random seed of the masks.

    Raises:
      ValueError: a text is empty or cannot be encoded, a prompt and its text together exceed the
        canvas, a size is below 1, or the model has canvases.
    """
    if model.network.canvas_length:
        raise ValueError("a model with canvases has no likelihood of texts; use another model")
    texts = [texts] if isinstance(texts, str) else texts
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not len(texts):
        raise ValueError("there are no texts to score; pass at least one")
    if prompts is not None and len(prompts) != len(texts):
        raise ValueError(
            f"{len(prompts)} prompts do not match {len(texts)} texts; pass one per text"
        )
    windows: list[tuple[np.ndarray, int]] = []
    owners: list[int] = []
    for index, (text, prompt) in enumerate(zip(texts, prompts or [""] * len(texts), strict=True)):
        try:
            cut = _windows(model, prompt, text)
        except ValueError as error:
            raise ValueError(f"text {index}: {error}") from None
        windows, owners = windows + cut, owners + [index] * len(cut)
    size = canvas_size(max(len(ids) for ids, _ in windows))
    tokens = np.full((len(windows), size), model.tokenizer.pad_id, np.int32)
    for row, (ids, _) in enumerate(windows):
        tokens[row, : len(ids)] = ids
    rows = {
        "tokens": tokens,
        "length": np.array([len(ids) for ids, _ in windows], np.int32),
        "given": np.array([given for _, given in windows], np.int32),
    }
    cost = score_rows(model, rows, num_draws=num_draws, batch_size=batch_size, seed=seed)

    def per_text(values: Sequence[float] | np.ndarray) -> np.ndarray:
        return np.bincount(owners, np.asarray(values, np.float64), minlength=len(texts))

    return Score(
        nats=per_text(cost.nats_B),
        tokens=per_text(num_scored(model.network, rows)).astype(np.int64),
        characters=np.array([len(text) for text in texts]),
        draw_error=np.sqrt(per_text(cost.variance_B)),
        is_exact=model.is_causal,
        num_draws=num_draws,
    )


def score_rows(
    model: Model,
    rows: Mapping[str, np.ndarray],
    *,
    num_draws: int = 1,
    batch_size: int = 16,
    seed: int = 0,
) -> Costs:
    """Returns the costs of N rows of tokens, float64 ``[N]`` arrays that do not depend on
    `batch_size`.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      rows: ``tokens`` int ``[N, L]``, ``length`` ``[N]`` and, if there are prompts, ``given``
        ``[N]``, as returned by the data pipeline.
      num_draws: number of masks drawn per row; not used by a causal model.
      batch_size: number of rows per forward pass.
      seed: random seed of the masks, in [0, 2**32).
    """
    for name, value in (("num_draws", num_draws), ("batch_size", batch_size)):
        if not 1 <= value <= MOST_AT_ONCE:
            raise SettingError(name, value, "is out of range", f"use 1 to {MOST_AT_ONCE}")
    if not 0 <= seed < 2**32:
        raise SettingError("seed", seed, "is outside [0, 2**32)", "use a seed in this range")
    run = compiled(
        costs,
        model.network,
        model.compiler_options,
        is_causal=model.is_causal,
        num_draws=num_draws,
        mask_id=model.tokenizer.mask_id,
        eos_id=model.tokenizer.eos_id,
        process=model.process,
        noise_ids=model.noise_ids,
    )
    given = rows.get("given", np.zeros_like(rows["length"]))
    columns = [np.asarray(x, np.int32) for x in (rows["tokens"], rows["length"], given)]
    num_rows, parts = len(rows["length"]), []
    for first in range(0, num_rows, batch_size):
        # A batch is padded with its last row to a power of two, so that few shapes are compiled.
        count = min(batch_size, _power_of_two(num_rows - first))
        index = np.minimum(np.arange(first, first + count), num_rows - 1)
        batch = Batch(*(jnp.asarray(column[index]) for column in columns))
        number_B = jnp.arange(first, first + count, dtype=jnp.int32)
        parts.append(jax.device_get(run(model.params, batch, number_B, key_of(seed))))
    return jax.tree.map(lambda *cut: np.concatenate(cut)[:num_rows].astype(float), *parts)


@functools.lru_cache(maxsize=32)
def compiled(
    fn: Callable[..., Any], network: Network, given: tuple[str, ...], **static: Any
) -> Callable[..., Any]:
    """Compiles `fn` with the given options, which have the form of `Model.compiler_options`."""

    def run(*args: Any) -> Any:
        with devices.exact():
            return fn(network, *args, **static)

    return jax.jit(run, compiler_options=compiler.options("sample", given=given))


def _windows(model: Model, prompt: str, text: str) -> list[tuple[np.ndarray, int]]:
    """Returns the ids of each window of a text, and the number of given ids at its start. A text
    with a prompt is a single window.
    """
    prefix, most = np.array(model.prefix_ids, np.int32), model.max_length
    given, ids = model.tokenizer.encode(prompt), model.tokenizer.encode(text)
    if not ids.size:
        raise ValueError("the text is empty; pass a text to score")
    if given.size:
        whole = np.concatenate([prefix, given, ids])
        if whole.size > most:
            raise ValueError(
                f"prompt and text of {whole.size} tokens together exceed the model's canvas of "
                f"{most}; shorten one of them"
            )
        return [(whole, whole.size - ids.size)]
    if prefix.size or model.network.predicts_first:
        starts = range(0, ids.size, most - prefix.size)
        parts = [ids[start : start + most - prefix.size] for start in starts]
        return [(np.concatenate([prefix, part]), prefix.size) for part in parts]
    starts = range(0, max(ids.size - 1, 1), max(most - 1, 1))
    return [(ids[start : start + most], 1) for start in starts]


class DecodingRow(NamedTuple):
    """A row of tokens, int32 ``[n]``, and the positions to decode, in order.

    A MASK token at any other position remains a hole.
    """

    ids: np.ndarray
    places: Sequence[int]


def order_logprobs(
    model: Model,
    rows: Iterable[DecodingRow],
    *,
    batch_size: int = 32,
    num_rows: int | None = None,
) -> np.ndarray:
    """Returns the log-probability in nats of the tokens at the `places` of each row, decoded in
    this order, float64 ``[N]``.

    Each token is read from the canvas with the previously decoded tokens. Identical canvases run
    only once, so rows that differ in their last token alone share all forward passes. Every program
    has `num_rows` rows; None uses the smallest sufficient power of two, up to `batch_size`.
    """
    reads, sizes = [], []
    for row in rows:
        places = np.asarray(row.places)
        for count, place in enumerate(places.tolist()):
            shown = row.ids.copy()
            shown[places[count:]] = model.tokenizer.mask_id
            reads.append((shown, place, int(row.ids[place])))
        sizes.append(places.size)
    values = _read_logprobs(model, reads, batch_size, num_rows).astype(np.float64)
    return np.array([part.sum() for part in np.split(values, np.cumsum(sizes))[:-1]])


def _read_logprobs(
    model: Model,
    reads: Sequence[tuple[np.ndarray, int, int]],
    batch_size: int,
    num_rows: int | None,
) -> np.ndarray:
    """Returns the log-probability of each read (canvas, position, id), float32 ``[N]``."""
    if not model.process.is_masked:
        raise ValueError(
            "tokens are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
        )
    # The numbers of the reads of each position and id of each canvas.
    canvases: dict[bytes, tuple[np.ndarray, dict[tuple[int, int], list[int]]]] = {}
    for number, (shown, place, id_) in enumerate(reads):
        _, known = canvases.setdefault(shown.tobytes(), (shown, {}))
        known.setdefault((place, id_), []).append(number)
    sizes: dict[int, list[Any]] = {}
    for canvas in canvases.values():
        sizes.setdefault(canvas_size(canvas[0].size, is_shared=True), []).append(canvas)
    most = max((len(known) for _, known in canvases.values()), default=1)
    result, num_reads = np.zeros(len(reads), np.float32), _power_of_two(most)
    run = compiled(
        _logprobs_at,
        model.network,
        model.compiler_options,
        mask_id=unpredicted(model.network, model.tokenizer.mask_id),
    )
    for size, rows in sorted(sizes.items()):
        count = num_rows or min(batch_size, _power_of_two(len(rows)))
        for first in range(0, len(rows), count):
            some = rows[first : first + count]
            tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
            length, place, ids = (np.zeros((n, count), np.int32) for n in (1, num_reads, num_reads))
            for row, (shown, known) in enumerate(some):
                tokens[row, : shown.size], length[0, row] = shown, shown.size
                place[: len(known), row], ids[: len(known), row] = np.array([*known]).T
            values = run(model.params, tokens, np.maximum(length[0], 1), place, ids)
            value_PB = np.asarray(values)
            for row, (_, known) in enumerate(some):
                for index, numbers in enumerate(known.values()):
                    result[numbers] = value_PB[index, row]
    return result


def _logprobs_at(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_PB: jax.Array,
    ids_PB: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """Returns the log-probabilities in nats of ids at positions, ``[P, B]``. MASK is excluded, as
    in the losses.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(read: tuple[jax.Array, jax.Array]) -> jax.Array:
        place_B, ids_B = read
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
        logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
        norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
        return (jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1) - norm_B1)[:, 0]

    return jax.lax.map(at, (place_PB, ids_PB))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
