"""Speed of this tree relative to an earlier revision: ratios of times measured in one run.

    python -m benchmarks.beside REVISION [--rounds 7] [--only WORD]

Each tree runs in its own process, which imports its own package and uses only public names and
configs. The parent alternates between the two, reverses the order each round, and prints medians
and the median of the rounds' ratios. Every case runs once before it is timed, so that compilation
is excluded; ``start of sample.py`` is a whole process with a warm compilation cache.
"""

from __future__ import annotations

import argparse
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
_RANDOM = {"order": "random", "fill": "parallel"}
_TEXT = {"gen_length": 64, "steps": 16}
GENERATION: dict[str, dict[str, Any]] = {
    "recommended, 64 rows": _TEXT,
    "parallel, 64 rows": _TEXT | _RANDOM,
    "low_confidence, 64 rows": _TEXT | {"order": "low_confidence", "fill": "parallel"},
    "all transforms, 64 rows": _TEXT | _RANDOM
    | {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "repetition_penalty": 1.2},
    "edits, 64 rows": _TEXT | _RANDOM
    | {"edit": True, "edit_token": "mask", "insert_ratio_start": 0.1, "delete_ratio_start": 0.1},
    "dual cache, 16 rows": _TEXT
    | {"order": "low_confidence", "fill": "parallel", "cache": "dual", "block_length": 16,
       "num_samples": 16},
    "one row": _TEXT | _RANDOM | {"num_samples": 1},
}  # fmt: skip
TRAINING: dict[str, dict[str, Any]] = {
    "train": {},
    "train with heads": {"model.add_sampler_head": True, "model.add_critic_head": True,
                         "heads.critic_alpha": 0.5, "heads.end_critic_iteration": 1},
}  # fmt: skip
START = "start of sample.py"
NAMES = (*GENERATION, *TRAINING, START)


def child() -> None:
    """Reads names of cases and prints the seconds of each."""
    import dlm_jax

    model = dlm_jax.load()
    for line in sys.stdin:
        name = json.loads(line)
        settings: dict[str, Any] = {"num_samples": 64} | GENERATION[name]
        began = time.perf_counter()
        dlm_jax.generate(model, ["ROMEO:\n"], seed=1, **settings)
        print(json.dumps(time.perf_counter() - began), flush=True)


class Tree:
    """A checkout, with a process that generates texts."""

    def __init__(self, root: Path, folder: Path):
        self._root, self._folder = root, folder
        self._env = os.environ | {
            "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child"], env=self._env, cwd=root,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def seconds(self, name: str) -> float:
        if name == START:
            return self._process("sample.py", "--gen-length", "24", "--steps", "6")
        if name in TRAINING:
            return self._training(TRAINING[name])
        assert self._child.stdin is not None and self._child.stdout is not None
        print(json.dumps(name), file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.communicate()

    def _training(self, more: dict[str, Any]) -> float:
        """Median seconds per step, from the metrics of a short run on the text of this file."""
        out = self._folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        text = self._folder / "text.txt"
        text.write_text(Path(__file__).read_text() * 100)
        settings = {
            "data.source": str(text), "train.out_dir": str(out), "train.steps": 12,
            "train.log_every": 1, "train.eval_every": 1000, "train.checkpoint_every": 1000,
            "optim.warmup_steps": 2, **more,
        }  # fmt: skip
        flags = [f"--{key}={value}" for key, value in settings.items()]
        self._process("train.py", "--config", "configs/shakespeare.toml", *flags)
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [line["step_seconds"] for line in lines if "step_seconds" in line]
        return statistics.median(steps[2:])

    def _process(self, *command: str) -> float:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *command], env=self._env, cwd=self._root, check=True,
            capture_output=True,
        )  # fmt: skip
        return time.perf_counter() - began


def compared(trees: tuple[Tree, Tree], name: str, rounds: int) -> tuple[float, float, float]:
    """Median seconds of each tree, and the median ratio of the second to the first."""
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        order: Callable[[Any], Any] = reversed if number % 2 else list
        seconds = {tree: tree.seconds(name) for tree in order(trees)}
        found.append((seconds[trees[0]], seconds[trees[1]]))
    before, now = zip(*found[1:], strict=True)
    ratios = [b / a for a, b in found[1:]]
    return statistics.median(before), statistics.median(now), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(old), args.revision], check=True)
        try:
            for name in ("before", "now"):
                (Path(folder) / name).mkdir()
            trees = Tree(old, Path(folder) / "before"), Tree(ROOT, Path(folder) / "now")
            print(f"| case | ms at {args.revision} | ms here | ratio |\n| --- | --- | --- | --- |")
            for name in NAMES:
                if args.only in name:
                    before, now, ratio = compared(trees, name, args.rounds)
                    print(f"| {name} | {before * 1e3:.1f} | {now * 1e3:.1f} | {ratio:.3f} |",
                          flush=True)  # fmt: skip
            for tree in trees:
                tree.close()
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)


if __name__ == "__main__":
    main()
