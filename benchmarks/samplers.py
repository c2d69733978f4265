"""Times of the logit transforms compared with PyTorch, CPU float32, V = 50257: prints one table.

Run `python -m benchmarks.samplers`. Every case turns logits into one token per position. The two
sides alternate; the table has their medians. 256 positions pass through the chain in one call. 4096
positions are processed in chunks of 256 by `lax.map`, as in the sampling loop, and by PyTorch in a
Python loop over the same chunks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.scenes import ROWS, place, scene
from dlm_jax.config import SamplingParams
from dlm_jax.sampling import draw as drawing
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.transforms import Chain

VOCAB, CHUNK = 50257, 256
TOP_P, TOP_K, TEMPERATURE = 0.9, 50, 0.8


def by_chunks(fn: Callable[..., jax.Array], num: int) -> Callable[..., jax.Array]:
    """`fn` over chunks of positions, or in one call if all positions fit into a chunk."""
    if num <= CHUNK:
        return fn

    def mapped(logits_NV, at):
        parts = jax.tree.map(lambda a: a.reshape(-1, CHUNK, *a.shape[1:]), (logits_NV, at))
        return jax.lax.map(lambda part: fn(*part), parts).reshape(-1)

    return mapped


def chain_of(**settings: Any) -> Chain:
    """The default chain with one setting for all rows."""
    return BUILT_IN.pack_chain([SamplingParams(**settings)] * ROWS, ModelFacts(vocab_size=VOCAB))


def run_chain(num: int) -> Callable[..., jax.Array]:
    """Compiled `(chain, logits, at) -> ids`: one program for all settings."""

    def apply(chain, logits_NV, at):
        prepared = chain.prepare(chain.init(ROWS), scene())
        return by_chunks(lambda x, a: chain.draw(prepared, x, a)[0], num)(logits_NV, at)

    return jax.jit(apply)


def torch_top_p(x: torch.Tensor) -> torch.Tensor:
    """The usual sort-based top-p, followed by a draw."""
    values, ids = x.sort(dim=-1, descending=True)
    p = values.softmax(-1)
    p[p.cumsum(-1) - p >= TOP_P] = 0.0
    return ids.gather(-1, torch.multinomial(p, 1))


def torch_top_k_top_p(x: torch.Tensor) -> torch.Tensor:
    """Top-k, followed by top-p among the k candidates and a draw."""
    values, ids = x.topk(TOP_K, dim=-1)
    p = values.softmax(-1)
    p[p.cumsum(-1) - p >= TOP_P] = 0.0
    return ids.gather(-1, torch.multinomial(p, 1))


def torch_chunks(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """`fn` over chunks of positions."""

    def run(x: torch.Tensor) -> None:
        for part in x.split(CHUNK):
            fn(part)

    return run


def medians(runs: int, *fns: Callable[[], object]) -> list[float]:
    """Median milliseconds of each function, in alternating runs after one warm-up."""
    times: list[list[float]] = [[] for _ in fns]
    for turn in range(runs + 1):
        for fn, seen in zip(fns, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(fn())
            if turn:
                seen.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


def report(name: str, num: int, ours: float, other: str, theirs: float, bound: str) -> None:
    """One line of the table."""
    ratio = ours / theirs
    print(f"{name:24s} {num:5d} {ours:9.1f} {other:>24s} {theirs:9.1f} {ratio:7.2f}  {bound}")


def measure(num: int, runs: int) -> None:
    """The cases for one number of positions."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((num, VOCAB), np.float32) * 3).astype(np.float32)
    ours, theirs, at = jnp.asarray(x), torch.from_numpy(x), place(num)
    chain = run_chain(num)
    bare = jax.jit(by_chunks(lambda v, a: drawing.draw(v, a.key_N), num))
    xla_argmax = jax.jit(by_chunks(lambda v, a: v.argmax(-1), num))

    def case(**settings):
        packed = chain_of(**settings)
        return lambda: chain(packed, ours, at)

    a, b = medians(runs, case(top_p=TOP_P), lambda: torch_chunks(torch_top_p)(theirs))
    report("top-p", num, a, "torch sort", b, "<= 0.33")
    a, b = medians(
        runs, case(top_k=TOP_K, top_p=TOP_P), lambda: torch_chunks(torch_top_k_top_p)(theirs)
    )
    report("top-k, top-p", num, a, "torch top-k first", b, "<= 1.2")
    a, b, c = medians(
        runs,
        case(temperature=0.0),
        lambda: torch_chunks(lambda v: v.argmax(-1))(theirs),
        lambda: xla_argmax(ours, at),
    )
    report("all greedy", num, a, "torch argmax", b, "<= 1.2 of the faster")
    report("all greedy", num, a, "XLA argmax", c, "<= 1.2 of the faster")
    a, b = medians(runs, case(temperature=TEMPERATURE), lambda: bare(ours, at))
    report("temperature only", num, a, "bare draw", b, "<= 1.3")


def compile_time() -> None:
    """Seconds of tracing and compiling the full chain with its draw."""
    chain, at = chain_of(), place(CHUNK)
    x = jnp.zeros((CHUNK, VOCAB), jnp.float32)
    start = time.perf_counter()
    lowered = run_chain(CHUNK).lower(chain, x, at)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    print(f"full chain: trace {middle - start:.1f} s, compile {end - middle:.1f} s  < 5")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    compile_time()
    print(f"{'case':24s} {'N':>5s} {'ms':>9s} {'beside':>24s} {'ms':>9s} {'ratio':>7s}  to reach")
    for num in args.positions:
        measure(num, args.runs if num <= CHUNK else max(1, args.runs // 3))


if __name__ == "__main__":
    main()
