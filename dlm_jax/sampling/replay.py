"""Traces of sampled rows, and their log-probabilities under other parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import devices
from dlm_jax.sampling.forward import forward
from dlm_jax.sampling.mask_step import fill_input
from dlm_jax.sampling.positions import at_places
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.propose.wavefront import head_chunk
from dlm_jax.sampling.rules import Rules
from dlm_jax.sampling.state import State, start, visible_context
from dlm_jax.settings import pytree
from dlm_jax.types import Params, Status


@pytree
class Trace:
    """All tokens drawn in sampled rows, and all inputs (except model parameters) that their
    probabilities depend on.

    Arrays have ``B`` rows, ``S`` steps and ``L`` positions. ``L`` is a multiple of 64. A trace is a
    pytree, whose leaves can be indexed by rows, sharded, or passed to compiled functions.

    Attributes:
      canvas: int32 ``[B, S, L]``, the input tokens of each step's forward pass; MASK at holes.
      tokens: int32 ``[B, S, L]``, the tokens that each step drew; -1 elsewhere.
      is_written: True ``[B, S, L]`` at the drawn tokens that the step wrote.
      logprobs: float32 ``[B, S, L]`` log-probability in nats of each drawn token under the policy,
        that is, the distribution that it was drawn from: that of the LM head or sampler head, after
        bans, guidance, temperature and all transforms; 0 in greedy rows and elsewhere.
      choice_logprobs: float32 ``[B, S]`` log-probability in nats of choosing the positions that
        were written and remasked: ``-ln C(n, k)`` for k of n holes in random order, 0 for rules
        whose selection depends only on the tokens.
      entropy: float32 ``[B, S, L]``, entropy in nats of the head's logits before the chain, at
        drawn tokens.
      level: int32 ``[B, S, L]``, level of each drawn token in `dlm_jax.Wavefront`.
      length: int32 ``[B]``, number of live positions.
      is_frozen: True ``[B, L]`` at given tokens and beyond the length.
      steps: int32 ``[B]``, number of steps taken.
      row: parameters of the loop, including seeds.
      rules: rules and their parameters.
      width: maximum number of tokens that a row writes in one step; static.
      mask_id: the id of MASK; static.
      chunk: number of positions per readout; static.
      is_guided: True if rows can be guided; static.
      vocab_size: number of logits; static.
      vocabulary: fingerprint of the tokenizer; empty if unknown; static.
    """

    canvas: Any
    tokens: Any
    is_written: Any
    logprobs: Any
    choice_logprobs: Any
    entropy: Any
    level: Any
    length: Any
    is_frozen: Any
    steps: Any
    row: RowParams
    rules: Rules
    width: int = dataclasses.field(metadata={"static": True})
    mask_id: int = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    is_guided: bool = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    vocabulary: str = dataclasses.field(metadata={"static": True})

    def rows(self, index: Any) -> Trace:
        """The trace of some rows, selected by a slice or by indices."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def trimmed(self) -> Trace:
        """The trace without steps that no row took, and with the smallest sufficient power of two
        as its width. The arrays must be concrete.
        """
        num_steps = max(1, int(np.max(self.steps)))
        most = int(np.max(np.sum(self.is_written, axis=2), initial=1))
        width = min(1 << (most - 1).bit_length(), self.canvas.shape[2])
        cut = {name: getattr(self, name)[:, :num_steps] for name in _BY_STEP}
        return replace(self, **cut, width=width)


_BY_STEP = [field.name for field in dataclasses.fields(Trace)][:7]
"""The fields with an axis of steps."""


