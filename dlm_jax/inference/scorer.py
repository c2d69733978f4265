"""Which share of a text is corrupted, as a trained sequence scorer judges it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.data import text_ids
from dlm_jax.diffusion import scoring
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.model import cpu
from dlm_jax.randomness import key_of
from dlm_jax.types import Network, Params


def corrupted_share(model: Model, texts: Sequence[str], *, batch_size: int = 16) -> np.ndarray:
    """Share of each text that the scorer takes to be wrong tokens, float64 ``[N]`` in [0, 1].

    A text that is longer than the scorer's canvas is cut into windows of equal length (within one
    token), each judged alone; its share is their mean, weighted by their tokens.

    Args:
      model: a sequence scorer, from `dlm_jax.load`.
      texts: not empty.
      batch_size: windows that run at once.

    Raises:
      ValueError: the model is no sequence scorer, there are no texts, one is empty or cannot be
        encoded, or `batch_size` is below 1.
    """
    _check_scorer(model)
    _check_batch_size(batch_size)
    if isinstance(texts, str):
        raise ValueError(f"texts={texts!r} is one text; put it in a list")
    if not len(texts):
        raise ValueError("there are no texts to judge; give at least one")
    windows: list[np.ndarray] = []
    owners: list[int] = []
    for index, text in enumerate(texts):
        try:
            mine = _windows(model, text)
        except ValueError as error:
            where = f"text {index}: " if len(texts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
        windows += mine
        owners += [index] * len(mine)
    length_N = np.array([len(window) for window in windows], np.int32)
    share_N = _shares(model, windows, length_N, batch_size)
    tokens = np.bincount(owners, length_N, minlength=len(texts))
    return np.bincount(owners, share_N * length_N, minlength=len(texts)) / tokens


def held_out_errors(
    model: Model, rows: Mapping[str, np.ndarray], *, batch_size: int = 16, seed: int = 0
) -> scoring.Errors:
    """The scorer's errors on each of N rows of true text, corrupted as it was trained.

    Args:
      model: a sequence scorer, from `dlm_jax.load`.
      rows: ``tokens`` int ``[N, L]``, ``length`` and ``given`` ``[N]``, as the data pipeline makes
        them; N a multiple of `batch_size`, of which some may be empty.
      batch_size: rows that run at once, and lend each other wrong tokens.
      seed: of the corruption; 0 with the batch size of its training run does what that did.

    Raises:
      ValueError: the model is no sequence scorer, or was not trained here.
    """
    _check_scorer(model)
    if model.config is None:
        raise ValueError("the scorer has no training config; load one with dlm_jax.load")
    tokenizer = model.tokenizer
    how = scoring.Corrupter.of(model.config.objective, text_ids(tokenizer))
    run = _compiled_errors(model.network, how)
    parts = []
    for first in range(0, len(rows["length"]), batch_size):
        cut = slice(first, first + batch_size)
        batch = Batch(*(jnp.asarray(rows[name][cut]) for name in ("tokens", "length", "given")))
        key = jax.random.fold_in(key_of(seed), first)
        parts.append(jax.device_get(run(model.params, batch, key)))
    return jax.tree.map(lambda *columns: np.concatenate(columns), *parts)


def _check_scorer(model: Model) -> None:
    if model.network.scorer is None:
        raise ValueError(
            "the model is no sequence scorer; load one that was trained with "
            "model.mode='sequence_scorer'"
        )


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")


def _windows(model: Model, text: str) -> list[np.ndarray]:
    """The tokens of a text in as few windows as the canvas allows, as equal as can be."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a text; use a string")
    ids = model.tokenizer.encode(text)
    if not ids.size:
        raise ValueError("the text is empty; give one to judge")
    return np.array_split(ids, -(-ids.size // model.max_length))


def _shares(
    model: Model, windows: Sequence[np.ndarray], length_N: np.ndarray, batch_size: int
) -> np.ndarray:
    shape = (-(-len(windows) // batch_size) * batch_size, canvas_size(int(length_N.max())))
    tokens = np.full(shape, model.tokenizer.pad_id, np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = window
    length = np.zeros(shape[0], np.int32)
    length[: len(windows)] = length_N
    run = _compiled(model.network)
    parts = [
        jax.device_get(run(model.params, tokens[cut], length[cut]))
        for cut in (slice(first, first + batch_size) for first in range(0, shape[0], batch_size))
    ]
    return np.concatenate(parts)[: len(windows)].astype(np.float64)


@functools.cache
def _compiled(network: Network) -> Callable[..., jax.Array]:
    def run(params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(scoring.score(network, params, tokens_BL, length_B))

    return jax.jit(run, compiler_options=cpu.compiler_options(is_training=False))


@functools.cache
def _compiled_errors(
    network: Network, how: scoring.Corrupter
) -> Callable[[Params, Batch, jax.Array], scoring.Errors]:
    run = functools.partial(scoring.errors, network, how=how)
    return jax.jit(run, compiler_options=cpu.compiler_options(is_training=False))
