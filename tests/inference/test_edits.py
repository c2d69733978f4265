"""The front door of edits and re-noise: what lengths become, what is told, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edited_rows import MODEL, PROMPTS, TOKENIZER

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests, settings_of_call
from dlm_jax.types import Network, Status


def _first(prompt) -> np.ndarray:
    """The canvas of a prompt before any step."""
    given = TOKENIZER.encode(prompt.get("prompt", "") + prompt.get("draft", ""))
    holes = np.full(prompt.get("gen_length", 0), TOKENIZER.mask_id)
    return np.concatenate([given, holes]).astype(int)


@functools.cache
def _generated():
    return dlm_jax.generate(MODEL, PROMPTS)


@functools.cache
def _streamed(every, num_samples=1):
    """The rows of each prompt as they are shown; where there are more samples, rows wait."""
    shown = [[] for _ in PROMPTS]
    for canvases in dlm_jax.stream(
        MODEL, PROMPTS, every=every, num_samples=num_samples, batch_size=4
    ):
        for index, row in canvases.items():
            if index % num_samples == 0:
                shown[index // num_samples].append(row)
    return shown


def test_edits_are_settings_of_a_prompt_whose_row_is_the_same_beside_any_others():
    together = _generated()
    for index, prompt in enumerate(PROMPTS):
        apart = dlm_jax.generate(MODEL, [prompt], num_samples=4)
        assert apart.texts[0] == together.texts[index]
        for name in ("lengths", "steps", "forwards"):
            assert getattr(apart, name)[0] == getattr(together, name)[index]
        for ours, theirs in zip(apart.counters, together.counters, strict=True):
            assert ours[0] == theirs[index]
    assert (together.counters.insertions > 0).all() and (together.counters.deletions > 0).any()
    assert len(set(together.lengths.tolist())) > 2


def test_lengths_are_those_of_before_with_what_was_inserted_and_without_what_is_gone():
    made = _generated()
    counted = made.counters
    for index, prompt in enumerate(PROMPTS):
        before = _first(prompt).size + counted.insertions[index] - counted.deletions[index]
        pushed_out = before - made.lengths[index]
        # What is lost was pushed out, or pushed out in the step that inserted it, or left out.
        is_refusing = prompt.get("overflow") == "refuse"
        assert 0 <= pushed_out <= (0 if is_refusing else counted.lost[index])
    assert counted.lost[0] > 0 and counted.lost[1] > 0
    grown = (counted.insertions - counted.deletions)[0]
    assert _first(PROMPTS[0]).size + grown > made.lengths[0]


def test_a_row_never_exceeds_its_max_length_and_says_if_it_would_have():
    made = _generated()
    for index, prompt in enumerate(PROMPTS):
        most = prompt.get("max_length", MODEL.max_length)
        assert max(row.tokens.size for row in _streamed(1)[index]) <= most
        full = Status.CANVAS_FULL if made.counters.lost[index] else Status.DONE
        assert made.status[index] == full
    assert set(made.status) == {Status.CANVAS_FULL, Status.DONE}


@pytest.mark.parametrize(("every", "num_samples"), [(3, 3)])
def test_the_last_canvas_of_a_stream_is_what_is_generated(every, num_samples):
    made = _generated()
    for index, rows in enumerate(_streamed(every, num_samples)):
        np.testing.assert_array_equal(rows[0].tokens, _first(PROMPTS[index]))
        np.testing.assert_array_equal(rows[-1].tokens, made.tokens[index, : made.lengths[index]])
        assert rows[-1].status == made.status[index]
        assert rows[-1].steps == made.steps[index]
        assert rows[-1].counters == tuple(column[index] for column in made.counters)


def _traced(rows) -> list[int]:
    """Where each token of the last canvas stood on the first; -1 where it was not there."""
    places = list(range(rows[0].tokens.size))
    for row in rows[1:]:
        places = [-1 if came < 0 else places[came] for came in row.origin.tolist()]
    return places


@pytest.mark.parametrize(("every", "num_samples"), [(3, 3)])
def test_origins_lead_back_to_the_first_canvas_however_seldom_a_row_is_shown(every, num_samples):
    for index, rows in enumerate(_streamed(every, num_samples)):
        each_step = _streamed(1)[index]
        assert 2 <= len(rows) < len(each_step)
        places = _traced(rows)
        assert places == _traced(each_step)
        old = [place for place in places if place >= 0]
        assert old == sorted(set(old)) and len(old) < len(places)
        last = rows[-1]
        given = [place for place, is_given in enumerate(last.is_frozen) if is_given]
        assert [places[place] for place in given] == np.flatnonzero(rows[0].is_frozen).tolist()
        for place in given:
            assert last.tokens[place] == rows[0].tokens[places[place]]


def test_origins_of_a_cancelled_row_count_from_the_canvas_shown_last():
    (request,) = make_requests(MODEL, PROMPTS[0], {})
    with Engine(MODEL, sizes=(1,)) as engine:
        number = engine.submit(request, is_watched=True)
        shown = [row for _ in range(3) for row in engine.step(1)]
        engine.cancel(number)
        (last,) = engine.step(1)
    assert last.status is Status.CANCELLED and _traced([*shown, last]) == _traced(shown)


def _refused(model=MODEL, prompt="The ", **settings):
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(model, [prompt], **settings)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"delete_lambda": -1.0}, "delete_lambda=-1.0 is outside [0, 1000000]; use 0.3, say"),
        ({"max_new_tokens": 9}, "requires edit=True and a length_target_mode; otherwise, use"),
        ({"schedule": "linear"}, "resample does not support a quota of order='random'; use"),
        ({"resample": False}, "edit inserts spaces that no rule rewrites; use edit_token='mask'"),
        ({"resample": False}, "--preset variable_length (Model.preset in Python)"),
        ({"resample": False, "edit_token": "mask", "renoise_end": 0.1}, "use renoise='mask'"),
        ({"draft": "cat", "edit": False, "resample": False}, "draft requires remasking"),
        ({"draft": "cat", "insert_ratio_start": 0.0, "delete_ratio_start": 0.0,
          "resample": False}, "draft requires remasking"),
    ],
)  # fmt: skip
def test_what_means_nothing_or_cannot_be_is_refused_in_one_line_with_its_remedy(settings, said):
    assert said in _refused(prompt={"prompt": "The "} | settings)


# The loop of the document on variable-length edits

DOCUMENT = {
    "edit_schedule": "cosine", "insert_ratio_start": 0.04, "insert_ratio_end": 0.0,
    "delete_ratio_start": 0.04, "delete_ratio_end": 0.0, "delete_margin": 0.02,
    "delete_lambda": 0.3, "length_target_mode": "none", "cooldown_distance": 1,
}  # fmt: skip


def test_the_preset_is_the_documents_loop_whatever_the_model_recommends():
    model = dlm_jax.load("proofreader")
    preset = model.preset("variable_length")
    settled = vars(settings_of_call(model, preset))
    assert preset.items() <= settled.items() and preset.items() >= DOCUMENT.items()
    assert settled["resample"] and settled["schedule"] == "all" and settled["remask"] == "none"


ROCK, FOX = (f"the quick brown {word} jumps over the lazy dog" for word in ("rock", "fox"))
LINE = CharacterTokenizer.of(f"{ROCK}{FOX}.")


def _knowing() -> Network:
    """Finds at each position the token that its one parameter, a text, has there."""
    size = LINE.vocab_size

    def trunk(params, tokens_BL, length_B, cache):
        hidden_LD = jax.nn.one_hot(params["text"], size)[: tokens_BL.shape[1]]
        return jnp.broadcast_to(hidden_LD, (*tokens_BL.shape, size)), cache

    return Network(
        init=lambda key: {},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, size),
        readout=lambda params, hidden_ND: 12.0 * hidden_ND,
        vocab_size=size,
    )


KNOWING = _knowing()


@pytest.mark.parametrize(
    ("draft", "wanted", "one"), [(ROCK, FOX, "deletions"), (FOX, ROCK, "insertions")]
)
def test_rock_becomes_fox_by_one_deletion_and_back_by_one_insertion(draft, wanted, one):
    ids = np.pad(LINE.encode(wanted), (0, 64 - len(wanted)), constant_values=LINE.encode(".")[0])
    sample = SamplingParams(steps=2, temperature=0.0, chain=("temperature",))
    model = Model(KNOWING, {"text": jnp.asarray(ids)}, LINE, max_length=64, sample=sample)
    prompt = {"prompt": draft[:16], "draft": draft[16:], "max_length": 50}
    other = "insert" if one == "deletions" else "delete"
    settings = model.preset("variable_length") | {f"{other}_ratio_start": 0.0}
    made = dlm_jax.generate(model, [prompt], **settings)
    assert made.texts == (wanted,)
    counted = made.counters
    assert (counted.deletions[0], counted.insertions[0]) == (len(draft) > len(wanted),
                                                             len(draft) < len(wanted))  # fmt: skip


# What is read back of rows whose tokens move or are overwritten between the steps

OVERWRITTEN = {"renoise": "mask", "renoise_start": 0.4, "renoise_end": 0.1}


@functools.cache
def _read_back():
    """The four rows with read-back and re-noise, and the canvases on their way."""
    shown = [[] for _ in PROMPTS]
    for canvases in dlm_jax.stream(MODEL, PROMPTS, batch_size=4, read_back=True, **OVERWRITTEN):
        for index, row in canvases.items():
            shown[index].append(row)
    return shown


def test_what_is_read_back_of_a_token_is_what_was_written_also_where_edits_moved_it():
    has_moved = is_gone = 0
    for rows in _read_back():
        for row in rows:
            found = {(r.place, r.candidates.step): r for r in row.read_back if r.place >= 0}
            for place in np.flatnonzero(row.committed >= 0):
                record = found[int(place), int(row.committed[place])]
                assert record.token == row.tokens[place]
                assert record.token in record.candidates.ids
        for before, after in zip(rows, rows[1:], strict=False):
            # What was read back before is still there, at the place to which edits moved it.
            origin = after.origin.tolist()
            for old, new in zip(before.read_back, after.read_back, strict=False):
                assert new.candidates is old.candidates
                is_there = old.place >= 0 and old.place in origin
                assert new.place == (origin.index(old.place) if is_there else -1)
        has_moved += sum(0 <= r.place != r.candidates.index for r in rows[-1].read_back)
        is_gone += sum(r.place < 0 for r in rows[-1].read_back)
    assert has_moved > 0 and is_gone > 0


def test_the_log_probability_of_a_token_moves_with_the_token():
    logits_V = jnp.asarray(np.random.default_rng(0).normal(size=TOKENIZER.vocab_size), jnp.float32)

    def one_hot(params, ids):
        return jax.nn.one_hot(ids, TOKENIZER.vocab_size)

    network = Network(
        init=lambda key: {},
        trunk=lambda params, tokens_BL, length_B, cache: (one_hot(params, tokens_BL), cache),
        embed=one_hot,
        readout=lambda params, hidden_ND: jnp.broadcast_to(
            logits_V, (hidden_ND.shape[0], TOKENIZER.vocab_size)
        ),
        vocab_size=TOKENIZER.vocab_size,
    )
    # Every token is as likely anywhere, so that a wrong place shows.
    result = dlm_jax.generate(
        Model(network, {}, TOKENIZER, max_length=64), ["a rat", "", "The"], gen_length=20,
        steps=10, seed=1, fill="parallel", order="low_confidence", edit=True, edit_token="mask",
        insert_ratio_start=0.3, delete_ratio_start=0.3,
    )  # fmt: skip
    assert (result.counters.insertions > 0).all()
    logprob_V = np.asarray(jax.nn.log_softmax(logits_V))
    for row, given in enumerate((5, 0, 3)):
        written = slice(given, result.lengths[row])
        expected = logprob_V[result.tokens[row, written]]
        np.testing.assert_allclose(result.logprobs[row, written], expected, atol=1e-5)
