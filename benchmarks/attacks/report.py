"""The counts of an attack, and the tiny run that the attacks share."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40
FLAGS = {
    "model.depth": "2", "model.width": "16", "model.heads": "2", "data.seq_len": "16",
    "optim.warmup_steps": "2", "train.steps": "24", "train.batch_size": "8",
    "train.log_every": "3", "train.eval_every": "6", "train.eval_windows": "4",
    "train.checkpoint_every": "4", "sample.steps": "4", "model.add_sampler_head": "true",
    "model.add_critic_head": "true", "heads.start_sampler_iteration": "6",
    "heads.start_critic_iteration": "12", "heads.sampler_reveal": "0.5", "train.accumulate": "2",
}  # fmt: skip
"""Settings of a run of a few seconds with heads, stages and accumulation."""

_QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


@dataclasses.dataclass
class Tally:
    """One row of the table: the number of attempts, and one line per undetected attack."""

    name: str
    tried: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)

    def note(self, is_good: bool, line: str) -> None:
        """Counts one try."""
        self.tried += 1
        if not is_good:
            self.bad.append(line)


def flags(folder: Path, out_dir: Path, **changes: object) -> list[str]:
    """Flags of the tiny run; a double underscore in the names of `changes` means a dot."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    given = FLAGS | {"data.source": str(text), "train.out_dir": str(out_dir)}
    given |= {name.replace("__", "."): str(value) for name, value in changes.items()}
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def environment(folder: Path, compiler: str = _QUICK) -> dict[str, str]:
    """Environment of the attacked programs: separate caches, CPU only, compiler flags."""
    return os.environ | {
        "XLA_FLAGS": compiler,
        "JAX_PLATFORMS": "cpu",
        # XLA logs pages about every loaded program, which could fill an unread pipe.
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "DLM_JAX_CACHE": str(folder / "tokens"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }


def start(
    folder: Path, script: str, *arguments: str, compiler: str = _QUICK
) -> subprocess.Popen[str]:
    """Starts ``train.py`` or ``sample.py``."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments],
        env=environment(folder, compiler), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
    )  # fmt: skip


def finish(
    folder: Path, script: str, *arguments: str, compiler: str = _QUICK
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; raises RuntimeError if the exit code is not 0."""
    child = start(folder, script, *arguments, compiler=compiler)
    out, err = child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"{script} {' '.join(arguments)}: {child.returncode}\n{err}")
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)
