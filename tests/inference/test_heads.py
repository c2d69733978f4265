"""The front door of a model with a sampler head and a critic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_model

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli.common import heads_line
from dlm_jax.config import Config, SamplingParams
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model, untrained_heads
from dlm_jax.inference.request import make_requests, settings_of_call
from dlm_jax.model.transformer import build
from dlm_jax.types import Network

TOKENIZER = toy_model.TOKENIZER
NETWORK = build(
    toy.config(vocab_size=TOKENIZER.vocab_size, add_sampler_head=True, add_critic_head=True)
)
SAMPLE = SamplingParams(steps=4, temperature=0.8, chain=("temperature",))
MODEL = Model(NETWORK, toy.random_params(NETWORK), TOKENIZER, max_length=32, sample=SAMPLE)
REFINED = {"schedule": "all", "remask": "scheduled", "remask_start": 0.9, "remask_end": 0.5}


def test_a_wavefront_is_a_setting_of_a_prompt_and_tells_its_waves():
    prompts = [{"prompt": "The ", "fill": fill, "seed": 3} for fill in ("parallel", "wavefront")]
    mixed = dlm_jax.generate(MODEL, prompts, schedule="all", steps=1)
    assert mixed.texts[0] != mixed.texts[1]
    # A hole a wave, from the prompt to the end of the canvas.
    assert mixed.counters.waves.tolist() == [0, 28]
    assert mixed.counters.bootstrapped.tolist() == [0, 0]
    assert mixed.counters.filled.tolist() == [28, 28]
    alone = dlm_jax.generate(MODEL, prompts[1:], schedule="all", steps=1)
    assert alone.texts == mixed.texts[1:]
    with Engine(MODEL, sizes=(1,)) as engine:
        common = {"schedule": "all", "steps": 1}
        requests = [make_requests(MODEL, prompt, common)[0] for prompt in prompts * 2]
        assert len(list(engine.run(requests))) == 4
        work = engine.report().counters
    assert (work.forwards, work.waves, work.bootstrapped, work.filled) == (4, 56, 0, 112)


def _settled(model, **settings):
    sample = settings_of_call(model, settings)
    return sample.fill, sample.order, sample.sampler_even_odd


def test_a_model_with_a_trained_sampler_head_is_filled_in_waves_unless_told_otherwise():
    """Even positions first, in the order that is given or recommended."""
    assert _settled(MODEL) == ("wavefront", "random", True)
    assert _settled(MODEL, order="threshold") == ("wavefront", "threshold", True)
    assert _settled(MODEL, order="random_filled") == ("wavefront", "random_filled", True)
    assert _settled(MODEL, sampler_even_odd=False) == ("wavefront", "random", False)
    assert _settled(MODEL, fill="parallel") == ("parallel", "random", False)
    assert _settled(MODEL, fill="wavefront") == ("wavefront", "random", False)
    untrained = dataclasses.replace(MODEL, untrained=("sampler",))
    line = heads_line(untrained, settings_of_call(untrained, {}))
    assert line == "heads: sampler (not trained yet), critic; fill=parallel, order=random"
    assert _settled(untrained) == _settled(toy_model.MODEL) == ("parallel", "random", False)
    asked = {"schedule": "all", "steps": 1}
    made = dlm_jax.generate(MODEL, [{"prompt": "The ", "seed": 3}], **asked)
    named = {"fill": "wavefront", "sampler_even_odd": True}
    again = dlm_jax.generate(MODEL, [{"prompt": "The ", "seed": 3} | named], **asked)
    assert made.texts == again.texts and made.counters.waves.tolist() == [28]


def test_a_sampler_head_that_never_saw_revealed_neighbours_does_not_fill_by_default():
    shipped = dlm_jax.load()
    assert _settled(shipped) == ("wavefront", "random_filled", True)
    assert shipped.config is not None
    asked = {"fill": "auto", "order": "random"}
    assert _settled(shipped, **asked) == ("wavefront", "random", True)
    heads = dataclasses.replace(shipped.config.heads, sampler_reveal=0.0)
    blind = dataclasses.replace(shipped, config=dataclasses.replace(shipped.config, heads=heads))
    assert _settled(blind, **asked)[0] == "parallel"


def test_a_head_is_untrained_up_to_the_step_at_which_its_training_begins():
    added = {"model.add_sampler_head": "true", "model.add_critic_head": "true"}
    heads = {"heads.start_sampler_iteration": "3", "heads.start_critic_iteration": "5"}
    config = configs.override(Config(), added | heads)
    found = [untrained_heads(config, step) for step in (0, 3, 4, 5, 6, None)]
    assert found == [("sampler", "critic")] * 2 + [("critic",)] * 2 + [(), ()]
    assert untrained_heads(configs.override(Config(), heads), 0) == ()


def _suspicious(wrong_id: int) -> Model:
    """Draws any token; its critic is sure that `wrong_id` is wrong and all else is right."""

    def trunk(params, tokens_BL, length_B, cache):
        return jax.nn.one_hot(tokens_BL, TOKENIZER.vocab_size), cache

    def flat(params, hidden_ND):
        return jnp.zeros((hidden_ND.shape[0], TOKENIZER.vocab_size))

    network = Network(
        init=lambda key: {},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, TOKENIZER.vocab_size),
        readout=flat,
        vocab_size=TOKENIZER.vocab_size,
        heads={"critic": lambda params, hidden_ND: 40.0 * hidden_ND[:, wrong_id] - 20.0},
    )
    return Model(network, {}, TOKENIZER, max_length=64, sample=SAMPLE)


@pytest.mark.parametrize("block_length", [pytest.param(0, marks=pytest.mark.slow), 20])
def test_what_the_critic_calls_wrong_becomes_a_hole_again(block_length):
    (wrong_id,) = TOKENIZER.encode("a")
    model = _suspicious(int(wrong_id))
    asked = REFINED | {"remask_by": "critic", "steps": 12}
    seen = list(dlm_jax.stream(model, ["a rat"], num_samples=4, block_length=block_length, **asked))
    remasked = 0
    for before, after in zip(seen, seen[1:], strict=False):
        for index, row in after.items():
            tokens = row.tokens
            assert TOKENIZER.decode(tokens[:5]) == "a rat"
            if row.block == before[index].block and row.status.name == "RUNNING":
                begin = 5 + row.block * block_length
                block = tokens[begin : begin + (block_length or 64)]
                assert wrong_id not in block
                remasked += int(np.sum(block == TOKENIZER.mask_id))
    assert remasked > 0


def _refused(model, **settings):
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(model, ["The "], **settings)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fill": "wavefront"}, "fill='wavefront' requires a sampler head, which this model lacks"),
        (
            {"remask_by": "critic", "remask": "scheduled"},
            "remask_by='critic' requires a critic head, which this model lacks",
        ),
    ],
)
def test_a_model_without_the_head_that_a_setting_needs_refuses_it(settings, said):
    assert said in _refused(toy_model.MODEL, **settings)


WAVES = dataclasses.replace(
    MODEL, sample=dataclasses.replace(SAMPLE, fill="wavefront", schedule="all", steps=2)
)


@pytest.mark.parametrize("fill", [pytest.param("parallel", marks=pytest.mark.slow), "wavefront"])
def test_read_back_changes_no_text_and_gives_the_distribution_of_each_draw(fill):
    asked = {
        "seed": 3, "gen_length": 12, "steps": 2, "fill": fill,
        "sampler_temperature": 0.7, "top_p": 0.95, "chain": ("temperature", "top_p"),
    }  # fmt: skip
    plain = dlm_jax.generate(MODEL, ["The ", ""], **asked, trace=True)
    made = dlm_jax.generate(MODEL, ["The ", ""], **asked, read_back=True)
    assert made.texts == plain.texts
    waves, num_read = made.counters.waves, 0
    assert (waves > 0).all() if fill == "wavefront" else (waves == 0).all()
    for row, records in enumerate(made.read_back):
        for one in records:
            place = one.candidates.ids.tolist().index(one.token)
            own = one.candidates.logprobs[place]
            assert one.probability == pytest.approx(np.exp(own), rel=1e-5)
            drawn = plain.trace.logprobs[row, one.candidates.step, one.candidates.index]
            assert own == pytest.approx(drawn, abs=1e-4)
            num_read += 1
    assert num_read == 24
    again = dlm_jax.replay(MODEL, MODEL.params, plain.trace)
    wanted = np.where(plain.trace.is_written, plain.trace.logprobs, 0.0)
    np.testing.assert_allclose(again, wanted, atol=1e-4)


def test_a_fill_that_cannot_give_candidates_refuses_read_back_by_name():
    with pytest.raises(ValueError, match="^fill='constrained' draws tokens .* read-back cannot"):
        settings_of_call(MODEL, {"fill": "constrained", "structure": "a{4}", "read_back": True})


def test_recommended_waves_yield_to_a_host_sampler_which_refuses_given_ones():
    settings = {"host_sampler": lambda c: c.ids[0]}
    assert settings_of_call(dlm_jax.load(), settings).fill == "parallel"
    asked = {"seed": 3, "gen_length": 6}
    for fill in ("auto", "wavefront"):
        model = dataclasses.replace(WAVES, sample=dataclasses.replace(WAVES.sample, fill=fill))
        made = dlm_jax.generate(model, ["The "], **asked, **settings)
        assert made.counters.waves.tolist() == [0]
        parallel = dlm_jax.generate(model, ["The "], **asked, **settings, fill="parallel")
        assert made.texts == parallel.texts
        assert dlm_jax.generate(model, ["The "], **asked).counters.waves[0] > 0
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(WAVES, ["The "], **asked, **settings, fill="wavefront")
    assert "use fill='parallel'" in str(refusal.value)
