"""Estimated time of the parts of a sampling step on TPUs that may be absent (extra ``tpu``).

    python -m benchmarks sample_step [--json FILE] [--only NAME ...] [--list] [--quick]

Canvases have 1024 positions and blocks of 32. The parts are forward passes: ``whole`` over whole
canvases, ``exact`` (block-causal) and ``dual`` over one block of every row beside its cache,
``causal`` over one position of every row, which it caches, and ``refresh``, which computes and
caches whole rows. ``rest`` is everything else of a step of whole canvases: the logits of 32
positions of every row, the draws and the commits.

The bound is the longer of two times: the weights and the cache once through memory, and the
products at the peak of the chips. Every part is compiled in a process of its own; parts that the
file has already are kept. The times are estimates, as in ``python -m benchmarks pods``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.pods import GIB, MODELS, kernel_schedules, kernel_seconds, run
from dlm_jax.config import MeshConfig, ModelConfig, SamplingParams
from dlm_jax.contrib.pod_costs import Mode, cost, torus_of
from dlm_jax.devices import used
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import CHIPS, Chip, topology_devices
from dlm_jax.distributed.partitions import axes_of, make_mesh, named_leaves, on_own_rows, shardings
from dlm_jax.model.transformer import build
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.types import Network, Params, Window

POSITIONS, BLOCK = 1024, 32
KINDS = ("dual", "exact", "causal", "whole", "refresh", "rest")
SIZES = {"whole": POSITIONS, "refresh": POSITIONS, "causal": 1, "rest": 0}
"""Positions of a row that a forward pass computes; those of a block otherwise."""
# Positions of a forward pass over a group of rows of a chip, as in `dlm_jax.sampling.positions`.
_GROUP = 8192


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of the table."""

    model: str
    topology: str
    rows: int
    fsdp: int
    kind: str

    @property
    def name(self) -> str:
        """Its name in the file."""
        return " ".join(map(str, dataclasses.astuple(self)))

    @property
    def size(self) -> int:
        """Positions of a row that the pass computes."""
        return SIZES.get(self.kind, BLOCK)

    @property
    def chip(self) -> Chip:
        """The chip of the topology."""
        name = self.topology.split(":")[0]
        return next(chip for chip in CHIPS.values() if chip.name == name)


QUICK = Part("150M", "v5e:2x2", 8, 1, "dual")
PARTS = [
    QUICK,
    *(Part("1.3B", "v5e:4x4", 256, 1, kind) for kind in KINDS),
    *(Part("1.3B", "v5p:2x2x1", 256, 1, kind) for kind in KINDS),
    *(Part("1.3B", "v5e:4x4", rows, 1, kind) for rows in (32, 64, 512) for kind in KINDS[:4]),
    *(Part("8B", "v5p:2x2x1", 64, 1, kind) for kind in KINDS),
    *(Part("1.3B", "v6e:4x4", 256, 1, kind) for kind in KINDS),
    *(Part("8B", "v6e:4x4", 128, fsdp, kind) for fsdp in (1, 4) for kind in KINDS),
]


def model_of(part: Part) -> ModelConfig:
    """The model of a part."""
    model: dict[str, Any] = {"activation": "swiglu", "compute_dtype": "bfloat16"}
    model |= MODELS[part.model]
    if part.kind == "exact":
        model |= {"attention_type": "block_causal", "block_length": BLOCK}
    if part.kind == "causal":
        model |= {"attention_type": "causal", "start_id": model["vocab_size"] - 1}
    return ModelConfig(**model)


def bound(part: Part, num_chips: int) -> dict[str, float]:
    """Milliseconds of memory and of products, per chip and pass."""
    model, chip, rows = model_of(part), part.chip, part.rows / num_chips
    params = jax.eval_shape(build(model).init, jax.random.key(0))
    numbers = {path: math.prod(leaf.shape) for path, leaf in named_leaves(params)}
    matrices = sum(n for path, n in numbers.items() if path.endswith("kernel") and "blocks" in path)
    size, pairs = part.size, 4.0 * model.depth * POSITIONS * model.width * rows * part.size
    if part.kind == "rest":
        matrices, size = model.vocab_size * model.width, BLOCK
    is_cached = part.kind not in ("whole", "refresh", "rest")
    cache = 4.0 * rows * model.depth * POSITIONS * model.width * is_cached
    return {
        "memory_ms": 1e3 * (2.0 * matrices + cache) / chip.bandwidth,
        "products_ms": 1e3 * (2.0 * matrices * rows * size + pairs) / chip.flops,
    }


def rows_at_once(part: Part, mesh: Mesh) -> int:
    """Rows of a chip that one forward pass computes."""
    own = part.rows // mesh.size
    return own if part.kind != "refresh" else max(1, min(_GROUP // POSITIONS, own))


def compile_part(part: Part, mesh: Mesh, options: tuple[str, ...]) -> jax.stages.Compiled:
    """The program of a part, for one group of rows of every chip."""
    network, split = build(model_of(part)), NamedSharding(mesh, P(("data", "fsdp")))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    places = shardings(shapes, axes_of(network, shapes), mesh)
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=place), shapes, places
    )
    chosen = compiler.options("sample", mesh, options)

    def on_rows(make: Callable[[], Any]) -> Any:
        with used(split):
            made = jax.eval_shape(make)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), made
        )

    if part.kind == "rest":
        program, params, make = rest(part, network, params, split)
        limit = jax.ShapeDtypeStruct((), "int32")
        advance = Advance(program, compiler_options=chosen)
        return advance._jitted.lower(params, on_rows(make), limit, limit).compile()
    function, donated = forward_pass(part, network, split)
    cached = network.cached
    assert cached is not None
    kept = on_rows(lambda: cached.init(params, part.rows, POSITIONS))
    rows = rows_at_once(part, mesh) * mesh.size
    tokens = jax.ShapeDtypeStruct((rows, POSITIONS), "int32", sharding=split)
    number = jax.ShapeDtypeStruct((rows,), "int32", sharding=split)
    jitted = jax.jit(function, donate_argnums=donated, compiler_options=chosen)
    return jitted.lower(params, kept, tokens, number, number, number).compile()


