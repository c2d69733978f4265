"""Directories load as their authors publish them. References are models of transformers."""

import numpy as np
import published_cases as cases
import pytest
import transformers_cases as theirs_cases

import dlm_jax
from dlm_jax.config import Config, ModelConfig, SamplingParams, TrainConfig
from dlm_jax.data import HubTokenizer, from_json
from dlm_jax.hf import read_shape
from dlm_jax.settings import SettingError
from dlm_jax.training.init_from import adopt_model

FULL = len(theirs_cases.LETTERS) + len(theirs_cases.SPECIALS)


def _theirs(directory, kind="llama", **changes):
    """A tiny random model of transformers, saved by transformers; its tokenizer has no MASK."""
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return theirs_cases.write(directory, kind, **shape, vocab_size=FULL, **changes)[0]


def _near_theirs(model, theirs, length=60):
    """Compares the predictions of all tokens but the first with those of transformers."""
    import torch

    ids = np.random.default_rng(0).integers(0, FULL, length)
    ours = cases.logits_of(model, ids[None])[0, 1:]
    start = model.config.model.start_id
    given = ids[:-1] if start < 0 else [start, *ids[:-1]]
    with torch.no_grad():
        wanted = theirs(torch.tensor(np.array(given)[None])).logits[0].numpy()
    np.testing.assert_allclose(ours, wanted[-len(ours) :], rtol=1e-4, atol=1e-4)


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = {
    "linear": ("linear", {"factor": 4.0}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn with its turns": ("yarn", YARN | {"beta_fast": 3.0, "beta_slow": 0.5}),
    "yarn with a factor of attention": ("yarn", YARN | {"attention_factor": 0.7}),
    "yarn without its original length": ("yarn", {"factor": 4.0}),
}


@pytest.mark.parametrize("what", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_scaled_rotations_are_those_of_transformers(what, spelling, tmp_path):
    """At positions beyond the original length, in both spellings, and after an export."""
    kind, said = SCALINGS[what]
    theirs = _theirs(tmp_path / "m", "qwen2" if kind == "yarn" else "llama",
                     rope_parameters={"rope_type": kind, "rope_theta": 100.0} | said)  # fmt: skip
    if spelling == "rope_scaling":
        cases.edit(tmp_path / "m" / "config.json", rope_parameters=..., rope_theta=100.0,
              rope_scaling={"type": kind} | said)  # fmt: skip
    model = dlm_jax.load(tmp_path / "m")
    assert model.config.model.rope_scaling.startswith(f"{kind}:factor=4.0")
    _near_theirs(model, theirs)
    dlm_jax.export(model, tmp_path / "out")
    again = dlm_jax.load(tmp_path / "out")
    assert again.config.model == model.config.model
    theirs = type(theirs).from_pretrained(tmp_path / "out")
    _near_theirs(again, theirs)


OF_NUMBERS = {
    "logit_scale": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "clip_qkv": 8.0,
    "attention_multiplier": 0.1, "attention_bias": False, "sliding_window_pattern": 6,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "partial_rotary_factor": 0.5,
    "use_sliding_window": True, "mlp_bias": True, "hidden_act": "gelu", "layer_types": ["x"],
    "rope_interleaved": True, "no_rope_layers": [1], "num_nextn_predict_layers": 1,
    "quantization_config": {"bits": 4}, "dual_chunk_attention_config": {"chunk_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_field_that_may_change_numbers_is_refused_by_name_and_can_be_ignored(name, tmp_path):
    directory = cases.write(tmp_path / "m", "qwen2")
    cases.edit(directory / "config.json", **{name: OF_NUMBERS[name]})
    if name != "attention_bias":
        with pytest.raises(ValueError, match=f"config.json: {name}="):
            read_shape(directory)
    read_shape(directory, [name])


def test_an_id_of_minus_one_is_no_token(tmp_path):
    directory = cases.write(tmp_path / "m", "qwen2")
    cases.edit(directory / "config.json", pad_token_id=-1, bos_token_id=-1)
    tokenizer = read_shape(directory)[1]
    assert (tokenizer.pad_id, tokenizer.bos_id) == (tokenizer.eos_id, None)


def test_a_byte_order_mark_changes_nothing(tmp_path):
    directory = cases.write(tmp_path / "m", "qwen2")
    expected = read_shape(directory)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text(encoding="utf-8")
        (directory / name).write_text(text, encoding="utf-8-sig")
    assert read_shape(directory) == expected


def test_a_causal_model_needs_no_mask(tmp_path):
    """Its vocabulary keeps its size, its numbers are right, and it generates and exports."""
    theirs = _theirs(tmp_path / "m", max_position_embeddings=32)
    model = dlm_jax.load(tmp_path / "m")
    assert isinstance(model.tokenizer, HubTokenizer)
    assert model.tokenizer.vocab_size == model.network.vocab_size == FULL
    assert max(model.banned_ids, default=0) < FULL
    assert from_json(model.tokenizer.to_json()) == model.tokenizer
    _near_theirs(model, theirs, length=20)
    asked = {"gen_length": 5, "steps": 5, "seed": 0}
    made = dlm_jax.generate(model, ["abc"], **asked)
    assert np.isfinite(dlm_jax.score(model, ["abc"]).nats).all()
    dlm_jax.export(model, tmp_path / "out")
    assert "mask_token_id" not in (tmp_path / "out" / "config.json").read_text()
    assert "mask_token_id" not in (tmp_path / "out" / "generation_config.json").read_text()
    assert dlm_jax.generate(dlm_jax.load(tmp_path / "out"), ["abc"], **asked).texts == made.texts


def test_filling_with_a_causal_model_is_refused_by_name(tmp_path):
    _theirs(tmp_path / "m")
    model = dlm_jax.load(tmp_path / "m")
    with pytest.raises(SettingError, match="after a hole, where a causal model without MASK"):
        dlm_jax.generate(model, [{"template": "ab<hole:3>cd"}])


def test_training_to_fill_holes_adds_a_mask_and_training_a_causal_model_does_not(tmp_path):
    _theirs(tmp_path / "m")
    train = TrainConfig(init_from=str(tmp_path / "m"))
    config, tokenizer = adopt_model(Config(train=train), train.init_from)
    assert config.model.vocab_size == tokenizer.vocab_size == FULL + 1
    assert tokenizer.mask_id == FULL
    model = ModelConfig(attention_type="causal")
    sample = SamplingParams(order="left_to_right")
    config, tokenizer = adopt_model(
        Config(train=train, model=model, sample=sample), train.init_from
    )
    assert config.model.vocab_size == tokenizer.vocab_size == FULL
