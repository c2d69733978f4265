"""Rules as objects and rules of one's own: the same as settings by name, wherever settings go."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

import dlm_jax
from dlm_jax import MinP, Renoise, Setting, Temperature, Threshold, TopK, TopP, per_row, rule
from dlm_jax.config import SamplingParams
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.results import TextReader
from dlm_jax.sampling.positions import fold
from dlm_jax.sampling.state import end_step

# It recommends a transform that a list of transforms leaves out.
SAMPLE = SamplingParams(
    gen_length=8, steps=8, temperature=0.8, top_k=3, ignore_eos=True,
    chain=("temperature", "top_k", "top_p"),
)  # fmt: skip
MODEL = dataclasses.replace(toy_model.MODEL, sample=SAMPLE)
PACE = Setting("pace", 2, "order=every_other: holes that a step commits", low=1, high=99)
SHIFT = Setting("shift", 0.0, "added to the logit of id 3", low=-1e6, high=1e6)


@rule
class EveryOther(dlm_jax.CommitRule):
    """Commits the leftmost holes, as many as it is told."""

    pace_B: jnp.ndarray = per_row(PACE)

    def select(self, state, context, proposal):
        """The first `pace` holes."""
        place_BL = jnp.cumsum(context.is_hole_BL, axis=1)
        return context.is_hole_BL & (place_BL <= self.pace_B[:, None]), state


@rule
class Shift(dlm_jax.LogitTransform):
    """Adds to one logit."""

    shift_B: jnp.ndarray = per_row(SHIFT)

    def apply(self, state, logits_NV, at):
        """The logits with the row's number added at id 3."""
        return logits_NV.at[:, 3].add(self.shift_B[at.row_N])


@rule
class Flat(dlm_jax.FillRule):
    """Draws from half the logits."""

    def propose(self, fill):
        """A candidate at each open position."""
        read = self.logits(fill, fill.tokens_BL, None)

        def draw(out, places_N, is_real_N):
            drawable_NV = read(places_N, is_real_N)
            return fill.draw(out, places_N, is_real_N, fill.logits(places_N), drawable_NV)

        return fold(fill.is_read_BL, fill.chunk, draw, fill.start())

    def logits(self, fill, tokens_BL, level_BL):
        """Half the logits of the LM head."""
        return lambda places_N, is_real_N: 0.5 * fill.logits(places_N)


@rule
class Threes(dlm_jax.CommitRule):
    """Writes id 3 in one hole after another, by a step of its own."""

    def select(self, state, context, proposal):
        """Not called."""
        raise NotImplementedError

    def step(self, program, params, state):
        """The state with one more token in each running row."""
        tokens_BL, runs_B = state.canvas.tokens_BL, state.is_running_B
        is_hole_BL = state.is_free_BL & (tokens_BL == program.mask_id) & runs_B[:, None]
        is_first_BL = is_hole_BL & (jnp.cumsum(is_hole_BL, axis=1) == 1)
        state = state._replace(
            canvas=state.canvas._replace(tokens_BL=jnp.where(is_first_BL, 3, tokens_BL)),
            committed_BL=jnp.where(is_first_BL, state.step_B[:, None], state.committed_BL),
        )
        no_B = jnp.zeros_like(runs_B)
        return end_step(program, state, runs_B, is_finite_B=~no_B, stays_B=no_B, changes_B=no_B)


def test_a_rule_brings_its_own_step_to_the_engine_and_its_text_is_streamed():
    settings = {"rules": [Threes], "order": "threes", "gen_length": 4, "steps": 9}
    made = dlm_jax.generate(MODEL, ["The", "A cat"], **settings)
    three = MODEL.tokenizer.decode([3])
    assert made.texts == (f"The{three * 4}", f"A cat{three * 4}")
    assert made.steps.tolist() == [4, 4] and made.forwards.tolist() == [0, 0]
    assert made.committed[0, 3:7].tolist() == [0, 1, 2, 3]
    (request,) = make_requests(MODEL, {"prompt": "The"}, settings)
    reader, pieces = TextReader(MODEL, request), []
    for rows in dlm_jax.stream(MODEL, ["The"], **settings):
        pieces += [piece.text for piece in reader.pieces(rows[0])]
    assert [piece for piece in pieces if piece] == [three] * 4
    for refused in ({"trace": True}, {"read_back": 2}, {"host_sampler": lambda *given: None}):
        with pytest.raises(ValueError, match="order='threes'"):
            dlm_jax.generate(MODEL, ["The"], **settings, **refused)


