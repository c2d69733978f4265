"""Settings are refused at the door by name, and packed rows behave as their settings say."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
import transform_cases as tc
from oracles import chain as oracle
from oracles import near, samplers

from dlm_jax.config import SamplingParams, resolve
from dlm_jax.sampling import transforms as tf
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts

BAD = [
    ("temperature", -0.1), ("temperature", 1e-9), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
    ("typical_p", 0.0), ("xtc_probability", 2.0), ("xtc_threshold", 0.0),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("penalty_last_n", -2),
    ("dry_multiplier", -1.0), ("dry_base", 0.5), ("dry_allowed_length", 0),
    ("dry_breakers", (-1,)), ("mirostat", 3), ("mirostat_tau", -1.0), ("mirostat_eta", -0.1),
    ("min_keep", 0), ("min_keep", 65), ("top_k", 1.5), ("ignore_eos", 1), ("dynatemp_range", -1.0),
    ("dynatemp_exponent", 0.0), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.inf}),
    ("logit_bias", ((1, 2, 3),)), ("frequency_penalty", math.inf), ("top_n_sigma", math.inf),
    ("temperature", "hot"),
]  # fmt: skip
REALS = [
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p",
    "top_n_sigma", "xtc_probability", "xtc_threshold", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta",
]  # fmt: skip


def pack(rows, *, vocab_size, banned_ids=(), eos_ids=()) -> tf.Chain:
    """The chain of the rows, which name the same transforms."""
    return BUILT_IN.pack(
        rows,
        ModelFacts(vocab_size=vocab_size, banned_ids=tuple(banned_ids), eos_ids=tuple(eos_ids)),
    ).chain


@pytest.mark.parametrize(("name", "value"), [*BAD, *((name, math.nan) for name in REALS)])
def test_bad_value_is_refused_in_one_line_with_field_value_and_remedy(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message and "\n" not in message and "use" in message


@pytest.mark.parametrize(
    ("settings", "banned_ids", "match"),
    [
        ({"logit_bias": {40: 1.0}}, (), "^logit_bias has id 40, outside the vocabulary of 40; "),
        ({"dry_breakers": (99,)}, (), "^dry_breakers has id 99, outside .* use 0 to 39$"),
        ({}, (40,), "^banned_ids has id 40"),
        ({"logit_bias": {i: -math.inf for i in range(1, 40)}}, (0,), "^all 40 tokens are banned; "),
        (
            {"top_p": 0.5, "chain": ["top_k"]},
            (),
            "^top_p=0.5 requires 'top_p', which the chain lacks",
        ),
        ({"temperature": 0.0, "chain": ["top_k"]}, (), "^temperature=0.0 requires 'temperature'"),
        ({"temperature_end": 0.5, "chain": []}, (), "^temperature_end=0.5 requires 'temperature'"),
        ({"logit_bias": {1: 1.0}, "chain": ["top_k"]}, (), r"^logit_bias=\(.* requires 'bias'"),
        ({"mirostat": 1, "chain": ["top_k"]}, (), "^mirostat=1 requires 'mirostat'"),
    ],
)
def test_what_a_model_or_a_chain_does_not_allow_is_refused_with_the_remedy(
    settings, banned_ids, match
):
    row = SamplingParams(**settings)
    facts = ModelFacts(vocab_size=40, banned_ids=banned_ids)
    with pytest.raises(ValueError, match=match) as error:
        BUILT_IN.check_chain(row, facts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("chain", "match"),
    [
        (["top_kk"], "^chain has unknown name 'top_kk'; did you mean 'top_k'"),
        (["top_k", "top_k"], "^chain has 'top_k' 2 times; name it once"),
        ("top_k", "^chain='top_k' is not a list of names"),
        ([3], "is not a list of names"),
    ],
)
def test_a_chain_that_is_none_is_refused_by_name(chain, match):
    with pytest.raises(ValueError, match=match):
        SamplingParams(chain=chain)


def test_recommended_settings_are_defaults_and_given_ones_win_even_when_default():
    recommended = {"top_p": 0.9, "temperature": 0.7}
    assert resolve(recommended) == SamplingParams(top_p=0.9, temperature=0.7)
    assert resolve(recommended, {"top_p": 1.0}) == SamplingParams(top_p=1.0, temperature=0.7)
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        resolve({"temprature": 1.0})


def test_ignore_eos_without_eos_warns_and_is_off():
    row = SamplingParams(ignore_eos=True)
    with pytest.warns(UserWarning, match="no EOS"):
        BUILT_IN.check_chain(row, ModelFacts(vocab_size=8))
    chain = pack([row], vocab_size=8)
    assert not any(np.any(t.is_active()) for t in chain.transforms)


def banned_by(chain: tf.Chain) -> list[set[int]]:
    bans = chain.transforms[0]
    return [
        {int(i) for i, b in zip(ids, values, strict=True) if b == -np.inf}
        for ids, values in zip(np.asarray(bans.ids_BK), np.asarray(bans.bias_BK), strict=True)
    ]


def test_eos_is_banned_only_where_ignored_even_if_it_is_also_pad():
    rows = [SamplingParams(), SamplingParams(ignore_eos=True)]
    assert banned_by(pack(rows, vocab_size=8, banned_ids=[1, 2], eos_ids=[2, 3])) == [
        {1}, {1, 2, 3},
    ]  # fmt: skip


def test_bans_come_before_truncations_in_any_order():
    row = SamplingParams(top_k=1, logit_bias={3: -math.inf}, chain=["top_k", "bias"])
    chain = pack([row] * 3, vocab_size=tc.VOCAB, banned_ids=[0])
    x = np.zeros((6, tc.VOCAB), np.float32)
    x[:, 0], x[:, 3] = 9.0, 8.0
    out = np.asarray(tc.run(chain, x, tc.at(), tc.context()))
    assert np.all(out.max(-1) == 0.0)


def test_biases_within_a_bucket_share_a_program():
    trees = []
    for size in (0, 1, 5, 8, 9):
        row = SamplingParams(logit_bias={i: 1.0 for i in range(size)})
        shapes = jax.tree.map(np.shape, pack([row] * 2, vocab_size=40))
        trees.append((jax.tree.structure(shapes), str(jax.tree.leaves(shapes))))
    assert len(set(trees[:4])) == 1 and trees[4] != trees[0]


def test_mirostat_replaces_truncations_and_greedy_skips_noise():
    loud = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_n_sigma": 1.0,
            "xtc_probability": 1.0}  # fmt: skip
    rows = [SamplingParams(mirostat=2, **loud), SamplingParams(mirostat=1, temperature=0.0, **loud)]
    chain = pack(rows, vocab_size=40)
    named = zip(("bans", *rows[0].chain), chain.transforms, strict=True)
    active = {name: np.asarray(t.is_active()).tolist() for name, t in named}
    for name in ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma"):
        assert active[name] == [False, True]
    assert active["xtc"] == [False, False]
    assert active["mirostat"] == [True, False]


ROWS = [
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.3, "typical_p": 0.8, "min_p": 0.02, "frequency_penalty": 0.5,
     "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"mirostat": 2, "mirostat_tau": 2.0, "top_k": 2, "logit_bias": {3: 2.0, 5: -math.inf}},
    {"temperature": 0.9, "dynamic_delta": 0.4, "top_n_sigma": 1.5, "presence_penalty": 0.4,
     "xtc_probability": 1.0, "xtc_threshold": 0.1},
    {"mirostat": 1, "mirostat_tau": 1.5},
    {"top_p": 0.6, "min_keep": 4, "top_k": 200},
]  # fmt: skip
RENAMED = {"dynamic_delta": "dynatemp_range", "dynamic_exponent": "dynatemp_exponent"}


@pytest.mark.parametrize("half", [0, 1])
def test_full_chain_agrees_with_the_oracle_row_by_row(half):
    rows = ROWS[3 * half : 3 * half + 3]
    params = [SamplingParams(**{RENAMED.get(k, k): v for k, v in row.items()}) for row in rows]
    chain = pack(params, vocab_size=tc.VOCAB, banned_ids=[0, 1])
    place = tc.at()
    for seed in range(8):
        x, scene = tc.logits(("normal", "peaked")[seed % 2], seed), tc.context(seed)
        out = np.asarray(tc.run(chain, x, place, scene))
        for n, row in enumerate(np.asarray(place.row_N)):
            columns = (scene.tokens_BL, scene.is_visible_BL, scene.order_BL)
            tokens, visible, order = (np.asarray(c)[row].tolist() for c in columns)
            about = {
                "context": samplers.context_in_commit_order(tokens, visible, order),
                "run": samplers.run_left_of(tokens, visible, int(place.index_N[n])),
            }
            settings = {**rows[row], "banned": (0, 1)}
            expected = oracle.full_chain(x[n], settings, **about)
            doubt = near.undecided_in_chain(x[n], settings, **about)
            sure = np.array([i for i in range(tc.VOCAB) if i not in doubt])
            np.testing.assert_allclose(out[n][sure], expected[sure], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()),
        ({"ignore_eos": True, "logit_bias": {3: -math.inf}}, ()),
        ({"temperature": 0.0}, ("temperature",)),
        ({"dynatemp_range": 0.5, "top_p": 0.9}, ("temperature", "top_p")),
        ({"logit_bias": {3: 2.0}, "presence_penalty": 1.0}, ("bias", "penalties")),
        ({"xtc_probability": 0.5, "mirostat": 2}, ("xtc", "mirostat")),
        ({"dry_multiplier": 0.8, "typical_p": 0.5, "min_p": 0.1}, ("dry", "typical_p", "min_p")),
    ],
)
def test_the_part_of_a_chain_in_use_is_what_the_settings_ask_for(settings, names):
    row = SamplingParams(**settings)
    assert BUILT_IN.in_use(row) == names
    # What `pack` would refuse to leave out is in it.
    pack([dataclasses.replace(row, chain=names)], vocab_size=8, eos_ids=(7,))
