"""Cost of a wavefront fill relative to a forward of the trunk, by number of holes.

    python -m benchmarks.wavefront_cost

The canvas consists of holes except for one visible token in a hundred, the hardest case with only
known waves. The fill, the trunk, and a fill with dynamic shapes in eager PyTorch (one gather per
wave) alternate; the table has medians. `--vocab 50257` with a narrow model shows that the fill's
time is proportional to the holes.
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

from dlm_jax.cli.common import start_jax
from dlm_jax.config import ModelConfig
from dlm_jax.distributed import compiler
from dlm_jax.model.transformer import build
from dlm_jax.sampling.propose import FillOutput, wavefront_fill
from dlm_jax.types import Network


def median_seconds(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each function, in alternating runs after one excluded run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def make_fill(network: Network, rows: int) -> Callable[..., FillOutput]:
    """Compiled ``(params, hidden_BLD, tokens_BL, length_B, is_open_BL) -> FillOutput``."""

    def run(params: Any, hidden_BLD: Any, tokens_BL: Any, length_B: Any, is_open_BL: Any) -> Any:
        key_B = jax.vmap(jax.random.key)(jnp.arange(rows, dtype=jnp.uint32))
        return wavefront_fill(
            params,
            hidden_BLD,
            tokens_BL,
            key_B,
            network=network,
            is_open_BL=is_open_BL,
            length_B=length_B,
            banned_ids=(network.vocab_size - 1,),
        )

    return jax.jit(run, compiler_options=compiler.options("sample"))


class TorchFill(torch.nn.Module):
    """The fill of the source document in eager PyTorch, without its write to a copy."""

    def __init__(self, params: Any):
        super().__init__()
        head = params["sampler_head"]
        self.embedding = torch.tensor(np.asarray(params["embedding"]))
        self.inner = torch.tensor(np.asarray(head["inner"]["kernel"]))
        self.out = torch.tensor(np.asarray(head["out"]["kernel"]))
        self.scales = [
            torch.tensor(np.asarray(head[n]["scale"])) for n in ("inner_norm", "out_norm")
        ]

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, mask: int) -> torch.Tensor:
        """Tokens ``[B, L]`` without holes."""
        norm, silu = torch.nn.functional.rms_norm, torch.nn.functional.silu
        filled, width = tokens.clone(), hidden.shape[-1]
        while True:
            is_hole = filled == mask
            if not is_hole.any():
                return filled
            known = torch.nn.functional.pad(~is_hole, (1, 1))
            row, place = (is_hole & (known[:, :-2] | known[:, 2:])).nonzero(as_tuple=True)
            sides = []
            for offset in (-1, 1):
                at = place + offset
                ids = filled[row, at.clamp(0, tokens.shape[1] - 1)]
                is_seen = (at >= 0) & (at < tokens.shape[1]) & (ids != mask)
                sides.append(torch.where(is_seen[:, None], self.embedding[ids], 0.0))
            x = torch.cat([sides[0], hidden[row, place], sides[1]], dim=-1)
            x = norm(silu(x @ self.inner), (width,), self.scales[0])
            x = norm(silu(x @ self.out), (width,), self.scales[1])
            logits = x @ self.embedding.T
            logits[:, mask] = -torch.inf
            filled[row, place] = torch.multinomial(logits.softmax(-1), 1)[:, 0]


def case(vocab: int, depth: int, width: int, rows: int, holes: int, repeats: int) -> None:
    """Prints the times of a fill of `rows` x `holes`, of the trunk and of PyTorch."""
    config = ModelConfig(depth=depth, width=width, heads=6, vocab_size=vocab, add_sampler_head=True)
    network = build(config)
    params = jax.jit(network.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    is_open = np.ones((rows, holes), bool)
    for row in is_open:
        row[rng.choice(holes, max(1, holes // 100), replace=False)] = False
    tokens = np.where(is_open, vocab - 1, rng.integers(0, vocab - 1, is_open.shape))
    tokens_BL, length_B = jnp.asarray(tokens, jnp.int32), jnp.full(rows, holes, jnp.int32)
    trunk = jax.jit(
        lambda params: network.trunk(params, tokens_BL, length_B, None)[0],
        compiler_options=compiler.options("sample"),
    )
    hidden_BLD = trunk(params)
    fill = make_fill(network, rows)
    given = params, hidden_BLD, tokens_BL, length_B, jnp.asarray(is_open)
    torch_fill, torch_hidden = TorchFill(params), torch.tensor(np.asarray(hidden_BLD))
    torch_tokens = torch.tensor(tokens)
    seconds = median_seconds(
        {
            "trunk": lambda: jax.block_until_ready(trunk(params)),
            "fill": lambda: jax.block_until_ready(fill(*given)),
            "torch": lambda: torch_fill(torch_tokens, torch_hidden, vocab - 1),
        },
        repeats,
    )
    made = fill(*given)
    number = int(is_open.sum())
    print(
        f"| {vocab} | {depth} x {width} | {rows} x {holes} | {int(made.counts['waves'].max())} | "
        f"{seconds['trunk']:.2f} | {seconds['fill']:.2f} | "
        f"{100 * seconds['fill'] / seconds['trunk']:.1f} | "
        f"{100 * seconds['torch'] / seconds['trunk']:.1f} | "
        f"{1e6 * seconds['fill'] / number:.1f} |",
        flush=True,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, nargs="*", default=[67, 50257])
    args = parser.parse_args()
    start_jax()
    print(
        "| V | trunk | rows x holes | waves | trunk s | fill s | fill / trunk % | "
        "PyTorch fill / trunk % | us per hole |"
    )
    print("| --- " * 9 + "|")
    for vocab in args.vocab:
        if vocab < 1000:
            case(vocab, 6, 384, 64, 1024, args.repeats)
            continue
        for rows, holes in ((8, 64), (8, 256), (32, 256)):
            case(vocab, 6, 384, rows, holes, args.repeats)


if __name__ == "__main__":
    main()
