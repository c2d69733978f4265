"""Traces hold every draw with its log-probability, and replay computes them again."""

from __future__ import annotations

import functools
import os

import canvases
import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_cases
from enumerable import LENGTH, MASK, MODEL, PARAMS, TEXTS
from jax.sharding import NamedSharding, PartitionSpec

import dlm_jax
from dlm_jax.config import MeshConfig, SamplingParams
from dlm_jax.distributed.partitions import make_mesh, split_rows
from dlm_jax.sampling.replay import replayed, trace_of
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.sampling.state import start_records
from dlm_jax.sampling.transforms.transform import At, Context
from dlm_jax.sampling.vocab import log_prob
from dlm_jax.settings import SettingError

STEPS = 16
UNLIKE = (
    "left_to_right-scheduled-wavefront-critic", "joint_threshold-scheduled", "klass-wino-wavefront",
)  # fmt: skip
"""Compiled without optimisations, one of their 2,496 log-probabilities differs in the last bit.
Compiled as users do, none does: `.ci/run` runs them so, too."""


def _traced(name):
    """The trace of rows that differ in everything, its program, and the rows without a trace."""
    program = rule_cases.program(name)
    traced = program.__class__(**vars(program) | {"num_traced": STEPS})
    slots = list(zip(rule_cases.rows(), rule_cases.samples(name, canvases.ROWS), strict=True))
    params = rule_cases.params(name)
    state = rule_cases.make_state(name, slots)
    records = jax.tree.map(jnp.copy, start_records(state.canvas.tokens_BL, STEPS))
    state = canvases.make_advance(traced)(params, state._replace(records=records), canvases.FOREVER)
    return traced, params, state, slots


def _check_replay(name):
    program, params, state, _ = _traced(name)
    trace = trace_of(program, state).trimmed()
    assert trace.is_written.sum() > 50
    again = jax.jit(functools.partial(replayed, program))
    found = np.asarray(again(params, trace))
    _assert_same_bits(name, found, np.where(trace.is_written, trace.logprobs, 0.0))
    return program, params, trace


def _assert_same_bits(name, found, expected):
    if name in UNLIKE and os.environ.get("DLM_JAX_TEST_COMPILER", "quick") == "quick":
        np.testing.assert_array_max_ulp(found, expected, maxulp=1)
    else:
        np.testing.assert_array_equal(found, expected)


WAVES = list(rule_cases.HEADS)[-1]
"""The case whose steps fill all holes, in many waves."""


def test_replay_is_the_trace_bit_for_bit():
    _, _, trace = _check_replay(WAVES)
    assert (np.where(trace.is_written, trace.level, 0) >= 4).any()


@pytest.mark.parametrize("last_n", [1, 2])
def test_the_context_of_penalties_is_that_of_the_step(last_n):
    result = dlm_jax.generate(
        MODEL, [""], num_samples=64, order="random", fill="parallel", steps=LENGTH,
        gen_length=LENGTH, repetition_penalty=3.0, penalty_last_n=last_n, trace=True,
    )  # fmt: skip
    trace = result.trace
    again = dlm_jax.replay(MODEL, PARAMS, trace)
    np.testing.assert_array_equal(again, np.where(trace.is_written, trace.logprobs, 0.0))


