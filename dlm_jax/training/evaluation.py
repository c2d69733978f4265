"""Evaluation of a run: every held-out window, over the same noise every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dlm_jax.data import validation_windows
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.randomness import key_of
from dlm_jax.training.run import Run
from dlm_jax.types import Params


def held_out(
    run: Run,
    eval_step: Callable[..., Any],
    params: Params,
    *,
    part: tuple[int, int],
    place: Callable[[dict[str, np.ndarray]], Batch],
) -> tuple[Any, np.ndarray]:
    """(what `Task.measure` finds in each window, its free tokens).

    Args:
      run: whose held-out text it is.
      eval_step: from `Run.eval_step`.
      params: to be evaluated.
      part: which share of a batch is this process's, and how many shares there are.
      place: makes the global batch of which this process has these rows.
    """
    batch_size, (share, shares) = run.config.train.batch_size, part
    windows = validation_windows(
        run.corpus.val_rows,
        seq_len=run.config.data.seq_len,
        pad_id=run.corpus.tokenizer.pad_id,
        max_windows=run.config.train.eval_windows,
        multiple_of=batch_size,
    )
    mine = batch_size // shares
    parts = []
    for first in range(0, len(windows["length"]), batch_size):
        rows = slice(first + share * mine, first + (share + 1) * mine)
        batch = place({name: column[rows] for name, column in windows.items()})
        key = jax.random.fold_in(key_of(0), first)
        parts.append(eval_step(params, batch, key))
    free_N = windows["length"] - windows["given"]
    columns = jax.tree.map(lambda *cut: np.concatenate(cut), *jax.device_get(parts))
    return columns, free_N