def _same(ours, theirs):
    for name in ("tokens", "logprobs", "committed", "steps", "forwards"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


def test_rule_objects_are_the_settings_that_name_them():
    objects = {"commit": Threshold(0.5), "transforms": [Temperature(0.7), TopP(0.9)]}
    ours = dlm_jax.generate(MODEL, ["A ", "The "], seed=3, **objects)
    named = {"order": "threshold", "threshold": 0.5, "chain": ("temperature", "top_p"),
             "temperature": 0.7, "top_p": 0.9, "top_k": 0}  # fmt: skip
    _same(ours, dlm_jax.generate(MODEL, ["A ", "The "], seed=3, **named))
    recommended = dlm_jax.generate(MODEL, ["A ", "The "], seed=3)
    assert ours.texts != recommended.texts


def test_what_a_prompt_gives_counts_before_what_the_call_gives():
    def sample(prompt, **common):
        return make_requests(MODEL, {"prompt": "A "} | prompt, common)[0].sample

    assert sample({"threshold": 0.3}, commit=Threshold(0.5)).threshold == 0.3
    assert sample({"order": "random"}, commit=Threshold(0.5)).order == "random"
    assert sample({"commit": Threshold(0.5)}, order="random").order == "threshold"
    chain = sample({"transforms": [TopP(0.5)]}, transforms=[TopK(2)]).chain
    assert chain == ("top_p",)
    assert sample({}, transforms=[]).chain == ()
    extended = sample({}, transforms=[..., doubled, TopP(0.5)])
    assert extended.chain == (*SAMPLE.chain, "function_doubled") and extended.function_doubled
    assert (extended.temperature, extended.top_k, extended.top_p) == (0.8, 3, 0.5)
    assert sample({}, transforms=[TopP(0.5, 2), TopK(5, 2)]).min_keep == 2
    for name in ("temperature", "threshold", "seed"):  # any name will do

        def named(logits_NV):
            return logits_NV

        named.__name__ = name
        assert sample({}, transforms=[..., named]).chain == (*SAMPLE.chain, f"function_{name}")


def doubled(logits_NV):
    return 2.0 * logits_NV


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"commit": Threshold(0.5), "threshold": 0.4}, "threshold is given twice"),
        (
            {"transforms": [TopP(0.9)], "chain": ("top_p",)},
            "transforms and chain both select a rule",
        ),
        (
            {"transforms": [TopP(0.9, 2), MinP(0.1)]},
            "min_keep is given twice, with different values; use one value",
        ),
        ({"transforms": [TopP(0.9), TopP(0.9)]}, "chain has 'top_p' 2 times; name it once"),
        ({"edit": Renoise()}, "edit is a Renoise, which is not a EditRule"),
        ({"commit": Threshold(np.array([0.1, 0.2]))}, "is not a number"),
        ({"commit": Threshold(1.5)}, "threshold=1.5 is outside [0, 1]"),
        ({"rules": 5}, "rules is 5; pass a list of classes"),
        ({"rules": [types]}, "rules=types defines no rule"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, said):
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(MODEL, ["A "], num_samples=3, **settings)
    assert said in str(refusal.value)


def _pace(row, prompt):
    """How many tokens each step committed."""
    committed = row[len(prompt) :]
    return [int((committed == step).sum()) for step in range(committed.max() + 1)]


def test_a_commit_rule_of_ones_own_is_a_setting_of_a_call_of_a_prompt_and_of_a_stream():
    prompts = ["A ", {"prompt": "The ", "pace": 3}, {"prompt": "A ", "order": "random"}]
    how = {"rules": [EveryOther], "order": "every_other", "pace": 4, "seed": 3}
    made = dlm_jax.generate(MODEL, prompts, **how)
    assert _pace(made.committed[0, :10], "A ") == [4, 4]
    assert _pace(made.committed[1, :12], "The ") == [3, 3, 2]
    assert _pace(made.committed[2, :10], "A ") == [1] * 8
    last = {}
    for canvases in dlm_jax.stream(MODEL, prompts, **how):
        last |= canvases
    for index, row in last.items():
        assert row.tokens.tolist() == made.tokens[index, : made.lengths[index]].tolist()
    objects = dlm_jax.generate(MODEL, ["A "], seed=3, commit=EveryOther(4))
    assert objects.texts[0] == made.texts[0]


