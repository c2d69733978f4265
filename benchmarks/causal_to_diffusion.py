"""Benefit of a causal model as the initialisation of a diffusion model.

    python -m benchmarks.causal_to_diffusion [--source tinyshakespeare] [--steps 400]
    python -m benchmarks.causal_to_diffusion --show benchmarks/results/causal_to_diffusion.csv

A tiny Qwen3-like model of characters is trained causally and exported as a published directory.
Diffusion models then start from that directory, with the shift of its predictions kept or dropped,
bidirectional or block-causal. For comparison, a fresh model of the same shape trains for the same
steps on the same rows, from the initial random parameters of the causal model. Results are held-out
bounds in nats per character, over the same windows and masks. The CSV has all evaluations;
``--show`` prints its table.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli.common import start_jax
from dlm_jax.data import text as corpora
from dlm_jax.model.transformer import build
from dlm_jax.published import read_shape
from dlm_jax.training.metrics import read_records

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
BEGINS = ("causal", "fresh")
FIELDS: tuple[str, ...] = ("kind", "begins", "step", "nats", "standard_error")
_CAUSAL = "causal"


def write(directory: Path, text: str) -> None:
    """Writes a published directory of a causal character model with random parameters."""
    letters = sorted(set(text))
    made = tokenizers.Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=letters[0])
    )
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    shape = directory.parent / "shape"
    shape.mkdir()
    made.save(str(shape / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "attention_bias": False, "head_dim": WIDTH // HEADS, "hidden_size": WIDTH,
        "intermediate_size": INNER, "max_position_embeddings": LENGTH,
        "num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": len(letters) + 2, "eos_token_id": len(letters),
        "mask_token_id": len(letters) + 1,
    }  # fmt: skip
    (shape / "config.json").write_text(json.dumps(config))
    said, tokenizer = read_shape(shape)
    network = build(said)
    whole = configs.Config(model=said, sample=configs.SamplingParams(order="left_to_right"))
    model = dlm_jax.Model(
        network, network.init(jax.random.key(0)), tokenizer, max_length=LENGTH, config=whole,
        family="qwen3",
    )  # fmt: skip
    dlm_jax.export(model, directory)


def trained(source: Path, out: Path, text: Path, steps: int, changes: dict[str, Any]) -> list[Any]:
    """Trains a model initialised from a directory; returns the evaluations."""
    flags = {
        "train.init_from": str(source), "train.out_dir": str(out), "data.source": str(text),
        "data.seq_len": str(LENGTH), "train.steps": str(steps), "train.batch_size": "16",
        "train.eval_every": str(max(1, steps // 4)), "train.eval_windows": "256",
        "train.log_every": str(steps), "optim.name": "adamw", "optim.learning_rate": "2e-3",
        "optim.warmup_steps": "20", "data.cache_dir": str(out.parent / "cache"),
    } | changes  # fmt: skip
    dlm_jax.train(configs.load(None, flags), report=lambda line: None)
    return [r for r in read_records(out / "metrics.jsonl") if r["kind"] == "evaluation"]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All evaluations of all runs, the causal run first."""
    found: list[dict[str, Any]] = []

    def keep(kind: str, begins: str, records: list[Any]) -> None:
        found.extend(
            dict(
                zip(FIELDS, (kind, begins, r["step"], r["bound"], r["standard_error"]), strict=True)
            )
            for r in records
        )
        print(f"{kind}, {begins}: {records[-1]['bound']:.3f} nats per character", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "\n\n".join(one.text for one in corpora.read_documents([args.source]))
        (folder / "text.txt").write_text(text)
        write(folder / "fresh", text)
        causal = {"model.attention_type": "causal", "sample.order": "left_to_right"}
        where = (folder / "fresh", folder / "run", folder / "text.txt")
        keep(_CAUSAL, "fresh", trained(*where, args.causal_steps, causal))
        dlm_jax.export(dlm_jax.load(folder / "run"), folder / "causal")
        for number, (kind, changes) in enumerate(KINDS.items()):
            for begins in BEGINS:
                where = (folder / begins, folder / f"{begins}{number}", folder / "text.txt")
                keep(kind, begins, trained(*where, args.steps, changes))
    return found


def table(path: Path) -> list[str]:
    """The lines of the table, from the stored evaluations."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    last = {(row["kind"], row["begins"]): row for row in rows}

    def cell(kind: str, begins: str) -> str:
        row = last[kind, begins]
        return f"{float(row['nats']):.3f} ± {float(row['standard_error']):.3f}"

    steps = {row["step"] for (kind, _), row in last.items() if kind != _CAUSAL}
    if len(steps) != 1:
        raise ValueError(f"{path}: runs end at steps {sorted(steps)}; measure them together")
    lines = [
        f"| diffusion, {steps.pop()} steps | begun with the causal model | fresh |",
        "| --- | --- | --- |",
    ]
    return lines + [f"| {k} | {' | '.join(cell(k, begins) for begins in BEGINS)} |" for k in KINDS]


def main() -> None:
    """Prints one row per kind of conversion."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default="tinyshakespeare")
    parser.add_argument("--causal-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--csv", type=Path, default=Path("benchmarks/results/causal_to_diffusion.csv")
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print the table of a CSV")
    args = parser.parse_args()
    if args.show is None:
        start_jax()
        found = measure(args)
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    print("\n".join(table(args.show or args.csv)))


if __name__ == "__main__":
    main()
