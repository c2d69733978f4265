"""DiffusionGemma against the classes of transformers: hidden states, logits, and its directory."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import published_cases as cases
import pytest
import safetensors.numpy

import dlm_jax
from dlm_jax.config import ModelConfig
from dlm_jax.model.transformer import build
from dlm_jax.published.families import family_for
from dlm_jax.randomness import key_of

transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
torch = pytest.importorskip("torch", reason="torch is in an optional extra")
classes = pytest.importorskip(
    "transformers.models.diffusion_gemma", reason="needs transformers with DiffusionGemma"
)

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


def test_a_row_of_noise_alone_is_what_the_trunk_takes_it_for(both, forward):
    model = both[2]
    _, canvases = _rows((0, 0))
    tokens, length = np.stack(canvases), np.full(2, CANVAS, np.int32)
    hidden, cache = model.network.trunk(model.params, tokens, length, None)
    assert cache is None
    found = np.asarray(forward([np.zeros(0, np.int32)] * 2, canvases))[:, :CANVAS]
    np.testing.assert_allclose(hidden, found, atol=2e-5)


def test_loading_exporting_and_loading_is_the_identity(both, tmp_path):
    reference, directory, model = both
    dlm_jax.export(model, tmp_path / "out", max_shard_bytes=50_000)
    again = dlm_jax.load(tmp_path / "out")
    assert again.config == model.config
    assert (again.tokenizer, again.chat) == (model.tokenizer, model.chat)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
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


def test_tensors_under_the_names_of_the_encoder_are_read_too(both, tmp_path):
    _, directory, model = both
    for file in directory.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    made = safetensors.numpy.load_file(directory / "model.safetensors")
    other = {
        name.replace("model.decoder.", "model.encoder.language_model.")
        if name.startswith("model.decoder.") and "scalar" not in name and "self_cond" not in name
        else name: value
        for name, value in made.items()
    }
    safetensors.numpy.save_file(other, tmp_path / "model.safetensors")
    again = dlm_jax.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_the_family_is_found_from_the_settings_alone(both):
    assert family_for(both[2].config.model).name == "diffusion_gemma"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] + ["full_attention"] * 4},
         "only equal groups"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"per_layer_config": {"2": {"head_dim": 8}}}, "only one for all full layers"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not implemented"),
    ],
)  # fmt: skip
def test_a_config_that_it_does_not_implement_is_refused_by_name(both, tmp_path, changes, text):
    config = json.loads((both[1] / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=text):
        dlm_jax.load(tmp_path)


A4B = ModelConfig(
    depth=30, width=2816, heads=16, kv_heads=8, head_size=256, mlp_width=2112, activation="geglu",
    norm_epsilon=1e-6, vocab_size=262144, rope_theta=1e4, attention_type="canvas",
    block_length=256, attention_window=1024, full_every=6, full_head_size=512, full_kv_heads=2,
    full_rope_theta=1e6, full_rotary_share=0.25, full_value_from_key=True, attention_scale=1.0,
    value_norm=True, post_norms=True, layer_scales=True, embedding_scaled=True, logit_cap=30.0,
    self_conditioning=True, experts=128, experts_per_token=8, expert_width=704,
    experts_beside=True, router_scales=True, router_normalised=True,
)  # fmt: skip


def test_the_published_shape_has_26_billion_parameters_of_which_4_are_active():
    shapes = jax.eval_shape(build(A4B).init, key_of(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    total = sum(leaf.size for _, leaf in leaves)
    in_experts = sum(leaf.size for path, leaf in leaves if "expert_" in jax.tree_util.keystr(path))
    active = total - in_experts * (1 - A4B.experts_per_token / A4B.experts)
    assert 25e9 < total < 27e9
    assert 3.5e9 < active < 4.5e9
    assert family_for(A4B).name == "diffusion_gemma"
