"""Names of other projects: each leads to one that exists here, wherever it is given."""

import inspect
import json

import pytest
import toy_model

import dlm_jax
from dlm_jax.batch.request_file import RequestFile
from dlm_jax.cli import sample, train
from dlm_jax.config import SampleConfig, from_dict
from dlm_jax.elsewhere import TABLE, VALUES, named_here
from dlm_jax.serving.protocol import ApiError, Chat, Completion, Limits, Planner

SETTINGS = SampleConfig.table.settings
FIELDS = {*Completion.model_fields, *Chat.model_fields}
ISSUED = (
    "remasking", "alg", "alg_temp", "cfg_scale", "diffusion_steps", "block_size", "top_p_logits",
    "num_steps", "eos_early_stop",
)  # fmt: skip


def test_every_name_and_value_on_the_right_exists():
    known = {*SETTINGS, *FIELDS, *inspect.signature(dlm_jax.generate).parameters}
    for theirs, here in TABLE.items():
        assert here.names or here.note, theirs
        assert set(here.names) <= known, theirs
        assert not here.names or named_here(theirs, sorted(known)), theirs
    for given in [v for here in TABLE.values() for v in here.values.values()] + [
        one for values in VALUES.values() for one in values.values()
    ]:
        SampleConfig(**given)
    assert set(VALUES) <= set(SETTINGS)


def test_no_name_of_others_is_a_setting_that_means_the_same():
    assert {*TABLE} & {*SETTINGS} == {"max_new_tokens"}
    with pytest.raises(ValueError, match="use gen_length=8"):
        dlm_jax.generate(toy_model.MODEL, ["The"], max_new_tokens=8)
    assert set(ISSUED) <= {*TABLE}


def _generate(name, value):
    dlm_jax.generate(toy_model.MODEL, ["The"], **{name: value})


def _request(name, value, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": "The", name: value}))
    (line,) = RequestFile(path, known=list(SETTINGS))
    raise ValueError(line.error)


def _config(name, value):
    from_dict({"sample": {name: value}}, where="run.toml")


def _flag(main, flag, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([flag, str(value)])
    raise ValueError(capsys.readouterr().err)


def _field(name, value):
    planner = Planner(toy_model.MODEL, "toy", Limits())
    with pytest.raises(ApiError) as refused:
        planner.answer(Completion(prompt="The", **{name: value}))
    assert refused.value.param == name
    raise ValueError(refused.value.message)


CASES = [
    ("remasking", "low_confidence", "named {order} here; use {order}{is}low_confidence"),
    ("remask", "low_confidence", "use order='low_confidence'"),
    ("alg", "topk_margin", "named {order} here; use {order}{is}margin"),
    ("alg", "other", "named {order} here: low_confidence is "),
    ("cfg_scale", 1.5, "named {guidance} here"),
    ("alg_temp", 0.5, "no counterpart here"),
    ("use_cache", True, "named {cache} here; use {cache}{is}prefix"),
    ("num_steps", 8, "named {steps} here"),
    ("temprature", 1.0, "did you mean '{temperature}'?"),
]
PLACES = ("generate", "request", "config", "flag", "key", "field")


@pytest.mark.parametrize(
    ("name", "value", "told", "where"),
    # The values of a file of requests are checked when its rows run.
    [
        (*case, place)
        for case in CASES
        for place in PLACES
        if (case[0], place) != ("remask", "request")
    ],
)
def test_a_name_of_others_is_called_by_its_own_here_wherever_it_is_given(
    name, value, told, where, tmp_path, capsys
):
    told_by = {
        "generate": lambda: _generate(name, value),
        "request": lambda: _request(name, value, tmp_path),
        "config": lambda: _config(name, value),
        "flag": lambda: _flag(sample.main, f"--{name.replace('_', '-')}", value, capsys),
        "key": lambda: _flag(train.main, f"--sample.{name}", value, capsys),
        "field": lambda: _field(name, value),
    }
    prefix, dashes = {
        "flag": ("--", " "),
        "key": ("--sample.", " "),
        "config": ("sample.", "='"),
    }.get(where, ("", "='"))
    names = {n: prefix + n for n in ("order", "guidance", "cache", "steps", "temperature")}
    with pytest.raises(ValueError) as error:
        told_by[where]()
    assert told.format(**names, **{"is": dashes}) in str(error.value)


def test_a_name_without_a_counterpart_is_not_answered_with_another_setting():
    with pytest.raises(ValueError, match="it has no counterpart here .*; remove it") as caught:
        _generate("enable_early_stopping", True)
    assert "is named" not in str(caught.value)
