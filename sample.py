"""Prints texts from a trained model: ``python sample.py --prompt "The " --num-samples 4``.

Only the texts go to standard output, separated by a line ``---``; progress and a summary go to
standard error. A flag that is not given takes what the checkpoint recommends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

import dlm_jax
from dlm_jax.command_line import refusals, start_jax
from dlm_jax.config import ORDERS, SCHEDULES, parse_flags

DEFAULT_CHECKPOINT = "runs/quickstart"


def make_parser() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = argparse.ArgumentParser(
        prog="sample.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", default=DEFAULT_CHECKPOINT, metavar="DIR", help="a run (%(default)s)")
    add("--prompt", default="", metavar="TEXT", help="text that every sample begins with")
    add("--num-samples", type=int, default=1, metavar="N", help="texts to print (1)")
    add("--gen-length", type=int, metavar="L", help="new tokens; 0: up to the canvas's end")
    add("--max-length", type=int, metavar="L", help="canvas of a row; default: as trained")
    add("--steps", type=int, metavar="S", help="denoising steps; more are slower and better")
    add("--temperature", type=float, metavar="T", help="of the draw; 0: the likeliest token")
    add("--order", metavar="NAME", help="what is committed first: " + ", ".join(ORDERS))
    add("--schedule", metavar="NAME", help="commits over the steps: " + ", ".join(SCHEDULES))
    add("--seed", type=int, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=int, default=64, metavar="B", help="rows that run at once (64)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused."""
    start_jax()
    with refusals():
        args, _ = parse_flags(make_parser(), argv)
        model = dlm_jax.load(args.checkpoint, report=lambda line: print(line, file=sys.stderr))
    began = time.perf_counter()
    with tqdm(desc="sample", unit="token") as bar, refusals():
        result = dlm_jax.generate(
            model,
            [args.prompt],
            num_samples=args.num_samples,
            gen_length=args.gen_length,
            max_length=args.max_length,
            steps=args.steps,
            temperature=args.temperature,
            order=args.order,
            schedule=args.schedule,
            seed=args.seed,
            batch_size=args.batch_size,
            on_commits=bar.update,
        )
    seconds = time.perf_counter() - began
    print("\n---\n".join(result.texts))
    generated = int((result.committed >= 0).sum())
    compiled = ", ".join(model.advance().compiled)
    print(
        f"{len(result.texts)} texts, {int(result.steps.sum())} steps, {generated} tokens in "
        f"{seconds:.2f} s ({generated / seconds:,.0f} tokens/s with compilation); "
        f"{len(model.advance().compiled)} compilation ({compiled})",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
