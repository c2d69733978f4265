"""Speed and memory of this library's model compared with the same architecture in eager PyTorch, on
a CPU.

    python benchmarks/step_speed.py [--sizes 1m 10m] [--rounds 7]

Both frameworks have the same batch, number of threads and float32. Each framework runs in a
separate process, whose peak memory is measured. The parent alternates between them after a few runs
and prints medians. The first run after each change is excluded, because the caches contain data of
the other framework. Memory is the peak resident size during training steps, minus the size after
import.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from typing import Any

SIZES = {
    "1m": {"depth": 4, "width": 128, "heads": 4, "rows": 32, "positions": 128},
    "10m": {"depth": 6, "width": 384, "heads": 6, "rows": 16, "positions": 256},
}
VOCAB_SIZE = 128
REPEATS = 5
PAUSE_SECONDS = 0.3


def jax_functions(size: dict[str, int], activation: Any) -> tuple[Any, Any]:
    """Forward and training step of `dlm_jax`, as blocking functions without arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    from dlm_jax.config import ModelConfig
    from dlm_jax.distributed import compiler
    from dlm_jax.model.transformer import build

    shape: dict[str, Any] = {name: size[name] for name in ("depth", "width", "heads")}
    network = build(ModelConfig(**shape, activation=activation, vocab_size=VOCAB_SIZE))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
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

    run = jax.jit(logits, compiler_options=compiler.options("sample"))
    train = jax.jit(update, donate_argnums=(0, 1), compiler_options=compiler.options("train"))
    params = jax.jit(network.init)(jax.random.key(0))
    carried = [params, optimizer.init(params)]

    def step() -> None:
        carried[:] = jax.block_until_ready(train(*carried))

    return lambda: run(carried[0]).block_until_ready(), step


def torch_functions(size: dict[str, int], activation: Any) -> tuple[Any, Any]:
    """Forward and training step of the PyTorch twin, as functions without arguments."""
    import torch
    from torch.nn import functional
    from torch_twin import Twin

    torch.set_num_threads(2)
    model = Twin(VOCAB_SIZE, size["depth"], size["width"], size["heads"], activation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens_BL = torch.randint(0, VOCAB_SIZE, (size["rows"], size["positions"]))
    weight_N = torch.rand(tokens_BL.numel())
    length_B = torch.full((size["rows"],), size["positions"])

    def forward() -> None:
        with torch.no_grad():
            model(tokens_BL, length_B)

    def step() -> None:
        logits_NV = model(tokens_BL, length_B).flatten(0, 1)
        losses_N = functional.cross_entropy(logits_NV, tokens_BL.flatten(), reduction="none")
        (losses_N * weight_N).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return forward, step


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(pipe: Any, name: str, size: dict[str, int], activation: str) -> None:
    """Returns seconds for ``"forward"`` and ``"step"``, and megabytes for ``"memory"``."""
    if name == "jax":
        import jax
        import optax  # noqa: F401 - what is imported belongs to the import, not to the training

        import dlm_jax.model.transformer  # noqa: F401

        jax.devices()
        make = jax_functions
    else:
        import torch  # noqa: F401
        import torch_twin  # noqa: F401

        make = torch_functions
    imported_mb = _resident_mb()
    forward, step = make(size, activation)
    functions = {"forward": forward, "step": step}
    step()
    while (request := pipe.recv()) != "stop":
        if request == "memory":
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            pipe.send(peak_mb - imported_mb)
        else:
            times = []
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                functions[request]()
                times.append(time.perf_counter() - start)
            pipe.send(statistics.median(times[1:]))


def measure(size: dict[str, int], activation: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a forward and a step, and peak training megabytes, by framework."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ("torch", "jax"):
        pipes[name], child = context.Pipe()
        processes.append(context.Process(target=serve, args=(child, name, size, activation)))
        processes[-1].start()

    def ask(name: str, request: str) -> float:
        pipes[name].send(request)
        return pipes[name].recv()

    results: dict[str, dict[str, float]] = {name: {} for name in pipes}
    # Memory is measured after training steps, before the forward program exists.
    for request in ("step", "memory", "forward"):
        times = {name: [] for name in pipes}
        for _ in range(1 if request == "memory" else rounds):
            for name in pipes:
                times[name].append(ask(name, request))
                # The threads of one framework spin for a while before they release the cores.
                time.sleep(PAUSE_SECONDS)
        for name, values in times.items():
            results[name][request] = statistics.median(values)
    for name in pipes:
        pipes[name].send("stop")
    for process in processes:
        process.join()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--activations", nargs="+", default=["gelu", "relu2", "swiglu"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "2"
    print("size activation | forward ms: torch jax ratio | step ms: torch jax ratio tokens/s |"
          " peak MB: torch jax ratio")  # fmt: skip
    for name in args.sizes:
        size = SIZES[name]
        for activation in args.activations:
            results = measure(size, activation, args.rounds)
            torch, jax = results["torch"], results["jax"]
            tokens = size["rows"] * size["positions"]
            print(
                f"{name:4s} {activation:10s} | {1e3 * torch['forward']:7.1f}"
                f" {1e3 * jax['forward']:7.1f} {torch['forward'] / jax['forward']:5.2f}x |"
                f" {1e3 * torch['step']:7.1f} {1e3 * jax['step']:7.1f}"
                f" {torch['step'] / jax['step']:5.2f}x {tokens / jax['step']:7.0f} |"
                f" {torch['memory']:6.0f} {jax['memory']:6.0f}"
                f" {jax['memory'] / torch['memory']:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
