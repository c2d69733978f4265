"""What the edits of a step cost beside a forward of the trunk.

    python -m benchmarks.edit_cost [--checkpoint PATH] [--rows 64] [--length 1024]

Every token of the canvas is resampled and all are committed, as in the seed document. The trunk,
the edits, and the proposal with and without the two numbers of each position that edits want of
its logits take turns; medians. Edits are all that happens between the commit and the next step: two
log-probabilities of each position, scores, selection, the map, and every array moved through it.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks.wavefront_cost import median_seconds
from dlm_jax.command_line import start_jax
from dlm_jax.config import SampleConfig
from dlm_jax.config.generation import EDIT_SCORINGS
from dlm_jax.model import cpu
from dlm_jax.models import Model
from dlm_jax.sampling.editing import edited
from dlm_jax.sampling.loop import look
from dlm_jax.sampling.propose import propose_parallel
from dlm_jax.sampling.rules import pack_editor, pack_rules
from dlm_jax.sampling.state import State, start
from dlm_jax.sampling.transforms import Chain


def make_state(model: Model, rows: int, length: int, scoring: Any) -> State:
    """Random text, all of it a draft."""
    rng = np.random.default_rng(0)
    tokenizer = model.tokenizer
    never = {tokenizer.mask_id, tokenizer.pad_id, *tokenizer.banned_ids}
    ids = [token for token in range(tokenizer.vocab_size) if token not in never]
    samples = [SampleConfig(edit=True, resample=True, schedule="all", edit_scoring=scoring)] * rows
    rule, _ = pack_rules(samples, model.noise)
    state = start(
        jnp.asarray(rng.choice(ids, (rows, length)), jnp.int32),
        jnp.full(rows, length, jnp.int32),
        seeds_B=jnp.arange(rows, dtype=jnp.uint32),
        steps_B=jnp.full(rows, 16, jnp.int32),
        chain=Chain((), ()),
        rule=rule,
        mask_id=tokenizer.mask_id,
        frozen_BL=jnp.zeros((rows, length), bool),
        resamples_B=jnp.ones(rows, bool),
        editor=pack_editor(samples),
    )
    assert state.edited is not None
    return state._replace(edited=state.edited._replace(warms_B=jnp.zeros(rows, bool)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="default: the shipped model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scoring", choices=EDIT_SCORINGS, default=EDIT_SCORINGS[0])
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load(args.checkpoint)
    network, params = model.network, model.params
    program = model.advance().program
    state = make_state(model, args.rows, args.length, args.scoring)
    is_lead = args.scoring == "lead"
    jit = functools.partial(
        jax.jit, compiler_options=cpu.compiler_options(is_training=False) or None
    )
    seen = jax.block_until_ready(jit(functools.partial(look, program))(params, state))
    tokens_BL, length_B = state.canvas.tokens_BL, state.canvas.length_B

    @jit
    def trunk(params: Any) -> Any:
        return network.trunk(params, tokens_BL, length_B, None)[0]

    @jit
    def edits(params: Any, state: State, seen: Any) -> Any:
        after, moved, is_committed_BL = edited(program, params, state, seen, seen.is_open_BL)
        # What the loop goes on with; what the trunk returned is not copied in it.
        after = after.canvas, after.edited, after.block, after.logprob_BL, after.committed_BL
        moved = moved.view, moved.is_open_BL, moved.proposal.tokens_BL
        return after, moved, is_committed_BL

    def proposer(reads: bool) -> Any:
        @jit
        def run(params: Any, state: State, sight: Any) -> Any:
            return propose_parallel(
                network, params, sight, seen.is_open_BL, state.chain, state.chain_state,
                seen.context, seen.draw_key_B, measure=state.rule.measure, chunk=program.chunk,
                banned_ids=program.banned_ids, keeps_total=reads,
                keeps_best=reads and is_lead,
            )  # fmt: skip

        return run

    plain, reading = proposer(False), proposer(True)
    seconds = median_seconds(
        {
            "trunk": lambda: jax.block_until_ready(trunk(params)),
            "edits": lambda: jax.block_until_ready(edits(params, state, seen)),
            "plain": lambda: jax.block_until_ready(plain(params, state, seen.sight)),
            "reading": lambda: jax.block_until_ready(reading(params, state, seen.sight)),
        },
        args.repeats,
    )
    extra = seconds["reading"] - seconds["plain"]
    print(
        "| scoring | rows x length | V | trunk s | edits ms | % of the trunk | of the logits: ms | "
        "% |"
    )
    print("| --- " * 8 + "|")
    edits_ms, extra_ms = 1e3 * seconds["edits"], 1e3 * extra
    print(
        f"| {args.scoring} | {args.rows} x {args.length} | {network.vocab_size} | "
        f"{seconds['trunk']:.2f} | {edits_ms:.1f} | {edits_ms / 10 / seconds['trunk']:.2f} | "
        f"{extra_ms:.0f} | {extra_ms / 10 / seconds['trunk']:.2f} |"
    )


if __name__ == "__main__":
    main()
