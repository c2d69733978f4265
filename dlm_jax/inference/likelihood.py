"""What texts cost under a loaded model: nats per token, bits per character, with their errors.

A diffusion model gives an upper bound, estimated from random masks; an autoregressive one the exact
value, which makes it a judge of texts that others wrote.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from dlm_jax.diffusion.likelihood import (
    Parts,
    bound_parts,
    causal_parts,
    half_width,
    ratio_and_error,
)
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.model import cpu
from dlm_jax.randomness import key_of
from dlm_jax.types import Network, Params

MOST_AT_ONCE = 1 << 16
"""Rows of a batch, and draws of masks, at most."""


class RowCosts(NamedTuple):
    """Per row, float64: nats of its free tokens, and their variance over the draws of masks.

    The same of its text alone, which is its free tokens but the EOS behind a document. Variances
    are 0 where the likelihood is exact, and NaN for a single draw.
    """

    nats_N: np.ndarray
    variance_N: np.ndarray
    text_nats_N: np.ndarray
    text_variance_N: np.ndarray


@dataclass(frozen=True)
class Score:
    """Cost of N texts, given their prompts.

    Attributes:
      nats: float64 ``[N]``, of each text.
      tokens: int ``[N]``, scored tokens: the prompt's do not count.
      characters: int ``[N]``, characters of the text without the prompt.
      draw_error: float64 ``[N]``, standard error of each text's nats from the draws of masks; 0
        where the likelihood is exact, NaN for a text with a window that was drawn once.
      is_exact: whether ``nats`` are exact; else an upper bound in expectation.
      num_draws: masks that were drawn per window.
    """

    nats: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray
    draw_error: np.ndarray
    is_exact: bool
    num_draws: int = 0

    @property
    def nats_per_token(self) -> tuple[float, float]:
        """Mean over all tokens, and its standard error.

        The texts are taken as independent; of a single one the error is that of the draws.
        """
        return self._per(self.tokens, 1.0)

    @property
    def bits_per_character(self) -> tuple[float, float]:
        """Mean over all characters, and its standard error, as for `nats_per_token`."""
        return self._per(self.characters, math.log(2.0))

    def interval(self, error: float) -> float:
        """Half of the 95% interval (Student's t) of a figure with that standard error."""
        return half_width(error, len(self.nats) if len(self.nats) > 1 else self.num_draws)

    def _per(self, counts: np.ndarray, nats: float) -> tuple[float, float]:
        ratio, error = ratio_and_error(self.nats / nats, counts)
        if len(self.nats) == 1:
            error = float(self.draw_error[0]) / nats / float(counts[0])
        return ratio, error


def score(
    model: Model,
    texts: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    num_draws: int = 1,
    batch_size: int = 16,
    seed: int = 0,
) -> Score:
    """What each text costs, given its prompt if there is one.

    A text without a prompt that is longer than the model's canvas is cut into windows, each scored
    without the one before it; such windows count as one text.

    Args:
      model: from `dlm_jax.load`, or your own.
      texts: not empty.
      prompts: one per text, shown as they are and not counted.
      num_draws: masks drawn per window; a causal model needs none.
      batch_size: windows that run at once.
      seed: of the masks.

    Raises:
      ValueError: an empty text, one the tokenizer cannot hold, a prompt and text that exceed the
        canvas together, a size below 1, or a sequence scorer instead of a language model.
    """
    if model.network.scorer is not None:
        raise ValueError(
            "the model is a sequence scorer, which has no likelihood; use dlm_jax.corrupted_share"
        )
    check_sizes(num_draws=num_draws, batch_size=batch_size, seed=seed)
    if not texts:
        raise ValueError("there are no texts to score; give at least one")
    if prompts is not None and len(prompts) != len(texts):
        raise ValueError(f"{len(prompts)} prompts do not match {len(texts)} texts; give one each")
    windows, owners = [], []
    for index, text in enumerate(texts):
        prompt = "" if prompts is None else prompts[index]
        try:
            mine = _windows(model, prompt, text)
        except ValueError as error:
            where = f"text {index}: " if len(texts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
        windows += mine
        owners += [index] * len(mine)
    cost = score_rows(
        model, _rows(model, windows), num_draws=num_draws, batch_size=batch_size, seed=seed
    )

    def per_text(values: Sequence[float] | np.ndarray) -> np.ndarray:
        return np.bincount(owners, np.asarray(values, np.float64), minlength=len(texts))

    return Score(
        nats=per_text(cost.nats_N),
        tokens=per_text([len(ids) - given for ids, given in windows]).astype(np.int64),
        characters=np.array([len(text) for text in texts]),
        draw_error=np.sqrt(per_text(cost.variance_N)),
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
) -> RowCosts:
    """Cost of rows of tokens.

    Args:
      model: from `dlm_jax.load`, or your own.
      rows: ``tokens`` int ``[N, L]``, ``length`` ``[N]`` and, if there are prompts, ``given``
        ``[N]``, as the data pipeline makes them.
      num_draws: masks drawn per row; a causal model needs none.
      batch_size: rows that run at once.
      seed: of the masks, in [0, 2**32).

    Raises:
      ValueError: a size or the seed is out of range.
    """
    check_sizes(num_draws=num_draws, batch_size=batch_size, seed=seed)
    empty = np.zeros_like(rows["length"])
    columns = [
        np.asarray(c, np.int32) for c in (rows["tokens"], rows["length"], rows.get("given", empty))
    ]
    num_rows = len(rows["length"])
    special = model.tokenizer.mask_id, model.tokenizer.eos_id
    run = _compiled(model.network, special, model.is_causal, num_draws)
    parts = []
    for first in range(0, num_rows, batch_size):
        index = np.arange(first, first + batch_size)
        # The last batch is filled up with its last row, so that one shape compiles.
        batch = Batch(*(jax.numpy.asarray(c[np.minimum(index, num_rows - 1)]) for c in columns))
        key = jax.random.fold_in(key_of(seed), first)
        parts.append(jax.device_get(run(model.params, batch, key)))
    whole, text = jax.tree.map(lambda *cut: np.concatenate(cut)[:num_rows].astype(float), *parts)
    return RowCosts(*whole, *text)


def check_sizes(*, num_draws: int, batch_size: int, seed: int) -> None:
    """Raises ValueError for a number of draws, a batch size or a seed that is out of range."""
    for name, value in (("num_draws", num_draws), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
        if value > MOST_AT_ONCE:
            raise ValueError(f"{name}={value} is too large; use {MOST_AT_ONCE} at most")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is outside [0, 2**32); use a smaller one")


@functools.cache
def _compiled(
    network: Network, special: tuple[int, int], is_causal: bool, num_draws: int
) -> Callable[[Params, Batch, jax.Array], Parts]:
    mask_id, eos_id = special

    def run(params: Params, batch: Batch, key: jax.Array) -> Parts:
        if is_causal:
            return causal_parts(network, params, batch, mask_id=mask_id, eos_id=eos_id)
        return bound_parts(
            network, params, batch, key, mask_id=mask_id, eos_id=eos_id, num_draws=num_draws
        )

    return jax.jit(run, compiler_options=cpu.compiler_options(is_training=False))


def _windows(model: Model, prompt: str, text: str) -> list[tuple[np.ndarray, int]]:
    """Rows of ids that hold a text, each with the number of its given tokens."""
    given, ids = model.tokenizer.encode(prompt), model.tokenizer.encode(text)
    if not ids.size:
        raise ValueError("the text is empty; give one to score")
    if given.size:
        if given.size + ids.size > model.max_length:
            raise ValueError(
                f"prompt of {given.size} and text of {ids.size} tokens exceed the model's canvas "
                f"of {model.max_length}; shorten one"
            )
        return [(np.concatenate([given, ids]), given.size)]
    starts = range(0, ids.size, model.max_length)
    return [(ids[start : start + model.max_length], 0) for start in starts]


def _rows(model: Model, windows: Sequence[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    size = canvas_size(max(len(ids) for ids, _ in windows))
    tokens = np.full((len(windows), size), model.tokenizer.pad_id, np.int32)
    for row, (ids, _) in enumerate(windows):
        tokens[row, : len(ids)] = ids
    return {
        "tokens": tokens,
        "length": np.array([len(ids) for ids, _ in windows], np.int32),
        "given": np.array([given for _, given in windows], np.int32),
    }
