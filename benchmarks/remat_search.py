"""Ranks what a training step saves for its backward pass, by the compiler of TPUs.

Command: python -m benchmarks.remat_search --json benchmarks/results/remat.jsonl
    [--model 1.3B] [--topology v5p:4x4x4] [--rows 256] [--fsdp 16] [--compiler-options none]

Every candidate is a value of ``model.remat``. Candidates whose saved values would fill more than
half of a chip's memory are skipped. Each of the others is compiled in a process of its own, for
devices that need not be there; candidates that the file already holds are kept. The table is sorted
by the mean of both estimates of a step's time (`dlm_jax.contrib.pod_costs`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.pods import Row, measure, measured_apart, model_of
from dlm_jax.config import ModelConfig
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.model.layers import saved_bytes

CANDIDATES = (
    "attention",
    "attention+query+key+value+middle+gate+up",
    "attention+middle+gate+up",
    "attention+gate+up",
    "attention+value+gate+up",
    "attention+gate",
    "attention+query+key+value+middle",
    "attention+middle",
    "attention+up",
    "dots",
)


def fits(row: Row) -> bool:
    """Whether the saved values of a row fill at most half of a chip's memory."""
    devices = topology_devices(row.topology)
    config, chip = ModelConfig(**model_of(row)), CHIPS[devices[0].device_kind]
    names = "attention+query+key+value+middle+gate+up" if row.remat == "dots" else row.remat
    num_positions = row.rows * row.positions / len(devices)
    return saved_bytes(config, names, num_positions) <= chip.memory / 2


def table(results: list[dict[str, Any]]) -> list[str]:
    """The candidates, fastest first, as a table in Markdown."""
    lines = [
        "| model | topology | rows x L | options | saved | memory GiB (temporaries) | "
        "step ms (roof / cycles) | utilisation | compiled s |",
        "| --- " * 9 + "|",
    ]
    there = [one for one in results if "refused" not in one]
    for one in sorted(there, key=lambda one: one["roof"]["ms"] + one["cycles"]["ms"]):
        memory, roof, cycles = one["memory_gib"], one["roof"], one["cycles"]
        lines.append(
            f"| {one['model']} | {one['topology']} | {one['rows']} x {one['positions']} | "
            f"{' '.join(one['options']) or 'default'} | {one['remat']} | "
            f"{sum(memory.values()):.1f} ({memory['temporaries']:.1f}) | "
            f"{roof['ms']:.0f} / {cycles['ms']:.0f} | {100 * roof['utilisation']:.1f}% / "
            f"{100 * cycles['utilisation']:.1f}% | {one['compile_seconds']:.0f} |"
        )
    return lines


def main() -> None:
    """Measures the candidates that are missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are kept")
    parser.add_argument("--model", default="1.3B")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--fsdp", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=CANDIDATES, help="measure these candidates")
    parser.add_argument("--compiler-options", nargs="*", default=[], metavar="NAME=VALUE",
        help="as mesh.compiler_options; none: without the defaults of the chips")  # fmt: skip
    parser.add_argument("--candidate", help="measure this one alone, here, and print it as JSON")
    args = parser.parse_args()

    def row(remat: str) -> Row:
        return Row(args.model, args.topology, args.rows, fsdp=args.fsdp, remat=remat)

    options = tuple(args.compiler_options)
    if args.candidate:
        print(json.dumps(measure(row(args.candidate), options) | {"options": options}))
        return
    lines = args.json.read_text().splitlines() if args.json.exists() else []
    results = [json.loads(line) for line in lines]
    there = {(one["model"], one["topology"], one["rows"], one["remat"], *one["options"])
             for one in results}  # fmt: skip
    for remat in args.only:
        one = row(remat)
        key = (one.model, one.topology, one.rows, remat, *options)
        if key in there or not fits(one):
            continue
        flags = ["--json", str(args.json), "--model", args.model, "--topology", args.topology]
        flags += ["--rows", str(args.rows), "--fsdp", str(args.fsdp), "--candidate", remat]
        results.append(measured_apart("benchmarks.remat_search", flags, options))
        args.json.write_text("".join(json.dumps(one) + "\n" for one in results))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
