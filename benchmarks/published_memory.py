"""Prints the memory per chip of sampling from an 8B model on TPUs, according to the compiler.

    python -m benchmarks.published_memory [--model llada] [--topology v5e:2x4 ...] [--cache none]
        [--compiler-options none]

The model is LLaDA-8B or DiffusionGemma-26B-A4B in bfloat16, with 32 rows on a canvas of 1024 and
the settings of the first preset. The loop of `dlm_jax.generate` is compiled with abstract
parameters for TPUs that may be absent (extra ``tpu``). On paper, a chip has its share of the
parameters, the whole LM head, which reads out the chip's rows, and all parameters of the current
layer, unless the layers are split over ``tensor`` or ``expert``. The time of a step is an estimate:
the best case, in which all operations except products are bound by memory, and the compiler's
cycles (`dlm_jax.contrib.pod_costs`). Each loop of unknown length counts once: the readout of a
chunk, and with a cache the reading of a prompt and of a finished block.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dlm_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    SamplingParams,
)
from dlm_jax.contrib.pod_costs import Mode, cost, torus_of
from dlm_jax.data import Tokenizer
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.hf import gemma, llada
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.slots import Bucket, compiled_loop
from dlm_jax.model.transformer import build
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.loop import Advance, start

ROWS, CANVAS = 32, 1024
LLADA_8B = ModelConfig(
    depth=32, width=4096, heads=32, mlp_width=12288, vocab_size=126464, activation="swiglu",
    norm="rms", norm_epsilon=1e-5, qk_norm=False, rope_theta=500000.0, tied_head=False,
    compute_dtype="bfloat16",
)  # fmt: skip
GEMMA_26B = ModelConfig(
    depth=30, width=2816, heads=16, kv_heads=8, head_size=256, mlp_width=2112, activation="geglu",
    norm_epsilon=1e-6, vocab_size=262144, rope_theta=1e4, attention_type="canvas",
    block_length=256, attention_window=1024, full_every=6, full_head_size=512, full_kv_heads=2,
    full_rope_theta=1e6, full_rotary_share=0.25, full_value_from_key=True, attention_scale=1.0,
    value_norm=True, post_norms=True, layer_scales=True, embedding_scaled=True, logit_cap=30.0,
    self_conditioning=True, experts=128, experts_per_token=8, expert_width=704,
    experts_beside=True, router_scales=True, router_normalised=True, compute_dtype="bfloat16",
)  # fmt: skip
MESHES = {
    "v5e:2x4": (MeshConfig(data=1, fsdp=8), MeshConfig(data=1, tensor=8)),
    "v5e:4x4": (MeshConfig(data=1, fsdp=16), MeshConfig(data=1, expert=16)),
    "v5p:2x2x1": (
        MeshConfig(data=1, fsdp=4),
        MeshConfig(data=1, tensor=4),
        MeshConfig(data=1, expert=4),
    ),
}
_GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Ids:
    """Replaces a tokenizer where only ids are needed; LLaDA's ids by default."""

    vocab_size: int = 126349
    mask_id: int = 126336
    pad_id: int = 126081
    eos_id: int = 126081
    space_id: int | None = None

    banned_ids: tuple[int, ...] = (126336,)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the settings of its loop."""

    model: ModelConfig
    ids: Ids
    settings: dict[str, Any]
    process: str
    splits_heads: bool


CASES = {
    "llada": Case(LLADA_8B, Ids(), llada.LLADA["llada"], "masked", True),
    "diffusion_gemma": Case(
        GEMMA_26B, Ids(262144, 4, 0, 1, None, (0, 2, 4)),
        gemma.PRESETS["diffusion_gemma"], "uniform", False,
    ),
}  # fmt: skip


def abstract_model(case: Case, mesh: Mesh, cache: str, options: tuple[str, ...]) -> Model:
    """The model of a case, with sharded shapes as parameters."""
    network = build(case.model)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    places = shardings(shapes, axes_of(network, shapes), mesh)
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, "bfloat16", sharding=place),
        shapes, places,
    )  # fmt: skip
    sample = SamplingParams(**case.settings | {"cache": cache})
    config = Config(
        model=case.model, data=DataConfig(seq_len=CANVAS), sample=sample,
        objective=ObjectiveConfig(process=case.process),
    )  # fmt: skip
    return Model(
        network, cast(Any, params), cast(Tokenizer, case.ids), max_length=CANVAS, sample=sample,
        config=config, compiler_options=options,
    )  # fmt: skip


def abstract_state(model: Model, bucket: Bucket, requests: list[Any], rows: NamedSharding) -> Any:
    """The state of all rows before their first step, as sharded shapes."""
    program = compiled_loop(model, bucket, ROWS).program
    packed, rules = bucket.pack(requests * ROWS)

    def made() -> Any:
        tokens = jnp.full((ROWS, CANVAS), program.mask_id, jnp.int32)
        lengths = jnp.full(ROWS, CANVAS, jnp.int32)
        state = start(tokens, lengths, packed, rules, mask_id=program.mask_id)
        return with_cache(program, model.params, state)

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows)

    return jax.tree.map(placed, jax.eval_shape(made))


def measure(
    case: Case, topology: str, config: MeshConfig, cache: str, options: tuple[str, ...]
) -> str:
    """A row of the table."""
    mesh = make_mesh(config, topology_devices(topology))
    model = abstract_model(case, mesh, cache, options)
    room = CANVAS - 8
    requests = make_requests(model, {"tokens": [1] * 8}, {"gen_length": room, "steps": room})
    bucket = Bucket(requests, model.facts, CANVAS)
    loop = compiled_loop(model, bucket, ROWS).steps
    rows = loop.program.rows
    assert isinstance(loop, Advance) and rows is not None
    state = abstract_state(model, bucket, requests, rows)
    began = time.perf_counter()
    compiled = loop.compile(model.params, state)
    seconds = time.perf_counter() - began
    found, text = compiled.memory_analysis(), compiled.as_text()
    assert found is not None and text is not None
    modes: tuple[Mode, ...] = ("roof", "cycles")
    torus = torus_of(mesh)
    steps = " / ".join(f"{1e3 * cost(text, torus, mode).seconds:.0f}" for mode in modes)
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    parts = [found.argument_size_in_bytes, found.temp_size_in_bytes]
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"| {topology} | {axes} | {cache} | {on_paper(case.model, mesh):.1f} | "
        f"{parts[0] / _GIB:.1f} | {parts[1] / _GIB:.1f} | "
        f"{sum(parts) / _GIB:.1f} of {chip.memory / _GIB:.0f} | "
        f"{steps} | {seconds:.0f} |"
    )


def on_paper(model: ModelConfig, mesh: Mesh) -> float:
    """GiB per chip: a share of the parameters, one whole layer, and the LM head."""
    shapes = jax.eval_shape(build(model).init, jax.random.key(0))
    places = shardings(shapes, axes_of(build(model)), mesh)
    shares = jax.tree.map(lambda x, place: math.prod(place.shard_shape(x.shape)), shapes, places)
    layer = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]))
    layer /= len(model.layers["blocks"])
    layer = layer if mesh.shape["fsdp"] > 1 else 0
    table = shapes["embedding" if model.tied_head else "head"]
    is_split = mesh.shape["fsdp"] * mesh.shape["tensor"] > 1
    head = sum(leaf.size for leaf in jax.tree.leaves(table)) if is_split else 0
    return 2 * (sum(jax.tree.leaves(shares)) + layer + head) / _GIB


def main() -> None:
    """Prints one row per mesh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llada", choices=list(CASES))
    parser.add_argument(
        "--topology", nargs="*", default=("v5e:2x4", "v5p:2x2x1"), choices=list(MESHES)
    )
    parser.add_argument("--cache", default="none", choices=("none", "prefix", "dual", "exact"))
    parser.add_argument(
        "--compiler-options", nargs="*", default=(), help="as mesh.compiler_options"
    )
    parser.add_argument("--mesh", choices=("fsdp", "tensor", "expert"), help="only this mesh")
    args = parser.parse_args()
    print(
        "| topology | mesh | cache | on paper GiB | arguments | temporaries | of a chip | step ms "
        "| s |"
    )
    print("| --- " * 9 + "|")
    for topology in args.topology:
        case = CASES[args.model]
        for config in MESHES[topology]:
            if config.tensor > 1 and not case.splits_heads:
                continue  # a full layer has two key/value heads
            if config.expert > 1 and not case.model.experts:
                continue
            if args.mesh and getattr(config, args.mesh) == 1:
                continue
            print(
                measure(case, topology, config, args.cache, tuple(args.compiler_options)),
                flush=True,
            )


if __name__ == "__main__":
    main()
