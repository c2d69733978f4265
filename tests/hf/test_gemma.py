"""DiffusionGemma against transformers: hidden states, logits, generated ids, and its directory."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import published_cases as cases
import pytest
import safetensors.numpy

import dlm_jax
from dlm_jax.types import Window

transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
torch = pytest.importorskip("torch", reason="torch is in an optional extra")
classes = pytest.importorskip(
    "transformers.models.diffusion_gemma", reason="needs transformers with DiffusionGemma"
)
gemma_reference = pytest.importorskip("gemma_reference")

CANVAS, LONGEST = 5, 18
TEXT = {
    "vocab_size": cases.VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "max_position_embeddings": 64, "sliding_window": 4,
    "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "pad_token_id": cases.EOS, "eos_token_id": cases.EOS, "bos_token_id": cases.START,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "patch_size": 2,
    "position_embedding_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The reference with random parameters, its directory, and the model that is read from it."""
    directory = tmp_path_factory.mktemp("gemma") / "model"
    config = classes.DiffusionGemmaConfig(
        text_config=TEXT, vision_config=VISION, canvas_length=CANVAS, mask_token_id=cases.MASK
    )
    config._attn_implementation = "eager"
    reference = classes.DiffusionGemmaForBlockDiffusion(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        values = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
        for name, value in values.items():
            draw = torch.randn(value.shape, generator=generator)
            if "norm" in name or "scal" in name.rsplit(".", 1)[-1]:
                if "embed_scale" not in name:
                    value.copy_(1 + 0.1 * draw)
            elif value.ndim > 1:
                value.copy_(draw * value.shape[-1] ** -0.5)
            # So that the loop does not multiply rounding errors.
            value.mul_(0.1 if "self_conditioning.down" in name else 1.0)
    reference.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(cases.tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": cases.TEMPLATE}))
    return reference, directory, dlm_jax.load(directory)


def _wanted(reference, prompt, canvas, logits=None):
    """Hidden states of text and canvas, and the logits of the canvas, of one row."""
    ids = torch.tensor(np.asarray(prompt)[None].astype(np.int64))
    noise = torch.tensor(np.asarray(canvas)[None].astype(np.int64))
    given = None if logits is None else torch.tensor(np.asarray(logits)[None])
    with torch.no_grad():
        if len(prompt):
            found = reference.model(
                input_ids=ids, decoder_input_ids=noise, self_conditioning_logits=given
            )
            text = found.encoder_last_hidden_state[0].numpy()
        else:
            # No text: the layers of the decoder attend to the canvas alone.
            cache = transformers.DynamicCache(config=reference.config.text_config)
            for layer, kept in zip(reference.model.decoder.layers, cache.layers, strict=True):
                size = layer.self_attn.head_dim
                groups = TEXT["num_attention_heads"] // layer.self_attn.num_key_value_groups
                empty = torch.zeros(1, groups, 0, size)
                kept.lazy_initialization(empty, empty)
                kept.keys = kept.values = empty
            found = reference.model(
                decoder_input_ids=noise, cache=cache, self_conditioning_logits=given
            )
            text = np.zeros((0, TEXT["hidden_size"]), np.float32)
        hidden = found.last_hidden_state
        said = reference.lm_head(hidden).float()
        cap = reference.final_logit_softcapping
    return text, hidden[0].numpy(), (torch.tanh(said / cap) * cap)[0].numpy()


@pytest.fixture(scope="module")
def forward(both):
    network = both[2].network
    run = jax.jit(network.behind)

    def of_rows(prompts, canvases, signal=None):
        rows = [np.concatenate(pair) for pair in zip(prompts, canvases, strict=True)]
        tokens = np.full((len(rows), LONGEST), cases.EOS, np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        length = np.array([len(row) for row in rows], np.int32)
        start = np.array([len(prompt) for prompt in prompts], np.int32)
        if signal is None:
            signal = np.zeros((len(rows), LONGEST, TEXT["hidden_size"]), np.float32)
        return run(both[2].params, tokens, length, start, signal)

    return of_rows


def _rows(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return (
        [rng.integers(0, cases.NUM_TOKENS, n).astype(np.int32) for n in lengths],
        [rng.integers(0, cases.NUM_TOKENS, CANVAS).astype(np.int32) for _ in lengths],
    )


@pytest.mark.parametrize("lengths", [(9,), (0,), (13, 1, 3, 0, 4, 7, 2, 11)])
@pytest.mark.parametrize("has_signal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_text_canvas_and_logits_are_those_of_the_reference(both, forward, lengths, has_signal):
    reference, _, model = both
    prompts, canvases = _rows(lengths)
    rng = np.random.default_rng(1)
    before = 3 * rng.standard_normal((len(lengths), CANVAS, cases.VOCAB)).astype(np.float32)
    signal = np.zeros((len(lengths), LONGEST, TEXT["hidden_size"]), np.float32)
    if has_signal:
        for row, start in enumerate(lengths):
            signal[row, start : start + CANVAS] = model.network.signal(model.params, before[row])
    hidden = np.asarray(forward(prompts, canvases, signal))
    worst = {"text": 0.0, "canvas": 0.0, "logits": 0.0}
    for row, (prompt, canvas) in enumerate(zip(prompts, canvases, strict=True)):
        text, wanted, logits = _wanted(
            reference, prompt, canvas, before[row] if has_signal else None
        )
        found = hidden[row, len(prompt) : len(prompt) + CANVAS]
        said = np.asarray(model.network.readout(model.params, jnp.asarray(found)))
        pairs = {"text": (hidden[row, : len(prompt)], text), "canvas": (found, wanted),
                 "logits": (said, logits)}  # fmt: skip
        for name, (ours, theirs) in pairs.items():
            scale = np.abs(theirs).max(initial=1)
            worst[name] = max(worst[name], float(np.abs(ours - theirs).max(initial=0) / scale))
    assert max(worst.values()) < 1e-5, worst


def test_a_canvas_beside_a_cached_text_is_that_behind_the_text(both, forward):
    params, cached = both[2].params, both[2].network.cached
    prompts, canvases = _rows((9, 4, 13))
    hidden_BLD = forward(prompts, canvases)
    start = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((3, LONGEST), cases.EOS, np.int32)
    for row, pair in enumerate(zip(prompts, canvases, strict=True)):
        tokens[row, : start[row] + CANVAS] = np.concatenate(pair)

    @jax.jit
    def beside_cache(params, tokens):
        length, window = start + CANVAS, Window(start, start, start + CANVAS)
        _, update = cached.whole(params, tokens, length)
        cache = cached.store(cached.init(params, 3, LONGEST), update, None, jnp.zeros(3, jnp.int32))
        signal = jnp.zeros((3, CANVAS, TEXT["hidden_size"]))
        return cached.canvas(params, cache, tokens, length, window, signal, size=CANVAS)

    found = beside_cache(params, tokens)
    for row, begin in enumerate(start):
        wanted = hidden_BLD[row, begin : begin + CANVAS]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)


def test_loading_exporting_and_loading_is_the_identity(both, tmp_path):
    reference, directory, model = both
    dlm_jax.export(model, tmp_path / "out", max_shard_bytes=50_000)
    cases.assert_same_model(dlm_jax.load(tmp_path / "out"), model)
    # The reference reads what is written, but for the tower of images, which is left out.
    back = classes.DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "out", config=reference.config
    ).state_dict()
    for name, value in reference.state_dict().items():
        if "vision" not in name:
            assert torch.equal(back[name], value), name
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = classes.DiffusionGemmaConfig.from_dict(said)
    assert theirs.canvas_length == CANVAS
    ours = reference.config.text_config
    for name in ("layer_types", "rope_parameters", "sliding_window", "final_logit_softcapping"):
        assert getattr(theirs.text_config, name) == getattr(ours, name), name
    for layer in range(TEXT["num_hidden_layers"]):
        read, wanted = theirs.text_config.per_layer_config[layer], ours.per_layer_config[layer]
        assert read.head_dim == wanted.head_dim
        assert read.num_key_value_heads == wanted.num_key_value_heads


@pytest.mark.parametrize(
    ("file", "changes", "text"),
    [
        ("config", {"layer_types": ["sliding_attention"] + ["full_attention"] * 5},
         "use equal groups"),
        ("config", {"attention_bias": True}, "attention_bias=True is not implemented"),
        ("config", {"per_layer_config": {"2": {"head_dim": 8}}}, "only one for all full layers"),
        ("config", {"hidden_activation": "silu"}, "hidden_activation='silu' is not implemented"),
        ("generation_config", {"max_new_tokens": "256"}, "generation_config.json: "),
        ("generation_config", {"t_min": "a", "t_max": 0.8}, "generation_config.json: "),
        ("generation_config", {"stability_threshold": 2}, "stability_threshold=2 is not impl"),
    ],
)  # fmt: skip
def test_fields_that_it_does_not_implement_are_refused_by_name(both, tmp_path, file, changes, text):
    shutil.copytree(both[1], tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{file}.json"
    if inner := json.loads(path.read_text()).get("text_config"):
        changes = {"text_config": inner | changes}
    cases.edit(path, **changes)
    with pytest.raises(ValueError, match=text) as refused:
        dlm_jax.load(tmp_path)
    assert "\n" not in str(refused.value)


LOOP = {
    "order": "entropy_renoise", "gen_length": 3 * CANVAS, "steps": 12, "temperature": 0.0,
    "temperature_end": -1.0, "entropy_bound": 4.0, "renoise_stop": 3.0,
    "ties": "lower", "cache": "exact", "max_length": 32,
}  # fmt: skip
PROMPTS = ((3, 9, 1), (7,), (2, 0, 5, 11, 25, 6, 8, 20, 1, 4), (12, 29))


@pytest.fixture(scope="module")
def sharp(both, tmp_path_factory):
    """The reference and the model, of likely tokens; that of EOS is not."""
    reference, directory, _ = both
    folder = tmp_path_factory.mktemp("sharp")
    shutil.copytree(directory, folder, dirs_exist_ok=True)
    made = safetensors.numpy.load_file(directory / "model.safetensors")
    made = {name: x * 2.5 if "embed_tokens" in name else x for name, x in made.items()}
    safetensors.numpy.save_file(made, folder / "model.safetensors", {"format": "pt"})
    again = type(reference).from_pretrained(folder, config=reference.config).eval().float()
    return again, dlm_jax.load(folder)


@pytest.mark.slow
def test_ids_are_those_of_the_reference_with_the_same_noise(sharp):
    reference, model = sharp
    number, differ = gemma_reference.num_different(reference, model, PROMPTS, LOOP, (1, 8))
    assert number > 30 and differ == [0, 0]


def _written(model, rows, **settings):
    result = dlm_jax.generate(model, rows, **(LOOP | settings))
    return [result.tokens[i, : result.lengths[i]].tolist() for i in range(len(rows))], result


@pytest.fixture(scope="module")
def drawn(both):
    """Rows with their own settings, and what is written of them."""
    rows = [
        {"tokens": list(prompt), "seed": seed, "temperature": (0.8, 0.0, 1.2, 0.5)[seed],
         "temperature_end": (0.4, -1.0, 0.3, 0.5)[seed],
         "entropy_bound": (0.1, 6.0, 3.0, 1.0)[seed]}
        for seed, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    return rows, *_written(both[2], rows)


def test_a_row_does_not_depend_on_its_neighbours_and_nothing_compiles_again(both, drawn):
    rows, wanted, first = drawn
    found, again = _written(both[2], rows[::-1])
    assert found[::-1] == wanted
    assert len(first.programs) == 1 and again.programs == first.programs
    few, again = _written(both[2], [rows[2], {"tokens": [1], "seed": 7}, rows[0]])
    assert [few[0], few[2]] == [wanted[2], wanted[0]] and again.programs == first.programs


def test_the_directory_recommends_the_loop_and_its_file_changes_it(both, tmp_path):
    model = both[2]
    first = model.preset("diffusion_gemma")
    fits = {k: v for k, v in first.items() if k not in ("gen_length", "steps")}
    assert {k: getattr(model.sample, k) for k in fits} == fits
    assert model.process.name == "uniform"
    shutil.copytree(both[1], tmp_path, dirs_exist_ok=True)
    config = {
        "max_denoising_steps": 6, "max_new_tokens": 2 * CANVAS, "t_min": 0.2, "t_max": 0.8,
        "confidence_threshold": 0.3, "stability_threshold": 1, "eos_token_id": [cases.EOS],
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.7},
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    read = dlm_jax.load(tmp_path).sample
    assert (read.steps, read.gen_length, read.entropy_bound) == (12, 2 * CANVAS, 0.7)
    assert (read.temperature, read.renoise_stop) == (0.8, 0.3)
    assert read.temperature_end == pytest.approx(0.2 + 0.6 / 6)
    dlm_jax.export(dlm_jax.load(tmp_path), tmp_path / "out")
    assert dlm_jax.load(tmp_path / "out").sample == read
