"""Laws of the order in which corpora are mixed."""

from __future__ import annotations

import collections

import pytest

from dlm_jax.data.shards import BLOCK, ShardMixture, quotas_of


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.7, 0.2999, 0.0001), (5, 0, 2)])
def test_quotas_fill_a_block_and_are_as_near_to_the_weights_as_whole_rows_can_be(weights):
    quotas = quotas_of(weights)
    assert sum(quotas) == BLOCK
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - weight / sum(weights) * BLOCK) < 1
        assert (quota == 0) == (weight == 0)


def test_each_corpus_gives_its_rows_one_after_the_other_and_its_quota_in_every_block():
    mixture = ShardMixture((), (7000, 0, 2999, 1))
    seen: dict[int, list[int]] = collections.defaultdict(list)
    for row in range(2 * BLOCK):
        source, number = mixture.locate(row, 5)
        seen[source].append(number)
        if row == BLOCK - 1:
            assert {source: len(rows) for source, rows in seen.items()} == {0: 7000, 2: 2999, 3: 1}
    for rows in seen.values():
        assert rows == list(range(len(rows)))


def test_the_order_is_another_in_every_block_and_for_every_seed():
    mixture = ShardMixture((), (5000, 5000))

    def order(block, seed):
        return tuple(mixture.locate(block * BLOCK + row, seed)[0] for row in range(200))

    assert len({order(block, seed) for block in range(3) for seed in range(3)}) == 9
    assert order(1, 1) == order(1, 1)
