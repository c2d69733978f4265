"""Hidden vectors and attention maps are those that the trunk computes."""

from __future__ import annotations

from typing import Any

import enumerable
import jax
import numpy as np
import pytest
import toy

from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build

LENGTHS = np.array([8, 5])
TOKENS = np.random.default_rng(0).integers(0, 8, (2, 8))
KINDS: dict[str, dict[str, Any]] = {
    "grouped keys": {"heads": 4, "kv_heads": 2},
    "causal": {"attention_type": "causal", "start_id": toy.MASK},
    "blocks": {"attention_type": "block_causal", "block_length": 2},
}


def _model(**changes: Any) -> Model:
    network = build(toy.config(**changes))
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.float32(0.3 * rng.standard_normal(x.shape)), shapes)
    return Model(network, params, enumerable.TOKENIZER, max_length=8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_leads_to_the_output_of_the_trunk(kind):
    model = _model(**KINDS[kind])
    found = jax.jit(model.network.inside)(model.params, TOKENS, LENGTHS)
    wanted, _ = jax.jit(model.network.trunk)(model.params, TOKENS, LENGTHS, None)
    last = np.asarray(found.hidden_BELD[:, -1], np.float64)
    scale = np.asarray(model.params["norm"]["scale"])
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-5) * scale
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            normed[row, :length], np.asarray(wanted)[row, :length], rtol=2e-3, atol=2e-4
        )
        np.testing.assert_allclose(
            found.final_BLD[row, :length], wanted[row, :length], rtol=2e-3, atol=2e-4
        )
    weights = np.asarray(found.attention_BEHLL)
    depth, heads = toy.config(**KINDS[kind]).depth, toy.config(**KINDS[kind]).heads
    assert weights.shape == (2, depth, heads, 8, 8)
    assert found.hidden_BELD.shape[:3] == (2, depth + 1, 8)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert not weights[1, ..., 5:].any(), "positions beyond the length are not seen"
    query, key = np.indices((8, 8))
    is_seen = {"grouped keys": key >= 0, "causal": key <= query, "blocks": key // 2 <= query // 2}
    assert ((weights[0] > 0) == is_seen[kind]).all()
