"""Texts that are shown while they are denoised, and kept for the page that plays it."""

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
from dlm_jax.viewing.trace import write_trace
from dlm_jax.viewing.watch import Watch, pace_of


def watched(
    model: dlm_jax.Model,
    prompts: Sequence[dict[str, Any]],
    args: argparse.Namespace,
    common: dict[str, Any],
) -> tuple[dlm_jax.Texts, float]:
    """The texts, shown while they are denoised and kept for the page that plays it.

    Besides, the seconds that were spent waiting for the eyes.
    """
    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    steps = common.get("steps", model.sample.steps)
    watch = Watch(decode, sys.stderr, names=names, pace=pace_of(steps)) if args.watch else None
    frames: dict[int, list[Frame]] = {}
    rows: dict[int, Row] = {}
    for canvases in dlm_jax.stream(model, prompts, **common):
        rows |= canvases
        shown = [frame_of(i, row, mask_id=model.tokenizer.mask_id, steps=steps)
                 for i, row in sorted(canvases.items())]  # fmt: skip
        for frame in shown:
            frames.setdefault(frame.row, []).append(frame)
        if watch is not None:
            watch.show(shown)
    if args.trace is not None:
        title = prompts[0].get("prompt") or prompts[0].get("template") or "unprompted"
        write_trace(args.trace, [frames[i] for i in sorted(frames)], decode, title=title[:80],
                    names=names)  # fmt: skip
        print(f"wrote {args.trace}", file=sys.stderr)
    return texts_of(model, rows), 0.0 if watch is None else watch.waited
