"""Memory and estimated time of programs on TPU pods that may be absent (extra ``tpu``).

    python -m benchmarks pods [train | sample | logits] [--json FILE] [--only NAME ...] [--list]

``train``: a training step (memory, collectives, time), with the figures in
benchmarks/results/scaling.json. ``sample``: the parts of a sampling step (see
`benchmarks/sampling_pods.py`), in benchmarks/results/sampling_pods.jsonl. ``logits``: the logit
chain (see `benchmarks/logit_chain.py`).

Every row is compiled in a separate process that takes one to six minutes of one core. Rows that are
in the file already are kept. ``roof`` assumes that all operations except products are bound by
memory bandwidth; ``cycles`` uses the compiler's cycles. Both are estimates. Utilisation is the work
of the model (`dlm_jax.training.plan`) divided by the peak of the chips.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SamplingParams,
    TrainConfig,
)

MODELS: dict[str, dict[str, Any]] = {
    "150M": {"depth": 12, "width": 896, "heads": 14, "vocab_size": 32768},
    "1.3B": {"depth": 24, "width": 2048, "heads": 16, "vocab_size": 32768},
    "8B": {
        "depth": 32, "width": 4096, "heads": 32, "mlp_width": 12288, "vocab_size": 126464,
        "tied_head": False,
    },
}  # fmt: skip


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
    block_length: int = 0

    @property
    def name(self) -> str:
        """The row's name in the file."""
        *values, block = dataclasses.asdict(self).values()
        return " ".join([*map(str, values), *([f"blocks {block}"] if block else [])])


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
    Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=1),
    Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=16),
    Row("150M", "v5e:4x4", 128, 1024, "muon", fsdp=4, tensor=2),
    # Split matrices, and long rows.
    Row("1.3B", "v5p:4x4x4", 128, fsdp=8, tensor=2),
    Row("1.3B", "v5p:4x4x4", 64, 32768),
]


def model_of(row: Row) -> dict[str, Any]:
    """The settings of a row's model."""
    return MODELS[row.model] | {"activation": "swiglu", "compute_dtype": "bfloat16"}


def config_of(row: Row, options: tuple[str, ...] = ()) -> Config:
    """The config of a row's run, with these ``mesh.compiler_options``."""
    model = model_of(row) | {"remat": row.remat, "block_length": row.block_length}
    if row.block_length:
        model["attention_type"] = "block_causal"
    return Config(
        model=ModelConfig(**model),  # type: ignore[arg-type]
        data=DataConfig(seq_len=row.positions),
        optim=OptimConfig(name=row.optimizer, weight_decay=0.1),  # type: ignore[arg-type]
        train=TrainConfig(batch_size=row.rows),
        mesh=MeshConfig(fsdp=row.fsdp, tensor=row.tensor, compiler_options=options),
    )


def measure(row: Row, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The figures of a row: GiB, TFLOP and milliseconds per chip and step."""
    from benchmarks import bundles
    from dlm_jax.contrib.pod_costs import cost_of_plan, utilisation
    from dlm_jax.distributed.mesh import CHIPS, topology_devices
    from dlm_jax.distributed.partitions import make_mesh
    from dlm_jax.training.plan import plan

    with bundles.written("rotary", "rotary_gradients") as schedules:
        devices, config = topology_devices(row.topology), config_of(row, options)
        mesh, began = make_mesh(config.mesh, devices), time.perf_counter()
        try:
            found = plan(config, mesh)
        except ValueError as error:
            return dataclasses.asdict(row) | {"refused": str(error)}
        seconds = time.perf_counter() - began
        kernels = bundles.seconds(schedules(), CHIPS[devices[0].device_kind].clock)
    gib, best = 2.0**30, cost_of_plan(found)
    estimates = {
        mode: {
            "ms": round(one.seconds * 1e3, 2),
            "exposed_ms": round(one.exposed * 1e3, 2),
            "utilisation": round(utilisation(found, one), 4),
        }
        for mode, one in (
            ("roof", best),
            ("cycles", cost_of_plan(found, "cycles", kernels)),
        )
    }
    return (
        dataclasses.asdict(row)
        | {
            "parameters": found.num_parameters,
            "chips": mesh.size,
            "memory_gib": {name: round(size / gib, 3) for name, size in found.memory.items()},
            "moved_gib": {kind: round(n / gib, 3) for kind, n in best.moved.items()},
            "model_tflop": round(found.flops / 1e12, 2),
            "executed_tflop": round(best.flops / 1e12, 2),
            "unknown_loops": best.unknown_loops,
            "compile_seconds": round(seconds, 1),
        }
        | estimates
    )


def sampling_step(
    model: ModelConfig,
    sample: SamplingParams,
    mesh: Any,
    rows: int,
    positions: int,
    *,
    options: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """The compiled loop of sampling steps of empty canvases on `mesh`, and its initial state.

    Parameters are bfloat16, sharded as in `dlm_jax.distributed.partitions`; MASK is the last id.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from dlm_jax.devices import used
    from dlm_jax.distributed import compiler
    from dlm_jax.distributed.partitions import axes_of, shardings
    from dlm_jax.model.transformer import build
    from dlm_jax.sampling.forward import with_cache
    from dlm_jax.sampling.loop import Advance, start
    from dlm_jax.sampling.program import Program, RowParams
    from dlm_jax.sampling.rules import ModelFacts

    network, mask = build(model), model.vocab_size - 1
    split, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    program = Program(network, mask, chunk=256, rows=split, banned_ids=(mask,))
    facts = ModelFacts(
        vocab_size=model.vocab_size,
        banned_ids=(mask,),
        has_cache=True,
        block_length=network.block_length,
    )

    def make(params: Any) -> Any:
        tokens_BL = jnp.full((rows, positions), mask, jnp.int32)
        row = RowParams.pack([sample] * rows, facts)
        row = dataclasses.replace(row, seed_B=jnp.zeros(rows, jnp.uint32))
        rules = sample.table.pack([sample] * rows, facts)
        length_B = jnp.full(rows, positions, jnp.int32)
        state = start(tokens_BL, length_B, row, rules, mask_id=mask)
        return with_cache(program, params, state)

    def at(leaf: Any, place: Any, dtype: Any = None) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place)

    params = jax.eval_shape(network.init, jax.random.key(0))
    axes = axes_of(network, params)
    params = jax.tree.map(
        lambda x, place: at(x, place, "bfloat16"), params, shardings(params, axes, mesh)
    )
    with used(split):
        state = jax.eval_shape(make, params)
    state = jax.tree.map(lambda leaf: at(leaf, split), state)
    number = jax.ShapeDtypeStruct((), "int32", sharding=whole)
    advance = Advance(program, compiler_options=compiler.options("sample", mesh, options))
    return advance._jitted.lower(params, state, number, number).compile(), state


