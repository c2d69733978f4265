"""Texts of the published decoders do not depend on the shape of the batch."""

import pytest
from inference import test_ties as ties

from dlm_jax.contrib import decoders
from dlm_jax.sampling.commit import CommitRule
from dlm_jax.sampling.rules import classes_of

ORDERS = [cls.name for cls in classes_of(decoders) if issubclass(cls, CommitRule)]
CASES = [{"order": order, "fill": "parallel"} for order in ORDERS]
CASES += [{"order": "klass", "fill": "wavefront"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES, ids=lambda settings: "-".join(settings.values()))
def test_texts_are_the_same_alone_and_in_every_batch_and_canvas(settings):
    ties.test_texts_are_the_same_alone_and_in_every_batch_and_canvas(settings | {"rules": decoders})
