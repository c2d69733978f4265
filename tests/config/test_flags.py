"""Flags of a config: one for each key, and one without a value for what is true or false."""

import argparse
import dataclasses

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
    for section, cls in configs.sections().items():
        for field in dataclasses.fields(cls):
            assert f"--{section}.{field.name}" in text
            assert len(field.metadata["help"]) > 10, field.name


def test_unknown_flags_name_the_nearest():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    configs.add_flags(parser)
    with pytest.raises(ValueError, match=r"'--train.stepz'; did you mean '--train.steps'"):
        configs.parse_flags(parser, ["--train.stepz=3"])


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ((), False),
        (("--model.remat",), True),
        (("--model.remat", "true"), True),
        (("--model.remat=false",), False),
        (("--model.remat", "--no-model.remat"), False),
        (("--no-model.remat", "--model.depth", "3"), False),
    ],
)
def test_what_is_true_or_false_takes_no_value_and_has_an_opposite(flags, value):
    assert _parse(*flags).model.remat is value


def test_every_key_that_is_true_or_false_has_an_opposite_and_no_other_has():
    parser = argparse.ArgumentParser()
    configs.add_flags(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    for key, hint in configs.key_types().items():
        assert (f"--no-{key}" in options) == (hint is bool), key


def test_a_flag_of_a_number_still_wants_one():
    with pytest.raises(SystemExit):
        _parse("--model.depth")
    with pytest.raises(ValueError, match="--model.remat='perhaps' is not true or false"):
        _parse("--model.remat", "perhaps")