def trace_of(program: Program, state: State, vocabulary: str = "") -> Trace:
    """The trace of the current rows in a traced loop."""
    records = state.records
    assert records is not None, "the program is traced"
    return Trace(
        **records,
        length=state.canvas.length_B,
        is_frozen=state.canvas.frozen_BL,
        steps=state.step_B,
        row=state.row,
        rules=state.rules._replace(cache=None),
        width=state.canvas.tokens_BL.shape[1],
        mask_id=program.mask_id,
        chunk=program.chunk,
        is_guided=program.is_guided,
        vocab_size=program.network.vocab_size,
        vocabulary=vocabulary,
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """Concatenates the rows of traces with the same static fields and canvases, on the host."""
    num_steps = max(trace.canvas.shape[1] for trace in traces)

    def pad(trace: Trace, name: str) -> np.ndarray:
        x = getattr(trace, name)
        width = [(0, 0), (0, num_steps - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
        return np.pad(x, width, constant_values=-1 if name == "tokens" else 0)

    even = [replace(one, **{name: pad(one, name) for name in _BY_STEP}) for one in traces]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *even)


def replayed(
    program: Program, params: Params, trace: Trace, *, every_draw: bool = False
) -> jax.Array:
    """Log-probabilities ``[B, S, L]`` of a trace's written tokens under these parameters; 0 at
    other positions. With `every_draw`, all drawn tokens are scored.

    The steps are processed one at a time, with all rows together, and each step's forward pass is
    recomputed for the gradient. Memory therefore does not grow with the number of steps.
    """
    num_steps, num_positions = trace.canvas.shape[1:]
    width = num_positions if every_draw else trace.width
    first = start(
        trace.canvas[:, 0],
        trace.length,
        trace.row,
        trace.rules,
        mask_id=trace.mask_id,
        frozen_BL=trace.is_frozen,
    )

    def read(params: Params, rows: tuple[Any, ...]) -> jax.Array:
        """The log-probabilities ``[B, L]`` of one step, at most `width` per row."""
        state, output, context, tokens_BL, level_BL, is_read_BL = rows
        rule = state.rules.fill
        is_open_BL = tokens_BL >= 0
        fill = fill_input(program, params, state, output, context, is_open_BL, ~is_open_BL)
        # In each row, the requested positions come first, in order.
        index_BM = jnp.argsort(~is_read_BL, axis=1, stable=True)[:, :width]
        places_BM = index_BM + num_positions * jnp.arange(is_read_BL.shape[0])[:, None]
        places_P = places_BM.reshape(-1).astype(jnp.int32)
        logits = rule.logits(fill, tokens_BL, level_BL)

        def of_chunk(places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            ids_N = jnp.maximum(at_places(tokens_BL, places_N), 0)
            at, logits_NV = fill.at(places_N, is_real_N), logits(places_N, is_real_N)
            logprob_N = fill.draw_logprob(logits_NV, ids_N, at)
            return jnp.where(is_real_N, logprob_N, 0.0)

        chunk = head_chunk(fill) if "head:sampler" in rule.needs else fill.chunk
        logprob_P = _in_chunks(of_chunk, places_P, at_places(is_read_BL, places_P), chunk)
        rank_BL = jnp.minimum(jnp.cumsum(is_read_BL, axis=1) - 1, width - 1)
        logprob_BM = jnp.reshape(logprob_P, places_BM.shape)
        return jnp.where(is_read_BL, jnp.take_along_axis(logprob_BM, rank_BL, axis=1), 0.0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_step(params: Params, step: tuple[jax.Array, ...]) -> jax.Array:
        step_B, canvas_BL, order_BL, *drawn = step
        is_read_BL = drawn[-1]
        status_B = jnp.where(jnp.any(is_read_BL, axis=1), Status.RUNNING, Status.DONE)
        state = first._replace(
            canvas=first.canvas._replace(tokens_BL=canvas_BL),
            committed_BL=order_BL,
            step_B=step_B,
            status_B=status_B.astype(jnp.int32),
        )

        def score() -> jax.Array:
            with devices.exact():
                output = forward(program, params, state, is_read_BL)[0]
                context = visible_context(state, mask_id=program.mask_id)
                return program.by_rows(read)(params, (state, output, context, *drawn))

        zeros_BL = jnp.zeros(is_read_BL.shape, jnp.float32)
        return jax.lax.cond(jnp.any(is_read_BL), score, lambda: zeros_BL)

    # `State.committed_BL` before each step.
    step_1S1 = jnp.arange(num_steps, dtype=jnp.int32)[None, :, None]
    last_BSL = jax.lax.cummax(jnp.where(trace.is_written, step_1S1, -1), axis=1)
    order_BSL = jnp.pad(last_BSL[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=-1)
    order_BSL = jnp.where(trace.canvas == trace.mask_id, -1, order_BSL)
    step_BS = jnp.broadcast_to(step_1S1[:, :, 0], trace.canvas.shape[:2])
    is_read_BSL = trace.tokens >= 0 if every_draw else trace.is_written
    by_step = step_BS, trace.canvas, order_BSL, trace.tokens, trace.level, is_read_BSL
    steps = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), by_step)
    _, logprob_SBL = jax.lax.scan(lambda _, one: (None, of_step(params, one)), None, steps)
    return jnp.moveaxis(logprob_SBL, 0, 1)


def _in_chunks(of_chunk: Any, places_P: jax.Array, is_real_P: jax.Array, chunk: int) -> jax.Array:
    """Evaluates ``of_chunk(places_N, is_real_N) -> [N]`` at all places, chunk by chunk, without the
    chunks that have no real place. Their number is static, as derivatives require.
    """
    padding = (0, -places_P.size % chunk)
    chunks = [jnp.pad(x, padding).reshape(-1, chunk) for x in (places_P, is_real_P)]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
        none_N = jnp.zeros(places_N.shape, jnp.float32)
        any_real = jnp.any(is_real_N)
        return jax.lax.cond(any_real, lambda: of_chunk(places_N, is_real_N), lambda: none_N)

    _, logprob_KN = jax.lax.scan(lambda _, x: (None, one(*x)), None, tuple(chunks))
    return logprob_KN.reshape(-1)[: places_P.size]
