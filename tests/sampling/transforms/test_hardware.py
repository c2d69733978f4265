"""The ways that accelerators take give the bits of those that CPUs take."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc

from dlm_jax.sampling import transforms as tf
from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms import resident, truncate
from dlm_jax.sampling.transforms.chain import run_all

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


@pytest.mark.parametrize("name", ["top_k", "top_p", "typical_p"])
def test_truncations_keep_the_same_tokens_either_way(name, monkeypatch):
    count_N = jnp.asarray([1, 70, 700, 3000, SIZE] * tc.NUM_POSITIONS)[: tc.NUM_POSITIONS]
    rows = jnp.linspace(0.05, 1.0, tc.NUM_ROWS), jnp.full(tc.NUM_ROWS, 2)
    keep = {
        "top_k": lambda x, at: truncate.keep_largest(x, count_N)(x, jnp.arange(SIZE)[None]),
        "top_p": lambda x, at: tf.TopP(*rows, jnp.zeros(tc.NUM_ROWS)).apply((), x, at),
        "typical_p": lambda x, at: tf.TypicalP(*rows).apply((), x, at),
    }[name]
    forms = []
    for sorts in (False, True):
        monkeypatch.setattr(vocab, "sorts_whole_rows", lambda sorts=sorts: sorts)
        shape = jax.ShapeDtypeStruct((tc.NUM_POSITIONS, SIZE), jnp.float32)
        lowered = jax.jit(lambda x, at: keep(x, at)).lower(shape, jax.eval_shape(tc.at))
        forms.append(lowered.compile())
    plain, sorting = forms
    assert plain.as_text() != sorting.as_text()
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, SIZE))
        for logits_NV in (x, x.astype(jnp.bfloat16).astype(jnp.float32)):  # with ties
            place = tc.at(seed)
            np.testing.assert_array_equal(sorting(logits_NV, place), plain(logits_NV, place), kind)


@pytest.mark.slow
def test_a_kernel_keeps_and_draws_the_tokens_of_separate_transforms(monkeypatch):
    size = 2503  # a prime, so that the columns of all passes are as wide as a block of the kernel
    few = tf.MirostatV2(tc.real(1.5, 0.1, 9.0), tc.real(0.1), tc.flags(True), tc.whole(1, 9, 1))
    chain = tf.chain(*(make(True, size) for make in tc.CASES.values()), few)

    def draw(logits_NV, place):
        prepared = chain.prepare(chain.init(tc.NUM_ROWS), tc.context(0, size))
        steps = list(zip(chain.transforms, prepared, strict=True))
        final_NV = run_all(steps, logits_NV, place, is_drawn=True)
        return final_NV, chain.draw(prepared, logits_NV, place)

    def compiled():
        shape = jax.ShapeDtypeStruct((tc.NUM_POSITIONS, size), jnp.float32)
        return jax.jit(lambda *args: draw(*args)).lower(shape, jax.eval_shape(tc.at)).compile()

    plain = compiled()
    monkeypatch.setattr(resident, "runs_here", lambda vocab_size: vocab_size == size)
    monkeypatch.setattr(resident, "run", functools.partial(resident.run, interpret=True))
    fused = compiled()
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, size))
        got, want = (jax.tree.map(np.asarray, fn(x, tc.at(seed))) for fn in (fused, plain))
        np.testing.assert_array_equal(np.isfinite(got[0]), np.isfinite(want[0]), kind)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, err_msg=kind)
        np.testing.assert_array_equal(got[1][0], want[1][0], kind)
        np.testing.assert_allclose(got[1][1], want[1][1], rtol=1e-5, atol=1e-6, err_msg=kind)
