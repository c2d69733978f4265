"""Prints the estimated cost of the logit chain on a TPU, compared with a forward of a trunk.

Command: python -m benchmarks.logit_chain [--topology v5e:2x2] [--only NAME ...]
         python -m benchmarks.logit_chain --loop --topology v5e:2x4

512 positions of 32768 logits pass through each transform, through all transforms, and through a
draw, on one chip. The trunk has 12 layers of width 1024 in bfloat16; its 4 rows of 1024 are the
share of one of 16 chips in 64 rows. No TPU is required (extra ``tpu``). ``roof`` and ``cycles`` are
estimates (`dlm_jax.contrib.pod_costs`): the more expensive of two branches counts. The cycles of
the kernels come from `benchmarks.bundles`; ``worst`` includes their rare branches. The compiler
estimates no cycles of ``top_k``, which runs twice (64 and 100 of 32768), and of gathers. With
``--loop``, the program prints the seconds in which the loop with all transforms compiles, for 64
rows of 1024, without and with the default options of the chips.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.pods import sampling_step
from benchmarks.scenes import ROWS, place, scene
from dlm_jax.config import MeshConfig, ModelConfig, SamplingParams
from dlm_jax.contrib.pod_costs import Torus, costs
from dlm_jax.devices import used
from dlm_jax.distributed import mesh
from dlm_jax.distributed.mesh import topology_devices
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.model.transformer import build
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.transforms import resident

POSITIONS, VOCAB = 512, 32768
ON: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: 1.0}},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "dry": {"dry_multiplier": 0.8},
    "temperature": {"temperature": 0.8, "dynatemp_range": 0.5},
    "top_n_sigma": {"top_n_sigma": 2.0},
    "top_k": {"top_k": 400},
    "typical_p": {"typical_p": 0.9},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.01},
    "xtc": {"xtc_probability": 0.5},
    "mirostat": {"mirostat": 1},
}
TRUNK = {"depth": 12, "width": 1024, "heads": 16, "compute_dtype": "bfloat16"}


def compiled(fn: Callable[..., Any], device: Any, *args: Any) -> tuple[str, float]:
    """The compiled program for a device as text, and the processor seconds of the compilation."""
    place = SingleDeviceSharding(device)

    def traced(*args: Any) -> Any:
        with used(place):
            return fn(*args)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda: args),
    )
    lowered = jax.jit(traced).lower(*shapes)
    start = time.process_time()
    text = lowered.compile().as_text()
    assert text is not None
    return text, time.process_time() - start


def chain_program(names: list[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that draws through these transforms, and its arguments."""
    settings = {key: value for name in names for key, value in ON[name].items()}
    sample = SamplingParams(chain=tuple(names), **settings)
    chain = BUILT_IN.pack_chain([sample] * ROWS, ModelFacts(vocab_size=VOCAB))

    def draw(chain, logits_NV, at):
        return chain.draw(chain.prepare(chain.init(ROWS), scene()), logits_NV, at)

    logits_NV = jnp.zeros((POSITIONS, VOCAB), jnp.float32)
    return draw, (chain, logits_NV, place(POSITIONS))


class Group(NamedTuple):
    """Transforms that one kernel runs, and the function that runs them, with its arguments."""

    steps: list[tuple[Any, Any]]
    run: Callable[..., Any]
    args: tuple[Any, ...]


def kernel_groups() -> list[Group]:
    """The kernels of all chains in the table."""
    found: dict[str, Group] = {}
    for names in [[name] for name in ON] + [list(ON)]:
        _, (chain, logits_NV, at) = chain_program(names)
        steps = list(zip(chain.transforms, chain.prepare(chain.init(ROWS), scene()), strict=True))
        cut = chain.where_few()
        for group in [
            group for half in (steps[:cut], steps[cut:]) for group in resident.groups(half)
        ]:
            if resident.has_kernel(group[0][0]):
                args = group, logits_NV, at
                found[resident.name_of(group)] = Group(group, resident.run, args)
    return list(found.values())


def print_loop(topology: str) -> None:
    """Prints the seconds in which the loop with all transforms compiles."""
    settings = {key: value for name in SamplingParams().chain for key, value in ON[name].items()}
    sample = SamplingParams(steps=128, order="low_confidence", block_length=32, **settings)
    devices = make_mesh(MeshConfig(fsdp=1), topology_devices(topology))
    model = ModelConfig(vocab_size=VOCAB, **TRUNK)  # type: ignore[arg-type]
    for options in (("none",), ()):
        start = time.perf_counter()
        sampling_step(model, sample, devices, 64, 1024, options=options)
        print(f"{' '.join(options) or 'default'}: {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--only", nargs="+", choices=["trunk", "all", *ON])
    parser.add_argument("--loop", action="store_true", help="compile the loop")
    args = parser.parse_args()
    if args.loop:
        print_loop(args.topology)
        return
    device = topology_devices(args.topology)[0]
    torus = Torus(mesh.CHIPS[device.device_kind], ((0, 0),), (1, 1))
    network = build(ModelConfig(vocab_size=VOCAB, **TRUNK))  # type: ignore[arg-type]
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "trunk": (
            lambda params, tokens, lengths: network.trunk(params, tokens, lengths, None),
            (
                jax.eval_shape(network.init, jax.random.key(0)),
                jnp.zeros((4, 1024), jnp.int32),
                jnp.full(4, 1024),
            ),
        )
    }
    assert set(ON) == set(SamplingParams().chain)
    programs |= {name: chain_program([name]) for name in ON}
    programs["all"] = chain_program(list(SamplingParams().chain))
    read = [sys.executable, "-m", "benchmarks.bundles", "--topology", args.topology]
    kernels = json.loads(subprocess.run(read, check=True, stdout=subprocess.PIPE).stdout)
    print("| program | processor seconds of the compiler | ms (roof) | ms (cycles) | worst |")
    print("| --- | --- | --- | --- | --- |")
    for name, (fn, given) in programs.items():
        if args.only and name not in args.only:
            continue
        text, seconds = compiled(fn, device, *given)
        ways: tuple[tuple[costs.Mode, int], ...] = (("roof", 0), ("cycles", 0), ("cycles", 1))
        roof, usual, worst = (
            costs.cost(text, torus, mode, kernels={key: x[place] for key, x in kernels.items()})
            for mode, place in ways
        )
        columns = [f"{1e3 * cost.seconds:.2f}" for cost in (roof, usual, worst)]
        print(f"| {name} | {seconds:.1f} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
