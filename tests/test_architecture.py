"""The layout of docs/design.md: imports point one way, and few names are public."""

import ast
import graphlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import dlm_jax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlm_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every room, and those it may import besides itself: only such as stand above it here.
_LEAVES = {"types", "settings", "devices", "progress", "randomness", "moved"}
_PURE = {*_LEAVES, "structured", "sampling", "config", "distributed", "objectives", "heads"}
_CORE = {*_PURE, "model", "store", "data"}
_LIBRARY = {*_CORE, "hf"}
MAY_IMPORT = {
    "types": set(),
    "devices": set(),
    "progress": set(),
    "randomness": set(),
    "moved": set(),
    "settings": {"moved"},
    "structured": {"settings", "moved"},
    "sampling": {*_LEAVES, "structured"},
    "config": {"settings", "sampling", "moved"},
    "distributed": {*_LEAVES, "config"},
    "objectives": {*_LEAVES, "config", "distributed"},
    "heads": {*_LEAVES, "sampling", "config", "distributed", "objectives"},
    "model": {*_LEAVES, "config", "distributed", "heads"},
    "store": {*_LEAVES, "distributed"},
    "data": {*_LEAVES, "store", "config"},
    "hf": _CORE,
    "inference": _LIBRARY,
    "training": _LIBRARY,
    "__init__": {*_LIBRARY, "training", "inference"},
    "batch": {*_LIBRARY, "inference", "__init__"},
    "viewing": {*_LIBRARY, "inference", "__init__"},
    "cli": {*_LIBRARY, "training", "inference", "__init__", "batch"},
    "serving": {*_LIBRARY, "inference", "__init__", "cli"},
    "harness": {*_LIBRARY, "inference", "__init__", "cli"},
    "contrib": {
        "settings",
        "sampling",
        "distributed",
        "objectives",
        "config",
        "training",
        "inference",
        "__init__",
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
    assert _rooms() | {"contrib"} == set(MAY_IMPORT)
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


def _public() -> set[str]:
    """The public names and modules, as docs/api.md lists them."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"^\| `(dlm_jax[.\w]+)` \|", page, re.MULTILINE)
    found = {f"dlm_jax.{name}" for name in dlm_jax.__all__}
    for module in modules:
        names = vars(importlib.import_module(module)).items()
        names = [name for name, value in names if not isinstance(value, ModuleType)]
        found |= {module, *(f"{module}.{name}" for name in names if not name.startswith("_"))}
    return found


FRONT = ("contrib", "serving", "harness", "viewing")
"""Applications and extensions, which stand in front of the core's doors."""


def test_applications_and_contrib_import_public_names_alone_and_nothing_imports_contrib():
    public = _public()
    for path in FILES:
        own = {name for name in _imports(path) if f"{name}.".startswith("dlm_jax.")}
        inside = {name for name in own if f"{name}.".startswith(f"dlm_jax.{_room(path)}.")}
        if _room(path) in FRONT:
            assert own - inside - {"dlm_jax"} <= public, path
        if _room(path) != "contrib":
            assert not any(f"{name}.".startswith("dlm_jax.contrib.") for name in own), path


def test_the_public_names_fit_on_a_page():
    assert len(dlm_jax.__all__) <= 80


# An installation from this tree would supply the modules that are left out.
_COPY_ALONE = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_without_contrib_and_applications_a_text_is_sampled_and_a_model_trained(tmp_path):
    left_out = shutil.ignore_patterns(*FRONT, "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "dlm_jax", ignore=left_out)
    for name in ("sample.py", "train.py", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    tiny = {
        "data.source": text, "data.seq_len": 16, "model.depth": 1, "model.width": 16,
        "model.heads": 2, "train.steps": 1, "train.batch_size": 4, "train.out_dir": "run",
    }  # fmt: skip
    flags = [str(part) for key, value in tiny.items() for part in (f"--{key}", value)]
    for program in (["train.py", *flags], ["sample.py", "--prompt", "A", "--gen-length", "4"]):
        done = subprocess.run(
            [sys.executable, "-c", _COPY_ALONE, *program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A")
    # The tests of the core need none of them.
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "docs", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    collected = subprocess.run(
        [sys.executable, "-c", _COPY_ALONE.replace("run_path(sys.argv[0]", 'run_module("pytest"'),
         "-", "--collect-only", "-n0", "-m", "slow or not slow", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout[-3000:]


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


def _modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }


def test_no_modules_import_each_other():
    modules = _modules()
    graph = {}
    for name, path in modules.items():
        # An import of a name is one of the module that has it.
        found = {one if one in modules else one.rpartition(".")[0] for one in _imports(path)}
        graph[name] = (found & modules.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_two_modules_and_no_two_classes_share_a_name():
    names = [name.rpartition(".")[2] for name, path in _modules().items() if path.name[:2] != "__"]
    names += [
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("name", ["vocab", "positions"])
def test_passes_over_the_vocabulary_import_no_rules(name):
    tree = ast.parse((PACKAGE / "sampling" / f"{name}.py").read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [one for one in modules if one.startswith("dlm_jax.sampling.commit")]
