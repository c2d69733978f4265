"""Likelihoods of texts and log-probabilities of their tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import devices
from dlm_jax.data import noise_ids
from dlm_jax.distributed import compiler
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.objectives.likelihood import Costs, costs, half_width, num_scored, ratio_and_error
from dlm_jax.objectives.objective import Batch
from dlm_jax.randomness import key_of
from dlm_jax.settings import SettingError
from dlm_jax.types import Network

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
    mask_id, ids = model.tokenizer.mask_id, noise_ids(model.tokenizer)
    run = compiled(
        costs,
        model.network,
        model.compiler_options,
        is_causal=model.is_causal,
        num_draws=num_draws,
        mask_id=mask_id,
        eos_id=model.tokenizer.eos_id,
        process=dataclasses.replace(model.process, mask_id=mask_id, noise_ids=ids),
    )
    given = rows.get("given", np.zeros_like(rows["length"]))
    columns = [np.asarray(x, np.int32) for x in (rows["tokens"], rows["length"], given)]
    num_rows, parts = len(rows["length"]), []
    for first in range(0, num_rows, batch_size):
        # A batch is padded with its last row to a power of two, so that few shapes are compiled.
        count = min(batch_size, 1 << (num_rows - first - 1).bit_length())
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
