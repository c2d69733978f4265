"""The ways that accelerators take give the bits of those that CPUs take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc

from dlm_jax.sampling import vocab

SIZE = 6007  # several blocks of columns with a narrower last one


def _largest(logits_NV):
    return vocab.largest(logits_NV, 64)


@pytest.mark.parametrize("fn", [vocab.argmax, _largest], ids=["argmax", "largest"])
def test_the_largest_are_the_same_either_way(fn, monkeypatch):
    forms = []
    for sorts in (False, True):
        monkeypatch.setattr(vocab, "sorts_whole_rows", lambda sorts=sorts: sorts)
        shape = jax.ShapeDtypeStruct((tc.NUM_POSITIONS, SIZE), jnp.float32)
        forms.append(jax.jit(lambda x: fn(x)).lower(shape).compile())
    plain, sorting = forms
    assert plain.as_text() != sorting.as_text()
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, SIZE))
        jax.tree.map(np.testing.assert_array_equal, sorting(x), plain(x))
