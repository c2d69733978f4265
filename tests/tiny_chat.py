"""A tiny causal chat model with random weights, as a published directory, and texts."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

WIDTH, INNER, LAYERS, HEADS = 16, 24, 3, 2
NAMES = ["<|im_start|>", "<|im_end|>", "<|unused|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def publish(folder: Path) -> Path:
    """A causal model of bytes with random weights, as a published directory."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(NAMES)
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    vocab = made.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "vocab_size": vocab, "bos_token_id": vocab - 3, "eos_token_id": vocab - 2,
        "pad_token_id": vocab - 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    group = WIDTH // HEADS
    shapes = {"model.embed_tokens": (vocab, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
                "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (group, WIDTH),
                "self_attn.v_proj": (group, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
                "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
                "mlp.down_proj": (WIDTH, INNER),
            }.items()
        }  # fmt: skip
    tensors = {
        f"{name}.weight": np.float32(0.3 * rng.standard_normal(shape) if len(shape) > 1
                                     else np.ones(shape))
        for name, shape in shapes.items()
    }  # fmt: skip
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        words = " ".join(f"word{number * n % 17}" for n in range(120))
        (folder / f"page{number}.txt").write_text(f"Page {number}. {words}")
    (folder / "page.html").write_text("<style>x{}</style><p>" + "visible words " * 60 + "</p>")
    (folder / "code.py").write_text('"""' + "A docstring. " * 60 + '"""\nhidden = "a literal"\n')
    return folder
