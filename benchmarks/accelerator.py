"""Measured times of training steps, forward passes and attention on the first accelerator here.

Command: python -m benchmarks accelerator --json benchmarks/results/accelerator.jsonl
    [--only NAME ...] [--list] [--table]

Rows that the file already holds are kept. Programs are compiled first, several at a time, and then
timed one after the other: medians of groups of calls, with inputs that are random. Generation is
timed once, after a first call. The peaks are
measured in the same process: a product of two matrices of 8192 x 8192, and a sum that reads and
writes 1 GiB.
Utilisation is the work of the model (`dlm_jax.training.plan`) divided by the measured peak, and the
bound of a forward pass is as in `benchmarks.sampling_pods`, with the measured peaks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dlm_jax
from benchmarks import sampling_pods
from benchmarks.pods import Row, config_of
from benchmarks.sampling_pods import Step
from dlm_jax.config import MeshConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.distributed.partitions import batch_sharding, make_mesh
from dlm_jax.inference.model import Model
from dlm_jax.model import ops
from dlm_jax.model.attention import BesideClean, InBlocks
from dlm_jax.model.transformer import build
from dlm_jax.objectives.objective import Batch
from dlm_jax.randomness import key_of
from dlm_jax.training.plan import model_flops, planned_task
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import abstract_state, init_state, lower_step

HERE = "here"
"""Topology of the rows that run on this machine."""

BLOCK = sampling_pods.BLOCK
NEW = 256
Timed = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention, forward and backward; the error is that of one row and head beside float32.

    The backward pass counts as 2.5 forward passes.
    """

    mask: str
    form: str
    rows: int = 8
    positions: int = 4096
    heads: int = 16
    size: int = 128

    @property
    def name(self) -> str:
        """Its name in the file."""
        return " ".join(["attention", *map(str, dataclasses.astuple(self))])


MASKS: dict[str, Any] = {
    "bidirectional": None,
    "causal": ops.causal,
    "blocks": InBlocks(BLOCK),
    "two streams": BesideClean(BLOCK, 4096),
}

ATTENTION = [
    Attention("bidirectional", "kernel"),
    Attention("bidirectional", "plain"),
    Attention("causal", "kernel"),
    Attention("blocks", "kernel"),
    Attention("blocks", "plain"),
    Attention("two streams", "kernel"),
    Attention("two streams", "plain"),
]

TRAINING = [
    Row("150M", HERE, 64, 1024, fsdp=1),
    Row("150M", HERE, 64, 1024, "muon", fsdp=1),
    Row("1.3B", HERE, 8, fsdp=1),
    Row("1.3B", HERE, 8, fsdp=1, remat="attention+query+key+value+middle+gate+up"),
    Row("1.3B", HERE, 8, fsdp=1, optimizer="muon"),
    Row("1.3B", HERE, 4, fsdp=1, block_length=BLOCK),
]

SAMPLING = [
    *(Step("1.3B", HERE, 256, 1, kind) for kind in sampling_pods.KINDS),
    *(Step("1.3B", HERE, 64, 1, kind) for kind in sampling_pods.KINDS[:4]),
    *(Step("8B", HERE, 64, 1, kind) for kind in sampling_pods.KINDS),
]


@dataclasses.dataclass(frozen=True)
class Generation:
    """Texts of 256 tokens after prompts of 768, by `dlm_jax.generate` with a random model."""

    model: str
    rows: int
    kind: str
    tokens_per_forward: int = 4

    @property
    def name(self) -> str:
        """Its name in the file."""
        return " ".join(["generation", *map(str, dataclasses.astuple(self))])


GENERATION = [
    Generation("1.3B", 64, "causal", 1),
    Generation("1.3B", 64, "exact"),
    Generation("1.3B", 64, "dual"),
]


def seconds_of(run: Timed, least: float = 0.2, groups: int = 3) -> float:
    """Median seconds of a call, in groups of calls that take at least `least` seconds."""

    def of(calls: int) -> float:
        begin = time.perf_counter()
        found = None
        for _ in range(calls):
            found = run()
        jax.block_until_ready(found)
        return (time.perf_counter() - begin) / calls

    of(1)
    calls = max(1, math.ceil(least / of(1)))
    return statistics.median(of(calls) for _ in range(groups))


def drawn(leaf: Any) -> jax.Array:
    """Random numbers of the shape, the dtype and the sharding of `leaf`; zeros for ids."""

    def draw() -> jax.Array:
        key = jax.random.key(math.prod(leaf.shape) % 2**31)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        # Copies of one matrix, because drawing a large cache would need the memory for another.
        one = 0.02 * jax.random.normal(key, leaf.shape[-2:], leaf.dtype)
        return jnp.broadcast_to(one, leaf.shape)

    return jax.jit(draw, out_shardings=getattr(leaf, "sharding", None))()


