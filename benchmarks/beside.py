"""Compares this tree with an earlier revision: equal results, and ratios of times of one run.

    python -m benchmarks beside REVISION [--equal] [--rounds 7] [--only WORD]

Each tree runs in its own process, which imports its own package and uses only public names and
programs. The parent alternates between the two, reverses the order each round, and prints medians
and the median of the rounds' ratios. Every case runs once before it is timed, so that compilation
is excluded; ``start of sample.py`` is a whole process with a warm compilation cache. ``compile``
is the first call of a process without one, less its second call.

With ``--equal``, texts, status and counts of every rule, cache and published loop are compared
instead, and parameters, metrics and likelihoods of tiny runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Settings = dict[str, Any]
_RANDOM: Settings = {"order": "random", "fill": "parallel"}
_CONFIDENT: Settings = {"order": "low_confidence", "fill": "parallel"}
_EDITS: Settings = {"edit": True, "edit_token": "mask"}
_TEXT: Settings = {"gen_length": 64, "steps": 16, "num_samples": 64}
_CHAIN: Settings = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}
TIMED: dict[str, Settings] = {
    "recommended, 64 rows": _TEXT,
    "parallel, 64 rows": _TEXT | _RANDOM,
    "low_confidence, 64 rows": _TEXT | _CONFIDENT,
    "all transforms, 64 rows": _TEXT | _RANDOM | _CHAIN | {"repetition_penalty": 1.2},
    "edits, 64 rows": _TEXT | _RANDOM | _EDITS
    | {"insert_ratio_start": 0.1, "delete_ratio_start": 0.1},
    "dual cache, 16 rows": _TEXT | _CONFIDENT
    | {"cache": "dual", "block_length": 16, "num_samples": 16},
    "one row": _TEXT | _RANDOM | {"num_samples": 1},
}  # fmt: skip
START = "start of sample.py"
COMPILE: dict[str, Settings] = {
    f"compile, {name}": TIMED[name] for name in ("recommended, 64 rows", "edits, 64 rows")
}
_COMPILE = """
import json, sys, time, dlm_jax
model, settings, seconds = dlm_jax.load("shakespeare"), json.loads(sys.argv[1]), []
for _ in range(2):
    began = time.perf_counter()
    dlm_jax.generate(model, ["ROMEO:"], **settings)
    seconds.append(time.perf_counter() - began)
