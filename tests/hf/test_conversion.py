"""Causal models of transformers, converted: what they gain, what they keep, and the way back.

References are transformers' own calls: ``apply_chat_template``, its tokenizers, and the logits of
its classes; for a family without a class there, the formulas.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers_cases as cases
from oracles.published import Oracle
from published_cases import edit, logits_of

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli import exporter
from dlm_jax.config import SamplingParams
from dlm_jax.model.transformer import build
from dlm_jax.objectives.likelihood import causal_nll
from dlm_jax.objectives.objective import Batch
from dlm_jax.training.trainer import prepare, run_loop

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FULL = len(cases.LETTERS) + len(cases.SPECIALS)
CHAT = [{"role": "user", "content": "who is it?"}]
TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LENGTH = 48
KINDS = ("llama", "qwen2", "qwen3")


def _write(path, kind, *, vocab_size=FULL, is_tied=False):
    generation = {
        "bos_token_id": FULL - 3, "eos_token_id": [FULL - 2, FULL - 1], "do_sample": True,
        "temperature": 0.5, "top_p": 0.9,
    }  # fmt: skip
    shape = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    return cases.write(
        path, kind, **shape, max_position_embeddings=LENGTH, generation=generation
    )  # fmt: skip


def _asked(folder, source, **changes):
    (folder / "text.txt").write_text(TEXT)
    flags = {
        "train.init_from": source, "train.out_dir": folder / "run",
        "data.source": folder / "text.txt", "data.cache_dir": folder / "cache",
        "data.seq_len": 16, "train.steps": 2, "train.batch_size": 8, "train.eval_windows": 2,
        "train.eval_every": 0, "optim.warmup_steps": 1, "optim.name": "adamw",
    } | {name.replace("__", "."): value for name, value in changes.items()}  # fmt: skip
    return configs.load(None, {name: str(value) for name, value in flags.items()})


@pytest.mark.parametrize(
    ("is_tied", "changes"),
    [
        (False, {}), (True, {"mesh__fsdp": 4}),
    ],
)  # fmt: skip
def test_a_full_vocabulary_gains_a_mask_with_the_mean_of_the_rows(tmp_path, is_tied, changes):
    theirs, lines = _write(tmp_path / "model", "llama", is_tied=is_tied)[0], []
    run = prepare(_asked(tmp_path, tmp_path / "model", **changes), report=lines.append)
    run.checkpoints.close()
    assert run.config.model.vocab_size == FULL + 1
    tokenizer = run.corpus.tokenizer
    assert tokenizer.mask_id == FULL and tokenizer.token(FULL) == "<|mask|>"
    assert any(f"MASK is added as id {FULL}" in line for line in lines)
    tables = {"embedding": theirs.get_input_embeddings().weight.detach().numpy()}
    if not is_tied:
        tables["head"] = theirs.lm_head.weight.detach().numpy()
    for name, stored in tables.items():
        ours = run.state.params[name]
        ours = np.asarray(ours["kernel"].T if name == "head" else ours)
        np.testing.assert_array_equal(ours[:FULL], stored)
        np.testing.assert_allclose(ours[FULL], stored.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_run_ignores_the_fields_that_it_is_told_to(tmp_path):
    _write(tmp_path / "model", "llama")
    edit(tmp_path / "model" / "config.json", new_field=3)
    with pytest.raises(ValueError, match="or train.ignore_config=new_field$"):
        prepare(_asked(tmp_path, tmp_path / "model"), report=lambda line: None)
    asked = _asked(tmp_path, tmp_path / "model", train__ignore_config="new_field", train__steps=1)
    run = prepare(asked, report=lambda line: None)
    assert run_loop(run).reason == "finished"
    run.checkpoints.close()
    assert dlm_jax.load(tmp_path / "run").config.model.vocab_size == FULL + 1
    again = prepare(asked, report=lambda line: None)
    again.checkpoints.close()
    assert int(again.state.step) == 1


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A full vocabulary, converted to shifted blocks by adapters."""
    folder = tmp_path_factory.mktemp("converted")
    _write(folder / "model", "llama")
    run = prepare(
        _asked(
            folder, folder / "model", model__lora_rank=2, model__attention_type="block_causal",
            model__block_length=8, model__logit_alignment="shifted",
        ),
        report=lambda line: None,
    )  # fmt: skip
    assert run_loop(run).reason == "finished"
    (folder / "model").rename(folder / "moved")
    return folder


@pytest.mark.filterwarnings("ignore:`rope_scaling`:FutureWarning")
def test_adapters_train_the_embedding_of_a_new_mask(converted, tmp_path):
    model = dlm_jax.load(converted / "run")
    assert np.abs(model.params["adapters"]["mask"]["row"]).max() > 0
    assert model.tokenizer.mask_id == FULL == model.network.vocab_size - 1
    ids = np.random.default_rng(0).integers(0, FULL + 1, (2, 24))
    dlm_jax.export(model, tmp_path / "out")
    again = dlm_jax.load(tmp_path / "out")
    assert again.tokenizer.mask_id == FULL and again.family == "fast_dllm"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.mask_token_id == FULL
    ours, after = logits_of(model, ids)[..., :FULL], logits_of(again, ids)[..., :FULL]
    np.testing.assert_allclose(after, ours, rtol=1e-4, atol=1e-4)
    plain = dataclasses.replace(model, params=model.params | {"adapters": {
        name: tree for name, tree in model.params["adapters"].items() if name != "mask"
    }})  # fmt: skip
    assert np.abs(logits_of(plain, ids)[..., :FULL] - ours).max() > 1e-6