def forward_pass(
    part: Part, network: Network, split: NamedSharding
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """A forward pass, and the arguments that it donates."""
    cached, size = network.cached, part.size
    assert cached is not None

    def forward(
        params: Params, kept: Any, tokens: jax.Array, length: jax.Array, row: jax.Array,
        place: jax.Array,
    ) -> Any:  # fmt: skip
        with used(split):
            if part.kind == "whole":
                return network.trunk(params, tokens, length, None)[0]
            if part.kind == "refresh":
                hidden, piece = cached.whole(params, tokens, length)
                return on_own_rows(cached.store, kept, piece, row, place), hidden[:, :BLOCK]
            window = Window(place, place, place + size)
            hidden, piece = cached.window(params, kept, None, tokens, length, window, size=size)
            if part.kind == "causal":
                return on_own_rows(
                    lambda kept, piece, place: cached.store(kept, piece, None, place),
                    kept,
                    piece,
                    place,
                ), hidden
            return hidden

    return forward, (1,) if part.kind in ("refresh", "causal") else ()


def rest(
    part: Part, network: Network, params: Params, split: NamedSharding
) -> tuple[Program, Params, Callable[[], Any]]:
    """The loop over whole canvases whose trunk returns vectors that are there already, the shapes
    of its parameters, and a function that makes the first state.
    """
    mask, width = network.vocab_size - 1, params["norm"]["scale"].shape[0]
    hidden = jax.ShapeDtypeStruct((part.rows, POSITIONS, width), "bfloat16", sharding=split)
    network = dataclasses.replace(network, trunk=lambda params, *_: (params["hidden"], None))
    chunk = max(256, 2**24 // network.vocab_size)
    program = Program(network, mask, chunk=chunk, rows=split, banned_ids=(mask,))
    sample = SamplingParams(
        chain=("temperature",), block_length=BLOCK, steps=128, order="low_confidence"
    )
    facts = ModelFacts(vocab_size=network.vocab_size, banned_ids=(mask,))

    def make() -> Any:
        tokens_BL = jnp.full((part.rows, POSITIONS), mask, jnp.int32)
        row = RowParams.pack([sample] * part.rows, facts)
        row = dataclasses.replace(row, seed_B=jnp.zeros(part.rows, jnp.uint32))
        rules = BUILT_IN.pack([sample] * part.rows, facts)
        length_B = jnp.full(part.rows, POSITIONS, jnp.int32)
        return start(tokens_BL, length_B, row, rules, mask_id=mask)

    return program, {**params, "hidden": hidden}, make


def measure(part: Part, options: tuple[str, ...]) -> dict[str, Any]:
    """The figures of a part, per chip and step."""
    with kernel_schedules("window_attention", "rotary") as schedules:
        mesh = make_mesh(MeshConfig(fsdp=part.fsdp), topology_devices(part.topology))
        began = time.perf_counter()
        try:
            program = compile_part(part, mesh, options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.asdict(part) | {"refused": str(error)[:300]}
        seconds, text = time.perf_counter() - began, program.as_text()
        kernels = kernel_seconds(schedules(), part.chip.clock)
    memory = program.memory_analysis()
    assert text is not None and memory is not None
    own = part.rows // mesh.size
    times = -(-own // rows_at_once(part, mesh))
    chunks = -(-own * BLOCK // max(256, 2**24 // model_of(part).vocab_size))
    modes: tuple[Mode, ...] = ("roof", "cycles")
    costs = {
        mode: cost(text, torus_of(mesh), mode, repeats={"chunks": chunks}, kernels=kernels)
        for mode in modes
    }
    return {
        **dataclasses.asdict(part),
        **{name: round(ms, 3) for name, ms in bound(part, mesh.size).items()},
        **{f"{mode}_ms": round(1e3 * times * one.seconds, 3) for mode, one in costs.items()},
        "traffic_gib": round(times * costs["roof"].memory_bytes / GIB, 3),
        "moved_gib": {k: round(times * n / GIB, 3) for k, n in costs["roof"].moved.items()},
        "memory_gib": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / GIB, 3),
        "options": list(options),
        "compile_seconds": round(seconds, 1),
    }


HEADER = (
    "| model | topology | rows | fsdp | pass | bound ms | ms (roof / cycles) | by the bound | "
    "traffic GiB | moved GiB | memory GiB |\n" + "| --- " * 11 + "|"
)


def line_of(one: dict[str, Any]) -> str:
    """The figures of a part as a line of the table."""
    cells = [one[key] for key in ("model", "topology", "rows", "fsdp", "kind")]
    if "refused" in one:
        cells += ["does not fit", *[""] * 5]
    else:
        least = max(one["memory_ms"], one["products_ms"])
        ms = one["roof_ms"], one["cycles_ms"]
        cells += [f"{least:.1f} ({'memory' if least == one['memory_ms'] else 'products'})"]
        cells += [" / ".join(f"{x:.1f}" for x in ms), " / ".join(f"{x / least:.2f}" for x in ms)]
        cells += [f"{one['traffic_gib']:.1f}", f"{sum(one['moved_gib'].values()):.1f}"]
        cells += [f"{one['memory_gib']:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    parts = {part.name: part for part in PARTS}
    run("sample_step", __doc__, parts, QUICK.name, measure, HEADER, line_of)
