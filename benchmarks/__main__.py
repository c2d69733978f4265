"""Runs a benchmark: ``python -m benchmarks NAME [ARGUMENTS]``. Without a name, lists all."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Runs the program that the first argument names."""
    programs = {
        path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        for path in sorted(HERE.glob("*.py"))
        if '__name__ == "__main__"' in path.read_text() and path.stem != "__main__"
    }
    if len(sys.argv) < 2 or sys.argv[1] not in programs:
        print(*(f"{name:20} {line}" for name, line in programs.items()), sep="\n")
        return 2 * (len(sys.argv) > 1)
    del sys.argv[0]
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
