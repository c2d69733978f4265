import functools
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import stage_cases as cases
import toy

from dlm_jax.heads import MAIN
from dlm_jax.objectives import losses
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.objectives.losses import cross_entropy
from dlm_jax.objectives.objective import Batch, Objective, elbo


def _hidden(num_rows, num_positions):
    return jax.random.normal(jax.random.key(0), (num_rows, num_positions, 16))


def test_cross_entropy_equals_the_formula_with_mask_impossible():
    hidden = _hidden(2, 5)
    targets = jnp.array([[0, 1, 2, 3, 4], [7, 6, 11, 9, 10]])
    nll = cross_entropy(toy.network(), toy.params(), hidden, targets, mask_id=toy.MASK)
    logits = np.asarray(toy.network().readout(toy.params(), hidden.reshape(10, 16)), np.float64)
    logits[:, toy.MASK] = -np.inf
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -log_p[np.arange(10), np.asarray(targets).ravel()].reshape(2, 5)
    np.testing.assert_allclose(nll, expected, rtol=1e-5)


def test_a_masked_target_costs_infinity():
    nll = cross_entropy(
        toy.network(), toy.params(), _hidden(1, 1), jnp.array([[toy.MASK]]), mask_id=toy.MASK
    )
    assert np.isposinf(np.asarray(nll)).all()


def test_slicing_the_positions_changes_neither_loss_nor_gradient(monkeypatch):
    hidden, targets = _hidden(2, 6), jnp.arange(12).reshape(2, 6) % 8

    def loss(params, hidden):
        return cross_entropy(toy.network(), params, hidden, targets, mask_id=toy.MASK).sum()

    whole = jax.value_and_grad(loss, argnums=(0, 1))(toy.params(), hidden)
    # At most 24 logits, so one position of both rows at a time.
    monkeypatch.setattr(losses, "_MAX_LOGITS", 24)
    sliced = jax.value_and_grad(loss, argnums=(0, 1))(toy.params(), hidden)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), whole, sliced)
    text = str(jax.make_jaxpr(loss)(toy.params(), hidden))
    assert "scan" in text


_ELBO = Objective(functools.partial(elbo, schedule=LINEAR, mask_id=toy.MASK))
_TASK = cases.task(objectives={"elbo": _ELBO})


def _elbo(params, drawn):
    return _TASK.losses(params, {}, drawn, jnp.int32(0), (MAIN,))[1]["elbo"]


def _drawn(tokens_BL, length_B):
    batch = Batch(tokens_BL, length_B, jnp.zeros_like(length_B))
    return _TASK.draw(batch, jax.random.key(0), jnp.int32(0), (MAIN,))


def test_elbo_divides_by_free_tokens_and_ignores_padding():
    tokens = jnp.arange(16).reshape(2, 8) % 8
    length = jnp.array([8, 3])
    run, drawn = jax.jit(_elbo), _drawn(tokens, length)
    assert float(drawn.total) == 11
    padded = run(toy.params(), _drawn(tokens.at[1, 3:].set(5), length))
    np.testing.assert_array_equal(run(toy.params(), drawn), padded)
    weight_BL, _ = drawn.noise["elbo"]
    doubled = drawn._replace(noise={"elbo": (weight_BL, jnp.float32(22))})
    np.testing.assert_allclose(run(toy.params(), doubled), padded / 2, rtol=1e-6)


def test_a_mask_in_the_text_that_is_not_asked_for_costs_nothing():
    drawn = _drawn(jnp.full((1, 4), toy.MASK), jnp.array([4]))
    drawn.noise["elbo"] = jnp.zeros((1, 4)), jnp.float32(4)
    assert float(_elbo(toy.params(), drawn)) == 0


def test_a_batch_reaches_its_loss_in_four_frames(monkeypatch):
    frames, package, logsumexp = [], str(Path(losses.__file__).parents[1]), jax.nn.logsumexp

    def spied(*args, **kwargs):
        frames.append([f.name for f in traceback.extract_stack() if f.filename.startswith(package)])
        return logsumexp(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "logsumexp", spied)
    drawn = _drawn(jnp.zeros((2, 8), jnp.int32), jnp.array([8, 8]))
    jax.eval_shape(lambda: _elbo(toy.params(), drawn))
    assert frames == [["losses", "cross_entropy", "at_positions", "nll"]]
