"""A family of published models: config fields, tensor names and presets.

Every field of a config.json is used, known to have no effect, or rejected. Presets express the
sampling loops of the models' own programs as settings; the first preset is the default. Each preset
sets the commit order of its program, because the default order, ``random``, is meant for small
models. Presets are greedy unless their program samples by default. Ties go to
the lower position. The name of a preset is a key of ``Model.presets`` and a value of ``sample.py
--preset``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.types import Params

_MISSING = object()

IDLE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "bos_token",
        "chunk_size_feed_forward",
        "dtype",
        "embedding_dropout",
        "eos_token_id",
        "eos_token",
        "flash_attention",
        "id2label",
        "init_cutoff_factor",
        "init_device",
        "init_fn",
        "init_std",
        "initializer_range",
        "label2id",
        "mask_token_id",
        "max_window_layers",
        "mlp_ratio",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_dropout",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "precision",
        "pretraining_tp",
        "problem_type",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "rope_full_precision",
        "sliding_window",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that do not affect the computation of a model, or that other code reads."""

_OF_OTHER_PROGRAMS = re.compile(
    r"is_llama_config|transformers\.js_config|unsloth_\w+|\w+_version|_attn_implementation\w*"
    r"|_commit_hash|_flash_attn_2_enabled|_name|attn_implementation|use_flash_attention(_2)?"
    r"|base_model\w*|finetuning_task|gradient_checkpointing|license|model_max_length|model_name"
    r"|prefix|sep_token_id|decoder_start_token_id|tags|task_specific_params|tf_legacy_loss"
    r"|tokenizer_class|torchscript|use_bfloat16|is_decoder|cls_token_id|unk_token_id"
    r"|cache_implementation|(\w+_)?(dropout|dropout_prob|pdrop)"
    # Settings of a generation, which old files keep here.
    r"|bad_words_ids|do_sample|diversity_penalty|early_stopping|encoder_no_repeat_ngram_size"
    r"|exponential_decay_length_penalty|forced_\w+_token_id|length_penalty|max_length|min_length"
    r"|max_new_tokens|no_repeat_ngram_size|num_beam_groups|num_beams|num_return_sequences"
    r"|output_scores|remove_invalid_values|repetition_penalty|return_dict_in_generate"
    r"|suppress_tokens|begin_suppress_tokens|temperature|top_k|top_p|typical_p"
)
"""Names of fields that name no computation: `FileFields.finish` ignores and lists them."""


