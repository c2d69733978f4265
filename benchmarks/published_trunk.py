"""Speed of the trunk of a loaded LLaDA, compared with this library's model of the same shape.

    python -m benchmarks.published_trunk

A LLaDA with random parameters is written as a published directory and loaded. Its forward is timed
in alternation with a model built from the same settings, and with a default model with equally many
parameters: the same depth, width and heads, and an MLP of two matrices instead of three.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.config import Config, ModelConfig
from dlm_jax.model.transformer import build
from dlm_jax.published import read_shape

VOCAB = 2048
OURS = ModelConfig(depth=6, width=256, heads=4, vocab_size=VOCAB, mlp_width=1032)
LLADA = dataclasses.replace(
    OURS, mlp_width=688, activation="swiglu", norm="rms", norm_epsilon=1e-5, qk_norm=False,
    rope_theta=500000.0, tied_head=False,
)  # fmt: skip


def loaded(folder: Path) -> dlm_jax.Model:
    """The LLaDA, written as a directory and loaded."""
    words = {f"t{i}": i for i in range(VOCAB)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = folder / "shape"
    shape.mkdir()
    made.save(str(shape / "tokenizer.json"))
    (shape / "config.json").write_text(
        '{"architectures": ["LLaDAModelLM"], "d_model": 64, "n_heads": 2, "n_layers": 1, '
        f'"mlp_hidden_size": 64, "vocab_size": {VOCAB}, "mask_token_id": {VOCAB - 1}, '
        f'"eos_token_id": {VOCAB - 2}}}'
    )
    network = build(LLADA)
    model = dlm_jax.Model(
        network, network.init(jax.random.key(0)), read_shape(shape)[1], max_length=512,
        config=Config(model=LLADA), family="llada",
    )  # fmt: skip
    dlm_jax.export(model, folder / "model")
    return dlm_jax.load(folder / "model")


def main() -> None:
    """Prints the median times, and their ratios to that of the loaded model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    start_jax()
    with tempfile.TemporaryDirectory() as folder:
        model = loaded(Path(folder))
    networks: dict[str, tuple[Any, Any]] = {"LLaDA, loaded": (model.network, model.params)}
    for name, config in (("the same settings", LLADA), ("our defaults", OURS)):
        network = build(config)
        networks[name] = (network, network.init(jax.random.key(0)))
    shape = (args.rows, args.positions)
    tokens = np.random.default_rng(0).integers(0, VOCAB - 2, shape).astype(np.int32)
    lengths = np.full(args.rows, args.positions, np.int32)
    forward = {
        name: jax.jit(lambda p, t, n, trunk=network.trunk: trunk(p, t, n, None)[0])
        for name, (network, _) in networks.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(args.turns + 1):
        for name, (_, params) in networks.items():
            began = time.perf_counter()
            jax.block_until_ready(forward[name](params, tokens, lengths))
            if turn:  # the first turn compiles
                taken[name].append(time.perf_counter() - began)
    print(
        f"| trunk, {args.rows} rows of {args.positions} | parameters | ms | of the loaded one's |"
    )
    print("| --- | --- | --- | --- |")
    base = statistics.median(taken["LLaDA, loaded"])
    for name, (_, params) in networks.items():
        middle = statistics.median(taken[name])
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        print(f"| {name} | {count:,} | {middle * 1e3:.1f} | {middle / base:.2f} |")


if __name__ == "__main__":
    main()
