"""Texts that are shown while they are denoised, and what a page needs to play that."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import dlm_jax
from dlm_jax.inference.generate import texts_of
from dlm_jax.inference.results import Row
from dlm_jax.viewing.frames import Frame
from dlm_jax.viewing.rows import frame_of, special_names
from dlm_jax.viewing.watch import Watch, pace_of


def watched(
    model: dlm_jax.Model,
    prompts: Sequence[dict[str, Any]],
    args: argparse.Namespace,
    common: dict[str, Any],
    frames: dict[int, list[Frame]],
) -> tuple[dlm_jax.Texts, float]:
    """The texts, shown while they are denoised; `frames` keeps what a page plays, by row.

    Besides, the seconds that were spent waiting for the eyes.
    """
    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    steps = common.get("steps", model.sample.steps)
    watch = Watch(decode, sys.stderr, names=names, pace=pace_of(steps)) if args.watch else None
    rows: dict[int, Row] = {}
    for canvases in dlm_jax.stream(model, prompts, **common):
        rows |= canvases
        shown = [frame_of(i, row, mask_id=model.tokenizer.mask_id, steps=steps)
                 for i, row in sorted(canvases.items())]  # fmt: skip
        for frame in shown if args.trace is not None else ():
            frames.setdefault(frame.row, []).append(frame)
        if watch is not None:
            watch.show(shown)
    return texts_of(model, rows), 0.0 if watch is None else watch.waited
