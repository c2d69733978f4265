"""What a causal model is worth to the diffusion model that it is turned into.

    python -m benchmarks.causal_to_diffusion [--source tinyshakespeare] [--steps 400]

A tiny Qwen3-like model of characters is trained causally and exported as a published directory.
Diffusion models then begin with that directory, with the shift of its predictions kept or dropped,
seeing both ways or in blocks, and beside each a fresh one of the same shape trains for as many
steps on the same rows. Figures are held-out bounds in nats per character.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.data import corpora

DEPTH, WIDTH, HEADS, INNER, LENGTH = 3, 96, 4, 256, 64
KINDS = {
    "both ways, shifted": {"model.logit_alignment": "shifted"},
    "both ways, same place": {},
    "blocks of 16, shifted": {
        "model.logit_alignment": "shifted", "model.attention_type": "block_causal",
        "model.block_length": "16",
    },
    "blocks of 16, same place": {
        "model.attention_type": "block_causal", "model.block_length": "16",
    },
}  # fmt: skip


def write(directory: Path, text: str) -> None:
    """A published directory of a causal model of characters with random weights."""
    letters = sorted(set(text))
    specials = ["<|endoftext|>", "<|mask|>"]
    made = tokenizers.Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=letters[0])
    )
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(specials)
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    vocab = len(letters) + len(specials)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "attention_bias": False, "head_dim": WIDTH // HEADS, "hidden_size": WIDTH,
        "intermediate_size": INNER, "max_position_embeddings": LENGTH,
        "num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": vocab, "eos_token_id": len(letters), "mask_token_id": len(letters) + 1,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocab, WIDTH), "lm_head.weight": (vocab, WIDTH),
              "model.norm.weight": (WIDTH,)}  # fmt: skip
    for layer in range(DEPTH):
        start, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        shapes |= {f"{attention}{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{attention}{part}_norm.weight": (WIDTH // HEADS,) for part in "qk"}
        shapes |= {f"{start}mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
        shapes[f"{start}mlp.down_proj.weight"] = (WIDTH, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{start}{name}.weight"] = (WIDTH,)
    tensors = {
        name: np.ones(shape, np.float32)
        if "norm" in name
        else (rng.standard_normal(shape) * (0.02 if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def trained(source: Path, out: Path, text: Path, steps: int, changes: dict[str, Any]) -> Any:
    """How a run that begins with a directory ended."""
    flags = {
        "train.init_from": str(source), "train.out_dir": str(out), "data.source": str(text),
        "data.seq_len": str(LENGTH), "train.steps": str(steps), "train.batch_size": "16",
        "train.eval_every": str(steps), "train.eval_windows": "256", "train.log_every": str(steps),
        "optim.name": "adamw", "optim.learning_rate": "2e-3", "optim.warmup_steps": "20",
        "data.cache_dir": str(out.parent / "cache"),
    } | changes  # fmt: skip
    return dlm_jax.train(configs.load(None, flags), report=lambda line: None)


def main() -> None:
    """Prints a row for every way to turn it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default="tinyshakespeare")
    parser.add_argument("--causal-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "\n\n".join(one.text for one in corpora.read_documents([args.source]))
        (folder / "text.txt").write_text(text)
        write(folder / "fresh", text)
        causal = {"model.attention_type": "causal", "sample.order": "left_to_right"}
        outcome = trained(
            folder / "fresh", folder / "run", folder / "text.txt", args.causal_steps, causal
        )
        dlm_jax.export(dlm_jax.load(folder / "run"), folder / "causal")
        print(f"causal, {args.causal_steps} steps: {outcome.bound:.3f} nats per character")
        print(f"| diffusion, {args.steps} steps | begun with the causal model | fresh |")
        print("| --- | --- | --- |")
        for number, (kind, changes) in enumerate(KINDS.items()):
            found = [
                trained(
                    folder / begin, folder / f"{begin}{number}", folder / "text.txt", args.steps,
                    changes,
                ).bound
                for begin in ("causal", "fresh")
            ]  # fmt: skip
            print(f"| {kind} | {found[0]:.3f} | {found[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
