"""Reverse steps of forward processes, against the enumerated law of their chains."""

import dataclasses
import functools
import itertools

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from canvases import make_advance
from oracles.processes import Enumerated
from scipy.stats import chisquare

import dlm_jax
from dlm_jax.config import Config, ObjectiveConfig, SamplingParams
from dlm_jax.data import text_ids
from dlm_jax.inference.model import Model
from dlm_jax.objectives.processes import PROCESSES, process_of
from dlm_jax.sampling.commit.commit_rule import Proposal
from dlm_jax.sampling.loop import start
from dlm_jax.sampling.noise import NoiseContext
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.types import Status

ROWS, MASK = 6_000, enumerable.MASK
STATES = (*enumerable.LETTERS, MASK)


@functools.cache
def oracle(name: str, temperature: float) -> Enumerated:
    table = np.asarray(enumerable.PARAMS["table"], np.float64)[..., np.array(STATES)]
    return Enumerated(table / temperature, name, len(STATES) - 1, enumerable.LETTERS)


def written(
    name: str, canvas: tuple[int, ...], tables=(), *, model=enumerable.MODEL, **settings
) -> np.ndarray:
    """How often each canvas of letters and MASK is the last one, ``[27]``.

    The network has one table, or another one at each step, or other parameters.
    """
    facts = dataclasses.replace(model.facts, process=process_of(name))
    advance = make_advance(model.program())
    sample = SamplingParams(
        **{"order": "posterior", "ignore_eos": True, "chain": ("temperature",)} | settings
    )
    packed = RowParams.pack([sample], facts), BUILT_IN.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROWS, *x.shape[1:])), packed)
    state = start(
        jnp.tile(jnp.array([canvas], jnp.int32), (ROWS, 1)),
        jnp.full(ROWS, len(canvas)),
        dataclasses.replace(row, seed_B=jnp.arange(ROWS, dtype=jnp.uint32)),
        rules,
        mask_id=MASK,
        frozen_BL=jnp.zeros((ROWS, len(canvas)), bool),
    )
    for table in tables:
        new = table if isinstance(table, dict) else {"table": table}
        state = advance(model.params | new, state, 1)
    state = advance(model.params, state, 1000)
    assert (np.asarray(state.status_B) == Status.DONE).all()
    assert (np.asarray(state.step_B) == sample.steps).all()
    return np.bincount(np.asarray(enumerable.code(state.canvas.tokens_BL)), minlength=27)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    is_text = law > 1e-12
    assert counts[~is_text].sum() == 0
    return chisquare(counts[is_text], law[is_text] / law.sum() * counts.sum()).pvalue


@pytest.mark.parametrize(
    "name",
    [
        name if name == "uniform" else pytest.param(name, marks=pytest.mark.slow)
        for name in PROCESSES
    ],
)
def test_texts_follow_the_law_of_the_enumerated_chain(name):
    empty = (MASK,) * enumerable.LENGTH
    for steps, temperature in ((2, 1.0), (4, 0.7), (8, 1.0), (64, 1.0)):
        law = oracle(name, temperature).law(np.linspace(1.0, 0.0, steps + 1))
        counts = written(name, empty, steps=steps, temperature=temperature)
        assert p_value(counts, law) > 1e-3
        if steps == 2:
            # The test would tell: the law of one step is another.
            assert p_value(counts, oracle(name, 1.0).law(np.linspace(1.0, 0.0, 2))) < 1e-3


@functools.cache
def joint() -> np.ndarray:
    """A law of texts, ``[27]``: the third letter is mostly told by the first two."""
    chance = {(0, 0, 0): 0.3, (0, 1, 1): 0.2, (1, 0, 1): 0.25, (1, 1, 0): 0.15, (1, 1, 1): 0.1}
    texts = [text if max(text) < 2 else None for text in oracle("masked", 1.0).states]
    law = np.array([0.0 if text is None else 0.01 + chance.get(text, 0.0) for text in texts])
    return law / law.sum()


@functools.cache
def knowing(name: str, v: float) -> Enumerated:
    return oracle(name, 1.0).knowing(joint(), v)