_MOVED = ("all-reduce", "all-gather", "reduce-scatter")


def table(results: dict[str, Any]) -> list[str]:
    """The results as a Markdown table."""
    lines = [
        "| model | topology | rows x L | optimiser | mesh | remat | memory GiB (temporaries) | "
        "all-reduce + all-gather (+ reduce-scatter) GiB | step ms (roof / cycles) | utilisation |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results.values():
        what = (
            f"| {one['model']} | {one['topology']} | {one['rows']} x {one['positions']} | "
            f"{one['optimizer']} | fsdp {one['fsdp']}, tensor {one['tensor']}"
            + f" | {one['remat']} | "
        )
        if "refused" in one:
            lines.append(what + "does not fit | | | |")
            continue
        memory, moved = one["memory_gib"], one["moved_gib"]
        roof, cycles = one["roof"], one["cycles"]
        lines.append(
            what
            + f"{sum(memory.values()):.1f} ({memory['temporaries']:.1f}) | "
            + " + ".join(f"{moved[kind]:.1f}" for kind in _MOVED if kind in moved)
            + " | "
            f"{roof['ms']:.0f} / {cycles['ms']:.0f} | "
            f"{100 * roof['utilisation']:.1f}% / {100 * cycles['utilisation']:.1f}% |"
        )
    return lines


def parser() -> argparse.ArgumentParser:
    """The flags of all tables."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("table", nargs="?", choices=["train", "sample", "logits"], default="train")
    made.add_argument("--json", type=Path, help="file of the figures")
    made.add_argument("--only", nargs="*", help="only rows whose names contain one of these")
    made.add_argument("--list", action="store_true", help="print the names of the rows")
    made.add_argument("--compiler-options", nargs="*", default=[], metavar="NAME=VALUE",
        help="like mesh.compiler_options; none: no default options")  # fmt: skip
    made.add_argument("--topology", default="v5e:2x2", help="of the table of logits")
    made.add_argument("--row", help="measure this row in this process and print JSON")
    return made


def measured_apart(kind: str, row: str, options: Sequence[str]) -> dict[str, Any]:
    """The figures of a row, from a process of its own, which frees the compiler's memory."""
    command = [sys.executable, "-m", "benchmarks", "pods", kind, "--row", row]
    command += ["--compiler-options", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures the missing rows, one process after the other, and prints the table."""
    args = parser().parse_args()
    if args.table != "train":
        name = "sampling_pods" if args.table == "sample" else "logit_chain"
        importlib.import_module(f"benchmarks.{name}").run(args)
        return
    if args.row:
        row = next(row for row in ROWS if row.name == args.row)
        print(json.dumps(measure(row, tuple(args.compiler_options))))
        return
    if args.list:
        print("\n".join(row.name for row in ROWS))
        return
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for row in ROWS:
        is_asked = not args.only or any(part in row.name for part in args.only)
        if row.name not in results and is_asked:
            results[row.name] = measured_apart("train", row.name, args.compiler_options)
            results = {one.name: results[one.name] for one in ROWS if one.name in results}
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
