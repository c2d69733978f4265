"""Sizes of the package, and the stays of a request and of a config on their ways through it.

    python -m benchmarks structure [REVISION ...] [--walks] [--quick]

Prints one column per revision and one for the working tree. With ``--walks``, a request is followed
from `generate` to its row of arrays, a row through one step, and a config through a dry run: a stay
is a sequence of calls in one module that have the object as an argument, and a return is a stay in
a module that had it before.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.report import Table, parser_of

ROOT = Path(__file__).parent.parent
PACKAGE = "dlm_jax"
FRONT = ("serving", "harness", "viewing", "contrib")
ROOMS = {
    "core": lambda room: room not in FRONT,
    **{room: lambda found, room=room: found == room for room in FRONT},
    "sampling": lambda room: room in ("sampling", "structured", "inference", "batch", "types.py"),
    "training": lambda room: room in (
        "training", "heads", "objectives", "model", "data", "hf", "distributed", "config.py",
        "store",
    ),
}  # fmt: skip
"""Groups of rooms whose modules and lines are counted."""
PROTOCOLS = ("LogitTransform", "CommitRule", "FillRule", "RemaskRule", "EditRule", "KVCache",
             "Objective", "Head", "Stepper")  # fmt: skip


def figures(root: Path) -> dict[str, Any]:
    """The sizes of a checkout."""
    files = {path: path.read_text() for path in sorted((root / PACKAGE).rglob("*.py"))}
    rooms = {path: path.relative_to(root / PACKAGE).parts[0] for path in files}
    found: dict[str, Any] = {}
    for name, is_counted in {"package": lambda room: True, **ROOMS}.items():
        own = [text for path, text in files.items() if is_counted(rooms[path])]
        found[f"{name}: modules"] = len(own)
        found[f"{name}: lines"] = sum(len(text.splitlines()) for text in own)
    for folder in ("tests", "benchmarks"):
        paths = (root / folder).rglob("*.py")
        found[f"{folder}: lines"] = sum(len(path.read_text().splitlines()) for path in paths)
    found["fmt: skip"] = sum(text.count("# fmt: skip") for text in files.values())
    classes = {
        node.name: node
        for text in files.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }
    for name in PROTOCOLS:
        if name in classes:
            found[f"members of {name}"] = len(members(name, classes))
    return found


def members(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Public methods and fields of a protocol, with those of its bases; `Rule` is not counted."""
    if name not in classes or name == "Rule":
        return set()
    names: set[str] = set()
    for base in classes[name].bases:
        names |= members(ast.unparse(base).split("[")[0], classes)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def doors() -> dict[str, Any]:
    """Public names and settings of the working tree."""
    import dlm_jax
    from dlm_jax.config import SETTINGS
    from dlm_jax.sampling.rules import BUILT_IN

    return {
        "public names": len(dlm_jax.__all__),
        "settings of requests": len(BUILT_IN.request_settings),
        "settings of presets alone": len(BUILT_IN.settings) - len(BUILT_IN.request_settings),
        "settings of a run": len(SETTINGS),
    }


def walk(call: Callable[[], Any], kinds: tuple[type, ...]) -> list[str]:
    """Modules of the package with an argument of these classes, in call order."""
    stays: list[str] = []

    def on_call(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(f"{PACKAGE}."):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), kinds) for name in names):
            module = module.removeprefix(f"{PACKAGE}.")
            if not stays or stays[-1] != module:
                stays.append(module)

    sys.setprofile(on_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def walks() -> dict[str, list[str]]:
    """The stays of a request, of a row in a step, and of a config."""
    import dlm_jax
    from dlm_jax.cli import train
    from dlm_jax.config import Config
    from dlm_jax.inference.request import Request
    from dlm_jax.sampling import loop
    from dlm_jax.sampling.state import State

    model, steps, one_step = dlm_jax.load("shakespeare"), [], loop.step

    def step(*args: Any) -> Any:
        made: list[Any] = []
        steps.append(walk(lambda: made.append(one_step(*args)), (State,)))
        return made[0]

    def generate(**settings: Any) -> None:
        dlm_jax.generate(model, prompt="ROMEO:", gen_length=8, steps=4, **settings)

    def dry_run() -> None:
        train.main(["--config", "quickstart", "--dry-run"])

    with mock.patch.object(loop, "step", step):
        generate(fill="wavefront", order="threshold")
    return {
        "a request through `generate`": walk(generate, (Request,)),
        "a row through one traced step": steps[0],
        "a config through a dry run": walk(dry_run, (Config,)),
    }


def main() -> None:
    """Prints the table, and the walks."""
    parser = parser_of(__doc__)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    parser.add_argument("--walks", action="store_true")
    args = parser.parse_args()
    columns: dict[str, dict[str, Any]] = {}
    for revision in args.revisions:
        with tempfile.TemporaryDirectory() as folder:
            names = [PACKAGE, "tests", "benchmarks"]
            command = ["git", "archive", revision, *names]
            archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
                packed.extractall(folder, filter="data")
            columns[revision] = figures(Path(folder))
    columns["here"] = figures(ROOT) | doors()
    table = Table(args, "figure", *columns)
    for row in columns["here"]:
        table.add(row, *(column.get(row, "-") for column in columns.values()))
    for name, stays in (walks() if args.walks and not args.quick else {}).items():
        modules = len(set(stays))
        print(f"\n{name}: {len(stays)} stays, {len(stays) - modules} returns: {' > '.join(stays)}")


if __name__ == "__main__":
    main()
