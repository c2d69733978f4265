"""Trains a masked diffusion language model: ``python train.py --config configs/quickstart.toml``.

Every field of the config is a flag (``--train.steps 100``). The run lives in ``train.out_dir``:
checkpoints, ``metrics.jsonl`` and ``loss.png``. Started again, it continues where it was stopped.
Samples are printed on standard output, everything else on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

import dlm_jax.config as configs
from dlm_jax.api import Model, generate
from dlm_jax.command_line import add_host_flags, refusals, start_jax
from dlm_jax.training.loop import Outcome, train
from dlm_jax.training.run import Run, prepare
from dlm_jax.training.step import TrainState

NUM_SAMPLES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 finished, 1 not finite, 2 refused, 128 + signal when interrupted."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file; see configs/ for examples")
    add_host_flags(parser)
    configs.add_flags(parser)
    with refusals():
        args, overrides = configs.parse_flags(parser, argv)
        config = configs.load(args.config, overrides)
        start_jax(args)
        run = prepare(config, report=say)
    with run.checkpoints:
        describe(run)
        outcome = train(run, show_sample=lambda state, step: show_samples(run, state, step))
    return finish(run, outcome)


def say(line: str) -> None:
    """Prints a line on standard error, above the progress bar; on the first process alone."""
    if jax.process_index() == 0:
        tqdm.write(line, file=sys.stderr)


def describe(run: Run) -> None:
    """Says what is about to be trained, on what, and where."""
    size = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    corpus, mesh = run.corpus, dict(run.mesh.shape)
    say(
        f"{corpus.name}: {corpus.num_train_tokens:,} tokens to train on, "
        f"{corpus.num_val_tokens:,} held out, vocabulary {corpus.tokenizer.vocab_size}"
    )
    say(f"model of {size:,} parameters on {jax.default_backend()}, mesh {mesh}")
    if run.first_step:
        say(f"continuing {run.out_dir} from step {run.first_step}")


def as_model(run: Run, state: TrainState) -> Model:
    """The model as it stands, to sample from."""
    return Model(
        network=run.network,
        params=state.params,
        tokenizer=run.corpus.tokenizer,
        max_length=run.config.data.seq_len,
        sample=run.config.sample,
    )


def show_samples(run: Run, state: TrainState, step: int) -> None:
    """Shows one sample on standard error while training."""
    (text,) = generate(as_model(run, state), seed=run.config.train.seed).texts
    say(f"--- sample at step {step}\n{text}\n---")


def finish(run: Run, outcome: Outcome) -> int:
    """Exit code; says how the run ended, and prints samples if it finished."""
    if outcome.reason == "non_finite":
        return 1
    if outcome.reason == "interrupted":
        say(f"interrupted: saved at step {outcome.step}; the same command continues")
        return 128 + outcome.signal_number
    texts: Any = generate(as_model(run, outcome.state), num_samples=NUM_SAMPLES).texts
    say(f"finished: {run.out_dir} holds checkpoints, metrics.jsonl and loss.png")
    say(f"sample more with: python sample.py --checkpoint {run.out_dir}")
    if jax.process_index() == 0:
        print("\n---\n".join(texts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
