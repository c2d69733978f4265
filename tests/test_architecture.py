"""The house of DESIGN 3: imports point one way, files are short, and public names are explained."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlm_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 320

# Rooms, and those each may import besides itself. What is not named here is `shared`: it stands
# below training and may import only types, config and its like.
_SHARED = {"types", "config", "shared"}
_LIBRARY = {*_SHARED, "data", "checkpoint", "diffusion", "sampling", "model"}
MAY_IMPORT = {
    "types": set(),
    "config": {"types"},
    "shared": _SHARED,
    "data": _SHARED,
    "checkpoint": _SHARED,
    "diffusion": {"types", "config"},
    "sampling": {"types", "config"},
    "model": {"types", "config"},
    "training": {*_SHARED, "data", "checkpoint", "diffusion", "sampling", "model"},
    "models": _LIBRARY,
    "prompts": _LIBRARY,
    "jobs": {*_LIBRARY, "models", "prompts"},
    "api": {*_LIBRARY, "models", "jobs"},
    "batch": {*_LIBRARY, "models", "jobs"},
    "viewing": {"data", "sampling"},
    "likelihood": {*_LIBRARY, "models"},
    "scorer": {*_LIBRARY, "models"},
    "evaluate": {*_LIBRARY, "models", "likelihood", "scorer", "__init__"},
    "export": _LIBRARY,
    "__init__": {"api", "models", "scorer", "types"},
}


def _room(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return name if name in MAY_IMPORT else "shared"


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
            rooms.add(_room(PACKAGE / rest[0]) if rest else "__init__")
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_too_long_for_one_idea(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_public_name_is_explained(path):
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) or not tree.body else ["module"]
    missing += _unexplained(tree.body, "")
    assert not missing


def _unexplained(body: list[ast.stmt], prefix: str) -> list[str]:
    """Names of public functions, classes and methods without a docstring."""
    found = []
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            found.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found += _unexplained(node.body, f"{prefix}{node.name}.")
    return found


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{path.name}:{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and _code_lines(node) > 60
    ]
    assert not long


def _code_lines(node: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    inside = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - inside
