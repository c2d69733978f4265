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
from dlm_jax.sampling.transforms import resident
from dlm_jax.sampling.transforms.chain import run_all

SIZE = 6007  # several blocks of columns with a narrower last one, and more than are sorted first
FORMS = {
    "top_k": tf.TopK(tc.whole(3, 70, 2500), tc.whole(1, 90, 1)),
    "top_p": tf.TopP(tc.real(0.05, 0.6, 0.999), tc.whole(1, 5, 1)),
    "typical_p": tf.TypicalP(tc.real(0.1, 0.6, 0.98), tc.whole(1, 5, 1)),
    "mirostat_v1": tf.MirostatV1(
        tc.real(1.5, 4.0, 9.0), tc.real(0.1), tc.flags(True), tc.whole(1), vocab_size=SIZE
    ),
}


def _compiled(fn, sorts: bool, monkeypatch):
    """`fn` traced for hardware that sorts whole rows fast, or slowly, on the first call."""
    monkeypatch.setattr(vocab, "sorts_whole_rows", lambda: sorts)
    return jax.jit(lambda *args: fn(*args)).lower(*_shapes(fn)).compile()


def _shapes(fn):
    logits = jax.ShapeDtypeStruct((tc.NUM_POSITIONS, SIZE), jnp.float32)
    return (logits,) if fn in (vocab.argmax, _largest) else (logits, jax.eval_shape(tc.at))


def _largest(logits_NV):
    return vocab.largest(logits_NV, 64)


@pytest.mark.parametrize("name", FORMS)
def test_a_truncation_keeps_the_same_bits_either_way(name, monkeypatch):
    def keep(logits_NV, place):
        prepared = FORMS[name].prepare(FORMS[name].init(tc.NUM_ROWS), tc.context())
        return FORMS[name].apply(prepared, logits_NV, place)

    plain, sorting = (_compiled(keep, sorts, monkeypatch) for sorts in (False, True))
    assert plain.as_text() != sorting.as_text()
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, SIZE))
        got, want = (np.asarray(fn(x, tc.at())) for fn in (sorting, plain))
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), kind)


@pytest.mark.parametrize("fn", [vocab.argmax, _largest], ids=["argmax", "largest"])
def test_the_largest_are_the_same_either_way(fn, monkeypatch):
    plain, sorting = (_compiled(fn, sorts, monkeypatch) for sorts in (False, True))
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, SIZE))
        jax.tree.map(np.testing.assert_array_equal, sorting(x), plain(x))


def test_what_is_behind_the_sorted_values_is_searched(monkeypatch):
    """A prefix of more tokens than are sorted first, from the oracle of plain sums."""
    monkeypatch.setattr(vocab, "sorts_whole_rows", lambda: True)
    x = tc.logits("normal", 0, (tc.NUM_POSITIONS, SIZE)) * 0.1
    out = np.isfinite(
        tc.run.__wrapped__(tf.TopP(tc.real(0.9), tc.whole(1)), x, tc.at(), tc.context())
    )
    for row, kept in zip(x.astype(np.float64), out, strict=True):
        order = np.argsort(-row, kind="stable")
        mass = np.exp(row[order] - row.max())
        before = (np.cumsum(mass) - mass) / mass.sum()
        assert abs(int(kept.sum()) - int((before < np.float32(0.9)).sum())) <= 1
        assert kept.sum() > 1024 and kept[order[: kept.sum()]].all()


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
