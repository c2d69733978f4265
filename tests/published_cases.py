"""Tiny published directories, written by NumPy: every family's config, tensors and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
import toy
from tokenizers import decoders, models, pre_tokenizers

from dlm_jax import Model
from dlm_jax.data import HubTokenizer
from dlm_jax.data.tokenizers import added_token, train_json

LETTERS = "abcdefghijklmnopqrstuvwxyz .,?"
SPECIALS = ("<|mask|>", "<|endoftext|>", "<|start|>", "<|end|>")
NUM_TOKENS = len(LETTERS) + len(SPECIALS)
VOCAB = NUM_TOKENS + 6
MASK, EOS, START, END = (len(LETTERS) + i for i in range(4))
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "activation_type": "silu",
        "alibi": False, "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
        "block_type": "llama", "d_model": 24, "embedding_size": VOCAB, "include_bias": False,
        "include_qkv_bias": False, "layer_norm_type": "rms", "max_sequence_length": 64,
        "mlp_hidden_size": 40, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "rms_norm_eps": 1e-5,
        "rope": True, "rope_theta": 500000.0, "vocab_size": VOCAB, "weight_tying": False,
    },
    "dream": {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_act": "silu",
        "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64,
        "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "vocab_size": VOCAB, "sliding_window": None, "use_sliding_window": False,
    },
    "llada_moe": {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "hidden_act": "silu",
        "hidden_size": 24, "dense_intermediate_size": 40, "expert_intermediate_size": 16,
        "shared_expert_intermediate_size": None, "max_position_embeddings": 64,
        "moe_layer_freq": [0, 1, 1], "moe_router_score_function": "softmax",
        "num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 2,
        "num_hidden_layers": 3, "num_key_value_heads": 4, "qk_layernorm": True,
        "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False,
        "vocab_size": VOCAB, "partial_rotary_factor": 1, "routed_scaling_factor": 1,
    },
    "sdar": {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "hidden_act": "silu",
        "attention_bias": False, "block_size": 4, "head_dim": 8, "hidden_size": 24,
        "intermediate_size": 40, "max_position_embeddings": 64, "num_attention_heads": 4,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": VOCAB,
        "fuse_cross_entropy": True,
    },
    "llada2": {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "hidden_act": "silu",
        "first_k_dense_replace": 1, "head_dim": 8, "hidden_size": 24, "intermediate_size": 40,
        "max_position_embeddings": 64, "moe_intermediate_size": 12, "n_group": 4,
        "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 8,
        "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
        "rope_theta": 600000, "rotary_dim": 4, "routed_scaling_factor": 2.5,
        "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
        "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "vocab_size": VOCAB,
    },
    "fast_dllm": {
        "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8, "conplemenrary_mask": True, "hidden_act": "silu", "hidden_size": 24,
        "intermediate_size": 40, "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": VOCAB,
    },
    "sdar_moe": {
        "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "hidden_act": "silu",
        "attention_bias": False, "block_size": 4, "decoder_sparse_step": 1, "head_dim": 8,
        "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64,
        "mlp_only_layers": [], "moe_intermediate_size": 12, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": VOCAB,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    },
}  # fmt: skip
"""What each family's config.json says, but for the ids of specials."""

IDS = {"mask_token_id": MASK, "pad_token_id": EOS, "eos_token_id": EOS}


def shapes(name: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a family, as its own programs name and shape them."""
    if name == "llada":
        return _llada_shapes(config)
    if name == "llada2":
        return _llada2_shapes(config)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", width // heads)
    groups = config["num_key_value_heads"]
    found = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        found |= {
            f"{start}input_layernorm.weight": (width,),
            f"{start}post_attention_layernorm.weight": (width,),
            f"{start}self_attn.q_proj.weight": (heads * size, width),
            f"{start}self_attn.k_proj.weight": (groups * size, width),
            f"{start}self_attn.v_proj.weight": (groups * size, width),
            f"{start}self_attn.o_proj.weight": (width, heads * size),
        }
        if name in ("dream", "qwen2", "fast_dllm"):
            for part, rows in (("q", heads), ("k", groups), ("v", groups)):
                found[f"{start}self_attn.{part}_proj.bias"] = (rows * size,)
        if config.get("qk_layernorm") or name in ("sdar", "sdar_moe"):
            found |= {f"{start}self_attn.{part}_norm.weight": (size,) for part in "qk"}
        if name == "sdar_moe" or config.get("moe_layer_freq", [0] * 99)[layer]:
            inner = config.get("expert_intermediate_size") or config["moe_intermediate_size"]
            found[f"{start}mlp.gate.weight"] = (config["num_experts"], width)
            for expert in range(config["num_experts"]):
                found |= _mlp(f"{start}mlp.experts.{expert}.", width, inner)
        else:
            inner = config.get("intermediate_size") or config["dense_intermediate_size"]
            found |= _mlp(f"{start}mlp.", width, inner)
    return found


def _mlp(start: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{start}gate_proj.weight": (inner, width),
        f"{start}up_proj.weight": (inner, width),
        f"{start}down_proj.weight": (width, inner),
    }


def _llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = config["d_model"], config["mlp_hidden_size"]
    narrow = config["n_kv_heads"] * width // config["n_heads"]
    start = "model.transformer."
    found = {
        f"{start}wte.weight": (config["embedding_size"], width),
        f"{start}ln_f.weight": (width,),
        f"{start}ff_out.weight": (config["embedding_size"], width),
    }
    for layer in range(config["n_layers"]):
        block = f"{start}blocks.{layer}."
        found |= {
            f"{block}attn_norm.weight": (width,), f"{block}ff_norm.weight": (width,),
            f"{block}q_proj.weight": (width, width), f"{block}k_proj.weight": (narrow, width),
            f"{block}v_proj.weight": (narrow, width), f"{block}attn_out.weight": (width, width),
            f"{block}ff_proj.weight": (inner, width), f"{block}up_proj.weight": (inner, width),
            f"{block}ff_out.weight": (width, inner),
        }  # fmt: skip
    return found


def _llada2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, size, inner = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    wide = config["num_attention_heads"] * size
    fused = wide + 2 * config["num_key_value_heads"] * size
    found = {
        "model.word_embeddings.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config["vocab_size"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        found |= {
            f"{start}input_layernorm.weight": (width,),
            f"{start}post_attention_layernorm.weight": (width,),
            f"{start}attention.query_key_value.weight": (fused, width),
            f"{start}attention.query_layernorm.weight": (size,),
            f"{start}attention.key_layernorm.weight": (size,),
            f"{start}attention.dense.weight": (width, wide),
        }
        if layer < config["first_k_dense_replace"]:
            found |= _mlp(f"{start}mlp.", width, config["intermediate_size"])
            continue
        found[f"{start}mlp.gate.weight"] = (config["num_experts"], width)
        found[f"{start}mlp.gate.expert_bias"] = (config["num_experts"],)
        found |= _mlp(f"{start}mlp.shared_experts.", width, inner)
        for expert in range(config["num_experts"]):
            found |= _mlp(f"{start}mlp.experts.{expert}.", width, inner)
    return found


def tensors(name: str, config: dict[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a family: norms near 1, the rest so that nothing saturates."""
    rng = np.random.default_rng(seed)
    made = {}
    for tensor, shape in shapes(name, config).items():
        draw = rng.standard_normal(shape)
        is_norm = "norm" in tensor or "ln_f" in tensor
        value = 1 + 0.1 * draw if is_norm else draw * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        made[tensor] = value.astype(np.float32)
    return made


def tokenizer_json() -> str:
    """A tokenizer of single letters and four specials."""
    model = models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIALS))
    return made.to_str()


