"""A host's choice: of what is allowed, as the device would have chosen."""

import candidate_cases
import numpy as np
import pytest

from dlm_jax.inference.host import chosen

PROBABILITIES = (0.4, 0.3, 0.2, 0.1)


def _chosen(is_allowed, **changes):
    return candidate_cases.make(PROBABILITIES, **changes).choose(is_allowed)


def test_choices_are_in_proportion_to_the_probabilities_of_what_is_allowed():
    uniforms = (np.arange(1000) + 0.5) / 1000
    for is_allowed in ([True] * 4, [False, True, False, True], [False, False, True, False]):
        weights = np.where(is_allowed, PROBABILITIES, 0)
        ids = [_chosen(is_allowed, uniform=float(u)) for u in uniforms]
        shares = np.bincount(ids, minlength=4) / uniforms.size
        np.testing.assert_allclose(shares, weights / weights.sum(), atol=1.1e-3)


def test_a_greedy_row_takes_the_likeliest_that_is_allowed():
    for uniform in (0.0, 0.5, 0.99):
        assert _chosen([False, True, False, True], uniform=uniform, is_greedy=True) == 1


def test_no_candidate_is_refused_by_row_position_and_remedy():
    with pytest.raises(ValueError) as refusal:
        _chosen([False] * 4, row=3, index=7)
    line = "row 3: none of the 4 candidates is allowed at position 7, of "
    assert str(refusal.value).startswith(line)


def _leave(candidates):
    raise SystemExit(0)


def _fail(candidates):
    return {}["no such key"]


class _Secret:
    def __repr__(self):
        return "the environment"


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (_leave, "failed at position 7: SystemExit: 0"),
        (_fail, "failed at position 7: KeyError: 'no such key'"),
        (lambda candidates: _Secret(), "chose a _Secret at position 7, which is not one of its 4"),
        (lambda candidates: True, "chose True at position 7, which is not one"),
        (lambda candidates: 0.0, "chose 0.0 at position 7, which is not one"),
        (lambda candidates: np.zeros(3, int), "chose a ndarray at position 7, which is not one"),
        (lambda candidates: 10**30, "chose 1000000000000000000000000000000 at position 7"),
    ],
)
def test_a_sampler_that_fails_or_returns_no_id_is_refused_in_one_line(sampler, said):
    with pytest.raises(ValueError) as refusal:
        chosen(sampler, candidate_cases.make(PROBABILITIES, row=3, index=7))
    assert str(refusal.value).startswith(f"row 3: the host sampler {said}")
    assert "\n" not in str(refusal.value)
