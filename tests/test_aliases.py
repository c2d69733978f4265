"""Names of settings in other programs: each error message names the setting of this library."""

import pytest
import toy_model

import dlm_jax
from dlm_jax.cli import sample, train
from dlm_jax.config import SamplingParams, from_dict

SETTINGS = SamplingParams.table.settings
ALIASES = [alias for setting in SETTINGS.values() for alias in setting.aliases]


def test_an_alias_belongs_to_one_setting_and_is_none():
    assert len(set(ALIASES)) == len(ALIASES)
    assert not set(ALIASES) & set(SETTINGS)


def test_the_number_of_new_tokens_is_not_a_length_target():
    with pytest.raises(ValueError, match="use gen_length=8"):
        dlm_jax.generate(toy_model.MODEL, ["The"], max_new_tokens=8)


def _generate(name, tmp_path, capsys):
    dlm_jax.generate(toy_model.MODEL, ["The"], **{name: 1})


def _config(name, tmp_path, capsys):
    from_dict({"sample": {name: 1}}, where="run.toml")


def _flag(name, tmp_path, capsys):
    _run(sample.main, f"--{name.replace('_', '-')}", capsys)


def _key(name, tmp_path, capsys):
    _run(train.main, f"--sample.{name}", capsys)


def _run(main, flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([flag, "1"])
    raise ValueError(capsys.readouterr().err)


CASES = [
    ("ties", "a preset sets it: --preset"),
    ("remasking", "it is named {}order here"),
    ("cfg_scale", "it is named {}guidance here"),
    ("num_steps", "it is named {}steps here"),
    ("temprature", "did you mean '{}temperature'?"),
]
DOORS = {_generate: "", _config: "sample.", _flag: "--", _key: "--sample."}


@pytest.mark.parametrize(
    ("name", "told", "door"),
    [
        (name, told, door)
        for name, told in CASES
        for door in DOORS
        if name != "ties" or door not in (_generate, _config)
    ],
)
def test_every_door_names_the_setting_of_an_alias(name, told, door, tmp_path, capsys):
    with pytest.raises(ValueError) as error:
        door(name, tmp_path, capsys)
    assert told.format(DOORS[door]) in str(error.value)


def test_a_flag_that_left_says_where_it_went(capsys):
    with pytest.raises(ValueError, match="--time-steps.*benchmarks.generation"):
        _flag("time_steps", None, capsys)
