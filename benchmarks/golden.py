"""Prints a hash of the library's results for many settings, to check that refactoring changes
nothing.

    python -m benchmarks.golden > after.txt && diff before.txt after.txt

A line is the hash of a case's texts and its name; ``--texts`` adds the texts themselves. The cases
are every order, fill, remask rule, edit rule, cache and published loop with the shipped models,
with prompts (``given``) and without (``empty``); the programs ``sample.py`` and ``evaluate``; and
tiny training runs, whose parameters and messages are hashed. Only public names and programs are
used. ``--only WORD`` runs the cases whose names contain the word. Hashes are valid for one machine,
because compiled float32 code differs between processors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

_QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# Set before JAX is imported, and inherited by the started programs.
os.environ["XLA_FLAGS"] = _QUICK
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax  # noqa: E402
import numpy as np  # noqa: E402

import dlm_jax  # noqa: E402
from dlm_jax.contrib import remdm  # noqa: E402
from dlm_jax.contrib.edits import Lead  # noqa: E402
from dlm_jax.contrib.speculative import Speculative  # noqa: E402
from dlm_jax.hf import llada, qwen  # noqa: E402

Settings = dict[str, Any]
_RANDOM: Settings = {"order": "random", "fill": "parallel"}
_SURE: Settings = {"order": "low_confidence", "fill": "parallel"}
_REMDM: Settings = {"rules": remdm, "order": "ancestral_remdm", "fill": "parallel"}
_SHORT: Settings = {"gen_length": 24, "steps": 8}

SHAKESPEARE: dict[str, Settings] = {
    "recommended": {},
    **{
        f"{order} {fill}": {"order": order, "fill": fill}
        for order in (
            "low_confidence", "entropy", "margin", "threshold", "entropy_bound",
            "joint_threshold", "random", "left_to_right", "random_filled", "ancestral",
        )
        for fill in ("parallel", "wavefront")
    },
    "greedy low_confidence": _SURE | {"temperature": 0.0},
    "greedy max confidence cosine": _SURE
    | {"temperature": 0.0, "confidence": "max", "schedule": "cosine"},
    "greedy entropy blocks": {"order": "entropy", "fill": "parallel", "temperature": 0.0,
                              "block_length": 8},
    "threshold least": {"order": "threshold", "fill": "parallel", "threshold_least": 3},
    "seeds spread, even and odd": {"sampler_spread_seeds": True, "sampler_even_odd": True,
                                   "sampler_min_neighbors_ratio": 0.2},
    "one-sided, by density": {"sampler_one_sided": True, 
                              "sampler_min_neighbors_ratio": 0.3},
    "scheduled by critic": {"remask": "scheduled", "remask_by": "critic", "remask_start": 0.3},
    "scheduled threshold": _SURE | {"remask": "scheduled_threshold"},
    "scheduled with chance": _SURE | {"remask": "scheduled", "remask_randomness": 0.5},
    "remdm_cap": _REMDM | {"remask": "remdm_cap"},
    "remdm_rescale": _REMDM | {"remask": "remdm_rescale"},
    "remdm_conf": _REMDM | {"remask": "remdm_conf"},
    "renoise random": _RANDOM | {"renoise": "random", "renoise_start": 0.3, "resample": True,
                                 "schedule": "all"},
    "edits by uncertainty": _RANDOM | {"edit": True, "edit_token": "mask",
                                       "insert_ratio_start": 0.3, "delete_ratio_start": 0.2},
    "transforms": _RANDOM | {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8,
                             "repetition_penalty": 1.2, "dry_multiplier": 0.8,
                             "xtc_probability": 0.3},
    "mirostat": _RANDOM | {"mirostat": 2},
    "typical, dynamic": _RANDOM | {"typical_p": 0.8, "dynatemp_range": 0.4, "top_n_sigma": 2.0},
    "guidance": _RANDOM | {"guidance": 1.0},
    "several blocks": _SURE | {"block_length": 6, "steps": 12},
    "dual cache": _SURE | {"block_length": 8, "cache": "dual"},
    "published llada": llada.LLADA["llada"] | {"fill": "parallel", "block_length": 8} | _SHORT,
    "published fast": llada.LLADA["fast"] | {"fill": "parallel", "block_length": 8} | _SHORT,
    "published dream": qwen.DREAM["dream"] | {"fill": "parallel"} | _SHORT,
    "published dream greedy": qwen.DREAM["greedy"] | {"fill": "parallel"} | _SHORT,
}  # fmt: skip
"""Settings for the small Shakespeare model, by name of the case."""

PROOFREADER: dict[str, Settings] = {
    "repair": {},
    "repair lead": {"rules": [Lead], "edit_scoring": "lead", "edit_token": "mask"},
}
DRAFTS = (
    "I will go to the kng and tell him all.",
    "I know not whre my brother is, nor hiss frend.",
)

BLOCK_CAUSAL: dict[str, Settings] = {
    "exact cache": {"cache": "exact", "order": "low_confidence", "steps": 12},
    "published sdar": qwen.SDAR["sdar"] | {"steps": 12},
    "published llada2.1": llada.LLADA2["llada2.1"] | {"steps": 24},
    "published fast_dllm": qwen.FAST_DLLM["fast_dllm"]
    | {"block_length": 2, "threshold_alone": 4, "steps": 24},
    "speculative": {
        "rules": [Speculative],
        "fill": "speculative",
        "order": "threshold",
        "steps": 24,
    },
}
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40
RUN: Settings = {
    "model.depth": 2, "model.width": 16, "model.heads": 2, "data.seq_len": 16,
    "optim.warmup_steps": 2, "train.steps": 8, "train.batch_size": 8, "train.log_every": 2,
    "train.eval_every": 4, "train.eval_windows": 4, "train.checkpoint_every": 4, "sample.steps": 4,
}  # fmt: skip
RUNS: dict[str, Settings] = {
    "heads": {"model.add_sampler_head": "true", "model.add_critic_head": "true",
              "heads.start_sampler_iteration": 2, "heads.start_critic_iteration": 4,
              "heads.sampler_reveal": 0.5, "train.accumulate": 2},
    "block_causal": {"model.attention_type": "block_causal", "model.block_length": 4},
}  # fmt: skip


def main() -> int:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--texts", action="store_true", help="also print the hashed values")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in _cases(Path(folder), args.only):
            print(f"{_hash(parts)}  {name}", flush=True)
            for part in parts if args.texts else ():
                print(f"    {part!r}")
    return 0


def _cases(folder: Path, only: str) -> Iterator[tuple[str, list[str]]]:
    """Names of the cases, with the values to hash."""
    model = dlm_jax.load("shakespeare")
    for name, settings in SHAKESPEARE.items():
        if only in name:
            yield from _texts(model, name, {"gen_length": 24, "steps": 6} | settings)
    model = dlm_jax.load("proofreader")
    for name, settings in PROOFREADER.items():
        if only in name:
            drafts = [{"draft": draft} for draft in DRAFTS]
            yield name, _rows(dlm_jax.generate(model, drafts, seed=3, **settings))
    for name, arguments in {
        "sample.py": ("--prompt", "ROMEO:", "--gen-length", "16", "--num-samples", "2"),
        "sample.py template": ("--template", "The king <hole:4> the queen.", "--steps", "4"),
    }.items():
        if only in name:
            arguments = (*arguments, "--seed", "3")
            yield name, [_finish(folder, "sample.py", *arguments).stdout]
    if only in "file of requests":
        yield "file of requests", _file(folder)
    for name, changes in RUNS.items():
        if only in name or name == "block_causal" and any(only in x for x in BLOCK_CAUSAL):
            yield from _run(folder, name, RUN | changes)
    if (folder / "block_causal").exists():
        model = dlm_jax.load(folder / "block_causal")
        for name, settings in BLOCK_CAUSAL.items():
            yield from _texts(model, name, settings | {"gen_length": 12}, "The ")


def _texts(
    model: dlm_jax.Model, name: str, settings: Settings, prompt: str = "ROMEO:\nI am "
) -> Iterator[tuple[str, list[str]]]:
    """Three texts without a prompt and three with a prompt, from one call."""
    found = _rows(dlm_jax.generate(model, ["", prompt], num_samples=3, seed=5, **settings))
    yield f"{name}, empty", found[:3]
    yield f"{name}, given", found[3:]


def _rows(result: dlm_jax.Texts) -> list[str]:
    """The values to hash of each row."""
    return [
        json.dumps([text, int(status), int(steps), int(forwards)])
        for text, status, steps, forwards in zip(
            result.texts, result.status, result.steps, result.forwards, strict=True
        )
    ]


def _file(folder: Path) -> list[str]:
    """The results of a request file, without the times."""
    requests, results = folder / "in.jsonl", folder / "out.jsonl"
    lines = [
        {"prompt": "ROMEO:\n", "gen_length": 16, "seed": 1},
        {"prompt": "JULIET:\n", "gen_length": 16, "temperature": 0.5, "top_p": 0.9},
        {"template": "The king <hole:4> the queen.", "steps": 4},
        {"gen_length": 20, "order": "entropy", "fill": "parallel", "temperature": 0.0},
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--prompts", str(requests), "--output", str(results))
    _finish(folder, "sample.py", "--steps", "8", *files)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [json.dumps([row.get("text"), row.get("tokens")]) for row in rows if "text" in row]


def _run(folder: Path, name: str, given: Settings) -> Iterator[tuple[str, list[str]]]:
    """A tiny training run: its parameters, messages and metrics."""
    text, out_dir = folder / "text.txt", folder / name
    text.write_text(TEXT)
    given = given | {"data.source": str(text), "train.out_dir": str(out_dir)}
    flags = [str(part) for key, value in given.items() for part in (f"--{key}", value)]
    done = _finish(folder, "train.py", *flags)
    leaves = jax.tree_util.tree_leaves_with_path(dlm_jax.load(out_dir).params)
    arrays = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]
    digests = [f"{key} {leaf.dtype} {leaf.shape} {_hash([leaf.tobytes()])}" for key, leaf in arrays]
    yield f"{name} run: parameters", digests
    lines = f"{done.stdout}{done.stderr}".replace(str(folder), "DIR").splitlines()
    yield (
        f"{name} run: messages",
        [
            # Progress lines depend on the clock.
            re.sub(r"[\d.,]+ s\b", "N s", line)
            for line in lines
            if " steps, " not in line
        ],
    )
    timed = ("seconds", "_per_second", "time", "memory", "bytes", "crc", "run")
    records = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    yield (
        f"{name} run: metrics",
        [
            json.dumps({k: v for k, v in record.items() if not any(t in k for t in timed)})
            for record in records
        ],
    )
    text = folder / "continuation.txt"
    text.write_text("The quick")
    scored = _finish(folder, "-m", "dlm_jax.evaluate", "--checkpoint", str(out_dir),
                     "--text", str(text))  # fmt: skip
    yield f"{name} run: evaluate", [scored.stdout.replace(str(text), "continuation")]


def _finish(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; raises RuntimeError if the exit code is not 0."""
    given = os.environ | {
        "DLM_JAX_CACHE": str(folder / "tokens"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=given, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    return done


def _hash(parts: list[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode() + b"\0")
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    raise SystemExit(main())
