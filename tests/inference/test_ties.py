"""Texts do not depend on the shape of the batch, also where positions differ by rounding alone."""

import functools

import pytest

import dlm_jax
from dlm_jax.sampling.rules import BUILT_IN

# The shipped model fills MASK, and this order needs one of random noise.
ORDERS = tuple(BUILT_IN.settings["order"].choices or ())
ORDERS = tuple(order for order in ORDERS if order != "entropy_renoise")
MORE = [
    {"order": "low_confidence", "temperature": 0.0, "temperature_end": 0.25, "confidence": "max"},
    {"order": "low_confidence", "remask": "scheduled", "remask_randomness": 0.0},
    {"order": "low_confidence", "fill": "wavefront", "sampler_spread_seeds": True,
     "sampler_min_neighbors_ratio": 0.2},
    {"order": "random", "schedule": "all", "resample": True, "edit": True, "edit_token": "mask",
     "insert_ratio_start": 0.3},
    {"order": "entropy", "ties": "lower"},
]  # fmt: skip
# Single published decoders: waves are as with any other order, but for what a rule keeps. Waves
# are refused with "posterior".
DECODERS = {
    "frechet", "local_leap", "hierarchical", "dilated", "position_aware", "prophet", "credit",
    "slow_fast", "dawn", "posterior",
}  # fmt: skip
CASES = [{"order": order, "fill": "parallel"} for order in ORDERS]
CASES += [{"order": order, "fill": "wavefront"} for order in ORDERS if order not in DECODERS]


@functools.cache
def _model():
    return dlm_jax.load("shakespeare")


def _texts(count, prompt, batch_size, **settings):
    asked = {"steps": 5, "gen_length": 14, "seed": 40, "max_length": 64} | settings
    return dlm_jax.generate(
        _model(), [prompt], num_samples=count, batch_size=batch_size, **asked
    ).texts


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", "ROMEO:\n"])
@pytest.mark.parametrize(
    "settings", [*CASES, *MORE], ids=lambda settings: "-".join(map(str, settings.values()))
)
def test_texts_are_the_same_alone_and_in_every_batch_and_canvas(settings, prompt):
    is_main = settings in MORE or settings["order"] in ("low_confidence", "random", "threshold")
    settings = {"fill": "parallel"} | settings
    whole = _texts(64, prompt, 64, **settings)
    # Rows that begin greedily differ less.
    assert len(set(whole)) > (16 if settings.get("temperature") == 0.0 else 32)
    for size in (2, 7, 24) if is_main else (7,):
        assert _texts(24, prompt, size, **settings) == whole[:24]
    alone = [_texts(1, prompt, 1, **settings | {"seed": 40 + n})[0] for n in range(12)]
    assert tuple(alone) == whole[:12]
    assert _texts(7, prompt, 7, **settings | {"max_length": 128}) == whole[:7]
