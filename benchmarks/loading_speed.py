"""Loading speed of a published model, compared with a plain read of its files by safetensors.

    python -m benchmarks.loading_speed --megabytes 400

The program writes a LLaDA-like model with random bfloat16 parameters. In alternating runs,
`safetensors.numpy.load_file` reads every tensor and `dlm_jax.load` reads the whole model. Both read
from the page cache of the operating system.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

import dlm_jax

WIDTH, INNER, VOCAB = 1024, 3072, 8192


def write(directory: Path, megabytes: int, num_files: int) -> int:
    """Writes the model; returns the bytes of its weights."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        bits = rng.integers(0x3C00, 0x3E00, shape, dtype=np.uint16)
        return bits.view(ml_dtypes.bfloat16)

    per_layer = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    layers = max(num_files, round(megabytes * 1e6 / per_layer))
    start = "model.transformer."
    made = {
        f"{start}wte.weight": drawn(VOCAB, WIDTH),
        f"{start}ln_f.weight": drawn(WIDTH),
        f"{start}ff_out.weight": drawn(VOCAB, WIDTH),
    }
    for layer in range(layers):
        block = f"{start}blocks.{layer}."
        for name in ("attn_norm", "ff_norm"):
            made[f"{block}{name}.weight"] = drawn(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            made[f"{block}{name}.weight"] = drawn(WIDTH, WIDTH)
        for name in ("ff_proj", "up_proj"):
            made[f"{block}{name}.weight"] = drawn(INNER, WIDTH)
        made[f"{block}ff_out.weight"] = drawn(WIDTH, INNER)
    names, where = list(made), {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[len(names) * number // num_files : len(names) * (number + 1) // num_files]
        safetensors.numpy.save_file({name: made[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = {
        "architectures": ["LLaDAModelLM"], "d_model": WIDTH, "n_heads": 8, "n_layers": layers,
        "mlp_hidden_size": INNER, "vocab_size": VOCAB, "max_sequence_length": 4096,
        "weight_tying": False, "mask_token_id": VOCAB - 1, "eos_token_id": VOCAB - 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"t{i}": i for i in range(VOCAB)}
    made_tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="t0"))
    made_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made_tokenizer.save(str(directory / "tokenizer.json"))
    return sum(value.nbytes for value in made.values())


def main() -> None:
    """Prints the best times of alternating runs, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        size = write(directory, args.megabytes, args.files)
        seconds: dict[str, list[float]] = {"safetensors": [], "dlm_jax": []}
        for turn in range(args.turns + 1):
            began = time.perf_counter()
            read = [safetensors.numpy.load_file(f) for f in directory.glob("*.safetensors")]
            plain = time.perf_counter() - began
            del read
            began = time.perf_counter()
            model = dlm_jax.load(directory)
            jax.block_until_ready(model.params)
            own = time.perf_counter() - began
            del model
            if turn:  # the first turn warms up
                seconds["safetensors"].append(plain)
                seconds["dlm_jax"].append(own)
    print(f"| {size / 1e6:.0f} MB bfloat16 | best s | median s | GB/s |")
    for name, taken in seconds.items():
        best = min(taken)
        print(f"| {name} | {best:.3f} | {np.median(taken):.3f} | {size / 1e9 / best:.2f} |")
    ratio = min(seconds["safetensors"]) / min(seconds["dlm_jax"])
    print(f"dlm_jax reads at {ratio:.0%} of the speed of safetensors")


if __name__ == "__main__":
    main()
