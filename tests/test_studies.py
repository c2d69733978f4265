"""What the studies of the sampler head compare: fills and texts are what they are called."""

import pytest

import dlm_jax
from benchmarks import head_rivals, sampler_head, which_process
from benchmarks.processes import Counts
from dlm_jax.inference.request import settings_of_call

TEXT = "The quick brown fox jumps over a lazy dog, and then\nanother one comes along slowly. " * 40


@pytest.fixture(scope="module")
def shipped():
    return dlm_jax.load()


@pytest.mark.parametrize("kinds", [sampler_head.KINDS, head_rivals.QUOTAS])
def test_a_fill_is_what_it_is_called_whatever_the_model_recommends(shipped, kinds):
    assert shipped.config.sample.fill == "wavefront"
    for name, settings in kinds.items():
        settled = settings_of_call(shipped, sampler_head.BASE | {"steps": 8} | settings)
        assert settled.fill == ("parallel" if name == "parallel" else "wavefront")
        assert settled.order == ("random_filled" if "all filled" in name else "random")


def test_the_temperature_of_equal_entropy_can_be_reached_by_every_process():
    entropies = {
        "masked": {1.0: 4.8, 0.8: 4.4, 0.6: 4.1},
        "uniform": {1.0: 4.3, 0.8: 4.1, 0.6: 4.0},
        "mixed": {1.0: 4.6, 0.8: 4.2, 0.6: 3.9},
        "other": {1.0: 5.0, 0.8: 4.9, 0.6: 4.7},
    }
    found = {name: which_process.equal_entropy(name, entropies) for name in entropies}
    assert found == {"masked": 0.8, "uniform": 1.0, "mixed": 0.8, "other": 0.6}


def test_repair_settings_are_selected_by_wrong_tokens_and_by_repairs():
    tuned = [(Counts(100, 10, 0, 0), "idle"), (Counts(100, 10, 5, 3), "careful"),
             (Counts(100, 10, 8, 30), "bold")]  # fmt: skip
    found = which_process.selected(tuned)
    assert found == {"fewest wrong": "careful", "most repaired": "bold"}
