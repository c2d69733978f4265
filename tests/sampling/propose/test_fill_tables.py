"""The tables of what tokens add as neighbours give the fill that embeddings give."""

import dataclasses

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
import toy

NAME = "random-none-wavefront-confidence"


@pytest.mark.slow
def test_tables_and_embeddings_fill_alike():
    network = toy.network_with_heads()
    slots = list(zip(rule_cases.rows(5), rule_cases.samples(NAME, canvases.ROWS, 5), strict=True))
    assert 16 * network.vocab_size <= canvases.ROWS * canvases.POSITIONS, "tables are in use"
    with_tables = rule_cases.advance(NAME)
    plain = dataclasses.replace(network.heads["sampler"], sides=None)
    without = canvases.make_advance(
        canvases.program(
            dataclasses.replace(network, heads=network.heads | {"sampler": plain}), is_guided=True
        )
    )
    ours, theirs = (
        canvases.results(
            loop(toy.params_with_heads(), rule_cases.make_state(NAME, slots), canvases.FOREVER)
        )
        for loop in (with_tables, without)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
        assert dataclasses.replace(a, logprobs=b.logprobs) == b


@pytest.mark.slow
def test_what_is_added_up_is_the_head():
    network, params = toy.network_with_heads(), toy.params_with_heads()
    keys = jax.random.split(jax.random.key(0), 3)
    ids = jax.random.randint(keys[0], (2, 5, 2), 0, toy.VOCAB_SIZE)
    is_seen = jax.random.uniform(keys[1], ids.shape) < 0.6
    hidden_ND = jax.random.normal(keys[2], (5, 16))
    left, right = jnp.where(is_seen[..., None], network.embed(params, ids), 0.0)
    tables = network.heads["sampler"].sides(
        params, network.embed(params, jnp.arange(toy.VOCAB_SIZE))
    )
    sides_NH = sum(
        jnp.where(is_seen[side, :, place, None], table[ids[side, :, place], place], 0.0)
        for side, table in enumerate(tables)
        for place in range(2)
    )
    np.testing.assert_allclose(
        network.heads["sampler"].from_sides(params, sides_NH, hidden_ND),
        network.heads["sampler"].readout(params, left, hidden_ND, right),
        rtol=1e-4,
        atol=1e-5,
    )
