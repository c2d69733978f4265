"""The published decoders against plain Python, one row at a time, and what they keep."""

import dataclasses

import commit_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contrib import oracle
from dlm_jax.contrib import decoders
from dlm_jax.sampling.commit import DrawnTokens
from dlm_jax.sampling.commit.commit_rule import log_odds_of, preferences
from dlm_jax.sampling.commit.orders import linear_quota
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.positions import put
from dlm_jax.sampling.remask import RemaskContext
from dlm_jax.sampling.rules import ModelFacts, with_rules

ROWS, LENGTH, VOCAB, STEPS = 60, 12, 7, 8
RNG = np.random.default_rng(5)
IS_HOLE = RNG.random((ROWS, LENGTH)) < 0.6
IS_HOLE[:, 3] = True
KEYS = jax.vmap(jax.random.key)(jnp.arange(ROWS))
COMMON = {1: 0.3, 4: 0.1}
FACTS = ModelFacts(vocab_size=VOCAB)
TABLE = with_rules(decoders)
SamplingParams = params_of(TABLE)


def _rule(order, **columns):
    """The rule with a value of each setting for each row."""
    rows = [
        SamplingParams(
            order=order, confidence="max", common_ids=COMMON,
            **{name: column[row].item() for name, column in columns.items()},
        )
        for row in range(ROWS)
    ]  # fmt: skip
    return TABLE.pack(rows, FACTS).commit


def _context(is_hole, step=0, first=None):
    lower = preferences(KEYS, jnp.ones(ROWS, bool), LENGTH)
    return commit_cases.context(is_hole, first=first, step=step, steps=STEPS, preference_BL=lower)


def _select(rule, context, tokens_BL, confidence_BL, state=()):
    proposed = commit_cases.proposal(log_odds_of(confidence_BL), tokens_BL)
    return commit_cases.select(rule, context, proposed, state)


