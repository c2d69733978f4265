"""Time saved by caches: `python -m benchmarks.caches` prints seconds with and without each cache.

The model has 6 layers of width 256 and random weights; rows have 256 prompt tokens and 256 new
tokens. Each step writes one token, so runs with and without a cache have equally many steps;
float32 on a CPU. The causal model is also compared with a plain PyTorch loop with a cache and the
same weights, in a separate process.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from typing import Any

import numpy as np

from benchmarks.generation_pair import random_params

DEPTH, WIDTH, HEADS, VOCAB = 6, 256, 4, 512
GIVEN, NEW, BLOCK = 256, 256, 32
THREADS = 2
KINDS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "block_causal": {"attention_type": "block_causal", "block_length": BLOCK},
    "causal": {"attention_type": "causal", "start_id": VOCAB - 4},
}
BLOCKS = {"order": "low_confidence", "block_length": BLOCK}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dual": ("bidirectional", BLOCKS),
    "exact, block-causal": ("block_causal", BLOCKS),
    "exact, causal": ("causal", {"order": "left_to_right"}),
}


@dataclasses.dataclass(frozen=True)
class Timed:
    """A run: elapsed and processor seconds, work of one row, and the new tokens."""

    seconds: float
    cpu: float
    forwards: int
    positions: int
    tokens: np.ndarray


def make_model(kind: str) -> Any:
    """A `dlm_jax.Model` of this kind with random nonzero weights."""
    from dlm_jax.config import ModelConfig
    from dlm_jax.data import CharacterTokenizer
    from dlm_jax.inference.model import Model
    from dlm_jax.model.transformer import build

    config = ModelConfig(
        depth=DEPTH, width=WIDTH, heads=HEADS, vocab_size=VOCAB, activation="gelu", **KINDS[kind]
    )
    network = build(config)
    return Model(
        network=network,
        params=random_params(network),
        tokenizer=CharacterTokenizer("".join(chr(0x100 + i) for i in range(VOCAB - 4))),
        max_length=GIVEN + NEW,
        is_causal=kind == "causal",
    )


def prompts_of(rows: int) -> np.ndarray:
    """Random prompts ``[B, P]`` of text ids."""
    return np.random.default_rng(1).integers(0, VOCAB - 4, (rows, GIVEN))


def run(model: Any, rows: int, new: int, **settings: Any) -> Timed:
    """Generates `new` tokens after each prompt, one per step, after a short run that compiles."""
    import dlm_jax

    prompts = [{"tokens": row} for row in prompts_of(rows)]

    def generate(steps: int) -> tuple[Any, float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        made = dlm_jax.generate(
            model, prompts, batch_size=rows, gen_length=new, steps=steps, temperature=0.0,
            ignore_eos=True, **settings,
        )  # fmt: skip
        return made, time.perf_counter() - start, time.process_time() - cpu

    is_one_by_one = settings.get("cache") == "exact" and model.is_causal
    generate(new if is_one_by_one else -(-new // BLOCK))
    made, seconds, cpu = generate(new)
    counters = made.counters
    tokens = made.tokens[:, GIVEN : GIVEN + new]
    forwards = int(counters.forwards[0])
    positions = int(counters.positions[0]) or forwards * (GIVEN + new)
    return Timed(seconds, cpu, forwards, positions, tokens)


def reuse(rounds: int, system: int = 1024, user: int = 32, new: int = 32) -> None:
    """Prints the seconds of a request whose prompt begins with a system text, in alternating runs.

    The prefix is computed as a whole row, computed in chunks, or read from the cache.
    """
    print("| model | whole row, s | chunks, s | found, s | times less | of chunks |")
    print("| --- " * 6 + "|")
    for kind, settings in (("block_causal", BLOCKS), ("causal", {"order": "left_to_right"})):
        model = dataclasses.replace(make_model(kind), max_length=system + user + new)
        steps = new if kind == "causal" else new // BLOCK * 4
        common = settings | {
            "cache": "exact", "gen_length": new, "steps": steps, "temperature": 0.0,
            "ignore_eos": True,
        }  # fmt: skip
        whole, chunks, hit = np.median(_reused(model, common, rounds, system, user), axis=0)
        print(f"| {kind} | {whole:.3f} | {chunks:.3f} | {hit:.3f} | {whole / hit:.2f} | "
              f"{chunks / hit:.2f} |", flush=True)  # fmt: skip


def _reused(
    model: Any, common: dict[str, Any], rounds: int, system: int, user: int
) -> list[tuple[float, ...]]:
    """Seconds of each round: whole row, chunks, and cached prefix."""
    from dlm_jax.inference.engine import Engine
    from dlm_jax.inference.request import make_requests

    rng = np.random.default_rng(1)

    def random(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB - 4, count)

    def seconds(engine: Engine, prefix: np.ndarray) -> float:
        prompt = {"tokens": np.concatenate([prefix, random(user)])}
        (request,) = make_requests(model, prompt, common)
        began = time.perf_counter()
        list(engine.run([request]))
        return time.perf_counter() - began

    first = random(system)
    with Engine(model, sizes=(1,)) as plain, Engine(model, sizes=(1,), prefix_mib=256) as kept:
        found = [
            (seconds(plain, first), seconds(kept, random(system)), seconds(kept, first))
            for _ in range(rounds + 1)
        ]
    return found[1:]  # the first round compiles and computes the prefix


def torch_loop(params: Any, rows: int, new: int) -> Timed:
    """The plain greedy loop: one forward for the prompt, then one per token."""
    import torch
    from torch.nn import functional

    from benchmarks.torch_twin import Twin, rotate

    torch.set_num_threads(THREADS)
    twin = Twin(VOCAB, DEPTH, WIDTH, HEADS, "gelu").load(params).eval()
    size = WIDTH // HEADS
    angles = torch.arange(GIVEN + new)[:, None] * 10000.0 ** (-torch.arange(size // 2) * 2 / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def forward(tokens: Any, first: int, keys: Any, values: Any) -> Any:
        last = first + tokens.shape[1]
        x = twin.embedding(tokens)
        for layer in range(DEPTH):
            block: Any = twin.blocks[layer]
            q, k, v = block.qkv(block.attention_norm(x)).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
            q = rotate(block.query_norm(q), cos[first:last], sin[first:last])
            k = rotate(block.key_norm(k), cos[first:last], sin[first:last])
            keys[layer][:, :, first:last] = k.transpose(1, 2)
            values[layer][:, :, first:last] = v.transpose(1, 2)
            y = functional.scaled_dot_product_attention(
                q.transpose(1, 2), keys[layer][:, :, :last], values[layer][:, :, :last],
                is_causal=first == 0,
            )  # fmt: skip
            x = x + block.out(y.transpose(1, 2).reshape(x.shape))
            inner = functional.gelu(block.up(block.mlp_norm(x)), approximate="tanh")
            x = x + block.down(inner)
        logits = functional.linear(twin.norm(x[:, -1]), twin.embedding.weight)
        logits[:, VOCAB - 4 :] = -torch.inf
        return logits.argmax(-1, keepdim=True)

    def generate() -> Any:
        shape = (rows, HEADS, GIVEN + new, size)
        keys, values = ([torch.zeros(shape) for _ in range(DEPTH)] for _ in "kv")
        # The model's input is shifted right by one position, after MASK.
        begin = torch.full((rows, 1), VOCAB - 4)
        token = forward(torch.cat([begin, torch.from_numpy(prompts_of(rows))], 1)[:, : GIVEN + 1],
                        0, keys, values)  # fmt: skip
        found = [token]
        for place in range(GIVEN + 1, GIVEN + new):
            token = forward(token, place, keys, values)
            found.append(token)
        return torch.cat(found, 1)

    with torch.inference_mode():
        generate()
        start, cpu = time.perf_counter(), time.process_time()
        tokens = generate()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Timed(seconds, cpu, new, GIVEN + new, tokens.numpy())


def _worker(pipe: Any, *args: Any) -> None:
    pipe.send(torch_loop(*args))


def beside_torch(params: Any, rows: int, new: int) -> Timed:
    """Runs the PyTorch loop in a separate process."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_worker, args=(child, params, rows, new), daemon=True)
    process.start()
    found = pipe.recv()
    process.join()
    return found


