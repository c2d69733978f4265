"""The doors to sampling: texts from prompts, with settings per prompt, pure functions over pytrees,
and replay of traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dlm_jax import devices
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import spans_processes, split_rows
from dlm_jax.distributed.processes import gathered
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.host import HostSampler
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import (
    PROMPT_KEYS,
    Request,
    check_canvas,
    columns,
    make_requests,
    only_chains_in_use,
    require_count,
    room_of,
    settings_of_call,
)
from dlm_jax.inference.results import Row, Texts, texts_of
from dlm_jax.sampling.forward import ready, with_cache
from dlm_jax.sampling.loop import run_steps, start, step
from dlm_jax.sampling.program import Counters, Program
from dlm_jax.sampling.replay import Trace, replayed, trace_of
from dlm_jax.sampling.state import State
from dlm_jax.settings import UNSET, SettingError, require
from dlm_jax.types import Network, Params, first_eos, live_positions

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
        ``steps=64``, ``order="low_confidence"``, ...), or rule objects (``commit=Threshold(0.9)``,
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
    with Engine(
        model, batch_size=batch_size, max_candidates=max_candidates, max_waiting=None
    ) as engine:
        steps = 0
        for ended in _run(engine, requests):
            rows |= ended
            if on_steps is not None:
                before, steps = steps, engine.report().steps
                on_steps(steps - before)
        programs = engine.report().programs
    if engine.share[1] > 1:
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
    require_count("every", every)
    if spans_processes(split_rows(model.params)):
        raise ValueError(
            "canvases can only be shown in a single process; use `generate` or one process"
        )
    common = {"seed": seed, "max_length": max_length} | settings
    requests = all_requests(model, prompts, num_samples, common)

    def canvases() -> Iterator[dict[int, Row]]:
        with Engine(model, batch_size=batch_size, max_waiting=None) as engine:
            yield from filter(None, _run(engine, requests, num_steps=every, is_watched=True))

    return canvases()  # the arguments have been checked before the first canvas


def _run(engine: Engine, requests: Sequence[Request], **options: Any) -> Iterator[dict[int, Row]]:
    """Yields the rows of each call of the engine by number. Each process runs a share of them."""
    engine.reserve(requests, on_one_canvas=True)
    index, count = engine.share
    own = (r if place % count == index else None for place, r in enumerate(requests))
    for rows in engine.turns(own, **options):
        for row in rows:
            if row.error is not None:
                raise row.error
        yield {row.number: row for row in rows}


def all_requests(
    model: Model,
    prompts: Prompts,
    num_samples: int,
    common: Mapping[str, Any],
) -> list[Request]:
    """Returns the requests for one or several prompts, in the order of the result."""
    require_count("num_samples", num_samples)
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        try:
            requests += make_requests(model, prompt, common, index * num_samples, num_samples)
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


class Sampled(NamedTuple):
    """The result of a `Sampler`: device arrays with the same meaning as in `dlm_jax.Texts`.

    Attributes:
      tokens: int32 ``[B, L]``, PAD beyond the length of each row.
      lengths: int32 ``[B]``, number of tokens up to and including the first generated EOS.
      logprobs: float32 ``[B, L]``.
      committed: int32 ``[B, L]``; -1 for tokens that no step wrote.
      steps: int32 ``[B]``.
      status: int32 ``[B]``, value of `dlm_jax.Status`.
      counters: int32 ``[B]`` each.
      trace: all draws; None without ``trace=True``.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    committed: jax.Array
    steps: jax.Array
    status: jax.Array
    counters: Counters
    trace: Trace | None


