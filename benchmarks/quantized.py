"""Quality of a model with 8-bit matrices, and the memory and time that they save on a TPU.

Command: python -m benchmarks.quantized [--checkpoint PATH] [--source FILE] [--judge RUN]
         python -m benchmarks.quantized --topology v5e:4x4 [--model 1.3B] [--rows 256]

The first command prints the bytes of the parameters, the bound on 128 held-out windows with the
same masks, and the bits of 64 texts under the judge, in float32, bfloat16 and quantised. The second
command compiles a sampling step of whole canvases of 1024 for TPUs that may be absent.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax

import dlm_jax
from benchmarks.pods import Sampled, model_of, sampling_step
from benchmarks.quality import judged_bits
from dlm_jax.cli.common import start_jax
from dlm_jax.config import MeshConfig, ModelConfig, SamplingParams
from dlm_jax.contrib.pod_costs import cost, torus_of
from dlm_jax.data import load_corpus, validation_windows
from dlm_jax.distributed.mesh import topology_devices
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.inference.model import Model
from dlm_jax.inference.scoring import score_rows
from dlm_jax.model.quantized import KINDS, quantized_kernel
from dlm_jax.model.transformer import build

NUM_TEXTS, NUM_WINDOWS, NUM_DRAWS = 64, 128, 4


def variants(checkpoint: str | None) -> dict[str, Model]:
    """The model in each form; the last form also has an 8-bit embedding with a scale per token."""
    usual = dlm_jax.load(checkpoint)
    assert usual.config is not None
    half = build(dataclasses.replace(usual.config.model, compute_dtype="bfloat16"))
    found = {
        "float32": usual,
        "bfloat16": dataclasses.replace(
            dlm_jax.load(checkpoint, dtype="bfloat16"), network=half
        ),
    }  # fmt: skip
    for kind in KINDS:
        small = dlm_jax.load(checkpoint, quantize=kind)
        found[kind] = small
        found[f"{kind}, bfloat16"] = dataclasses.replace(small, network=half)
    table = quantized_kernel(usual.params["embedding"].T)
    rounded = (table.values * table.scales[None]).T
    found["int8 with embeddings"] = dataclasses.replace(
        found["int8"], params={**found["int8"].params, "embedding": rounded}
    )
    return found


def print_quality(checkpoint: str | None, source: str | None, judge: Model | None) -> None:
    models = variants(checkpoint)
    config = models["float32"].config
    assert config is not None
    data = config.data
    corpus = load_corpus(
        source or data.source, tokenizer=models["float32"].tokenizer, held_out=data.held_out,
        layout=data.layout, tail=data.tail, seq_len=data.seq_len,
    )  # fmt: skip
    rows = validation_windows(
        corpus.val_rows, seq_len=data.seq_len, pad_id=models["float32"].tokenizer.pad_id,
        max_windows=NUM_WINDOWS,
    )  # fmt: skip
    print("| parameters | MiB | bound, nats/token | judged bits/char |")
    print("| --- | --- | --- | --- |")
    for name, model in models.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        nats = score_rows(model, rows, num_draws=NUM_DRAWS, seed=0).nats_B
        tokens = (rows["length"] - rows["given"]).sum()
        shown = "-"
        if judge is not None:
            texts = list(dlm_jax.generate(model, num_samples=NUM_TEXTS, seed=1000).texts)
            shown = "{:.3f} ± {:.3f}".format(*judged_bits(judge, [text[:256] for text in texts]))
        is_rounded = "embeddings" in name
        mib = "-" if is_rounded else f"{size / 2**20:.2f}"
        print(f"| {name} | {mib} | {nats.sum() / tokens:.4f} | {shown} |", flush=True)


def print_steps(
    name: str, topology: str, num_rows: int, fsdp: int, options: tuple[str, ...]
) -> None:
    mesh = make_mesh(MeshConfig(fsdp=fsdp), topology_devices(topology))
    shape = ModelConfig(**model_of(Sampled(name, topology, num_rows, fsdp)))
    sample = SamplingParams(order="low_confidence", chain=("temperature",), steps=8)
    print("| parameters | arguments GiB | temporaries GiB | step ms (roof / cycles) | compiled s |")
    print("| --- | --- | --- | --- | --- |")
    for kind in (None, *KINDS):
        began = time.perf_counter()
        compiled, _ = sampling_step(
            shape, sample, mesh, num_rows, 1024, quantize=kind, options=options
        )
        seconds = time.perf_counter() - began
        memory, text = compiled.memory_analysis(), compiled.as_text()
        roof, cycles = cost(text, torus_of(mesh), "roof"), cost(text, torus_of(mesh), "cycles")
        print(
            f"| {kind or 'bfloat16'} | {memory.argument_size_in_bytes / 2**30:.3f} | "
            f"{memory.temp_size_in_bytes / 2**30:.3f} | "
            f"{roof.seconds * 1e3:.0f} / {cycles.seconds * 1e3:.0f} | {seconds:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="default: the shipped model")
    parser.add_argument("--source", help="path of the corpus, if it differs from the config")
    parser.add_argument("--judge", help="a run of configs/shakespeare_judge.toml")
    parser.add_argument("--topology", help="such as v5e:4x4")
    parser.add_argument("--model", default="1.3B", help="150M, 1.3B or 8B")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--compiler-options", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    if args.topology:
        print_steps(args.model, args.topology, args.rows, args.fsdp, tuple(args.compiler_options))
        return
    start_jax()
    judge = None if args.judge is None else dlm_jax.load(args.judge)
    print_quality(args.checkpoint, args.source, judge)


if __name__ == "__main__":
    main()
