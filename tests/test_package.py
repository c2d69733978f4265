"""The package as its users import it: what it names is there, explained, and typed."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dlm_jax
from dlm_jax.config import TRACKERS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_dir_lists_what_all_lists():
    assert dir(dlm_jax) == dlm_jax.__all__ == sorted(set(dlm_jax.__all__))
    assert {"generate", "rule", "CommitRule", "TopP"} <= set(dlm_jax.__all__)


@pytest.mark.parametrize("name", dlm_jax.__all__)
def test_every_name_is_imported_on_use_and_explained(name):
    assert getattr(dlm_jax, name).__doc__


def test_names_that_type_checkers_see_are_those_of_all():
    tree = ast.parse((ROOT / "dlm_jax" / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = []
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            # `X as X` is how a type checker is told that a name is meant for others.
            assert alias.name in (alias.asname, "*")
            room = importlib.import_module(node.module)
            seen += room.__all__ if alias.name == "*" else [alias.name]
    assert sorted(seen) == dlm_jax.__all__


def test_the_pages_of_the_interface_list_every_name():
    page, reference = (
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("api.md", "api_reference.md")
    )
    listed = {
        *re.findall(r"`(\w+)[`(]", page),
        *re.findall(r"^::: dlm_jax[.\w]*\.(\w+)$", reference, flags=re.MULTILINE),
    }
    assert set(dlm_jax.__all__) - listed == set()


def test_the_reference_lists_the_classes_of_the_rules_and_nothing_that_is_not_there():
    page = (ROOT / "docs" / "api_reference.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    for name in listed:
        pkgutil.resolve_name(name)
    last = {name.rpartition(".")[2] for name in listed}
    for room in ("commit", "edits", "propose", "transforms"):
        names = importlib.import_module(f"dlm_jax.sampling.{room}").__all__
        assert {name for name in names if not name.isupper()} <= last


def test_sampling_imports_nothing_that_writes_a_temporary_file():
    command = ["bash", "-c", f"ulimit -f 0; {sys.executable} -c 'import dlm_jax.cli.sample'"]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.PIPE)


def test_an_unknown_name_is_refused_by_the_package():
    with pytest.raises(AttributeError, match="module 'dlm_jax' has no attribute 'generat'"):
        _ = dlm_jax.generat


def test_a_name_that_left_the_package_says_where_it_is():
    places = {
        "RandomFilled": "dlm_jax.sampling.commit",
        "Exact": "dlm_jax.sampling.kv_cache",
        "Decision": "dlm_jax.contrib.decide",
        "SampleConfig": "SamplingParams",
        "Generation": "Texts",
    }
    for name, place in places.items():
        with pytest.raises(AttributeError, match=f"{name}'; it is (in )?{place}"):
            getattr(dlm_jax, name)


def test_importing_the_package_alone_imports_no_jax():
    code = "import dlm_jax, sys; print('jax' in sys.modules, dlm_jax.__version__ > '')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_marker_of_types_ships_with_the_data():
    assert (ROOT / "dlm_jax" / "py.typed").exists()
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dlm_jax"]
    found = {path.name for pattern in patterns for path in (ROOT / "dlm_jax").glob(pattern)}
    assert {"py.typed", "shakespeare.safetensors"} <= found
    assert any(name.endswith(".html") for name in found)
    assert {path.name for path in ROOT.glob("configs/*.toml")} <= found


def test_the_version_is_that_of_the_project():
    assert dlm_jax.__version__ == PROJECT["project"]["version"]


def test_every_dependency_has_one_lower_bound_that_ci_installs():
    for line in PROJECT["project"]["dependencies"]:
        # What `.ci/smoke lowest` reads; a pin or an upper bound would keep other packages out.
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?>=[\d.]+(,!=[\d.]+)*", line)


def test_trackers_are_extras_of_their_names():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(TRACKERS) <= extras.keys()
    required = " ".join(PROJECT["project"]["dependencies"])
    assert "tensorboard" not in required


@pytest.mark.parametrize(("program", "target"), PROJECT["project"]["scripts"].items())
def test_every_installed_program_is_there(program, target):
    module, function = target.split(":")
    assert program.startswith("dlm-")
    assert callable(getattr(importlib.import_module(module), function))
