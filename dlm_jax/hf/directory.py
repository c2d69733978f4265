"""Reads and writes a model as a directory in Hub layout; code in the directory never runs.

A written directory can be read by the family's own programs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, SamplingParams
from dlm_jax.data import NO_MASK, HubTokenizer, SubwordTokenizer, check_fits
from dlm_jax.data.tokenizers import added_token, bpe_json, qwen_split
from dlm_jax.hf import gemma, llada, qwen
from dlm_jax.hf.chat import ChatTemplate
from dlm_jax.hf.family import (
    GENERATION,
    Family,
    FileFields,
    implied_sample,
    presets_of,
    read_json,
    read_settings,
    recommended,
    settings_fields,
)
from dlm_jax.hf.gguf import TENSORS, is_gguf, opened
from dlm_jax.hf.tensors import (
    Place,
    Shards,
    Tensors,
    WithMaskRow,
    check_tensors,
    pieces_of,
    read_params,
    write_weights,
)
from dlm_jax.model.lora import STACKS
from dlm_jax.model.transformer import build
from dlm_jax.randomness import key_of
from dlm_jax.settings import SettingError, brief, closest
from dlm_jax.store.files import said as reason_of
from dlm_jax.types import Params

CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
_MASK_NAMES = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "|<MASK>|", "[MASK]", "<mask>")


FAMILIES: dict[str, Family] = {
    family.name: family for family in (*llada.FAMILIES, *qwen.FAMILIES, *gemma.FAMILIES)
}
"""Families by name."""


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    ``architectures`` selects the family. ``model_type`` is used only if ``architectures`` is
    absent, because some families share it.
    """
    named = config.get("architectures") or []
    named = [str(name) for name in (named if isinstance(named, list) else [named])]
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    kind = config.get("model_type")
    matching = [known[name] for name in named if name in known]
    if not named:
        matching = [family for family in FAMILIES.values() if family.model_type == kind]
    if matching and (named or len(matching) == 1):
        return matching[0]
    near = f"the nearest is {closest(named[0][:60], known)!r}; " if named else ""
    raise ValueError(
        f"{where}: architectures={brief(named)} is not a supported family, nor is the model_type "
        f"{brief(kind)}; {near}docs/published.md lists all"
    )


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The first family whose config.json can express all settings of a model.

    A model without biases on queries, keys and values fits a family that has them, because biases
    of zero change nothing, but a family without them comes first.

    Raises:
      ValueError: there is no such family; the message names the settings that the nearest one
        requires.
    """
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family={name!r} is unknown; use one of {', '.join(FAMILIES)}")
    ours, others, refused = comparable(model), [], ""
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        try:
            said = comparable(expressed(family, model))
        except ValueError as error:  # the family does not support the model
            refused = f" ({error})"
            continue
        others.append((family, {key: at for key, at in said.items() if at != ours[key]}))
    for accepted in ({}, {"qkv_bias": True}):
        for family, differing in others:
            if differing == accepted:
                return family
    what = f"family={name!r} cannot" if name else "no published family can"
    if others:
        family, differing = min(others, key=lambda other: len(other[1]))
        needed = (f"model.{key}={at!r}, not {ours[key]!r}" for key, at in differing.items())
        refused = f"; {family.name} requires {', '.join(needed)}"
    raise ValueError(f"{what} express the settings of [model]{refused}")


def expressed(family: Family, model: ModelConfig) -> ModelConfig:
    """The model that the family reads from its config.json of `model`."""
    return family.read(FileFields(family.write(model), "config"))


UNPUBLISHED = frozenset(
    {"lora_rank", "lora_alpha", "lora_targets", "compute_dtype", "remat"}
    | {"add_sampler_head", "sampler_context", "sampler_residual"}
    | {"add_critic_head"}
)
"""Settings of ``[model]`` that published models do not define."""


def comparable(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect the computation of a model, in canonical form."""
    said = vars(model) | {"kv_heads": model.kv_heads or model.heads}
    said |= {"head_size": model.size_of_head}
    idle = (UNPUBLISHED - {"lora_rank"}) | {"start_id"}
    return {key: value for key, value in said.items() if key not in idle}