@pytest.mark.slow
def test_a_transform_of_ones_own_joins_the_recommended_chain():
    prompts = [{"prompt": "A ", "shift": shift, "seed": 3} for shift in (0.0, 1e6)]
    plain, shifted = dlm_jax.generate(MODEL, prompts, rules=[Shift]).texts
    # Beside one that shifts or not: behind a top-k a transform that reads ids is not left out.
    assert plain == dlm_jax.generate(MODEL, prompts[:1], rules=[Shift]).texts[0]
    assert plain == dlm_jax.generate(MODEL, ["A "], rules=[Shift], seed=3).texts[0]
    without = {"top_k": 0, "seed": 3}
    assert (
        dlm_jax.generate(MODEL, ["A "], rules=[Shift], **without).texts
        == dlm_jax.generate(MODEL, ["A "], **without).texts
    )
    (letter,) = MODEL.tokenizer.decode([3])
    # Where the top-k leaves it, nothing else is drawn.
    assert shifted.count(letter) > plain.count(letter)
    alone = dlm_jax.generate(MODEL, ["A "], seed=3, transforms=[Shift(1e6)])
    assert alone.texts[0] == "A " + letter * 8


def test_a_function_of_logits_is_a_transform_and_takes_part_in_no_other_row():
    def sharpened(logits_NV):
        return 2.0 * logits_NV

    given = {"seed": 3, "gen_length": 8, "steps": 8}
    plain = dlm_jax.generate(MODEL, ["The "], transforms=[Temperature(0.5)], **given)
    found = dlm_jax.generate(MODEL, ["The "], transforms=[sharpened], **given)
    assert found.texts == plain.texts
    assert dlm_jax.generate(MODEL, ["The "], transforms=[sharpened], **given).texts == found.texts
    rest = dlm_jax.generate(MODEL, ["The "], transforms=[sharpened, TopK(1)], **given)
    assert rest.texts == dlm_jax.generate(MODEL, ["The "], temperature=0.0, **given).texts
    unbanned = dlm_jax.generate(
        MODEL, ["The "], transforms=[lambda logits_NV: 0.0 * jnp.nan_to_num(logits_NV)], **given
    )
    banned = {MODEL.tokenizer.mask_id, *MODEL.tokenizer.banned_ids}
    assert not banned & set(np.asarray(unbanned.tokens).ravel()[4:12].tolist())

    broken = dlm_jax.generate(MODEL, ["The "], transforms=[lambda x_NV: x_NV * jnp.nan], **given)
    assert broken.status == (dlm_jax.Status.NON_FINITE,)

    def short(logits_NV):
        return logits_NV[:, 1:]

    said = r"short.apply returned float32 .*; return float32 \[N, V\]"
    with pytest.raises(ValueError, match=said):
        dlm_jax.generate(MODEL, ["The "], transforms=[short], **given)


def test_read_back_of_a_fill_of_ones_own_gives_the_distribution_of_its_draws():
    settings = {"rules": [Flat], "fill": "flat", "seed": 3, "gen_length": 6, "steps": 3}
    read = dlm_jax.generate(MODEL, ["The "], read_back=True, **settings).read_back[0]
    traced = dlm_jax.generate(MODEL, ["The "], trace=True, **settings).trace
    found = {
        (r.place, r.token): r.candidates.logprobs[np.asarray(r.candidates.ids) == r.token][0]
        for r in read
    }
    assert len(found) == 6
    for step, place in np.argwhere(traced.is_written[0]):
        token, logprob = traced.tokens[0, step, place], traced.logprobs[0, step, place]
        np.testing.assert_allclose(found[place, token], logprob, rtol=1e-4, atol=1e-6)
