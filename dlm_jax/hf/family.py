"""A family of published models: config fields, tensor names and presets, as tables.

Every field of a config.json is used, known to have no effect, or rejected. Presets express the
sampling loops of the models' own programs as settings. The first is the default.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.types import Params

_MISSING = object()

_IDLE = re.compile(
    r"_name_or_path|architectures|attention_dropout|auto_map|bos_token|bos_token_id"
    r"|chunk_size_feed_forward|dtype|embedding_dropout|eos_token|eos_token_id|flash_attention"
    r"|id2label|init_cutoff_factor|init_device|init_fn|init_std|initializer_range|label2id"
    r"|mask_token_id|max_window_layers|mlp_ratio|model_type|name_or_path|output_attentions"
    r"|output_dropout|output_hidden_states|output_router_logits|pad_token_id|precision"
    r"|pretraining_tp|problem_type|residual_dropout|return_dict|rope_full_precision"
    r"|router_aux_loss_coef|sliding_window|torch_dtype|transformers_version|use_cache"
    # Fields of other programs.
    r"|\w+_version|_attn_implementation\w*"
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
"""Fields that do not affect the computation of a model, or that other code reads."""

_UNKNOWN = re.compile(r"is_llama_config|transformers\.js_config|unsloth_\w+")
"""Fields without a known meaning, which name no computation."""


class FileFields:
    """The fields of one file; `finish` raises ValueError for unread fields.

    Attributes:
      values: all fields.
      where: name of the file.
      within: the path of the object that contains the fields, such as ``rope_scaling.``.
      unread: the fields that were not read.
    """

    def __init__(self, values: Mapping[str, Any], where: str, within: str = ""):
        self.unread = dict(values)
        self.values = values
        self.where = where
        self.within = within

    def refuse(self, name: str, value: Any, reason: str) -> ValueError:
        return ValueError(f"{self.where}: {name}={value!r} {reason}")

    def take(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of a field, which must have the type `kind`; null means the default."""
        value = self.unread.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where} has no field {name!r}, which this model needs")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(name, value, f"is not a {kind.__name__}; the file is damaged")
        return value

    def must(self, **implemented: Any) -> None:
        """Raises ValueError for fields with values that are not implemented.

        Absent and null fields are accepted. A tuple lists several implemented values.
        """
        for name, values in implemented.items():
            value = self.unread.pop(name, None)
            known = values if isinstance(values, tuple) else (values,)
            if value is not None and value not in known:
                raise self.refuse(
                    name, value, f"is not implemented; only {' or '.join(map(repr, known))} is"
                )

    def finish(self, idle: Iterable[str] = ()) -> None:
        """Raises ValueError for an unread field that has a value and may have an effect, and warns
        of unknown fields that name no computation.
        """
        for name, value in self.unread.items():
            path = self.within + name
            if _IDLE.fullmatch(name) or name in idle or value in (None, False, 0, "", [], {}):
                continue
            if _UNKNOWN.fullmatch(name):
                warnings.warn(f"{self.where}: {path} is unknown and ignored", stacklevel=2)
                continue
            raise self.refuse(
                name,
                value,
                "is unknown to dlm_jax and may have an effect; if it does not change the model's "
                f"outputs, ignore it: --ignore-config {path}, ignore_config=[{path!r}] of "
                f"dlm_jax.load, or train.ignore_config={path}",
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; download the whole directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return value


class TensorPart(NamedTuple):
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
    tensors: Mapping[str, str], abstract: Params, *, layers: Mapping[str, tuple[int, ...]]
) -> dict[str, list[TensorPart]]:
    """The pieces of every parameter, by the parameter's path (``blocks/mlp/up/kernel``).

    Args:
      tensors: the tensor of each parameter, as in `Family.tensors`.
      abstract: the parameters, or their shapes.
      layers: the layer indices of each stack of blocks.
    """
    order = {path: at for at, path in enumerate(tensors)}
    pieces: dict[str, list[TensorPart]] = {}
    row_of: dict[tuple[str, int], int] = {}
    rows = []
    for path, leaf in named_leaves(abstract):
        name = path.removeprefix("dense_").removeprefix("full_")
        if name not in tensors:
            raise ValueError(
                f"this family has no tensor for {path}; disable the feature that needs it"
            )
        pieces[path] = []
        rows.append((order[name], path, leaf, tensors[name]))
    for _, path, leaf, name in sorted(rows, key=lambda row: row[0]):
        is_of_experts = path.rpartition("/")[2].startswith("expert_")
        is_transposed = path.endswith("/kernel") or is_of_experts
        holds_all_experts = is_of_experts and "{e}" not in name
        depth = ("{i}" in name) + is_of_experts
        shape = leaf.shape[depth:][::-1] if is_transposed else leaf.shape[depth:]
        numbers = layers.get(path.partition("/")[0], ())
        for place in np.ndindex(*leaf.shape[:depth]):
            layer, expert = (*place, 0, 0)[:2]
            tensor = name.format(i=numbers[layer] if numbers else layer, e=expert)
            first = row_of.get((tensor, expert), 0)
            row_of[tensor, expert] = end = first + shape[0]
            part = (expert,) * holds_all_experts + (slice(first, end),)
            pieces[path].append(TensorPart(tensor, part, shape, place, is_transposed))
    return pieces


