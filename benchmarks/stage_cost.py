"""Cost of a training step in each stage, compared with a model without heads.

    python benchmarks/stage_cost.py

Steps of all stages alternate. The table has medians in milliseconds, and XLA's count of
floating-point operations of the compiled step. A part that does not train yet must have no cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp

from dlm_jax.cli.common import start_jax
from dlm_jax.config import Config, HeadsConfig, MeshConfig, ModelConfig, OptimConfig
from dlm_jax.data import Setup
from dlm_jax.diffusion.corruption import LINEAR
from dlm_jax.diffusion.objectives import Batch, Mixture, elbo
from dlm_jax.distributed.partitions import axes_of, make_mesh
from dlm_jax.heads import CRITIC, HEADS, MAIN, SAMPLER
from dlm_jax.model.transformer import build
from dlm_jax.training.optimisers import make_grouped_optimizer, rates_of
from dlm_jax.training.train_step import Stage, StageLoss, init_state, make_train_step

VOCAB_SIZE, ROWS, POSITIONS = 512, 16, 128
MASK = VOCAB_SIZE - 1
STAGES = {
    "no heads": (MAIN,),
    "main": (MAIN,),
    "main + sampler": (MAIN, SAMPLER),
    "main + sampler + critic": (MAIN, SAMPLER, CRITIC),
    "sampler alone": (SAMPLER,),
}


def make_step(name: str) -> tuple[Any, Any, float]:
    """Returns (compiled step, its state, its floating-point operations)."""
    has_heads = name != "no heads"
    model = ModelConfig(
        depth=4, width=128, heads=4, vocab_size=VOCAB_SIZE, activation="gelu",
        add_sampler_head=has_heads, add_critic_head=has_heads,
    )  # fmt: skip
    settings, optim = HeadsConfig(sampler_reveal=0.7, warmup_steps=0), OptimConfig(warmup_steps=1)
    network, mesh = build(model), make_mesh(MeshConfig(), jax.devices()[:1])
    stage = Stage(STAGES[name])
    # Only the special ids of the tokenizer are used.
    ids = SimpleNamespace(
        mask_id=MASK, pad_id=MASK, eos_id=MASK, banned_ids=(), vocab_size=VOCAB_SIZE
    )
    setup = Setup(Config(model=model, heads=settings), cast(Any, ids), mesh)
    heads = tuple(head for make in HEADS if (head := make(setup)) is not None)

    def objective(batch: Batch, key: jax.Array) -> Any:
        return elbo(batch, key, schedule=LINEAR, mask_id=MASK)

    mixture = Mixture({"elbo": objective}, {"elbo": 1.0})
    loss = StageLoss(network=network, mixture=mixture, heads=heads, stage=stage, mask_id=MASK)
    rates = rates_of(optim, settings, heads, num_steps=1000)
    optimizer = make_grouped_optimizer(
        optim, settings, heads, stage, rates, axes=axes_of(network), num_steps=1000
    )
    state = init_state(network, optimizer, mesh, False, jax.random.key(0))
    step = make_train_step(loss, optimizer, state, mesh=mesh, batch_size=ROWS)
    tokens_BL = jax.random.randint(jax.random.key(2), (ROWS, POSITIONS), 0, MASK)
    batch = Batch(tokens_BL, jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, jnp.int32))
    key = jax.random.key(1)
    compiled = step.lower(state, batch, key).compile()
    costs = compiled.cost_analysis() or {}
    carried = [state]

    def run() -> None:
        carried[0], metrics = compiled(carried[0], batch, key)
        jax.block_until_ready(metrics)

    return run, carried, costs.get("flops", float("nan"))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    start_jax()
    steps = {name: make_step(name) for name in STAGES}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):
        for name, (run, _, _) in steps.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1000 * (time.perf_counter() - start))
    base = statistics.median(times["no heads"])
    print("| stage | ms per step | beside no heads | GFLOP |")
    print("| --- | --- | --- | --- |")
    for name, (_, _, flops) in steps.items():
        middle = statistics.median(times[name])
        print(f"| {name} | {middle:.1f} | {middle / base:.3f} | {flops / 1e9:.4f} |")


if __name__ == "__main__":
    main()
