"""Time saved by caches: seconds of generation with each cache and without.

    python -m benchmarks.caches [--rows 1] [--new 256] [--quick]

The model has 6 layers of width 256 and random weights; rows have 256 prompt tokens. Each step
writes one token, so runs with and without a cache have equally many steps; float32 on a CPU.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.generate import random_params
from benchmarks.report import Table, parser_of

VOCAB, GIVEN, BLOCK = 512, 256, 32
KINDS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "block_causal": {"attention_type": "block_causal", "block_length": BLOCK},
    "causal": {"attention_type": "causal", "start_id": VOCAB - 4},
}
BLOCKS = {"order": "low_confidence", "block_length": BLOCK}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dual": ("bidirectional", "dual", BLOCKS),
    "exact, block-causal": ("block_causal", "exact", BLOCKS),
    "exact, causal": ("causal", "exact", {"order": "left_to_right"}),
}


def make_model(kind: str, max_length: int) -> Any:
    """A `dlm_jax.Model` of this kind with random nonzero weights."""
    from dlm_jax.config import ModelConfig
    from dlm_jax.data import CharacterTokenizer
    from dlm_jax.inference.model import Model
    from dlm_jax.model.transformer import build

    network = build(ModelConfig(
        depth=6, width=256, heads=4, vocab_size=VOCAB, activation="gelu", **KINDS[kind]
    ))  # fmt: skip
    return Model(
        network, random_params(network),
        CharacterTokenizer("".join(chr(0x100 + i) for i in range(VOCAB - 4))),
        max_length=max_length, is_causal=kind == "causal",
    )  # fmt: skip


def run(model: Any, rows: int, new: int, **settings: Any) -> tuple[float, int, np.ndarray]:
    """Seconds, computed positions of a row, and new tokens, after a run that compiles."""
    import dlm_jax

    rng = np.random.default_rng(1)
    prompts = [{"tokens": row} for row in rng.integers(0, VOCAB - 4, (rows, GIVEN))]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        texts = dlm_jax.generate(
            model, prompts, batch_size=rows, gen_length=new, steps=new, temperature=0.0,
            ignore_eos=True, **settings,
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
    counters = texts.counters
    positions = int(counters.positions[0]) or int(counters.forwards[0]) * (GIVEN + new)
    return seconds[1], positions, texts.tokens[:, GIVEN : GIVEN + new]


def main() -> None:
    """Prints seconds, positions and the share of equal tokens."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS))
    args = parser.parse_args()
    if args.quick:
        args.new = 32
    table = Table(args, "cache", "positions", "s", "without: positions", "s without", "times less",
                  "same tokens")  # fmt: skip
    for name in args.only:
        kind, cache, settings = RUNS[name]
        model = make_model(kind, GIVEN + args.new)
        seconds, positions, tokens = run(model, args.rows, args.new, cache=cache, **settings)
        plain = run(model, args.rows, args.new, **settings)
        same = float((tokens == plain[2]).mean())
        table.add(name, positions, seconds, plain[1], plain[0], plain[0] / seconds, same)


if __name__ == "__main__":
    main()
