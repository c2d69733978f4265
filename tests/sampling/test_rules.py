"""The laws of docs/design.md for commit rules with remask rules, blocks, guidance and drafts."""

import dataclasses
import functools
from typing import Any

import canvases
import jax
import numpy as np
import pytest
import rule_cases
import toy
from canvases import FOREVER, ROWS

from dlm_jax.sampling.state import EDITED
from dlm_jax.types import Status

PARAMS = [
    pytest.param(name, marks=() if name in rule_cases.QUICK else pytest.mark.slow)
    for name in rule_cases.CASES
] + [rule_cases.OWN]
OTHER_CANVAS = 37
NOISE = OTHER_CANVAS, toy.config().width


def _slots(name, seed=0):
    rows = rule_cases.rows(seed, resamples=rule_cases.has_edits(name))
    return list(zip(rows, rule_cases.samples(name, ROWS, seed), strict=True))


@functools.cache
def _jittered(network):
    """The network with hidden vectors and maps that differ by rounding from place to place."""

    def of_model(function):
        return lambda params, *rest: function(params["model"], *rest)

    def trunk(params, *rest):
        hidden_BLD, cache = network.trunk(params["model"], *rest)
        return hidden_BLD * _factor(params, hidden_BLD.shape[1])[None], cache

    def inside(params, *rest):
        found = network.inside(params["model"], *rest)
        factor_LD = _factor(params, found.final_BLD.shape[1])
        return found._replace(
            final_BLD=found.final_BLD * factor_LD[None],
            attention_BEHLL=found.attention_BEHLL * factor_LD[None, None, None, None, :, 0],
        )

    known = {name: getattr(network, name) for name in ("embed", "readout", "logits_of")}
    wrapped = {name: fn and of_model(fn) for name, fn in known.items()}
    heads = {name: of_model(head) for name, head in network.heads.items() if name != "sampler"}
    if "sampler" in network.heads:
        sampler = network.heads["sampler"]
        parts = {name: of_model(getattr(sampler, name))
                 for name in ("readout", "sides", "from_sides")}  # fmt: skip
        heads["sampler"] = dataclasses.replace(sampler, **parts)
    return dataclasses.replace(
        network, trunk=trunk, inside=inside, heads=heads, cached=None, **wrapped
    )


def _factor(params, positions):
    return 1.0 + 1e-7 * params["noise_LD"][:positions]


def _program(name, **more):
    program = rule_cases.program(name, **more)
    return dataclasses.replace(program, network=_jittered(program.network))


def _advance(name) -> Any:
    """One loop for all laws, and for all rules of a network. One law has noise."""
    return canvases.make_advance(_program(name))


def _params(name, noise_LD=None):
    noise_LD = np.zeros(NOISE, np.float32) if noise_LD is None else noise_LD
    return {"model": rule_cases.params(name), "noise_LD": noise_LD}


def _run(name, slots, noise_LD=None):
    state = rule_cases.make_state(name, slots)
    state = _advance(name)(_params(name, noise_LD), state, FOREVER)
    return canvases.results(jax.block_until_ready(state))


@pytest.mark.parametrize("name", PARAMS, scope="module")
def test_a_row_is_the_same_among_strangers_in_another_slot_alone_and_in_pieces(name):
    slots = _slots(name)
    together = _run(name, slots)
    order = np.random.default_rng(0).permutation(ROWS)
    assert _run(name, [slots[i] for i in order]) == [together[i] for i in order]
    strangers = _slots(name, seed=7)
    for place in (0, 3):
        crowd = [*strangers[:5], slots[place], *strangers[6:]]
        assert _run(name, crowd)[5] == together[place]
        alone = [slots[place] if slot == 2 else None for slot in range(ROWS)]
        assert _run(name, alone)[2] == together[place]
    state = rule_cases.make_state(name, slots)
    # One more for rows whose draft is looked at before the first step.
    for _ in range(1 + max(row.steps for row, _ in slots)):
        state = _advance(name)(_params(name), state, 1)
    assert canvases.results(state) == together