def main() -> None:
    """Prints a table."""
    import jax

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1, help="rows per batch")
    parser.add_argument("--new", type=int, default=NEW, help="new tokens")
    parser.add_argument("--only", choices=list(RUNS), nargs="+", help="some of the caches")
    parser.add_argument("--reuse", type=int, metavar="ROUNDS", help="time the reuse of prefixes")
    asked = parser.parse_args()
    if asked.reuse:
        reuse(asked.reuse)
        return
    print(
        "| cache | forwards | positions | s | processor s | without: positions | s | processor s | "
        "times less | of the processor's | same tokens |"
    )
    print("| --- " * 11 + "|")
    plain: dict[str, Timed] = {}
    for name, (kind, settings) in RUNS.items():
        if name not in (asked.only or RUNS):
            continue
        model = make_model(kind)
        cached = run(model, asked.rows, asked.new, cache=name.split(",")[0], **settings)
        if kind not in plain:
            plain[kind] = run(model, asked.rows, asked.new, **settings)
        without = plain[kind]
        same = float((cached.tokens == without.tokens).mean())
        print(
            f"| {name} | {cached.forwards} | {cached.positions:,} | {cached.seconds:.2f} | "
            f"{cached.cpu:.2f} | {without.positions:,} | {without.seconds:.2f} | "
            f"{without.cpu:.2f} | {without.seconds / cached.seconds:.2f} | "
            f"{without.cpu / cached.cpu:.2f} | {same:.1%} |",
            flush=True,
        )
        if kind == "causal":
            theirs = beside_torch(jax.tree.map(np.asarray, model.params), asked.rows, asked.new)
            same = float((cached.tokens == theirs.tokens).mean())
            print(
                f"PyTorch with a cache: {theirs.seconds:.2f} s, {theirs.cpu:.2f} on the processor; "
                f"{theirs.seconds / cached.seconds:.2f} and {theirs.cpu / cached.cpu:.2f} times "
                f"ours; same tokens {same:.1%}"
            )


if __name__ == "__main__":
    main()
