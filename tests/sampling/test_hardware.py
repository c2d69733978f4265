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


IN_KERNEL = {
    "temperature": lambda: tf.Temperature(
        tc.real(0.7, 1.0, 0.0), None, tc.real(0.3, 1.0, 0.0), tc.real(1.0, 2.0, 1.0)
    ),
    "top_n_sigma": lambda: tf.TopNSigma(tc.real(1.0, 0.5, 0.0), tc.whole(1, 9, 1)),
    "top_k": lambda: tf.TopK(tc.whole(1, 70, 900), tc.whole(1)),
    "typical_p": lambda: tf.TypicalP(tc.real(0.05, 0.5, 0.95), tc.whole(1, 9, 1)),
    "top_p": lambda: tf.TopP(tc.real(0.05, 0.9, 1.0), tc.whole(1, 9, 1)),
    "min_p": lambda: tf.MinP(tc.real(0.05, 0.9, 0.0), tc.whole(1, 9, 1)),
    "xtc": lambda: tf.Xtc(tc.real(1.0, 0.5, 0.0), tc.real(0.01, 0.05, 0.1), tc.whole(1)),
    "mirostat": lambda: tf.Mirostat(
        tc.whole(1, 2, 0), tc.real(5.0), tc.real(0.1), tc.whole(1, 9, 1), vocab_size=2503
    ),
}


@pytest.mark.parametrize("name", [*IN_KERNEL, "all"])
def test_transforms_in_a_kernel_give_the_bits_of_the_plain_transforms(name, monkeypatch):
    size = 2503  # a prime, so that the columns of both are as wide as a block of the kernel
    forms = []
    for in_kernel in (False, True):

        def runs_here(num_logits, here=in_kernel):
            return here and num_logits > resident.WIDTH

        monkeypatch.setattr(resident, "runs_here", runs_here)
        chain = tf.chain(*(make() for key, make in IN_KERNEL.items() if name in (key, "all")))
        traced = jax.jit(
            lambda x, place, chain=chain: chain.apply(chain.init(tc.context()), x, place)
        ).trace(jax.ShapeDtypeStruct((tc.NUM_POSITIONS, size), jnp.float32), tc.at())
        assert ("pallas_call" in str(traced.jaxpr)) == in_kernel
        forms.append(traced.lower().compile())
    for seed, kind in enumerate(tc.KINDS):
        x, place = tc.logits(kind, seed, (tc.NUM_POSITIONS, size)), tc.at(seed)
        plain, kernel = (np.asarray(form(x, place)).view(np.uint32) for form in forms)
        np.testing.assert_array_equal(kernel, plain, kind)


def test_the_derivative_of_a_kernel_is_that_of_the_plain_transforms():
    size = 1500
    x, place = tc.logits("normal", 0, (tc.NUM_POSITIONS, size)), tc.at()
    gathered = [IN_KERNEL[name]().gather(place) for name in ("temperature", "top_p", "min_p")]

    def slope(run):
        def loss(x):
            y = run(gathered, place.is_real_N, x)
            return jnp.where(y > -jnp.inf, y, 0.0).sum()

        return jax.jit(jax.grad(loss))(x)

    found = slope(resident.run)
    np.testing.assert_array_equal(found, slope(resident.run_plainly))
    assert len(np.unique(found)) > 2
