"""Reverse steps of forward processes, against the enumerated law of their chains."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from oracles.processes import Enumerated
from scipy.stats import chisquare

import dlm_jax
from dlm_jax.config import Config, ObjectiveConfig, SampleConfig
from dlm_jax.diffusion.processes import PROCESSES, process_of
from dlm_jax.inference.model import Model
from dlm_jax.sampling.loop import make_advance
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.sampling.state import start
from dlm_jax.types import Status

ROWS, MASK = 6_000, enumerable.MASK
STATES = (*enumerable.LETTERS, MASK)


@functools.cache
def oracle(name: str, temperature: float) -> Enumerated:
    table = np.asarray(enumerable.PARAMS["table"], np.float64)[..., np.array(STATES)]
    return Enumerated(table / temperature, name, len(STATES) - 1, enumerable.LETTERS)


@functools.cache
def _advance():
    return make_advance(enumerable.MODEL.program())


def written(name: str, canvas: tuple[int, ...], tables=(), **settings) -> np.ndarray:
    """How often each canvas of letters and MASK is the last one, ``[27]``.

    The network has one table, or another one at each step.
    """
    facts = enumerable.MODEL.facts._replace(process=process_of(name))
    sample = SampleConfig(
        **{"order": "posterior", "ignore_eos": True, "chain": ("temperature",)} | settings
    )
    one = SimpleNamespace(**vars(sample), seed=0, capacity=0)
    packed = RowParams.pack([one], facts), BUILT_IN.pack([sample], facts)
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
        state = _advance()(enumerable.PARAMS | {"table": table}, state, 1)
    state = _advance()(enumerable.PARAMS, state, 1000)
    assert (np.asarray(state.status_B) == Status.DONE).all()
    assert (np.asarray(state.step_B) == sample.steps).all()
    return np.bincount(np.asarray(enumerable.code(state.canvas.tokens_BL)), minlength=27)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    is_text = law > 1e-12
    assert counts[~is_text].sum() == 0
    return chisquare(counts[is_text], law[is_text] / law.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("name", PROCESSES)
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


def levels_of(reverse: int, correctors: int) -> list[tuple[float, float]]:
    """Levels before and after each step; those of a corrector step are equal."""
    found = []
    for v, to in itertools.pairwise(np.linspace(1.0, 0.0, reverse + 1)):
        found += [(v, to)] + [(to, to)] * (correctors if to > 0 else 0)
    return found


def corrected_law(name: str, levels: list[tuple[float, float]], moving: int) -> np.ndarray:
    """The law of the texts of a network that knows all posteriors, ``[27]``."""
    now = oracle(name, 1.0).start()
    for v, to in levels:
        chain = knowing(name, v)
        now = now @ chain.corrector(v, moving) if v == to else chain.step(now, v, to)
    return now


@pytest.mark.parametrize("name", PROCESSES)
def test_corrector_steps_leave_noised_texts_as_they_are_and_bring_texts_nearer_to_the_joint(name):
    for v in (0.25, 0.8):
        chain = knowing(name, v)
        noised = chain.noised(joint(), v)
        flow = noised[:, None] * chain.corrector(v, 1)
        np.testing.assert_allclose(flow, flow.T, atol=1e-12)
        # Positions that move together do not know of each other.
        assert abs(noised @ chain.corrector(v, 3) - noised).sum() > 1e-2
    for reverse, correctors in ((2, 2), (4, 2), (8, 1)):
        law = corrected_law(name, levels_of(reverse, correctors), 1)
        alone = corrected_law(name, levels_of(reverse, 0), 1)
        assert abs(law - joint()).sum() < abs(alone - joint()).sum()


@pytest.mark.parametrize("name", PROCESSES)
def test_texts_with_corrector_steps_follow_the_law_of_the_enumerated_chain(name):
    for reverse, correctors, moving in ((2, 3, 1), (4, 1, 2), (8, 1, 1)):
        levels = levels_of(reverse, correctors)
        law = corrected_law(name, levels, moving)
        tables = [log_table(knowing(name, v)) for v, _ in levels]
        counts = written(
            name, (MASK,) * enumerable.LENGTH, tables, steps=len(levels),
            corrector_steps=correctors, corrector_share=moving / 3,
        )  # fmt: skip
        assert p_value(counts, law) > 1e-3
        if moving == 2 and name != "masked":  # the test would tell
            assert p_value(counts, corrected_law(name, levels, 1)) < 1e-3


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "random"}, "order='random' fills holes, but the model was trained with"),
        ({"order": "threshold"}, "use order='posterior'"),
        ({"remask": "wino"}, "remask='wino' is not supported with order='posterior'"),
        ({"cache": "prefix"}, "cache='prefix' is not supported with"),
        ({"cache": "exact"}, "cache='exact' is not supported with"),
        ({"fill": "speculative"}, "fill='speculative' is not supported with"),
        ({"guidance": 1.0}, "guidance=1.0 is not supported with"),
        ({"edit": True}, "edit=True is not supported with"),
        ({"renoise_start": 0.5}, "renoise_start=0.5 is not supported with"),
        ({"structure": "[a-c]+"}, "is not supported with"),
        ({"read_back": True}, "order='posterior' writes tokens without host samplers"),
        ({"trace": True}, "order='posterior' has no trace"),
        ({"open_blocks": 2}, "open_blocks=2"),
        ({"posterior_start": 0.0}, "posterior_start=0.0 is outside (0, 1]"),
    ],
)
def test_what_needs_holes_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as caught:
        dlm_jax.generate(model_of("uniform"), ["The "], steps=2, max_length=16, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