@dataclass(frozen=True, eq=False)
class Sampler:
    """Pure functions over pytrees that sample with the settings passed to `sampler`.

    The functions run the same steps as the engine and return the same texts as `dlm_jax.generate`.
    The functions compose with ``jit``, ``scan``, ``vmap`` and ``shard_map``. No derivative passes
    through the steps: the log-probabilities that `replay` computes from a trace are differentiable.

    Attributes:
      model: the model, which provides the network, tokenizer and recommended settings. Its
        parameters are not used.
      program: static part of the compiled functions.
      request: the settings of every row.
    """

    model: Model
    program: Program
    request: Request

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Compiler options of the engine. With these options, ``jax.jit`` reproduces the
        log-probabilities of the engine bitwise.
        """
        return compiler.options("sample", self.program.rows, self.model.compiler_options)

    def init(self, tokens: Any, lengths: Any, seeds: Any, is_draft: Any | None = None) -> State:
        """Returns the state before the first step.

        Args:
          tokens: int32 ``[B, L]``, MASK at holes. Values beyond the length of a row are ignored.
          lengths: int32 ``[B]``.
          seeds: uint32 ``[B]``.
          is_draft: bool ``[B, L]``, True at draft tokens, which can be rewritten. None means that
            there are no draft tokens.

        Raises:
          ValueError: shapes do not match, or a concrete row does not fit the settings.
        """
        self._check(tokens, lengths, seeds, is_draft)
        num_rows, num_positions = np.shape(tokens)
        packed = columns([self.request], self.model.facts)
        row, rules = jax.tree.map(
            lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (num_rows, *leaf.shape[1:])), packed
        )
        length_B = jnp.asarray(lengths, jnp.int32)
        is_live_BL = live_positions(length_B, num_positions)
        is_given_BL = True if is_draft is None else ~jnp.asarray(is_draft)
        state = start(
            jnp.where(is_live_BL, jnp.asarray(tokens, jnp.int32), self.program.pad_id),
            length_B,
            replace(row, seed_B=jnp.asarray(seeds).astype(jnp.uint32)),
            rules,
            mask_id=self.program.mask_id,
            frozen_BL=jnp.broadcast_to(is_given_BL, is_live_BL.shape),
            num_traced=self.program.num_traced,
        )
        return with_cache(self.program, self.model.params, state)

    def step(self, params: Params, state: State) -> State:
        """Returns the state after one step of every running row."""
        params, state = jax.lax.stop_gradient((params, state))
        with devices.exact():
            return step(self.program, ready(self.program, params, state), state)

    def run(self, params: Params, state: State, steps: int | jax.Array) -> State:
        """Returns the state after at most `steps` more steps of each row; `steps` may be a traced
        array.
        """
        params, state = jax.lax.stop_gradient((params, state))
        with devices.exact():
            return run_steps(self.program, ready(self.program, params, state), state, steps)

    def finish(self, state: State) -> Sampled:
        """Returns the current rows, truncated after their first generated EOS."""
        canvas, num_positions = state.canvas, state.canvas.tokens_BL.shape[1]
        is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, num_positions)
        eos_B = first_eos(canvas.tokens_BL, is_given_BL, self.program.eos_ids)
        length_B = jnp.minimum(eos_B + 1, canvas.length_B).astype(jnp.int32)
        is_kept_BL = live_positions(length_B, num_positions)
        return Sampled(
            tokens=jnp.where(is_kept_BL, canvas.tokens_BL, self.program.pad_id),
            lengths=length_B,
            logprobs=jnp.where(is_kept_BL, state.logprob_BL, 0.0),
            committed=jnp.where(is_kept_BL, jnp.maximum(state.committed_BL, -1), -1),
            steps=state.step_B,
            status=state.status_B,
            counters=state.counters,
            trace=None
            if state.records is None
            else trace_of(self.program, state, self.model.vocabulary),
        )

    def _check(self, tokens: Any, lengths: Any, seeds: Any, is_draft: Any | None) -> None:
        shape, given = np.shape(tokens), [np.shape(x) for x in (lengths, seeds)]
        given.append(shape if is_draft is None else np.shape(is_draft))
        if len(shape) != 2 or given != [shape[:1], shape[:1], shape]:
            raise ValueError(
                f"tokens, lengths, seeds and is_draft have shapes {shape} and {given}; pass "
                "[B, L], [B], [B] and [B, L]"
            )
        most = self.request.capacity
        why, remedy = f"have {shape[1]} positions, but a row can grow to {most}", "pad them"
        require(most <= shape[1], "tokens", UNSET, why, f"{remedy}, or lower max_length")
        if any(isinstance(x, Tracer) for x in (tokens, lengths, is_draft)):
            return
        size = self.model.network.vocab_size
        for number, length in enumerate(np.asarray(lengths).tolist()):
            ids = np.asarray(tokens)[number, :length]
            if not 0 < length <= shape[1] or ids.min() < 0 or ids.max() >= size:
                raise ValueError(
                    f"row {number} of length {length} needs 1 to {shape[1]} tokens with ids 0 to "
                    f"{size - 1}"
                )
            own = None if is_draft is None else np.asarray(is_draft)[number, :length]
            request = replace(self.request, tokens=ids, is_draft=own)
            check_canvas(request, self.model.facts, mask_id=self.program.mask_id)


def sampler(
    model: Model, *, trace: bool = False, max_length: int | None = None, **settings: Any
) -> Sampler:
    """Returns pure sampling functions that use these settings for every row.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      trace: whether all draws are recorded (`Trace`).
      max_length: maximum number of tokens per row after edits. Default: ``model.max_length``.
      **settings: as for `dlm_jax.generate`, one value for all rows.

    Raises:
      ValueError: a setting is unknown, out of range, incompatible with the model, or not traceable.
    """
    for name in {"seed", "host_sampler", "read_back", *PROMPT_KEYS} & settings.keys():
        remedy = "pass tokens and seeds to init(), or use generate()"
        raise SettingError(name, UNSET, "is not a setting of a sampler", remedy)
    sample = settings_of_call(model, settings)
    if trace:
        sample.table.check_trace(sample)
    tokens = np.full(1, model.tokenizer.mask_id, np.int32)
    room = room_of(model, max_length)
    capacity = room if sample.edits else 0
    (request,) = only_chains_in_use([Request(tokens, sample, capacity=capacity, trace=trace)])
    program = model.program(sample.guidance > 0, num_traced=sample.steps if trace else 0)
    return Sampler(model, program, request)


def replay(
    model: Model | Network, params: Params, trace: Trace, *, every_draw: bool = False
) -> jax.Array:
    """Returns the log-probabilities under `params` of the tokens written in a trace, float32 ``[B,
    S, L]`` in nats, 0 elsewhere.

    With the parameters that sampled the trace, the result equals ``trace.logprobs`` where
    ``trace.is_written`` is True: bitwise in float32 on CPU with the same number of rows as in
    sampling, and up to rounding otherwise, for example in a ``jax.jit`` without
    `Sampler.compiler_options`. The function is differentiable with respect to `params` and compiled
    once per shape. Each step is one forward pass of all rows, which is recomputed for the gradient,
    so memory does not grow with the number of steps.

    Args:
      model: the model that sampled the trace, another model with the same vocabulary, or a network.
      params: parameters of the network. Rows are sharded if the parameters are sharded.
      trace: a trace of ``generate(..., trace=True)`` or ``sampler(..., trace=True)``.
      every_draw: whether discarded draws are included. These are part of the probability of a trace
        if draws determine which tokens are written (for example ``order="low_confidence"``) or if
        other draws are conditioned on them (``fill="wavefront"``).

    Raises:
      ValueError: the trace has a different vocabulary, needs a head that the model lacks, or has
        inconsistent arrays.
    """
    if not isinstance(trace, Trace):
        raise ValueError(f"trace is a {type(trace).__name__}, not that of generate(trace=True)")
    network = model.network if isinstance(model, Model) else model
    problem, is_same = "", trace.vocab_size == network.vocab_size
    if is_same and isinstance(model, Model):
        is_same = trace.vocabulary in ("", model.vocabulary)
        is_same &= trace.mask_id == model.tokenizer.mask_id
    shape = np.shape(trace.canvas)
    arrays = trace.tokens, trace.is_written, trace.logprobs, trace.level
    counts = {np.shape(x)[:1] for x in jax.tree.leaves(trace)}
    if not is_same:
        problem = f"has another vocabulary than the model, which has {network.vocab_size} ids"
    elif "head:sampler" in trace.rules.fill.needs and "sampler" not in network.heads:
        problem = f"uses fill={trace.rules.fill.name!r}, whose sampler head the model lacks"
    elif len(shape) != 3 or any(np.shape(x) != shape for x in arrays) or len(counts) != 1:
        problem = "has arrays that differ in rows, steps or positions"
    if problem:
        raise ValueError(
            f"the trace {problem}; replay it, or its rows by trace.rows(index), with the model "
            "that sampled it"
        )
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((params, trace)))
    rows = None if is_traced else split_rows(params)
    program = Program(
        network=network,
        mask_id=trace.mask_id,
        chunk=trace.chunk,
        rows=rows,
        is_guided=trace.is_guided,
    )
    if is_traced:
        return replayed(program, params, trace, every_draw=every_draw)
    given = model.compiler_options if isinstance(model, Model) else ()
    return _compiled(program, every_draw, given)(params, trace)


@functools.lru_cache(maxsize=64)
def _compiled(
    program: Program, every_draw: bool, compiler_options: tuple[str, ...]
) -> Callable[[Params, Trace], jax.Array]:
    """Compiles `replayed` with the compiler options of the engine."""

    def run(params: Params, trace: Trace) -> jax.Array:
        with devices.used(program.rows):
            return replayed(program, params, trace, every_draw=every_draw)

    options = compiler.options("sample", program.rows, compiler_options)
    return jax.jit(run, compiler_options=options)
