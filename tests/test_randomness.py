"""Results do not depend on how JAX is set, or are refused by the name of the setting."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
import toy
from jax_settings import jax_setting

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli.train import dry_run
from dlm_jax.data import CharacterTokenizer
from dlm_jax.randomness import key_of

PACKAGE = Path(dlm_jax.__file__).parent
SETTINGS = [
    ("jax_enable_x64", True),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_threefry_partitionable", False),
    ("jax_high_dynamic_range_gumbel", True),
]


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1])
def test_the_key_of_a_seed_is_jaxs_own_under_its_defaults_and_the_same_under_any(seed):
    data = np.asarray(jax.random.key_data(jax.random.key(seed)))
    with jax.default_prng_impl("rbg"), jax_setting("jax_random_seed_offset", 7):
        key = key_of(seed)
        np.testing.assert_array_equal(jax.random.key_data(key), data)
        assert jax.random.key_impl(key) == "threefry2x32"


def test_every_key_of_the_package_is_made_in_one_place():
    """Elsewhere keys are derived from others, or name their implementation."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "randomness.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("key", "PRNGKey"):
                assert ast.unparse(node.value) not in ("jax.random", "random"), path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wrap_key_data"):
                assert [word.arg for word in node.keywords] == ["impl"], path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "nnx.Rngs":
                assert not any(isinstance(given, ast.Constant) for given in node.args), path


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings_that_change_results_are_refused_by_name(tmp_path, name, value):
    tokenizer = CharacterTokenizer("abcd")
    config = configs.load(None, tiny_run.flags(tmp_path / "run"))
    with jax_setting(name, value):
        for use in (
            lambda: tiny_run.run(tmp_path / "run"),
            lambda: dry_run(config, ""),
            lambda: dlm_jax.load(),
            lambda: dlm_jax.Model(toy.network(), {}, tokenizer, max_length=8),
        ):
            with pytest.raises(ValueError, match=f"set to {name}={value!r}, .*; unset JAX_") as e:
                use()
            assert "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()