print(seconds[0] - seconds[1])
"""
HEADS: Settings = {
    "model.add_sampler_head": True, "model.add_critic_head": True, "heads.critic_alpha": 0.5,
}  # fmt: skip
TRAINED: dict[str, Settings] = {"train": {}, "train with heads": HEADS | {
    "heads.end_critic_iteration": 1}}  # fmt: skip

_ORDERS = ("low_confidence", "entropy", "margin", "threshold", "entropy_bound", "joint_threshold",
           "random", "left_to_right", "random_filled", "ancestral")  # fmt: skip
EQUAL: dict[str, Settings] = {
    "recommended": {},
    **{f"{order} {fill}": {"order": order, "fill": fill}
       for order in _ORDERS for fill in ("parallel", "wavefront")},
    "greedy, cosine": _CONFIDENT | {"temperature": 0.0, "confidence": "max", "schedule": "cosine"},
    "greedy blocks": {"order": "entropy", "fill": "parallel", "temperature": 0.0,
                      "block_length": 8},
    "even and odd": {"sampler_even_odd": True},
    "one-sided": {"sampler_one_sided": True, "sampler_min_neighbors_ratio": 0.3},
    "critic": {"remask": "scheduled", "remask_by": "critic", "remask_start": 0.3},
    **{rule: {"order": "ancestral_remdm", "fill": "parallel", "remask": rule,
              "rules": "dlm_jax.contrib.remdm"}
       for rule in ("remdm_cap", "remdm_conf")},
    "re-noise": _RANDOM | {"renoise": "random", "renoise_start": 0.3, "resample": True,
                           "schedule": "all"},
    "edits": _RANDOM | _EDITS | {"insert_ratio_start": 0.3, "delete_ratio_start": 0.2},
    "transforms": _RANDOM | _CHAIN | {"repetition_penalty": 1.2, "dry_multiplier": 0.8,
                                      "xtc_probability": 0.3},
    "mirostat": _RANDOM | {"mirostat": 2},
    "typical, dynamic": _RANDOM | {"typical_p": 0.8, "dynatemp_range": 0.4, "top_n_sigma": 2.0},
    "guidance": _RANDOM | {"guidance": 1.0},
    "dual cache": _CONFIDENT | {"block_length": 8, "cache": "dual"},
}  # fmt: skip
"""Settings of the shipped model; each with a prompt and without. ``rules`` names a module."""
RUNS: dict[str, Settings] = {
    "run with heads": HEADS | {"heads.start_sampler_iteration": 2, "heads.sampler_reveal": 0.5,
                               "heads.start_critic_iteration": 4, "train.accumulate": 2},
    "block-causal run": {"model.attention_type": "block_causal", "model.block_length": 4},
}  # fmt: skip
SMALL: Settings = {
    "model.depth": 2, "model.width": 16, "model.heads": 2, "data.seq_len": 16,
    "optim.warmup_steps": 2, "train.steps": 8, "train.batch_size": 8, "train.log_every": 2,
    "train.eval_every": 4, "train.eval_windows": 4, "train.checkpoint_every": 4, "sample.steps": 4,
}  # fmt: skip
_NOT_COMPARED = ("seconds", "_per_second", "time", "memory", "bytes", "run")


def child() -> None:
    """Answers each line, ``[model, prompts, settings]``, with the seconds and the rows."""
    import dlm_jax

    models: dict[str, Any] = {}
    for line in sys.stdin:
        path, prompts, settings = json.loads(line)
        try:
            model = models.setdefault(path, None) or dlm_jax.load(path)
            models[path] = model
            if "rules" in settings:
                settings["rules"] = importlib.import_module(settings["rules"])
            began = time.perf_counter()
            made = dlm_jax.generate(model, prompts, **settings)
            seconds = time.perf_counter() - began
            counts = zip(made.texts, made.status, made.steps, made.forwards, strict=True)
            rows: Any = [[text, *map(int, numbers)] for text, *numbers in counts]
        except (ImportError, TypeError, ValueError) as error:
            seconds, rows = 0.0, f"{type(error).__name__}: {error}"
        print(json.dumps([seconds, rows]), flush=True)


class Tree:
    """A checkout, with a process that generates texts."""

    def __init__(self, root: Path, folder: Path, flags: str):
        folder.mkdir()
        self._root, self._folder = root, folder
        self._env = os.environ | {
            "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "XLA_FLAGS": flags,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child"], env=self._env, cwd=root,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def generate(self, path: str, prompts: Any, settings: Settings) -> tuple[float, Any]:
        """The seconds of a call, and its rows or its error."""
        assert self._child.stdin is not None and self._child.stdout is not None
        print(json.dumps([path, prompts, settings]), file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())

    def seconds(self, name: str) -> float:
        """The seconds of a timed case."""
        if name in TIMED:
            return self.generate("shakespeare", ["ROMEO:\n"], TIMED[name] | {"seed": 1})[0]
        if name == START:
            began = time.perf_counter()
            self.process("sample.py", "--gen-length", "24", "--steps", "6")
            return time.perf_counter() - began
        if name in COMPILE:
            no_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
            return float(self.process("-c", _COMPILE, json.dumps(COMPILE[name]), env=no_cache))
        settings = {"train.steps": 12, "train.log_every": 1, "train.eval_every": 1000,
                    "train.checkpoint_every": 1000, "optim.warmup_steps": 2}  # fmt: skip
        out = self.train(settings | TRAINED[name], "configs/shakespeare.toml")
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return statistics.median([x["step_seconds"] for x in lines if "step_seconds" in x][2:])

    def results(self, name: str) -> list[str]:
        """The lines of a tiny run: hashes of its arrays, metrics, and a likelihood."""
        out = self.train(SMALL | RUNS[name])
        arrays = (
            "import jax, hashlib, numpy as np, dlm_jax, sys\n"
            "for k, x in jax.tree_util.tree_leaves_with_path(dlm_jax.load(sys.argv[1]).params):\n"
            "    print(k, x.shape, hashlib.sha256(np.asarray(x).tobytes()).hexdigest())"
        )
        lines = self.process("-c", arrays, str(out)).splitlines()
        for line in (out / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line).items()
            lines.append(str({k: v for k, v in values if not any(x in k for x in _NOT_COMPARED)}))
        text = self._folder / "text.txt"
        command = ("-m", "dlm_jax.evaluate", "--checkpoint", str(out), "--text", str(text))
        return lines + self.process(*command).replace(str(self._folder), "").splitlines()

    def train(self, settings: Settings, config: str = "") -> Path:
        """Trains on the text of this file and returns the directory of the run."""
        out, text = self._folder / "run", self._folder / "text.txt"
        shutil.rmtree(out, ignore_errors=True)
        text.write_text(Path(__file__).read_text() * 30)
        settings = {"data.source": str(text), "train.out_dir": str(out), **settings}
        flags = [f"--{key}={value}" for key, value in settings.items()]
        self.process("train.py", *(["--config", config] if config else []), *flags)
        return out

    def process(self, *command: str, env: Settings | None = None) -> str:
        """What a program prints."""
        return subprocess.run(
            [sys.executable, *command], env=self._env | (env or {}), cwd=self._root, check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ).stdout  # fmt: skip

    def close(self) -> None:
        self._child.communicate()


def time_case(trees: tuple[Tree, Tree], name: str, rounds: int) -> tuple[float, float, float]:
    """Median seconds of each tree, and the median ratio of the second to the first."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        order: Callable[[Any], Any] = reversed if number % 2 else list
        seconds = {tree: tree.seconds(name) for tree in order(trees)}
        pairs.append((seconds[trees[0]], seconds[trees[1]]))
    before, now = zip(*pairs[1:], strict=True)
    ratios = [b / a for a, b in pairs[1:]]
    return statistics.median(before), statistics.median(now), statistics.median(ratios)


