"""What a change touches, and how large the pieces are: ``python benchmarks/structure.py``.

For each kind of change it takes one that is in the package already and counts the files that name
it, beside the table of its kind and the public names of its room (both the same ``__init__.py``).
"""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

from dlm_jax.sampling.state import State

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlm_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py"]
CHANGES = {
    "scalar setting (sampler_even_odd)": "sampler_even_odd",
    "scalar setting (dry_base)": "dry_base",
    "counter (bootstrapped)": "bootstrapped",
    "commit rule (EntropyBound)": "EntropyBound",
    "remask rule (ScheduledThreshold)": "ScheduledThreshold",
    "edit rule (Lead)": "Lead",
    "transform (MinP)": "MinP",
}


def files_that_name(word: str) -> list[str]:
    """Files of the package that use a word in their code, comments and docstrings left out."""
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        if re.search(rf"\b{word}\b", ast.unparse(tree)):
            found.append(str(path.relative_to(PACKAGE)))
    return found


def main() -> None:
    for what, word in CHANGES.items():
        files = files_that_name(word)
        print(f"{what}: {len(files)} ({', '.join(files)})")
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES + PROGRAMS
    }
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    longest = max(lengths, key=lambda path: lengths[path])
    print(f"fields of State: {len(State._fields)}")
    print(f"functions: {len(functions)}, median {statistics.median(functions):.0f} lines")
    print(f"longest file: {longest.relative_to(ROOT)}, {lengths[longest]} lines")
    print(f"lines of the package and the two programs: {sum(lengths.values())}")


if __name__ == "__main__":
    main()
