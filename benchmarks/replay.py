"""Cost of replaying a trace relative to a training step, and the difference between replay and
trace.

    python benchmarks/replay.py

The first table has medians for a training step and for a replay with its gradient, in alternating
runs on the same number of tokens (rows x steps x positions) of the same model. The second table has
the largest difference between replay and trace at the sampling parameters, over at least the
requested number of written tokens, in the shape used for sampling and row by row.
"""

from __future__ import annotations

import argparse
import statistics
import string
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.config import MeshConfig, ModelConfig, OptimConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.diffusion.corruption import LINEAR
from dlm_jax.diffusion.objectives import Batch, Mixture, elbo
from dlm_jax.distributed.partitions import axes_of, make_mesh
from dlm_jax.heads import MAIN
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.training.optimisers import make_optimizer, rates_of
from dlm_jax.training.train_step import Stage, StageLoss, init_state, make_train_step

TOKENIZER = CharacterTokenizer.of(string.ascii_letters + " .\n")
ROWS, POSITIONS, STEPS = 16, 128, 8
CASES: dict[str, dict[str, Any]] = {
    "random, guidance 0.5": {"fill": "parallel", "order": "random", "guidance": 0.5},
    "random_filled, wavefront": {"fill": "wavefront", "order": "random_filled"},
    "low_confidence, scheduled, top_k 20": {
        "fill": "parallel", "order": "low_confidence", "remask": "scheduled", "top_k": 20,
    },
}  # fmt: skip


def make_model(depth: int, width: int) -> Model:
    """A model with a sampler head and random nonzero parameters."""
    config = ModelConfig(
        depth=depth, width=width, heads=4, vocab_size=TOKENIZER.vocab_size, add_sampler_head=True
    )
    network = build(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.05 * rng.standard_normal(leaf.shape), leaf.dtype),
        jax.jit(network.init)(jax.random.key(0)),
    )
    return Model(network, params, TOKENIZER, max_length=POSITIONS)


def training(model: Model) -> Callable[[], None]:
    """A function that runs a training step on the number of tokens of a replay."""
    mesh, mask_id = make_mesh(MeshConfig(), jax.devices()[:1]), TOKENIZER.mask_id

    def objective(batch: Batch, key: jax.Array) -> Any:
        return elbo(batch, key, schedule=LINEAR, mask_id=mask_id)

    loss = StageLoss(
        network=model.network, mixture=Mixture({"elbo": objective}, {"elbo": 1.0}), heads=(),
        stage=Stage((MAIN,)), mask_id=mask_id,
    )  # fmt: skip
    config, num_rows = OptimConfig(warmup_steps=1), ROWS * STEPS
    rates = rates_of(config, num_steps=1000)[MAIN]
    optimizer = make_optimizer(config, rates, axes=axes_of(model.network))
    state = init_state(model.network, optimizer, mesh, False, jax.random.key(0))
    step = make_train_step(loss, optimizer, state, mesh=mesh, batch_size=num_rows)
    tokens_BL = jax.random.randint(jax.random.key(2), (num_rows, POSITIONS), 0, mask_id)
    batch = Batch(tokens_BL, jnp.full(num_rows, POSITIONS), jnp.zeros(num_rows, jnp.int32))
    carried = [state]

    def run() -> None:
        carried[0], metrics = step(carried[0], batch, jax.random.key(1))
        jax.block_until_ready(metrics)

    return run


def replays(model: Model) -> dict[str, Callable[[], None]]:
    """Functions that run a replay without and with its gradient."""
    trace = dlm_jax.generate(
        model, [""], num_samples=ROWS, steps=STEPS, order="random", fill="parallel", trace=True
    ).trace
    assert trace is not None and trace.canvas.shape == (ROWS, STEPS, POSITIONS)
    trace = jax.device_put(trace)

    def total(params: Any) -> jax.Array:
        return dlm_jax.replay(model, params, trace).mean()

    forward, gradient = jax.jit(total), jax.jit(jax.value_and_grad(total))
    return {
        "replay": lambda: jax.block_until_ready(forward(model.params)),
        "replay and gradient": lambda: jax.block_until_ready(gradient(model.params)),
    }


def print_times(rounds: int, depth: int, width: int) -> None:
    """Prints the first table."""
    model = make_model(depth, width)
    runs = {"training step": training(model)} | replays(model)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1000 * (time.perf_counter() - start))
    base = statistics.median(times["training step"])
    print(f"| {ROWS * STEPS * POSITIONS} tokens, depth {depth}, width {width} | ms | beside it |")
    print("| --- | --- | --- |")
    for name, own in times.items():
        print(f"| {name} | {statistics.median(own):.0f} | {statistics.median(own) / base:.2f} |")


def print_differences(least: int) -> None:
    """Prints the second table."""
    model = make_model(2, 64)
    print("| settings | writings | largest difference | in another shape |")
    print("| --- | --- | --- | --- |")
    for name, settings in CASES.items():
        count, worst, other, seed = 0, 0.0, 0.0, 0
        while count < least / len(CASES):
            trace = dlm_jax.generate(
                model, [""], num_samples=64, steps=STEPS, seed=seed, trace=True, **settings
            ).trace
            assert trace is not None
            wanted = np.where(trace.is_written, trace.logprobs, 0.0)
            found = dlm_jax.replay(model, model.params, trace)
            worst = max(worst, float(np.abs(found - wanted).max()))
            if not count:
                few = dlm_jax.replay(model, model.params, trace.rows(slice(3)))
                other = float(np.abs(few - wanted[:3]).max())
            count, seed = count + int(trace.is_written.sum()), seed + 64
        print(f"| {name} | {count} | {worst:.1e} | {other:.1e} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="0: no first table")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--writings", type=int, default=100_000, help="0: no second")
    args = parser.parse_args()
    start_jax()
    if args.rounds:
        print_times(args.rounds, args.depth, args.width)
        print()
    if args.writings:
        print_differences(args.writings)


if __name__ == "__main__":
    main()
