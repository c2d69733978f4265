"""Size of the package, number of files that a change affects, and call depth of its inputs.

``python benchmarks/structure.py [REVISION ...]`` prints one column per revision and one for the
working tree, and the lines of each decoder. Call paths are measured only for the working tree.

For each kind of change, the program takes an existing instance in the package and counts the files
that name it, in addition to the ``__init__.py`` with the table of its kind and the public names.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = "dlm_jax"
PAGE = 60
SLOTS = ("transforms", "propose", "commit", "remask", "edits")
TABLES = (
    "dlm_jax.training.tasks.objectives",
    "dlm_jax.objectives.processes.PROCESSES",
    "dlm_jax.heads.HEADS",
    "dlm_jax.hf.families.FAMILIES",
)
"""Tables of rules outside `SLOTS`."""
CHANGES = {
    "scalar setting (sampler_even_odd)": "sampler_even_odd",
    "list setting (confidence_without)": "confidence_without",
    "counter (bootstrapped)": "bootstrapped",
    "transform (MinP)": "MinP",
    "commit rule (EntropyBound)": "EntropyBound",
    "remask rule (ScheduledThreshold)": "ScheduledThreshold",
    "edit rule (Likelihood)": "Likelihood",
    "fill rule (Constrained)": "Constrained",
    "head (critic)": r"(?i:\w*critic\w*)",
    "config field (warmup_steps)": "warmup_steps",
    "HTTP field (diffusing)": "diffusing",
}
_RECORDS = {"NamedTuple", "Protocol", "TypedDict"}
_RECORD_DECORATORS = {"dataclass", "dataclasses", "pytree", "rule", "register_dataclass"}


class Tree:
    """The parsed modules of the package in one checkout."""

    def __init__(self, root: Path):
        self.files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted((root / PACKAGE).rglob("*.py"))
        }
        self.text = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}
        self.tree = {name: ast.parse(text) for name, text in self.text.items()}
        self.imports = {name: set(self._imported(name)) for name in self.files}
        self.homes = {
            f"{name}.{alias.asname or alias.name}": node.module
            for name, tree in self.tree.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in self.files
            for alias in node.names
        }
        self.rules = {module for table in TABLES for module in self._entries(table)}

    def _imported(self, module: str) -> Iterator[str]:
        """Modules of the package that a module imports, anywhere and for any purpose."""
        for node in ast.walk(self.tree[module]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in self.files else node.module for name in names]
            else:
                continue
            yield from (name for name in names if name in self.files and name != module)

    def lines(self) -> int:
        return sum(len(text.splitlines()) for text in self.text.values())

    def code_lines(self) -> int:
        """Lines that are not blank, comments or docstrings."""
        return sum(len(ast.unparse(_bare(text)).splitlines()) for text in self.text.values())

    def _entries(self, table: str) -> Iterator[str]:
        """The modules from which a table, ``module.NAME``, takes its entries."""
        module, _, name = table.rpartition(".")
        for node in ast.walk(self.tree.get(module, ast.Module([], []))):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets = node.targets if isinstance(node, ast.Assign) else targets
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                for one in ast.walk(node):
                    if isinstance(one, ast.Name):
                        yield self._home(module, one.id)

    def _home(self, module: str, name: str) -> str:
        """The module that defines a name which another module may pass on."""
        full = f"{module}.{name}"
        passed_on = self.homes.get(full)
        if passed_on is None:
            return full if full in self.files else module
        return self._home(passed_on, name)

    def importers(self) -> dict[str, set[str]]:
        """The modules that import each module, also by names that a package passes on."""
        found: dict[str, set[str]] = {name: set() for name in self.files}
        for name, tree in self.tree.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in self.files:
                    for alias in node.names:
                        found[self._home(node.module, alias.name)].add(name)
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name in self.files:
                            found[alias.name].add(name)
        return found

    def single_importers(self) -> list[str]:
        """Modules with one importer; not packages, rules of a table, and what a slot's rules share.

        A package that only passes on the names of a module counts as its importer.
        """
        importers = self.importers()
        return [
            name
            for name, path in self.files.items()
            if len(importers[name]) == 1
            and path.name != "__init__.py"
            and name not in self.rules
            and not any(f".sampling.{slot}." in name for slot in SLOTS)
        ]

    def records(self) -> list[str]:
        """Classes that are records or rules: named tuples, dataclasses, pytrees."""
        found = []
        for name, tree in self.tree.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    words = {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases}
                    words |= {
                        re.split(r"[.(]", ast.unparse(d))[0] for d in node.decorator_list
                    }  # fmt: skip
                    if words & (_RECORDS | _RECORD_DECORATORS):
                        found.append(f"{name}.{node.name}")
        return found

    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, including imports only for types."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for other in self.imports[name]:
                if other not in index:
                    visit(other)
                if other in stack:
                    low[name] = min(low[name], low[other])
            if low[name] == index[name]:
                group = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(group) > 1:
                    found.append(sorted(group))

        for name in self.files:
            if name not in index:
                visit(name)
        return found

    def repeated_names(self) -> list[str]:
        """Names of several modules."""
        names = collections.Counter(
            name.split(".")[-1] for name, path in self.files.items() if path.name[:2] != "__"
        )
        return sorted(name for name, count in names.items() if count > 1)

    def repeated_classes(self) -> list[str]:
        """Names of several classes at the top level of modules."""
        names = collections.Counter(
            node.name
            for tree in self.tree.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        )
        return sorted(name for name, count in names.items() if count > 1)

    def functions(self) -> list[tuple[str, int]]:
        return [
            (f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1)
            for name, tree in self.tree.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    def files_that_name(self, word: str) -> list[str]:
        """Modules that use a word as a name or a key, in any case; sentences are left out."""
        pattern = re.compile(rf"\b{word}\b")
        return [
            name.removeprefix(f"{PACKAGE}.")
            for name, text in self.text.items()
            if pattern.search(text) and any(pattern.search(one) for one in _names(self.tree[name]))
        ]

    def decoders(self) -> dict[str, tuple[int, str]]:
        """Lines of code of each commit and remask rule, and its module.

        The lines are those of the module if it has only this rule, and otherwise those of the
        class.
        """
        found = {}
        for room in ("sampling.commit", "sampling.remask", "contrib.decoders"):
            for name in self.files:
                if not name.startswith(f"{PACKAGE}.{room}."):
                    continue
                bare = _bare(self.text[name])
                rules = [
                    node
                    for node in bare.body
                    if isinstance(node, ast.ClassDef)
                    and any(ast.unparse(d) == "rule" for d in node.decorator_list)
                ]
                for node in rules:
                    counted = bare if len(rules) == 1 else node
                    lines = len(ast.unparse(counted).splitlines())
                    found[node.name] = lines, name.removeprefix(f"{PACKAGE}.")
        return found

    def figures(self) -> dict[str, str]:
        functions = self.functions()
        longest = max(self.text, key=lambda name: len(self.text[name].splitlines()))
        rows = {
            "modules": str(len(self.files)),
            "lines": str(self.lines()),
            "lines of code": str(self.code_lines()),
            "modules under a page": str(
                sum(len(text.splitlines()) < PAGE for text in self.text.values())
            ),
            "modules with one importer, no rules": str(len(self.single_importers())),
            "records and rules": str(len(self.records())),
            "circles": str(len(self.circles())),
            "module names used more than once": str(len(self.repeated_names())),
            "class names used more than once": str(len(self.repeated_classes())),
            "functions": str(len(functions)),
            "median lines of a function": f"{statistics.median(n for _, n in functions):.0f}",
            "longest module": f"{len(self.text[longest].splitlines())}",
        }
        for what, word in CHANGES.items():
            rows[f"files of a {what}"] = str(len(self.files_that_name(word)))
        return rows


def _names(tree: ast.Module) -> Iterator[str]:
    """Names in the code of a module, and its strings without a space."""
    for node in ast.walk(tree):
        for one in ("id", "attr", "arg", "name", "asname", "module", "value"):
            found = getattr(node, one, None)
            if isinstance(found, str) and " " not in found:
                yield found


def _bare(text: str) -> ast.Module:
    """A module without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                child
                for child in body
                if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def trip(call: Callable[[], Any], kinds: tuple[type, ...]) -> list[str]:
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


