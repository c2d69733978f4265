"""Packing of generation settings, one per row, into the commit rule and remask rule they name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.config.generation import RENOISE_TOKENS, SampleConfig
from dlm_jax.sampling.ancestral import Ancestral, Kind, NoiseSchedule, ReMDM
from dlm_jax.sampling.commit import QUOTAS, CommitRule
from dlm_jax.sampling.editor import Editor
from dlm_jax.sampling.orders import ORDERS, SurestFirst, maximum, sampled
from dlm_jax.sampling.parallel_commits import EntropyBound, Factor, Threshold
from dlm_jax.sampling.remask import RemaskRule, Scheduled
from dlm_jax.sampling.renoise import Renoise
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.wavefront import Wavefront

MEASURES = {"sampled": sampled, "max": maximum}
_KINDS: dict[str, Kind] = {"remdm_cap": "cap", "remdm_rescale": "rescale", "remdm_conf": "conf"}


class Functions(NamedTuple):
    """The slot functions of some rows: what the loop leaves open, with each row's parameters.

    Attributes:
      chain: logit transforms.
      rule: commit rule.
      remask: remask rule; None for none.
      fill: how the sampler head fills; None draws all candidates in parallel.
      editor: what is inserted and deleted; None for nothing.
      renoise: what is written over before each forward; None for nothing.
    """

    chain: Chain
    rule: CommitRule
    remask: RemaskRule | None = None
    fill: Wavefront | None = None
    editor: Editor | None = None
    renoise: Renoise | None = None


def _column(samples: Sequence[SampleConfig], name: str) -> Array:
    return jnp.asarray(np.array([getattr(sample, name) for sample in samples], np.float32))


def pack_fill(samples: Sequence[SampleConfig]) -> Wavefront | None:
    """How rows that name the same fill are filled; None for a parallel one."""
    column = functools.partial(_column, samples)
    if samples[0].fill == "parallel":
        return None
    return Wavefront(
        column("sampler_min_neighbors_ratio"),
        column("sampler_spread_seeds") != 0,
        column("sampler_even_odd") != 0,
        column("sampler_temperature"),
    )


def pack_editor(samples: Sequence[SampleConfig]) -> Editor | None:
    """How rows that name the same schedule and scoring are edited; None for rows that are not."""
    column = functools.partial(_column, samples)
    if not samples[0].edits:
        return None
    return Editor(
        insert_start_B=column("insert_ratio_start"),
        insert_end_B=column("insert_ratio_end"),
        delete_start_B=column("delete_ratio_start"),
        delete_end_B=column("delete_ratio_end"),
        insert_margin_B=column("insert_margin"),
        delete_margin_B=column("delete_margin"),
        lambda_B=column("delete_lambda"),
        cooldown_B=column("cooldown_distance").astype(jnp.int32),
        trims_B=jnp.array([sample.overflow == "trim" for sample in samples]),
        targets_length_B=jnp.array([s.length_target_mode == "to_max_new" for s in samples]),
        puts_mask_B=jnp.array([sample.edit_token == "mask" for sample in samples]),
        schedule=samples[0].edit_schedule,
        scoring=samples[0].edit_scoring,
    )


def pack_renoise(samples: Sequence[SampleConfig]) -> Renoise | None:
    """What is written over in rows that name the same schedule; None for nothing."""
    if not samples[0].renoises:
        return None
    return Renoise(
        _column(samples, "renoise_start"),
        _column(samples, "renoise_end"),
        jnp.array([RENOISE_TOKENS.index(sample.renoise) for sample in samples], jnp.int32),
        schedule=samples[0].renoise_schedule,
    )


def pack_rules(
    samples: Sequence[SampleConfig], noise: NoiseSchedule
) -> tuple[CommitRule, RemaskRule | None]:
    """The rules of rows that name the same ones, with each row's parameters.

    Args:
      samples: settings of each row; ``order``, ``schedule``, ``confidence``, ``remask`` and
        ``remask_by`` are those of the first.
      noise: the schedule the model was trained with.
    """
    column = functools.partial(_column, samples)
    first = samples[0]
    confidence = MEASURES[first.confidence]
    kind: Kind = _KINDS.get(first.remask, "none")
    if first.order == "threshold":
        rule: CommitRule = Threshold(column("threshold"), confidence)
    elif first.order == "factor":
        rule = Factor(column("factor"), confidence)
    elif first.order == "entropy_bound":
        rule = EntropyBound(column("entropy_bound"))
    elif first.order == "ancestral":
        rule = Ancestral(column("remask_eta"), noise, kind)
    elif first.order == "low_confidence":
        rule = SurestFirst(QUOTAS[first.schedule], confidence)
    else:
        rule = ORDERS[first.order](QUOTAS[first.schedule])
    remask: RemaskRule | None = None
    if kind != "none":
        remask = ReMDM(column("remask_eta"), noise, kind)
    elif first.remask != "none":
        remask = Scheduled(
            column("remask_start"),
            column("remask_end"),
            column("remask_randomness"),
            jnp.full(len(samples), first.remask == "scheduled_threshold"),
            asks_critic=first.remask_by == "critic",
        )
    return rule, remask
