"""Memory and estimated time of training steps on TPU pods that may be absent (extra ``tpu``).

    python -m benchmarks pods [--json FILE] [--only NAME ...] [--list] [--quick]

The table has the memory, the collectives and the time of a step, with the figures in
benchmarks/results/scaling.json. Every row is compiled in a separate process that takes one to six
minutes of one core. Rows that are in the file already are kept.

Times are estimates. ``roof`` assumes that all operations except products are bound by memory
bandwidth; ``cycles`` uses the compiler's cycles. The compiler estimates no cycles of a Pallas
kernel, but writes its schedule, whose bundles start in one cycle each; waiting for memory is not
counted. Utilisation is the work of the model (`dlm_jax.training.plan`) divided by the peak of the
chips.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import parser_of, print_machine
from dlm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from dlm_jax.contrib.pod_costs import cost_of_plan, utilisation
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.training.plan import plan

MODELS: dict[str, dict[str, Any]] = {
    "150M": {"depth": 12, "width": 896, "heads": 14, "vocab_size": 32768},
    "1.3B": {"depth": 24, "width": 2048, "heads": 16, "vocab_size": 32768},
    "8B": {
        "depth": 32, "width": 4096, "heads": 32, "mlp_width": 12288, "vocab_size": 126464,
        "tied_head": False,
    },
}  # fmt: skip
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table; ``topology`` is as in ``train.py --topology``."""

    model: str
    topology: str
    rows: int
    positions: int = 4096
    optimizer: str = "adamw"
    fsdp: int = 16
    tensor: int = 1
    remat: str = "attention"

    @property
    def name(self) -> str:
        """The row's name in the file."""
        return " ".join(map(str, dataclasses.astuple(self)))


QUICK = Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=1)
ROWS = [
    # Models and optimisers on a cube of 64 chips.
    Row("1.3B", "v5p:4x4x4", 256),
    Row("1.3B", "v5p:4x4x4", 256, optimizer="muon"),
    Row("8B", "v5p:4x4x4", 128),
    # Cost of rematerialisation.
    Row("1.3B", "v5p:4x4x4", 64, remat="none"),
    Row("1.3B", "v5p:4x4x4", 256, remat="block"),
    Row("1.3B", "v5p:4x4x4", 256, remat="attention+gate+up"),
    Row("8B", "v5p:4x4x4", 128, remat="attention+gate+up"),
    # Strong scaling: the same rows on more chips; weak scaling: the same rows per chip.
    Row("1.3B", "v5p:2x4x4", 256),
    Row("1.3B", "v5p:4x4x8", 256),
    Row("1.3B", "v5p:4x4x8", 512),
    Row("1.3B", "v5p:4x4x4*2", 256),
    Row("1.3B", "v5e:16x16", 512),
    Row("8B", "v5e:16x16", 256, fsdp=256),
    # The small model on the small board, with all meshes.
    QUICK,
    Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=16),
    Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=4, tensor=2),
    # Split matrices, and long rows.
    Row("1.3B", "v5p:4x4x4", 128, fsdp=8, tensor=2),
    Row("1.3B", "v5p:4x4x4", 64, 32768),
]


def config_of(row: Row, options: tuple[str, ...] = ()) -> Config:
    """The config of a row's run, with these ``mesh.compiler_options``."""
    return Config(
        model=ModelConfig(
            **MODELS[row.model], activation="swiglu", compute_dtype="bfloat16", remat=row.remat
        ),
        data=DataConfig(seq_len=row.positions),
        optim=OptimConfig(name=row.optimizer, weight_decay=0.1),  # type: ignore[arg-type]
        train=TrainConfig(batch_size=row.rows),
        mesh=MeshConfig(fsdp=row.fsdp, tensor=row.tensor, compiler_options=options),
    )


