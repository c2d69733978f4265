"""Law 7 for block-causal models: the bound of each block is exact against enumeration."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import likelihood as oracle

from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.likelihood import bound_at, costs
from dlm_jax.objectives.losses import cross_entropy, hidden_of
from dlm_jax.objectives.objective import Batch, elbo

UNIT, LENGTH, CANVAS = 3, 5, 6
TOKENS = [0, 3, 7, 2, 5]
NETWORK = build(toy.config(attention_type="block_causal", block_length=UNIT))


@functools.cache
def _params():
    return toy.random_params(NETWORK)


def _batch(count, given=0):
    row = jnp.array([[*TOKENS, toy.PAD]])
    return Batch(jnp.tile(row, (count, 1)), jnp.full(count, LENGTH), jnp.full(count, given))


_block_bounds = jax.jit(functools.partial(bound_at, NETWORK, mask_id=toy.MASK))
_costs = jax.jit(
    functools.partial(costs, NETWORK, is_causal=False, mask_id=toy.MASK, eos_id=toy.EOS)
)


@functools.lru_cache(maxsize=64)
def _row_logits(tokens):
    row = jnp.array([[*tokens, toy.PAD]])
    return np.asarray(toy.logits(NETWORK, _params(), row, jnp.array([LENGTH]))[0, :LENGTH])


def _exact(block, given=0, of=oracle.elbo_by_orders):
    """Mean over the orders of a block's free tokens, behind the true blocks before it.

    The tokens of later blocks are whatever they are: no position of the block sees them.
    """
    places = [p for p in range(LENGTH) if p // UNIT == block and p >= given]

    def logits_fn(tokens_L):
        return _row_logits(tuple(int(token) for token in tokens_L))

    rest = [p for p in range(LENGTH) if p not in places]
    return of(logits_fn, TOKENS, mask_id=toy.MASK, given=rest)


@pytest.mark.parametrize("given", [0, 1, 4])
def test_the_bound_of_each_block_equals_the_enumeration_of_its_orders(given):
    masks = np.array([[*m, False] for m in itertools.product([False, True], repeat=LENGTH)])
    masks = masks[~masks[:, :given].any(1)]
    nats = np.asarray(_block_bounds(_params(), _batch(len(masks), given), jnp.asarray(masks)))
    for block in range(2):
        at = slice(block * UNIT, min((block + 1) * UNIT, LENGTH))
        free = at.stop - max(at.start, given)
        count = masks[:, at].sum(1)
        if free <= 0:
            assert not nats[:, block].any()
            continue
        # Masks of the other block are summed over as well: they must not matter.
        others = len(masks) / 2**free
        per_set = np.array([1 / (free * math.comb(free, k)) if k else 0.0 for k in count]) / others
        assert per_set.sum() == pytest.approx(1)
        assert per_set @ nats[:, block] == pytest.approx(_exact(block, given), rel=1e-5)


@pytest.mark.parametrize("given", [0, 4])
def test_the_drawn_bound_is_that_of_the_blocks(given):
    blocks = [block for block in range(2) if (block + 1) * UNIT > given]
    exact = sum(_exact(block, given) for block in blocks)
    drawn = np.asarray(
        _costs(_params(), _batch(1024, given), jnp.arange(1024), jax.random.key(3)).nats_B,
        np.float64,
    )
    # One block has no spread; its bound is a sum in float32.
    rounding = 4 * np.finfo(np.float32).eps * exact
    assert abs(drawn.mean() - exact) < 5 * drawn.std() / math.sqrt(drawn.size) + rounding
    assert exact >= sum(_exact(block, given, oracle.true_nll) for block in blocks) - 1e-9


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_training_loss_is_the_same_bound(schedule):
    """Its mean over many draws, in nats of the whole row."""
    rows = 4096

    @jax.jit
    def loss(params, key):
        example = elbo(
            _batch(rows), key, schedule=SCHEDULES[schedule](1.0), mask_id=toy.MASK,
            block_length=UNIT,
        )  # fmt: skip
        batch = _batch(rows)
        hidden = hidden_of(NETWORK, params, example.shown_BL, batch.tokens_BL, batch.length_B)
        nll_BL = cross_entropy(NETWORK, params, hidden, batch.tokens_BL, mask_id=toy.MASK)
        return jnp.sum(jnp.where(example.weight_BL > 0, example.weight_BL * nll_BL, 0.0), axis=1)

    nats = np.asarray(loss(_params(), jax.random.key(1)), np.float64)
    exact = _exact(0) + _exact(1)
    assert abs(nats.mean() - exact) < 5 * nats.std() / math.sqrt(rows) + 2e-3 * exact
