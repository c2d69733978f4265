"""Gain of a sampler head from neighbours hidden from the trunk, in nats per token.

    python benchmarks/sampler_gain.py --head runs/shakespeare_bpe_sampler ... --csv gain.csv

On held-out text with a uniform share hidden, every third position with hidden neighbours is
predicted by the LM head, and by the sampler head given no neighbour, the true left neighbour, the
true right neighbour, or both. The LM head never has the neighbours, as in a parallel draw.
"""

from __future__ import annotations

import argparse
import csv
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.data import load_corpus, validation_windows
from dlm_jax.diffusion.corruption import mask_independently, stratified_times
from dlm_jax.diffusion.likelihood import ratio_and_error
from dlm_jax.diffusion.losses import cross_entropy, nll, read_out
from dlm_jax.diffusion.objectives import Batch, Drawn
from dlm_jax.heads.sampler import prepare_sampler_inputs
from dlm_jax.inference.model import Model

SHOWN: dict[str, tuple[int, ...]] = {"none": (), "left": (2,), "right": (1,), "both": (1, 2)}
ROWS = 16


@functools.partial(jax.jit, static_argnums=0)
def nats(
    network: Any, mask_id: int, params: Any, tokens_BL: Any, length_B: Any, key: Any
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The nats of each row's predicted tokens and their number, by head and visible neighbours."""
    time_key, mask_key = jax.random.split(key)
    place_1L = jnp.arange(tokens_BL.shape[1])[None]
    is_live_BL = place_1L < length_B[:, None]
    times_B = stratified_times(time_key, tokens_BL.shape[0])
    is_hole_BL = mask_independently(mask_key, times_B, is_live_BL)
    shown_BL = jnp.where(is_hole_BL, mask_id, tokens_BL)
    hidden_BLD, _ = network.trunk(params, shown_BL, length_B, None)
    beside_BL = jnp.roll(is_hole_BL, 1, axis=1) & jnp.roll(is_hole_BL, -1, axis=1)
    is_inside_1L = (place_1L > 0) & (place_1L < tokens_BL.shape[1] - 1) & (place_1L % 3 == 0)
    is_asked_BL = is_hole_BL & beside_BL & is_inside_1L
    number_B = jnp.sum(is_asked_BL, axis=1)

    def total(nll_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(jnp.where(is_asked_BL, nll_BL, 0.0), axis=1), number_B

    drawn = Drawn(
        Batch(tokens_BL, length_B, jnp.zeros_like(length_B)), shown_BL,
        is_asked_BL.astype(jnp.float32), jnp.sum(number_B), hidden_BLD=hidden_BLD,
    )  # fmt: skip
    found = {
        "LM head": total(cross_entropy(network, params, hidden_BLD, tokens_BL, mask_id=mask_id))
    }
    for name, thirds in SHOWN.items():
        is_revealed_1L = jnp.isin(place_1L % 3, jnp.array(thirds, jnp.int32))
        is_revealed_BL = jnp.broadcast_to(is_revealed_1L, tokens_BL.shape)
        inputs = prepare_sampler_inputs(network, params, drawn, is_revealed_BL, mask_id=mask_id)
        nll_BL = read_out(
            nll, network.heads["sampler"].readout, params, inputs, (tokens_BL,),
            vocab_size=network.vocab_size, mask_id=mask_id,
        )  # fmt: skip
        found[name] = total(nll_BL)
    return found


def measure(model: Model) -> dict[str, tuple[float, float]]:
    """Mean nats per token and standard error over the held-out windows, by visible neighbours."""
    assert model.config is not None
    data = model.config.data
    corpus = load_corpus(
        data.source, tokenizer=data.tokenizer, seq_len=data.seq_len, held_out=data.held_out,
        cache_dir=data.cache_dir or None, layout=data.layout, tail=data.tail,
    )  # fmt: skip
    windows = validation_windows(
        corpus.val_rows, seq_len=data.seq_len, pad_id=model.tokenizer.pad_id,
        max_windows=256, multiple_of=ROWS,
    )  # fmt: skip
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for first in range(0, len(windows["length"]), ROWS):
        batch = [windows[name][first : first + ROWS] for name in ("tokens", "length")]
        key = jax.random.fold_in(jax.random.key(0), first)
        mask_id = model.tokenizer.mask_id
        for name, pair in jax.device_get(
            nats(model.network, mask_id, model.params, *batch, key)
        ).items():
            rows.setdefault(name, []).append(pair)
    return {
        name: ratio_and_error(*(np.concatenate(column) for column in zip(*rows[name], strict=True)))
        for name in ("LM head", *SHOWN)
    }


def main() -> None:
    """Prints the table and writes it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", nargs="+", required=True, metavar="RUN")
    parser.add_argument("--csv", metavar="FILE")
    args = parser.parse_args()
    start_jax()
    lines = []
    print("| head | LM head | " + " | ".join(SHOWN) + " |")
    print("| --- " * (2 + len(SHOWN)) + "|")
    for path in args.head:
        found = measure(dlm_jax.load(path))
        lines += [[Path(path).name, name, *pair] for name, pair in found.items()]
        cells = " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in found.values())
        print(f"| {Path(path).name} | {cells} |", flush=True)
    if args.csv:
        with Path(args.csv).open("w", newline="") as file:
            csv.writer(file).writerows([["head", "seen", "nats", "standard_error"], *lines])


if __name__ == "__main__":
    main()