def log_table(chain: Enumerated):
    """The logits of `enumerable.NETWORK` of these distributions."""
    table = np.full((27, 3, enumerable.V), -1e9, np.float32)
    table[..., np.array(STATES)] = np.log(np.maximum(chain.p, 1e-30))
    return jnp.asarray(table)


@pytest.mark.parametrize("name", ["uniform", "mixed"])
def test_a_draft_is_where_the_chain_begins(name):
    """What stays of it tells more of the reverse step than texts from noise do."""
    draft, chain = (1, 0, 1), oracle(name, 1.0)
    start_law = np.eye(27)[chain.states.index(draft)]
    for steps in (1, 2, 8):
        law = chain.law(np.linspace(0.4, 0.0, steps + 1), start_law)
        counts = written(name, draft, steps=steps, posterior_start=0.4)
        assert p_value(counts, law) > 1e-3


def _read(params, tokens_BL, length_B, cache):
    """The logits of each position, the critic's logit, and the numbers of canvas and position."""
    number_B = enumerable.code(tokens_BL[:, :3])
    place_BL = jnp.broadcast_to(jnp.arange(3.0), (len(number_B), 3))
    whole_BL = jnp.broadcast_to(number_B[:, None].astype(jnp.float32), place_BL.shape)
    wrong_BL = params["wrong"][number_B]
    parts = (params["table"][number_B], *(x[..., None] for x in (wrong_BL, whole_BL, place_BL)))
    hidden_BLD = jnp.concatenate(parts, axis=-1)
    return jnp.pad(hidden_BLD, ((0, 0), (0, tokens_BL.shape[1] - 3), (0, 0))), cache


def _beside(params, left_NCD, hidden_ND, right_NCD):
    number_N, place_N = (hidden_ND[:, at].astype(jnp.int32) for at in (-2, -1))
    sides = (jnp.where(x[:, 0].sum(-1) > 0, x[:, 0].argmax(-1), 2) for x in (left_NCD, right_NCD))
    return params["beside"][(number_N, place_N, *sides)]


@functools.cache
def with_heads() -> Model:
    """The model of the tables, with a critic and a sampler head that are tables."""
    network = dataclasses.replace(
        enumerable.NETWORK, trunk=_read, readout=lambda params, x_ND: x_ND[:, : enumerable.V],
        heads={"critic": lambda params, x_ND: x_ND[:, -3], "sampler": SamplerReadout(_beside)},
    )  # fmt: skip
    params = {
        "table": enumerable.PARAMS["table"],
        "wrong": jnp.zeros((27, 3)),
        "beside": jnp.zeros((27, 3, 3, 3, enumerable.V)),
    }
    return Model(network, params, enumerable.TOKENIZER, max_length=3)


def knowing_wrong(chain: Enumerated, v: float):
    """The logits of the probabilities that the tokens of each canvas are wrong."""
    alpha, c = chain.at(v)
    own = np.take_along_axis(chain.p, np.array(chain.states)[..., None], axis=-1)[..., 0]
    noise = c[np.array(chain.states)]
    wrong = noise * (1 - own) / np.maximum(alpha * own + noise, 1e-30)
    return jnp.asarray(np.log(np.maximum(wrong, 1e-30)) - np.log1p(-np.minimum(wrong, 1 - 1e-7)))


def test_a_critic_that_knows_leaves_the_law_of_the_chain_as_it_is():
    chain, steps = oracle("uniform", 1.0), 3
    levels = np.linspace(1.0, 0.0, steps + 1)
    law = chain.law(levels)
    settings = {"steps": steps, "renew_by": "critic", "model": with_heads()}
    told = [{"wrong": knowing_wrong(chain, v)} for v in levels[:-1]]
    assert p_value(written("uniform", (MASK,) * 3, told, **settings), law) > 1e-3
    # Another critic gives other texts.
    assert p_value(written("uniform", (MASK,) * 3, **settings), law) < 1e-3


