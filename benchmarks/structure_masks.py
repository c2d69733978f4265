"""Measures the time that a structure adds to a step, for two vocabulary sizes.

``python benchmarks/structure_masks.py``

The rows of 64 slots on a canvas of 128 are sampled from left to right, all with the automaton of a
JSON schema or all without. The network has random parameters and the shape of the shipped model,
except for the vocabulary. Both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax

from dlm_jax.cli.common import start_jax
from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.model.transformer import build
from dlm_jax.structured import regex_of_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer"},
        "kind": {"enum": ["knight", "king", "fool"]},
    },
    "required": ["name", "age", "kind"],
}
STEPS = 8


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 50257])
    args = parser.parse_args()
    start_jax()
    print("| vocabulary | states x classes | step ms | with structure | added | order |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in args.sizes:
        for order in ("left_to_right", "random"):
            _row(size, order, args)


def _row(size: int, order: str, args: argparse.Namespace) -> None:
    # Characters beyond ASCII replace the tokens that the schema does not use.
    letters = [chr(code) for code in range(32, 127)]
    letters += [chr(0x4E00 + place) for place in range(size - len(letters) - 4)]
    tokenizer = CharacterTokenizer.of("".join(letters))
    shape = ModelConfig(depth=4, width=160, heads=5, vocab_size=tokenizer.vocab_size)
    network = build(shape)
    model = Model(network, jax.jit(network.init)(jax.random.key(0)), tokenizer, max_length=128,
                  sample=SamplingParams(chain=["temperature"], order=order, steps=120))  # fmt: skip
    pattern = regex_of_schema(SCHEMA)
    automaton = model.structures.automaton(pattern)
    times: dict[str, list[float]] = {"": [], pattern: []}
    # Slots are refilled as often as the rounds require.
    fills = 1 + (args.rounds + 1) * STEPS // 120
    engines = {held: _engine(model, held, args.slots, fills) for held in times}
    for _ in range(args.rounds):
        for held, engine in engines.items():
            began = time.perf_counter()
            engine.step(STEPS)
            times[held].append((time.perf_counter() - began) / STEPS)
    plain, with_it = (statistics.median(some) for some in times.values())
    states, classes = automaton.next_SC.shape
    print(
        f"| {tokenizer.vocab_size} | {states} x {classes} | {plain * 1e3:.1f} | "
        f"{with_it * 1e3:.1f} | {with_it / plain - 1:.1%} | {order} |", flush=True,
    )  # fmt: skip


def _engine(model: Model, held: str, slots: int, fills: int) -> Engine:
    """An engine with full slots and a compiled program."""
    engine = Engine(model, sizes=(slots,), canvases=(128,), max_waiting=None)
    asked: dict[str, Any] = {"gen_length": 120, "steps": 120, "temperature": 1.0}
    asked |= {"structure": held} if held else {}
    for seed in range(slots * fills):
        (request,) = make_requests(model, "", asked | {"seed": seed})
        engine.submit(request)
    engine.step(STEPS)
    return engine


if __name__ == "__main__":
    main()
