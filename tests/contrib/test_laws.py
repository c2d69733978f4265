"""The laws of all rules, for the published decoders."""

import functools

import jax
import numpy as np
import pytest
import rule_cases
import toy
from canvases import POSITIONS, ROWS
from inference import test_ties as ties
from sampling import test_replay as replays
from sampling import test_rules as laws

from dlm_jax.contrib import decoders
from dlm_jax.sampling.mask_step import propose_step
from dlm_jax.sampling.rules import classes_of, with_rules

TABLE = with_rules(decoders)
ORDERS = [cls.name for cls in classes_of(decoders) if cls.name in TABLE.commit]
CASES = {
    f"{order}-{remask}": {"order": order, "remask": remask}
    for number, order in enumerate(ORDERS)
    for remask in ("none", ("scheduled", "wino")[number % 2])
} | {
    "threshold-wino": {"order": "threshold", "remask": "wino"},
    "klass-wino-wavefront": {"order": "klass", "remask": "wino", "fill": "wavefront"},
    "klass-none-parallel-edit": {
        "order": "klass", "schedule": "all", "edit": True, "renoise_start": 0.1, "resample": True,
    },
}  # fmt: skip
rule_cases.OTHERS.update(CASES)
rule_cases.TABLES.update(dict.fromkeys(CASES, TABLE))
QUICK = ["threshold-wino", "klass-none", "dawn-scheduled", "slow_fast-none"]
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, scope="module")
def test_a_row_is_the_same_among_strangers_in_another_slot_alone_and_in_pieces(name):
    laws.test_a_row_is_the_same_among_strangers_in_another_slot_alone_and_in_pieces(name)


@pytest.mark.parametrize("name", NAMES, scope="module")
def test_given_tokens_stay_rows_end_filled_and_banned_ids_stay_out(name):
    laws.test_given_tokens_stay_rows_end_filled_and_banned_ids_stay_out(name)


@pytest.mark.parametrize("name", NAMES, scope="module")
def test_no_decision_on_an_empty_canvas_hangs_on_rounding(name):
    laws.test_no_decision_on_an_empty_canvas_hangs_on_rounding(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["klass-scheduled", "credit-none", "dawn-scheduled", "slow_fast-wino"]
)
def test_eight_devices_and_another_canvas_have_the_same_randomness(name):
    laws.test_eight_devices_and_another_canvas_have_the_same_randomness(name)


@pytest.mark.slow
def test_replay_is_the_trace_bit_for_bit():
    replays._check_replay("klass-wino-wavefront")


def test_a_rule_that_reads_attention_gets_that_of_live_positions_in_the_forward_of_the_step():
    state = rule_cases.make_state("dawn-none", laws._slots("dawn-none"))
    program, params = rule_cases.program("dawn-none"), toy.params()
    found = jax.jit(propose_step, static_argnums=0)(program, params, state)[1].commit.attention_BLL
    canvas, network = state.canvas, program.network
    shown = jax.jit(network.inside)(params, canvas.tokens_BL, canvas.length_B).attention_BEHLL
    assert found.shape == (ROWS, POSITIONS, POSITIONS) and shown.shape[1] == 2
    for row, length in enumerate(np.asarray(canvas.length_B)):
        wanted = np.asarray(shown[row]).mean((0, 1))
        np.testing.assert_allclose(found[row, :length], wanted[:length], atol=1e-5)
        assert not found[row, length:].any() and not found[row, :, length:].any()
    plain = rule_cases.make_state("threshold-none", laws._slots("threshold-none"))
    seen = jax.eval_shape(functools.partial(propose_step, program), params, plain)[1]
    assert seen.commit.attention_BLL is None


@pytest.mark.slow
@pytest.mark.parametrize("order", [*ORDERS, "klass-wavefront"])
def test_texts_are_the_same_alone_and_in_every_batch_and_canvas(order):
    order, _, fill = order.partition("-")
    settings = {"order": order, "fill": fill or "parallel", "rules": decoders}
    ties.test_texts_are_the_same_alone_and_in_every_batch_and_canvas(settings)
