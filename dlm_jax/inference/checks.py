"""What is refused of a request before tracing: settings, drafts and canvases that cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlm_jax.config import SampleConfig
from dlm_jax.inference.model import Model
from dlm_jax.inference.prompts import Given
from dlm_jax.inference.structure import check_structure
from dlm_jax.sampling.facts import ModelFacts

if TYPE_CHECKING:
    from dlm_jax.inference.request import Request


def check_settings(model: Model, sample: SampleConfig) -> None:
    """Raises ValueError for settings that only the model shows to be wrong."""
    if model.network.scorer is not None:
        raise ValueError("the model is a sequence scorer, which writes nothing; load another")
    if sample.max_new_tokens and not (sample.edit and sample.length_target_mode != "none"):
        raise ValueError(
            f"max_new_tokens={sample.max_new_tokens} is the length that edits aim at, which needs "
            "edit=True and a length_target_mode; without them use "
            f"gen_length={sample.max_new_tokens} and max_new_tokens=0"
        )
    facts = model.facts
    if facts.block_length:
        _check_blocks(facts, sample)
    for rule in sample.table.checks(sample):
        rule.check_model(sample, facts)
    sample.table.check_chain(sample, facts)


def _check_blocks(facts: ModelFacts, sample: SampleConfig) -> None:
    """Raises ValueError for settings that a block-causal model cannot follow."""
    if facts.block_length % max(sample.block_length, 1) or sample.block_length < 1:
        raise ValueError(
            f"block_length={sample.block_length} is not the {facts.block_length} that the model "
            "was trained with, nor a part of it; use 0 for the same"
        )
    if sample.edits:
        raise ValueError(
            "edit=True moves tokens out of their blocks, which a block-causal model cannot; use a "
            "bidirectional model"
        )


def check_draft(sample: SampleConfig, given: Given) -> None:
    """Raises ValueError for a draft that nothing would refine."""
    needs = 1 if sample.resample or sample.edits or sample.renoises else 2
    if given.is_draft is not None and (not sample.refines or sample.steps < needs):
        raise ValueError(
            "draft is refined by remasking, resampling, re-noise or edits, and nothing of it is "
            "asked for; use remask=scheduled, schedule=all and steps=8, say"
        )


def _check_bans(draft: np.ndarray, sample: SampleConfig, facts: ModelFacts) -> None:
    """Raises ValueError for tokens of a draft that the row may not write."""
    banned = np.intersect1d(draft, sample.table.check_chain(sample, facts))
    if banned.size:
        raise ValueError(
            f"draft holds the ids {', '.join(map(str, banned))}, which are banned (logit_bias of "
            "-inf, ignore_eos, or ids that are no text); take them out, or lift the ban"
        )


def check_canvas(request: Request, facts: ModelFacts, *, mask_id: int) -> None:
    """Raises ValueError if the canvas does not go with the settings and the model.

    There are fewer steps than blocks with holes or drafts, a draft holds what the row bans, the
    model cannot see what is given behind a hole, or the fill or the cache rule refuses it.
    """
    check_structure(request, mask_id=mask_id)
    sample = request.sample
    steps, block_length = sample.steps, sample.block_length
    is_open = request.tokens == mask_id
    if request.is_draft is not None:
        is_open |= request.is_draft
        _check_bans(request.tokens[request.is_draft & (request.tokens != mask_id)], sample, facts)
    (places,) = np.nonzero(is_open)
    if not places.size:
        return
    if facts.block_length and not is_open[places[0] :].all():
        raise ValueError(
            "tokens are given behind a hole, where a block-causal model does not see them; give "
            "them before it, or use a bidirectional model"
        )
    sample.table.fills(sample).check_canvas(sample, facts, is_open)
    cache = sample.table.caches(sample)
    if cache is not None:
        cache.check_canvas(sample, facts, is_open)
    if block_length == 0:
        return
    unit = facts.block_length or 1
    busy = np.unique((places - places[0] // unit * unit) // block_length).size
    if steps < busy:
        raise ValueError(
            f"steps={steps} is less than the {busy} blocks of block_length={block_length} that "
            f"have something to fill; use steps={busy} or more"
        )