def peaks() -> dict[str, float]:
    """FLOP/s of a large product in bfloat16, and bytes/s of a copy, read and written."""
    size, copied = 8192, 2**30
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    x = jnp.ones(copied // 2, jnp.bfloat16)
    product, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    return {
        "flops": 2.0 * size**3 / seconds_of(lambda: product(a, b)),
        "bandwidth": 2.0 * copied / seconds_of(lambda: copy(x)),
    }


def attention_program(row: Attention) -> tuple[Any, Any]:
    """The compiled forward pass, and the compiled forward and backward pass."""
    shape = (row.rows, row.positions, row.heads, row.size)
    streams = 2 if row.mask == "two streams" else 1
    keys = (row.rows, streams * row.positions, *shape[2:])
    q, k, v = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (shape, keys, keys))
    length = jax.ShapeDtypeStruct((row.rows,), "int32")
    may_see = MASKS[row.mask]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
        if row.form == "kernel":
            return ops.attention(q, k, v, length, may_see=may_see)
        is_live = jnp.ones(k.shape[:2], bool)
        return ops.formula_attention(q, k, v, is_live, may_see=may_see)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, length: jax.Array) -> Any:
        y, pull = jax.vjp(lambda q, k, v: forward(q, k, v, length), q, k, v)
        return y, pull(g)

    return (
        jax.jit(forward).lower(q, k, v, length).compile(),
        jax.jit(both).lower(q, k, v, q, length).compile(),
    )


def measure_attention(row: Attention, programs: tuple[Any, Any], peak: dict[str, float]) -> Any:
    """Milliseconds, the share of the peak on visible pairs, and errors beside float32."""
    forward, both = programs
    shapes = [info.shape for info in both.args_info[0][:4]]
    q, k, v, g = (
        jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes)
    )
    length = jnp.full(row.rows, row.positions, jnp.int32)
    y, grads = both(q, k, v, g, length)
    found = {"error": _error(row, (q, k, v, g), (y, *grads))}
    may_see, query = MASKS[row.mask], np.arange(row.positions)[:, None]
    pairs = float(q.shape[1] * k.shape[1])
    if may_see is not None:
        pairs = float(np.sum(may_see(query, np.arange(k.shape[1])[None])))
    flops = 4.0 * pairs * row.rows * row.heads * row.size
    times = (
        seconds_of(lambda: forward(q, k, v, length)),
        seconds_of(lambda: both(q, k, v, g, length)),
    )
    return found | {
        "forward_ms": 1e3 * times[0],
        "both_ms": 1e3 * times[1],
        "forward_share": flops / times[0] / peak["flops"],
        "both_share": 3.5 * flops / times[1] / peak["flops"],
    }