@pytest.mark.parametrize("saved", ["run", "best", "file"])
def test_a_converted_model_keeps_chat_ends_settings_and_canvas(converted, tmp_path, saved):
    path = converted / "run"
    if saved == "best":
        path = path / "best"
    elif saved == "file":
        out = str(tmp_path / "model.safetensors")
        assert exporter.main(["--checkpoint", str(path), "--out", out]) == 0
        path = out
    model = dlm_jax.load(path)
    theirs = transformers.AutoTokenizer.from_pretrained(converted / "moved")
    asked = theirs.apply_chat_template(CHAT, add_generation_prompt=True)
    asked = asked if isinstance(asked, list) else asked["input_ids"]
    assert model.chat.ids(CHAT).tolist() == asked
    assert model.eos_ids == (FULL - 2, FULL - 1)
    assert (model.sample.temperature, model.sample.top_p) == (0.5, 0.9)
    assert model.max_length == LENGTH
    assert "fast_dllm" in model.presets and model.sample.order == "threshold"


WAYS = {
    # source: (attention, alignment, block) -> family
    "llama-whole": ("llama", "bidirectional", "same", 0, "llada"),
    "llama-whole-shifted": ("llama", "bidirectional", "shifted", 0, "dream"),
    "llama-blocks-shifted": ("llama", "block_causal", "shifted", 4, "fast_dllm"),
    "qwen2-whole": ("qwen2", "bidirectional", "same", 0, "llada"),
    "qwen2-whole-shifted": ("qwen2", "bidirectional", "shifted", 0, "dream"),
    "qwen3-blocks": ("qwen3", "block_causal", "same", 4, "sdar"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model_is_exported_as_a_family_with_its_formula(tmp_path, way):
    source, attention, alignment, block, family = WAYS[way]
    _write(tmp_path / "model", source, vocab_size=FULL + 1, is_tied=way == "llama-whole-shifted")
    causal = dlm_jax.load(tmp_path / "model")
    shape = dataclasses.replace(
        causal.config.model, attention_type=attention, logit_alignment=alignment,
        block_length=block, start_id=-1,
    )  # fmt: skip
    config = dataclasses.replace(causal.config, model=shape, sample=SamplingParams())
    model = dataclasses.replace(
        causal, network=build(shape), config=config, family="", is_causal=False,
        sample=SamplingParams(), presets={},
    )  # fmt: skip
    out = tmp_path / "out"
    dlm_jax.export(model, out)
    again = dlm_jax.load(out)
    assert again.family == family and again.max_length == LENGTH
    ids = np.random.default_rng(0).integers(0, FULL + 1, (2, 12))
    ours = logits_of(model, ids)
    np.testing.assert_allclose(logits_of(again, ids), ours, rtol=1e-4, atol=1e-4)
    said = json.loads((out / "config.json").read_text())
    oracle = Oracle(said, safetensors.numpy.load_file(out / "model.safetensors"))
    number = np.arange(ids.shape[1]) // (block or ids.shape[1])
    theirs = np.stack([oracle.logits(row, may_see=number[:, None] >= number) for row in ids])
    if alignment == "shifted":
        ours, theirs = ours[:, 1:], theirs[:, :-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_model_is_exported_as_a_directory_that_transformers_loads(tmp_path, kind):
    theirs, _ = _write(tmp_path / "model", kind, vocab_size=FULL + 1)
    dlm_jax.export(dlm_jax.load(tmp_path / "model"), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, FULL, (2, 12)))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits)
    assert type(again) is type(theirs)


def _nats_of_theirs(theirs, ids):
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].double()
    logp = torch.log_softmax(logits, dim=-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return -logp.sum().item()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_causal_run_its_checkpoint_and_its_export_agree_with_transformers(tmp_path, kind):
    theirs, tokenizer = _write(tmp_path / "model", kind, vocab_size=FULL + 1)
    ids = tokenizer("the dog and the fox").input_ids

    def nats_of(network, params, mask_id):
        batch = Batch(jnp.array([ids]), jnp.array([len(ids)]), jnp.array([1]))
        return float(causal_nll(network, params, batch, mask_id=mask_id)[0].sum())

    causal = {"model__attention_type": "causal", "sample__order": "left_to_right",
              "train__steps": 1}  # fmt: skip
    run = prepare(_asked(tmp_path, tmp_path / "model", **causal), report=lambda line: None)
    mask_id = run.corpus.tokenizer.mask_id
    before = nats_of(run.network, run.state.params, mask_id)
    np.testing.assert_allclose(before, _nats_of_theirs(theirs, ids), rtol=1e-5)
    assert run_loop(run).reason == "finished"
    trained = dlm_jax.load(tmp_path / "run")
    dlm_jax.export(trained, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = _nats_of_theirs(loaded, ids)
    assert abs(expected - before) > 1e-3
    for model in (trained, dlm_jax.load(tmp_path / "out")):
        ours = nats_of(model.network, model.params, mask_id)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        scored = dlm_jax.score(model, ["the dog and the fox"])
        np.testing.assert_allclose(scored.nats, [expected], rtol=1e-5)