def tensor_shapes(pieces: Mapping[str, list[TensorPart]]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, derived from its pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in (piece for parts in pieces.values() for piece in parts):
        ends = [at.stop if isinstance(at, slice) else at + 1 for at in piece.part]
        known = shapes.get(piece.tensor, (0,) * len(ends))
        ends = [max(pair) for pair in zip(ends, known, strict=False)]
        shapes[piece.tensor] = (*ends, *piece.shape[1:])
    return shapes


_PLAIN = ModelConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Published models with the same directory layout.

    Attributes:
      name: short name in lower case.
      architectures: values of ``architectures`` in config.json; exports write the first.
      model_type: value of ``model_type`` in config.json.
      fields: fields of config.json, each with its setting in ``[model]`` and the value that an
        absent or null field means; without such a value, the field is required.
      fixed: fields that are written with this value, which alone is implemented if the field has an
        effect. Of a tuple, all values are implemented and the first is written.
      checked: as `fixed`, but not written.
      settings: settings in ``[model]`` that all models of the family have.
      read_more: maps the fields, and the settings that are read so far, to further settings.
      write_more: maps a model and its fields so far to all fields.
      tensors: the tensor of each parameter, in which ``{i}`` is the index of the block and ``{e}``
        that of the expert. Parameters with the same tensor are its rows, in this order. Blocks with
        a plain MLP and full layers have the names of ``blocks``.
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
      other_names: ``(pattern, replacement)`` pairs for alternative names of tensors; an empty
        replacement omits the tensor.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    fields: Mapping[str, tuple[Any, ...]]
    tensors: Mapping[str, str]
    presets: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read_more: Callable[[FileFields, dict[str, Any]], dict[str, Any]] = lambda *_: {}
    write_more: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] = lambda _, fields: fields
    max_length: str = "max_position_embeddings"
    mask_id: int | None = None
    trained_length: int = 0
    idle: tuple[str, ...] = ()
    within: str = ""
    outside: tuple[str, ...] = ()
    generates_from_mask: bool = True
    process: str = "masked"
    recommended: Callable[[Mapping[str, Any], ModelConfig], dict[str, Any]] = lambda *_: {}
    other_names: tuple[tuple[str, str], ...] = ()

    def read(self, fields: FileFields) -> ModelConfig:
        """The model that the fields of a config.json describe; raises ValueError."""
        is_idle = {name: _IDLE.fullmatch(name) or name in self.idle for name in self.fixed}
        fields.must(**{name: v for name, v in self.fixed.items() if not is_idle[name]})
        fields.must(**self.checked)
        settings: dict[str, Any] = dict(self.settings)
        for name, (setting, *default) in self.fields.items():
            settings[setting] = fields.take(name, type(getattr(_PLAIN, setting)), *default)
        settings |= self.read_more(fields, settings)
        if settings.get("experts", 1) < 1:
            reason = "leaves no experts; use a family without them"
            raise fields.refuse("num_experts", settings["experts"], reason)
        settings["kv_heads"] = settings["kv_heads"] or settings["heads"]
        if settings.get("head_size", 0) * settings["heads"] == settings["width"]:
            settings["head_size"] = 0
        return ModelConfig(**settings)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of a model's config.json; `read` is the inverse."""
        values = {
            **vars(model),
            "kv_heads": model.kv_heads or model.heads,
            "head_size": model.size_of_head,
        }
        fixed = {name: v[0] if isinstance(v, tuple) else v for name, v in self.fixed.items()}
        fields = {name: values[setting] for name, (setting, *_) in self.fields.items()}
        return self.write_more(model, fixed | fields)

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json, merged with the fields in `within`."""
        outer = {name: value for name, value in config.items() if name != self.within}
        return outer | (config.get(self.within) or {})

    def name_of(self, tensor: str) -> str:
        """The usual name of a tensor; '' if the tensor is omitted."""
        for pattern, replacement in self.other_names:
            if re.match(pattern, tensor):
                return re.sub(pattern, replacement, tensor) if replacement else ""
        return tensor
