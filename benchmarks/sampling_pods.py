"""What the parts of a sampling step of a large model cost on TPUs, by their compiler.

    python -m benchmarks pods sample --json benchmarks/results/sampling_pods.jsonl

Every row is compiled for devices that need not be there, in a process of its own; rows that the
file already holds are kept. Canvases have 1024 positions and blocks of 32. Rows of the table are
forward passes: ``whole`` over whole canvases, ``exact`` (block-causal) and ``dual`` over one block
of every row beside its cache, ``prefix`` over the second half of every row, ``causal`` over one
position of every row, which it caches, and ``refresh``, which computes and caches whole rows.
``rest`` is everything else of a step of whole canvases: the logits of 32 positions of every row,
the draws and the commits.

The bound is the longer of two times: the weights and the cache once through memory, and the
products at the peak of the chips. ``in order`` adds up the products, each at the longer of its two
times, and the reading of the cache: no product then runs beside the reading of the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import bundles
from benchmarks.pods import MODELS, measured_apart
from dlm_jax.config import MeshConfig, ModelConfig, SamplingParams
from dlm_jax.contrib.pod_costs import Cost, Mode, cost, torus_of
from dlm_jax.devices import used
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.distributed.partitions import axes_of, make_mesh, named_leaves, on_own_rows, shardings
from dlm_jax.model.transformer import build
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.state import State
from dlm_jax.types import Network, Params, Window

POSITIONS, BLOCK = 1024, 32
MODES: tuple[Mode, ...] = ("roof", "cycles")
_GIB = 2.0**30
# Positions of a forward pass over a group of rows of a chip, as in `dlm_jax.sampling.positions`.
_GROUP = 8192


@dataclasses.dataclass(frozen=True)
class Step:
    """One row of the table."""

    model: str
    topology: str
    rows: int
    fsdp: int
    kind: str

    @property
    def name(self) -> str:
        """Its name in the file."""
        return " ".join(str(value) for value in dataclasses.astuple(self)).strip()


KINDS = ("dual", "exact", "causal", "whole", "refresh", "prefix", "rest")
SIZES = {"whole": POSITIONS, "refresh": POSITIONS, "prefix": POSITIONS // 2, "causal": 1, "rest": 0}
"""Positions of a row that a forward pass computes; those of a block otherwise."""

STEPS = [
    *(Step("1.3B", "v5e:4x4", 256, 1, kind) for kind in KINDS),
    *(Step("1.3B", "v5p:2x2x1", 256, 1, kind) for kind in KINDS),
    *(Step("1.3B", "v5e:4x4", rows, 1, kind) for rows in (32, 64, 512) for kind in KINDS[:4]),
    *(Step("8B", "v5p:2x2x1", 64, 1, kind) for kind in KINDS),
    Step("8B", "v5p:2x2x1", 64, 4, "dual"),
    *(Step("1.3B", "v6e:4x4", 256, 1, kind) for kind in KINDS),
    *(Step("8B", "v6e:4x4", 128, 4, kind) for kind in KINDS),
    *(Step("8B", "v6e:4x4", 128, 1, kind) for kind in KINDS[:3]),
    *(Step("8B", "v5e:4x4", 64, 16, kind) for kind in KINDS),
    Step("8B", "v5e:4x4", 256, 16, "whole"),
]


def model_of(step: Step) -> ModelConfig:
    """The model of a row."""
    model: dict[str, Any] = MODELS[step.model] | {"activation": "swiglu"}
    model |= {"compute_dtype": "bfloat16"}
    if step.kind == "exact":
        model |= {"attention_type": "block_causal", "block_length": BLOCK}
    if step.kind == "causal":
        model |= {"attention_type": "causal", "start_id": model["vocab_size"] - 1}
    return ModelConfig(**model)


def bound(
    step: Step, model: ModelConfig, chips: int, peak: float, bandwidth: float
) -> dict[str, float]:
    """GiB of a chip's weights and cache, and milliseconds of memory, of products and in order.

    A chip computes `peak` FLOP/s in bfloat16 and reads `bandwidth` bytes/s.
    """
    params = jax.eval_shape(build(model).init, jax.random.key(0))
    numbers = {path: math.prod(leaf.shape) for path, leaf in named_leaves(params)}
    matrices = sum(n for path, n in numbers.items() if path.endswith("kernel") and "blocks" in path)
    rows, of_weight = step.rows / chips, 2.0
    size = SIZES.get(step.kind, BLOCK)
    pairs = 4.0 * model.depth * POSITIONS * model.width * rows * size
    if step.kind == "rest":
        matrices, size = model.vocab_size * model.width, BLOCK
    flops = 2.0 * matrices * rows * size
    # Keys and values of the positions that a step reads instead of computing them.
    kept = {"whole": 0, "refresh": 0, "rest": 0, "prefix": POSITIONS - size}
    cache = 4.0 * rows * model.depth * kept.get(step.kind, POSITIONS) * model.width
    products, reading = flops / peak, of_weight * matrices / bandwidth
    attention = max(pairs / peak, cache / bandwidth)
    memory = reading + cache / bandwidth
    return {
        "weights_gib": of_weight * matrices / _GIB,
        "cache_gib": cache / _GIB,
        "memory_ms": 1e3 * memory,
        "products_ms": 1e3 * (products + pairs / peak),
        "in_order_ms": 1e3 * (max(products, reading) + attention),
    }


def _chip(step: Step) -> Any:
    name = step.topology.split(":")[0]
    return next(chip for chip in CHIPS.values() if chip.name == name)


def compiled(step: Step, mesh: Mesh, options: tuple[str, ...]) -> jax.stages.Compiled:
    """The program of a row, for one group of rows of every chip."""
    model = model_of(step)
    network, split = build(model), NamedSharding(mesh, P(("data", "fsdp")))

    def at(leaf: Any, place: Any, dtype: Any = None) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place)

    shapes = jax.eval_shape(network.init, jax.random.key(0))
    places = shardings(shapes, axes_of(network, shapes), mesh)
    params = jax.tree.map(lambda x, place: at(x, place, "bfloat16"), shapes, places)
    chosen = compiler.options("sample", mesh, options)
    if step.kind == "rest":
        advance, params, make = rest(step, network, params, split, chosen)
        limit = jax.ShapeDtypeStruct((), "int32")
        return advance._jitted.lower(params, _abstract(make, split), limit, limit).compile()
    function, donated = _pass(step, network, split)
    cached = network.cached
    assert cached is not None
    with used(split):
        kept = jax.eval_shape(lambda: cached.init(params, step.rows, POSITIONS))
    kept = jax.tree.map(lambda leaf: at(leaf, split), kept)
    rows = in_group(step, mesh) * mesh.size
    tokens = jax.ShapeDtypeStruct((rows, POSITIONS), "int32", sharding=split)
    number = jax.ShapeDtypeStruct((rows,), "int32", sharding=split)
    jitted = jax.jit(function, donate_argnums=donated, compiler_options=chosen)
    return jitted.lower(params, kept, tokens, number, number, number).compile()


def _pass(step: Step, network: Network, split: NamedSharding) -> tuple[Any, tuple[int, ...]]:
    """A forward pass of `KINDS`, and the arguments that it donates."""
    cached, size = network.cached, SIZES.get(step.kind, BLOCK)
    assert cached is not None

    def run(
        params: Params, kept: Any, tokens: jax.Array, length: jax.Array, row: jax.Array,
        place: jax.Array,
    ) -> Any:  # fmt: skip
        with used(split):
            if step.kind == "whole":
                return network.trunk(params, tokens, length, None)[0]
            if step.kind == "refresh":
                hidden, piece = cached.whole(params, tokens, length)
                return on_own_rows(cached.store, kept, piece, row, place), hidden[:, :BLOCK]
            window = Window(place, place, place + size)
            seen = POSITIONS - size if step.kind == "prefix" else None
            own = row if step.kind == "prefix" else None
            hidden, piece = cached.window(
                params, kept, own, tokens, length, window, size=size, num_seen=seen
            )
            if step.kind == "causal":
                return on_own_rows(
                    lambda kept, piece, place: cached.store(kept, piece, None, place),
                    kept,
                    piece,
                    place,
                ), hidden
            return hidden

    return run, (1,) if step.kind in ("refresh", "causal") else ()


def rest(
    step: Step, network: Network, params: Params, split: NamedSharding, options: Any
) -> tuple[Advance, Params, Callable[[], State]]:
    """Steps of whole canvases whose trunk returns vectors that are there already, the shapes of its
    parameters, and a function that makes the first state.
    """
    mask, width = network.vocab_size - 1, params["norm"]["scale"].shape[0]
    hidden = jax.ShapeDtypeStruct((step.rows, POSITIONS, width), "bfloat16", sharding=split)
    params = {**params, "hidden": hidden}
    network = dataclasses.replace(network, trunk=lambda params, *_: (params["hidden"], None))
    program = Program(
        network, mask, chunk=max(256, 2**24 // network.vocab_size), rows=split, banned_ids=(mask,)
    )
    sample = SamplingParams(
        chain=("temperature",), block_length=BLOCK, steps=128, order="low_confidence"
    )
    facts = ModelFacts(vocab_size=network.vocab_size, banned_ids=(mask,))

    def make() -> State:
        tokens_BL = jnp.full((step.rows, POSITIONS), mask, jnp.int32)
        row = RowParams.pack([sample] * step.rows, facts)
        row = dataclasses.replace(row, seed_B=jnp.zeros(step.rows, jnp.uint32))
        rules = BUILT_IN.pack([sample] * step.rows, facts)
        length_B = jnp.full(step.rows, POSITIONS, jnp.int32)
        return start(tokens_BL, length_B, row, rules, mask_id=mask)

    return Advance(program, compiler_options=options), params, make


def _abstract(make: Callable[[], State], split: NamedSharding) -> State:
    """The shapes of a state whose rows are split."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split),
        jax.eval_shape(make),
    )