def _error(row: Attention, given: Any, found: Any) -> float:
    """The largest relative error of a row's output and gradients, beside the formula in float32."""
    one = [x[:1, :, :1].astype(jnp.float32) for x in given]
    is_live = jnp.ones(one[1].shape[:2], bool)

    @jax.jit
    def exact(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        plain = functools.partial(ops.formula_attention, may_see=MASKS[row.mask])
        with jax.default_matmul_precision("highest"):
            y, pull = jax.vjp(lambda q, k, v: plain(q, k, v, is_live), q, k, v)
            return (y, *pull(g))

    errors = [
        jnp.linalg.norm(x[:1, :, :1].astype(jnp.float32) - y) / jnp.linalg.norm(y)
        for x, y in zip(found, exact(*one), strict=True)
    ]
    return float(max(errors))


def training_program(row: Row, mesh: Mesh) -> tuple[jax.stages.Compiled, Task]:
    """The compiled step of a row, and its task."""
    task = planned_task(config_of(row), mesh)
    return lower_step(task, task.last_stage, abstract_state(task)).compile(), task


def measure_training(row: Row, made: tuple[Any, Task], peak: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of a step, tokens per second, utilisation and memory."""
    step, task = made
    tokens = jax.random.randint(
        jax.random.key(1), (row.rows, row.positions), 0, task.config.model.vocab_size - 3
    )
    batch = Batch(
        tokens, jnp.full(row.rows, row.positions, jnp.int32), jnp.arange(row.rows, dtype=jnp.int32)
    )
    batch = jax.device_put(batch, batch_sharding(task.mesh, row.rows))
    carried, losses = [init_state(task, key_of(0))], []

    def run() -> Any:
        carried[0], metrics = step(carried[0], batch, key_of(1))
        losses.append(metrics["loss"])
        return metrics["loss"]

    seconds = seconds_of(run, least=0.6)
    flops = model_flops(
        carried[0].params, task.config.model, num_rows=row.rows, num_positions=row.positions
    )
    return {
        "ms": 1e3 * seconds,
        "tokens_per_second": row.rows * row.positions / seconds,
        "tflops": flops / seconds / 1e12,
        "utilisation": flops / seconds / peak["flops"],
        "memory_gib": _memory(step),
        "losses": [float(losses[0]), float(losses[-1])],
    }


def _memory(program: Any) -> float:
    found = program.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return (kept + found.temp_size_in_bytes) / 2**30


def sampling_program(step: Step, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled pass of a row of `benchmarks.sampling_pods`."""
    return sampling_pods.compiled(step, mesh, ())


def measure_sampling(
    step: Step, program: jax.stages.Compiled, peak: dict[str, float], mesh: Mesh
) -> dict[str, Any]:
    """Milliseconds of a pass over all rows, beside its bound."""
    if step.kind == "rest":
        seconds = _seconds_of_rest(step, program, mesh)
    else:
        seconds = _seconds_of_pass(step, program, mesh)
    limits = sampling_pods.bound(
        step, sampling_pods.model_of(step), 1, peak["flops"], peak["bandwidth"]
    )
    least = max(limits["memory_ms"], limits["products_ms"])
    found = {"ms": 1e3 * seconds, "bound_ms": least, "by_the_bound": 1e3 * seconds / least}
    return found | limits | {"memory_gib": _memory(program)}


def _seconds_of_pass(step: Step, program: jax.stages.Compiled, mesh: Mesh) -> float:
    """Seconds of a forward pass over all groups of rows."""
    params, kept, tokens, length, row, place = program.args_info[0]
    params, kept = (jax.tree.map(drawn, x) for x in (params, kept))
    rows, positions = tokens.shape
    begin = positions - sampling_pods.SIZES.get(step.kind, BLOCK)
    numbers = (
        jax.random.randint(jax.random.key(1), tokens.shape, 0, 30000),
        jnp.full(length.shape, positions, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.full(place.shape, begin, jnp.int32),
    )
    caches = [kept]
    is_donated = step.kind in ("refresh", "causal")

    def run() -> Any:
        found = program(params, caches[0], *numbers)
        if not is_donated:
            return found
        caches[0] = found[0]
        return found[1]

    groups = -(-step.rows // sampling_pods.in_group(step, mesh))
    return groups * seconds_of(run)


def _seconds_of_rest(step: Step, program: jax.stages.Compiled, mesh: Mesh) -> float:
    """Seconds of one step, of several in one call."""
    network, split = build(sampling_pods.model_of(step)), NamedSharding(mesh, P())
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    _, _, make = sampling_pods.rest(step, network, shapes, split, {})
    params = jax.tree.map(drawn, program.args_info[0][0])
    states, steps = [jax.jit(make)()], 8

    def run() -> Any:
        states[0] = program(params, states[0], np.int32(steps), np.int32(2**31 - 1))
        return states[0]

    return seconds_of(run, least=0.0) / steps


def measure_generation(row: Generation, made: Any, peak: dict[str, float]) -> dict[str, Any]:
    """Seconds of a call after a first one, and new tokens per second."""
    del made, peak
    model = _random_model(row)
    given = sampling_pods.POSITIONS - NEW
    ids = np.random.default_rng(1).integers(0, model.tokenizer.vocab_size - 4, (row.rows, given))
    settings: dict[str, Any] = {"order": "left_to_right", "cache": "exact"}
    if row.kind != "causal":
        settings = {"order": "low_confidence", "block_length": BLOCK, "cache": row.kind}

    def run() -> Any:
        return dlm_jax.generate(
            model, [{"tokens": one} for one in ids], batch_size=row.rows, gen_length=NEW,
            steps=NEW // row.tokens_per_forward, temperature=0.0, ignore_eos=True, **settings,
        )  # fmt: skip

    begin = time.perf_counter()
    forwards = float(run().forwards[0])
    first, begin = time.perf_counter() - begin, time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds, "tokens_per_second": row.rows * NEW / seconds, "forwards": forwards,
        "first_seconds": first,
    }  # fmt: skip


def _random_model(row: Generation) -> Model:
    """A model with random weights in bfloat16."""
    config = sampling_pods.model_of(Step(row.model, HERE, row.rows, 1, row.kind))
    network = build(config)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return Model(
        network=network,
        params=jax.tree.map(lambda x: drawn(jax.ShapeDtypeStruct(x.shape, "bfloat16")), shapes),
        tokenizer=CharacterTokenizer(
            "".join(chr(0x4000 + i) for i in range(config.vocab_size - 4))
        ),
        max_length=sampling_pods.POSITIONS,
        is_causal=row.kind == "causal",
    )


def compile_all(rows: list[Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    """The programs of all rows, compiled in parallel; an error stands for a program that fails."""

    def of(row: Any) -> Any:
        try:
            return make(row)
        except Exception as error:  # the other rows are still measured
            return error

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip((row.name for row in rows), pool.map(of, rows), strict=True))


def measured(rows: list[Any], mesh: Mesh, peak: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The figures of each row, in order, or the error of a row that does not run."""
    kinds: dict[type, tuple[Any, Any]] = {
        Attention: (attention_program, measure_attention),
        Row: (lambda row: training_program(row, mesh), measure_training),
        Step: (
            lambda step: sampling_program(step, mesh),
            lambda step, made, peak: measure_sampling(step, made, peak, mesh),
        ),
        Generation: (lambda row: None, measure_generation),
    }
    for kind, (make, measure) in kinds.items():
        chosen = [row for row in rows if type(row) is kind]
        begin = time.perf_counter()
        programs = compile_all(chosen, make)
        print(f"{len(chosen)} programs in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        for row in chosen:
            made = programs.pop(row.name)
            try:
                if isinstance(made, Exception):
                    raise made
                figures = measure(row, made, peak)
            except Exception as error:  # the other rows are still measured
                figures = {"refused": f"{type(error).__name__}: {error}"[:2000]}
            del made
            found = {name: _rounded(value) for name, value in figures.items()}
            yield {"name": row.name} | dataclasses.asdict(row) | found


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


_COLUMNS: dict[str, dict[str, str]] = {
    "attention": {
        "mask": "mask", "form": "form", "forward_ms": "forward ms",
        "both_ms": "forward and backward ms", "both_share": "share of the peak", "error": "error",
    },
    "training": {
        "model": "model", "rows": "rows", "positions": "L", "optimizer": "optimiser",
        "remat": "remat", "block_length": "blocks", "ms": "step ms",
        "tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "utilisation": "utilisation",
        "memory_gib": "memory GiB",
    },
    "sampling": {
        "model": "model", "rows": "rows", "kind": "pass",
        "bound_ms": "bound ms", "in_order_ms": "in order ms", "ms": "ms",
        "by_the_bound": "by the bound", "memory_gib": "memory GiB",
    },
    "generation": {
        "model": "model", "rows": "rows", "kind": "model and cache",
        "tokens_per_forward": "tokens per forward", "forwards": "forwards", "seconds": "s",
        "tokens_per_second": "tokens/s",
    },
}  # fmt: skip
"""Columns of the tables: keys of the figures, and headings."""

_SHARES = ("both_share", "utilisation")


def tables(results: list[dict[str, Any]]) -> list[str]:
    """The results as Markdown tables."""
    lines = []
    for columns in _COLUMNS.values():
        lines += ["", f"| {' | '.join(columns.values())} |", "| --- " * len(columns) + "|"]
        for one in results:
            if columns.keys() <= one.keys():
                lines.append(f"| {' | '.join(_cell(key, one[key]) for key in columns)} |")
    return lines


def _cell(key: str, value: Any) -> str:
    if key in _SHARES:
        return f"{100 * value:.1f}%"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def main() -> None:
    """Measures the rows that are missing and prints them as JSON, or prints the file as tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file of the figures")
    parser.add_argument("--only", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--table", action="store_true", help="print the file as tables")
    args = parser.parse_args()
    rows: list[Any] = [*ATTENTION, *TRAINING, *SAMPLING, *GENERATION]
    rows = [row for row in rows if not args.only or any(part in row.name for part in args.only)]
    if args.list:
        print("\n".join(row.name for row in rows))
        return
    lines = args.json.read_text().splitlines() if args.json.exists() else []
    if args.table:
        results = {one["name"]: one for one in map(json.loads, lines)}
        print("\n".join(tables([results[row.name] for row in rows if row.name in results])))
        return
    known = {one["name"] for one in map(json.loads, lines) if "refused" not in one}
    missing = [row for row in rows if row.name not in known]
    if not missing:
        return
    device = jax.devices()[0]
    mesh = make_mesh(MeshConfig(fsdp=1), [device])
    peak = peaks()
    about = {"name": f"peaks {len(lines)}", "device": device.device_kind, "jax": jax.__version__}
    with args.json.open("a") as file:
        found = ({name: _rounded(value) for name, value in (about | peak).items()},)
        for one in itertools.chain(found, measured(missing, mesh, peak)):
            print(json.dumps(one), flush=True)
            file.write(json.dumps(one) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
