"""The standalone functions against the formulas of the documents, in NumPy from their text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import dlm_jax
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.randomness import key_of
from dlm_jax.sampling.commit.commit_rule import preferences
from dlm_jax.sampling.propose import Parallel

LENGTH = 7


def right_shift(x: np.ndarray, start: int, end: int, fill: float) -> np.ndarray:
    """Shifts ``x[start:end)`` right by 1, fills ``x[start]``, drops the old ``x[end-1]``."""
    out = x.copy()
    if end > start:
        out[start + 1 : end] = x[start : end - 1]
        out[start] = fill
    return out


def left_shift(x: np.ndarray, start: int, end: int, fill: float) -> np.ndarray:
    """Shifts ``x[start:end)`` left by 1 and fills ``x[end-1]``."""
    out = x.copy()
    if end > start:
        out[start : end - 1] = x[start + 1 : end]
        out[end - 1] = fill
    return out


SHIFTS = [(dlm_jax.insert_at, right_shift), (dlm_jax.delete_at, left_shift)]


@pytest.mark.parametrize(("ours", "theirs"), SHIFTS, ids=["insert", "delete"])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_shifts_are_those_of_the_document_in_every_stretch(ours, theirs, dtype):
    x = (np.arange(LENGTH) * 3 % 5).astype(dtype)
    stretches = [(a, b) for a in range(LENGTH + 1) for b in range(LENGTH + 1)]
    start_B, end_B = map(np.array, zip(*stretches, strict=True))
    fill_B = (np.arange(len(stretches)) % 2).astype(dtype)
    expected = [theirs(x, *where, fill) for where, fill in zip(stretches, fill_B, strict=True)]
    x_BL = jnp.tile(x, (len(stretches), 1))
    batch = jax.jit(lambda *rows: ours(*rows[:3], end=rows[3]))(x_BL, start_B, fill_B, end_B)
    assert batch.dtype == dtype
    np.testing.assert_array_equal(batch, expected)
    rows = jax.vmap(lambda *row: ours(*row[:3], end=row[3]))(x_BL, start_B, fill_B, end_B)
    np.testing.assert_array_equal(rows, expected)


def _predictions(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits_LV = rng.normal(size=(LENGTH, 4)) * 2
    probs_LV = np.exp(logits_LV) / np.exp(logits_LV).sum(-1, keepdims=True)
    return probs_LV, rng.integers(0, 4, LENGTH)


def deletion_scores(probs: np.ndarray, x: np.ndarray, margin: float, lam: float) -> np.ndarray:
    """``max(0, D1 - margin) + lam max(0, D2 - margin)``, one position at a time."""

    def lead(i: int) -> float:
        return probs[i, x[i + 1]] - probs[i, x[i]]

    out = np.zeros(len(x))
    for i in range(len(x) - 1):
        out[i] = max(0.0, lead(i) - margin)
        if i + 2 < len(x):
            out[i] += lam * max(0.0, lead(i + 1) - margin)
    return out


def test_edit_scores_are_the_formulas_of_the_document():
    rows = [_predictions(seed) for seed in range(20)]
    margin_B, lam_B = np.linspace(0, 0.4, 20), np.linspace(1, 0, 20)
    place_L = np.arange(LENGTH)
    own_BL = np.array([np.log(p[place_L, x]) for p, x in rows], np.float32)
    right_BL = np.array([np.log(p[place_L, np.roll(x, -1)]) for p, x in rows], np.float32)
    every_BL = np.ones(own_BL.shape, bool)
    uncertain_BL = jax.jit(dlm_jax.token_uncertainty)(own_BL, every_BL)
    np.testing.assert_allclose(uncertain_BL, 1 - np.exp(own_BL), atol=1e-6)
    gap_BL = np.asarray(dlm_jax.gap_scores(uncertain_BL))
    assert not gap_BL[:, 0].any()
    np.testing.assert_array_equal(
        gap_BL[:, 1:], np.maximum(uncertain_BL[:, :-1], uncertain_BL[:, 1:])
    )
    found_BL = dlm_jax.deletion_scores(own_BL, right_BL, every_BL, margin=margin_B, lookahead=lam_B)
    one_row = jax.vmap(
        lambda *row: dlm_jax.deletion_scores(*row[:3], margin=row[3], lookahead=row[4])
    )
    np.testing.assert_array_equal(
        one_row(own_BL, right_BL, every_BL, margin_B.astype(np.float32), lam_B.astype(np.float32)),
        found_BL,
    )
    for row, (probs_LV, x_L) in enumerate(rows):
        want_L = deletion_scores(probs_LV, x_L, margin_B[row], lam_B[row])
        np.testing.assert_allclose(found_BL[row], want_L, atol=1e-6)


def test_differences_with_holes_and_given_tokens_score_nothing():
    own_L, right_L = jnp.full(4, -2.0), jnp.zeros(4)
    is_token_L = jnp.array([True, False, True, True])
    score_L = dlm_jax.deletion_scores(own_L, right_L, is_token_L, margin=0.0, lookahead=1.0)
    gain = 1 - np.exp(-2.0)
    # The hole has only its second difference; a rule never deletes it.
    np.testing.assert_allclose(score_L, [0, gain, gain, 0], rtol=1e-6)
    np.testing.assert_array_equal(
        dlm_jax.token_uncertainty(jnp.array([-jnp.inf, jnp.nan]), jnp.array([True, False])), [1, 0]
    )


VOCAB = 30


def filtered_logprobs(x: np.ndarray, previous: list[int], row: dict[str, float]) -> np.ndarray:
    """Log-probabilities after penalties, temperature, top-k and top-p, in float64."""
    x = x.astype(np.float64)
    for token in set(previous):
        penalty = row["repetition_penalty"]
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    if row["temperature"] != 0:
        x = x / row["temperature"]
    order = np.argsort(-x, kind="stable")
    if row["top_k"] > 0:
        x[order[row["top_k"] :]] = -np.inf
    if row["top_p"] < 1:
        probs = np.exp(x[order] - x.max())
        before = np.cumsum(probs) - probs
        x[order[before >= row["top_p"] * probs.sum()]] = -np.inf
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def _rows(num: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    logits_NV = (rng.normal(size=(num, VOCAB)) * 3).astype(np.float32)
    previous_NP = rng.integers(-1, VOCAB, (num, 5))
    previous_NP = -np.sort(-previous_NP, axis=1)  # -1 is padding, which comes last
    params = {
        "temperature": rng.choice([0.0, 1.0, 0.6, 1.8], num).astype(np.float32),
        "top_k": rng.choice([0, 3, 12], num).astype(np.int32),
        "top_p": rng.choice([1.0, 0.7], num).astype(np.float32),
        "repetition_penalty": rng.choice([1.0, 1.5], num).astype(np.float32),
    }
    return logits_NV, previous_NP, params


def test_tokens_of_rows_are_draws_from_the_pipeline_of_the_document():
    logits_NV, previous_NP, params = _rows(200)
    key_N = jax.random.split(jax.random.key(1), 200)
    run = jax.jit(lambda x, p, k, q: dlm_jax.sample_logits(x, p, k, previous=q))
    token_N, logprob_N = run(logits_NV, params, key_N, previous_NP)
    num_other = 0
    for row in range(200):
        settings = {name: value[row] for name, value in params.items()}
        previous = [token for token in previous_NP[row] if token >= 0]
        want_V = filtered_logprobs(logits_NV[row], previous, settings)
        np.testing.assert_allclose(logprob_N[row], want_V[token_N[row]], atol=1e-4)
        if settings["temperature"] == 0:
            assert token_N[row] == want_V.argmax()
        num_other += token_N[row] != want_V.argmax()
    assert num_other > 20
    alone = jax.jit(jax.vmap(lambda x, p, k, q: dlm_jax.sample_logits(x, p, k, previous=q)))
    token_alone_N = alone(logits_NV, params, jax.random.clone(key_N), previous_NP)[0]
    np.testing.assert_array_equal(token_alone_N, token_N)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1.0}, "temprature is not a setting of sample_logits; did you mean"),
        ({"top_p": [0.5, 0.0]}, r"top_p=0.0 is outside \(0, 1\]; use 1.0"),
        ({"temperature": -1.0}, "temperature=-1.0 is outside"),
        ({"mirostat": 2}, "mirostat is not a setting of sample_logits"),
    ],
)
def test_settings_are_checked_at_the_door(params, message):
    with pytest.raises(ValueError, match=message):
        dlm_jax.sample_logits(jnp.zeros((2, 4)), params, jax.random.split(jax.random.key(0), 2))


TOKENIZER = CharacterTokenizer.of("The cat sat. A rat ran.")


@pytest.mark.parametrize("fill", ["parallel", "wavefront"])
def test_a_step_of_the_loop_is_the_trunk_and_the_fill(fill):
    config = toy.config(
        vocab_size=TOKENIZER.vocab_size, add_sampler_head=True, add_critic_head=True
    )
    network = build(config)
    model = Model(network, toy.random_params(network), TOKENIZER, max_length=64)
    sampler = dlm_jax.sampler(model, steps=1, fill=fill, temperature=0.8, top_p=0.9, order="random")
    rng = np.random.default_rng(0)
    length_B = np.array([40, 64, 13])
    mask = TOKENIZER.mask_id
    text_BL = rng.choice(TOKENIZER.encode("The cat sat."), (3, 64))
    is_hole_BL = rng.random((3, 64)) < np.array([[0.6], [0.9], [1.0]])
    is_live_BL = np.arange(64) < length_B[:, None]
    tokens_BL = np.where(is_hole_BL, mask, text_BL).astype(np.int32)
    seed_B = np.array([5, 6, 7], np.uint32)
    state = jax.jit(sampler.step)(model.params, sampler.init(tokens_BL, length_B, seed_B))

    def step(params):
        hidden_BLD, _ = network.trunk(params, tokens_BL, jnp.asarray(length_B), None)
        key_B3 = jax.vmap(lambda seed: jax.random.split(jax.random.fold_in(key_of(seed), 0), 3))(
            seed_B
        )
        key_B, rule_key_B = key_B3[:, 0], key_B3[:, 1]
        canvas = params, hidden_BLD, jnp.asarray(tokens_BL), key_B
        shared = {
            "network": network,
            "is_open_BL": jnp.asarray(is_hole_BL & is_live_BL),
            "length_B": jnp.asarray(length_B),
            "banned_ids": sampler.program.banned_ids,
            "settings": {"temperature": 0.8, "top_p": 0.9},
        }
        if fill == "parallel":
            return dlm_jax.wavefront_fill(*canvas, rule=Parallel(), **shared)
        # The positions of an empty canvas are equal, so the row's key for rules chooses the seeds.
        preference_BL = preferences(rule_key_B, jnp.zeros(3, bool), 64)
        return dlm_jax.wavefront_fill(*canvas, **shared, preference_BL=preference_BL)

    filled = jax.jit(step)(model.params)
    found_BL = np.asarray(sampler.finish(state).tokens)
    lengths_B = np.asarray(sampler.finish(state).lengths)
    is_kept_BL = np.arange(64) < lengths_B[:, None]
    assert is_kept_BL.sum() > 30
    np.testing.assert_array_equal(
        found_BL[is_kept_BL], np.asarray(filled.proposal.tokens_BL)[is_kept_BL]
    )
