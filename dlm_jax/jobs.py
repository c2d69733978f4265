"""Requests with their settings, grouped by what is compiled in, and the slots that run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dlm_jax import prompts
from dlm_jax.config import SampleConfig, resolve
from dlm_jax.models import Model
from dlm_jax.sampling.generate import make_slots
from dlm_jax.sampling.params import check, pack
from dlm_jax.sampling.request import Request
from dlm_jax.sampling.rules import (
    Functions,
    pack_editor,
    pack_fill,
    pack_renoise,
    pack_rules,
)
from dlm_jax.sampling.slots import Row, Slots
from dlm_jax.sampling.transforms import Chain
from dlm_jax.types import Status

_LONGEST = 2**20


class Job(NamedTuple):
    """One row to generate: its request, and the settings that the slot functions are made of."""

    request: Request
    sample: SampleConfig


def make_jobs(
    model: Model,
    prompt: str | Mapping[str, Any],
    common: Mapping[str, Any],
    first: int = 0,
    num_samples: int = 1,
) -> list[Job]:
    """The rows of one prompt; `first` is added to the seed unless the prompt has its own.

    Raises:
      ValueError: a setting is unknown or out of range, or the prompt does not fit or cannot be
        encoded.
    """
    if not isinstance(prompt, str | Mapping):
        raise ValueError(f"prompt={prompt!r} is neither a text nor a mapping; put it in quotes")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    asked = {"seed": 0, "max_length": None} | {**common, **own}
    text = {name: asked.pop(name) for name in prompts.KEYS if name in asked}
    for name in ("seed", "max_length"):
        value = asked[name]
        if not (hasattr(value, "__index__") or (name == "max_length" and value is None)):
            raise ValueError(f"{name}={value!r} is not an integer; use one")
    seed = int(asked.pop("seed")) + (0 if "seed" in own else first)
    host = {name: asked.pop(name) for name in ("host_sampler", "read_back") if name in asked}
    max_length = asked.pop("max_length")
    if max_length is not None and not 1 <= max_length <= _LONGEST:
        raise ValueError(f"max_length={max_length} must be at least 1 and at most {_LONGEST}")
    sample = resolve(vars(model.sample), asked, kind=SampleConfig)
    _check(model, sample)
    room = model.max_length if max_length is None else max_length
    given = prompts.make_canvas(model.tokenizer, text, gen_length=sample.gen_length, room=room)
    needs = 1 if sample.resample or sample.edits or sample.renoises else 2
    if given.is_draft is not None and (not sample.refines or sample.steps < needs):
        raise ValueError(
            "draft is refined by remasking, resampling, re-noise or edits, and nothing of it is "
            "asked for; use remask=scheduled, schedule=all and steps=8, say"
        )
    jobs = []
    for index in range(num_samples):
        request = Request(
            tokens=given.tokens,
            is_draft=given.is_draft,
            steps=sample.steps,
            seed=seed + index,
            block_length=sample.block_length,
            guidance=sample.guidance,
            stop_at_eos=sample.stop_at_eos,
            resample=sample.resample,
            capacity=room if sample.inserts else 0,
            max_new_tokens=sample.max_new_tokens,
            **host,
        )
        if request.needs_host and sample.fill != "parallel":
            raise ValueError(
                f"fill={sample.fill!r} draws tokens in waves, where no host sampler or read-back "
                "can look; use fill='parallel'"
            )
        if request.needs_host and (sample.edits or sample.renoises):
            raise ValueError(
                f"{'edit' if sample.edits else 're-noise'} changes tokens between the steps, which "
                "host samplers and read-back do not see; turn one of them off"
            )
        request.check_steps(mask_id=model.tokenizer.mask_id)
        jobs.append(Job(request, sample))
    return jobs


class Static(NamedTuple):
    """What is compiled in: rows that agree in it run together."""

    order: str
    schedule: str
    confidence: str
    remask: str
    remask_by: str
    fill: str
    edit_schedule: str | None
    edit_scoring: str | None
    renoise_schedule: str | None
    chain: tuple[str, ...]
    draw: str
    is_guided: bool
    needs_host: bool


def group_jobs(jobs: Sequence[Job]) -> dict[Static, list[int]]:
    """Places of the jobs that can run in the same program."""
    groups: dict[Static, list[int]] = {}
    for index, (request, sample) in enumerate(jobs):
        static = Static(
            order=sample.order,
            schedule=sample.schedule,
            confidence=sample.confidence,
            remask=sample.remask,
            remask_by=sample.remask_by,
            fill=sample.fill,
            edit_schedule=sample.edit_schedule if sample.edits else None,
            edit_scoring=sample.edit_scoring if sample.edits else None,
            renoise_schedule=sample.renoise_schedule if sample.renoises else None,
            chain=sample.chain,
            draw=sample.draw,
            is_guided=sample.guidance > 0,
            needs_host=request.needs_host,
        )
        groups.setdefault(static, []).append(index)
    return groups


def slots_of(model: Model, static: Static, jobs: Sequence[Job], **options: Any) -> Slots:
    """Slots for jobs that agree in what is compiled in; `options` are those of `make_slots`."""
    make_loop = model.host_loop if static.needs_host else model.advance
    samples = [job.sample for job in jobs]
    return make_slots(
        make_loop(draw=static.draw, is_guided=static.is_guided),
        model.params,
        [job.request for job in jobs],
        Functions(
            chain_of(model, samples),
            *pack_rules(samples, model.noise),
            pack_fill(samples),
            pack_editor(samples),
            pack_renoise(samples),
        ),
        pad_id=model.tokenizer.pad_id,
        **options,
    )


def chain_of(model: Model, samples: Sequence[SampleConfig]) -> Chain:
    """The chain of rows that name the same transforms."""
    return pack(samples, **_vocabulary(model), chain=samples[0].chain)


def _vocabulary(model: Model) -> dict[str, Any]:
    vocab_size = model.network.vocab_size
    return {
        "vocab_size": vocab_size,
        "banned_ids": model.banned_ids,
        "eos_ids": (model.tokenizer.eos_id,),
    }


def _check(model: Model, sample: SampleConfig) -> None:
    """Raises ValueError for settings that only the vocabulary or the chain shows to be wrong."""
    if model.network.scorer is not None:
        raise ValueError("the model is a sequence scorer, which writes nothing; load another")
    if sample.fill == "wavefront" and model.network.sampler_readout is None:
        raise ValueError(
            "fill='wavefront' needs a sampler head, which this model lacks; use fill='parallel', "
            "or train one with model.add_sampler_head"
        )
    if sample.remasks and sample.remask_by == "critic" and model.network.critic is None:
        raise ValueError(
            "remask_by='critic' needs a critic head, which this model lacks; use "
            "remask_by='confidence', or train one with model.add_critic_head"
        )
    needs_space = sample.inserts and sample.edit_token == "space"
    if model.tokenizer.space_id is None and needs_space:
        raise ValueError(
            "edit_token='space' needs a token that is a space, which the tokenizer lacks; use "
            "edit_token='mask'"
        )
    if model.tokenizer.space_id is None and sample.renoises and sample.renoise == "space":
        raise ValueError(
            "renoise='space' needs a token that is a space, which the tokenizer lacks; use "
            "renoise='mask'"
        )
    try:
        check([sample], **_vocabulary(model), chain=sample.chain)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("row 0: ")) from None


def canvases(
    model: Model, jobs: Sequence[Job], *, every: int | Literal["block"] = 1, **options: Any
) -> Iterator[dict[int, Row]]:
    """Rows by the place of their job, before the first step and then after every `every` steps.

    With ``"block"``, whenever a row has finished one. A row is shown for the last time when it has
    ended, cut at its first EOS. `options` are those of `make_slots`.

    Raises:
      ValueError: `every` is neither at least 1 nor "block", or as `slots_of`.
    """
    is_count = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not is_count and every != "block":
        raise ValueError(f"every={every!r} must be at least 1, or 'block'")
    num_steps = 1 if every == "block" else int(every)
    for static, members in group_jobs(jobs).items():
        slots = slots_of(
            model, static, [jobs[index] for index in members], names=members, **options
        )
        slots.submit(range(len(members)))
        slots.fill()
        blocks: dict[int, int] = {}
        origins: dict[int, np.ndarray] = {}
        shown = slots.rows()
        while shown or slots.is_busy:
            is_due = every != "block" or any(
                row.status != Status.RUNNING or row.block != blocks.get(index)
                for index, row in shown.items()
            )
            if is_due:
                blocks |= {index: row.block for index, row in shown.items()}
                yield {members[index]: row for index, row in shown.items()}
                origins = {}
            if not slots.is_busy:
                break
            ended = slots.advance(num_steps)
            slots.fill()
            cut = {i: row.upto_eos(model.tokenizer.eos_id) for i, row in ended.items()}
            shown = {i: _since(origins, i, row) for i, row in (slots.rows() | cut).items()}


def _since(origins: dict[int, np.ndarray], index: int, row: Row) -> Row:
    """The row with its origin in the canvas that was shown last, which `origins` keeps."""
    if row.origin is None:
        return row
    before = origins.get(index)
    if before is not None:
        was_there = np.where(row.origin >= 0, before[np.maximum(row.origin, 0)], -1)
        row = dataclasses.replace(row, origin=was_there)
    assert row.origin is not None
    origins[index] = row.origin
    return row
