"""Measures loading onto a mesh: the peak memory of the process, and the part of each device.

    python -m benchmarks.loading

Separate processes load a checkpoint and a weights file of a model with random parameters, onto one
device and onto eight simulated devices, which share the memory of the process. Peaks exclude the
memory before loading and are multiples of the parameters' bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.config import Config, MeshConfig, ModelConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.model.transformer import build
from dlm_jax.store import Checkpoints, save_weights

MESHES = (None, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2})


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--one", help="(internal: loads one model)")
    args = parser.parse_args()
    if args.one is not None:
        _load(**json.loads(args.one))
        return
    with tempfile.TemporaryDirectory() as directory:
        size = _save(Path(directory), args)
        print(f"{size / 2**20:.0f} MiB of parameters in float32")
        print("| source | mesh | dtype | largest part on a device | peak of the process |")
        print("| --- | --- | --- | --- | --- |")
        for source in ("run", "model.safetensors"):
            for mesh in MESHES:
                for dtype in ("float32", "bfloat16"):
                    asked = {"path": f"{directory}/{source}", "mesh": mesh, "dtype": dtype}
                    found = _in_a_process(asked)
                    axes = (
                        "one device"
                        if mesh is None
                        else " ".join(f"{a} {n}" for a, n in mesh.items())
                    )
                    print(
                        f"| {source} | {axes} | {dtype} | {found['part'] / size:.3f} | "
                        f"{found['peak'] / size:.2f} |", flush=True,
                    )  # fmt: skip


def _save(directory: Path, args: argparse.Namespace) -> int:
    """Saves a model to the directory in both formats; returns the bytes of its parameters."""
    tokenizer = CharacterTokenizer.of("The cat sat. A rat ran.")
    model = ModelConfig(
        depth=args.depth, width=args.width, heads=8, vocab_size=tokenizer.vocab_size
    )
    params = jax.jit(build(model).init)(jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: leaf + 0.01 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape)), params
    )
    meta = {
        "config": configs.to_dict(Config(model=model)),
        "tokenizer": tokenizer.to_json(),
        "corpus": {"name": "toy", "sha256": "0"},
    }
    with Checkpoints(directory / "run" / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": params}, meta)
    save_weights(directory / "model.safetensors", params, meta)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _in_a_process(asked: dict[str, Any]) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(asked)],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _load(path: str, mesh: dict[str, Any] | None, dtype: str) -> None:
    """Loads a model and prints its largest part on a device and the peak of the process."""
    jax.block_until_ready(jnp.ones(8) + np.float32(1))  # initialises the backend before measuring
    # Resets the peak, because `getrusage` includes the memory of the parent process.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    model = dlm_jax.load(path, mesh=None if mesh is None else MeshConfig(**mesh), dtype=dtype)
    leaves = jax.block_until_ready(jax.tree.leaves(model.params))
    parts: dict[Any, int] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            parts[shard.device] = parts.get(shard.device, 0) + shard.data.nbytes
    print(json.dumps({"part": max(parts.values()), "peak": _status("VmHWM") - before}))


def _status(name: str) -> int:
    """A memory figure of the process in bytes, by its name in Linux."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
