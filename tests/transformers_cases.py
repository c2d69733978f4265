"""Tiny random causal models, written by transformers with its own tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz .,?"
BOS, EOS, START = "<s>", "</s>", "<|start|>"
SPECIALS = (BOS, EOS, START)
VOCAB = len(LETTERS) + len(SPECIALS) + 2
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
PROMPTS = ("the cat", "a rat sat.", "who", "tell me of the sea, and of a rat")


def write(
    path: Path, kind: str, *, adds_bos: bool = False, has_bos: bool = True, **changes: Any
) -> tuple[Any, Any]:
    """Writes a directory and returns the model and the tokenizer of transformers that wrote it.

    Special tokens and unused ids are never the most likely ones. `changes` are fields of the
    config, or `generation`, the fields of generation_config.json.
    """
    import torch
    import transformers

    vocab = {token: id_ for id_, token in enumerate((*LETTERS, *SPECIALS))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
    named = {"bos_token": BOS} if has_bos else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=EOS,
        additional_special_tokens=[START], padding_side="left", **named,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    known = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "vocab_size": VOCAB, "initializer_range": 0.3, "tie_word_embeddings": False,
        "bos_token_id": vocab[BOS] if has_bos else None, "eos_token_id": vocab[EOS],
        "pad_token_id": vocab[EOS],
    }  # fmt: skip
    generation = changes.pop("generation", None)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    if kind == "qwen3":
        known["head_dim"] = 8
    torch.manual_seed(1)
    made = model(config(**(known | changes))).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("bias"):
                value.normal_()
        if not made.config.tie_word_embeddings:
            made.lm_head.weight[len(LETTERS) :] = 0.0
    if generation is not None:
        made.generation_config = transformers.GenerationConfig(**generation)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return made, tokenizer
