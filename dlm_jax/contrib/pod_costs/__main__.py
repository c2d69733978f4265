"""Prints the plan of a run (``train.py --dry-run``) and estimates of the time of its steps.

At best, all operations except matrix products are bound by memory; at worst, they take the
compiler's estimate in cycles. Use the estimates to compare programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import dlm_jax.config
from dlm_jax.contrib.pod_costs import Mode, cost_of_plan, utilisation
from dlm_jax.training.plan import Plan, dry_run, lines

_MODES: dict[str, Mode] = {"at best": "roof", "at worst": "cycles"}


def estimates(plan: Plan) -> list[str]:
    """Lines with the collectives and times of a planned training step."""
    costs = {name: cost_of_plan(plan, mode) for name, mode in _MODES.items()}
    best = costs["at best"]
    moved = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in best.moved.items())
    found = [
        f"executed     {best.flops / 1e12:.2f} TFLOP per device and step, with recomputation",
        f"collectives  {moved or 'none'} GiB per device and step",
    ]
    if plan.chip is None:
        return [*found, "step not estimated: the peak performance of this device is unknown"]
    tokens = plan.config.train.batch_size * plan.config.data.seq_len
    return found + [
        f"{name:<12} {one.seconds * 1e3:.1f} ms per step ({one.exposed * 1e3:.1f} waiting for "
        f"collectives), {100 * utilisation(plan, one):.1f}% of the peak, "
        f"{tokens / one.seconds:,.0f} tokens/s"
        for name, one in costs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 2 for input that it refuses."""
    name = "python -m dlm_jax.contrib.pod_costs"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="TOML file, or name of a shipped config")
    parser.add_argument("--topology", metavar="NAME", default="", help="such as v5p:4x4x4")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the config")
    args = parser.parse_args(argv)
    try:
        keys = dict(pair.split("=", 1) for pair in args.keys)
        plan = dry_run(dlm_jax.config.load(args.config, keys), args.topology)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*lines(plan), *estimates(plan)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