@contextlib.contextmanager
def kernel_schedules(*names: str) -> Iterator[Callable[[], dict[str, str]]]:
    """A function that returns the schedules of kernels compiled in this context, by name.

    `names` are regular expressions. Kernels of the same name differ in a number at its end. The
    process must not have loaded the TPU library before.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Read when the TPU library is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.* "
            + os.environ.get("LIBTPU_INIT_ARGS", "")
        )

        def schedules() -> dict[str, str]:
            named = re.compile(rf"\d+-((?:{'|'.join(names)})(?:\.\d+)?)-01-final_bundles\.txt")
            found = ((named.fullmatch(path.name), path) for path in Path(folder).iterdir())
            return {match.group(1): path.read_text() for match, path in found if match}

        yield schedules


def kernel_seconds(schedules: dict[str, str], clock: float) -> dict[str, float]:
    """The seconds of kernels by name, where every step of the grid takes all branches.

    A name without its number has the longest time of its kernels. The compiler writes one schedule
    for equal kernels. A bundle in a loop counts once per iteration.
    """
    seconds: dict[str, float] = {}
    for name, text in schedules.items():
        lines = re.findall(r"^ *(?:0x[0-9a-f]+|0) .*$", text, re.MULTILINE)
        begin = next((i for i, line in enumerate(lines) if " LB: " in line), 0)
        ends = [i for i, line in enumerate(lines) if "loop exit test" in line]
        number = re.search(r", (\d+) /\* loop exit test", lines[ends[-1]]) if ends else None
        times = int(number.group(1)) if number else 1
        seconds[name] = ((ends[-1] + 1 if ends else len(lines)) - begin) * times / clock
        whole = name.split(".")[0]
        seconds[whole] = max(seconds.get(whole, 0.0), seconds[name])
    return seconds


def measure(row: Row, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The figures of a row: GiB, TFLOP and milliseconds per chip and step."""
    with kernel_schedules("rotary", "rotary_gradients") as schedules:
        devices, config = topology_devices(row.topology), config_of(row, options)
        mesh, began = make_mesh(config.mesh, devices), time.perf_counter()
        try:
            planned = plan(config, mesh)
        except ValueError as error:
            return dataclasses.asdict(row) | {"refused": str(error)}
        seconds = time.perf_counter() - began
        kernels = kernel_seconds(schedules(), CHIPS[devices[0].device_kind].clock)
    roof = cost_of_plan(planned)
    estimates = {
        mode: {
            "ms": round(one.seconds * 1e3, 2),
            "exposed_ms": round(one.exposed * 1e3, 2),
            "utilisation": round(utilisation(planned, one), 4),
        }
        for mode, one in (("roof", roof), ("cycles", cost_of_plan(planned, "cycles", kernels)))
    }
    return {
        **dataclasses.asdict(row),
        "parameters": planned.num_parameters,
        "chips": mesh.size,
        "memory_gib": {name: round(size / GIB, 3) for name, size in planned.memory.items()},
        "moved_gib": {kind: round(n / GIB, 3) for kind, n in roof.moved.items()},
        "model_tflop": round(planned.flops / 1e12, 2),
        "executed_tflop": round(roof.flops / 1e12, 2),
        "unknown_loops": roof.unknown_loops,
        "compile_seconds": round(seconds, 1),
        **estimates,
    }


def measure_apart(program: str, name: str, options: list[str]) -> dict[str, Any]:
    """The figures of a row, from a process of its own, which frees the compiler's memory."""
    command = [sys.executable, "-m", "benchmarks", program, "--row", name]
    command += ["--compiler-options", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


HEADER = (
    "| model | topology | rows x L | optimiser | mesh | remat | memory GiB (temporaries) | "
    "all-reduce + all-gather (+ reduce-scatter) GiB | step ms (roof / cycles) | utilisation |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
MOVED = ("all-reduce", "all-gather", "reduce-scatter")


def line_of(one: dict[str, Any]) -> str:
    """The figures of a row as a line of the table."""
    cells = [one["model"], one["topology"], f"{one['rows']} x {one['positions']}"]
    cells += [one["optimizer"], f"fsdp {one['fsdp']}, tensor {one['tensor']}", one["remat"]]
    if "refused" in one:
        cells += ["does not fit", "", "", ""]
    else:
        memory, moved = one["memory_gib"], one["moved_gib"]
        pairs = [(one["roof"][key], one["cycles"][key]) for key in ("ms", "utilisation")]
        cells += [f"{sum(memory.values()):.1f} ({memory['temporaries']:.1f})"]
        cells += [" + ".join(f"{moved[kind]:.1f}" for kind in MOVED if kind in moved)]
        cells += [" / ".join(f"{ms:.0f}" for ms in pairs[0])]
        cells += [" / ".join(f"{100 * share:.1f}%" for share in pairs[1])]
    return f"| {' | '.join(cells)} |"


def run(
    program: str,
    doc: str | None,
    rows: Mapping[str, Any],
    quick: str,
    measure: Callable[[Any, tuple[str, ...]], dict[str, Any]],
    header: str,
    line_of: Callable[[dict[str, Any]], str],
) -> None:
    """Measures the missing rows by name, one process after the other, and prints the table."""
    parser = parser_of(doc)
    parser.add_argument("--only", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--compiler-options", nargs="*", default=[], metavar="NAME=VALUE",
        help="like mesh.compiler_options; none: no default options")  # fmt: skip
    parser.add_argument("--row", help=argparse.SUPPRESS)  # measured in this process
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(rows[args.row], tuple(args.compiler_options))))
        return
    if args.list:
        print("\n".join(rows))
        return
    only = [quick] if args.quick else args.only
    stored = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    jax.config.update("jax_platforms", "cpu")
    print_machine()
    print(header)
    for name in rows:
        if name not in stored and (not only or any(part in name for part in only)):
            stored[name] = measure_apart(program, name, args.compiler_options)
            stored = {one: stored[one] for one in rows if one in stored}
            if args.json:
                args.json.write_text(json.dumps(stored, indent=1) + "\n")
        if name in stored:
            print(line_of(stored[name]), flush=True)


if __name__ == "__main__":
    rows = {row.name: row for row in ROWS}
    run("pods", __doc__, rows, QUICK.name, measure, HEADER, line_of)
