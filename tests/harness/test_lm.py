"""The model class of the harness: what its methods return, and that the harness finds it."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
import toy_model

import dlm_jax
from dlm_jax.cli.lm_eval import with_own_tasks
from dlm_jax.config import SampleConfig
from dlm_jax.diffusion.likelihood import bound_at
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.harness.likelihood import masks_of
from dlm_jax.harness.lm import Evaluated
from dlm_jax.harness.pairs import pair_of
from dlm_jax.harness.tasks.shipped import rows
from dlm_jax.published import TextTemplate

MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SampleConfig(order="left_to_right", chain=("temperature",), ignore_eos=True, steps=12),
)


def _asked(*args):
    return types.SimpleNamespace(args=args)


def test_likelihoods_are_negative_nats_and_rolling_ones_their_sum():
    made = Evaluated(model=MODEL, draws=4)
    ((loglikelihood, is_greedy),) = made.loglikelihood([_asked("The", " cat")])
    assert loglikelihood < 0 and isinstance(is_greedy, bool)
    (whole,) = made.loglikelihood_rolling([_asked("The cat")])
    (behind,) = made.loglikelihood([_asked("", "The cat")])
    assert whole == behind[0]


def test_the_harness_cache_is_told():
    made = Evaluated(model=MODEL, draws=2)
    kept = []
    made.cache_hook = types.SimpleNamespace(add_partial=lambda *told: kept.append(told))
    found = made.loglikelihood([_asked("The", " cat")])
    assert kept == [("loglikelihood", ("The", " cat"), found[0])]


def test_templates_and_names():
    chat = TextTemplate("{{ messages[0].content }}", text_tokenizer=MODEL.tokenizer)
    made = Evaluated(model=dataclasses.replace(MODEL, chat=chat))
    assert made.apply_chat_template([{"role": "user", "content": "The cat"}]) == "The cat"
    assert made.chat_template(True) == chat.source and made.chat_template(False) == ""
    assert made.tokenizer_name == Evaluated(model=MODEL).tokenizer_name
    with pytest.raises(ValueError, match="no chat template"):
        Evaluated(model=MODEL).apply_chat_template([])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"draws": 0}, "num_draws=0"), ({"batch_size": 0}, "batch_size=0"),
     ({"temprature": 1}, "temprature"), ({"preset": "x"}, "preset='x'")],
)  # fmt: skip
def test_arguments_are_checked_at_once(arguments, told):
    with pytest.raises(ValueError, match=told):
        Evaluated(model=MODEL, **arguments)


def test_the_harness_finds_the_class_by_its_name():
    registry = pytest.importorskip("lm_eval.api.registry", reason="lm-eval is not installed")
    from dlm_jax.cli.lm_eval import register

    register()
    made = registry.get_model("dlm_jax")
    assert issubclass(made, Evaluated)


@pytest.mark.parametrize(
    ("given", "is_added"),
    [
        (["--tasks", "x"], True),
        (["--tasks=x"], True),
        (["-t", "x"], True),
        (["ls", "tasks"], True),
        (["--help"], False),
        (["--tasks", "x", "--include_path", "mine"], False),
        (["--tasks", "x", "--include_path=mine"], False),
    ],
)
def test_shipped_tasks_are_found_wherever_tasks_are_named(given, is_added):
    found = with_own_tasks(given)
    assert found[: len(given)] == given
    assert len(found) == len(given) + 2 * is_added
    if is_added:
        names = {path.stem for path in Path(found[-1]).glob("*.yaml")}
        assert names == {"shakespeare_cloze", "arithmetic_words"}


@pytest.mark.slow
def test_scores_of_a_shipped_task_are_those_of_a_plain_loop():
    model = dlm_jax.load()
    asked = [(row["context"], choice) for row in rows("shakespeare_cloze")[:4]
             for choice in row["choices"]]  # fmt: skip
    found = Evaluated(model=model, draws=4).loglikelihood([_asked(*one) for one in asked])
    for (context, choice), (loglikelihood, _) in zip(asked, found, strict=True):
        pair = pair_of(model, context, choice)
        batch = Batch(pair.ids[None], np.array([pair.ids.size]), np.array([pair.given]))
        costs = [
            float(bound_at(model.network, model.params, batch, mask[None],
                           mask_id=model.tokenizer.mask_id)[0])
            for mask in masks_of(pair, 4, 0)
        ]  # fmt: skip
        np.testing.assert_allclose(-loglikelihood, np.mean(costs), rtol=1e-4)