@dataclasses.dataclass(frozen=True)
class Published:
    """The content of a published directory."""

    family: Family
    config: Config
    params: Params
    tokenizer: HubTokenizer
    chat: ChatTemplate | None
    presets: Mapping[str, Mapping[str, Any]]
    more_eos_ids: tuple[int, ...]
    settings: Mapping[str, Any]


def is_published(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory with a config.json, or a GGUF file."""
    return is_gguf(path) or (Path(path) / CONFIG).is_file()


def read_published(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    place: Place | None = None,
    ignore: Sequence[str] = (),
    adds_mask: bool = False,
) -> Published:
    """Loads the model in a directory, tensor by tensor.

    Args:
      path: directory with config.json, safetensors and a tokenizer; or a GGUF file.
      dtype: dtype of parameters and computation, ``float32`` or ``bfloat16``; None means the stored
        dtype.
      place: maps a parameter's path and shape to its sharding; None means the default device.
      ignore: fields of config.json that are not read.
      adds_mask: whether a vocabulary without MASK and without a free id gets one more id, as in
        `read_shape`. Its rows in the tables are the means of the other rows.
    """
    directory = Path(path)
    described = _describe(directory, ignore, adds_mask=adds_mask)
    family, model = described.family, described.config.model
    tensors: Tensors
    if is_gguf(directory):
        tensors, names = opened(directory), TENSORS
    else:
        tensors, names = Shards(directory, family.name_of), family.tensors
    head, table = names["head/kernel"], names["embedding"]

    def layout(model: ModelConfig) -> tuple[Any, Any]:
        shapes = jax.eval_shape(build(model).init, key_of(0))
        return shapes, pieces_of(names, shapes, layers=model.layers)

    unused = {head} if model.tied_head else ()
    shapes, pieces = layout(model)
    check_tensors(tensors, pieces, where=str(directory), unused=unused)
    whole = _with_mask(model, described.tokenizer)
    if whole != model:
        tensors = WithMaskRow(tensors, (head, table))
        shapes, pieces = layout(whole)
    params = read_params(
        tensors,
        pieces,
        shapes,
        dtype=None if dtype is None else np.dtype(jnp.dtype(dtype)),
        place=place,
    )
    is_half = (dtype or tensors.entries[table].dtype.name) == "bfloat16"
    whole = dataclasses.replace(whole, compute_dtype="bfloat16" if is_half else "float32")
    config = dataclasses.replace(described.config, model=whole)
    return dataclasses.replace(described, config=config, params=params)


def _describe(directory: Path, ignore: Sequence[str] = (), *, adds_mask: bool) -> Published:
    """The content of a directory without parameters, for a vocabulary of the stored size."""
    family, model, longest, fields = read_model(directory, ignore)
    length = min(family.trained_length or longest, longest)
    settings = read_settings(directory, length, lambda said: family.recommended(said, model))
    tokenizer, more_eos = read_tokenizer(
        directory, family, fields, vocab_size=model.vocab_size, adds_mask=adds_mask
    )
    if tokenizer.mask_id == NO_MASK and model.attention_type != "causal":
        raise ValueError(
            f"{_config_of(directory)} has no field 'mask_token_id', and its vocabulary has no free "
            "id; add it"
        )
    config = Config(
        model=model,
        data=DataConfig(seq_len=length),
        objective=ObjectiveConfig(process=family.process),
        sample=recommended(implied_sample(family, model, length), settings),
    )
    return Published(
        family=family,
        config=config,
        params={},
        tokenizer=tokenizer,
        chat=read_chat(directory, tokenizer),
        presets=presets_of(family, model),
        more_eos_ids=more_eos,
        settings=settings,
    )


def read_shape(
    directory: Path, ignore: Sequence[str] = (), *, adds_mask: bool = False
) -> tuple[ModelConfig, HubTokenizer]:
    """A directory's model config and tokenizer, without weights; for `ignore`, see `read_model`.

    With `adds_mask`, a vocabulary without MASK and without a free id gets one more id.
    """
    described = _describe(directory, ignore, adds_mask=adds_mask)
    return _with_mask(described.config.model, described.tokenizer), described.tokenizer


def _with_mask(model: ModelConfig, tokenizer: HubTokenizer) -> ModelConfig:
    """The model config for the vocabulary with MASK, if there is one."""
    num_rows = 0 if tokenizer.mask_id == NO_MASK else tokenizer.mask_id + 1
    return dataclasses.replace(model, vocab_size=max(model.vocab_size, num_rows))


def _config_of(directory: Path) -> Path:
    """The file with the config of a model."""
    return directory if is_gguf(directory) else directory / CONFIG


def read_model(
    directory: Path, ignore: Sequence[str] = ()
) -> tuple[Family, ModelConfig, int, dict[str, Any]]:
    """A directory's family, model config, maximum number of tokens per row, and config fields.

    The fields in `ignore` are not read: those of config.json, such as ``rope_scaling.factor``, or
    keys of the metadata of a GGUF file. Raises ValueError for a name that is not a field.
    """
    where = _config_of(directory)
    said = opened(directory).read_config(ignore) if is_gguf(directory) else read_json(where)
    family = family_of(said, str(where))
    said = family.said(said)
    for name in () if is_gguf(directory) else ignore:
        said = _without(said, name, where)
    fields = FileFields(said, str(where))
    longest = fields.take(family.max_length, int, 4096)
    try:
        model = family.read(fields)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(where)) else f"{where}: {text}") from None
    fields.finish(family.idle)
    return family, model, longest, said


def _without(said: Mapping[str, Any], path: str, where: Path) -> dict[str, Any]:
    """The fields without the one at `path`, in which a dot names a field of an object."""
    outer, _, inner = path.partition(".")
    if path not in said and isinstance(said.get(outer), dict) and inner in said[outer]:
        rest = {name: value for name, value in said[outer].items() if name != inner}
        return {**said, outer: rest}
    if path not in said:
        raise SettingError("ignore_config", path, f"is not a field of {where}", "remove it")
    return {name: value for name, value in said.items() if name != path}


def read_tokenizer(
    directory: Path,
    family: Family,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    adds_mask: bool = False,
) -> tuple[HubTokenizer, tuple[int, ...]]:
    """A directory's tokenizer, and the ids other than EOS that end a generation.

    The tokenizer is made from vocab.json and merges.txt if there is no tokenizer.json. Special
    tokens are read from generation_config.json, config.json, tokenizer_config.json and the defaults
    of the family, in this order of precedence. An id of -1 means that there is no token.
    With `adds_mask`, a vocabulary without MASK and without a free id gets MASK as a new last id.
    """
    generation = _optional(directory / GENERATION)
    names = _optional(directory / "tokenizer_config.json")
    file = directory if is_gguf(directory) else directory / "tokenizer.json"
    try:
        if is_gguf(directory):
            content = opened(directory).tokenizer
        elif file.exists():
            content = file.read_text(encoding="utf-8-sig")
        else:
            lines = (directory / "merges.txt").read_text(encoding="utf-8-sig").splitlines()
            merges = [line for line in lines if line and not line.startswith("#version")]
            added = {
                int(id_): (token["content"], bool(token.get("special")))
                for id_, token in names.get("added_tokens_decoder", {}).items()
            }
            vocabulary = read_json(directory / "vocab.json")
            content = bpe_json(vocabulary, merges, added, (qwen_split(1),))
        plain = HubTokenizer(content, 0, 0, 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be used ({reason_of(error)}); download it again") from None

    def ids(role: str) -> tuple[int, ...]:
        for source in (generation, config):
            value = source.get(f"{role}_token_id")
            given: list[Any] = value if isinstance(value, list) else [value]
            if value != -1 and given and all(isinstance(id_, int) for id_ in given):
                return tuple(given)
        token = names.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        id_ = None if name is None else plain.id_of(str(name))
        return () if id_ is None else (id_,)

    roles = {role: ids(role) for role in ("mask", "pad", "eos", "bos")}
    # A causal model has no MASK. If the last id of the vocabulary is unused, it becomes MASK, so
    # that the model can be trained to fill holes.
    roles["mask"] = (
        roles["mask"]
        or tuple(id_ for id_ in map(plain.id_of, _MASK_NAMES) if id_ is not None)
        or (() if family.mask_id is None else (family.mask_id,))
        or ((vocab_size - 1,) if vocab_size > plain.vocab_size else ())
    )[:1]
    for role, given in roles.items():
        for id_ in given:
            if not 0 <= id_ < vocab_size:
                raise ValueError(
                    f"{_config_of(directory)}: {role}_token_id={id_} is outside the vocabulary of "
                    f"{vocab_size}; the tokenizer belongs to another model"
                )
    eos = roles["eos"] or roles["pad"]
    if not eos:
        raise ValueError(f"{_config_of(directory)} has no field 'eos_token_id'; add it")
    if not roles["mask"] and adds_mask:
        data, token = json.loads(plain.content), added_token(vocab_size, "<|mask|>")
        data["added_tokens"] = [*(data.get("added_tokens") or ()), token]
        plain = HubTokenizer(json.dumps(data, ensure_ascii=False), 0, 0, 0)
        roles["mask"] = (vocab_size,)
        vocab_size += 1
    mask, pad, bos = roles["mask"] or (NO_MASK,), roles["pad"] or eos, roles["bos"] or (None,)
    tokenizer = HubTokenizer(plain.content, mask[0], pad[0], eos[0], bos[0])
    try:
        check_fits(tokenizer, vocab_size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return tokenizer, eos[1:]


def read_chat(directory: Path, tokenizer: HubTokenizer) -> ChatTemplate | None:
    """The chat template of a directory, or None."""
    if is_gguf(directory):
        source = opened(directory).template
    elif (file := directory / TEMPLATE).exists():
        source = file.read_text(encoding="utf-8-sig", errors="replace")
    else:
        source = _optional(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        named = [one for one in source if isinstance(one, dict)]
        source = {one.get("name"): one.get("template") for one in named}.get("default")
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


KEPT = ("chat_template", "published")
"""Names in the metadata of a run for what it keeps of a published model: its chat template, and
`read_kept`."""


def read_kept(directory: Path, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """What a model trained from a directory keeps of it besides parameters and the chat template,
    as metadata: under ``published`` further ids that end a generation, the length of the canvas,
    and the settings of generation_config.json. `restored` reads them.
    """
    described = _describe(directory, ignore, adds_mask=True)
    return {
        "published": {
            "max_length": described.config.data.seq_len,
            "more_eos_ids": list(described.more_eos_ids),
            "settings": described.settings,
        }
    }


def restored(saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of a trained model that `read_kept` returned, as keyword arguments of `Model`.

    Sampling settings that the config changes take precedence over those of the directory, and these
    over the first preset of the family that can express the trained model.
    """
    length, plain, presets = max(saved["max_length"], config.data.seq_len), SamplingParams(), {}
    try:
        family = family_for(dataclasses.replace(config.model, lora_rank=0))
        presets = presets_of(family, config.model)
        implied = implied_sample(family, config.model, length)
    except ValueError:
        implied = dataclasses.replace(plain, gen_length=min(128, length), steps=min(128, length))
    changed = {
        name: value for name, value in vars(config.sample).items() if value != getattr(plain, name)
    }
    return {
        "max_length": length,
        "more_eos_ids": tuple(saved["more_eos_ids"]),
        "presets": presets,
        "sample": recommended(implied, saved["settings"] | changed),
    }


def write_published(
    path: str | os.PathLike[str],
    config: Config,
    params: Params,
    tokenizer: Any,
    *,
    family: str | None = None,
    chat: ChatTemplate | None = None,
    more_eos_ids: tuple[int, ...] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes the directory in one atomic move and returns the names of its files.

    Tensors are stored in the dtypes of the parameters.

    Args:
      path: a directory that does not exist yet.
      config: the model's config; its recommended settings are written to generation_config.json.
      params: the model's parameters; heads other than the LM head are not written.
      tokenizer: a `HubTokenizer` or a `SubwordTokenizer`.
      family: target family; None means the first family that can express all settings.
      chat: the model's chat template.
      more_eos_ids: ids that end a generation, besides the tokenizer's EOS.
      max_shard_bytes: maximum size of a weights file in bytes.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists already; choose a new directory")
    if not config.model.experts or config.model.dense_layers or config.model.full_every:
        # A width of 0 stands for a width that only this library knows.
        model = dataclasses.replace(config.model, mlp_width=config.model.inner_width)
        config = dataclasses.replace(config, model=model)
    layout = family_for(config.model, family)
    if config.objective.process != layout.process:
        raise ValueError(
            f"the model was trained with objective.process={config.objective.process!r}, but "
            f"programs of the family {layout.name} sample {layout.process!r} models"
        )
    if isinstance(tokenizer, SubwordTokenizer):
        tokenizer = tokenizer.published()
    if not isinstance(tokenizer, HubTokenizer):
        raise ValueError(
            f"the model has a {tokenizer.to_json()['type']} tokenizer, which no tokenizer.json can "
            "describe; train with data.tokenizer=bpe:N or the path of a tokenizer.json"
        )
    stored = {name: tree for name, tree in params.items() if not name.endswith("_head")}
    model = expressed(layout, config.model)
    if model.qkv_bias and not config.model.qkv_bias:
        config, stored = dataclasses.replace(config, model=model), _with_zero_biases(stored)
    pieces = pieces_of(layout.tensors, stored, layers=config.model.layers)

    model, longest = config.model, config.data.seq_len
    ids = {role: getattr(tokenizer, f"{role}_id") for role in ("mask", "pad", "eos", "bos")}
    ids = {role: id_ for role, id_ in ids.items() if id_ not in (None, NO_MASK)}
    generation: dict[str, Any] = {f"{role}_token_id": id_ for role, id_ in ids.items()}
    fields = layout.write(model) | generation | {layout.max_length: longest, "use_cache": False}
    fields["torch_dtype"] = str(stored["embedding"].dtype)
    outer = {name: fields.pop(name) for name in layout.outside}
    outer |= {"architectures": [layout.architectures[0]], "model_type": layout.model_type}
    fields = outer | ({layout.within: fields} if layout.within else fields)
    if more_eos_ids:
        generation["eos_token_id"] = [tokenizer.eos_id, *more_eos_ids]
    if not layout.generates_from_mask:
        generation.pop("mask_token_id", None)
    implied = implied_sample(layout, model, min(layout.trained_length or longest, longest))
    if config.sample != implied:
        generation |= settings_fields(config.sample, implied)
    names = {f"{role}_token": name for role, id_ in ids.items() if (name := tokenizer.token(id_))}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    names |= {} if chat is None else {"chat_template": chat.source}

    texts = {"tokenizer.json": tokenizer.content} | ({TEMPLATE: chat.source} if chat else {})
    texts[CONFIG] = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    for name, values in ((GENERATION, generation), ("tokenizer_config.json", names)):
        texts[name] = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_weights(temporary, stored, pieces, max_shard_bytes)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file.name for file in target.iterdir())


def _with_zero_biases(params: Params) -> Params:
    """The parameters of an equal model with biases on queries, keys and values."""

    def biased(stack: Params) -> Params:
        attention = dict(stack["attention"])
        for part in ("query", "key", "value"):
            bias = np.zeros_like(attention[part]["kernel"][:, 0])
            attention[part] = attention[part] | {"bias": bias}
        return stack | {"attention": attention}

    return params | {name: biased(params[name]) for name in STACKS if name in params}
