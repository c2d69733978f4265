import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import ModelConfig
from dlm_jax.model.transformer import build

VARIANTS = {
    "small": {},
    "llama": {
        "activation": "swiglu",
        "kv_heads": 1,
        "tied_head": False,
        "qk_norm": False,
        "qkv_bias": True,
    },
    "gpt": {"activation": "gelu", "attention_type": "causal", "start_id": 8},
}
TOKENS = np.array([[0, 3, 8, 7, 1, 2, 8, 5], [4, 8, 8, 6, 9, 9, 9, 9]])
LENGTH = np.array([8, 4])


def _numpy_forward(config, params, tokens, length):
    """Logits ``[L, V]`` of one row in float64, written from the papers' formulas."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    size = config.width // config.heads
    num_positions = len(tokens)

    def norm(x, weights):
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config.norm_epsilon) * weights["scale"]

    def project(x, weights):
        return x @ weights["kernel"] + weights.get("bias", 0.0)

    def rope(x):
        out = np.empty_like(x)
        for position in range(num_positions):
            for i in range(size // 2):
                angle = position * config.rope_theta ** (-2 * i / size)
                a, b = x[position, i], x[position, i + size // 2]
                out[position, i] = a * np.cos(angle) - b * np.sin(angle)
                out[position, i + size // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def attention(x, weights):
        q, k, v = (project(x, weights[name]) for name in ("query", "key", "value"))
        group = config.heads // (config.kv_heads or config.heads)
        heads = []
        for head in range(config.heads):
            mine = slice(head * size, (head + 1) * size)
            shared = slice(head // group * size, (head // group + 1) * size)
            qh, kh, vh = q[:, mine], k[:, shared], v[:, shared]
            if config.qk_norm:
                qh, kh = norm(qh, weights["query_norm"]), norm(kh, weights["key_norm"])
            scores = rope(qh) @ rope(kh).T / np.sqrt(size)
            scores[:, length:] = -np.inf
            if config.attention_type == "causal":
                scores[np.triu_indices(num_positions, 1)] = -np.inf
            exp = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(exp / exp.sum(-1, keepdims=True) @ vh)
        return project(np.concatenate(heads, -1), weights["out"])

    def mlp(x, weights):
        up = project(x, weights["up"])
        if config.activation == "swiglu":
            gate = project(x, weights["gate"])
            inner = gate / (1 + np.exp(-gate)) * up
        elif config.activation == "gelu":
            inner = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        else:
            inner = np.maximum(up, 0) ** 2
        return project(inner, weights["down"])

    if config.attention_type == "causal":
        tokens = np.concatenate([[config.start_id], tokens[:-1]])
    x = p["embedding"][tokens]
    for layer in range(config.depth):
        block = jax.tree.map(lambda leaf, i=layer: leaf[i], p["blocks"])
        x = x + attention(norm(x, block["attention_norm"]), block["attention"])
        x = x + mlp(norm(x, block["mlp_norm"]), block["mlp"])
    hidden = norm(x, p["norm"])
    return hidden @ (p["embedding"].T if config.tied_head else p["head"]["kernel"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_formulas(variant):
    config = toy.config(**VARIANTS[variant])
    network = build(config)
    params = toy.random_params(network)
    logits = toy.logits(network, params, jnp.asarray(TOKENS), jnp.asarray(LENGTH))
    for row in range(2):
        expected = _numpy_forward(config, params, TOKENS[row], LENGTH[row])
        live = slice(0, LENGTH[row])
        np.testing.assert_allclose(logits[row, live], expected[live], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("variant", ["small", "gpt"])
def test_what_lies_beyond_the_length_is_never_seen(variant):
    network = build(toy.config(**VARIANTS[variant]))
    params = toy.random_params(network)
    other = TOKENS.copy()
    other[1, 4:] = 2
    before = toy.logits(network, params, jnp.asarray(TOKENS), jnp.asarray(LENGTH))
    after = toy.logits(network, params, jnp.asarray(other), jnp.asarray(LENGTH))
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1, :4], after[1, :4])


@pytest.mark.parametrize("policy", ["block", "attention", "key+middle+gate"])
def test_remat_changes_no_gradient(policy):
    gradients = []
    for remat in ("none", policy):
        network = build(toy.config(remat=remat))

        def total(params, network=network):
            hidden, _ = network.trunk(params, jnp.asarray(TOKENS), jnp.asarray(LENGTH), None)
            return jnp.sum(hidden**2)

        gradients.append(jax.jit(jax.grad(total))(toy.params()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)


def test_bfloat16_computes_near_float32_with_float32_parameters():
    half = build(toy.config(compute_dtype="bfloat16"))
    params = toy.random_params(half, scale=0.1)
    hidden, _ = half.trunk(params, jnp.asarray(TOKENS), jnp.asarray(LENGTH), None)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = toy.logits(half, params, jnp.asarray(TOKENS), jnp.asarray(LENGTH))
    assert logits.dtype == jnp.float32
    exact = toy.logits(toy.network(), params, jnp.asarray(TOKENS), jnp.asarray(LENGTH))
    np.testing.assert_allclose(logits, exact, atol=0.1)


def test_equal_configs_give_the_same_network_and_one_trace():
    assert build(toy.config()) is build(toy.config())
    with pytest.raises(ValueError, match=r"model.vocab_size=0"):
        build(ModelConfig())
