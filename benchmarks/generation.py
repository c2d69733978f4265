"""Compares generation with a plain PyTorch version of LLaDA's loop, on a CPU in float32.

    python -m benchmarks.generation --check     token for token: are both texts equal?
    python -m benchmarks.generation --speed     seconds of both, at equal forwards

Both frameworks get the same random weights, prompts and two threads. Each framework runs in a
separate process; the parent alternates between them and takes medians of calls from prompts to
tokens, after one call that compiles and warms up.
"""

from __future__ import annotations

import argparse
import os
import statistics

import numpy as np

from benchmarks.generation_pair import KINDS, SIZES, THREADS, Pair, cases, prompts_of


def check(sizes: list[str], batches: int) -> bool:
    """Whether both programs give the same tokens; prints the number of compared tokens.

    First, the logits of one forward must agree to 1e-4.
    """
    print("| size | case | forwards a row | new tokens compared | equal |\n| - | - | - | - | - |")
    all_equal = True
    for size in sizes:
        pair = Pair(size)
        tokens_BL = prompts_of(cases([size], ["plain"])[0], 0)
        ours, theirs = (pair.ask(name, "logits", tokens_BL)[0] for name in ("ours", "torch"))
        gap = float(np.abs(ours - theirs).max())
        all_equal &= gap < 1e-4
        print(f"| {size} | logits of one forward differ by {gap:.1e} at most | 1 | | |")
        for case in cases([size], list(KINDS)):
            compared = equal = 0
            for seed in range(batches):
                made = pair.generate(case, seed)
                ours, theirs = (made[name][0][:, case.num_given :] for name in ("ours", "torch"))
                compared, equal = compared + theirs.size, equal + int((ours == theirs).sum())
            all_equal &= equal == compared
            print(f"| {size} | {case.name} | {case.forwards} | {compared} | {equal} |", flush=True)
        pair.close()
    return all_equal


def speed(sizes: list[str], rounds: int) -> None:
    """Prints the median seconds of both programs over `rounds` calls, and the ratio."""
    print("| size | case | rows x positions | forwards a row | torch s | ours s | torch / ours |")
    print("| - | - | - | - | - | - | - |")
    for size in sizes:
        pair = Pair(size)
        for case in cases([size], ["blocks", "blocks and guidance"]):
            seconds: dict[str, list[float]] = {"ours": [], "torch": []}
            for turn in range(rounds + 1):
                for name, (_, taken) in pair.generate(case, turn).items():
                    seconds[name] += [taken] if turn else []
            ours, theirs = (statistics.median(seconds[name]) for name in ("ours", "torch"))
            # The ratio within a round depends little on the load of the machine.
            ratio = statistics.median(np.divide(seconds["torch"], seconds["ours"]).tolist())
            print(
                f"| {size} | {case.name} | {case.rows} x {case.length} | {case.forwards} "
                f"| {theirs:.2f} | {ours:.2f} | {ratio:.2f} |",
                flush=True,
            )
        pair.close()


def main() -> None:
    """Prints the selected tables, or all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("check", "speed"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", type=int, default=2, help="compared batches of prompts")
    parser.add_argument("--rounds", type=int, default=5, help="calls per median")
    args = parser.parse_args()
    # XLA starts a thread for each allowed core; the processes inherit the affinity.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    runs_all = not (args.check or args.speed)
    if args.speed or runs_all:
        speed(args.sizes, args.rounds)
    if (args.check or runs_all) and not check(args.sizes, args.batches):
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()
