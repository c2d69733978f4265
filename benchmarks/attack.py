"""Attacks the programs and counts the undetected attacks, with one row per kind of attack.

    python benchmarks/attack.py flips inputs ends kills leaks shapes hostile

``flips``: bits are flipped in every kind of file that is read; each flip must be detected or
harmless. ``inputs``: bad flags, settings and files; each must be refused in one line with exit code
2. ``ends``: the texts must be printed even if all other outputs fail. ``kills``: SIGKILL of
training runs, request files and one of two processes, followed by a restart; the results must equal
those of uninterrupted programs. ``leaks``: calls of `generate` with changing shapes, and engines
opened and closed; the resources of the process must not grow. ``shapes``: requests in a batch, in a
file and on a loaded server; each text must equal that of the request by itself. ``hostile``:
malicious published directories, chat templates, request lines and settings; each must give a
correct result or one line. ``--count`` sets the number of attempts. With ``--folder``, files are
kept, and ``kills`` resumes from them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.attacks import ends, flips, hostile, inputs, kills, leaks, shapes  # noqa: E402
from benchmarks.attacks.report import Tally  # noqa: E402

Attack = Callable[[Path, int | None, int], list[Tally]]
ATTACKS: dict[str, Attack] = {
    "flips": flips.run, "inputs": inputs.run, "ends": ends.run, "kills": kills.run,
    "leaks": leaks.run, "shapes": shapes.run, "hostile": hostile.run,
}  # fmt: skip


def main() -> int:
    """Exit code: 1 if any attack was undetected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="+", choices=ATTACKS)
    parser.add_argument(
        "--count", type=int, help="number of flips per file, inputs, kills or calls"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="working folder, instead of a temporary one")
    args = parser.parse_args()
    bad = 0
    print("| attack | tried | found or harmless | let through | seconds |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.attacks:
        with contextlib.ExitStack() as stack:
            folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            for tally in ATTACKS[name](folder.resolve(), args.count, args.seed):
                seconds = time.perf_counter() - began
                began = time.perf_counter()
                print(f"| {name}: {tally.name} | {tally.tried} | {tally.tried - len(tally.bad)} | "
                      f"{len(tally.bad)} | {seconds:.0f} |", flush=True)  # fmt: skip
                for line in tally.bad[:20]:
                    print(f"    {line}", file=sys.stderr)
                bad += len(tally.bad)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
