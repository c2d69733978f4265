"""The front door: text in, text out, and refusals in one line."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saved_model
import toy_model
from jax.sharding import NamedSharding, PartitionSpec

import dlm_jax
from dlm_jax.api import Model
from dlm_jax.config import MeshConfig, SampleConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.sharding import make_mesh
from dlm_jax.types import Network, Status

MODEL = dataclasses.replace(toy_model.MODEL, sample=SampleConfig(steps=6, temperature=0.8))
PROMPT = "The "


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


def _refused(*args, **kwargs):
    """The line with which a call is refused."""
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(*args, **kwargs)
    return str(refusal.value)


def test_samples_of_one_call_are_those_of_consecutive_seeds_alone():
    together = dlm_jax.generate(MODEL, [PROMPT, "A "], num_samples=2, seed=40)
    assert len(set(together.texts)) == 4
    for index, prompt in enumerate([PROMPT, PROMPT, "A ", "A "]):
        alone = dlm_jax.generate(MODEL, [prompt], seed=40 + index)
        assert alone.texts == together.texts[index : index + 1]


def test_texts_keep_their_prompt_and_fill_the_canvas():
    result = dlm_jax.generate(MODEL, [PROMPT, ""], num_samples=2)
    assert result.lengths.tolist() == [MODEL.max_length] * 4
    assert all(text.startswith(PROMPT) for text in result.texts[:2])
    assert set(result.status) == {Status.DONE}
    assert result.steps.tolist() == [6] * 4
    for tokens, length, text in zip(result.tokens, result.lengths, result.texts, strict=True):
        assert not set(tokens[:length].tolist()) & set(MODEL.tokenizer.banned_ids)
        assert MODEL.tokenizer.decode(tokens[:length]) == text


def test_gen_length_counts_new_tokens():
    result = dlm_jax.generate(MODEL, [PROMPT, ""], gen_length=9, num_samples=2)
    assert result.lengths.tolist() == [13, 13, 9, 9]
    everything = dlm_jax.generate(MODEL, [PROMPT], gen_length=28)
    assert everything.lengths.tolist() == [32]


def test_max_length_widens_the_canvas():
    result = dlm_jax.generate(MODEL, [PROMPT], gen_length=0, max_length=40)
    assert result.lengths.tolist() == [40]


def test_given_settings_override_what_the_model_recommends():
    recommended = dlm_jax.generate(MODEL, [PROMPT])
    assert recommended.steps.tolist() == [6]
    asked = {"steps": 3, "temperature": 0.0, "order": "low_confidence", "schedule": "cosine"}
    given = dlm_jax.generate(MODEL, [PROMPT], **asked)
    assert given.steps.tolist() == [3]
    recommends = dataclasses.replace(MODEL, sample=SampleConfig(**asked))
    assert dlm_jax.generate(recommends, [PROMPT]).texts == given.texts
    assert dlm_jax.generate(MODEL, [PROMPT], temperature=1.0).texts != recommended.texts


def test_greedy_texts_do_not_depend_on_the_seed_unless_the_order_does():
    greedy = {"temperature": 0.0, "order": "low_confidence", "schedule": "cosine"}
    ours, theirs = (dlm_jax.generate(MODEL, [PROMPT], seed=s, **greedy).texts for s in (1, 2))
    assert ours == theirs


def test_loaded_model_is_the_saved_one(run_dir):
    model = dlm_jax.load(run_dir)
    same = dlm_jax.load(run_dir / "checkpoints")
    assert model.tokenizer == same.tokenizer == MODEL.tokenizer
    assert model.sample == saved_model.CONFIG.sample
    assert model.max_length == MODEL.max_length
    for saved, loaded in zip(
        jax.tree.leaves(MODEL.params), jax.tree.leaves(model.params), strict=True
    ):
        np.testing.assert_array_equal(saved, loaded)
    ours = dlm_jax.generate(model, [PROMPT], num_samples=4)
    assert ours.texts == dlm_jax.generate(MODEL, [PROMPT], num_samples=4).texts


def test_users_own_network_functions_write_what_they_must():
    """A language in which every character is followed by the next one of the alphabet."""
    tokenizer = CharacterTokenizer.of("abcdef")

    def trunk(params, tokens_BL, length_B, cache):
        return jax.nn.one_hot(jnp.roll(tokens_BL, 1, axis=1), tokenizer.vocab_size), cache

    def readout(params, hidden_ND):
        return params["sureness"] * hidden_ND @ jnp.eye(tokenizer.vocab_size, k=1)

    network = Network(
        init=lambda key: {"sureness": jnp.float32(0)},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, tokenizer.vocab_size),
        readout=readout,
        vocab_size=tokenizer.vocab_size,
    )
    model = Model(network, {"sureness": jnp.float32(50)}, tokenizer, max_length=6)
    settings = {"steps": 5, "order": "low_confidence", "num_samples": 3}
    assert dlm_jax.generate(model, ["a"], **settings).texts == ("abcdef",) * 3


def test_model_on_eight_devices_writes_the_same_texts():
    everywhere = NamedSharding(make_mesh(MeshConfig(fsdp=2)), PartitionSpec())
    spread = dataclasses.replace(MODEL, params=jax.device_put(MODEL.params, everywhere))
    ours = dlm_jax.generate(spread, [PROMPT], num_samples=4)
    assert ours.texts == dlm_jax.generate(MODEL, [PROMPT], num_samples=4).texts
    assert spread.advance().compiled == ["rows=8 canvas=64"]
    assert spread.advance() is not MODEL.advance()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": ["Zebra"]}, "'Z' (U+005A) at position 0"),
        ({"prompts": ["The " * 8]}, "prompt of 32 tokens leaves no room on the canvas of 32"),
        ({"prompts": []}, "nothing to generate"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 is outside [0, "),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"gen_length": 33}, "use gen_length=32 at most"),
        ({"gen_length": 29, "prompts": [PROMPT]}, "use gen_length=28 at most"),
        ({"gen_length": -1}, "gen_length=-1 must be at least 0"),
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": -3}, "max_length=-3"),
        ({"order": "low_confidense"}, "'low_confidence'"),
        ({"schedule": "cosin"}, "'cosine'"),
    ],
)
def test_bad_argument_is_refused_in_one_line(settings, said):
    assert said in _refused(MODEL, **settings)


def test_refused_prompts_are_told_apart():
    assert "prompt 1" in _refused(MODEL, ["The", "Zebra", "cat"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: shutil.rmtree(path), "does not exist"),
        (lambda path: _empty(path), "empty"),
        (lambda path: _truncate(path), "no usable checkpoint"),
        (lambda path: saved_model.save(_empty(path), width=32), "use the config"),
        (lambda path: saved_model.save(_empty(path), depth=3), "use the config"),
    ],
    ids=["missing", "empty", "truncated", "other width", "other depth"],
)
def test_unusable_checkpoint_is_refused_in_one_line(tmp_path, damage, said):
    path = saved_model.save(tmp_path / "run")
    damage(path)
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.load(path, report=lambda line: None)
    assert said in str(refusal.value)
    assert str(path) in str(refusal.value)


def _empty(path):
    shutil.rmtree(path)
    path.mkdir()
    return path


def _truncate(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])
