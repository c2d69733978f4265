"""What a family of published models is: its config, its tensors and its loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.published.fields import Fields
from dlm_jax.published.names import Source


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose directories are laid out alike.

    Attributes:
      name: short, lower case.
      architectures: what ``architectures`` of config.json may name; the first is written.
      model_type: what is written beside it.
      read: the model that a config.json describes; ValueError where it is not implemented.
      write: the fields of config.json that describe a model; `read` is its inverse.
      sources: the tensor of every parameter, by its path.
      max_length: the field that holds the longest row.
      mask_id: of models whose files do not tell; None: they do.
      trained_length: tokens of the rows it was trained on, where that is less than its config says.
      presets: settings of its own loops by name; the first is what a loaded model recommends.
      idle: fields of its config.json that change nothing.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    sources: Callable[[ModelConfig], dict[str, Source]]
    max_length: str = "max_position_embeddings"
    mask_id: int | None = None
    trained_length: int = 0
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    idle: tuple[str, ...] = ()


# Paths of parameters that many families share, by what their tensors are called in a block.
_QWEN = {
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/out/kernel": "self_attn.o_proj.weight",
    "attention/query/bias": "self_attn.q_proj.bias",
    "attention/key/bias": "self_attn.k_proj.bias",
    "attention/value/bias": "self_attn.v_proj.bias",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
}
DENSE = {f"mlp/{part}/kernel": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
EXPERTS = {
    "mlp/router/kernel": "mlp.gate.weight",
    **{f"mlp/expert_{part}": f"mlp.experts.{{e}}.{part}_proj.weight"
       for part in ("gate", "up", "down")},
}  # fmt: skip


def qwen_sources(model: ModelConfig, *, more: Mapping[str, str] | None = None) -> dict[str, Source]:
    """Tensors under the names of Qwen, Llama and their kin (``model.layers.0.mlp...``).

    Args:
      model: what is read.
      more: further tensors of a block, and other names of those.
    """
    mlp = EXPERTS if model.experts else DENSE
    ends = {
        "embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
        "head/kernel": "lm_head.weight",
    }
    return {path: Source(name) for path, name in ends.items()} | in_blocks(
        _QWEN | mlp | dict(more or {}), _QWEN | dict(more or {}) | DENSE, "model.layers.{i}."
    )


def in_blocks(
    blocks: Mapping[str, str], dense_blocks: Mapping[str, str], prefix: str
) -> dict[str, Source]:
    """Sources of the blocks, and of the first ones where those are another kind."""
    found = {f"blocks/{path}": Source(prefix + name) for path, name in blocks.items()}
    return found | {
        f"dense_blocks/{path}": Source(prefix + name) for path, name in dense_blocks.items()
    }
