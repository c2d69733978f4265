"""The front door: text in, text out, and refusals in one line."""

import dataclasses
import math
import re

import numpy as np
import pytest
import saved_model
import toy_model

import dlm_jax
from dlm_jax.config import SamplingParams, resolve
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.generate import chain_report
from dlm_jax.inference.request import make_requests, only_chains_in_use
from dlm_jax.inference.slots import Slots
from dlm_jax.types import Status

MODEL = dataclasses.replace(toy_model.MODEL, sample=SamplingParams(steps=6, temperature=0.8))
PROMPT = "The "
# The chain is short, so that it compiles fast.
LEFT_TO_RIGHT = SamplingParams(
    gen_length=5, steps=5, order="left_to_right", chain=("temperature",), temperature=0.8
)
SHORT = dataclasses.replace(MODEL, sample=LEFT_TO_RIGHT)


def only_vowels(candidates):
    vowels = [MODEL.tokenizer.piece_id(vowel) for vowel in "ae"]
    return candidates.choose([token in vowels for token in candidates.ids])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


def _refused(*args, **kwargs):
    """The line with which a call is refused."""
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(*args, **kwargs)
    return str(refusal.value)


def test_texts_keep_their_prompt_and_fill_the_canvas():
    result = dlm_jax.generate(MODEL, [PROMPT, ""], num_samples=2, ignore_eos=True)
    assert result.lengths.tolist() == [MODEL.max_length] * 4
    assert all(text.startswith(PROMPT) for text in result.texts[:2])
    assert set(result.status) == {Status.DONE}
    assert result.steps.tolist() == [6] * 4
    for tokens, length, text in zip(result.tokens, result.lengths, result.texts, strict=True):
        assert not set(tokens[:length].tolist()) & set(MODEL.tokenizer.banned_ids)
        assert MODEL.tokenizer.decode(tokens[:length]) == text


def test_a_row_ends_with_the_first_eos_it_generates():
    eos = MODEL.tokenizer.eos_id
    # Forced: left to right, a huge bias makes every token EOS in one row and none in the other.
    prompts = [
        {"prompt": PROMPT, "logit_bias": {eos: 1e9}},
        {"prompt": PROMPT, "logit_bias": {eos: -math.inf}},
    ]
    result = dlm_jax.generate(MODEL, prompts, order="left_to_right")
    assert result.lengths.tolist() == [len(PROMPT) + 1, MODEL.max_length]
    assert result.steps.tolist() == [1, 6]
    assert result.texts[0] == PROMPT
    assert result.tokens[0, len(PROMPT)] == eos
    behind = slice(len(PROMPT) + 1, None)
    assert (result.tokens[0, behind] == MODEL.tokenizer.pad_id).all()
    assert (result.committed[0, behind] == -1).all()
    assert (result.logprobs[0, behind] == 0).all()


def test_given_settings_override_what_the_model_recommends():
    recommended = dlm_jax.generate(MODEL, [PROMPT])
    assert dlm_jax.generate(MODEL, [PROMPT], ignore_eos=True).steps.tolist() == [6]
    asked = {"steps": 3, "temperature": 0.0, "order": "low_confidence", "schedule": "cosine"}
    given = dlm_jax.generate(MODEL, [PROMPT], **asked)
    assert given.steps.tolist() == [3]
    recommends = dataclasses.replace(MODEL, sample=SamplingParams(**asked))
    assert dlm_jax.generate(recommends, [PROMPT]).texts == given.texts
    assert dlm_jax.generate(MODEL, [PROMPT], temperature=1.0).texts != recommended.texts


def test_a_given_temperature_holds_at_all_steps_unless_its_end_is_given():
    recommends = dataclasses.replace(
        MODEL, sample=SamplingParams(temperature=0.5, temperature_end=2)
    )
    greedy = {"order": "low_confidence", "schedule": "cosine", "temperature": 0.0}
    ours, theirs = (
        dlm_jax.generate(recommends, [PROMPT], seed=seed, **greedy).texts for seed in (1, 2)
    )
    assert ours == theirs
    asked = resolve({"temperature": 0.5, "temperature_end": 2}, {"temperature_end": 1.5})
    assert (asked.temperature, asked.temperature_end) == (0.5, 1.5)
    both = resolve({"temperature_end": 2}, {"temperature_end": 3, "temperature": 0.5})
    assert (both.temperature, both.temperature_end) == (0.5, 3)
    # The settings of a prompt are a layer above those of the call.
    call = {"temperature": 0.5, "temperature_end": 2.0}
    (made,) = make_requests(MODEL, {"prompt": PROMPT, "temperature": 0.0}, call)
    assert (made.sample.temperature, made.sample.temperature_end) == (0.0, -1.0)


# Canvases while they are denoised


def test_a_stream_shows_every_step_and_ends_with_what_generate_returns():
    prompts = [PROMPT, {"template": "A <hole:3>t<hole:4>", "steps": 4}]
    whole = dlm_jax.generate(SHORT, prompts, seed=3)
    shown = list(dlm_jax.stream(SHORT, prompts, seed=3, every=2))
    assert [canvas[0].steps for canvas in shown] == [0, 2, 4, 5]
    last = {}
    for canvas in shown:
        last |= canvas
    for place, row in last.items():
        length = whole.lengths[place]
        assert row.tokens.tolist() == whole.tokens[place, :length].tolist()
        assert row.committed.tolist() == whole.committed[place, :length].tolist()
        assert row.status is Status.DONE
    assert (shown[0][0].tokens[len(PROMPT) :] == SHORT.tokenizer.mask_id).all()
    (scores,) = {whole.logprobs.shape}
    assert scores == whole.tokens.shape


