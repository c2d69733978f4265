"""Truncations keep what float64 oracles written from the formulas keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import near, samplers

from dlm_jax.sampling import transforms as tf

SIZES = (1, 2, 40, 151)  # 40 is compared all with all, 151 is searched
PRIME_SIZE = 2503  # no divisor: several blocks of columns with a narrower last one

MAKE = {
    "top_k": lambda k, keep: tf.TopK(tc.whole(*k), tc.whole(*keep)),
    "top_p": lambda p, keep: tf.TopP(tc.real(*p), tc.whole(*keep)),
    "typical_p": lambda p, keep: tf.TypicalP(tc.real(*p), tc.whole(*keep)),
    "min_p": lambda p, keep: tf.MinP(tc.real(*p), tc.whole(*keep)),
    "top_n_sigma": lambda n, keep: tf.TopNSigma(tc.real(*n), tc.whole(*keep)),
}
VALUES = {
    "top_k": st.integers(0, 200),
    "top_p": tc.floats(0.01, 1.0),
    "typical_p": tc.floats(0.01, 1.0),
    "min_p": tc.floats(0.0, 1.0).map(lambda m: 0.0 if m < 1e-6 else m),
    "top_n_sigma": tc.floats(0.0, 5.0).map(lambda n: 0.0 if n < 1e-6 else n),
}


def check(stage: str, x: np.ndarray, values, min_keeps) -> None:
    """Compares every position of one call with the oracle."""
    place = tc.at()
    out = np.asarray(tc.run(MAKE[stage](values, min_keeps), x, place, tc.context()))
    for n, row in enumerate(np.asarray(place.row_N)):
        seen, keep = tc.as_seen(x[n]), min_keeps[row]
        value = values[row] if stage == "top_k" else float(np.float32(values[row]))
        expected = getattr(samplers, stage)(seen, value, min_keep=keep)
        doubt = near.undecided(stage, seen, {stage: value, "min_keep": keep})
        tc.assert_keeps(out[n], x[n], expected, doubt)


@pytest.mark.parametrize("stage", MAKE)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
def test_truncation_keeps_what_the_oracle_keeps(stage, data):
    kind = data.draw(st.sampled_from(tc.KINDS))
    shape = (tc.NUM_POSITIONS, data.draw(st.sampled_from(SIZES)))
    x = tc.logits(kind, data.draw(st.integers(0, 2**16)), shape)
    values = data.draw(st.tuples(*[VALUES[stage]] * tc.NUM_ROWS))
    check(stage, x, values, data.draw(st.tuples(*[st.integers(1, 5)] * tc.NUM_ROWS)))


@pytest.mark.parametrize(
    "stage",
    [name if name == "top_p" else pytest.param(name, marks=pytest.mark.slow) for name in MAKE],
)
def test_truncation_of_many_blocks_keeps_what_the_oracle_keeps(stage):
    values = {"top_k": (1, 60, 900), "top_n_sigma": (0.3, 1.0, 3.0)}.get(stage, (0.05, 0.5, 0.95))
    for seed, kind in enumerate(("normal", "ties", "banned", "peaked")):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, PRIME_SIZE))
        check(stage, x, values, (1, 3, 1))


def test_min_p_keeps_a_token_exactly_at_the_threshold():
    x = np.array([[0.0, -1.0, float(np.log(np.float32(0.5))), -4.0]] * 6, np.float32)
    out = np.isfinite(tc.run(tf.MinP(tc.real(0.5), tc.whole(1)), x, tc.at(), tc.context()))
    np.testing.assert_array_equal(out[0], [True, False, True, False])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    kind=st.sampled_from(tc.KINDS),
    seed=st.integers(0, 2**16),
    threshold=tc.floats(0.01, 0.6),
    probability=st.sampled_from([0.0, 0.5, 1.0]),
    min_keep=st.integers(1, 4),
)
def test_xtc_keeps_what_the_oracle_keeps(kind, seed, threshold, probability, min_keep):
    x = tc.logits(kind, seed)
    transform = tf.Xtc(tc.real(probability), tc.real(threshold), tc.whole(min_keep))
    out = np.asarray(tc.run(transform, x, tc.at(seed), tc.context()))
    params = {
        "xtc_probability": probability,
        "xtc_threshold": float(np.float32(threshold)),
        "min_keep": min_keep,
    }
    for n in range(tc.NUM_POSITIONS):
        seen = tc.as_seen(x[n])
        # whether a position acts is its own draw: it must follow one of the two oracles
        acting = samplers.xtc(seen, 1.0, params["xtc_threshold"], 0.0, min_keep=min_keep)
        doubt = near.undecided("xtc", seen, {**params, "xtc_probability": 1.0}, uniform=0.0)
        is_untouched = np.array_equal(out[n], x[n])
        if probability == 0.0:
            assert is_untouched
        if probability == 1.0 or not is_untouched:
            tc.assert_keeps(out[n], x[n], acting, doubt)


def test_top_n_sigma_ignores_removed_tokens_and_survives_huge_logits():
    x = np.array([[3.0, 2.0, 1.0, -np.inf]] * 6, np.float32)
    transform = tf.TopNSigma(tc.real(1.0), tc.whole(1))
    for scale in (1.0, 1e38):
        out = np.asarray(tc.run(transform, x * np.float32(scale), tc.at(), tc.context()))
        np.testing.assert_array_equal(np.isfinite(out[0]), [True, False, False, False])


HF = {
    "top_k": ("TopKLogitsWarper", {"top_k": 7}, 7),
    "top_p": ("TopPLogitsWarper", {"top_p": 0.7}, 0.7),
    "min_p": ("MinPLogitsWarper", {"min_p": 0.1}, 0.1),
    "typical_p": ("TypicalLogitsWarper", {"mass": 0.6}, 0.6),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", HF)
def test_truncation_agrees_with_transformers(stage):
    torch = pytest.importorskip("torch", reason="torch is an optional extra")
    hf = pytest.importorskip("transformers", reason="transformers is an optional extra")
    name, options, value = HF[stage]
    for seed in range(5):
        x = tc.logits("normal", seed)
        theirs = getattr(hf, name)(**options)(torch.zeros(6, 1).long(), torch.tensor(x)).numpy()
        ours = tc.run(MAKE[stage]((value,) * 3, (1, 1, 1)), x, tc.at(), tc.context())
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))


@pytest.mark.parametrize("V", [4, 40, 151, 2503])
def test_of_equal_tokens_a_mass_of_exactly_p_is_a_whole_nucleus(V):
    """A token is dropped if the mass before it is >= p; shares of equal tokens are exact."""
    place = tc.at()
    for n in (2, 4, 16, 64):
        if n > V:
            continue
        x = np.full((tc.NUM_POSITIONS, V), -np.inf, np.float32)
        x[:, V - n :] = 3.0
        counts = np.array([1, n // 2, n - 1])
        out = tc.run(tf.TopP(tc.real(*counts / n), tc.whole(1)), x, place, tc.context())
        for kept_V, row in zip(np.isfinite(out), np.asarray(place.row_N), strict=True):
            expected = np.arange(V - n, V - n + counts[row])
            np.testing.assert_array_equal(np.flatnonzero(kept_V), expected)


@pytest.mark.parametrize("V", [4, 151])
def test_typical_p_takes_tokens_until_their_mass_exceeds_q(V):
    """A token behind a mass of exactly q stays: as many as the quarters of q, and one."""
    x = np.full((tc.NUM_POSITIONS, V), -np.inf, np.float32)
    x[:, V - 4 :] = -2.0
    place = tc.at()
    out = tc.run(tf.TypicalP(tc.real(0.25, 0.5, 0.75), tc.whole(1)), x, place, tc.context())
    for kept_V, row in zip(np.isfinite(out), np.asarray(place.row_N), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(kept_V), np.arange(V - 4, V - 2 + row))


def test_tokens_beside_xtc_are_as_frequent_as_two_independent_choices_make_them():
    """Two of 1/4 each, of which XTC drops one at half of the positions, and 32 of 1/64 each."""
    num, p = 3000, np.array([0.25, 0.25, *[1 / 64] * 32])
    chain = tf.chain(tf.Xtc(tc.real(0.5), tc.real(0.2), tc.whole(1)))
    x = np.log(p).astype(np.float32)[None].repeat(num, axis=0)
    place = tc.at(num=num, index_N=jnp.zeros(num, jnp.int32))
    ids = np.concatenate(
        [
            np.asarray(tc.draw(chain, x, place._replace(key_N=keys), tc.context()))
            for keys in (jax.random.split(jax.random.key(s), num) for s in range(2))
        ]
    )
    dropped = np.where(np.arange(34) == 1, 0, p) / 0.75
    expected = ids.size * (p + dropped) / 2
    counts = np.bincount(ids, minlength=34)
    # chi-square with 33 degrees of freedom exceeds 72.1 once in 10,000
    assert ((counts - expected) ** 2 / expected).sum() < 72.1
