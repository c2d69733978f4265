"""Flags of a config: one for each key, and one without a value for what is true or false."""

import argparse

import pytest

import dlm_jax.config as configs


def _parse(*flags):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    configs.add_flags(parser)
    return configs.load(None, configs.parse_flags(parser, list(flags))[1])


def test_help_explains_every_field():
    parser = argparse.ArgumentParser()
    configs.add_flags(parser)
    text = " ".join(parser.format_help().split())
    for section, cls in configs.SECTIONS.items():
        for name, setting in cls.declared.items():
            assert (f"--{section}.{name}" in text) != setting.is_preset
            assert len(setting.help) > 10, name


def test_unknown_flags_name_the_nearest():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    configs.add_flags(parser)
    with pytest.raises(ValueError, match=r"'--train.stepz'; did you mean '--train.steps'"):
        configs.parse_flags(parser, ["--train.stepz=3"])


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ((), False),
        (("--model.qkv_bias",), True),
        (("--model.qkv_bias", "true"), True),
        (("--model.qkv_bias=false",), False),
        (("--model.qkv_bias", "--no-model.qkv_bias"), False),
        (("--no-model.qkv_bias", "--model.depth", "3"), False),
    ],
)
def test_what_is_true_or_false_takes_no_value_and_has_an_opposite(flags, value):
    assert _parse(*flags).model.qkv_bias is value


def test_every_key_that_is_true_or_false_has_an_opposite_and_no_other_has():
    parser = argparse.ArgumentParser()
    configs.add_flags(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    for key, setting in configs.SETTINGS.items():
        is_flag = setting.annotation is bool and not setting.is_preset
        assert (f"--no-{key}" in options) == is_flag, key


def test_a_flag_of_a_number_still_wants_one():
    with pytest.raises(SystemExit):
        _parse("--model.depth")
    with pytest.raises(ValueError, match="--model.qkv_bias='perhaps' is not true or false"):
        _parse("--model.qkv_bias", "perhaps")
