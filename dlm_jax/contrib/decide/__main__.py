"""Decides labelled prompts: ``python -m dlm_jax.contrib.decide --labelled LINES.jsonl``.

The model selects one of the labels for each line. The program prints accuracy, nats per line and
the expected calibration error. --fit FILE --task NAME fits the temperature and the length penalty
of a task to the lines, for ``dlm_jax.contrib.decide.decide``; --calibration FILE --task NAME uses
them.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import dlm_jax
from dlm_jax.contrib.decide.calibration import (
    ORDERS,
    Scale,
    calibrate_lengths,
    expected_calibration_error,
    nll,
    read_calibration,
    scale_of,
    write_calibration,
)
from dlm_jax.contrib.decide.decisions import Question, answers, question

_FIELDS = '{"prompt": ..., "choices": [...], "label": ...}'


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m dlm_jax.contrib.decide", description=__doc__)
    add = parser.add_argument
    add("--labelled", metavar="FILE", required=True, help=f"JSONL of {_FIELDS}")
    add("--checkpoint", metavar="PATH", help="a model, as for dlm_jax.load")
    add(
        "--order",
        default=ORDERS[0],
        metavar="ORDER",
        help=f"order of the tokens of a label: {' or '.join(ORDERS)} ({ORDERS[0]})",
    )
    add("--task", metavar="NAME", help="name of the task of --labelled")
    fit_help = "output file for the fitted scale of --task; other tasks in the file are kept"
    add("--fit", metavar="FILE", help=fit_help)
    add("--calibration", metavar="FILE", help="file that contains the scale of --task")
    add("--batch-size", type=int, default=16, metavar="B", help="rows per forward pass (16)")
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 2 for input that it refuses."""
    args = make_parser().parse_args(argv)
    try:
        _decide(args)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _decide(args: Namespace) -> None:
    """Prints the figures of the labelled lines; with ``--fit``, also writes the fitted scale."""
    if args.fit is not None and args.calibration is not None:
        raise ValueError("--fit and --calibration cannot be combined; remove one of them")
    if (args.task is None) != (args.fit is None and args.calibration is None):
        raise ValueError("--task requires --fit or --calibration, and vice versa")
    lines = _read(args.labelled).split("\n")
    model = dlm_jax.load() if args.checkpoint is None else dlm_jax.load(args.checkpoint)
    pairs = [
        _labelled(model, f"{args.labelled} line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not pairs:
        raise ValueError(f"{args.labelled} has no lines; add some")
    questions, right = zip(*pairs, strict=True)
    scale = Scale()
    if args.calibration is not None:
        scale = scale_of(args.task, read_calibration(args.calibration, model, order=args.order))
    found = answers(model, questions, order=args.order, batch_size=args.batch_size, scale=scale)
    if not all(np.isfinite(one.probabilities).all() for one in found):
        raise ValueError(f"{args.labelled}: the score is not finite")
    shares = [one.probabilities for one in found]
    if args.fit is not None:
        scores, sizes = [one.logprobs for one in found], [one.num_tokens for one in found]
        scale = calibrate_lengths(scores, sizes, right)
        shares = [scale.shares(*own) for own in zip(scores, sizes, strict=True)]
    hits = [int(own.argmax()) == k for own, k in zip(shares, right, strict=True)]
    record = {
        "lines": len(right),
        "accuracy": float(np.mean(hits)),
        "nats_per_line": nll(shares, right),
        "calibration_error": expected_calibration_error(shares, right),
        **scale._asdict(),
    }
    if args.fit is not None:
        write_calibration(args.fit, model, args.task, order=args.order, **record)
    if args.json:
        print(json.dumps({"source": args.labelled} | record))
        return
    print(
        f"{args.labelled}: accuracy {record['accuracy']:.4f}, {record['nats_per_line']:.4f} "
        f"nats/line, calibration error {record['calibration_error']:.4f} at temperature "
        f"{scale.temperature:.4f} and length penalty {scale.length_penalty:.4f} "
        f"({len(right)} lines)"
    )


def _labelled(model: dlm_jax.Model, where: str, line: str) -> tuple[Question, int]:
    """The question in a labelled line, and the index of the correct label."""
    try:
        told = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); write {_FIELDS}") from None
    if not isinstance(told, dict) or told.keys() != {"prompt", "choices", "label"}:
        raise ValueError(f"{where} has unexpected fields; write {_FIELDS}")
    if isinstance(told["choices"], dict):
        raise ValueError(f"{where}: choices={told['choices']} is not a list; write {_FIELDS}")
    try:
        made = question(model, told["prompt"], told["choices"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    (labels,) = made.choices.values()
    if str(told["label"]) not in labels:
        raise ValueError(f"{where}: label={told['label']!r} is not one of the choices")
    return made, labels.index(str(told["label"]))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; pass a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None


if __name__ == "__main__":
    raise SystemExit(main())
