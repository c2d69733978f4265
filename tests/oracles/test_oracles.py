"""The oracles against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from . import commit, likelihood, mirostat, samplers

INF = float("inf")


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities))


def kept(x: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(x)).tolist()


FIVE = logits_of(0.4, 0.3, 0.15, 0.1, 0.05)


def test_penalties_read_the_newest_tokens_and_count_them():
    x = [2.0, -2.0, 1.0, 0.0]
    out = samplers.penalties(x, [2, 0, 1, 1], repetition=2, frequency=0.5, presence=0.25, last_n=3)
    assert out.tolist() == [2 / 2 - 0.75, -2 * 2 - 1.25, 1.0, 0.0]
    assert samplers.penalties(x, [0, 1], repetition=2, last_n=0).tolist() == x
    assert samplers.penalties(x, [2, 0], repetition=2, last_n=-1).tolist() == [1.0, -2.0, 0.5, 0.0]


def test_context_is_by_commit_and_the_run_ends_at_the_hole():
    tokens, visible = [5, 6, 9, 7, 8], [True, True, False, True, True]
    assert samplers.context_in_commit_order(tokens, visible, [-1, 3, 0, -1, 2]) == [5, 7, 8, 6]
    assert samplers.run_left_of(tokens, visible, 2) == [5, 6]
    assert samplers.run_left_of(tokens, visible, 3) == []


def test_dry_penalises_what_followed_the_longest_repeated_suffix():
    # 1 2 3 | 1 2: "1 2" was followed by 3; "2" alone was followed by 3 too.
    assert samplers.dry_matches([1, 2, 3, 1, 2]) == {2: 0, 3: 2, 1: 0}
    out = samplers.dry(np.zeros(5), [1, 2, 3, 1, 2], multiplier=0.8, base=2, allowed_length=1)
    assert out.tolist() == [0, 0, 0, -0.8 * 2.0, 0]
    assert samplers.dry_matches([4, 4]) == {4: 1}
    assert samplers.dry_matches([4, 4, 4]) == {4: 2}, "occurrences may overlap"
    assert samplers.dry_matches([1, 2, 3, 1, 2], breakers=[3])[2] == 0
    assert 3 not in samplers.dry_matches([1, 2, 3, 1, 2], breakers=[3]), (
        "breakers are not penalised"
    )
    assert samplers.dry_matches([1, 2, 3, 1, 2], breakers=[1])[3] == 1, "the suffix stops at 1"
    cut = samplers.dry(np.zeros(5), [1, 2, 3, 1, 2], multiplier=1, allowed_length=2, last_n=4)
    assert cut.tolist() == [0] * 5, "the first 1 has left the window"


def test_dynamic_temperature_spans_its_range_by_entropy():
    assert samplers.dynamic_temperature_value(np.zeros(4), 1.0, 0.5) == pytest.approx(1.5)
    assert samplers.dynamic_temperature_value([0.0, -900.0], 1.0, 0.5) == pytest.approx(0.5)
    assert samplers.dynamic_temperature_value([0.0, -INF], 0.7, 0.5) == 1.0
    assert samplers.dynamic_temperature_value(np.zeros(4), 0.7, 0.0) == 0.7
    p = 0.9
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)
    value = samplers.dynamic_temperature_value([*logits_of(p, 1 - p), -INF], 0.5, 1.0, 2.0)
    assert value == pytest.approx(1.5 * entropy**2)
    assert kept(samplers.dynamic_temperature([1.0, 2.0], 0, 1.0)) == [1]


def test_top_n_sigma_uses_the_population_deviation_of_finite_logits():
    x = [0.0, 2.0, 4.0, -INF]  # std = sqrt(8/3) = 1.633
    assert kept(samplers.top_n_sigma(x, 1.0)) == [2]
    assert kept(samplers.top_n_sigma(x, 1.3)) == [1, 2]
    assert kept(samplers.top_n_sigma(x, 1.0, min_keep=3)) == [0, 1, 2]
    assert kept(samplers.top_n_sigma(x, 0.0)) == [0, 1, 2]


def test_top_k_ties_keep_lower_ids():
    assert kept(samplers.top_k([1.0, 2.0, 1.0, 1.0], 2)) == [0, 1]
    assert kept(samplers.top_k([1.0, 2.0, 1.0], 1, min_keep=2)) == [0, 1]
    assert kept(samplers.top_k([1.0, -INF, 1.0], 9)) == [0, 2]
    assert kept(samplers.top_k([1.0, 2.0, 1.0], 0)) == [0, 1, 2]


def test_typical_keeps_the_token_that_passes_the_mass_and_may_lose_the_top():
    # H = 1.235 nats; -ln p = 0.51, 1.90, 1.90, 2.30: distances 0.58, 0.80, 0.80, 1.21 -> id order.
    x = logits_of(0.6, 0.15, 0.15, 0.1)
    assert kept(samplers.typical_p(x, 0.5)) == [0]
    assert kept(samplers.typical_p(x, 0.61)) == [0, 1]
    assert kept(samplers.typical_p(x, 0.1, min_keep=2)) == [0, 1]
    # H = 1.98 nats: 0.1 (2.30) is nearer to it than 0.4 (0.92).
    x = logits_of(0.4, *[0.1] * 6)
    assert kept(samplers.typical_p(x, 0.15)) == [1, 2]


def test_top_p_removes_where_the_mass_before_reaches_it():
    x = logits_of(0.5, 0.25, 0.125, 0.125)
    assert kept(samplers.top_p(x, 0.5 - 1e-9)) == [0]
    assert kept(samplers.top_p(x, 0.75 - 1e-9)) == [0, 1]
    assert kept(samplers.top_p(x, 0.75 + 1e-9)) == [0, 1, 2], "of equals the lower id"
    assert kept(samplers.top_p(x, 1e-9)) == [0]
    assert kept(samplers.top_p(x, 1e-9, min_keep=2)) == [0, 1]
    with pytest.raises(ValueError, match=r"1\.0"):
        samplers.top_p(x, 0.0)


def test_min_p_keeps_the_boundary():
    assert kept(samplers.min_p([0.0, math.log(0.5), -5.0], 0.5)) == [0, 1]
    assert kept(samplers.min_p([0.0, -1.0, -5.0], 0.5)) == [0]
    assert kept(samplers.min_p([0.0, 0.0, -5.0], 1.0)) == [0, 1]
    assert kept(samplers.min_p([0.0, -1.0, -5.0], 1.0, min_keep=2)) == [0, 1]


def test_xtc_leaves_the_least_likely_choice():
    assert kept(samplers.xtc(FIVE, 1.0, 0.12, 0.0)) == [2, 3, 4]
    assert kept(samplers.xtc(FIVE, 0.5, 0.12, 0.5)) == [0, 1, 2, 3, 4], "u < P fails"
    assert kept(samplers.xtc(FIVE, 1.0, 0.35, 0.0)) == [0, 1, 2, 3, 4], "one choice only"
    assert kept(samplers.xtc(FIVE, 1.0, 0.12, 0.0, min_keep=4)) == [0, 1, 2, 3, 4]
    assert kept(samplers.xtc(np.zeros(4), 1.0, 0.2, 0.0)) == [0], "of equals the lowest id"
    assert kept(samplers.xtc([0.0, -INF, -1.0], 1.0, 0.0, 0.0)) == [2], "removed is no choice"
    assert kept(samplers.xtc([0.0, 0.0], 1.0, 0.51, 0.0)) == [0, 1]


def test_mirostat_v1_k_matches_a_zipf_law_by_hand():
    # p_i ~ 1/(i+1)^2, so slope 2, eps 1: k = sqrt(2^mu / (1 - 1/V)).
    x = -2 * np.log(np.arange(1, 11))
    assert mirostat.v1_k(x, 3.0) == pytest.approx(math.sqrt(8 / 0.9))  # 2.98
    assert kept(mirostat.v1(x, 3.0)) == [0, 1]
    # slope 1, eps 0: k = 2^mu / ln V.
    x = -np.log(np.arange(1, 11))
    assert mirostat.v1_k(x, 3.0) == pytest.approx(8 / math.log(10))
    assert mirostat.v1_k([math.log(2), 0.0], 3.0) == pytest.approx(8 / math.log(2)), "exactly 0/0"
    assert kept(mirostat.v1(np.zeros(4), 0.5)) == [0]
    assert kept(mirostat.v1(np.zeros(4), 9.0)) == [0, 1, 2, 3]


def test_mirostat_v2_drops_surprising_tokens_and_keeps_one():
    x = logits_of(0.5, 0.25, 0.125, 0.125)
    assert kept(mirostat.v2(x, 2.5)) == [0, 1]
    assert kept(mirostat.v2(x, -1.0)) == [0]


def test_mirostat_update_averages_renormalised_surprise():
    truncated = np.array([0.0, 0.0, -INF, -INF])  # 1 bit each
    sure = np.array([0.0, -INF])  # 0 bits
    mu = mirostat.update(10.0, [(truncated, 1), (sure, 0)], tau=5.0, eta=0.1)
    assert mu == pytest.approx(10.0 - 0.1 * (0.5 - 5.0))
    assert mirostat.update(10.0, []) == 10.0


def test_quotas_by_hand():
    assert [commit.quota(h, s) for h, s in [(10, 4), (7, 3), (4, 2), (2, 1)]] == [3, 3, 2, 2]
    assert commit.quota(2, 5) == 1
    # h=10, S=3: 10 cos 30 = 8.66, 10 cos 60 = 5.0, 0.
    assert [commit.cosine_remaining(10, i, 3) for i in (1, 2, 3)] == [9, 5, 0]
    assert commit.cosine_quota(10, 9, 2, 3) == 4
    assert commit.cosine_quota(4, 4, 1, 8) == 0
    assert commit.count_of_ratio(0.29, 100) == 29
    assert commit.split_steps(7, 3) == [3, 2, 2]
    with pytest.raises(ValueError, match="blocks"):
        commit.split_steps(2, 3)


def test_selection_blocks_and_bans_by_hand():
    assert commit.most_confident({4: 0.5, 2: 0.9, 7: 0.5, 1: 0.1}, 2) == [2, 4]
    frozen = [True, True, False, False, True, False, False]
    assert commit.blocks(frozen, 7, 2) == [range(2, 4), range(4, 6), range(6, 7)]
    assert commit.blocks(frozen, 7, None) == [range(2, 7)]
    assert commit.banned_ids(mask_id=9, pad_id=0, bos_id=1, eos_ids=[0]) == {9, 1}
    assert commit.banned_ids(mask_id=9, pad_id=0, eos_ids=[0, 2], ignore_eos=True) == {9, 0, 2}
    p = logits_of(0.5, 0.3, 0.2)
    assert commit.score(p, 1, "low_confidence") == pytest.approx(0.3)
    assert commit.score(p, 1, "low_confidence", "max") == pytest.approx(0.5)
    assert commit.score(p, 1, "margin") == pytest.approx(0.2)
    assert commit.score(logits_of(0.5, 0.5), 0, "entropy") == pytest.approx(-math.log(2))


def table_model(tokens: np.ndarray) -> np.ndarray:
    """Confidence 0.9, 0.5, 0.7, 0.6 for token 1 at positions 1-4; MASK is 3 and takes the rest."""
    sure = [0.9, 0.9, 0.5, 0.7, 0.6]
    return np.stack([logits_of(0.01, p, 0.01, 0.98 - p) for p in sure])


def test_denoise_commits_by_confidence_of_the_allowed_token():
    trace = commit.denoise(table_model, [2, 3, 3, 3, 3], steps=2, mask_id=3, banned={0, 3})
    assert trace.commits == [[1, 3], [4, 2]]
    assert trace.tokens.tolist() == [2, 1, 1, 1, 1]
    assert trace.score_gap == pytest.approx(0.1)
    blocked = commit.denoise(
        table_model, [2, 3, 3, 3, 3], steps=3, mask_id=3, banned={0, 3}, block_length=2
    )
    assert blocked.commits == [[1], [2], [3, 4]]
    assert blocked.blocks == [0, 0, 1]
    spare = commit.denoise(table_model, [2, 3, 3, 2, 2], steps=9, mask_id=3, banned={0, 3})
    assert spare.commits == [[1], [2]], "early stop"
    padded = commit.denoise(table_model, [2, 3, 3, 3, 3], steps=4, mask_id=3, banned={3}, length=3)
    assert padded.tokens.tolist() == [2, 1, 1, 3, 3], "beyond length nothing is a hole"


def random_model(seed: int, length: int, vocab: int):
    weights = np.random.default_rng(seed).normal(size=(length, vocab, length, vocab))

    def logits(tokens: np.ndarray) -> np.ndarray:
        return np.tanh(weights[np.arange(length), tokens].sum(0)) * 2

    return logits


def two_position_model(tokens: np.ndarray) -> np.ndarray:
    """Ids 0, 1, MASK=2. Alone each position is 0 with 1/2; a revealed neighbour is copied with 3/4
    by position 1 and with 1/4 by position 0."""
    rows = []
    for at, copy in ((0, 0.25), (1, 0.75)):
        other = tokens[1 - at]
        p = {0: copy, 1: 1 - copy, 2: 0.5}[int(other)]
        rows.append([math.log(p), math.log(1 - p), 5.0])
    return np.array(rows)


def test_likelihood_of_two_positions_by_hand():
    # Row (0, 0): left first 1/2 * 3/4, right first 1/2 * 1/4.
    args = (two_position_model, [0, 0])
    assert likelihood.true_nll(*args, mask_id=2) == pytest.approx(-math.log(0.25))
    bound = -(math.log(3 / 8) + math.log(1 / 8)) / 2
    assert likelihood.elbo_by_orders(*args, mask_id=2) == pytest.approx(bound)
    assert likelihood.elbo_by_orders(*args, mask_id=2, given=[0]) == pytest.approx(-math.log(0.75))
    with pytest.raises(ValueError, match="mask_id"):
        likelihood.true_nll(two_position_model, [0, 2], mask_id=2)


def test_bound_has_one_value_and_never_falls_below_the_true_likelihood():
    model = random_model(0, 4, 4)
    for row in itertools.islice(itertools.product(range(3), repeat=4), 0, None, 7):
        bound = likelihood.elbo_by_orders(model, row, mask_id=3)
        assert likelihood.elbo_by_mask_sets(model, row, mask_id=3) == pytest.approx(bound)
        assert likelihood.true_nll(model, row, mask_id=3) < bound
    total = sum(
        math.exp(-likelihood.true_nll(model, row, mask_id=3, given=[1]))
        for row in itertools.product(range(3), repeat=4)
        if row[1] == 2
    )
    assert total == pytest.approx(1.0)
