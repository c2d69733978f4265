"""What is kept lies still: the TPU compiler is asked what a block step of a large model needs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent

_BEGIN = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from dlm_jax.distributed.mesh import topology_devices
devices = topology_devices("v5e:2x2")
import math
import re
import jax
import layout
from tpu_step import sampling_step
from dlm_jax.config import MeshConfig, ModelConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.model.transformer import build

BLOCK = 32
def sample(cache):
    return SamplingParams(
        cache=cache, block_length=BLOCK, order="low_confidence", chain=("temperature",), steps=128
    )
"""

_LARGE = """
OWN, POSITIONS = 16, 2048
ROWS = OWN * len(devices)
config = ModelConfig(
    depth=20, width=2048, heads=16, vocab_size=32768, compute_dtype="bfloat16",
    attention_type="block_causal", block_length=BLOCK,
)
params = jax.eval_shape(build(config).init, jax.random.key(0))
assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 1e9
mesh = make_mesh(MeshConfig(), devices)
compiled, state = sampling_step(config, sample("exact"), mesh, ROWS, POSITIONS)
kept = jax.tree.leaves(state.cache.kv_cache)
memory = compiled.memory_analysis()
size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
# 2 depth B L G K numbers of two bytes
assert size == 2 * 20 * ROWS * POSITIONS * 2048 * 2, size
size //= len(devices)
text = compiled.as_text()
shape = ",".join(map(str, (OWN, *kept[0].shape[1:])))
assert f"bf16[{shape}]" in text
assert "window_attention" in text and "rotary" in text
gathers = re.compile(r"= \\S+ all-gather(-start)?\\(")
gathered = [line[:200] for line in text.splitlines() if gathers.search(line)]
assert not gathered, gathered
moved = re.compile(rf"= bf16\\[{shape}\\]\\S* (copy|transpose)\\(")
moves = [line[:200] for line in text.splitlines() if moved.search(line)]
assert not moves, moves
assert memory.alias_size_in_bytes >= size, memory
# 0.48: the keys and values of a layer, as they are multiplied, and the logits of a chunk.
assert memory.temp_size_in_bytes < 0.6 * size, memory
print("passed")
"""

_WINDOWS = """
from jax.sharding import SingleDeviceSharding
from dlm_jax.devices import used
from dlm_jax.model.ops import window_attention

place = SingleDeviceSharding(devices[0])
# Positions of the window and its heads, groups and size; cached and visible positions; whether the
# tiles fit.
for window, heads, groups, size, positions, seen, fits in [
    (1, 32, 4, 128, 1024, 1024, True), (32, 12, 12, 64, 1024, 512, True),
    (7, 8, 8, 24, 777, 777, True), (3072, 4, 4, 128, 4096, 1024, True),
    (32, 16, 8, 256, 8192, 8000, True), (512, 4, 1, 128, 512, 200, True),
    (3072, 32, 8, 128, 4096, 1024, True), (6144, 16, 8, 256, 8192, 2048, False),
    (32, 128, 1, 128, 4096, 4096, False), (64, 41, 41, 72, 2048, 2048, False),
]:
    def given(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct((2, *shape), dtype, sharding=place)
    def run(q, leaf, own, of_kept, of_own, layer):
        with used(place):
            return window_attention(q, (leaf, leaf), (own, own), (of_kept, of_own), layer=layer)
    queries = window * heads // groups
    compiled = jax.jit(run).lower(
        given(window, heads, size), given(3, groups, positions, size), given(groups, window, size),
        given(1, queries, seen, dtype="float32"), given(1, queries, window, dtype="float32"),
        jax.ShapeDtypeStruct((), "int32", sharding=place),
    ).compile()
    assert ("tpu_custom_call" in compiled.as_text()) == fits
print("passed")
"""


def _for_tpu(code: str) -> None:
    """Runs a text in a process of its own, which computes on nothing and compiles for v5e:2x2."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed: pip install 'dlm_jax[tpu]'")
    given = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN.format(root=str(ROOT)) + code],
        cwd=ROOT, capture_output=True, text=True, env=given,
    )  # fmt: skip
    assert done.stdout.strip().endswith("passed"), done.stdout + done.stderr


@pytest.mark.slow
def test_for_a_tpu_a_block_step_of_a_large_model_holds_what_is_kept_once():
    _for_tpu(_LARGE)


@pytest.mark.slow
def test_for_a_tpu_the_kernel_of_a_window_compiles_in_all_shapes():
    _for_tpu(_WINDOWS)