class FileFields:
    """The fields of one file; `finish` raises ValueError for unread fields.

    Attributes:
      values: all fields.
      where: name of the file.
      within: the path of the object that contains the fields, such as ``rope_scaling.``.
      ignored: unread fields that name no computation, after `finish`.
    """

    def __init__(self, values: Mapping[str, Any], where: str, within: str = ""):
        self._left = dict(values)
        self.values = values
        self.where = where
        self.within = within
        self.ignored: tuple[str, ...] = ()

    def refuse(self, name: str, value: Any, reason: str) -> ValueError:
        return ValueError(f"{self.where}: {name}={value!r} {reason}")

    def take(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of a field, which must have the type `kind`; null means the default."""
        value = self._left.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where} has no field {name!r}, which this model needs")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(name, value, f"is not a {kind.__name__}; the file is damaged")
        return value

    def must(self, **wanted: Any) -> None:
        """Raises ValueError for fields with values that are not implemented.

        Absent and null fields are accepted. A tuple lists several implemented values.
        """
        for name, values in wanted.items():
            value = self._left.pop(name, None)
            known = values if isinstance(values, tuple) else (values,)
            if value is not None and value not in known:
                raise self.refuse(
                    name, value, f"is not implemented; only {' or '.join(map(repr, known))} is"
                )

    @property
    def unread(self) -> frozenset[str]:
        """The names of the fields that were not read."""
        return frozenset(self._left)

    def finish(self, idle: Iterable[str] = ()) -> None:
        """Raises ValueError for an unread field that has a value and may have an effect."""
        ignored = []
        for name, value in self._left.items():
            if name in IDLE or name in idle or value in (None, False, 0, "", [], {}):
                continue
            if _OF_OTHER_PROGRAMS.fullmatch(name):
                ignored.append(name)
            else:
                path = self.within + name
                raise self.refuse(
                    name,
                    value,
                    "is unknown to dlm_jax and may have an effect; if it does not change the "
                    f"model's outputs, ignore it: --ignore-config {path}, ignore_config="
                    f"[{path!r}] of dlm_jax.load, or train.ignore_config={path}",
                )
        self.ignored = tuple(ignored)


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object with these pairs; raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} is given twice")
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=without_twins)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; download the whole directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return found


Source = str | tuple[str, tuple[int, int]]
"""The name of the tensor in which a parameter is stored.

In the name, ``{i}`` is the index of the block and ``{e}`` the index of the expert. If the tensor
contains several parameters, the source is the pair (name, (first row, end row)).
"""


@dataclass(frozen=True)
class TensorPart:
    """The part of a parameter that one tensor contains.

    Attributes:
      tensor: name of the tensor.
      part: index into the tensor: (rows,), or (expert, rows) if the tensor contains all experts.
      shape: stored shape of this part.
      place: index into the parameter: (layer,), (layer, expert), or () for the whole parameter.
      is_transposed: whether the two axes are swapped: linear maps are stored as ``[out, in]`` and
        loaded as ``[in, out]``.
    """

    tensor: str
    part: tuple[int | slice, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]
    is_transposed: bool


def pieces_of(
    sources: Mapping[str, Source], abstract: Params, *, layers: Mapping[str, tuple[int, ...]]
) -> dict[str, list[TensorPart]]:
    """The pieces of every parameter, by the parameter's path (``blocks/mlp/up/kernel``).

    `layers` maps each stack of blocks to its layer indices.
    """
    found: dict[str, list[TensorPart]] = {}
    for path, leaf in named_leaves(abstract):
        if path not in sources:
            raise ValueError(
                f"this family has no tensor for {path}; disable the feature that needs it"
            )
        source = sources[path]
        name, rows = (source, ()) if isinstance(source, str) else source
        is_of_experts = bool(re.search(r"/expert_\w+$", path))
        is_transposed = path.endswith("/kernel") or is_of_experts
        is_whole = is_of_experts and "{e}" not in name  # the tensor holds all experts
        depth = ("{i}" in name) + is_of_experts
        shape = leaf.shape[depth:][::-1] if is_transposed else leaf.shape[depth:]
        numbers = layers.get(path.partition("/")[0], ())
        found[path] = []
        for place in np.ndindex(*leaf.shape[:depth]):
            layer, expert = (*place, 0, 0)[:2]
            tensor = name.format(i=numbers[layer] if numbers else layer, e=expert)
            part = (expert,) * is_whole + ((slice(*rows),) if rows else (slice(None),))
            found[path].append(TensorPart(tensor, part, shape, place, is_transposed))
    return found


def tensor_shapes(pieces: Mapping[str, list[TensorPart]]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, derived from its pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in (piece for parts in pieces.values() for piece in parts):
        *lead, rows = piece.part
        ends = [*(at + 1 for at in lead if isinstance(at, int))]
        ends.append((rows.stop if isinstance(rows, slice) else 0) or piece.shape[0])
        known = shapes.get(piece.tensor, (0,) * len(ends))
        ends = [max(pair) for pair in zip(ends, known, strict=False)]
        shapes[piece.tensor] = (*ends, *piece.shape[1:])
    return shapes


@dataclasses.dataclass(frozen=True)
class Family:
    """Published models with the same directory layout.

    Attributes:
      name: short name in lower case.
      architectures: values of ``architectures`` in config.json; exports write the first.
      model_type: value of ``model_type`` in config.json.
      read: maps the fields of a config.json to a `ModelConfig`, or raises ValueError.
      write: maps a `ModelConfig` to the fields of a config.json; `read` is the inverse.
      sources: maps a `ModelConfig` to a dict from the path of each parameter to its tensor.
      max_length: name of the field with the maximum row length.
      mask_id: id of MASK if the model's files do not name it; None if there is no such id.
      trained_length: length of the training rows if it is below the maximum length in config.json;
          otherwise 0.
      presets: settings of the family's decoding loops, keyed by name; the first is the default.
      idle: fields of config.json that have no effect.
      within: the field of config.json that contains the fields of the language model; '' if they
        are at the top level.
      outside: fields that are written outside `within`.
      generates_from_mask: whether the family's program accepts MASK in generation_config.json.
      process: forward process of the training; a value of ``objective.process``.
      recommended: maps ``(fields of generation_config.json, model)`` to settings, for fields that
        are specific to the family.
      spoken: the inverse, which maps ``(settings, model)`` to fields; the result can be empty.
      other_names: ``(pattern, replacement)`` pairs for alternative names of tensors; an empty
        replacement omits the tensor.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    read: Callable[[FileFields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    sources: Callable[[ModelConfig], dict[str, Source]]
    max_length: str = "max_position_embeddings"
    mask_id: int | None = None
    trained_length: int = 0
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    idle: tuple[str, ...] = ()
    within: str = ""
    outside: tuple[str, ...] = ()
    generates_from_mask: bool = True
    process: str = "masked"
    recommended: Callable[[Mapping[str, Any], ModelConfig], dict[str, Any]] = lambda *_: {}
    spoken: Callable[[SamplingParams, ModelConfig], dict[str, Any]] = lambda *_: {}
    other_names: tuple[tuple[str, str], ...] = ()

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json, merged with the fields in `within`."""
        inner = config.get(self.within) or {}
        if not isinstance(inner, dict):
            raise ValueError(f"{self.within}={inner!r} is not an object; the file is damaged")
        return {name: value for name, value in config.items() if name != self.within} | inner

    def name_of(self, tensor: str) -> str:
        """The usual name of a tensor; '' if the tensor is omitted."""
        for pattern, replacement in self.other_names:
            if re.match(pattern, tensor):
                return re.sub(pattern, replacement, tensor) if replacement else ""
        return tensor


# Tensor names that many families use, by path of the parameter in a block.
QWEN = {
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
    **{
        f"mlp/expert_{part}": f"mlp.experts.{{e}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}


def qwen_sources(model: ModelConfig, *, more: Mapping[str, str] | None = None) -> dict[str, Source]:
    """Sources with the tensor names of Qwen, Llama and others (``model.layers.0.mlp...``)."""
    mlp = EXPERTS if model.experts else DENSE
    blocks = QWEN | dict(more or {})
    return in_blocks(blocks | mlp, blocks | DENSE, "model.layers.{i}.") | {
        "embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
        "head/kernel": "lm_head.weight",
    }


def in_blocks(
    blocks: Mapping[str, str], dense_blocks: Mapping[str, str], prefix: str
) -> dict[str, Source]:
    """Sources of the parameters in the blocks and in the dense blocks before them."""
    found: dict[str, Source] = {f"blocks/{path}": prefix + name for path, name in blocks.items()}
    return found | {f"dense_blocks/{path}": prefix + name for path, name in dense_blocks.items()}


LLADA: dict[str, dict[str, Any]] = {
    # generate.py of LLaDA (Nie et al. 2025), and its README.
    "llada": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "low_confidence", "schedule": "linear", "confidence": "sampled",
        "ties": "lower",
    },
    # generate.py of Fast-dLLM (Wu et al. 2025), which commits all holes at or above the threshold.
    "fast": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "threshold", "threshold": 0.9, "confidence": "sampled", "ties": "lower",
    },
}  # fmt: skip

DREAM: dict[str, dict[str, Any]] = {
    # diffusion_generate of Dream (Ye et al. 2025), and its README.
    "dream": {
        "gen_length": 512, "steps": 512, "temperature": 0.2, "top_p": 0.95, "order": "entropy",
        "schedule": "timesteps", "confidence_of": "filtered", "ties": "lower",
    },
    "greedy": {
        "gen_length": 512, "steps": 512, "temperature": 0.0, "order": "entropy",
        "schedule": "timesteps", "ties": "lower",
    },
}  # fmt: skip

LLADA_MOE: dict[str, dict[str, Any]] = {"llada": LLADA["llada"]}

SDAR: dict[str, dict[str, Any]] = {
    # generate.py of SDAR (low_confidence_dynamic), greedy; 4 steps per block of 4.
    "sdar": {
        "gen_length": 128, "steps": 132, "temperature": 0.0, "order": "threshold",
        "threshold": 0.85, "threshold_above": True, "confidence": "sampled", "stop_at_eos": True,
        "cache": "exact", "ties": "lower",
    },
    "static": {
        "gen_length": 128, "steps": 132, "temperature": 0.0, "order": "low_confidence",
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

LLADA2: dict[str, dict[str, Any]] = {
    # generate of LLaDA2.0, with 32 steps per block of 32 tokens.
    "llada2": {
        "gen_length": 256, "steps": 288, "temperature": 0.0, "order": "threshold",
        "threshold": 0.95, "threshold_above": True, "confidence": "sampled", "stop_at_eos": True,
        "cache": "exact", "ties": "lower",
    },
    # generate of LLaDA2.1: 32 steps per block, and up to 16 further steps that rewrite tokens.
    "llada2.1": {
        "gen_length": 256, "steps": 432, "temperature": 0.0, "order": "joint_threshold",
        "threshold": 0.95, "threshold_above": True, "rewrite_threshold": 0.9, "rewrite_steps": 16,
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

FAST_DLLM: dict[str, dict[str, Any]] = {
    # generate of Fast-dLLM v2 (Wu et al. 2025) and its README: sub-blocks of 8 in blocks of 32.
    # Each block starts with a token that the previous block predicts.
    "fast_dllm": {
        "gen_length": 512, "steps": 544, "block_length": 8, "temperature": 0.0,
        "order": "threshold", "threshold": 0.9, "threshold_above": True, "threshold_alone": 32,
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

DIFFUSION_GEMMA: dict[str, dict[str, Any]] = {
    # generate of DiffusionGemma in transformers: 48 steps for a canvas of 256, and a temperature
    # that falls from 0.8 towards 0.4 and would reach it one step after the last.
    "diffusion_gemma": {
        "gen_length": 256, "steps": 48, "temperature": 0.8, "temperature_end": 0.408333333,
        "order": "entropy_renoise", "entropy_bound": 0.1, "renoise_stop": 0.005,
        "stop_at_eos": True, "cache": "exact", "ties": "lower",
    },
    "greedy": {
        "gen_length": 256, "steps": 48, "temperature": 0.0, "temperature_end": -1.0,
        "order": "entropy_renoise", "entropy_bound": 0.1, "renoise_stop": 0.005,
        "stop_at_eos": True, "cache": "exact", "ties": "lower",
    },
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "greedy": {
        "gen_length": 128, "steps": 128, "temperature": 0.0, "order": "left_to_right",
        "stop_at_eos": True, "block_length": 1, "cache": "exact", "ties": "lower",
    },
}  # fmt: skip
