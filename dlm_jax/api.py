"""The library's front door: texts from a model, each prompt with settings of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dlm_jax.config import SampleConfig, resolve
from dlm_jax.jobs import Job, canvases, chain_of, group_jobs, make_jobs, slots_of
from dlm_jax.models import Model
from dlm_jax.sampling.candidates import HostSampler
from dlm_jax.sampling.generate import Generation, assemble, finish
from dlm_jax.sampling.host import describe
from dlm_jax.sampling.slots import Row


@dataclasses.dataclass(frozen=True)
class Texts(Generation):
    """A `Generation` with its rows decoded: ``texts[i]`` is the prompt and what continues it.

    Rows end with the first EOS that they generated, which stands for no text.
    """

    texts: tuple[str, ...]


def generate(
    model: Model,
    prompts: Sequence[str | Mapping[str, Any]] = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    host_sampler: HostSampler | None = None,
    read_back: bool = False,
    max_candidates: int = 64,
    on_commits: Callable[[int], Any] | None = None,
    **settings: Any,
) -> Texts:
    """Texts that continue each prompt `num_samples` times.

    Sample ``i`` in the order of the result has the seed ``seed + i`` and can be made again alone.

    Args:
      model: from `load`, or your own `Model`.
      prompts: given texts, kept as they are; or mappings with ``prompt`` and any setting of that
        prompt alone, ``seed`` (of its first sample), ``max_length``, ``host_sampler`` and
        ``read_back`` included. Instead of ``prompt``, ``template`` is text with gaps to fill
        (``"To be <hole:4> be"``), and ``tokens`` are ids, with ``infill`` true MASK among them is a
        gap; ``draft`` is text behind the prompt, to be refined. See
        `dlm_jax.prompts.make_canvas`.
      num_samples: rows of each prompt, next to each other in the result.
      seed: of the first row.
      max_length: tokens a row may hold with its prompt; the model's own if not given.
      batch_size: rows that run at once.
      host_sampler: Python function that chooses the tokens of all rows, each out of the
        `dlm_jax.sampling.candidates.Candidates` that the row's chain leaves.
      read_back: whether ``Texts.read_back`` tells of every token its probability and rivals.
      max_candidates: how many of a position's candidates host samplers and read-back see at most.
      on_commits: told how many tokens were written since the last call.
      **settings: fields of `SampleConfig` for all rows (``temperature=0.7``, ``top_k=40``,
        ``steps=64``, ``order="low_confidence"``, ...). What a mapping gives counts first, then
        these, then what the model recommends.

    Raises:
      ValueError: a setting is unknown or out of range, or a prompt does not fit or cannot be
        encoded; the line names the prompt if there are several. Or a host sampler chose what is
        no candidate; the line names row and position.
    """
    if not isinstance(max_candidates, int) or max_candidates < 1:
        raise ValueError(f"max_candidates={max_candidates!r} must be at least 1, a whole number")
    common = {"seed": seed, "max_length": max_length} | settings
    common |= {"host_sampler": host_sampler, "read_back": read_back}
    jobs = _all_jobs(model, prompts, num_samples, common)
    rows: dict[int, Row] = {}
    for static, members in group_jobs(jobs).items():
        slots = slots_of(
            model, static, [jobs[index] for index in members], batch_size=batch_size,
            max_candidates=max_candidates, names=members,
        )  # fmt: skip
        slots.submit(range(len(members)))
        for index, row in finish(slots, on_commits):
            rows[members[index]] = row.upto_eos(model.tokenizer.eos_id)
    return texts_of(model, rows)


def stream(
    model: Model,
    prompts: Sequence[str | Mapping[str, Any]] = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    every: int | Literal["block"] = 1,
    **settings: Any,
) -> Iterator[dict[int, Row]]:
    """The canvases of `generate` while they are denoised, by the place of their row in its result.

    First before any step, then after every `every` steps, or with ``every="block"`` whenever a row
    has finished a block. Rows that wait for a slot are not shown, and a row is shown for the last
    time when it has ended; its tokens are then what `generate` returns.

    Arguments are those of `generate`, and ``every``, the steps between two canvases, at least 1, or
    "block".

    Raises:
      ValueError: as `generate`, or `every` is neither; at the first canvas.
    """
    common = {"seed": seed, "max_length": max_length} | settings
    jobs = _all_jobs(model, prompts, num_samples, common)
    return canvases(model, jobs, every=every, batch_size=batch_size)


def texts_of(model: Model, rows: Mapping[int, Row]) -> Texts:
    """Finished rows by their places, such as the last that `stream` shows, with their texts."""
    ordered = [rows[index] for index in sorted(rows)]
    result = assemble(ordered, pad_id=model.tokenizer.pad_id)
    texts = tuple(model.tokenizer.decode(row.tokens) for row in ordered)
    return Texts(**vars(result), texts=texts)


def _all_jobs(
    model: Model,
    prompts: Sequence[str | Mapping[str, Any]],
    num_samples: int,
    common: Mapping[str, Any],
) -> list[Job]:
    """The rows of all prompts, in the order of the result."""
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples={num_samples!r} must be at least 1, a whole number")
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts={prompts!r} is one prompt; put it in a list")
    jobs: list[Job] = []
    for index, prompt in enumerate(prompts):
        try:
            jobs.extend(make_jobs(model, prompt, common, index * num_samples, num_samples))
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    if not jobs:
        raise ValueError("there is nothing to generate; give at least one prompt")
    return jobs


def chain_report(model: Model, *, host_sampler: HostSampler | None = None, **settings: Any) -> str:
    """Which part of the chain of a row with these settings runs where, one line a part.

    Args:
      model: whose recommended settings count where none is given.
      host_sampler: the row's, if it has one.
      **settings: as for `generate`.

    Raises:
      ValueError: a setting is unknown or out of range.
    """
    sample = resolve(vars(model.sample), settings, kind=SampleConfig)
    return describe(chain_of(model, [sample]), host_sampler)
