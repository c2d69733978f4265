"""Every logit transform, switched on and off, with adversarial logits to try it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rule_cases
from hypothesis import strategies as st

from dlm_jax.sampling import transforms as tf

NUM_ROWS, NUM_POSITIONS, NUM_CANVAS, VOCAB = 3, 6, 12, 40
KINDS = (
    "normal", "ties", "banned", "huge", "denormal", "one_hot", "equal", "peaked", "signed_zero",
)  # fmt: skip


def real(*values: float) -> jax.Array:
    """A per-row float parameter; one value stands for all rows."""
    row = values if len(values) == NUM_ROWS else values * NUM_ROWS
    return jnp.asarray(np.array(row, np.float32))


def whole(*values: int) -> jax.Array:
    """A per-row integer parameter."""
    row = values if len(values) == NUM_ROWS else values * NUM_ROWS
    return jnp.asarray(np.array(row, np.int32))


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that float32 represents."""
    return st.floats(low, high).map(lambda value: float(np.float32(value)))


def flags(*values: bool) -> jax.Array:
    """A per-row flag."""
    return jnp.asarray(np.array(values if len(values) == NUM_ROWS else values * NUM_ROWS))


def _bias(on: bool, vocab: int) -> tf.LogitBias:
    ids = np.full((NUM_ROWS, 4), vocab, np.int32)
    values = np.zeros((NUM_ROWS, 4), np.float32)
    if on:
        ids[:, :3], values[:, :3] = [0, 0, vocab - 1], [1.5, 2.0, -3.0]
    return tf.LogitBias(jnp.asarray(ids), jnp.asarray(values))


def _penalties(on: bool, vocab: int) -> tf.Penalties:
    r, f, c = (1.7, 0.3, 0.4) if on else (1.0, 0.0, 0.0)
    return tf.Penalties(real(r), real(f), real(c), whole(5), vocab_size=vocab)


def _dry(on: bool, vocab: int) -> tf.Dry:
    breakers = jnp.full((NUM_ROWS, 2), -1, jnp.int32)
    return tf.Dry(real(0.8 if on else 0.0), real(1.75), whole(1), breakers)


Case = Callable[[bool, int], Any]

CASES: dict[str, Case] = {
    "bias": _bias,
    "penalties": _penalties,
    "dry": _dry,
    "temperature": lambda on, v: tf.Temperature(
        real(0.6 if on else 1.0), None, real(0.0), real(1.0)
    ),
    "dynamic_temperature": lambda on, v: tf.Temperature(
        real(0.9 if on else 1.0), None, real(0.5 if on else 0.0), real(1.3)
    ),
    "top_n_sigma": lambda on, v: tf.TopNSigma(real(1.0 if on else 0.0), whole(1)),
    "top_k": lambda on, v: tf.TopK(whole(3 if on else 0), whole(1)),
    "typical_p": lambda on, v: tf.TypicalP(real(0.5 if on else 1.0), whole(2)),
    "top_p": lambda on, v: tf.TopP(real(0.6 if on else 1.0), whole(1)),
    "min_p": lambda on, v: tf.MinP(real(0.2 if on else 0.0), whole(2)),
    "xtc": lambda on, v: tf.Xtc(real(1.0 if on else 0.0), real(0.05), whole(1)),
    "mirostat_v1": lambda on, v: tf.Mirostat(
        whole(int(on)), real(1.5), real(0.1), whole(1), vocab_size=v
    ),
    "mirostat_v2": lambda on, v: tf.Mirostat(
        whole(2 * on), real(1.5), real(0.1), whole(1), vocab_size=v
    ),
    # A user's own, from docs/own_rules.md.
    "softened": lambda on, v: rule_cases.own()["Softened"](real(0.2 if on else 0.0)),
}


def logits(kind: str, seed: int, shape: tuple[int, int] = (NUM_POSITIONS, VOCAB)) -> np.ndarray:
    """Float32 logits of a kind; every position keeps at least one candidate."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 3
    if kind == "ties":
        x = np.round(x)
    elif kind == "banned":
        x[rng.random(shape) < 0.7] = -np.inf
        x[np.arange(shape[0]), rng.integers(shape[1], size=shape[0])] = 1.0
    elif kind == "huge":
        x = x * 1e30
    elif kind == "denormal":
        x = x * 1e-40
    elif kind == "one_hot":
        x = np.full(shape, -np.inf)
        x[np.arange(shape[0]), rng.integers(shape[1], size=shape[0])] = rng.normal()
    elif kind == "equal":
        x = np.full(shape, rng.normal())
    elif kind == "peaked":
        x[:, rng.integers(shape[1])] += 40
    elif kind == "signed_zero":
        x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    return x.astype(np.float32)


def at(seed: int = 0, num: int = NUM_POSITIONS, **changes: Any) -> tf.At:
    """Positions spread over the rows, each with a key of its own."""
    place = tf.At(
        row_N=jnp.arange(num, dtype=jnp.int32) % NUM_ROWS,
        index_N=jnp.arange(num, dtype=jnp.int32) + 4,
        key_N=jax.random.split(jax.random.key(seed), num),
        is_real_N=jnp.ones(num, bool),
    )
    return place._replace(**changes)


def context(seed: int = 0, vocab: int = VOCAB) -> tf.Context:
    """A canvas of a few distinct tokens with holes, committed in random order."""
    rng = np.random.default_rng(seed)
    shape = (NUM_ROWS, NUM_CANVAS)
    return tf.Context(
        tokens_BL=jnp.asarray(rng.integers(0, min(3, vocab), shape), jnp.int32),
        order_BL=jnp.asarray(rng.integers(-1, 3, shape), jnp.int32),
        is_visible_BL=jnp.asarray(rng.random(shape) < 0.9),
        length_B=jnp.full(NUM_ROWS, NUM_CANVAS, jnp.int32),
    )


@jax.jit
def run(transform: Any, logits_NV: jax.Array, place: tf.At, scene: tf.Context) -> jax.Array:
    """The transform's logits at the first step."""
    return transform.apply(transform.init(scene), logits_NV, place)


@jax.jit
def draw(chain: tf.Chain, logits_NV: jax.Array, place: tf.At, scene: tf.Context) -> jax.Array:
    """The chain's tokens at the first step."""
    return chain.draw(chain.init(scene), logits_NV, place)[0]


TINY = float(np.finfo(np.float32).tiny)


def as_seen(x: np.ndarray) -> np.ndarray:
    """float64 logits as XLA compares them on CPU: denormals are 0."""
    return np.where(np.abs(x) < TINY, 0.0, x).astype(np.float64)


def assert_keeps(out: np.ndarray, x: np.ndarray, expected: np.ndarray, doubt: set[int]) -> None:
    """Fails unless `out` keeps what `expected` keeps, `doubt` aside, and keeps it unchanged."""
    is_kept, should_keep = out > -np.inf, expected > -np.inf
    wrong = set(np.flatnonzero(is_kept != should_keep).tolist()) - doubt
    assert not wrong, f"ids {sorted(wrong)}: kept {is_kept[sorted(wrong)]}"
    np.testing.assert_array_equal(out[is_kept], x[is_kept])