def compare_results(trees: tuple[Tree, Tree], only: str) -> int:
    """Prints a line per case, with the first difference; returns the number of cases that differ or
    that both trees refuse.
    """
    different = 0

    def show(name: str, before: Any, now: Any) -> None:
        nonlocal different
        said = "DIFFERENT" if before != now else "REFUSED" if isinstance(now, str) else "equal"
        different += said != "equal"
        print(f"{said:9}  {name}", flush=True)
        if said != "equal":
            pairs = zip(before, now, strict=False) if isinstance(now, list) else ()
            one = next((pair for pair in pairs if pair[0] != pair[1]), (before, now))
            print(f"    before {one[0]}\n    now    {one[1]}")

    prompts = ["", "ROMEO:\nI am "]
    for name, settings in EQUAL.items():
        if only in name:
            settings = {"gen_length": 24, "steps": 6, "num_samples": 3, "seed": 5} | settings
            show(name, *(tree.generate("shakespeare", prompts, settings)[1] for tree in trees))
    drafts = [{"draft": "I will go to the kng and tell him all."}]
    if only in "repairs":
        show("repairs", *(tree.generate("proofreader", drafts, {"seed": 3})[1] for tree in trees))
    for name in RUNS:
        if only in name:
            show(name, *(tree.results(name) for tree in trees))
    return different


def main() -> int:
    """Prints a table of times, or a line per compared case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--equal", action="store_true", help="compare results, not times")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="file to which the times are appended")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    # Imported here, because a child imports this file beside the package of its tree.
    from benchmarks.report import Table, print_machine

    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if args.equal:
        flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    with tempfile.TemporaryDirectory() as folder:
        old, git = Path(folder) / "old", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(old), args.revision], check=True)
        try:
            places = (old, Path(folder) / "before"), (ROOT, Path(folder) / "now")
            trees = Tree(*places[0], flags), Tree(*places[1], flags)
            if args.equal:
                print_machine()
                return int(compare_results(trees, args.only) > 0)
            table = Table(args, "case", f"ms at {args.revision}", "ms here", "ratio")
            for name in (*TIMED, *COMPILE, *TRAINED, START):
                if args.only in name:
                    rounds = 1 if args.quick else args.rounds
                    before, now, ratio = time_case(trees, name, rounds)
                    table.add(name, before * 1e3, now * 1e3, f"{ratio:.3f}")
            for tree in trees:
                tree.close()
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
