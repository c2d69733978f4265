"""The layout of docs/design.md: imports point one way, functions are short."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.structure import Tree

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlm_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every room, and those it may import besides itself: only such as stand above it here.
_LEAVES = {
    "types", "settings", "pytree", "devices", "progress", "randomness", "elsewhere", "tasks"
}  # fmt: skip
_PURE = {*_LEAVES, "structured", "sampling", "distributed", "diffusion", "heads"}
_CORE = {*_PURE, "config", "model", "store", "data"}
_LIBRARY = {*_CORE, "published"}
MAY_IMPORT = {
    "types": set(),
    "devices": set(),
    "pytree": set(),
    "progress": set(),
    "randomness": set(),
    "elsewhere": set(),
    "tasks": set(),
    "settings": {"pytree", "elsewhere"},
    "structured": {"settings"},
    "sampling": {*_LEAVES, "structured"},
    "distributed": _LEAVES,
    "diffusion": {*_LEAVES, "distributed"},
    "heads": {*_LEAVES, "sampling", "distributed", "diffusion"},
    "config": _PURE,
    "model": {*_LEAVES, "config", "distributed", "heads"},
    "store": {*_LEAVES, "distributed"},
    "data": {*_LEAVES, "store", "config"},
    "published": _CORE,
    "inference": _LIBRARY,
    "rl": {*_LIBRARY, "inference"},
    "training": {*_LIBRARY, "rl"},
    "__init__": {*_LIBRARY, "training", "inference"},
    "batch": {*_LIBRARY, "inference", "__init__"},
    "viewing": {*_LIBRARY, "inference", "__init__"},
    "serving": {*_LIBRARY, "inference", "__init__"},
    "harness": {*_LIBRARY, "inference", "__init__"},
    "cli": {
        *_LIBRARY,
        "training",
        "inference",
        "rl",
        "__init__",
        "batch",
        "viewing",
        "serving",
        "harness",
    },
    "evaluate": {"cli"},
    "serve": {"cli"},
    "export": {"cli", "inference"},
}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _rooms() -> set[str]:
    return {_room(path) for path in FILES}


def test_every_room_is_named_and_looks_up_alone():
    assert _rooms() == set(MAY_IMPORT)
    rooms = list(MAY_IMPORT)
    for place, room in enumerate(rooms):
        assert MAY_IMPORT[room] <= set(rooms[:place]), room


def _imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for name in _imports(path):
        top, *rest = name.split(".")
        if top == "dlm_jax":
            # A name that is no room is one that `dlm_jax` itself gives.
            rooms.add(rest[0] if rest and rest[0] in MAY_IMPORT else "__init__")
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    room = _room(path)
    assert _imported_rooms(path) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_flax_stays_in_the_model_room(path):
    imports_flax = any(name.split(".")[0] == "flax" for name in _imports(path))
    assert not imports_flax or _room(path) == "model"


def test_sampling_runs_without_flax_and_without_the_model_room():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if _room(path) == "sampling"
    ]
    assert len(modules) > 5
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted(n for n in sys.modules"
        " if n.split('.')[0] == 'flax' or n.startswith('dlm_jax.model')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_modules_import_each_other_and_no_two_share_a_name():
    tree = Tree(ROOT)
    assert not tree.circles()
    assert not tree.repeated_names()
    assert not tree.repeated_classes()


@pytest.mark.parametrize("name", ["vocab", "draw", "positions"])
def test_passes_over_the_vocabulary_import_no_rules(name):
    tree = ast.parse((PACKAGE / "sampling" / f"{name}.py").read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [one for one in modules if one.startswith("dlm_jax.sampling.commit")]


def _functions() -> list[tuple[Path, ast.FunctionDef]]:
    return [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def test_functions_of_sampling_name_their_parameters():
    found = []
    for path, node in _functions():
        # A type checker sees through arguments of one declared type, and through no others.
        loose = [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        is_open = any(a.annotation is None or ast.unparse(a.annotation) == "Any" for a in loose)
        if _room(path) == "sampling" and is_open:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert not found
