"""The pure sampler takes the engine's steps, inside of what JAX offers."""

from __future__ import annotations

import dataclasses
import functools

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_model

import dlm_jax
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.settings import SettingError

PROMPTS = ("The cat", "A rat ran. T", "", "T")
LENGTH, CANVAS = 20, 64

CASES = {
    "wavefront": {"fill": "wavefront", "order": "random_filled"},
    "edits": {
        "fill": "parallel", "order": "threshold", "threshold": 0.3, "edit": True, "resample": True,
        "insert_ratio_start": 0.2, "delete_ratio_start": 0.2,
    },
    "remask": {
        "fill": "parallel", "order": "low_confidence", "remask": "scheduled", "top_k": 6,
        "temperature": 0.8, "guidance": 0.5,
    },
    "ancestral": {"fill": "parallel", "order": "ancestral"},
    "refine": {
        "fill": "wavefront", "order": "random_filled", "schedule": "all", "remask": "scheduled",
        "remask_by": "critic", "temperature": 0.0,
    },
}  # fmt: skip
"""Every fill and edit, and orders, remask rules and transforms among them."""


@functools.cache
def model() -> Model:
    network = build(toy.config(
        vocab_size=toy_model.TOKENIZER.vocab_size, add_sampler_head=True, sampler_context=2,
        add_critic_head=True,
    ))  # fmt: skip
    params = toy.random_params(network)
    return Model(network, params, toy_model.TOKENIZER, max_length=32)


