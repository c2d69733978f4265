"""What is kept lies still: the TPU compiler is asked what a block step of a large model needs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent

_STEP = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from dlm_jax.distributed.topology import topology_devices
devices = topology_devices("v5e:2x2")
import re
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dlm_jax import devices as in_use
from dlm_jax.config import ModelConfig, SampleConfig
from dlm_jax.model.transformer import build
from dlm_jax.sampling.advance import Advance
from dlm_jax.sampling.facts import ModelFacts
from dlm_jax.sampling.forward import with_cache
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.sampling.state import start

OWN, POSITIONS, BLOCK, VOCABULARY = 16, 2048, 32, 32768
ROWS = OWN * len(devices)
MASK = VOCABULARY - 1
config = ModelConfig(
    depth=20, width=2048, heads=16, vocab_size=VOCABULARY, compute_dtype="bfloat16",
    attention_type="block_causal", block_length=BLOCK,
)
network = build(config)
mesh = Mesh(np.array(devices), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
program = Program(network, MASK, chunk=256, rows=split, banned_ids=(MASK,))
sample = SampleConfig(
    cache="exact", block_length=BLOCK, order="low_confidence", chain=("temperature",), steps=128
)
keyed = type("Row", (), vars(sample) | dict(seed=0, capacity=0))
facts = ModelFacts(VOCABULARY, (MASK,), has_cache=True, block_length=BLOCK)

def make(params):
    tokens_BL = jnp.full((ROWS, POSITIONS), MASK, jnp.int32)
    state = start(
        tokens_BL, jnp.full(ROWS, POSITIONS, jnp.int32), RowParams.pack([keyed] * ROWS, facts),
        BUILT_IN.pack([sample] * ROWS, facts), mask_id=MASK,
    )
    return with_cache(program, params, state)

def at(leaf, place, dtype=None):
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place)

params = jax.eval_shape(network.init, jax.random.key(0))
params = jax.tree.map(lambda leaf: at(leaf, whole, "bfloat16"), params)
assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 1e9
with in_use.used(split):
    state = jax.eval_shape(make, params)
kept = jax.tree.leaves(state.cache.kept)
state = jax.tree.map(lambda leaf: at(leaf, split), state)
number = jax.ShapeDtypeStruct((), "int32", sharding=whole)
compiled = Advance(program)._jitted.lower(params, state, number, number).compile()
memory = compiled.memory_analysis()
size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
# 2 depth B L G K numbers of two bytes
assert size == 2 * 20 * ROWS * POSITIONS * 2048 * 2, size
size //= len(devices)
text = compiled.as_text()
shape = ",".join(map(str, (OWN, *kept[0].shape[1:])))
assert f"bf16[{{shape}}]" in text
gathers = re.compile(r"= \\S+ all-gather(-start)?\\(")
gathered = [line[:200] for line in text.splitlines() if gathers.search(line)]
assert not gathered, gathered
moved = re.compile(rf"= bf16\\[{{shape}}\\]\\S* (copy|transpose)\\(")
moves = [line[:200] for line in text.splitlines() if moved.search(line)]
assert not moves, moves
assert memory.alias_size_in_bytes >= size, memory
# 0.48: the keys and values of a layer, as they are multiplied, and the logits of a chunk.
assert memory.temp_size_in_bytes < 0.6 * size, memory
print("passed")
"""


@pytest.mark.slow
def test_for_a_tpu_a_block_step_of_a_large_model_holds_what_is_kept_once():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed: pip install 'dlm_jax[tpu]'")
    code = _STEP.format(root=str(ROOT))
    given = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=given
    )
    assert done.stdout.strip().endswith("passed"), done.stdout + done.stderr
