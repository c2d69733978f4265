"""Prints texts from a trained model: ``python sample.py --prompt "ROMEO:" --num-samples 4``.

Without ``--checkpoint`` the model is the one that ships with the package, a small Shakespeare.
Only the texts go to standard output, separated by a line ``---``; progress, a summary and what
``--read-back`` and ``--report-chain`` tell go to standard error. A flag that is not given takes
what the checkpoint recommends.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

import dlm_jax
from dlm_jax.api import chain_report
from dlm_jax.command_line import Parser, refusals, start_jax
from dlm_jax.config import (
    SampleConfig,
    add_sample_flags,
    nearest,
    parse_flags,
    resolve,
    sample_settings,
)
from dlm_jax.data import Tokenizer
from dlm_jax.sampling.candidates import HostSampler, Written
from dlm_jax.sampling.params import in_use


def make_parser() -> Parser:
    """The flags of this program."""
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run or a weights file; default: the shipped model")
    add("--prompt", default="", metavar="TEXT", help="text that every sample begins with")
    add("--num-samples", type=int, default=1, metavar="N", help="texts to print (1)")
    add("--max-length", type=int, metavar="L", help="canvas of a row; default: as trained")
    add("--seed", type=int, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=int, default=64, metavar="B", help="rows that run at once (64)")
    add("--host-sampler", metavar="MODULE:FUNCTION", help="chooses tokens; docs/host_samplers.md")
    add("--read-back", type=int, metavar="K", help="print each token with its K best candidates")
    add("--max-candidates", type=int, default=64, metavar="N",
        help="of a position that a host sampler or --read-back sees at most (64)")  # fmt: skip
    add("--report-chain", action="store_true", help="print where each part of the chain runs")
    add_sample_flags(parser)
    return parser


def import_sampler(name: str) -> HostSampler:
    """What ``MODULE:FUNCTION`` names; a module may lie in the working directory.

    Raises:
      ValueError: it cannot be imported or called; the line says why.
    """
    module, _, function = name.partition(":")
    where = f"--host-sampler {name}"
    if not module or not function:
        raise ValueError(f"{where} is not MODULE:FUNCTION; write rules:only_digits, say")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a module of the user's may raise
        raise ValueError(f"{where}: {module} fails: {type(error).__name__}: {error}") from None
    if not hasattr(found, function):
        known = [known for known in vars(found) if not known.startswith("_")]
        raise ValueError(f"{where}: {module} has no {function!r}; {nearest(function, known)}")
    sampler: HostSampler = getattr(found, function)
    if not callable(sampler):
        raise ValueError(f"{where} is {sampler!r}, which cannot be called; name a function")
    return sampler


def read_back_line(record: Written, tokenizer: Tokenizer, size: int) -> str:
    """One committed token in words: place, probability, and the `size` likeliest candidates."""

    def piece(token: int) -> str:
        text = tokenizer.decode([token])
        return repr(text) if text else f"<{token}>"

    seen = record.candidates
    best = zip(seen.ids[:size].tolist(), seen.logits[:size].tolist(), strict=True)
    rivals = ", ".join(f"{piece(token)} {logit:.4g}" for token, logit in best)
    return (
        f"row {seen.row} step {seen.step} position {seen.index}: {piece(record.token)} "
        f"p={record.probability:.4g} of {seen.num_survivors} candidates: {rivals}"
    )


def _print_read_back(result: dlm_jax.Texts, args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    for record in (record for records in result.read_back for record in records):
        print(read_back_line(record, tokenizer, args.read_back), file=sys.stderr)


def _check_read_back(args: argparse.Namespace) -> None:
    size, limit = args.read_back, args.max_candidates
    if size is not None and size < 1:
        raise ValueError(f"--read-back {size} must be at least 1")
    if size is not None and size > limit >= 1:
        raise ValueError(
            f"--read-back {size} is more than --max-candidates {limit}; raise that to {size}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused."""
    start_jax()
    with refusals():
        args, _ = parse_flags(make_parser(), argv)
        names = [field.name for field in dataclasses.fields(SampleConfig)]
        settings = sample_settings({n: getattr(args, n) for n in names if hasattr(args, n)})
        sampler = import_sampler(args.host_sampler) if args.host_sampler is not None else None
        _check_read_back(args)
        model = dlm_jax.load(args.checkpoint, report=lambda line: print(line, file=sys.stderr))
        if args.report_chain:
            print(chain_report(model, host_sampler=sampler, **settings), file=sys.stderr)
        # All rows ask for the same, so nothing else needs to be compiled.
        sample = resolve(vars(model.sample), settings, kind=SampleConfig)
        settings["chain"] = in_use(sample, sample.chain)
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
            host_sampler=sampler,
            read_back=args.read_back is not None,
            max_candidates=args.max_candidates,
            on_commits=bar.update,
            **settings,
        )
    seconds = time.perf_counter() - began
    print("\n---\n".join(result.texts))
    generated = int((result.committed >= 0).sum())
    _print_read_back(result, args, model.tokenizer)
    draw = settings.get("draw", model.sample.draw)
    is_compiled_loop = sampler is None and args.read_back is None
    compiled = (model.advance if is_compiled_loop else model.host_loop)(draw=draw).compiled
    print(
        f"{len(result.texts)} texts, {int(result.steps.sum())} steps, {generated} tokens in "
        f"{seconds:.2f} s ({generated / seconds:,.0f} tokens/s with compilation); "
        f"{len(compiled)} compilation ({', '.join(compiled)})",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
