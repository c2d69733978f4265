"""Texts do not depend on the shape of the batch, also where positions differ by rounding alone."""

import functools

import pytest

import dlm_jax
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.generate import all_requests
from dlm_jax.sampling.rules import BUILT_IN

# The shipped model fills MASK, and this order needs one of random noise.
ORDERS = tuple(BUILT_IN.settings["order"].choices or ())
ORDERS = tuple(order for order in ORDERS if order != "entropy_renoise")
MORE = [
    {"order": "low_confidence", "temperature": 0.0, "temperature_end": 0.25, "confidence": "max"},
    {"order": "low_confidence", "remask": "scheduled"},
    {"order": "low_confidence", "fill": "wavefront", "sampler_min_neighbors_ratio": 0.2},
    {"order": "random", "schedule": "all", "resample": True, "edit": True, "edit_token": "mask",
     "insert_ratio_start": 0.3},
    {"order": "entropy", "ties": "lower"},
    {"order": "low_confidence", "guidance": 2.0},
    {"order": "margin", "guidance": 2.0},
]  # fmt: skip
# Waves are refused with "posterior".
CASES = [{"order": order, "fill": "parallel"} for order in ORDERS]
CASES += [{"order": order, "fill": "wavefront"} for order in ORDERS if order != "posterior"]


def _is_main(settings):
    """Whether a case is run in all sizes, and by `-m slow`; `-m nightly` runs the others."""
    return settings in MORE or settings["order"] in ("low_confidence", "random", "threshold")


PROMPTS = ["", "ROMEO:\n"]


@functools.cache
def _model():
    return dlm_jax.load("shakespeare")


def _requests(settings):
    """32 requests of each prompt, in turn."""
    common = {"steps": 5, "gen_length": 14, "max_length": 32, "seed": 40, "fill": "parallel"}
    made = all_requests(_model(), PROMPTS, 32, common | settings)
    return [request for pair in zip(made[:32], made[32:], strict=True) for request in pair]


def _texts(requests, *sizes, canvas=32):
    """The tokens of the requests, in programs of so many rows, of `canvas` positions."""
    with Engine(_model(), sizes=sizes, canvases=(canvas,)) as engine:
        rows = {row.number: row for row in engine.run(requests)}
        assert {*engine.report().programs} <= {f"rows={size} canvas={canvas}" for size in sizes}
    return [tuple(rows[index].tokens) for index in range(len(requests))]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(one, marks=pytest.mark.slow if _is_main(one) else pytest.mark.nightly)
        for one in (*CASES, *MORE)
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_texts_are_the_same_alone_and_in_every_batch_and_canvas(settings):
    is_main = _is_main(settings)
    requests = _requests(settings)
    whole = _texts(requests, 64)
    # Rows that begin greedily differ less.
    for texts in (whole[::2], whole[1::2]):
        assert len(set(texts)) > (8 if settings.get("temperature") == 0.0 else 16)
    for sizes in ((2,), (24, 7, 1)) if is_main else ((7,),):
        assert _texts(requests[:28], *sizes) == whole[:28]
    assert _texts(requests[:24], 1, canvas=64) == whole[:24]