def test_the_tokens_that_the_critic_marks_are_renewed_and_no_others():
    draft, right, chain = (1, 0, 1), (0, 1, 0), oracle("uniform", 1.0)
    table = jnp.zeros((27, 3, enumerable.V)).at[:, jnp.arange(3), jnp.array(right)].set(9.0)
    for is_marked, text in (([False, True, False], (1, 1, 1)), ([True] * 3, right)):
        wrong = jnp.ones((27, 1)) * jnp.where(jnp.array(is_marked), 1e9, -1e9)[None]
        counts = written(
            "uniform", draft, [{"table": table, "wrong": wrong}], steps=1, posterior_start=0.3,
            temperature=0.0, renew_by="critic", model=with_heads(),
        )  # fmt: skip
        assert counts[chain.states.index(text)] == ROWS


@pytest.mark.slow
def test_the_critic_reads_the_candidates_at_mask_in_a_forward_pass_of_its_own():
    model = with_heads()
    config = Config(objective=ObjectiveConfig(process="mixed"))
    result = dlm_jax.generate(
        dataclasses.replace(model, config=config), [""], num_samples=32, steps=2, gen_length=3,
        order="posterior", renew_by="critic", ignore_eos=True,
    )  # fmt: skip
    # All tokens are MASK before the first step, and some or none are before the second.
    assert set(np.asarray(result.forwards).tolist()) == {3, 4}


@functools.cache
def markov() -> np.ndarray:
    """A law of texts, ``[27]``: a letter is mostly that before it, and tells all of the next."""
    stays = np.array([[0.9, 0.1], [0.2, 0.8]])
    texts = oracle("masked", 1.0).states
    law = [
        0.0 if max(x) > 1 else (0.6, 0.4)[x[0]] * stays[x[0], x[1]] * stays[x[1], x[2]]
        for x in texts
    ]
    return np.array(law)


def knowing_beside(name: str, v: float):
    """The logits of a sampler head that knows the law of a letter given a canvas at a level and the
    clean letters beside it, ``[27, 3, 3, 3, V]``; 2 is a letter that it does not see.
    """
    chain = oracle(name, 1.0)
    found = np.zeros((27, 3, 3, 3, enumerable.V))
    for text, chance in zip(chain.states, markov(), strict=True):
        shown = chance * chain.shown(text, v)
        for i in range(3):
            left, right = (text[j] if 0 <= j < 3 else 2 for j in (i - 1, i + 1))
            for seen in itertools.product({left, 2}, {right, 2}):
                found[(slice(None), i, *seen, text[i])] += shown
    return jnp.asarray(np.log(np.maximum(found, 1e-30)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "mixed"])
def test_texts_in_waves_follow_the_joint_law_in_any_number_of_steps(name):
    """Candidates are a joint draw of the clean text, which leaves reverse steps without error."""
    model = with_heads()
    for reverse in (1, 2, 3):
        levels = list(itertools.pairwise(np.linspace(1.0, 0.0, reverse + 1)))
        told = [
            {"table": log_table(oracle(name, 1.0).knowing(markov(), v)),
             "beside": knowing_beside(name, v)}
            for v, _ in levels
        ]  # fmt: skip
        counts = written(
            name, (MASK,) * 3, told, steps=len(levels), fill="wavefront", model=model,
        )  # fmt: skip
        assert p_value(counts, markov()) > 1e-3
        # Independent candidates follow another law.
        alone = oracle(name, 1.0).start()
        for v, to in levels:
            alone = oracle(name, 1.0).knowing(markov(), v).step(alone, v, to)
        assert p_value(counts, alone) < 1e-3


def _rule_and_context(settings: list[dict], places: int = 3, *, process="uniform", **context):
    """A rule with a row for each of the settings, and a step of these rows."""
    facts = dataclasses.replace(enumerable.MODEL.facts, process=process_of(process))
    rows = [SamplingParams(ignore_eos=True, **one) for one in settings]
    shape = (len(rows), places)
    tokens_BL = jnp.zeros(shape, jnp.int32)
    keys_B = jax.vmap(jax.random.key)(jnp.arange(len(rows)))
    fields = {
        "is_open_BL": jnp.ones(shape, bool),
        "key_B": keys_B,
        "tokens_BL": tokens_BL,
        "is_noise_BL": tokens_BL < 0,
        "random_BL": tokens_BL,
        "num_ids_B": tokens_BL[:, 0],
        "mask_id": MASK,
    }
    return BUILT_IN.pack(rows, facts).commit, NoiseContext(**fields | context)


