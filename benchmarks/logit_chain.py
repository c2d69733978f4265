"""Prints the estimated cost of the logit chain on a TPU, compared with a forward of a trunk.

    python -m benchmarks pods logits [--topology v5e:2x2] [--only NAME ...]

512 positions of 32768 logits pass through each transform or all, and a draw, on one chip, with
the kernel of transforms and without it. The trunk has 12 layers of width 1024 in bfloat16, for 4
rows of 1024. No TPU is required. Times are estimates (`dlm_jax.contrib.pod_costs`, mode
``cycles``): the more expensive of two branches counts, and a search takes `TURNS` passes. The
cycles of kernels come from their schedules, without the rare branch for ties. ``top_k`` and gathers
count as free.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks import bundles
from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.contrib.pod_costs import Torus, cost
from dlm_jax.devices import used
from dlm_jax.distributed.mesh import CHIPS, Chip, topology_devices
from dlm_jax.model.transformer import build
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.transforms import At, Context, resident, truncate

ROWS, POSITIONS, VOCAB, TURNS = 16, 512, 32768, 20
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
LOOPS = {
    "top_nsigma": (0, 0),
    "top_k": (TURNS, 0),
    "typical_p": (TURNS, 0),
    "top_p": (TURNS, 0),
    "min_p": (0, 0),
    "max_surprise": (0, 0),
}
"""How often the nested loops of a transform run, by its class, in the order of a kernel."""
TRUNK = {"depth": 12, "width": 1024, "heads": 16, "compute_dtype": "bfloat16"}
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def chain_program(names: list[str]) -> Program:
    """A function that draws through these transforms, and its arguments."""
    settings = {key: value for name in names for key, value in ON[name].items()}
    sample = SamplingParams(chain=tuple(names), **settings)
    chain = BUILT_IN.pack([sample] * ROWS, ModelFacts(vocab_size=VOCAB)).chain
    tokens, rows = jnp.zeros((ROWS, 64), jnp.int32), jnp.arange(POSITIONS, dtype=jnp.int32) % ROWS
    context = Context(tokens, tokens, tokens > 0, jnp.full(ROWS, 64))
    at = At(rows, 0 * rows, jax.random.split(jax.random.key(1), POSITIONS), rows >= 0)

    def draw(chain, logits_NV, at):
        return chain.draw(chain.init(context), logits_NV, at)

    return draw, (chain, jnp.zeros((POSITIONS, VOCAB), jnp.float32), at)


def compiled(program: Program, device: Any) -> str:
    """The compiled program for a device as text."""
    place = SingleDeviceSharding(device)

    def traced(*args: Any) -> Any:
        with used(place):
            return program[0](*args)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda: program[1]),
    )
    return jax.jit(traced).lower(*shapes).compile().as_text() or ""


def cycles(name: str, schedule: str) -> int:
    """Cycles of a kernel, whose loops are over blocks, or over passes or halves of ids and then
    over blocks. Loops over halves usually do not run, nor do the searches of other transforms.
    """
    lines = re.findall(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)", schedule, re.MULTILINE)
    blocks = -(-VOCAB // (resident.WIDTH * resident.blocks_at_once(VOCAB)))
    times = [x for one, of_one in LOOPS.items() if one in name for x in of_one]
    outside, loops = 0, []
    for mark, depth in lines:
        if mark == "LB" and len(depth) == 2:
            loops.append([0, 0])
        if len(depth) < 2:
            outside += 1
        else:
            loops[-1][len(depth) > 2] += 1
    nested = [loop for loop in loops if loop[1]]
    assert len(nested) == len(times), f"{name} has {len(nested)} nested loops, not {len(times)}"
    total = outside + sum(blocks * bundles for bundles, inner in loops if not inner)
    total += sum(
        turns * (outer + blocks * inner)
        for turns, (outer, inner) in zip(times, nested, strict=True)
    )
    return total * POSITIONS // resident.POSITIONS


def seconds_of(text: str, chip: Chip, schedules: dict[str, str]) -> float:
    """Estimated seconds of a program, given the schedules of its kernels."""
    kernels = {key: cycles(key, x) / chip.clock for key, x in schedules.items()}
    torus, repeats = Torus(chip, ((0, 0),), (1, 1)), {truncate.PASSES: TURNS}
    return cost(text, torus, "cycles", repeats=repeats, kernels=kernels).seconds


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    network = build(ModelConfig(vocab_size=VOCAB, **TRUNK))  # type: ignore[arg-type]
    params = jax.eval_shape(network.init, jax.random.key(0))
    inputs = params, jnp.zeros((4, 1024), jnp.int32), jnp.full(4, 1024)
    programs: dict[str, Program] = {"trunk": (lambda *args: network.trunk(*args, None), inputs)}
    programs |= {name: chain_program([name]) for name in ON}
    programs["all"] = chain_program(list(SamplingParams().chain))
    print("| program | ms | of the trunk | ms without the kernel | of the trunk |")
    print("| --- | --- | --- | --- | --- |")
    ways, trunk = (resident.runs_here, lambda num_logits: False), 0.0
    with bundles.written(r"transforms_\w+") as schedules:
        device = topology_devices(args.topology)[0]
        for name in args.only or programs:
            cells = []
            for resident.runs_here in ways:
                text = compiled(programs[name], device)
                ms = 1e3 * seconds_of(text, CHIPS[device.device_kind], schedules())
                trunk = ms if name == "trunk" else trunk
                cells += [f"{ms:.2f}", f"{ms / trunk:.0%}" if trunk else "-"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
