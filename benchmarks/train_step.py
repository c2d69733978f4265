"""Speed and memory of a training step and a forward, compared with eager PyTorch on a CPU.

    python -m benchmarks train_step [--sizes 1m 10m] [--rounds 7] [--quick]

Both frameworks have the same architecture, batch, number of threads and float32, and run in
separate processes that alternate. Memory is the peak resident size during training steps, minus the
size after import. The last table has the time of a batch of the input pipeline.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import tempfile
import time
from typing import Any

from benchmarks.report import Table, Worker, parser_of

SIZES = {
    "1m": {"depth": 4, "width": 128, "heads": 4, "rows": 32, "positions": 128},
    "10m": {"depth": 6, "width": 384, "heads": 6, "rows": 16, "positions": 256},
}
VOCAB_SIZE = 128


class Ours:
    """The model of `dlm_jax` with optax."""

    def __init__(self, size: dict[str, int], activation: Any):
        import jax
        import jax.numpy as jnp
        import optax

        from dlm_jax.config import ModelConfig
        from dlm_jax.distributed import compiler
        from dlm_jax.model.transformer import build

        jax.devices()
        self.imported = _resident_mb()
        shape: dict[str, Any] = {name: size[name] for name in ("depth", "width", "heads")}
        network = build(ModelConfig(**shape, activation=activation, vocab_size=VOCAB_SIZE))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        tokens_BL = jax.random.randint(
            jax.random.key(1), (size["rows"], size["positions"]), 0, VOCAB_SIZE
        )
        weight_BL = jax.random.uniform(jax.random.key(2), tokens_BL.shape)
        length_B = jnp.full(size["rows"], size["positions"])

        def logits(params: Any) -> jax.Array:
            hidden_BLD, _ = network.trunk(params, tokens_BL, length_B, None)
            return network.readout(params, hidden_BLD.reshape(-1, size["width"]))

        def loss(params: Any) -> jax.Array:
            losses_N = optax.softmax_cross_entropy_with_integer_labels(
                logits(params), tokens_BL.reshape(-1)
            )
            return jnp.mean(losses_N * weight_BL.reshape(-1))

        def update(params: Any, state: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        self._run = jax.jit(logits, compiler_options=compiler.options("sample"))
        options = compiler.options("train")
        self._train = jax.jit(update, donate_argnums=(0, 1), compiler_options=options)
        params = jax.jit(network.init)(jax.random.key(0))
        self._carried = params, optimizer.init(params)

    def step(self) -> None:
        import jax

        self._carried = jax.block_until_ready(self._train(*self._carried))

    def forward(self) -> None:
        self._run(self._carried[0]).block_until_ready()

    def memory(self) -> float:
        return _peak_mb() - self.imported


class Theirs:
    """The same model in PyTorch."""

    def __init__(self, size: dict[str, int], activation: str):
        import torch

        from benchmarks.torch_reference import Twin

        self.imported = _resident_mb()
        torch.set_num_threads(2)
        self._model = Twin(VOCAB_SIZE, size["depth"], size["width"], size["heads"], activation)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._tokens_BL = torch.randint(0, VOCAB_SIZE, (size["rows"], size["positions"]))
        self._weight_N = torch.rand(self._tokens_BL.numel())
        self._length_B = torch.full((size["rows"],), size["positions"])

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self._model(self._tokens_BL, self._length_B)

    def step(self) -> None:
        import torch
        from torch.nn import functional

        logits_NV = self._model(self._tokens_BL, self._length_B).flatten(0, 1)
        losses_N = functional.cross_entropy(logits_NV, self._tokens_BL.flatten(), reduction="none")
        (losses_N * self._weight_N).mean().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def memory(self) -> float:
        return _peak_mb() - self.imported


def time_batches(args: argparse.Namespace, batches: int) -> None:
    """Prints the processor time of a batch of 32 x 256 bytes, in the caller's thread."""
    from dlm_jax.data import BUILTIN_CORPUS, LAYOUTS, load_corpus, train_batches

    table = Table(args, "layout", "us per batch", "2% of a step of ms")
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            corpus = load_corpus(BUILTIN_CORPUS, seq_len=256, layout=layout, cache_dir=folder)
            stream = train_batches(
                corpus.train_rows, seq_len=256, batch_size=32, seed=0, prefetch=0
            )
            next(stream)
            seconds = []
            for _ in range(20):
                began = time.thread_time()
                for _ in itertools.islice(stream, batches // 20):
                    pass
                seconds.append((time.thread_time() - began) / (batches // 20))
        cost = 1e6 * statistics.median(seconds)
        table.add(layout, cost, cost / 0.02 / 1e3)


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Prints milliseconds, megabytes and ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--activations", nargs="+", default=["gelu", "relu2", "swiglu"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.activations, args.rounds = ["1m"], ["gelu"], 2
    os.environ["OMP_NUM_THREADS"] = "2"
    table = Table(args, "size", "activation", "part", "torch", "dlm_jax", "ratio")
    for name in args.sizes:
        for activation in args.activations:
            workers = [Worker(kind, SIZES[name], activation) for kind in (Theirs, Ours)]
            # Memory is read after training steps, before the forward program exists.
            for part in ("step", "memory", "forward"):
                found = [_median(worker, part, args.rounds) for worker in workers]
                unit = "MB" if part == "memory" else "ms"
                table.add(name, activation, f"{part}, {unit}", *found, found[1] / found[0])
            for worker in workers:
                worker.close()
    print()
    time_batches(args, 200 if args.quick else 2000)


def _median(worker: Worker, part: str, rounds: int) -> float:
    """Megabytes, or the median milliseconds of calls after two that warm up."""
    if part == "memory":
        return worker.ask(part)[0]
    return 1e3 * statistics.median([worker.ask(part)[1] for _ in range(rounds + 2)][2:])


if __name__ == "__main__":
    main()