def measure(step: Step, options: tuple[str, ...]) -> dict[str, Any]:
    """The figures of a row, of a chip and step."""
    with bundles.written("window_attention", "rotary") as schedules:
        mesh = make_mesh(MeshConfig(fsdp=step.fsdp), topology_devices(step.topology))
        began = time.perf_counter()
        try:
            program = compiled(step, mesh, options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refused = {"refused": str(error)[:300], "options": list(options)}
            return dataclasses.asdict(step) | refused
        seconds, text = time.perf_counter() - began, program.as_text()
        kernels = bundles.seconds(schedules(), _chip(step).clock)
    memory, model, chip = program.memory_analysis(), model_of(step), _chip(step)
    limits = bound(step, model, mesh.size, chip.flops, chip.bandwidth)
    assert text is not None and memory is not None
    own = step.rows // mesh.size
    times = -(-own // in_group(step, mesh))
    chunks = -(-own * BLOCK // max(256, 2**24 // model.vocab_size))

    def of(mode: Mode, **more: int) -> Cost:
        return cost(text, torus_of(mesh), mode, repeats={"chunks": chunks} | more, kernels=kernels)

    found: dict[str, Any] = {}
    for mode in MODES:
        one = of(mode)
        found[mode] = {
            "ms": round(1e3 * times * one.seconds, 3),
            "outside_ms": round(1e3 * times * of(mode, layers=0).seconds, 3),
            "exposed_ms": round(1e3 * times * one.exposed, 3),
        }
    roof = of("roof")
    return (
        dataclasses.asdict(step)
        | {name: round(x, 3) for name, x in limits.items()}
        | found
        | {
            "traffic_gib": round(times * roof.memory_bytes / _GIB, 3),
            "moved_gib": {kind: round(times * n / _GIB, 3) for kind, n in roof.moved.items()},
            "arguments_gib": round(memory.argument_size_in_bytes / _GIB, 3),
            "temporaries_gib": round(memory.temp_size_in_bytes / _GIB, 3),
            "options": list(options),
            "compile_seconds": round(seconds, 1),
        }
    )


def in_group(step: Step, mesh: Mesh) -> int:
    """Rows of a chip that one forward pass computes."""
    own = step.rows // mesh.size
    if step.kind not in ("refresh", "prefix"):
        return own
    return max(1, min(_GROUP // SIZES[step.kind], own))


def table(results: list[dict[str, Any]]) -> list[str]:
    """The results as a table in Markdown."""
    lines = [
        "| model | topology | rows | fsdp | pass | parameters | bound ms | in order ms | "
        "ms (roof / cycles) | by the bound | outside the layers | weights + cache GiB | "
        "traffic GiB | moved GiB (exposed ms) | memory GiB (temporaries) | options |",
        "| --- " * 16 + "|",
    ]
    for one in results:
        what = " | ".join(str(one[key]) for key in ("model", "topology", "rows", "fsdp", "kind"))
        what += " | bfloat16"
        if "refused" in one:
            lines.append(f"| {what} | does not fit" + " |" * 10)
            continue
        least = max(one["memory_ms"], one["products_ms"])
        side = "memory" if least == one["memory_ms"] else "products"
        ms = " / ".join(f"{one[mode]['ms']:.1f}" for mode in MODES)
        ratios = " / ".join(f"{one[mode]['ms'] / least:.2f}" for mode in MODES)
        outside = " / ".join(
            f"{100 * one[mode]['outside_ms'] / one[mode]['ms']:.0f}%" for mode in MODES
        )
        total = one["arguments_gib"] + one["temporaries_gib"]
        lines.append(
            f"| {what} | {least:.1f} ({side}) | {one['in_order_ms']:.1f} | {ms} | {ratios} | "
            f"{'' if one['kind'] == 'rest' else outside} | "
            f"{one['weights_gib']:.1f} + {one['cache_gib']:.1f} | {one['traffic_gib']:.1f} | "
            f"{sum(one['moved_gib'].values()):.1f} ({one['roof']['exposed_ms']:.1f}) | "
            f"{total:.1f} ({one['temporaries_gib']:.1f}) | "
            f"{' '.join(one['options']) or 'default'} |"
        )
    return lines


def run(args: argparse.Namespace) -> None:
    """Measures the missing rows, one process after the other, and prints the table."""
    if args.row:
        step = next(step for step in STEPS if step.name == args.row)
        print(json.dumps(measure(step, tuple(args.compiler_options))))
        return
    if args.list:
        print("\n".join(step.name for step in STEPS))
        return
    lines = args.json.read_text().splitlines() if args.json and args.json.exists() else []
    results = {_key(one): one for one in map(json.loads, lines)}
    options = args.compiler_options
    for step in STEPS:
        is_asked = args.only is None or any(part in step.name for part in args.only)
        if (step.name, *options) in results or not is_asked:
            continue
        results[step.name, *options] = measured_apart("sample", step.name, options)
        results = _in_order(results)
        if args.json:
            args.json.write_text("".join(json.dumps(one) + "\n" for one in results.values()))
    print("\n".join(table(list(results.values()))))


def _key(one: dict[str, Any]) -> tuple[str, ...]:
    """The name of a row and its compiler options."""
    name = Step(*(one.get(field.name, "") for field in dataclasses.fields(Step))).name
    return name, *one.get("options", [])


def _in_order(results: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The results in the order of `STEPS`."""
    order = {step.name: i for i, step in enumerate(STEPS)}
    return dict(sorted(results.items(), key=lambda pair: order[pair[0][0]]))