def test_a_program_that_fails_ends_a_call_and_a_stream_alike(monkeypatch):
    def broken(*arguments):
        raise MemoryError("no room for a step")

    monkeypatch.setattr(Slots, "advance", broken)
    with pytest.raises(MemoryError, match="no room for a step"):
        dlm_jax.generate(SHORT, [PROMPT])
    with pytest.raises(MemoryError, match="no room for a step"):
        list(dlm_jax.stream(SHORT, [PROMPT]))


# Host samplers and read-back


def test_a_prompt_may_have_a_host_sampler_and_others_come_out_bit_for_bit_as_without_it():
    prompts = ["A ", {"prompt": PROMPT, "host_sampler": only_vowels}, ""]
    mixed = dlm_jax.generate(SHORT, prompts, seed=30, batch_size=1)
    assert re.fullmatch("The [ae]{5}", mixed.texts[1])
    assert mixed.read_back == ((), (), ())
    plain = dlm_jax.generate(SHORT, ["A ", PROMPT, ""], seed=30, batch_size=1)
    assert plain.texts[1] != mixed.texts[1]
    for name in ("tokens", "logprobs", "committed", "steps", "forwards"):
        ours, theirs = getattr(mixed, name)[[0, 2]], getattr(plain, name)[[0, 2]]
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    # The others ran in the compiled loop, not beside it in its single steps.
    with Engine(SHORT, batch_size=1) as engine:
        for index, prompt in enumerate(prompts):
            (request,) = make_requests(SHORT, prompt, {"seed": 30}, index)
            engine.submit(only_chains_in_use([request])[0])
        found = {row.number: row for row in engine.run()}
        assert set(engine.report().programs) == {"rows=1 canvas=64 host", "rows=1 canvas=64"}
    for number, row in found.items():
        np.testing.assert_array_equal(row.tokens, mixed.tokens[number, : row.tokens.size])


def test_read_back_tells_every_commit_of_the_prompts_that_ask_in_order():
    prompts = [PROMPT, {"prompt": "A ", "read_back": True}]
    result = dlm_jax.generate(SHORT, prompts, seed=30, max_candidates=3)
    plain = dlm_jax.generate(SHORT, [PROMPT, "A "], seed=30, batch_size=1)
    assert result.texts == plain.texts
    none, records = result.read_back
    assert none == ()
    assert [r.candidates.index for r in records] == list(range(2, 7))
    assert [r.candidates.step for r in records] == list(range(5))
    for record in records:
        assert record.candidates.row == 1
        assert record.token == result.tokens[1, record.candidates.index]
        assert record.candidates.ids.size == 3 < record.candidates.num_survivors
        assert 0 < record.probability <= 1


def test_report_says_where_each_part_of_a_chain_runs():
    parts = ["bans: device", "temperature: device"]
    assert chain_report(SHORT).splitlines() == [*parts, "draw: device"]
    report = chain_report(SHORT, host_sampler=only_vowels, temperature=0.5).splitlines()
    assert report == [*parts, "choice among the remaining candidates: host (only_vowels)"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_candidates": 0}, "max_candidates=0 must be an integer of at least 1"),
        ({"prompts": ["", {"read_bak": True}]}, "prompt 1: read_bak=True is not a sampling"),
        ({"prompts": ["Zebra"]}, "'Z' (U+005A) at position 0"),
        ({"prompts": []}, "nothing to generate"),
        ({"temperature": -0.5}, "temperature=-0.5 is outside [0, "),
        ({"num_samples": 0}, "num_samples=0 must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"gen_length": 29, "prompts": [PROMPT]}, "use gen_length=28 or less"),
        ({"max_length": 0}, "max_length=0"),
        ({"prompts": [5]}, "neither a string nor"),
    ],
)
def test_bad_argument_is_refused_in_one_line(settings, said):
    assert said in _refused(MODEL, **settings)


@pytest.mark.slow
def test_only_the_transforms_in_use_are_compiled_and_the_tokens_stay_the_same(monkeypatch):
    model = dataclasses.replace(toy_model.MODEL, sample=SamplingParams(steps=4, gen_length=8))
    chains = []

    class Spy(Engine):
        def submit(self, request, *options, **more):
            chains.append(request.sample.chain)
            return super().submit(request, *options, **more)

    monkeypatch.setattr("dlm_jax.inference.generate.Engine", Spy)
    asked = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}
    prompts = [{"prompt": "A ", "min_p": 0.1}, {"prompt": PROMPT, "guidance": 1.0}]
    ours = dlm_jax.generate(model, prompts, seed=5, **asked)
    assert chains == [("penalties", "temperature", "top_p", "min_p")] * 2
    whole = [request for index, prompt in enumerate(prompts)
             for request in make_requests(model, prompt, asked | {"seed": 5}, index)]  # fmt: skip
    for place, request in enumerate(whole):
        assert request.sample.chain == SamplingParams().chain
        with Engine(model, batch_size=1) as engine:
            (row,) = engine.run([request])
        n = ours.lengths[place]
        np.testing.assert_array_equal(row.tokens, ours.tokens[place, :n])
        np.testing.assert_array_equal(row.logprobs, ours.logprobs[place, :n])
        np.testing.assert_array_equal(row.committed, ours.committed[place, :n])