def trips() -> dict[str, str]:
    """The call paths of a request until it is packed, and of a config through a dry run."""
    import dlm_jax
    from dlm_jax.cli import train
    from dlm_jax.config import Config
    from dlm_jax.inference.request import Request
    from dlm_jax.sampling.row import RowParams

    class Packed(Exception):
        """Signals that the request has become a row of arrays."""

    model = dlm_jax.load("shakespeare")

    def stop(*_: Any, **__: Any) -> Any:
        raise Packed

    def generate() -> None:
        columns, RowParams.columns = RowParams.columns, stop
        try:
            dlm_jax.generate(model, prompt="ROMEO:", gen_length=8, steps=4)
        except Packed:
            pass
        finally:
            RowParams.columns = columns

    def dry_run() -> None:
        train.main(["--config", "quickstart", "--dry-run"])

    shown = {}
    for name, call, kinds in (
        ("a request, from generate to its row of arrays", generate, (Request,)),
        ("a config, through a dry run", dry_run, (Config,)),
    ):
        stays = trip(call, kinds)
        modules = len(set(stays))
        shown[name] = f"{modules} modules, {len(stays) - modules} returns: {' > '.join(stays)}"
    return shown


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="The size of the package and what a change touches."
    )
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    parser.add_argument("--names", action="store_true", help="list the counted names")
    parser.add_argument("--trips", action="store_true", help="follow a request and a config")
    args = parser.parse_args(argv)
    columns = {}
    for revision in args.revisions:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", revision, PACKAGE], cwd=ROOT, check=True, capture_output=True
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
                packed.extractall(folder, filter="data")
            columns[revision] = Tree(Path(folder)).figures()
    here = Tree(ROOT)
    columns["here"] = here.figures()
    width = max(map(len, columns["here"]))
    print(" ".join([" " * width, *(f"{name:>12}" for name in columns)]))
    for row in columns["here"]:
        print(" ".join([f"{row:{width}}", *(f"{column[row]:>12}" for column in columns.values())]))
    print("lines of code of each decoder:")
    for name, (lines, module) in sorted(here.decoders().items(), key=lambda item: item[1]):
        print(f"  {name:20} {lines:4}  {module}")
    if args.names:
        print("one importer:", ", ".join(here.single_importers()))
        print("circles:", here.circles())
        repeated = [*here.repeated_names(), *here.repeated_classes()]
        print("names used more than once:", ", ".join(repeated))
        for what, word in CHANGES.items():
            print(f"{what}: {', '.join(here.files_that_name(word))}")
    if args.trips:
        for what, shown in trips().items():
            print(f"{what}: {shown}")


if __name__ == "__main__":
    main()