@jax.jit
def _observe(rule, kept, logits_BLV):
    """What a rule keeps of all positions, and their confidences."""
    places_N = jnp.arange(ROWS * LENGTH)
    flat_NV = logits_BLV.reshape(-1, VOCAB)
    ids_N = jnp.argmax(flat_NV, axis=1).astype(jnp.int32)
    logprob_N = jax.nn.log_softmax(flat_NV).max(axis=1)
    kept_N = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
    drawn = DrawnTokens(ids_N, places_N // LENGTH, logprob_N, lambda: flat_NV)
    sure_N, new_N = rule.score(kept_N, flat_NV, drawn)
    sure_BL = jax.nn.sigmoid(sure_N).reshape(ROWS, LENGTH)
    return put(kept, places_N, places_N >= 0, new_N), sure_BL


def _same(chosen, wanted, least=6):
    sizes = set()
    for row in range(ROWS):
        want = wanted(row, np.flatnonzero(IS_HOLE[row]).tolist())
        assert set(np.flatnonzero(chosen[row]).tolist()) == want, row
        sizes.add(len(want))
    assert len(sizes) >= least


SURE = np.where(
    np.arange(ROWS)[:, None] % 2, np.round(RNG.random((ROWS, LENGTH)) * 8) / 8,
    RNG.random((ROWS, LENGTH)),
).astype(np.float32)  # fmt: skip
TOKENS = RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
SHARE = RNG.uniform(0.1, 0.9, ROWS).astype(np.float32)
LESS = (SHARE * RNG.uniform(0.3, 1.0, ROWS)).astype(np.float32)
FEW = RNG.integers(0, 4, ROWS)
MARGIN = RNG.uniform(-0.9, 0.3, ROWS).astype(np.float32)


@pytest.mark.parametrize(
    ("order", "columns", "wanted"),
    [
        ("frechet", {"frechet_margin": MARGIN},
         lambda row, holes: oracle.frechet(SURE[row].tolist(), holes, float(MARGIN[row]))),
        ("local_leap", {"threshold": SHARE, "leap_threshold": LESS, "leap_radius": FEW},
         lambda row, holes: oracle.local_leap(SURE[row], holes, SHARE[row], LESS[row], FEW[row])),
        ("hierarchical", {"threshold": SHARE, "hierarchy_floor": LESS},
         lambda row, holes: oracle.hierarchical(SURE[row], holes, SHARE[row], LESS[row])),
    ],
    ids=["frechet", "local_leap", "hierarchical"],
)  # fmt: skip
def test_rule_equals_the_oracle(order, columns, wanted):
    chosen = _select(_rule(order, **columns), _context(IS_HOLE), TOKENS, SURE)
    _same(np.asarray(chosen), wanted)


def test_the_grid_gets_finer_and_its_rounds_fill_the_block():
    base = 2 + np.random.default_rng(5).integers(0, 3, ROWS)
    rule, left = _rule("dilated", dilated_base=base), IS_HOLE.copy()
    first = IS_HOLE.sum(1)
    for step in range(4):
        chosen = np.asarray(_select(rule, _context(left, step, first=first), TOKENS, SURE))
        for row in range(ROWS):
            holes = np.flatnonzero(left[row]).tolist()
            want = oracle.dilated(holes, int(first[row]), step, int(base[row]))
            assert set(np.flatnonzero(chosen[row]).tolist()) == want
        left &= ~chosen
    assert not left.any()


def test_position_and_rarity_decide_about_the_quota():
    limit = np.where(np.arange(ROWS) % 2, 10.0, 0.4).astype(np.float32)
    rule = _rule("position_aware", position_decay=LESS, information_limit=limit)
    fine = np.random.default_rng(6).random((ROWS, LENGTH)).astype(np.float32)
    context = _context(IS_HOLE, 5)
    count = np.asarray(linear_quota(context))
    chosen = np.asarray(_select(rule, context, TOKENS, fine))
    _same(chosen, lambda row, holes: oracle.position_aware(
        fine[row].tolist(), TOKENS[row].tolist(), holes, float(LESS[row]), float(limit[row]),
        COMMON, VOCAB, int(count[row]),
    ), least=3)  # fmt: skip


def _logits(count, rng):
    """Logits of some steps, of which some hardly move."""
    found = [rng.normal(0, 1.5, (ROWS, LENGTH, VOCAB))]
    for _ in range(count - 1):
        scale = rng.choice([0.02, 0.3, 2.0], (ROWS, LENGTH, 1))
        found.append(found[-1] + scale * rng.normal(size=found[0].shape))
    return [x.astype(np.float32) for x in found]


def _softmax(logits):
    weights = np.exp(np.float64(logits) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_all_are_committed_once_the_mean_gap_is_large():
    rng = np.random.default_rng(1)
    (logits,) = _logits(1, rng)
    step = rng.integers(0, STEPS, ROWS)
    rule = _rule("prophet", prophet_gap=(3 * SHARE).astype(np.float32))
    kept, sure = _observe(rule, rule.init(ROWS, LENGTH), logits)
    ranked = np.sort(logits, axis=-1)
    gaps = ranked[..., -1] - ranked[..., -2]
    np.testing.assert_allclose(kept, gaps, rtol=1e-5)
    chosen = np.asarray(_select(rule, _context(IS_HOLE, step), TOKENS, sure, kept))
    _same(chosen, lambda row, holes: oracle.prophet(
        np.asarray(sure)[row].tolist(), gaps[row].tolist(), holes, 3 * float(SHARE[row]),
        int(step[row]), STEPS,
    ))  # fmt: skip


def test_what_is_stable_and_sure_is_committed():
    rng = np.random.default_rng(2)
    bound = rng.choice([0.01, 0.1, 0.5], ROWS).astype(np.float32)
    rule = _rule(
        "klass", threshold=(SHARE / 2).astype(np.float32), klass_divergence=bound, klass_steps=FEW
    )
    kept, history = rule.init(ROWS, LENGTH), []
    for logits in _logits(5, rng):
        kept, sure = _observe(rule, kept, logits)
        history.append(_softmax(logits))
        chosen = np.asarray(_select(rule, _context(IS_HOLE, 1), TOKENS, sure, kept))
        _same(chosen, lambda row, holes: oracle.klass(
            [p[row].tolist() for p in history], holes, float(SHARE[row]) / 2, float(bound[row]),
            int(FEW[row]),
        ), least=2)  # fmt: skip


def test_credit_raises_what_a_position_keeps_predicting():
    rng = np.random.default_rng(3)
    weight, decay, power = (rng.uniform(0, 1.5, ROWS).astype(np.float32) for _ in range(3))
    decay = np.minimum(decay, 1.0)
    rule = _rule("credit", credit_weight=weight, credit_decay=decay, credit_power=power)
    kept, history = rule.init(ROWS, LENGTH), []
    for logits in _logits(4, rng):
        kept, sure = _observe(rule, kept, logits)
        history.append(_softmax(logits))
        for row in range(0, ROWS, 5):
            for place in range(LENGTH):
                want = oracle.credited(
                    [p[row, place].tolist() for p in history], weight[row], decay[row], power[row]
                )
                assert sure[row, place] == pytest.approx(want, rel=2e-5)


def test_an_id_that_takes_the_place_of_another_takes_none_of_its_credit():
    ones = np.ones(ROWS, np.float32)
    rule = _rule("credit", credit_weight=ones, credit_decay=ones, credit_power=0 * ones)
    kept, sure = rule.init(ROWS, LENGTH), None
    for best in range(5):  # one more than a position has room for
        likely = np.where(np.arange(VOCAB) == best, 0.4, 0.1)
        kept, sure = _observe(rule, kept, np.log(np.tile(likely, (ROWS, LENGTH, 1))))
    # Each of the last four ids has a credit of 1, which doubles its probability.
    np.testing.assert_allclose(sure, 0.8 / (0.8 + 3 * 0.2 + 3 * 0.1), rtol=1e-5)


def test_dependences_decide_what_commits_together():
    rng = np.random.default_rng(8)
    scores = rng.exponential(size=(ROWS, LENGTH, LENGTH)) ** 3
    scores[:, :, 2] *= 1 + 3 * (np.arange(ROWS)[:, None] % 2)
    maps = (scores / scores.sum(2, keepdims=True)).astype(np.float32)
    values = {
        "threshold": 0.8 + SHARE / 10, "induced_threshold": 0.8 * SHARE, "apart_threshold": LESS,
        "dependence": SHARE / 3, "sink": 0.1 + SHARE / 5,
    }  # fmt: skip
    sure, kept = (rng.random((ROWS, LENGTH)).astype(np.float32) for _ in range(2))
    context = _context(IS_HOLE, 1)._replace(
        is_token_BL=jnp.asarray(~IS_HOLE), attention_BLL=jnp.asarray(maps)
    )
    chosen = np.asarray(_select(_rule("dawn", **values), context, TOKENS, sure, log_odds_of(kept)))
    names = {"threshold": "high", "induced_threshold": "induced", "apart_threshold": "low",
             "dependence": "edge", "sink": "sink"}  # fmt: skip
    is_anchor = ~IS_HOLE & (kept >= values["threshold"][:, None])
    _same(chosen, lambda row, holes: oracle.dawn(
        sure[row].tolist(), maps[row].tolist(), holes, np.flatnonzero(is_anchor[row]).tolist(),
        **{new: float(values[old][row]) for old, new in names.items()},
    ), least=5)  # fmt: skip


def test_what_reads_attention_maps_needs_a_network_that_shows_them():
    row = SamplingParams(order="dawn")
    with pytest.raises(
        ValueError, match="order='dawn' requires attention maps, which this network"
    ):
        row.table.check_model(row, FACTS)
    row.table.check_model(row, dataclasses.replace(FACTS, shows_maps=True))
    with pytest.raises(ValueError, match="cache='dual' computes no attention maps.*use cache="):
        SamplingParams(order="dawn", cache="dual")


def test_cycles_of_slow_and_fast_steps():
    rng = np.random.default_rng(4)
    steps, spread = 1 + FEW, rng.uniform(0, 3, ROWS).astype(np.float32)
    rule = _rule(
        "slow_fast", threshold=SHARE, slow_threshold=LESS, slow_steps=steps, slow_spread=spread
    )
    rows = [
        oracle.SlowFast(
            int(np.flatnonzero(IS_HOLE[row])[0]), SHARE[row], LESS[row], steps[row], spread[row]
        )
        for row in range(ROWS)
    ]
    left, state = IS_HOLE.copy(), rule.init(ROWS, LENGTH)
    select = jax.jit(lambda *inputs: rule.select(*inputs))
    for step in range(LENGTH):
        sure = rng.random((ROWS, LENGTH)).astype(np.float32)
        proposed = commit_cases.proposal(log_odds_of(sure), TOKENS)
        chosen, state = select(state, _context(left, step), proposed)
        chosen = np.asarray(chosen)
        for row in range(ROWS):
            holes = np.flatnonzero(left[row]).tolist()
            want = rows[row].step(sure[row], holes) if holes else set()
            assert set(np.flatnonzero(chosen[row]).tolist()) == want, (step, row)
        left &= ~chosen
    assert not left.any()


def test_verification_remasks_the_least_likely_and_fewer_than_were_committed():
    kind = np.random.default_rng(7).integers(0, 3, (ROWS, LENGTH))  # fresh, old, hole
    context = RemaskContext(
        _context(kind == 0), jnp.asarray(kind < 2), jnp.asarray(kind == 0),
        jnp.full(ROWS, LENGTH), jnp.log(SURE), None, KEYS,
    )  # fmt: skip
    rule = decoders.Wino(jnp.asarray(SHARE))
    chosen = np.asarray(jax.jit(lambda rule, context: rule.select((), context)[0])(rule, context))
    for row in range(ROWS):
        old, fresh = np.flatnonzero(kind[row] == 1).tolist(), int((kind[row] == 0).sum())
        want = oracle.wino(SURE[row].tolist(), old, fresh, float(SHARE[row]))
        assert set(np.flatnonzero(chosen[row]).tolist()) == want
    assert chosen.any() and rule.is_active().all()


def test_credit_of_any_weight_is_a_probability():
    rule = decoders.Credit(*(jnp.array([x]) for x in (0.9, 1e3, 1.0, 0.5)))
    kept, row_N = jax.tree.map(lambda x: x[0], rule.init(1, 2)), jnp.zeros(2, jnp.int32)
    logits_NV = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]))
    for _ in range(4):
        drawn = DrawnTokens(row_N, row_N, jnp.zeros(2), lambda: logits_NV)
        sure_N, kept = rule.score(kept, logits_NV, drawn)
    np.testing.assert_allclose(jax.nn.sigmoid(sure_N), 1.0, rtol=1e-6)


def test_what_a_rule_keeps_is_never_of_all_ids():
    for rule in TABLE.commit.values():
        state = rule.init(rule, 2, 3)  # type: ignore[arg-type]
        assert all(x.shape[0] == 2 and x.size <= 2 * 3 * 32 for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"common_ids": {1: 0.7, 2: 0.6}}, "common_ids=.* above 1; use"),
        ({"common_ids": 3}, "common_ids=3 is not a mapping; use {12: 0.05}"),
        ({"klass_steps": -1}, r"klass_steps=-1 is outside \[0, .*; use"),
        ({"order": "prophet", "resample": True}, "resample=True does not support the quota"),
        ({"order": "position_aware", "resample": True}, "resample does not support a quota"),
        ({"order": "slow_fast", "edit": True, "edit_token": "mask"}, "edit=True changes the span"),
        ({"verify_threshold": 1.5}, r"verify_threshold=1.5 is outside \[0, 1\]; use"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, match):
    with pytest.raises(ValueError, match=match):
        SamplingParams(**settings)
    row = SamplingParams(order="position_aware", common_ids={9: 0.1})
    with pytest.raises(ValueError, match="common_ids has id 9, outside the vocabulary of 7"):
        decoders.PositionAware.check_model(row, FACTS)
