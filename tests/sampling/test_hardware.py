"""The ways that accelerators take give the bits of those that CPUs take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc

from dlm_jax.sampling import transforms as tf
from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms import resident

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


SEARCHED = {
    "top_k": lambda: tf.TopK(tc.whole(1, 70, 900), tc.whole(1)),
    "top_p": lambda: tf.TopP(tc.real(0.05, 0.9, 1.0), tc.whole(1, 9, 1)),
    "typical_p": lambda: tf.TypicalP(tc.real(0.05, 0.5, 0.95), tc.whole(1, 9, 1)),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_in_a_kernel_gives_the_bits_of_the_plain_search(name, monkeypatch):
    size = 2503  # a prime, so that the columns of both are as wide as a block of the kernel
    forms = []
    for in_kernel in (False, True):
        monkeypatch.setattr(resident, "runs_here", lambda num_logits, here=in_kernel: here)
        traced = jax.jit(lambda x, place: SEARCHED[name]().apply((), x, place)).trace(
            jax.ShapeDtypeStruct((tc.NUM_POSITIONS, size), jnp.float32), tc.at()
        )
        assert ("pallas_call" in str(traced.jaxpr)) == in_kernel
        forms.append(traced.lower().compile())
    for seed, kind in enumerate(tc.KINDS):
        x, place = tc.logits(kind, seed, (tc.NUM_POSITIONS, size)), tc.at(seed)
        plain, kernel = (np.asarray(form(x, place)).view(np.uint32) for form in forms)
        np.testing.assert_array_equal(kernel, plain, kind)
