"""Laws that every logit transform keeps, alone and in a chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc
from jax.extend.core import jaxprs_in_params
from transform_cases import CASES, KINDS, VOCAB

from dlm_jax.sampling import transforms as tf

each_transform = pytest.mark.parametrize("name", CASES)


def bits(x) -> np.ndarray:
    """Bit patterns, so that -0.0 differs from 0.0."""
    return np.asarray(x, np.float32).view(np.uint32)


def full_chain(is_on: bool = True) -> tf.Chain:
    return tf.chain(*(make(is_on, VOCAB) for make in CASES.values()))


@each_transform
def test_neutral_is_identity_bitwise(name):
    transform = CASES[name](False, VOCAB)
    assert not np.any(transform.is_active())
    for seed, kind in enumerate(KINDS):
        x = tc.logits(kind, seed)
        for t in (transform, tf.chain(transform)):
            np.testing.assert_array_equal(bits(tc.run(t, x, tc.at(), tc.context())), bits(x))


@each_transform
def test_active_changes_something(name):
    x = tc.logits("normal", 1)
    assert np.any(bits(tc.run(CASES[name](True, VOCAB), x, tc.at(), tc.context())) != bits(x))


@each_transform
def test_inactive_row_is_identity_among_active_rows(name):
    on, off = CASES[name](True, VOCAB), CASES[name](False, VOCAB)
    mixed = jax.tree.map(lambda a, b: a.at[1].set(b[1]), on, off)
    is_off = np.asarray(tc.at().row_N) == 1
    for seed, kind in enumerate(KINDS):
        x = tc.logits(kind, seed)
        out = tc.run(tf.chain(mixed), x, tc.at(), tc.context())
        np.testing.assert_array_equal(bits(out)[is_off], bits(x)[is_off])


@each_transform
def test_removed_stays_removed_and_somebody_survives(name):
    for seed, kind in enumerate(KINDS):
        x = tc.logits(kind, seed)
        out = np.asarray(tc.run(CASES[name](True, VOCAB), x, tc.at(), tc.context()))
        assert np.all(out[x == -np.inf] == -np.inf), kind
        assert np.all(np.any(out > -np.inf, axis=1)), kind
        assert not np.any(np.isnan(out) | (out == np.inf)), kind


@pytest.mark.parametrize("name", [*CASES, "all"])
def test_row_result_does_not_depend_on_strangers_or_on_its_place(name):
    on = full_chain() if name == "all" else tf.chain(CASES[name](True, VOCAB))
    off = full_chain(False) if name == "all" else tf.chain(CASES[name](False, VOCAB))
    others = jax.tree.map(lambda a, b: a.at[1:].set(b[1:]), on, off)
    mine = np.asarray(tc.at().row_N) == 0
    for seed, kind in enumerate(KINDS):
        x, strange = tc.logits(kind, seed), tc.logits("ties", seed + 100)
        alone = tc.run(on, x, tc.at(), tc.context())
        y = np.where(mine[:, None], x, strange)
        among = tc.run(others, y, tc.at(), tc.context())
        np.testing.assert_array_equal(bits(alone)[mine], bits(among)[mine])
        order = np.array([5, 3, 1, 0, 2, 4])
        place = jax.tree.map(lambda a, order=order: a[order], tc.at())
        moved = tc.run(on, x[order], place, tc.context())
        np.testing.assert_array_equal(bits(moved), bits(alone)[order])


@pytest.mark.parametrize("name", [*CASES, "all"])
def test_one_trace_while_every_parameter_changes(name):
    traces = []

    @jax.jit
    def apply(transform, x, place, scene):
        traces.append(name)
        return transform.apply(transform.init(scene), x, place)

    on, off = ((full_chain(v) if name == "all" else CASES[name](v, VOCAB)) for v in (True, False))
    halves = jax.tree.map(lambda a: a * 0 if a.dtype != bool else ~a, on)
    for seed, transform in enumerate((on, off, halves, on)):
        apply(transform, tc.logits("normal", seed), tc.at(seed), tc.context(seed))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("bias", "penalties", "temperature", "top_p", "min_p"),
        ("top_k", "bias", "xtc"),
        ("dry", "top_k", "typical_p", "temperature", "top_p"),
    ],
)
def test_chain_equals_manual_composition(names):
    parts = [CASES[name](True, VOCAB) for name in names]
    for seed, kind in enumerate(KINDS):
        x = tc.logits(kind, seed)
        expected = x
        for part in parts:
            expected = tc.run(part, expected, tc.at(), tc.context())
        out = tc.run(tf.chain(*parts), x, tc.at(), tc.context())
        np.testing.assert_allclose(out, expected, rtol=1e-6, err_msg=kind)


def test_padding_slots_change_nothing_at_real_positions():
    is_real = jnp.asarray([True, True, False, True, False, False])
    x, junk = tc.logits("normal", 6), tc.logits("huge", 7)
    y = np.where(np.asarray(is_real)[:, None], x, junk)
    outs = [tc.run(full_chain(), z, tc.at(is_real_N=is_real), tc.context()) for z in (x, y)]
    np.testing.assert_array_equal(bits(outs[0])[is_real], bits(outs[1])[is_real])


_COSTLY = {"sort", "top_k", "cumsum", "while", "scan", "scatter", "scatter-add", "exp", "log"}


def _costly_outside_conditionals(jaxpr) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            continue
        found |= {eqn.primitive.name} & _COSTLY
        for inner in jaxprs_in_params(eqn.params):
            found |= _costly_outside_conditionals(inner)
    return found


def test_no_sort_or_pass_over_the_vocabulary_runs_when_no_row_asks():
    def apply(chain, x, place):
        return chain.apply(chain.init(tc.context()), x, place)

    jaxpr = jax.make_jaxpr(apply)(full_chain(), tc.logits("normal", 0), tc.at())
    assert _costly_outside_conditionals(jaxpr.jaxpr) == set()


def test_greedy_row_takes_the_argmax_of_what_the_chain_leaves():
    names = ("bias", "penalties", "temperature", "top_k", "top_p")
    parts = {name: CASES[name](True, VOCAB) for name in names}
    parts["temperature"] = tf.Temperature(tc.real(0.0, 0.7, 0.0))
    chain = tf.chain(*parts.values())
    is_greedy = np.asarray(tc.at().row_N) != 1
    left = [part for name, part in parts.items() if name != "temperature"]
    for seed in range(10):
        x = tc.logits("ties", seed)
        expected = x
        for part in left:
            expected = tc.run(part, expected, tc.at(), tc.context())
        ids = np.asarray(tc.draw(chain, x, tc.at(seed), tc.context()))
        np.testing.assert_array_equal(ids[is_greedy], np.asarray(expected).argmax(-1)[is_greedy])


MANY = 5003  # several blocks of columns with a narrower last one, and more than few candidates


def few_among(k: tuple[int, int, int], biased: float) -> tf.Chain:
    """A chain whose row 0 keeps k[0] candidates, among rows that keep theirs and are biased."""
    ids = jnp.zeros((tc.NUM_ROWS, 1), jnp.int32)
    return tf.chain(
        tf.LogitBias(ids, jnp.asarray([[0.0], [biased], [biased]])),
        tf.Temperature(tc.real(0.7, 1.0, 0.3)),
        tf.TopK(tc.whole(*k), tc.whole(1)),
        tf.TopP(tc.real(0.8), tc.whole(1)),
    )


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("ties", "peaked") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_row_with_few_candidates_is_the_same_among_any_that_keep_many_or_all(kind):
    mine = np.asarray(tc.at().row_N) == 0
    # neighbours that keep few read the logits in place, biased ones through a copy
    chains = [few_among((20, *k), b) for b in (0.0, 2.0) for k in ((7, 64), (65, 9), (900, 0))]
    for seed in range(6):
        x = tc.logits(kind, seed, (tc.NUM_POSITIONS, MANY))
        scene = tc.context()
        tokens = [np.asarray(tc.draw(c, x, tc.at(seed), scene))[mine] for c in chains]
        outs = [bits(tc.run(c, x, tc.at(), scene))[mine] for c in chains] if seed == 0 else []
        for other in tokens[1:]:
            np.testing.assert_array_equal(other, tokens[0])
        for other in outs[1:]:
            np.testing.assert_array_equal(other, outs[0])


def test_rows_with_few_candidates_draw_in_proportion_to_their_softmax():
    chain = tf.chain(tf.TopK(tc.whole(3), tc.whole(1)), tf.Temperature(tc.real(0.5)))
    x = np.zeros((600, VOCAB), np.float32)
    x[:, [7, 20, 33]] = [3.0, 2.5, 2.0]
    place = tc.at(num=600, index_N=jnp.zeros(600, jnp.int32))
    ids = np.concatenate(
        [
            np.asarray(tc.draw(chain, x, place._replace(key_N=keys), tc.context()))
            for keys in (jax.random.split(jax.random.key(s), 600) for s in range(10))
        ]
    )
    p = np.exp([2.0, 1.0, 0.0])
    expected = ids.size * p / p.sum()
    counts = np.array([(ids == token).sum() for token in (7, 20, 33)])
    assert counts.sum() == ids.size
    # chi-square with 2 degrees of freedom exceeds 18.4 once in 10,000
    assert ((counts - expected) ** 2 / expected).sum() < 18.4