SOME = ["entropy-none", "joint_threshold-scheduled", *list(rule_cases.HEADS)[1:4]]
"""With the case above every order, both fills, and every remask rule that has a trace."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_replay_is_the_trace_for_every_order_fill_and_remask_rule(name):
    program, params, trace = _check_replay(name)
    again = jax.jit(functools.partial(replayed, program, every_draw=True))
    _assert_same_bits(name, np.asarray(again(params, trace)), trace.logprobs)


def test_rows_are_the_same_with_a_trace_and_the_trace_holds_what_they_hold():
    name = WAVES
    _, params, state, slots = _traced(name)
    plain = rule_cases.advance(name)(params, rule_cases.make_state(name, slots), canvases.FOREVER)
    assert canvases.results(state) == canvases.results(plain)
    records = state.records
    row, step, place = np.nonzero(np.asarray(records["is_written"]))
    tokens, committed = (np.array(x) for x in (state.canvas.tokens_BL, state.committed_BL))
    last = {(r, p): s for r, s, p in zip(row, step, place, strict=True)}
    assert len(last) == (committed >= 0).sum()
    for (r, p), s in last.items():
        assert committed[r, p] == s and tokens[r, p] == records["tokens"][r, s, p]
    rows = np.asarray(state.step_B) > 0
    np.testing.assert_array_equal(
        np.asarray(records["canvas"])[rows, 0], np.asarray(rule_cases.make_state(
            name, slots).canvas.tokens_BL)[rows],
    )  # fmt: skip


# A model of eight texts.


@functools.cache
def _all_traces(order, fill="parallel"):
    """Every trace of the model, each once, out of many samples."""
    result = dlm_jax.generate(
        MODEL, [""], num_samples=2048, batch_size=2048, order=order, fill=fill, steps=2,
        gen_length=LENGTH, temperature=enumerable.TEMPERATURE, ignore_eos=True, trace=True,
        logit_bias=tuple((i, float("-inf")) for i in range(2, enumerable.V)),
    )  # fmt: skip
    trace = result.trace
    shown = np.concatenate([trace.tokens, trace.is_written], axis=2).reshape(2048, -1)
    _, first = np.unique(shown, axis=0, return_index=True)
    texts = [tuple(result.tokens[i, :LENGTH].tolist()) for i in first]
    return trace.rows(np.sort(first)), [texts[i] for i in np.argsort(first)], result


@functools.cache
def _log_probabilities():
    return jax.jit(lambda params, trace: dlm_jax.replay(
        MODEL, params, trace, every_draw=True).sum((1, 2)))  # fmt: skip


def _sums(traces, texts):
    each = np.exp(np.asarray(_log_probabilities()(PARAMS, traces)) + traces.choice_logprobs.sum(1))
    return {text: sum(p for p, own in zip(each, texts, strict=True) if own == text)
            for text in TEXTS}  # fmt: skip


def test_the_sum_over_all_traces_is_the_probability_of_a_text_in_random_order():
    traces, texts, result = _all_traces("random")
    assert len(texts) == 3 * 8
    np.testing.assert_allclose(traces.choice_logprobs[:, 0], -np.log(3.0), rtol=1e-6)
    for text, found in _sums(traces, texts).items():
        wanted = float(enumerable.probability(PARAMS, text, (MASK,) * LENGTH))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        share = np.mean([tuple(row[:LENGTH]) == text for row in result.tokens.tolist()])
        assert abs(share - wanted) < 4 * np.sqrt(wanted / 2048)


@pytest.mark.slow
def test_the_sum_over_all_draws_is_the_probability_of_a_text_where_the_surest_stay():
    traces, texts, _ = _all_traces("low_confidence")
    for text, found in _sums(traces, texts).items():
        np.testing.assert_allclose(found, enumerable.surest_first(PARAMS, text), rtol=1e-5)


@pytest.mark.slow
def test_the_probabilities_of_all_traces_of_the_wavefront_add_up_to_one():
    traces, texts, _ = _all_traces("random_filled", "wavefront")
    np.testing.assert_allclose(sum(_sums(traces, texts).values()), 1.0, rtol=1e-5)
    assert (traces.level > 0).any(where=traces.is_written)


@pytest.mark.slow
def test_the_slope_through_every_transform_is_that_of_finite_differences():
    sample = SamplingParams(
        temperature=0.8, dynatemp_range=0.3, top_n_sigma=3.0, top_k=100, typical_p=0.95, top_p=0.9,
        min_p=0.01, xtc_probability=0.5, repetition_penalty=1.2, dry_multiplier=0.8,
        logit_bias=((3, 1.0),),
    )  # fmt: skip
    chain = BUILT_IN.pack([sample], ModelFacts(vocab_size=300, banned_ids=(0,), eos_ids=(1,))).chain
    places, zeros = jnp.arange(8, dtype=jnp.int32)[None], jnp.zeros(4, jnp.int32)
    context = Context(5 * places, places - 1, jnp.ones((1, 8), bool), jnp.array([8]))
    state = chain.init(context)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    at = At(zeros, places[0, :4], keys, jnp.ones(4, bool))
    rng = np.random.default_rng(0)
    logits = jnp.asarray(2.0 * rng.standard_normal((4, 300)), jnp.float32)
    change = jnp.asarray(rng.standard_normal((4, 300)), jnp.float32)
    ids = jnp.argmax(jax.jit(lambda x: chain.apply(state, x, at))(logits), axis=1)

    @jax.jit
    def total(x):
        return log_prob(chain.apply(state, x, at), ids).sum()

    slope = float(jnp.sum(jax.jit(jax.grad(total))(logits) * change))
    wanted = float(total(logits + 1e-3 * change) - total(logits - 1e-3 * change)) / 2e-3
    np.testing.assert_allclose(slope, wanted, rtol=0.01)


@pytest.mark.slow
def test_values_and_derivatives_are_the_same_over_four_devices():
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    split = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    trace = _all_traces("random_filled", "wavefront")[0]
    trace = trace.rows(slice(len(trace.steps) // 4 * 4))
    alone, over = (dlm_jax.replay(MODEL, params, trace) for params in (PARAMS, split))
    np.testing.assert_array_equal(over, alone)
    weight = jnp.arange(float(len(trace.steps)))

    def slope(params, rows):
        program = MODEL.program(rows=rows)
        return jax.jit(jax.grad(
            lambda params: jnp.sum(weight * replayed(program, params, trace).sum((1, 2)))
        ))(params)  # fmt: skip

    found, wanted = slope(split, split_rows(split)), slope(PARAMS, None)
    for name, leaf in wanted.items():
        assert float(jnp.abs(leaf).max()) > 1.0
        np.testing.assert_allclose(found[name], leaf, atol=1e-3, rtol=1e-5)


# What has no trace.


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"renoise": "mask", "renoise_start": 0.2}, "renoise_start"),
        ({"edit": True, "resample": True, "schedule": "all"}, "edit"),
        ({"read_back": True, "fill": "parallel"}, "trace"),
    ],
)
def test_what_has_no_trace_is_refused_by_name(settings, name):
    with pytest.raises(SettingError, match=f"^{name}") as caught:
        dlm_jax.generate(MODEL, [""], gen_length=LENGTH, steps=2, trace=True, **settings)
    assert "\n" not in str(caught.value)


def test_a_trace_is_of_all_rows_of_one_program():
    with pytest.raises(SettingError, match="^trace"):
        dlm_jax.generate(MODEL, [{"prompt": "", "trace": True}], steps=2)
    prompts = [{"prompt": "", "order": "random"}, {"prompt": "", "order": "entropy"}]
    with pytest.raises(SettingError, match="^trace=True requires rows that run in one program"):
        dlm_jax.generate(MODEL, prompts, steps=2, fill="parallel", trace=True)


@dlm_jax.rule
class Roulette(dlm_jax.CommitRule):
    """Commits one hole, drawn in proportion to the probability that it observes in this step."""

    def init(self, num_rows, num_positions):
        return jnp.zeros((num_rows, num_positions))

    def score(self, state_N, logits_NV, drawn):
        return drawn.logprob_N, jnp.exp(drawn.logprob_N)

    def _chance(self, state, context, proposal):
        weight_BL = state * jnp.exp(proposal.confidence_BL)
        weight_BL = jnp.where(context.is_hole_BL, weight_BL, 0.0)
        return weight_BL / weight_BL.sum(1, keepdims=True)

    def select(self, state, context, proposal):
        logit_BL = jnp.log(self._chance(state, context, proposal))
        place_B = jax.vmap(jax.random.categorical)(context.key_B, logit_BL)
        return jax.nn.one_hot(place_B, logit_BL.shape[1], dtype=bool), state

    def log_prob(self, state, context, proposal, is_chosen_BL):
        chance_BL = self._chance(state, context, proposal)
        return jnp.log(jnp.where(is_chosen_BL, chance_BL, 0.0).sum(1))


def test_a_random_choice_by_confidence_has_the_probability_of_its_enumeration():
    result = dlm_jax.generate(
        MODEL, [""], num_samples=64, batch_size=64, rules=[Roulette], order="roulette", steps=2,
        gen_length=LENGTH, fill="parallel", temperature=enumerable.TEMPERATURE, trace=True,
        ignore_eos=True, logit_bias=tuple((i, float("-inf")) for i in range(2, enumerable.V)),
    )  # fmt: skip
    drawn, is_chosen = result.trace.tokens[:, 0, :LENGTH], result.trace.is_written[:, 0, :LENGTH]
    clean = np.asarray(jax.nn.softmax(PARAMS["table"][enumerable.code(np.full(LENGTH, MASK))], -1))
    weights = clean[np.arange(LENGTH), drawn] ** 2
    assert (is_chosen.sum(1) == 1).all() and is_chosen.any(0).all()
    wanted = np.log(weights[is_chosen] / weights.sum(1))
    np.testing.assert_allclose(result.trace.choice_logprobs[:, 0], wanted, rtol=1e-4)


def test_traces_of_other_models_and_settings_are_refused():
    trace = _all_traces("random")[0]
    with pytest.raises(ValueError, match="trace is a NoneType"):
        dlm_jax.replay(MODEL, PARAMS, None)  # type: ignore[arg-type]
    other = enumerable.TOKENIZER.__class__.of("xy")
    with pytest.raises(ValueError, match="has another vocabulary"):
        dlm_jax.replay(MODEL.__class__(enumerable.NETWORK, PARAMS, other, 3), PARAMS, trace)
    with pytest.raises(ValueError, match="another vocabulary than the model, which has 12 ids"):
        dlm_jax.replay(canvases.shared_network(), PARAMS, trace)
    cut = trace.__class__(**vars(trace) | {"tokens": trace.tokens[:2]})
    with pytest.raises(ValueError, match="differ in rows"):
        dlm_jax.replay(MODEL, PARAMS, cut)
