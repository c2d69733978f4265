"""The laws of all rules, for the published decoders."""

import pytest
import rule_cases
from sampling import test_replay as replays
from sampling import test_rules as laws

from dlm_jax.contrib import decoders
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
QUICK = ["threshold-wino", "klass-none", "slow_fast-none"]
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
@pytest.mark.parametrize("name", ["klass-scheduled", "credit-none", "slow_fast-wino"])
def test_eight_devices_and_another_canvas_have_the_same_randomness(name):
    laws.test_eight_devices_and_another_canvas_have_the_same_randomness(name)


@pytest.mark.slow
def test_replay_is_the_trace_bit_for_bit():
    replays._check_replay("klass-wino-wavefront")
