"""docs/reference.md: every name that it gives to a reader of other documents exists."""

import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import dlm_jax
from dlm_jax.cli import sample
from dlm_jax.config import SamplingParams
from dlm_jax.sampling.rules import BUILT_IN

protocol = pytest.importorskip("dlm_jax.serving.protocol")
PAGE = (Path(__file__).parent.parent / "docs" / "reference.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")][2:]
HERE = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})

_HOST = ("host_sampler", "read_back")  # of requests in Python


def _check(name: str) -> None:
    """Raises if nothing has this name."""
    setting, is_valued, value = name.partition(" = ")
    if is_valued:
        BUILT_IN.settings[setting].checked(tomllib.loads(f"x = {value}")["x"])
    elif name.startswith("--"):
        assert name in sample.make_parser(SamplingParams)._option_string_actions
    elif "." in name:
        pkgutil.resolve_name(name)
    else:
        fields = {*protocol.Chat.model_fields, *protocol.Completion.model_fields}
        assert name in {*BUILT_IN.settings, *fields, *dir(dlm_jax), "draft", *_HOST}


@pytest.mark.parametrize("name", HERE)
def test_a_name_that_stands_for_one_elsewhere_exists(name):
    _check(name)


def test_an_alias_is_not_repeated_on_the_page():
    theirs = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}
    assert not theirs & {alias for s in BUILT_IN.settings.values() for alias in s.aliases}
