"""Prints texts from a trained model: ``python sample.py --prompt "The " --num-samples 4``.

Only the texts go to standard output, separated by a line ``---``; progress and a summary go to
standard error. A flag that is not given takes what the checkpoint recommends.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

import dlm_jax
from dlm_jax.command_line import Parser, refusals, start_jax
from dlm_jax.config import SampleConfig, add_sample_flags, parse_flags, sample_settings

DEFAULT_CHECKPOINT = "runs/quickstart"


def make_parser() -> Parser:
    """The flags of this program."""
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", default=DEFAULT_CHECKPOINT, metavar="DIR", help="a run (%(default)s)")
    add("--prompt", default="", metavar="TEXT", help="text that every sample begins with")
    add("--num-samples", type=int, default=1, metavar="N", help="texts to print (1)")
    add("--max-length", type=int, metavar="L", help="canvas of a row; default: as trained")
    add("--seed", type=int, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=int, default=64, metavar="B", help="rows that run at once (64)")
    add_sample_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused."""
    start_jax()
    with refusals():
        args, _ = parse_flags(make_parser(), argv)
        names = [field.name for field in dataclasses.fields(SampleConfig)]
        settings = sample_settings({n: getattr(args, n) for n in names if hasattr(args, n)})
        model = dlm_jax.load(args.checkpoint, report=lambda line: print(line, file=sys.stderr))
    began = time.perf_counter()
    # The bar waits, so that a refusal stands alone.
    with refusals(), tqdm(desc="sample", unit="token", delay=1) as bar:
        result = dlm_jax.generate(
            model,
            [args.prompt],
            num_samples=args.num_samples,
            max_length=args.max_length,
            seed=args.seed,
            batch_size=args.batch_size,
            on_commits=bar.update,
            **settings,
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