MARKERS = {
    "<|mask|>": False, "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True,
    "<|start_header_id|>": True, "<|end_header_id|>": True, "<|eot_id|>": True, "<bos>": True,
    "<start_of_turn>": False, "<end_of_turn>": False, "<think>": False,
}  # fmt: skip
"""Added tokens of `bpe_json`, and whether the file declares them special."""


def _with_markers(markers: dict[str, bool]) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE with added tokens, which may be special."""
    text = "user\n<|im_start|> assistant <start_of_turn> end of the turn\n\n" * 40
    data = json.loads(train_json(text, 320))
    data["added_tokens"] = [
        added_token(id_, name, is_special)
        for id_, (name, is_special) in enumerate(markers.items(), len(data["model"]["vocab"]))
    ]
    return data


def marked_tokenizer(markers: dict[str, bool]) -> HubTokenizer:
    """A byte-level BPE with added tokens: BOS, EOS, MASK and others, which may be special."""
    data = _with_markers(markers)
    bos, eos, mask = (one["id"] for one in data["added_tokens"][:3])
    return HubTokenizer(json.dumps(data), mask, eos, eos, bos)


def bpe_json(*, rename: str = "", puts_bos: bool = False) -> str:
    """A byte-level BPE with `MARKERS`; `rename` is appended to their names."""
    data = _with_markers({name + rename: is_special for name, is_special in MARKERS.items()})
    first = data["added_tokens"][0]["id"]
    if puts_bos:
        bos = f"<bos>{rename}"
        ids = [first + list(MARKERS).index("<bos>")]
        sequences = {name: {"Sequence": {"id": name, "type_id": 0}} for name in "AB"}
        data["post_processor"] = {
            "type": "TemplateProcessing", "pair": list(sequences.values()),
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequences["A"]],
            "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
        }  # fmt: skip
    return json.dumps(data)


def bpe_tokenizer(**how: Any) -> HubTokenizer:
    content = bpe_json(**how)
    ids = {one["content"]: one["id"] for one in json.loads(content)["added_tokens"]}
    mask, eos, bos = (ids[name + how.get("rename", "")] for name in (
        "<|mask|>", "<|endoftext|>", "<bos>"))  # fmt: skip
    return HubTokenizer(content, mask, eos, eos, bos)


CHATS = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'"
        " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
}
"""Templates in the form of published ones."""


def write(directory: Path, name: str, *, num_shards: int = 2, seed: int = 0) -> Path:
    """The directory of a tiny model of a family."""
    directory.mkdir(parents=True)
    config = CONFIGS[name] | IDS
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    write_weights(directory, tensors(name, CONFIGS[name], seed=seed), num_shards)
    return directory


def write_weights(directory: Path, made: dict[str, Any], num_shards: int) -> None:
    """The tensors in one file or several, by the safetensors library."""
    if num_shards == 1:
        safetensors.numpy.save_file(made, directory / "model.safetensors")
        return
    where = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: made[key] for key in sorted(made)[number::num_shards]}
        safetensors.numpy.save_file(part, directory / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def logits_of(model: Model, ids: Any) -> np.ndarray:
    """The logits of rows of ids, float32 ``[B, L, V]``."""
    tokens = jnp.asarray(ids, jnp.int32)
    length = jnp.full(tokens.shape[0], tokens.shape[1])
    return np.asarray(toy.logits(model.network, model.params, tokens, length), np.float32)


def assert_same_model(model: Model, other: Model) -> None:
    assert model.config == other.config
    assert (model.tokenizer, model.chat) == (other.tokenizer, other.chat)
    assert model.eos_ids == other.eos_ids
    jax.tree.map(np.testing.assert_array_equal, model.params, other.params)


def edit(file: Path, **changes: Any) -> None:
    """Changes fields of a JSON file; ``...`` removes a field."""
    said = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
