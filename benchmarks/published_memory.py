"""What sampling from an 8B model needs on TPUs, by their compiler: the memory of a chip.

    python -m benchmarks.published_memory [--topology v5e:2x4 ...] [--cache none]

LLaDA-8B in bfloat16, 32 rows on a canvas of 1024 with the settings of its preset ``llada``: the
loop that `dlm_jax.generate` runs, compiled with abstract parameters for devices that need not be
there (the extra ``tpu``). On paper a chip holds its share of the parameters, all parameters of the
layer that it computes, and the LM head whole, with which it reads out its own rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dlm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, SampleConfig
from dlm_jax.data import Tokenizer
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.distributed.partitions import make_mesh, shardings
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.slots import Bucket, loop_of
from dlm_jax.model.transformer import build
from dlm_jax.published import family
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.loop import Advance
from dlm_jax.sampling.state import start

ROWS, CANVAS = 32, 1024
LLADA_8B = ModelConfig(
    depth=32, width=4096, heads=32, mlp_width=12288, vocab_size=126464, activation="swiglu",
    norm="rms", norm_epsilon=1e-5, qk_norm=False, rope_theta=500000.0, tied_head=False,
    compute_dtype="bfloat16",
)  # fmt: skip
MESHES = {
    "v5e:2x4": (MeshConfig(data=1, fsdp=8), MeshConfig(data=1, tensor=8)),
    "v5p:2x2x1": (MeshConfig(data=1, fsdp=4), MeshConfig(data=1, tensor=4)),
}
_GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Ids:
    """Stands for LLaDA's tokenizer, of which ids alone are asked."""

    vocab_size: int = 126349
    mask_id: int = 126336
    pad_id: int = 126081
    eos_id: int = 126081
    space_id: int | None = None

    banned_ids: tuple[int, ...] = (126336,)


def abstract_model(mesh: Mesh, cache: str) -> Model:
    """LLaDA-8B whose parameters are shapes with a place."""
    network = build(LLADA_8B)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    places = shardings(shapes, mesh)
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, "bfloat16", sharding=place),
        shapes, places,
    )  # fmt: skip
    sample = SampleConfig(**family.LLADA["llada"] | {"cache": cache})
    config = Config(model=LLADA_8B, data=DataConfig(seq_len=CANVAS), sample=sample)
    return Model(
        network, cast(Any, params), cast(Tokenizer, Ids()), max_length=CANVAS, sample=sample,
        config=config,
    )  # fmt: skip


def abstract_state(model: Model, bucket: Bucket, requests: list[Any], rows: NamedSharding) -> Any:
    """The state of all rows before their first step, as shapes with a place."""
    program = loop_of(model, bucket, ROWS).program
    packed, rules = bucket.pack(requests * ROWS)

    def made() -> Any:
        tokens = jnp.full((ROWS, CANVAS), program.mask_id, jnp.int32)
        lengths = jnp.full(ROWS, CANVAS, jnp.int32)
        state = start(tokens, lengths, packed, rules, mask_id=program.mask_id)
        return with_cache(program, model.params, state)

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows)

    return jax.tree.map(placed, jax.eval_shape(made))


def measure(topology: str, config: MeshConfig, cache: str) -> str:
    """A row of the table."""
    mesh = make_mesh(config, topology_devices(topology))
    model = abstract_model(mesh, cache)
    room = CANVAS - 8
    requests = make_requests(model, {"tokens": [1] * 8}, {"gen_length": room, "steps": room})
    bucket = Bucket(requests, model.facts, CANVAS)
    loop = loop_of(model, bucket, ROWS)
    rows = loop.program.rows
    assert isinstance(loop, Advance) and rows is not None
    state = abstract_state(model, bucket, requests, rows)
    began = time.perf_counter()
    found = loop.compile(model.params, state).memory_analysis()
    assert found is not None
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    parts = [found.argument_size_in_bytes, found.temp_size_in_bytes]
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"| {topology} | {axes} | {cache} | {on_paper(mesh):.1f} | {parts[0] / _GIB:.1f} | "
        f"{parts[1] / _GIB:.1f} | {sum(parts) / _GIB:.1f} of {chip.memory / _GIB:.0f} | "
        f"{time.perf_counter() - began:.0f} |"
    )


def on_paper(mesh: Mesh) -> float:
    """GiB of a chip: its share of the parameters, one whole layer of them, and the LM head."""
    shapes = jax.eval_shape(build(LLADA_8B).init, jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    layer = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"])) / LLADA_8B.depth
    head = shapes["head"]["kernel"].size
    layer = layer if mesh.shape["fsdp"] > 1 else 0
    return 2 * (total / mesh.size + layer + head) / _GIB


def main() -> None:
    """Prints a row for every mesh."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--cache", default="none", choices=("none", "prefix", "dual"))
    args = parser.parse_args()
    print("| topology | mesh | cache | on paper GiB | arguments | temporaries | of a chip | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for topology in args.topology:
        for config in MESHES[topology]:
            print(measure(topology, config, args.cache), flush=True)


if __name__ == "__main__":
    main()
