"""Overhead of a step of `advance` relative to its trunk and readout; `benchmarks.generation` prints
it.

Two loops over the same steps are timed in alternation: the compiled loop from its first step, and a
loop that only runs the trunk and the readouts of the chunks with holes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks.generation_pair import make_model
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import split_rows
from dlm_jax.inference.model import Model
from dlm_jax.sampling.loop import Advance

ROWS, POSITIONS = 8, 256


@dataclasses.dataclass(frozen=True)
class Window:
    """A vocabulary size, and the open positions per row: 0 for the whole canvas."""

    vocab_size: int
    block_length: int
    num_steps: int


WINDOWS = (Window(128, 0, 8), Window(50257, 32, 4))
SETTINGS: dict[str, dict[str, Any]] = {
    "low_confidence, greedy": {"order": "low_confidence", "temperature": 0.0},
    "low_confidence, T = 1": {"order": "low_confidence", "temperature": 1.0},
    "entropy, greedy": {"order": "entropy", "temperature": 0.0},
    "margin, greedy": {"order": "margin", "temperature": 0.0},
}


class _Caught(Exception):  # noqa: N818 - it carries a state out of a driver, nothing went wrong
    """The first call of the compiled loop."""


def first_state(model: Model, **settings: Any) -> tuple[Any, Any]:
    """Parameters and state that `dlm_jax.generate` passes to the compiled loop."""

    def catch(loop: Advance, params: Any, state: Any, *limits: Any) -> Any:
        raise _Caught(params, state)

    with mock.patch.object(Advance, "__call__", catch):
        try:
            dlm_jax.generate(model, [""] * ROWS, batch_size=ROWS, **settings)
        except _Caught as caught:
            return caught.args
    raise RuntimeError("generate ran without its compiled loop")


def bare_loop(model: Model, chunk: int) -> Callable[..., Any]:
    """Compiled ``(params, tokens_BL, length_B, chunks_S) -> logits``: trunk and readouts only.

    Step ``i`` reads out ``chunks_S[i]`` chunks of positions.
    """
    network = model.network

    def run(params: Any, tokens_BL: jax.Array, length_B: jax.Array, chunks_S: jax.Array) -> Any:
        def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            tokens_BL, logits_NV = carry
            hidden_BLD, _ = network.trunk(params, tokens_BL, length_B, None)
            hidden_ND = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])

            def read(at: jax.Array, logits_NV: jax.Array) -> jax.Array:
                del logits_NV
                places = at * chunk + jnp.arange(chunk)
                return network.readout(params, jnp.take(hidden_ND, places, axis=0, mode="clip"))

            logits_NV = jax.lax.fori_loop(0, chunks_S[index], read, logits_NV)
            # Never true; makes each step depend on the previous step, like committed tokens.
            tokens_BL = jnp.where(logits_NV[0, 0] > 1e30, 0, tokens_BL)
            return tokens_BL, logits_NV

        blank = jnp.zeros((chunk, network.vocab_size), jnp.float32)
        return jax.lax.fori_loop(0, chunks_S.shape[0], step, (tokens_BL, blank))

    return jax.jit(run, compiler_options=compiler.options("sample"))


def times(rounds: int, *fns: Callable[[], Callable[[], Any]]) -> np.ndarray:
    """Seconds ``[rounds, fns]`` of the prepared functions, alternating after one warm-up."""
    seconds_RF = np.zeros((rounds + 1, len(fns)))
    for turn in range(rounds + 1):
        for place, prepare in enumerate(fns):
            fn = prepare()
            start = time.perf_counter()
            jax.block_until_ready(fn())
            seconds_RF[turn, place] = time.perf_counter() - start
    return seconds_RF[1:]


def report(vocab_sizes: Sequence[int], rounds: int) -> None:
    """Prints the table: 6 layers, width 384, 8 rows of 256 positions, one hole per step."""
    print("| V | block | settings | step ms | trunk and readout ms | the rest |")
    print("| - | - | - | - | - | - |")
    for window in WINDOWS:
        if window.vocab_size not in vocab_sizes:
            continue
        model = make_model("10m", window.vocab_size, POSITIONS)
        bare = bare_loop(model, model.program().chunk)
        for name, settings in SETTINGS.items():
            settings = settings | {"block_length": window.block_length}
            ms_R2 = measure(model, bare, window, settings, rounds)
            step, alone = np.median(ms_R2, axis=0)
            # The ratio within a round depends little on the load of the machine.
            share = 1 - np.median(ms_R2[:, 1] / ms_R2[:, 0])
            print(
                f"| {window.vocab_size} | {window.block_length or 'whole'} | {name} "
                f"| {step:.1f} | {alone:.1f} | {share:.1%} |",
                flush=True,
            )


def measure(
    model: Model, bare: Callable[..., Any], window: Window, settings: dict[str, Any], rounds: int
) -> np.ndarray:
    """Milliseconds ``[rounds, 2]`` of a step, and of only its trunk and readouts."""
    params, state = first_state(model, steps=POSITIONS, gen_length=POSITIONS, **settings)
    program = model.program(rows=split_rows(model.params))
    options = compiler.options("sample")
    advance = Advance(program, compiler_options=options)
    holes_S = ROWS * ((window.block_length or POSITIONS) - np.arange(window.num_steps))
    chunks_S = jnp.asarray(-(-holes_S // advance.program.chunk), jnp.int32)
    # The state is donated; these copies remain valid.
    tokens_BL, length_B = jnp.copy(state.canvas.tokens_BL), jnp.copy(state.canvas.length_B)

    def prepare() -> Callable[[], Any]:
        fresh = jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), state))
        return lambda: advance(params, fresh, window.num_steps)

    seconds_R2 = times(rounds, prepare, lambda: lambda: bare(params, tokens_BL, length_B, chunks_S))
    return 1e3 * seconds_R2 / window.num_steps