@pytest.mark.parametrize("name", PARAMS, scope="module")
def test_given_tokens_stay_rows_end_filled_and_banned_ids_stay_out(name):
    slots = _slots(name, seed=3)
    before = rule_cases.make_state(name, slots)
    frozen = np.asarray(before.canvas.frozen_BL).copy()
    given = np.asarray(before.canvas.tokens_BL).copy()
    state = _advance(name)(_params(name), before, FOREVER)
    still = np.asarray(state.canvas.frozen_BL)
    # Given positions and those behind the row.
    assert (np.asarray(state.committed_BL)[still] == -1).all()
    assert (np.asarray(state.logprob_BL)[still] == 0).all()
    is_behind = np.arange(still.shape[1]) >= np.asarray(state.canvas.length_B)[:, None]
    assert (np.asarray(state.canvas.tokens_BL)[is_behind] == toy.PAD).all()
    for slot, ((row, sample), result) in enumerate(
        zip(slots, canvases.results(state), strict=True)
    ):
        assert Status(result.status) in (Status.DONE, Status.CANVAS_FULL)
        assert sample.edit or Status(result.status) is Status.DONE
        assert result.steps <= row.steps
        frozen_now = still[slot, : len(result.tokens)]
        first, length = frozen[slot], len(row.tokens)
        assert np.array(result.tokens)[frozen_now].tolist() == given[slot][:length][
            first[:length]].tolist()  # fmt: skip
        if sample.edit:
            _check_edited(row, sample, result, frozen_now)
            continue
        np.testing.assert_array_equal(frozen_now, first[:length])
        forwards = 2 if row.guidance else 1
        # The critic is asked after some of the steps.
        asked = result.steps if name.endswith("critic") else 0
        extra = result.forwards - forwards * result.steps
        assert 0 <= extra <= asked
        is_free = ~frozen[slot, : len(row.tokens)]
        written = np.array(result.tokens)[is_free]
        if not row.stop_at_eos:
            assert toy.MASK not in result.tokens
        is_draft = np.zeros(len(row.tokens), bool) if row.is_draft is None else row.is_draft
        new = written[~np.array(is_draft)[is_free]]
        assert not set(new.tolist()) & ({*toy.BANNED} - ({toy.MASK} if row.stop_at_eos else set()))


def _check_edited(row, sample, result, frozen_now):
    assert len(result.tokens) <= max(row.capacity, len(row.tokens))
    tries = sample.edit_scoring == "likelihood"
    is_active = tries or max(sample.insert_ratio_start, sample.delete_ratio_start) > 0
    looks = is_active and row.is_draft is not None
    more = result.forwards - (2 if row.guidance else 1) * (result.steps + looks)
    if tries:
        # Three texts with an edit and the one without, after any step or look.
        assert more % 4 == 0 and 0 <= more <= 4 * (result.steps + looks)
    else:
        assert more == 0
    committed = np.array(result.committed)
    written = np.array(result.tokens)[((committed >= 0) | (committed == EDITED)) & ~frozen_now]
    if not row.stop_at_eos:
        assert toy.MASK not in np.array(result.tokens)[~frozen_now]
        assert not set(written.tolist()) & set(toy.BANNED)


@pytest.mark.parametrize("name", [rule_cases.FEW[1], list(rule_cases.EDITS)[0], "posterior-none"])
def test_no_setting_of_a_row_compiles_again(name):
    advance = _advance(name)
    _run(name, _slots(name))
    before = len(advance.compiled), advance._jitted._cache_size()
    for seed in (1, 2):
        _run(name, _slots(name, seed))
    few = rule_cases.make_state(name, [*_slots(name)[:2], *[None] * (ROWS - 2)])
    params = _params(name)
    other = params | {"model": jax.tree.map(lambda leaf: 2 * leaf, params["model"])}
    advance(params, advance(other, few, 1), 2)
    assert (len(advance.compiled), advance._jitted._cache_size()) == before


ALL_SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in rule_cases.FEW[2::3]]


@pytest.mark.parametrize("name", [rule_cases.FEW[0], *ALL_SLOW])
def test_eight_devices_and_another_canvas_have_the_same_randomness(name):
    slots = _slots(name, seed=4)
    # Rows without a given token: on an empty canvas positions differ by rounding alone.
    slots[::2] = [(_emptied(row), sample) for row, sample in slots[::2]]
    here = _run(name, slots)
    state = canvases.run_on_eight_devices(
        rule_cases.make_state(name, slots), _params(name), functools.partial(_program, name)
    )
    canvases.assert_same_up_to_rounding(canvases.results(state), here)
    state = rule_cases.make_state(name, slots[:3], positions=OTHER_CANVAS)
    state = _advance(name)(_params(name), state, FOREVER)
    canvases.assert_same_up_to_rounding(canvases.results(state), here[:3])


def _emptied(row):
    return dataclasses.replace(row, tokens=(toy.MASK,) * len(row.tokens), is_draft=None)


@pytest.mark.parametrize("name", PARAMS, scope="module")
def test_no_decision_on_an_empty_canvas_hangs_on_rounding(name):
    slots = [(_emptied(row), sample) for row, sample in _slots(name, seed=4)]
    rng = np.random.default_rng(0)
    noises = [rng.standard_normal(NOISE).astype(np.float32) for _ in range(3)]
    found = [_run(name, slots, noise_LD) for noise_LD in noises]
    canvases.assert_same_up_to_rounding(found[1], found[0])
    canvases.assert_same_up_to_rounding(found[2], found[0])
