"""The trunk in pieces: what a block-causal position sees, and that pieces equal the whole."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.model import ops
from dlm_jax.model.transformer import build
from dlm_jax.types import Window

KINDS = {
    "bidirectional": {"kv_heads": 1},
    "causal": {"attention_type": "causal", "start_id": toy.MASK},
    "shifted causal": {"attention_type": "causal", "logit_alignment": "shifted", "kv_heads": 1},
    "block_causal": {"attention_type": "block_causal", "block_length": 3, "kv_heads": 1},
    "shifted": {"logit_alignment": "shifted"},
    "shifted in blocks": {
        "attention_type": "block_causal", "block_length": 3, "logit_alignment": "shifted",
    },
}  # fmt: skip
L = 11
LENGTH = np.array([11, 7, 9])
TOKENS = np.random.default_rng(0).integers(0, toy.VOCAB_SIZE, (3, L)).astype(np.int32)


@functools.cache
def _model(kind):
    network = build(toy.config(**KINDS[kind]))
    return network, toy.random_params(network)


@functools.cache
def _trunk(kind):
    network, params = _model(kind)
    return jax.jit(lambda tokens_BL, length_B: network.trunk(params, tokens_BL, length_B, None)[0])


def _whole(kind, tokens_BL, length_B):
    return _trunk(kind)(tokens_BL, length_B)


def _close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_a_position_sees_its_own_block_and_those_before_it_alone():
    whole = np.asarray(_whole("block_causal", TOKENS, LENGTH))
    for place in range(7):
        other = TOKENS.copy()
        other[:, place] = (other[:, place] + 1) % toy.VOCAB_SIZE
        moved = np.abs(np.asarray(_whole("block_causal", other, LENGTH)) - whole).max(-1) > 0
        for row, length in enumerate(LENGTH):
            sees = np.arange(L)[:length] // 3 >= place // 3
            np.testing.assert_array_equal(moved[row, :length], sees)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_rows_in_pieces_are_what_the_trunk_returns(kind):
    network, params = _model(kind)
    hidden, _ = jax.jit(network.cached.whole)(params, TOKENS, LENGTH)
    np.testing.assert_allclose(hidden, _whole(kind, TOKENS, LENGTH), rtol=1e-5, atol=1e-5)


def _beside(kind, old_BL, new_BL, size, window):
    """The trunk at a window of the new canvas, beside what is kept of the old one."""
    network, params = _model(kind)
    return _in_window(network.cached, size, params, old_BL, new_BL, window)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_window(cached, size, params, old_BL, new_BL, window):
    kept = cached.init(params, 3, L)
    _, piece = cached.whole(params, old_BL, LENGTH)
    kept = cached.store(kept, piece, None, jnp.zeros(3, jnp.int32))
    hidden, piece = cached.window(params, kept, None, new_BL, LENGTH, window, size=size)
    swapped, _ = cached.window(
        params, kept, jnp.array([2, 0, 2]), new_BL[jnp.array([2, 0, 2])],
        jnp.asarray(LENGTH)[jnp.array([2, 0, 2])],
        Window(*(x[jnp.array([2, 0, 2])] for x in window)), size=size,
    )  # fmt: skip
    kept = cached.store(kept, piece, None, window.place_N)
    again, _ = cached.window(params, kept, None, new_BL, LENGTH, window, size=size)
    return hidden, swapped, again


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_beside_what_is_kept_is_what_the_trunk_returns_there(kind):
    """Rows in different places; what has changed since is in the window or out of its sight.

    Where every position sees all others nothing may have changed.
    """
    size = {"causal": 1, "shifted causal": 2, "bidirectional": 5, "shifted": 5}.get(kind, 3)
    is_causal = "causal" in kind and "block" not in kind
    # The first position of a row has no prediction.
    begin = np.array([6, 3, 1 if kind == "shifted causal" else 0])
    # A causal position reads the token before it.
    changed = (jnp.arange(L)[None] >= begin[:, None] - is_causal) & (size != 5)
    new = jnp.where(changed, (TOKENS + 1) % toy.VOCAB_SIZE, TOKENS)
    window = Window(*(jnp.asarray(x, jnp.int32) for x in (begin, begin, begin + size)))
    hidden, swapped, again = _beside(kind, TOKENS, new, size, window)
    whole = _whole(kind, new, LENGTH)
    for row in range(3):
        at = slice(begin[row], min(begin[row] + size, LENGTH[row]))
        n = at.stop - at.start
        _close(hidden[row, :n], whole[row, at])
        _close(again[row, :n], whole[row, at])
    _close(swapped, hidden[np.array([2, 0, 2])])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _seen_at_the_end(other_from, num_seen):
    """Windows up to the end of the canvas, beside what is of other tokens from a place on."""
    network, params = _model("bidirectional")
    cached, size, end_B = network.cached, 8, jnp.full(3, L)
    _, piece = cached.whole(params, TOKENS, LENGTH)
    kept = cached.store(cached.init(params, 3, L), piece, None, jnp.zeros(3, jnp.int32))
    from_B = jnp.full(3, other_from)
    _, piece = cached.window(
        params, kept, None, jnp.full_like(TOKENS, toy.MASK), LENGTH, Window(from_B, from_B, end_B),
        size=L - other_from,
    )  # fmt: skip
    kept = cached.store(kept, piece, None, from_B)
    window = Window(jnp.full(3, L - size), jnp.array([5, 3, 4]), end_B)
    more = {} if num_seen is None else {"num_seen": num_seen}
    return cached.window(params, kept, None, TOKENS, LENGTH, window, size=size, **more)[0]


def test_kept_positions_from_the_number_seen_on_are_invisible():
    """Nothing is missing that a window sees before it, and no more is looked at."""
    _close(_seen_at_the_end(5, 5), _seen_at_the_end(5, None))
    _close(_seen_at_the_end(2, 2), _seen_at_the_end(9, 2))
    assert np.abs(_seen_at_the_end(9, 2) - _seen_at_the_end(9, None)).max() > 1e-3


@pytest.mark.parametrize("block_length", [2, 3, 4, 11, 16])
def test_two_streams_say_of_every_block_what_the_trunk_says_behind_clean_blocks(block_length):
    network = build(toy.config(attention_type="block_causal", block_length=block_length))
    params = toy.random_params(network)
    shown = jnp.where(np.random.default_rng(1).random((3, L)) < 0.5, toy.MASK, TOKENS)
    beside = jax.jit(network.beside_clean)(params, shown, TOKENS, LENGTH)
    trunk = jax.jit(lambda tokens_BL: network.trunk(params, tokens_BL, LENGTH, None)[0])
    for begin in range(0, L, block_length):
        is_block = np.arange(L)[None] // block_length == begin // block_length
        behind = trunk(jnp.where(is_block, shown, TOKENS))
        for row, length in enumerate(LENGTH):
            at = slice(begin, min(begin + block_length, length))
            _close(beside[row, at], behind[row, at])


def test_two_streams_of_a_shifted_model_are_those_of_a_plain_one_a_position_later():
    """As Fast-dLLM v2 trains: what the noisy stream says at one position predicts the next."""
    kinds = (KINDS["block_causal"], KINDS["shifted in blocks"] | {"kv_heads": 1})
    plain, moved = (build(toy.config(**kind)) for kind in kinds)
    params = toy.random_params(plain)
    shown = jnp.where(np.random.default_rng(1).random((3, L)) < 0.5, toy.MASK, TOKENS)
    there, here = (
        jax.jit(network.beside_clean)(params, shown, TOKENS, LENGTH) for network in (plain, moved)
    )
    _close(here[:, 1:], there[:, :-1])
    _close(here[:, 0], there[:, 0])


@pytest.mark.parametrize("place", ["cpu", "tpu"])
def test_many_rows_are_stored_as_a_few_are(place, monkeypatch):
    network, params = _model("shifted")
    monkeypatch.setattr(ops, "platform", lambda: place)
    cached = network.cached
    tokens, length = jnp.tile(TOKENS, (4, 1)), jnp.tile(LENGTH, 4)
    _, piece = jax.jit(lambda *given: cached.whole(*given))(params, tokens, length)
    kept = cached.init(params, 12, L)
    rows = jnp.asarray(np.random.default_rng(2).permutation(12))
    many = cached.store(kept, piece, rows, jnp.zeros(12, jnp.int32))
    for row in range(12):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], piece)
        kept = cached.store(kept, one, rows[row : row + 1], jnp.zeros(1, jnp.int32))
    chex.assert_trees_all_equal(many, kept)