@pytest.mark.parametrize("start_time", [1.0, 0.4])
def test_levels_fall_evenly_over_the_steps(start_time):
    cases = [(steps, step) for steps in range(1, 8) for step in range(steps)]
    settings = [
        {"order": "posterior", "steps": steps, "posterior_start": start_time} for steps, _ in cases
    ]
    steps_B, step_B = jnp.array(cases).T
    rule, context = _rule_and_context(settings, step_B=step_B, steps_B=steps_B)
    times = [np.linspace(start_time, 0.0, steps + 1)[step : step + 2] for steps, step in cases]
    np.testing.assert_allclose(np.stack(rule._levels(context), axis=1), times, atol=1e-6)


def test_a_block_ends_where_its_likeliest_tokens_repeat_and_the_mean_entropy_is_low():
    """Of 8 positions, 4 are open; the bound is 0.1 nats."""
    now = np.array([[1, 2, 3, 4, 5, 5, 5, 5]] * 5)
    before = now.copy()
    before[1, 2] = 0  # an open position that changed
    before[2, 6] = 0  # a closed one
    entropy = np.full((5, 8), 9.0)
    entropy[:, :4] = [[0.3, 0.01, 0.01, 0.01]]
    entropy[3, 0] = 0.5  # a mean of 0.13, but of 0.07 over 8 positions
    entropy[4, :4] = 0.11
    rule, context = _rule_and_context(
        [{"order": "entropy_renoise", "steps": 9, "renoise_stop": 0.1}] * 5, places=8,
        step_B=jnp.full(5, 2), steps_B=jnp.full(5, 9),
        is_open_BL=jnp.broadcast_to(jnp.arange(8) < 4, (5, 8)),
    )  # fmt: skip
    zeros_BL = jnp.zeros((5, 8))
    proposal = Proposal(jnp.asarray(now), zeros_BL, zeros_BL, -jnp.log(jnp.asarray(entropy)))
    state = jnp.asarray(now), jnp.asarray(before)
    assert np.asarray(rule.update(state, context, proposal)[0].is_final_B).tolist() == [
        True,
        False,
        True,
        False,
        False,
    ]
    last = context._replace(step_B=jnp.full(5, 8))
    assert np.asarray(rule.update(state, last, proposal)[0].is_final_B).all()


def accepted(entropy: np.ndarray, bound: float) -> list[int]:
    """Positions in rising order of entropy while the sum of those before is at most the bound."""
    order = [int(i) for i in np.argsort(entropy)]
    return [i for n, i in enumerate(order) if sum(entropy[j] for j in order[:n]) <= bound]


def entropy_law(bound: float, steps: int) -> np.ndarray:
    """The law of accepting, renoising and taking the likeliest tokens at the end, ``[27]``."""
    chain = oracle("uniform", 1.0)
    letters = [n for n, z in enumerate(chain.states) if max(z) < 2]
    now = np.zeros(27)
    now[letters] = 1 / len(letters)
    uniform = np.array([0.5, 0.5, 0.0])
    for step in range(steps):
        after = np.zeros(27)
        for n in letters:
            p = chain.p[n]
            entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0), axis=1)
            own = [p[i] if i in accepted(entropy, bound) else uniform for i in range(3)]
            if step == steps - 1:
                own = [np.eye(3)[p[i].argmax()] for i in range(3)]
            after += now[n] * np.einsum("i,j,k->ijk", *own).reshape(-1)
        now = after
    return now


@pytest.mark.parametrize(("bound", "steps"), [(0.0, 2), (0.7, 3), (9.0, 4)])
def test_candidates_of_little_entropy_stay_and_the_rest_is_new_noise(bound, steps):
    counts = written(
        "uniform", (MASK,) * 3, steps=steps, order="entropy_renoise", entropy_bound=bound,
        renoise_stop=0.0,
    )  # fmt: skip
    assert p_value(counts, entropy_law(bound, steps)) > 1e-3
    assert p_value(counts, entropy_law(bound, 1)) < 1e-3


