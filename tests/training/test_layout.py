"""Where the arrays of a compiled training step lie, on simulated devices and for real topologies.

The compilers are asked, not the source: what they print of the finished program is searched.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import layout
import pytest

from dlm_jax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.training.plan import Plan, plan

ROOT = Path(__file__).parent.parent.parent
SIZES = layout.Sizes(rows=16, positions=36, vocabulary=200, own_rows=2)


def _config(name: str = "adamw", **model) -> Config:
    shape = {"depth": 2, "width": 32, "heads": 4, "vocab_size": SIZES.vocabulary}
    return Config(
        model=ModelConfig(**(shape | {"remat": "attention"} | model)),
        data=DataConfig(seq_len=SIZES.positions),
        optim=OptimConfig(name=name),
        train=TrainConfig(batch_size=SIZES.rows),
    )


@functools.cache
def _plan(fsdp: int, tensor: int = 1) -> Plan:
    mesh = make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor), jax.devices()[:8])
    return plan(_config(), mesh)


@pytest.mark.parametrize("fsdp", [1, 8])
def test_no_device_holds_all_rows_and_no_collective_moves_an_activation(fsdp):
    text = _plan(fsdp).text
    assert layout.whole_activations(text, SIZES) == []
    assert layout.moved_activations(text, SIZES) == []


def test_with_matrices_split_too_no_device_holds_all_rows():
    sizes = SIZES._replace(own_rows=4)
    assert layout.whole_activations(_plan(4, 2).text, sizes) == []


def test_a_plan_counts_the_state_that_each_device_holds():
    whole, split = _plan(1).memory["state"], _plan(8).memory["state"]
    assert whole / 8 < split < whole / 7
    assert _plan(8).num_parameters == _plan(1).num_parameters


_BATTERY = """
import jax, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from dlm_jax.distributed.mesh import topology_devices
devices = topology_devices("v5e:4x4")
import layout
from dlm_jax.config import (
    Config, DataConfig, HeadsConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
)
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.training.plan import plan

# No width of a kernel, nor its share of a chip, may equal the number of rows or positions.
rows, positions, vocabulary = 48, 384, 3000
sizes = layout.Sizes(rows, positions, vocabulary, rows // 16)
def step(optimizer="adamw", heads=None, fsdp=16, vocab_size=vocabulary, mesh=None, **model):
    config = Config(
        model=ModelConfig(depth=2, width=512, heads=4, vocab_size=vocab_size,
                          compute_dtype="bfloat16", remat="attention", **model),
        data=DataConfig(seq_len=positions), optim=OptimConfig(name=optimizer),
        heads=heads or HeadsConfig(),
        train=TrainConfig(batch_size=rows),
    )
    return plan(config, make_mesh(mesh or MeshConfig(fsdp=fsdp), devices))
def check(found):
    for search in (layout.whole_activations, layout.moved_activations):
        assert not search(found.text, sizes), search(found.text, sizes)
    assert "splash" in found.text
    return found
{checks}
print("passed")
"""


def _for_tpu(checks: str) -> None:
    """Runs checks in a process of its own, which computes on nothing and compiles for v5e:4x4."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed: pip install 'dlm_jax[tpu]'")
    code = _BATTERY.format(root=str(ROOT), checks=checks)
    given = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=given
    )
    assert done.stdout.strip().endswith("passed"), done.stdout + done.stderr


@pytest.mark.slow
def test_for_a_tpu_every_chip_holds_its_own_rows_and_a_bounded_memory():
    _for_tpu(
        "found = check(step())\nassert found.memory['temporaries'] < 60 * 2**20, found.memory\n"
    )


@pytest.mark.slow
def test_for_a_tpu_the_sampling_loop_keeps_each_chips_rows_apart():
    _for_tpu(
        "import canvases, toy\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "from dlm_jax.distributed.partitions import axes_of, shardings\n"
        "from dlm_jax.sampling.loop import Advance\n"
        "from dlm_jax.sampling.program import Program\n"
        "mesh = make_mesh(MeshConfig(fsdp=16), devices)\n"
        "split, whole = NamedSharding(mesh, P(('data', 'fsdp'))), NamedSharding(mesh, P())\n"
        "row = canvases.Row(canvases.holes(positions), steps=4)\n"
        "state = canvases.make_state([row] * rows, positions=positions)\n"
        "params = jax.eval_shape(toy.network().init, jax.random.key(0))\n"
        "def at(leaf, place):\n"
        "    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)\n"
        "params = jax.tree.map(at, params, shardings(params, axes_of(toy.network()), mesh))\n"
        "state = jax.tree.map(lambda leaf: at(leaf, split), state)\n"
        "number = jax.ShapeDtypeStruct((), 'int32', sharding=whole)\n"
        "advance = Advance(Program(toy.network(), toy.MASK, chunk=64, rows=split))\n"
        "text = advance._jitted.lower(params, state, number, number).compile().as_text()\n"
        "assert not layout.whole_activations(text, sizes), layout.whole_activations(text, sizes)\n"
        "assert not layout.moved_activations(text, sizes), layout.moved_activations(text, sizes)\n"
        "assert 'splash' in text\n"
    )
