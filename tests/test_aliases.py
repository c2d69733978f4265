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
    with pytest.raises(ValueError, match="use gen_length=8"):
        dlm_jax.generate(toy_model.MODEL, ["The"], max_new_tokens=8)


DOORS = {
    "": lambda name: dlm_jax.generate(toy_model.MODEL, ["The"], **{name: 1}),
    "sample.": lambda name: from_dict({"sample": {name: 1}}, where="run.toml"),
    "--": lambda name: sample.main([f"--{name.replace('_', '-')}", "1"]),
    "--sample.": lambda name: train.main([f"--sample.{name}", "1"]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ties", "a preset sets it: --preset"),
        ("cfg_scale", "it is named {}guidance here"),
        ("temprature", "did you mean '{}temperature'?"),
    ],
)
def test_every_door_names_the_setting_of_an_alias(name, told, door, capsys):
    if name == "ties" and "--" not in door:
        return
    with pytest.raises((ValueError, SystemExit)) as error:
        DOORS[door](name)
    assert told.format(door) in f"{error.value}{capsys.readouterr().err}"
