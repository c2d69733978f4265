"""Compares training recipes of a config, such as the quickstart's, at equal time on this machine.

Each recipe is timed for some steps, then trained for the number of steps that fit into the given
time; its learning-rate schedule ends at the last step. Compilation is excluded. The table has, for
each recipe, the steps, the held-out bound (nats per token; exact for a causal model), and the share
of generated words that are words of the training text, with the spread over the seeds. Recipes
alternate, so that slow periods of the machine affect all of them.

    python benchmarks/recipes.py --seconds 60 --seeds 0 1 2
    python benchmarks/recipes.py --steps 500 muon adamw      # equal steps instead
    python benchmarks/recipes.py --config shakespeare_bpe_blocks --seconds 240 \
        --judge runs/shakespeare_judge blocks "both ways" "left to right"
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli.common import start_jax
from dlm_jax.data import join_documents, read_documents, split_text
from dlm_jax.inference.generate import generate
from dlm_jax.inference.model import Model
from dlm_jax.training import prepare, run_loop
from dlm_jax.training.metrics import read_records

sys.path.insert(0, str(Path(__file__).parent))
from quality import distinct_share, judged_bits, known_share, words  # noqa: E402

ADAMW = {"optim.name": "adamw", "optim.learning_rate": "1e-3", "optim.weight_decay": "0.1"}
PLAIN = {"model.activation": "gelu", "model.qk_norm": "false"}
DENOISING = {"objective.denoising_share": "0.375", "objective.span_count": "2"}
RECIPES: dict[str, dict[str, str]] = {
    "muon": {},
    "muon, gelu": {"model.activation": "gelu"},
    "muon, swiglu": {"model.activation": "swiglu"},
    "muon, no qk-norm": {"model.qk_norm": "false"},
    "adamw": ADAMW,
    "adamw, lr 3e-3": ADAMW | {"optim.learning_rate": "3e-3"},
    "adamw, plain": ADAMW | PLAIN,
    "muon, ema 0.99": {"optim.ema_decay": "0.99"},
    "cosine schedule": {"objective.schedule": "cosine"},
    "polynomial schedule": {"objective.schedule": "polynomial"},
    "denoising 0.375": DENOISING,
    "denoising 0.375, identity targets": DENOISING | {"objective.identity_targets": "true"},
    "causal": {"model.attention_type": "causal"},
    "blocks": {},
    "both ways": {
        "model.attention_type": "bidirectional", "model.block_length": "0", "sample.cache": "none",
    },
    "left to right": {
        "model.attention_type": "causal", "model.block_length": "0",
        "objective.denoising_share": "0", "sample.order": "left_to_right",
    },
}  # fmt: skip
TIMED_STEPS = 40


def measure(
    base: str, overrides: dict[str, str], *, steps: int, seed: int, judge: Model | None = None
) -> dict[str, float]:
    """Trains once; returns bound, sample quality, and seconds per step without compilation."""
    with tempfile.TemporaryDirectory() as out_dir:
        given = {
            "train.steps": str(steps),
            "train.seed": str(seed),
            "train.out_dir": out_dir,
            "train.eval_every": "0",
            "train.checkpoint_every": "0",
            "train.sample_every": "0",
            "train.log_every": "10",
            "optim.warmup_steps": str(min(50, steps // 4)),
        }
        config = configs.load(base, given | overrides)
        run = prepare(config, report=lambda line: None)
        with run.checkpoints:
            outcome = run_loop(run)
        rates = [r["tokens_per_second"] for r in read_records(Path(out_dir) / "metrics.jsonl")
                 if r["kind"] == "train"]  # fmt: skip
    tokens = config.train.batch_size * config.data.seq_len
    seconds = tokens / statistics.median(rates[1:] or rates)
    if steps == TIMED_STEPS:
        return {"seconds": seconds}
    model = Model(run.network, outcome.state.best_params, run.corpus.tokenizer,
                  config.data.seq_len, config.sample,
                  is_causal=config.model.attention_type == "causal")  # fmt: skip
    texts = list(generate(model, num_samples=32, seed=1000).texts)
    text, _ = split_text(join_documents(read_documents(config.data.source)), config.data.held_out)
    judged = {} if judge is None else {"bits": judged_bits(judge, [t[:256] for t in texts])[0]}
    return judged | {
        "seconds": seconds,
        "bound": outcome.bound if outcome.bound is not None else float("nan"),
        "known": known_share(texts, set(words(text))),
        "distinct": distinct_share(texts, 4),
    }


def main() -> None:
    """Prints one JSON line per run, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of one run")
    parser.add_argument("--steps", type=int, help="equal steps instead of equal time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--config", default="quickstart", help="file, or name of a shipped config")
    parser.add_argument("--judge", metavar="RUN", help="a causal model that scores the texts")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all runs")
    args = parser.parse_args()
    start_jax()
    judge = None if args.judge is None else dlm_jax.load(args.judge)
    shared = dict(item.split("=", 1) for item in args.set)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.recipes}
    timed: dict[str, float] = {}
    for seed in args.seeds:
        for name in args.recipes:
            overrides = shared | (RECIPES[name] if name in RECIPES else _parse(name))
            steps = args.steps
            if steps is None:
                if name not in timed:
                    timed[name] = measure(
                        args.config, overrides, steps=TIMED_STEPS, seed=seed
                    )["seconds"]  # fmt: skip
                steps = max(TIMED_STEPS + 1, round(args.seconds / timed[name]))
            result = measure(args.config, overrides, steps=steps, seed=seed, judge=judge)
            result |= {"steps": steps, "seed": seed}
            results[name].append(result)
            print(json.dumps({"recipe": name} | result), file=sys.stderr, flush=True)
    columns = {"bound": "bound (nats/token)", "bits": "judged bits/char", "known": "known words",
               "distinct": "distinct 4-grams"}  # fmt: skip
    if judge is None:
        columns.pop("bits")
    print(f"| recipe | steps | ms/step | {' | '.join(columns.values())} |")
    print("| --- " * (3 + len(columns)) + "|")
    for name, runs in results.items():
        cells = [f"{statistics.mean(run['steps'] for run in runs):.0f}"]
        cells.append(f"{1e3 * statistics.mean(run['seconds'] for run in runs):.0f}")
        for key in columns:
            values = [run[key] for run in runs]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        print(f"| {name} | {' | '.join(cells)} |")


def _parse(text: str) -> dict[str, str]:
    """A recipe given as ``key=value,key=value``."""
    return dict(item.split("=", 1) for item in text.split(","))


if __name__ == "__main__":
    main()
