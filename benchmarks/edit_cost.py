"""Cost of the edits of a step relative to a forward of the trunk.

    python -m benchmarks.edit_cost [--checkpoint PATH] [--rows 64] [--length 1024]

Every token of the canvas is resampled and committed, as in the source document. The table gives
medians for the trunk, the edits, and the proposal with and without the two numbers per position
that edits read from its logits, in alternating runs. The edits are everything between the commit
and the next step: two log-probabilities per position, scores, selection, the index map, and every
array moved by the map.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks.wavefront_cost import median_seconds
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib.edits import Lead
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import split_rows
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, columns
from dlm_jax.sampling.commit.commit_rule import log_odds
from dlm_jax.sampling.loop import start
from dlm_jax.sampling.mask_step import (
    apply_edits,
    editable_positions,
    propose_step,
    with_neighbors,
)
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.propose import FillInput, Parallel
from dlm_jax.sampling.rules import with_rules
from dlm_jax.sampling.state import State, token_positions
from dlm_jax.sampling.transforms import Chain
from dlm_jax.settings import on_device
from dlm_jax.types import live_positions

TABLE = with_rules((Lead,))
"""The built-in rules and ``edit_scoring="lead"``."""


def make_state(model: Model, rows: int, length: int, scoring: str) -> State:
    """The state of random text, all of it a draft."""
    rng = np.random.default_rng(0)
    tokenizer = model.tokenizer
    never = {tokenizer.mask_id, tokenizer.pad_id, *tokenizer.banned_ids}
    ids = [token for token in range(tokenizer.vocab_size) if token not in never]
    tokens = rng.choice(ids, (rows, length)).astype(np.int32)
    sample: Any = params_of(TABLE)(
        steps=16, edit=True, resample=True, schedule="all", edit_scoring=scoring
    )
    requests = [Request(ids, sample, seed) for seed, ids in enumerate(tokens)]
    row, rules = on_device(columns(requests, model.facts))
    state = start(
        jnp.asarray(tokens),
        jnp.full(rows, length, jnp.int32),
        row,
        rules._replace(chain=Chain(())),
        mask_id=tokenizer.mask_id,
        frozen_BL=jnp.zeros((rows, length), bool),
    )
    assert state.edits is not None
    return state._replace(edits=state.edits._replace(warms_B=jnp.zeros(rows, bool)))


def takes_turns(model: Model, state: State, *, is_lead: bool) -> dict[str, Callable[[], Any]]:
    """The trunk, the edits, and the proposal without and with the values that edits read."""
    network, params = model.network, model.params
    program = model.program(rows=split_rows(params))
    jit = functools.partial(jax.jit, compiler_options=compiler.options("sample") or None)
    _, seen = jax.block_until_ready(jit(functools.partial(propose_step, program))(params, state))
    tokens_BL, length_B = state.canvas.tokens_BL, state.canvas.length_B

    @jit
    def trunk(params: Any) -> Any:
        return network.trunk(params, tokens_BL, length_B, None)[0]

    @jit
    def edits(params: Any, state: State, seen: Any) -> Any:
        after, position_map = apply_edits(program, params, state, seen)
        # The input of the next step, without a copy of the trunk's result.
        after = after.canvas, after.edits, after.block, after.logprob_BL, after.committed_BL
        return after, position_map

    def proposer(reads: bool) -> Any:
        @jit
        def run(params: Any, state: State, output: Any) -> Any:
            chain = state.rules.chain
            is_token_BL = token_positions(state, mask_id=program.mask_id)
            is_scored_BL = with_neighbors(editable_positions(state))
            is_scored_BL &= live_positions(length_B, tokens_BL.shape[1])
            own_BL = jnp.where(is_scored_BL & is_token_BL & ~seen.is_open_BL, tokens_BL, -1)
            return Parallel().propose(
                FillInput(
                    network=network,
                    params=params,
                    output=output,
                    chunk=program.chunk,
                    tokens_BL=tokens_BL,
                    length_B=seen.context.length_B,
                    is_open_BL=seen.is_open_BL,
                    is_seen_BL=is_token_BL,
                    own_BL=own_BL,
                    is_scored_BL=is_scored_BL if reads else None,
                    keeps_best=reads and is_lead,
                    chain=chain,
                    prepared=chain.prepare(state.chain_state, seen.context),
                    key_B=seen.draw_key_B,
                    score=lambda places_N, at, logits_NV, drawn: (log_odds(drawn.logprob_N), ()),
                    method=program.draw,
                    banned_ids=program.banned_ids,
                )
            )

        return run

    plain, reading = proposer(False), proposer(True)
    runs = {
        "trunk": lambda: trunk(params),
        "edits": lambda: edits(params, state, seen),
        "plain": lambda: plain(params, state, seen.output),
        "reading": lambda: reading(params, state, seen.output),
    }
    return {name: lambda run=run: jax.block_until_ready(run()) for name, run in runs.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="default: the shipped model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scoring", choices=TABLE.edit, default="uncertainty")
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load(args.checkpoint)
    state = make_state(model, args.rows, args.length, args.scoring)
    runs = takes_turns(model, state, is_lead=args.scoring == "lead")
    seconds = median_seconds(runs, args.repeats)
    extra = seconds["reading"] - seconds["plain"]
    print(
        "| scoring | rows x length | V | trunk s | edits ms | % of the trunk | of the logits: ms | "
        "% |"
    )
    print("| --- " * 8 + "|")
    edits_ms, extra_ms = 1e3 * seconds["edits"], 1e3 * extra
    print(
        f"| {args.scoring} | {args.rows} x {args.length} | {model.network.vocab_size} | "
        f"{seconds['trunk']:.2f} | {edits_ms:.1f} | {edits_ms / 10 / seconds['trunk']:.2f} | "
        f"{extra_ms:.0f} | {extra_ms / 10 / seconds['trunk']:.2f} |"
    )


if __name__ == "__main__":
    main()