def test_a_canvas_that_repeats_with_little_entropy_ends():
    result = dlm_jax.generate(
        model_of("uniform"), ["The "], steps=40, gen_length=8, max_length=16, temperature=1e-3,
        order="entropy_renoise", num_samples=4, ignore_eos=True,
    )  # fmt: skip
    # A row whose likeliest tokens never repeat takes all of its steps.
    assert (np.asarray(result.forwards) < 40).sum() >= 2
    with pytest.raises(ValueError, match="order='entropy_renoise' writes random tokens"):
        dlm_jax.generate(toy_model.MODEL, ["The "], order="entropy_renoise", max_length=16)


def model_of(process: str) -> Model:
    config = Config(objective=ObjectiveConfig(process=process))
    return dataclasses.replace(toy_model.MODEL, config=config)


@pytest.mark.slow
def test_a_uniform_model_writes_by_its_own_order():
    model = model_of("uniform")
    settings = {"steps": 4, "gen_length": 8, "max_length": 16, "ignore_eos": True}
    result = dlm_jax.generate(model, ["The ", "A rat "], temperature=[1.0, 0.0], seed=3, **settings)
    for text, prompt in zip(result.texts, ("The ", "A rat "), strict=True):
        assert text.startswith(prompt) and len(text) == len(prompt) + 8
    assert (np.asarray(result.forwards) == 4).all()
    alone = dlm_jax.generate(model, ["A rat "], temperature=0.0, seed=4, **settings)
    assert alone.texts[0] == result.texts[1]
    drafted = dlm_jax.generate(
        model, [{"prompt": "The ", "draft": "cat sat."}], posterior_start=1e-4, steps=2,
        max_length=16,
    )  # fmt: skip
    assert drafted.texts[0].endswith("cat sat.")


@pytest.mark.parametrize("order", ["posterior", "entropy_renoise"])
def test_noise_of_no_step_is_an_id_that_a_row_bans(order):
    model, banned = model_of("uniform"), {3, 5}
    shown = dlm_jax.stream(
        model, ["The "], num_samples=32, order=order, steps=4, gen_length=8, max_length=16,
        ignore_eos=True, fill="parallel", entropy_bound=0.0,
        logit_bias={str(id): -float("inf") for id in banned},
    )  # fmt: skip
    given = model.tokenizer.encode("The ").tolist()
    seen = set()
    for rows in list(shown)[1:]:
        for row in rows.values():
            assert row.tokens[: len(given)].tolist() == given
            seen |= set(row.tokens[len(given) :].tolist())
    assert seen == set(text_ids(model.tokenizer)) - banned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "random"}, "order='random' fills holes, but the model was trained with"),
        ({"order": "threshold"}, "use order='posterior'"),
        ({"remask": "scheduled"}, "remask='scheduled' is not supported with order='posterior'"),
        ({"cache": "prefix"}, "cache='prefix' is not supported with"),
        ({"cache": "exact"}, "cache='exact' is not supported with"),
        ({"fill": "constrained"}, "fill='constrained' is not supported with"),
        ({"fill": "wavefront", "order": "entropy_renoise"}, "by its own entropy"),
        ({"renew_by": "critic"}, "renew_by='critic' requires a critic head"),
        ({"guidance": 1.0}, "guidance=1.0 is not supported with"),
        ({"edit": True}, "edit=True is not supported with"),
        ({"renoise_start": 0.5}, "renoise_start=0.5 is not supported with"),
        ({"structure": "[a-c]+"}, "is not supported with"),
        ({"read_back": True}, "order='posterior' writes tokens without host samplers"),
        ({"trace": True}, "order='posterior' has no trace"),
        ({"posterior_start": 0.0}, "posterior_start=0.0 is outside (0, 1]"),
    ],
)
def test_what_needs_holes_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as caught:
        dlm_jax.generate(model_of("uniform"), ["The "], steps=2, max_length=16, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
