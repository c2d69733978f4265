"""All outputs except the texts fail: the texts must be printed, and the exit code must be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.attacks.report import ROOT, Tally, environment, finish, flags

_SAMPLE = "--gen-length 8 --steps 4 --num-samples 2 --fill parallel"


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Samples and trains with one broken output at a time; ignores `count` and `seed`.

    A limit on file size simulates a full disk.
    """
    del count, seed
    out_dir = folder / "model"
    finish(folder, "train.py", *flags(folder, out_dir))
    sample = f"sample.py --checkpoint {out_dir} {_SAMPLE}"
    expected = _shell(folder, sample)[1]
    texts = Tally("texts printed although other outputs fail")
    cases = [
        (f"{sample} 2>&-", 0), (f"{sample} 2>/dev/full", 0), (f"{sample} --watch 2>/dev/full", 0),
        (f"{sample} --read-back 2 2>/dev/full", 0), (f"{sample} <&-", 0),
        (f"{sample} --trace {folder}/page.html", 4, "ulimit -f 0;"),
        (sample, 0, "XDG_CACHE_HOME=/proc"), (sample, 0, "env -u HOME -u XDG_CACHE_HOME"),
        (sample, 0, "PYTHONIOENCODING=ascii"),
    ]  # fmt: skip
    for command, code, *before in cases:
        ended, out, err = _shell(folder, command, *before)
        is_good = ended == code and out == expected and "Traceback" not in err
        texts.note(is_good, f"{' '.join(before)} {command}: code {ended}, {out!r}, {err[-300:]!r}")
    one_line = Tally("what cannot be written: one line, its own exit code")
    for command, code, *before in [
        (f"{sample} >/dev/full", 5), (f"{sample} >&-", 2), (f"{sample} | head -c 1", 0),
        (f"train.py {' '.join(flags(folder, folder / 'full'))}", 5, "ulimit -f 8;"),
        (f"sample.py --checkpoint {out_dir} --prompts {_requests(folder)} --output {folder}/o", 5,
         "ulimit -f 1;"),
    ]:  # fmt: skip
        ended, _, err = _shell(folder, command, *before)
        is_good = ended == code and "Traceback" not in err and "Exception ignored" not in err
        one_line.note(is_good, f"{' '.join(before)} {command}: code {ended}, {err[-600:]!r}")
    return [texts, one_line]


def _requests(folder: Path) -> Path:
    path = folder / "in.jsonl"
    path.write_text('{"gen_length": 8, "steps": 4}\n' * 64)
    return path


def _shell(folder: Path, command: str, before: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program in a shell."""
    script = f"{before} {sys.executable} {ROOT}/{command}"
    done = subprocess.run(["bash", "-c", script], env=environment(folder), capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")
