"""Trains a masked diffusion language model: ``python train.py --config configs/quickstart.toml``.

Every field of the config is a flag (``--train.steps 100``). The files of a run are in
``train.out_dir``: checkpoints, the best model, ``config.toml`` and ``metrics.jsonl``. The same
command resumes the run, and so does ``--resume runs/quickstart``. Samples are printed to standard
output, and all other output to standard error. ``loss.png`` is drawn at the end, and by
``--plot RUN`` at any time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import jax

import dlm_jax.config as configs
from dlm_jax import __version__
from dlm_jax.cli.common import (
    Parser,
    add_host_flags,
    join_hosts,
    refuse_lone_host_flags,
    start_jax,
)
from dlm_jax.cli.ends import End, code_of, emit, end_of, program, refusals, say_error
from dlm_jax.config import Config
from dlm_jax.data import DamagedShard
from dlm_jax.distributed.processes import run_together
from dlm_jax.inference.generate import generate
from dlm_jax.inference.model import Model, untrained_heads
from dlm_jax.training import Outcome, Run, describe, prepare, run_loop, say
from dlm_jax.training.init_from import config_of_run
from dlm_jax.training.metrics import METRICS, PICTURE, plot_losses, read_records
from dlm_jax.training.plan import dry_run
from dlm_jax.training.train_step import TrainState

NUM_SAMPLES = 3


@program
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="train.py", description=__doc__)
    add = parser.add_argument
    config_help = f"TOML file, or the name of a shipped config: {', '.join(configs.shipped())}"
    add("--config", metavar="FILE", help=config_help)
    add("--resume", metavar="RUN", help="resume the run in this directory")
    add("--print-config", action="store_true", help="print the config as TOML and exit")
    add("--profile", metavar="FIRST:LAST", help="write a profile of these steps, such as 10:13")
    add("--version", action="version", version=f"dlm_jax {__version__}")
    plot_help = f"draw {PICTURE} of the run in this directory, which may still train, and exit"
    add("--plot", metavar="RUN", help=plot_help)
    dry_help = (
        "compile the training step and print its mesh, sharding, memory and FLOPs; nothing is run "
        "or written"
    )
    add("--dry-run", action="store_true", help=dry_help)
    place_help = "a dry run for a TPU topology, such as v5e:4x4 or v5p:8x8x8"
    add("--topology", metavar="NAME", default="", help=place_help)
    add_host_flags(parser)
    configs.add_flags(parser)
    with refusals():
        args, overrides = configs.parse_flags(parser, argv)
        refuse_lone_host_flags(args)
        join_hosts(args)
    return run_together(lambda: _main(args, overrides), code_of, end_of)


def _main(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    with refusals():
        if args.plot is not None:
            out_dir = Path(args.plot)
            if not (records := read_records(out_dir / METRICS)):
                raise ValueError(f"--plot {out_dir} has no {METRICS}; pass the directory of a run")
            plot_losses(records, out_dir / PICTURE)
            say(f"wrote {out_dir / PICTURE}")
            return End.DONE
        config = _config(args, overrides)
        if args.print_config or args.dry_run or args.topology:
            if args.print_config:
                text = configs.to_toml(config).removesuffix("\n")
            else:
                text = "\n".join(dry_run(config, args.topology, say).lines())
            if not args.distributed or jax.process_index() == 0:
                emit(text)
            return End.DONE
        profile = None if args.profile is None else parse_span(args.profile)
        start_jax()
        run = prepare(config, report=say)
    with run.checkpoints:
        describe(run)
        try:
            outcome = run_loop(run, show_sample=show_sample, profile=profile)
        except DamagedShard as error:
            # Raised, because a process that returns waits for the others.
            say_error(error)
            raise SystemExit(End.REFUSED) from None
    return finish(outcome)


def _config(args: argparse.Namespace, overrides: dict[str, str]) -> Config:
    if args.resume is None:
        return configs.load(args.config, overrides)
    if args.config is not None:
        raise ValueError("--resume and --config cannot be combined; a run has its own config")
    if "train.out_dir" in overrides:
        raise ValueError("--train.out_dir has no effect with --resume, which sets it; remove it")
    return configs.override(config_of_run(Path(args.resume)), overrides)


def parse_span(text: str) -> tuple[int, int]:
    """Parses the first and last step in ``FIRST:LAST``, both counted from 1 as in the metrics.

    Raises:
      ValueError: invalid span.
    """
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile {text!r} is not FIRST:LAST; write two steps, counted from 1, such as 10:13"
        )
    return first, last


def show_sample(run: Run, state: TrainState, step: int) -> None:
    """Prints one sample to standard error during training."""
    for text in _texts(run, state, num_samples=1, seed=run.config.train.seed):
        say(f"--- sample at step {step}\n{text}\n---")


def _texts(run: Run, state: TrainState, *, num_samples: int, seed: int = 0) -> tuple[str, ...]:
    """Texts from the current model, in the first process; empty in all other processes.

    All processes must call this function, because each samples its part of the rows with its shard
    of the parameters. If sampling fails, the reason is printed and no text is returned, because a
    failed sample must not end the run.
    """
    try:
        model = Model(
            network=run.network,
            params=state.best_params,
            tokenizer=run.corpus.tokenizer,
            max_length=run.config.data.seq_len,
            sample=run.config.sample,
            untrained=untrained_heads(run.config, int(state.step)),
            compiler_options=run.config.mesh.compiler_options,
        )
        texts = generate(model, num_samples=num_samples, seed=seed).texts
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        say(f"warning: sampling failed: {' '.join(str(error).split())[:200]}")
        return ()
    return texts if jax.process_index() == 0 else ()


def finish(outcome: Outcome) -> int:
    """Reports how the run ended, prints samples, and returns the exit code."""
    run = outcome.run
    if outcome.reason == "non_finite":
        return End.NOT_FINITE
    if outcome.reason == "interrupted":
        say(f"interrupted: saved at step {outcome.step}; the same command resumes the run")
        return 128 + outcome.signal_number
    place = run.config.train.checkpoint_dir or run.out_dir
    elsewhere = "" if str(place) == str(run.out_dir) else f", checkpoints in {place}"
    say(f"finished: the run is in {run.out_dir}{elsewhere}")
    say(f"sample more with: python sample.py --checkpoint {place}")
    if jax.process_index() == 0:
        try:
            if records := read_records(run.out_dir / METRICS):
                plot_losses(records, run.out_dir / PICTURE)
        except (ValueError, OSError) as error:  # The run has ended well without its plot.
            say(f"no {PICTURE}: {error}")
    if texts := _texts(run, outcome.state, num_samples=NUM_SAMPLES):
        emit("\n---\n".join(texts))
    return End.DONE


if __name__ == "__main__":
    raise SystemExit(main())
