"""The arena's sources are what they are called, and its networks know them exactly."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import arena, arena_tasks

SIZES = {"markov": 3**5, "markov2": 3**5, "hmm": 3**5, "copy": 4**3, "shuffle": math.factorial(5),
         "replace": 3**4, "addition": 16**2, "brackets": 14 * 2**4}  # fmt: skip


def test_sources_have_as_many_texts_as_they_should_and_one_probability_in_all():
    assert {name: len(law) for name, law in arena.sources().items()} == SIZES
    for law in arena.sources().values():
        assert sum(law.values()) == pytest.approx(1.0)
        assert max(map(max, law)) < arena.LARGEST and len(next(iter(law))) <= arena.LONGEST


def _conditional(law, seen, place):
    """The probability of each token at a place given tokens at others, by enumeration."""
    found = np.zeros(arena.VOCAB)
    for text, share in law.items():
        if all(text[other] == token for other, token in seen.items()):
            found[text[place]] += share
    return found / found.sum()


_trunk = jax.jit(arena.network().trunk)


@pytest.mark.parametrize("source", arena.sources())
def test_the_network_gives_the_conditional_distributions(source):
    law, rng = arena.sources()[source], np.random.default_rng(0)
    texts = list(law)
    length = len(texts[0])
    tokens = np.full((20, arena.LONGEST), arena.PAD)
    for row in tokens:
        is_seen = rng.random(length) < rng.random()
        row[:length] = np.where(is_seen, texts[rng.integers(len(texts))], arena.MASK)
    hidden, _ = _trunk(arena.parameters(law), jnp.asarray(tokens), jnp.full(20, length), None)
    logits = arena.network().readout({}, hidden.reshape(-1, arena.VOCAB))
    found = np.asarray(jax.nn.softmax(logits)).reshape(hidden.shape)
    for row, shares in zip(tokens, found, strict=True):
        for place in range(length):
            seen = {i: int(row[i]) for i in range(length) if row[i] < arena.MASK and i != place}
            want = _conditional(law, seen, place)
            np.testing.assert_allclose(shares[place], want, atol=2e-5)


def test_every_decoder_has_eight_settings_that_are_valid_and_differ():
    grids = arena.DECODERS | arena.HEAD
    assert len(grids) >= 14
    for decoder, grid in grids.items():
        assert len(grid) == len({arena.name_of(one, grid) for one in grid}) == 8, decoder
        for settings in grid:
            arena.SamplingParams(**settings)


def test_texts_of_the_source_itself_are_as_far_from_it_as_the_noise():
    law = arena.sources()["copy"]
    drawn = np.random.default_rng(1).choice(len(law), 2000, p=list(law.values()))
    distance, valid, entropy = arena.total_variation(np.array(list(law))[drawn], law)
    assert distance == pytest.approx(arena.noise(law, 2000), abs=0.02)
    assert valid == pytest.approx(1.0) and entropy == pytest.approx(math.log(64), abs=0.05)
    assert arena.total_variation(np.array([[0, 1, 2, 3, 3, 3]]), law)[:2] == (1.0, 0.0)


def test_a_claim_holds_when_forwards_fall_and_validity_stays():
    faster, better = arena.CLAIMS[0], next(claim for claim in arena.CLAIMS if not claim.is_faster)
    assert arena.verdict(faster, -1.0, 0.0) == "fewer forwards, as valid"
    assert arena.verdict(faster, -1.0, -0.1) == "fewer forwards, less valid"
    assert arena.verdict(faster, 0.0, 0.0) == "not fewer forwards"
    assert arena.verdict(better, 2.0, 0.1) == "more valid"
    assert arena.verdict(better, -2.0, 0.0) == "not more valid"


def test_templates_agree_by_the_tau_of_kendall():
    # One of three pairs of decoders is in another order for the second template; the third agrees.
    shares_TD = np.array([[0.1, 0.2, 0.3], [0.1, 0.3, 0.2], [0.4, 0.5, 0.6]])
    mean, least = arena_tasks.agreement(shares_TD)
    assert mean == pytest.approx((1 / 3 + 1 + 1 / 3) / 3) and least == pytest.approx(1 / 3)
    # Ties count as in tau-b: 2 / sqrt(3 * 2).
    assert arena_tasks.agreement(np.array([[1, 2, 3], [1, 2, 2]]))[0] == pytest.approx(2 / 6**0.5)


def test_a_setting_is_chosen_within_forwards_and_within_their_time():
    tried = {"slow": (0.9, 4.0), "fast": (0.6, 2.0), "fastest": (0.6, 1.0)}
    assert arena_tasks.best(tried, 4) == "slow" and arena_tasks.best(tried, 3.9) == "fastest"
    assert arena_tasks.best(tried, 4, ratio=2.5) == "fastest"
    assert arena_tasks.best(tried, 0.5) is None


def test_prompts_of_the_tasks_are_new_and_equally_many_of_each_kind():
    seen = {prompt for _, _, prompt, _ in arena_tasks.prompts(0, 1, set())}
    asked = arena_tasks.prompts(0, 2, {prompt.removesuffix("=") for prompt in seen})
    kinds = [(template, operation) for template, operation, _, _ in asked]
    assert len(asked) == 100 and {kinds.count(kind) for kind in kinds} == {2}
    assert not seen & {prompt for _, _, prompt, _ in asked}
    right = np.array([operation != "sort" for _, operation, _, _ in asked])
    lines = list(arena_tasks.lines_of("d", "s", "0", asked, right, np.full(100, 3.0)))
    found = [(x["template"], x["answers"], x["prompts"], x["right"]) for x in lines]
    assert found == [x for t in range(5) for x in ((t, "one", 12, 10), (t, "many", 8, 8))]
    assert arena_tasks.share(lines) == 0.9 and arena_tasks.forwards_of(lines) == 3.0


@pytest.mark.parametrize("decoder", arena_tasks.TRAINED)
def test_decoders_of_trained_networks_have_eight_settings_too(decoder):
    grid = arena_tasks.TRAINED[decoder]
    assert len({arena.name_of(one, grid) for one in grid}) == 8
    for settings in grid:
        arena.SamplingParams(**settings)
