"""Classifier-free guidance per row."""

import dataclasses

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import rule_cases
import toy
from canvases import ROWS, Row, holes

from dlm_jax.sampling.loop import Advance
from dlm_jax.sampling.positions import TrunkOutput

NAME = "low_confidence-none"


def _run(rows):
    slots = list(zip(rows, rule_cases.samples(NAME, len(rows)), strict=True))
    state = rule_cases.advance(NAME)(toy.params(), rule_cases.make_state(NAME, slots), 1000)
    return canvases.results(state)


def test_logits_are_led_away_from_those_without_what_was_given():
    rng = np.random.default_rng(0)
    network = canvases.shared_network()
    width = toy.config().width
    seen_BLD, bare_BLD = jnp.asarray(rng.normal(size=(2, 3, 4, width)), jnp.float32)
    scale = np.array([0.0, 1.0, 2.5], np.float32)
    places = jnp.arange(12)
    params = toy.params()
    led = jax.jit(
        lambda scale_B: TrunkOutput(seen_BLD, bare_BLD, scale_B).logits(network, params, places)
    )(jnp.asarray(scale))
    plain, bare = (
        np.asarray(network.readout(toy.params(), x.reshape(-1, width)), np.float64)
        for x in (seen_BLD, bare_BLD)
    )
    with np.errstate(invalid="ignore"):
        expected = bare + (scale.repeat(4)[:, None] + 1) * (plain - bare)
    expected = np.where(np.isneginf(plain) | np.isneginf(bare), -np.inf, expected)
    np.testing.assert_allclose(led, expected, rtol=2e-5, atol=2e-5)
    alone = TrunkOutput(seen_BLD).logits(network, toy.params(), places)
    np.testing.assert_allclose(led[:4], alone[:4], rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(led[4:]) - np.asarray(alone[4:]))[np.isfinite(alone[4:])].max() > 0.1


def test_scale_zero_is_no_guidance_bit_for_bit_beside_guided_rows():
    rows = [Row(holes(12, 1, 2), steps=4, seed=seed) for seed in range(ROWS)]
    plain = _run(rows)
    guided = [dataclasses.replace(r, guidance=3.0 * (i % 2)) for i, r in enumerate(rows)]
    mixed = _run(guided)
    assert mixed[::2] == plain[::2]
    assert all(a.tokens != b.tokens for a, b in zip(mixed[1::2], plain[1::2], strict=True))
    assert [result.forwards for result in mixed] == [4, 8] * (ROWS // 2)
    assert [result.forwards for result in plain] == [4] * ROWS


def test_forwards_are_the_calls_of_the_trunk_and_a_scale_of_zero_calls_it_once_a_step():
    calls = []
    inner = canvases.shared_network()

    def trunk(params, tokens_BL, length_B, cache):
        jax.debug.callback(lambda: calls.append(1))
        return inner.trunk(params, tokens_BL, length_B, cache)

    network = dataclasses.replace(inner, trunk=trunk)
    advance = Advance(canvases.program(network, is_guided=True))
    for scale, times in ((0.0, 1), (1.0, 2)):
        calls.clear()
        rows = [Row(holes(6, 1), steps=steps, guidance=scale) for steps in (3, 5)]
        short, long, *_ = canvases.run([*rows, *[None] * 6], canvases.RANDOM, advance=advance)
        jax.effects_barrier()
        assert (short.forwards, long.forwards) == (3 * times, 5 * times)
        assert len(calls) == 5 * times, "the loop ends with the last row"
