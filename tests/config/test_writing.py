"""A config as TOML: what is written is read back, and what is not default is marked."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlm_jax.config as configs
from dlm_jax.config import Config


@pytest.mark.parametrize("name", configs.shipped())
def test_what_is_written_is_read_back(tmp_path, name):
    config = configs.load(name)
    path = tmp_path / "config.toml"
    path.write_text(configs.to_toml(config, header="one\ntwo"), encoding="utf-8")
    assert path.read_text().startswith("# one\n# two\n")
    assert configs.load(path) == config


def test_values_of_every_type_are_read_back(tmp_path):
    flags = {
        "sample.logit_bias": "12:-5,30:-inf", "sample.chain": "top_k,temperature",
        "optim.learning_rate": "1e-05", "data.source": 'a "b".txt,c\\d\x7f.txt,é.txt',
        "model.remat": "true", "data.cache_dir": "x\ty",
    }  # fmt: skip
    config = configs.load(None, flags)
    assert config.sample.logit_bias[1][1] == -math.inf
    path = tmp_path / "config.toml"
    path.write_text(configs.to_toml(config), encoding="utf-8")
    assert configs.load(path) == config


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_text_is_read_back(text):
    config = configs.from_dict({"data": {"tokenizer": text}}, where="here")
    assert tomllib.loads(configs.to_toml(config))["data"]["tokenizer"] == text


def test_what_differs_from_the_defaults_is_marked_and_listed():
    config = configs.load(None, {"model.depth": "3", "train.steps": "7", "optim.warmup_steps": "2"})
    assert configs.differing(config) == {
        "model": {"depth": 3}, "optim": {"warmup_steps": 2}, "train": {"steps": 7},
    }  # fmt: skip
    lines = configs.to_toml(config).splitlines()
    assert f"depth = 3  # default: {Config().model.depth}" in lines
    assert "width = 128" in lines
    assert sum("# default:" in line for line in lines) == 3
    assert configs.differing(Config()) == {}
