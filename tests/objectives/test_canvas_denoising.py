"""Training of canvases: which positions are noised and predicted, and what self-conditioning reads.

The network adds the embedding of each token, the mean of the text and the signal.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.objectives.forward_process import PROCESSES, canvas_denoising
from dlm_jax.objectives.objective import Batch
from dlm_jax.types import Network

V, MASK, LENGTH, CANVAS, ROWS = 7, 6, 11, 3, 100
TABLE = np.random.default_rng(0).standard_normal((V, V)).astype(np.float32)


def behind(params, tokens_BL, length_B, start_B, signal_BLD=None):
    x_BLD = params["table"][tokens_BL]
    is_text_BL = jnp.arange(LENGTH)[None] < start_B[:, None]
    text_BD = jnp.mean(jnp.where(is_text_BL[:, :, None], x_BLD, 0.0), axis=1)
    signal_BLD = jnp.zeros_like(x_BLD) if signal_BLD is None else signal_BLD
    is_canvas_BL1 = ~is_text_BL[:, :, None]
    return x_BLD + jnp.where(is_canvas_BL1, text_BD[:, None] + signal_BLD, 0.0)


NETWORK = Network(
    init=lambda key: {"table": jnp.asarray(TABLE)},
    trunk=lambda params, tokens, length, cache: (behind(params, tokens, length, 0 * length), cache),
    embed=lambda params, ids: params["table"][ids],
    readout=lambda params, hidden_ND: hidden_ND,
    vocab_size=V,
    behind=behind,
    signal=lambda params, logits_NV: jax.nn.softmax(logits_NV) @ params["table"],
    canvas_length=CANVAS,
)
PARAMS = NETWORK.init(jax.random.key(0))


@functools.cache
def objective(text_weight: float = 1.0, conditioned_share: float = 0.5):
    return canvas_denoising(
        dataclasses.replace(PROCESSES["uniform"], mask_id=MASK, noise_ids=(0, 1, 2, 3)),
        schedule=LINEAR, canvas_length=CANVAS, text_weight=text_weight,
        conditioned_share=conditioned_share,
    )  # fmt: skip


@functools.cache
def drawn(conditioned_share: float = 0.5):
    rng = np.random.default_rng(1)
    batch = Batch(
        jnp.asarray(rng.integers(0, 6, (ROWS, LENGTH)), jnp.int32),
        jnp.asarray(rng.integers(5, LENGTH + 1, ROWS)), jnp.asarray(rng.integers(0, 4, ROWS)),
    )  # fmt: skip
    draw = jax.jit(objective(1.0, conditioned_share).draw)
    return batch, draw(batch, jax.random.key(2))


def test_a_row_ends_with_one_noised_canvas_after_its_clean_text():
    batch, noised = jax.device_get(drawn())
    tokens, length, given = batch
    is_text_BL, num_text, is_conditioned_B = noised.noise
    numbers = set()
    for row in range(ROWS):
        start, end = int(noised.batch.given_B[row]), int(noised.batch.length_B[row])
        assert (start - given[row]) % CANVAS == 0 and end == min(start + CANVAS, length[row])
        assert given[row] <= start < end
        numbers.add((start - given[row]) // CANVAS)
        place = np.arange(LENGTH)
        is_canvas = (place >= start) & (place < end)
        np.testing.assert_array_equal(noised.weight_BL[row], is_canvas.astype(np.float32))
        is_text = (place + 1 >= given[row]) & (place + 1 < start)
        np.testing.assert_array_equal(is_text_BL[row], is_text)
        shown = np.asarray(noised.shown_BL[row])
        np.testing.assert_array_equal(shown[~is_canvas], tokens[row][~is_canvas])
    assert numbers == {0, 1, 2, 3}
    is_changed = np.asarray(noised.shown_BL) != tokens
    assert 0.2 < is_changed[np.asarray(noised.weight_BL) > 0].mean() < 0.6
    assert int(noised.total) == np.sum(noised.weight_BL)
    assert int(num_text) == np.sum(is_text_BL)
    assert 0.4 < np.mean(is_conditioned_B) < 0.6


def cross_entropy(hidden, token) -> float:
    logits = np.asarray(hidden, np.float64).copy()
    logits[MASK] = -np.inf
    return float(np.log(np.exp(logits).sum()) - logits[token])


def test_the_loss_is_the_mean_of_the_canvas_and_the_weighted_mean_of_the_text():
    batch, noised = drawn()
    loss = jax.jit(objective(0.3).loss, static_argnums=0)(NETWORK, PARAMS, noised)
    rows = noised.shown_BL, noised.batch.length_B, noised.batch.given_B
    is_text_BL, _, is_conditioned_B = noised.noise
    logits = np.asarray(behind(PARAMS, *rows), np.float64)
    logits[..., MASK] = -np.inf
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    signal = probs @ TABLE * np.asarray(is_conditioned_B)[:, None, None]
    hidden = np.asarray(behind(PARAMS, *rows, jnp.asarray(signal, jnp.float32)))
    tokens = np.asarray(batch.tokens_BL)
    canvas = [
        cross_entropy(hidden[row, i], tokens[row, i]) for row, i in np.argwhere(noised.weight_BL)
    ]
    text = [cross_entropy(hidden[row, i], tokens[row, i + 1]) for row, i in np.argwhere(is_text_BL)]
    expected = np.mean(canvas) + 0.3 * np.mean(text)
    assert float(loss.sum / loss.weight) == pytest.approx(expected, rel=1e-4)
    told = {name: float(total / weight) for name, (total, weight) in loss.figures.items()}
    assert told == pytest.approx({"canvas": np.mean(canvas), "next_token": np.mean(text)}, rel=1e-4)


def test_no_gradient_flows_through_the_first_prediction():
    _, noised = drawn(1.0)
    assert np.all(noised.noise[2])

    def loss(table, kept):
        # The signal is read from a table that is held.
        network = NETWORK if kept is None else _with_signal(kept)
        found = objective(0.0, 1.0).loss(network, {"table": table}, noised)
        return found.sum / found.weight

    both, ours = jax.jit(jax.value_and_grad(lambda table: loss(table, None)))(PARAMS["table"])
    held = jax.jit(jax.grad(lambda table: loss(table, PARAMS["table"])))(PARAMS["table"])
    np.testing.assert_allclose(ours, held, atol=1e-6)
    alone = objective(0.0, 0.0).loss(NETWORK, PARAMS, noised)
    assert abs(float(alone.sum / alone.weight - both)) > 1e-3


def _with_signal(table):
    def own(params, logits_NV):
        del params
        return jax.nn.softmax(logits_NV) @ table

    return dataclasses.replace(NETWORK, signal=own)
