"""docs/reference.md: every name that it gives to a reader of other documents exists."""

import argparse
import dataclasses
import functools
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import dlm_jax
from dlm_jax.cli import sample, server
from dlm_jax.config import Config, SamplingParams
from dlm_jax.inference import request
from dlm_jax.sampling.params import PRESETS
from dlm_jax.sampling.rules import BUILT_IN

protocol = pytest.importorskip("dlm_jax.serving.protocol")
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
ALIASES = {alias: s.name for s in BUILT_IN.settings.values() for alias in s.aliases}
HERE = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})


@functools.cache
def _flags() -> set[str]:
    parsers: list[argparse.ArgumentParser] = [
        sample.make_parser(SamplingParams), server.make_parser()
    ]  # fmt: skip
    return {flag for parser in parsers for flag in parser._option_string_actions}


def _is_reached(path: str) -> bool:
    """Whether a dotted path leads to something, members declared without a value too."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(found, name):
                return name in getattr(found, "__annotations__", {})
            found = getattr(found, name)
        return True
    return False


def _exists(name: str) -> bool:
    setting, is_valued, value = name.partition(" = ")
    if is_valued:
        BUILT_IN.settings[setting].checked(tomllib.loads(f"x = {value}")["x"])
        return True
    if name.startswith("--"):
        return name in _flags()
    if "/" in name or name.endswith(".py"):
        return (ROOT / name).exists()
    section, _, key = name.partition(".")
    if section in {field.name for field in dataclasses.fields(Config)}:
        return key in {field.name for field in dataclasses.fields(getattr(Config(), section))}
    known = {
        *BUILT_IN.settings,
        *protocol.Chat.model_fields,
        *protocol.Completion.model_fields,
        *PRESETS,
        *request.PROMPT_KEYS,
        *request._NOT_SETTINGS,
        *dir(dlm_jax),
    }
    return name in known or _is_reached(name)


@pytest.mark.parametrize("name", HERE)
def test_a_name_that_stands_for_one_elsewhere_exists(name):
    assert _exists(name)


def test_the_page_lists_the_aliases_of_every_setting():
    told = {}
    for theirs, ours in ROWS:
        names, settings = (re.findall(r"`([^`]+)`", cell) for cell in (theirs, ours))
        settings = settings * len(names) if len(settings) == 1 else settings
        told |= dict(zip(names, settings, strict=False)) if set(names) & ALIASES.keys() else {}
    assert {name: told.get(name) for name in ALIASES} == ALIASES


def test_a_name_that_does_not_exist_is_found_out():
    wrong = ("remasking", "--gpu-top-k", "heads.sampler_weight", "dlm_jax.sampling.draw.sample",
             "no_such.py", "dlm_jax.Counters.wave")  # fmt: skip
    assert not any(map(_exists, wrong))
    with pytest.raises(ValueError, match="order="):
        _exists('order = "low_confidense"')


def test_every_row_says_what_there_is_here():
    assert len(ROWS) > 60
    for row in ROWS:
        assert len(row) == 2 and row[1].strip()
        if "`" not in row[1]:
            assert "none" in row[1] or set(row[1].strip()) <= set("- here")


def test_the_classes_and_methods_that_the_design_names_exist():
    """Names such as `Planner._answer`; classes are looked for in all modules of the package."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dlm_jax").rglob("*.py"))
    names = set(re.findall(r"`([A-Z][a-z]\w+)(?:\.(\w+))?`", page))
    assert len(names) > 10
    for name, member in names:
        assert re.search(rf"^\s*(class {name}\b|{name}\b.* =)", code, re.MULTILINE), name
        assert not member or re.search(rf"\bdef {member}\b", code), f"{name}.{member}"
