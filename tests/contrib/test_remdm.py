"""ReMDM against plain Python: how often holes are unmasked and tokens remasked, and its laws."""

import enumerable
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
from enumerable import MASK, MODEL
from oracles import remask as oracle
from oracles import rules
from sampling import test_rules as laws
from sampling.remask.test_rules import LENGTH, POWER, _context, _eligible, _select, _step

import dlm_jax
from dlm_jax.contrib import remdm
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.sampling.rules import with_rules
from dlm_jax.settings import SettingError

RULES = {"cap": remdm.RemdmCap, "conf": remdm.RemdmConf}
TABLE, SIZE = with_rules(remdm), enumerable.LENGTH
CASES = {
    name: {"order": "ancestral_remdm", "remask": name.split("-")[1]}
    for name in ("ancestral_remdm-remdm_cap", "ancestral_remdm-remdm_conf")
}
rule_cases.OTHERS.update(CASES)
rule_cases.TABLES.update(dict.fromkeys(CASES, TABLE))


@pytest.mark.parametrize("name", list(CASES)[:1])
def test_a_row_is_the_same_among_strangers_in_another_slot_alone_and_in_pieces(name):
    laws.test_a_row_is_the_same_among_strangers_in_another_slot_alone_and_in_pieces(name)


@pytest.mark.parametrize("name", CASES)
def test_given_tokens_stay_rows_end_filled_and_banned_ids_stay_out(name):
    laws.test_given_tokens_stay_rows_end_filled_and_banned_ids_stay_out(name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", RULES)
def test_positions_change_as_often_as_the_process_says(schedule, kind):
    """Frequencies over many rows at each step: of holes unmasked, and of tokens remasked."""
    noise, steps, rows, eta = SCHEDULES[schedule](POWER), 5, 4000, 0.3
    is_hole = np.zeros((rows, LENGTH), bool)
    is_hole[:, :7] = True
    probability = np.linspace(0.05, 0.95, LENGTH)[None].repeat(rows, 0)
    etas_B = jnp.full(rows, eta)
    name = {"conf": "confidence"}.get(kind, kind)
    for step in range(steps - 1):
        now = _step(np.full(rows, step), np.full(rows, steps), is_hole)
        alpha_t, alpha_s = (rules.alpha(schedule, t, POWER) for t in rules.times(step, steps))
        order = remdm.AncestralRemdm(schedule=noise, eta_B=etas_B, remask=f"remdm_{kind}")
        rate = np.asarray(_eligible(order, now))[:, :7].mean()
        want = oracle.remdm_unmask_probability(name, alpha_t, alpha_s, eta)
        assert rate == pytest.approx(want, abs=0.012)
        if step == 0:
            continue
        is_fresh = np.zeros_like(is_hole)
        is_fresh[:, 12:] = True
        context = _context(now, ~is_hole, is_fresh, probability, [LENGTH] * rows)
        taken = np.asarray(_select(RULES[kind](etas_B, noise), context))
        assert not taken[:, 12:].any()
        if kind == "conf":
            may = (np.arange(LENGTH) >= 7) & (np.arange(LENGTH) < 12)
            by_place = oracle.remdm_confidence(alpha_t, alpha_s, probability[0], may)
            wants = [by_place[place] for place in range(7, 12)]
        else:
            wants = [oracle.remdm_cap(alpha_t, alpha_s, eta)] * 5
        np.testing.assert_allclose(taken[:, 7:12].mean(0), wants, atol=0.03)


def test_the_chance_of_a_step_is_that_of_its_commits_and_of_what_it_remasks():
    """Each hole is written, and each token remasked, with a probability of the step."""
    steps, eta = 3, 0.3
    result = dlm_jax.generate(
        MODEL, [""], num_samples=64, batch_size=64, rules=remdm, order="ancestral_remdm",
        remask="remdm_cap", remask_eta=eta, steps=steps, gen_length=SIZE, fill="parallel",
        ignore_eos=True, temperature=enumerable.TEMPERATURE, trace=True,
        logit_bias=tuple((i, float("-inf")) for i in range(2, enumerable.V)),
    )  # fmt: skip
    trace, remasked = result.trace, 0
    for row in range(64):
        for step in range(min(steps - 1, int(result.steps[row]) - 1)):
            is_hole = trace.canvas[row, step, :SIZE] == MASK
            is_next = trace.canvas[row, step + 1, :SIZE] == MASK
            is_written = trace.is_written[row, step, :SIZE]
            alpha_t, alpha_s = step / steps, (step + 1) / steps
            sigma = oracle.remdm_cap(alpha_t, alpha_s, eta)
            unmask = oracle.remdm_unmask_probability("cap", alpha_t, alpha_s, eta)
            chances = [unmask if is_written[i] else 1 - unmask for i in np.flatnonzero(is_hole)]
            chances += [sigma if is_next[i] else 1 - sigma for i in np.flatnonzero(~is_hole)]
            remasked += (is_next & ~is_hole).sum()
            found = trace.choice_logprobs[row, step]
            assert found == pytest.approx(np.log(chances).sum(), rel=1e-4)
    assert remasked > 5


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"remask": "remdm_cap", "order": "ancestral"}, "order='ancestral' does not know"),
        (
            {"remask": "remdm_conf", "order": "ancestral_remdm", "trace": True},
            "remask='remdm_conf'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, name):
    with pytest.raises(SettingError, match=f"^{name}"):
        dlm_jax.generate(
            MODEL, [""], gen_length=enumerable.LENGTH, steps=2, rules=remdm, **settings
        )
