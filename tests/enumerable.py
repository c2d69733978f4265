"""A model whose texts can be enumerated: three positions, two letters, a table for every canvas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.types import Network, Params

TOKENIZER = CharacterTokenizer.of("ab")
V, MASK, LENGTH = TOKENIZER.vocab_size, TOKENIZER.mask_id, 3
LETTERS = (0, 1)
TEMPERATURE = 0.7


def _init(key: jax.Array) -> Params:
    del key
    table = 0.5 * np.random.default_rng(0).standard_normal((3**LENGTH, LENGTH, V))
    return {"table": jnp.asarray(table, jnp.float32), "beside": jnp.asarray(table[0], jnp.float32)}


def code(canvas: Any) -> Any:
    """The number of a canvas ``[..., 3]``: digits 0 and 1 are letters, 2 is a hole."""
    digits = [jnp.where(canvas[..., i] == MASK, 2, canvas[..., i]) for i in range(LENGTH)]
    return jnp.clip(digits[0] * 9 + digits[1] * 3 + digits[2], 0, 26)


def _trunk(params: Params, tokens_BL: Any, length_B: Any, cache: Any) -> tuple[Any, Any]:
    hidden_BLV = params["table"][code(tokens_BL[:, :LENGTH])]
    return jnp.pad(hidden_BLV, ((0, 0), (0, tokens_BL.shape[1] - LENGTH), (0, 0))), cache


def _sampler_readout(params: Params, left: Any, hidden_NV: Any, right: Any) -> Any:
    return hidden_NV + (left + 2.0 * right)[:, 0] @ params["beside"][:, :1] * params["beside"][:1]


NETWORK = Network(
    init=_init,
    trunk=_trunk,
    embed=lambda params, ids: jax.nn.one_hot(ids, LENGTH),
    readout=lambda params, hidden_NV: hidden_NV,
    vocab_size=V,
    heads={"sampler": SamplerReadout(_sampler_readout)},
)
PARAMS = _init(jax.random.key(0))
MODEL = Model(NETWORK, PARAMS, TOKENIZER, max_length=LENGTH)
TEXTS = list(itertools.product(LETTERS, repeat=LENGTH))


def log_policy(params: Params, canvas: tuple[int, ...]) -> jax.Array:
    """``log softmax(logits / T)`` of the letters at each position of a canvas, ``[3, 2]``."""
    logits = params["table"][code(np.array(canvas))][:, jnp.array(LETTERS)]
    return jax.nn.log_softmax(logits / TEMPERATURE, axis=-1)


def log_law(params: Params, canvas: tuple[int, ...], ids: Any = None) -> np.ndarray:
    """``ln p`` at each position of a canvas, of all ids, of which MASK has none, or of some."""
    logits = np.array(params["table"], np.float64)[int(code(np.array(canvas)))]
    logits[:, MASK] = -np.inf
    logits = logits if ids is None else logits[:, list(ids)]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def probability(params: Params, text: tuple[int, ...], canvas: tuple[int, ...]) -> jax.Array:
    """Of a text from a canvas on, in random order: two holes of three, and then the last."""
    holes = [i for i in range(LENGTH) if canvas[i] == MASK]
    if not holes:
        return jnp.ones(())
    subsets = list(itertools.combinations(holes, 2 if len(holes) == LENGTH else 1))
    log_p = log_policy(params, canvas)
    total = jnp.zeros(())
    for subset in subsets:
        after = tuple(text[i] if i in subset else canvas[i] for i in range(LENGTH))
        own = jnp.exp(sum(log_p[i, text[i]] for i in subset))
        total += own * probability(params, text, after) / len(subsets)
    return total


def surest_first(params: Params, text: tuple[int, ...]) -> float:
    """The same where the two letters of highest probability without temperature stay."""
    empty = (MASK,) * LENGTH
    log_p = np.asarray(log_policy(params, empty))
    clean = np.asarray(jax.nn.softmax(params["table"][code(np.array(empty))], axis=-1))
    total = 0.0
    for drawn in TEXTS:
        sure = [-clean[i, drawn[i]] for i in range(LENGTH)]
        kept = set(np.argsort(sure)[:2].tolist())
        if any(drawn[i] != text[i] for i in kept):
            continue
        (rest,) = set(range(LENGTH)) - kept
        after = tuple(text[i] if i in kept else MASK for i in range(LENGTH))
        last = float(log_policy(params, after)[rest, text[rest]])
        total += math.exp(sum(log_p[i, drawn[i]] for i in range(LENGTH)) + last)
    return total
