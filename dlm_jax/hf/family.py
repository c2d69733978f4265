"""A family of published models: config fields, tensor names and presets, as tables.

Every field of a config.json is used, known to have no effect, or rejected. Presets express the
sampling loops of the models' own programs as settings. The first is the default.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import nearest

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


GENERATION = "generation_config.json"
OWN = "dlm_jax"
"""The field of `GENERATION` with settings of this library, which precede the other fields. Exports
write there only settings without another field."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Fields of `GENERATION` that apply only with ``do_sample`` true."""

_SHARED = dict(zip(_SAMPLING, _SAMPLING, strict=True)) | {
    "repetition_penalty": "repetition_penalty",
    "steps": "steps",
    "max_new_tokens": "gen_length",
}
"""Fields of `GENERATION` that are settings, and the names of these settings in this library."""


def read_settings(
    directory: Path,
    length: int,
    of_family: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda said: {},
) -> dict[str, Any]:
    """The settings that generation_config.json recommends; empty if there is no such file.

    Sampling follows Hugging Face: ``do_sample`` false means temperature 0, and is the default if
    the file has a temperature, ``top_k``, ``top_p``, ``min_p`` or ``typical_p``; ``do_sample`` true
    means temperature 1 unless the file sets one. Without any of these fields, the family sets the
    temperature. A generation longer than the canvas of `length` tokens is replaced by one that
    fills the space after the prompt. `of_family` is `Family.recommended`, for the fields of one
    family.
    """
    file = directory / GENERATION
    said = read_json(file) if file.exists() else {}
    extra = said.get(OWN) or {}
    settings = {name: said[field] for field, name in _SHARED.items() if said.get(field) is not None}
    does_sample = said.get("do_sample")
    if not isinstance(does_sample, bool | None):
        raise ValueError(f"{file}: do_sample={does_sample!r} is not a bool; use true or false")
    is_greedy = not does_sample and (does_sample is not None or settings.keys() & set(_SAMPLING))
    if does_sample:
        settings.setdefault("temperature", 1.0)
    try:
        settings |= of_family(said)
        for name, value in (settings | extra).items():
            if name not in BUILT_IN.settings:
                known = tuple(BUILT_IN.settings)
                raise ValueError(f"{name[:60]!r} is not a setting; {nearest(name[:60], known)}")
            settings[name] = BUILT_IN.settings[name].checked(value)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if is_greedy and "temperature" not in extra:
        settings["temperature"] = 0.0
    if settings.get("gen_length", 0) > length and "gen_length" not in extra:
        settings |= {"gen_length": 0, "steps": settings.get("steps", length)}
    return settings


def settings_fields(sample: SamplingParams, implied: SamplingParams) -> dict[str, Any]:
    """The fields of generation_config.json from which `read_settings` restores `sample`."""
    values = {name: getattr(sample, name) for name in BUILT_IN.settings}
    changed = {name: v for name, v in values.items() if v != getattr(implied, name)}
    # A reader scales steps that are not named, and ends with the temperature that is named.
    if "gen_length" in changed:
        changed["steps"] = sample.steps
    fields = {field: changed.pop(name) for field, name in _SHARED.items() if name in changed}
    if fields.get("max_new_tokens") == 0:
        changed["gen_length"] = fields.pop("max_new_tokens")
    if fields.keys() & set(_SAMPLING):
        if sample.temperature_end != -1:
            changed["temperature_end"] = sample.temperature_end
        fields["do_sample"] = sample.temperature > 0
        fields["temperature"] = sample.temperature
        if not fields["do_sample"]:
            del fields["temperature"]
    return fields | ({OWN: changed} if changed else {})


def presets_of(family: Family, model: ModelConfig) -> dict[str, dict[str, Any]]:
    """The presets of a family; the block lengths of one with `threshold_alone` fit the model."""
    presets = {name: dict(preset) for name, preset in family.presets.items()}
    for preset in presets.values():
        if preset.get("threshold_alone"):
            preset["block_length"] = math.gcd(preset["block_length"], model.block_length)
            preset["threshold_alone"] = model.block_length
    return presets


def implied_sample(family: Family, model: ModelConfig, length: int) -> SamplingParams:
    """The first preset of a family, adapted to a canvas of `length` tokens."""
    settings = next(iter(presets_of(family, model).values()), {})
    if settings.get("gen_length", 0) > length:
        settings |= {"gen_length": length, "steps": length}
    return SamplingParams(**settings)


def recommended(implied: SamplingParams, said: Mapping[str, Any]) -> SamplingParams:
    """A directory's settings; a length without steps keeps the number of tokens per step."""
    if "temperature" in said:
        said = {"temperature_end": -1.0} | dict(said)
    sample = dataclasses.replace(implied, **said)
    if "gen_length" in said and "steps" not in said:
        tokens = implied.gen_length or implied.steps
        steps = -(-implied.steps * sample.gen_length // tokens)
        sample = dataclasses.replace(sample, steps=max(steps, 1))
    return sample