def rows(count: int = len(PROMPTS)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Canvases of the prompts with `LENGTH` holes each, their lengths, and seeds from 5."""
    tokens = np.full((count, CANVAS), toy_model.TOKENIZER.mask_id, np.int32)
    lengths = np.zeros(count, np.int32)
    for row, prompt in enumerate(PROMPTS[:count]):
        ids = toy_model.TOKENIZER.encode(prompt)
        tokens[row, : ids.size], lengths[row] = ids, ids.size + LENGTH
    return tokens, lengths, np.arange(5, 5 + count).astype(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_generate_bit_for_bit(case):
    settings = {"steps": 8} | CASES[case]
    wanted = dlm_jax.generate(model(), PROMPTS, seed=5, gen_length=LENGTH, **settings)
    sampler = dlm_jax.sampler(model(), **settings)

    def sample(params, tokens, lengths, seeds):
        return sampler.finish(sampler.run(params, sampler.init(tokens, lengths, seeds), 100))

    sample = jax.jit(sample, compiler_options=dict(sampler.compiler_options))
    found = sample(model().params, *rows())
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    for name in ("tokens", "committed", "logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    np.testing.assert_array_equal(found.status, wanted.status)
    np.testing.assert_array_equal(found.counters.forwards, wanted.forwards)


# A model of eight texts compiles fast.


@functools.cache
def tiny(trace: bool = True) -> dlm_jax.Sampler:
    return dlm_jax.sampler(
        enumerable.MODEL, fill="parallel", order="random", steps=2, ignore_eos=True,
        temperature=enumerable.TEMPERATURE, trace=trace,
        logit_bias=tuple((i, float("-inf")) for i in range(2, enumerable.V)),
    )  # fmt: skip


def begun(seeds, trace: bool = True):
    shape = seeds.shape[0], enumerable.LENGTH
    tokens = jnp.full(shape, enumerable.MASK, jnp.int32)
    return tiny(trace).init(tokens, jnp.full(shape[0], enumerable.LENGTH), seeds)


def sampled(params, seeds):
    return tiny().finish(tiny().run(params, begun(seeds), 2))


def by_scan(params, seeds):
    """The same with `step` in a scan of fixed length."""

    def one(state, _):
        return tiny().step(params, state), None

    return tiny().finish(jax.lax.scan(one, begun(seeds), None, length=2)[0])


SEEDS = jnp.arange(16, dtype=jnp.uint32)


def _equal(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_scan_of_steps_is_a_run():
    _equal(jax.jit(by_scan)(enumerable.PARAMS, SEEDS), jax.jit(sampled)(enumerable.PARAMS, SEEDS))


@pytest.mark.slow
def test_rows_are_the_same_under_vmap_over_seeds_and_over_parameters():
    wanted = jax.jit(sampled)(enumerable.PARAMS, SEEDS).tokens
    each = jax.jit(jax.vmap(lambda seed: sampled(enumerable.PARAMS, seed[None]).tokens[0]))
    np.testing.assert_array_equal(each(SEEDS), wanted)
    several = jax.tree.map(lambda x: jnp.stack([x, -x]), enumerable.PARAMS)
    found = jax.jit(jax.vmap(lambda params: sampled(params, SEEDS).tokens))(several)
    np.testing.assert_array_equal(found[0], wanted)
    negated = jax.tree.map(jnp.negative, enumerable.PARAMS)
    np.testing.assert_array_equal(found[1], jax.jit(sampled)(negated, SEEDS).tokens)
    assert (found[0] != found[1]).any()


@pytest.mark.slow
def test_rows_are_the_same_under_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    split = jax.shard_map(
        lambda params, seeds: sampled(params, seeds).tokens, mesh=mesh,
        in_specs=(spec(), spec("data")), out_specs=spec("data"), check_vma=False,
    )  # fmt: skip
    wanted = jax.jit(sampled)(enumerable.PARAMS, SEEDS).tokens
    np.testing.assert_array_equal(jax.jit(split)(enumerable.PARAMS, SEEDS), wanted)


EOS = enumerable.TOKENIZER.eos_id


def test_rows_end_with_the_first_eos_that_they_wrote():
    state = begun(SEEDS[:2], trace=False)
    frozen_BL = jnp.array([[False] * 3, [True, False, False]])
    canvas = state.canvas._replace(tokens_BL=jnp.array([[0, EOS, 1], [EOS, 0, 1]]))
    found = tiny(False).finish(state._replace(canvas=canvas._replace(frozen_BL=frozen_BL)))
    assert found.lengths.tolist() == [2, 3]
    assert found.tokens.tolist() == [[0, EOS, enumerable.TOKENIZER.pad_id], [EOS, 0, 1]]


def test_rows_have_their_own_seeds_and_only_their_drafts_can_be_rewritten():
    sampler = dlm_jax.sampler(
        enumerable.MODEL, fill="parallel", order="random", schedule="all", steps=2, resample=True,
        ignore_eos=True,
    )  # fmt: skip
    tokens = jnp.array([[0, 1, enumerable.MASK]] * 2)
    is_draft = jnp.array([[False, True, False], [True, False, False]])
    state = sampler.init(tokens, jnp.array([3, 3]), jnp.array([1, 2]), is_draft)
    assert state.row.seed_B.tolist() == [1, 2]
    assert state.canvas.frozen_BL.tolist() == [[True, False, False], [False, True, False]]
    texts = jax.jit(sampled)(enumerable.PARAMS, SEEDS).tokens
    assert len({tuple(row) for row in texts.tolist()}) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "x"}, "^prompt is not a setting of a sampler"),
        ({"orders": "random"}, "orders"),
        ({"temperature": [0.5, 1.0]}, "temperature=.* is not a number"),
        ({"trace": True, "mirostat": 1}, "^mirostat=1 has no trace"),
    ],
)
def test_settings_are_refused_at_the_door(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        dlm_jax.sampler(enumerable.MODEL, **settings)
    assert "\n" not in str(caught.value)


def test_rows_are_refused_at_the_door():
    tokens, two = jnp.full((2, 3), enumerable.MASK), jnp.array([3, 3])
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \[\(3,\), \(2,\), \(2, 3\)\]"):
        tiny().init(tokens, jnp.ones(3), two)
    with pytest.raises(ValueError, match="^row 0 of length 3 needs 1 to 3 tokens with ids 0 to"):
        tiny().init(tokens.at[0, 1].set(-1), two, two)
    with pytest.raises(ValueError, match=r"is_draft have shapes \(2, 3\)"):
        tiny().init(tokens, two, two, jnp.zeros(3, bool))
    with pytest.raises(ValueError, match="row 1 of length 4"):
        tiny().init(tokens, jnp.array([3, 4]), two)
    grows = dlm_jax.sampler(
        dataclasses.replace(enumerable.MODEL, max_length=9), edit=True, resample=True,
        schedule="all", edit_token="mask",
    )  # fmt: skip
    with pytest.raises(SettingError, match="^tokens have 3 positions, but a row can grow to 9"):
        grows.init(tokens, two, two)
