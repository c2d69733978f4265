"""The main entry point for sampling texts from a model, with settings per prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlm_jax.distributed.partitions import spans_processes, split_rows
from dlm_jax.distributed.processes import gathered
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.host import HostSampler
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import (
    Request,
    make_requests,
    only_chains_in_use,
    settings_of_call,
)
from dlm_jax.inference.results import Row, Texts, texts_of
from dlm_jax.settings import SettingError

Prompts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""One prompt, or several."""


def generate(
    model: Model,
    prompts: Prompts = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    host_sampler: HostSampler | None = None,
    read_back: bool = False,
    trace: bool = False,
    max_candidates: int = 64,
    on_steps: Callable[[int], Any] | None = None,
    **settings: Any,
) -> Texts:
    """Generates `num_samples` continuations of each prompt.

    Sample ``i`` uses the seed ``seed + i``, so it can be reproduced separately. If the devices of
    the model belong to several processes, all processes must make the same call, and each process
    receives all texts.

    Args:
      model: a model from `load`, or a custom one.
      prompts: one or several strings, which are used unchanged, or mappings. A mapping contains
        ``prompt`` and any settings for this prompt, including ``seed`` (of its first sample),
        ``max_length``, ``host_sampler`` and ``read_back``. Instead of ``prompt``, it can contain
        ``template``, a text with gaps to fill (``"To be <hole:4> be"``), or ``tokens``, a list of
        ids in which MASK is a gap if ``infill`` is true. ``draft`` is a text to refine after the
        prompt. See `dlm_jax.inference.request.make_canvas`.
      num_samples: number of rows per prompt. Rows of a prompt are adjacent in the result.
      seed: random seed of the first row.
      max_length: maximum number of tokens per row, including the prompt. Default:
        ``model.max_length``.
      batch_size: number of rows that run together.
      host_sampler: Python function that selects the tokens of all rows from the
        `dlm_jax.Candidates` after the chain.
      read_back: whether ``Texts.read_back`` contains the probability and candidates of every token.
      trace: whether ``Texts.trace`` contains every draw of every row (`dlm_jax.Trace`). A trace
        takes 25 bytes per canvas position and step. With ``trace=True``, all rows must run in one
        program.
      max_candidates: maximum number of candidates per position for host samplers and
        read-back.
      on_steps: called with the number of steps, summed over the rows, since the last call.
      **settings: fields of `SamplingParams` for all rows (``temperature=0.7``, ``top_k=40``,
        ``steps=64``, ``order="low_confidence"``, ...), or rule objects, whose fields contain one
        value for all rows or one per row (``commit=Threshold(0.9)``,
        ``transforms=[Temperature(0.7), TopP(0.9)]``, ``fill``, ``remask``, ``edit``, ``renoise``).
        ``rules=[...]`` registers custom rules and their settings. Settings in a mapping take
        precedence over these settings, which take precedence over the model's recommended settings.

    Raises:
      ValueError: a setting is unknown or out of range, or a prompt exceeds the canvas or cannot be
        encoded; with several prompts, the message contains the index of the prompt. Also raised if
        a host sampler does not return a candidate; the message contains the row and position.
    """
    common = {"seed": seed, "max_length": max_length} | settings
    common |= {"host_sampler": host_sampler, "read_back": read_back, "trace": trace}
    requests = all_requests(model, prompts, num_samples, common)
    rows: dict[int, Row] = {}
    taken = 0
    with Engine(
        model, batch_size=batch_size, max_candidates=max_candidates, max_waiting=None
    ) as engine:
        engine.reserve(requests, on_one_canvas=True)
        # Each process generates a share of the texts.
        index, count = engine.share
        own = (r if place % count == index else None for place, r in enumerate(requests))
        for finished in engine.turns(own):
            for row in finished:
                if row.error is not None:
                    raise row.error
                rows[row.number] = row
            if on_steps is not None:
                before, taken = taken, engine.report().steps
                on_steps(taken - before)
        programs = engine.report().programs
    if count > 1:
        rows = {place: row for some in gathered(rows) for place, row in some.items()}
    return texts_of(model, rows, programs)


def stream(
    model: Model,
    prompts: Prompts = ("",),
    *,
    num_samples: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    batch_size: int = 64,
    every: int = 1,
    **settings: Any,
) -> Iterator[dict[int, Row]]:
    """Yields the canvases of `generate` during denoising as a dict from row index to row.

    The first canvas of a row is yielded before its first step. Later canvases are yielded after
    `every` steps, at least 1. Rows that wait for a slot are not yielded. The last canvas of a row
    contains the tokens that `generate` returns. The other arguments are those of `generate`.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise SettingError("every", every, "must be an integer of at least 1")
    if spans_processes(split_rows(model.params)):
        raise ValueError(
            "canvases can only be shown in a single process; use `generate` or one process"
        )
    common = {"seed": seed, "max_length": max_length} | settings
    requests = all_requests(model, prompts, num_samples, common)

    def canvases() -> Iterator[dict[int, Row]]:
        with Engine(model, batch_size=batch_size, max_waiting=None) as engine:
            engine.reserve(requests, on_one_canvas=True)
            for rows in engine.turns(requests, num_steps=every, is_watched=True):
                for row in rows:
                    if row.error is not None:
                        raise row.error
                if rows:
                    yield {row.number: row for row in rows}

    return canvases()  # the arguments have been checked before the first canvas


def all_requests(
    model: Model,
    prompts: Prompts,
    num_samples: int,
    common: Mapping[str, Any],
) -> list[Request]:
    """Returns the requests for one or several prompts, in the order of the result."""
    if not isinstance(num_samples, int) or num_samples < 1:
        raise SettingError("num_samples", num_samples, "must be an integer of at least 1")
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        try:
            requests += make_requests(
                model, prompt, common, index * num_samples, num_samples, len(prompts) * num_samples
            )
        except ValueError as error:
            if len(prompts) == 1:
                raise
            raise ValueError(f"prompt {index}: {error}") from None
    if len({request.static for request in requests if request.trace}) > 1:
        why = "requires rows that run in one program, but these differ in static settings"
        raise SettingError("trace", True, why, "sample them in several calls")
    if not requests:
        raise ValueError("there is nothing to generate; pass at least one prompt")
    return only_chains_in_use(requests)


def chain_report(model: Model, *, host_sampler: HostSampler | None = None, **settings: Any) -> str:
    """Lists the parts of a chain and where each runs (device or host), one line per part.

    The arguments are those of `generate`.
    """
    sample = settings_of_call(model, settings)
    first = ("bans", "structure") if sample.table.named("structure", sample) else ("bans",)
    lines = [f"{name}: device" for name in (*first, *sample.chain)]
    last = "draw: device"
    if host_sampler is not None:
        name = getattr(host_sampler, "__name__", type(host_sampler).__name__)
        last = f"choice among the remaining candidates: host ({name})"
    return "\n".join([*lines, last])
