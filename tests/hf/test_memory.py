"""A model in many files is read with no more of the host's memory than two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import published_cases as cases
import pytest
import safetensors.numpy

NUM_SHARDS, WIDTH, INNER, DEPTH = 6, 768, 3072, 6

# Prints how far the peak rises while it is read, beyond what the parameters themselves take.
PROGRAM = """
import resource, sys
import jax
import dlm_jax
from dlm_jax.config import MeshConfig

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

mesh = MeshConfig(data=1, fsdp=2) if sys.argv[3] == "split" else None
dlm_jax.load(sys.argv[1], mesh=mesh)
before = peak()
model = dlm_jax.load(sys.argv[2], mesh=mesh)
jax.block_until_ready(model.params)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(peak() - before - size)
"""


def _write(directory, depth):
    config = cases.CONFIGS["llada"] | cases.IDS
    config |= {"d_model": WIDTH, "mlp_hidden_size": INNER, "n_layers": depth, "n_kv_heads": 4}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(cases.tokenizer_json())
    rng, where, sizes = np.random.default_rng(0), {}, []
    shapes = cases.shapes("llada", config)
    names = list(shapes)
    for number in range(NUM_SHARDS):
        file = f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        part = names[len(names) * number // NUM_SHARDS : len(names) * (number + 1) // NUM_SHARDS]
        made = {name: rng.random(shapes[name], np.float32) for name in part}
        safetensors.numpy.save_file(made, directory / file)
        sizes.append(sum(value.nbytes for value in made.values()))
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "split"])
def test_reading_takes_no_more_memory_than_two_of_the_files(tmp_path, how):
    _write(tmp_path / "small", 1)
    largest = _write(tmp_path / "large", DEPTH)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "small", tmp_path / "large", how],
        capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 2 * largest
