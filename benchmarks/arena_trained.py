"""Every decoder on the sources of `benchmarks.arena`, with trained networks.

    python -m benchmarks.arena_trained run
    python -m benchmarks.arena_trained table

One network with a sampler head is trained on 20,000 texts of each source. Errors are therefore
those of the network and of the decoder together. A stopped run continues where it ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
import dlm_jax.config
from benchmarks import arena
from benchmarks.arena import Settings, Setup
from benchmarks.arena_tasks import TRAINED
from dlm_jax.cli.common import start_jax
from dlm_jax.model.transformer import build
from dlm_jax.types import Network

RESULTS = "benchmarks/results/arena_trained.csv"
CHECKPOINTS = Path("runs/arena_sources")
LETTERS = "abcdefgh"
DOCUMENTS, NUMBER = 20_000, arena.QUICK_TEXTS
WAVES: list[Settings] = [
    {"fill": "wavefront", "order": order, "steps": steps}
    for order in ("random", "random_filled") for steps in (1, 2, 3, 4)
]  # fmt: skip
DECODERS = arena.DECODERS | TRAINED | {"waves": WAVES}
TRAINING = {
    "model.depth": 2, "model.width": 64, "model.heads": 4, "model.add_sampler_head": True,
    "model.sampler_residual": True, "data.layout": "documents", "data.tail": "pad",
    "data.seq_len": arena.LONGEST + 1, "optim.learning_rate": 0.03,
    "optim.adam_learning_rate": 0.006, "optim.warmup_steps": 100, "optim.final_ratio": 0.0,
    "heads.start_sampler_iteration": 0, "heads.sampler_reveal": 0.7, "heads.learning_rate": 0.003,
    "train.steps": 1500, "train.batch_size": 128, "train.eval_every": 0,
    "train.checkpoint_every": 500, "train.log_every": 500, "sample.gen_length": arena.LONGEST,
    "sample.steps": arena.LONGEST, "sample.order": "random",
}  # fmt: skip


def texts_of(source: str) -> list[str]:
    """Independent texts of a source, and one with all letters, which makes vocabularies equal."""
    law = arena.sources()[source]
    share_S = np.array(list(law.values()))
    drawn = np.random.default_rng(0).choice(len(law), DOCUMENTS, p=share_S / share_S.sum())
    words = ["".join(LETTERS[token] for token in text) for text in law]
    return [LETTERS, *(words[index] for index in drawn)]


def trained(source: str) -> dlm_jax.Model:
    """The trained model of a source."""
    directory = CHECKPOINTS / source
    corpus = CHECKPOINTS / f"{source}.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(source)))
    values = TRAINING | {"data.source": str(corpus), "train.out_dir": str(directory)}
    config = dlm_jax.config.load(None, {name: str(value) for name, value in values.items()})
    outcome = dlm_jax.train(config, report=print)
    assert outcome.reason == "finished"
    return dlm_jax.load(directory)


@functools.cache
def network(model: Any) -> Network:
    """The network of all sources, so that one program serves all."""
    return build(model)


def setup_of(model: dlm_jax.Model, source: str) -> Setup:
    """The trained network of a source. EOS is given, since all texts have the same length."""
    assert model.config is not None
    tokenizer, net = model.tokenizer, network(model.config.model)
    banned = tokenizer.mask_id, tokenizer.pad_id, tokenizer.eos_id
    token_of = np.full(net.vocab_size, arena.PAD)
    token_of[tokenizer.encode(LETTERS)] = np.arange(len(LETTERS))
    return Setup(
        arena.advance_of(net, tokenizer.mask_id, tokenizer.pad_id, banned), model.params,
        len(next(iter(arena.sources()[source]))), arena.LONGEST + 1, tokenizer.mask_id,
        dataclasses.replace(model.facts, banned_ids=banned), tokenizer.pad_id, token_of,
        tokenizer.eos_id,
    )  # fmt: skip


def run(path: str) -> None:
    """Trains the networks, and measures what the CSV lacks."""
    lines = arena.read(path) if Path(path).exists() else []
    done = {(line["source"], line["decoder"]) for line in lines}
    for source in arena.sources():
        setup = setup_of(trained(source), source)
        for decoder, grid in DECODERS.items():
            if (source, decoder) not in done:
                arena.append(path, list(arena.measured(source, decoder, NUMBER, setup, grid)))


def main() -> None:
    """Runs a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["run", "table"])
    parser.add_argument("--csv", default=RESULTS)
    args = parser.parse_args()
    if args.part == "run":
        start_jax()
        run(args.csv)
    else:
        arena.rows(arena.read(args.csv), list(DECODERS))


if __name__ == "__main__":
    main()
