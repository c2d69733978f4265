"""Reads and writes a model as a directory in Hub layout; code in the directory never runs.

A written directory can be read by the family's own programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, SamplingParams
from dlm_jax.data import NO_MASK, HubTokenizer, SubwordTokenizer, check_fits, qwen_json
from dlm_jax.model.lora import STACKS
from dlm_jax.model.transformer import build
from dlm_jax.published.chat import ChatTemplate, check_template
from dlm_jax.published.families import expressed, family_for, family_of
from dlm_jax.published.family import Family, FileFields, pieces_of, read_json
from dlm_jax.published.gguf import SOURCES, is_gguf, opened
from dlm_jax.published.tensors import (
    Finish,
    Place,
    Shards,
    check_tensors,
    read_params,
    write_weights,
)
from dlm_jax.randomness import key_of
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import SettingError, nearest
from dlm_jax.store.files import refused_unless_full
from dlm_jax.types import Params

CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
OWN = "dlm_jax"
"""The field of `GENERATION` with the settings that only this library has."""

_SHARED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "steps": "steps",
    "max_new_tokens": "gen_length",
}
"""Fields of `GENERATION` that are settings, and the names of these settings in this library."""

_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Fields of `GENERATION` that apply only with ``do_sample`` true."""

_MASK_NAMES = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "|<MASK>|", "[MASK]", "<mask>")
_ADDED_MASK = "<|mask|>"

TABLES = {"embedding": 0, "head/kernel": 1}
"""The parameters with a vocabulary axis, and the index of that axis."""


@dataclasses.dataclass(frozen=True)
class Published:
    """The content of a published directory.

    Attributes:
      ignored: fields of config.json that were not read and name no computation.
    """

    family: Family
    config: Config
    params: Params
    tokenizer: HubTokenizer
    chat: ChatTemplate | None
    presets: Mapping[str, Mapping[str, Any]]
    more_eos_ids: tuple[int, ...]
    settings: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


def is_published(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a directory with a config.json, or a GGUF file."""
    return is_gguf(path) or (Path(path) / CONFIG).is_file()


def read_published(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    place: Place | None = None,
    finish: Finish = lambda path, parameter: parameter,
    ignore: Sequence[str] = (),
    adds_mask: bool = False,
    mask_like: str = "",
) -> Published:
    """Loads the model in a directory, tensor by tensor.

    Args:
      path: directory with config.json, safetensors and a tokenizer; or a GGUF file.
      dtype: dtype of parameters and computation, ``float32`` or ``bfloat16``; None means the stored
        dtype.
      place: maps a parameter's path and shape to its sharding; None means the default device.
      finish: converts each parameter to its final form as it is loaded.
      ignore: fields of config.json that are not read.
      adds_mask: whether a vocabulary without MASK and without a free id gets one more id, as in
        `read_shape`. Its rows in the tables are the means of the other rows.
      mask_like: token whose rows a MASK without a name gets instead; empty: see `adds_mask`.
    """
    directory = Path(path)
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} is unknown; use 'float32' or 'bfloat16'")
    family, model, longest, fields, ignored = read_model(directory, ignore)
    length = min(family.trained_length or longest, longest)
    said = read_settings(directory, length, lambda said: family.recommended(said, model))
    shards = opened(directory) if is_gguf(directory) else Shards(directory, family.name_of)
    tokenizer, more_eos = read_tokenizer(
        directory, family, fields, vocab_size=model.vocab_size, adds_mask=adds_mask
    )
    chat = read_chat(directory, tokenizer)
    abstract = jax.eval_shape(build(model).init, key_of(0))
    sources = SOURCES if is_gguf(directory) else family.sources(model)
    pieces = pieces_of(sources, abstract, layers=model.layers)
    table = pieces["embedding"][0].tensor
    redundant = {str(sources["head/kernel"]): table} if model.tied_head else {}
    check_tensors(
        shards, pieces, redundant=redundant, where=str(directory), config=_config_of(directory).name
    )
    _check_mask(tokenizer, model, directory)
    stored = shards.entries[table].dtype.name
    model = dataclasses.replace(
        model, compute_dtype="bfloat16" if (dtype or stored) == "bfloat16" else "float32"
    )
    place = place or (lambda path, shape: None)
    whole = _with_mask(model, tokenizer) if adds_mask else model
    if adds_mask and (mask_like or whole != model):
        like = _row_of(mask_like, tokenizer, model) if mask_like else None
        place, finish = _with_mask_row(whole, model.vocab_size, like, place, finish)
    params = read_params(
        shards,
        pieces,
        abstract,
        dtype=None if dtype is None else np.dtype(jax.numpy.dtype(dtype)),
        place=place,
        finish=finish,
    )
    model = whole
    presets = {name: _fitted(preset, model) for name, preset in family.presets.items()}
    config = Config(
        model=model,
        data=DataConfig(seq_len=length),
        objective=ObjectiveConfig(process=family.process),
        sample=_recommended(implied_sample(family, model, length), said),
    )
    return Published(family, config, params, tokenizer, chat, presets, more_eos, said, ignored)


def read_shape(
    directory: Path, ignore: Sequence[str] = (), *, adds_mask: bool = False
) -> tuple[ModelConfig, HubTokenizer]:
    """A directory's model config and tokenizer, without weights; for `ignore`, see `read_model`.

    With `adds_mask`, a vocabulary without MASK and without a free id gets one more id.
    """
    family, model, _, fields, _ = read_model(directory, ignore)
    tokenizer, _ = read_tokenizer(
        directory, family, fields, vocab_size=model.vocab_size, adds_mask=adds_mask
    )
    _check_mask(tokenizer, model, directory)
    return _with_mask(model, tokenizer) if adds_mask else model, tokenizer


def _with_mask(model: ModelConfig, tokenizer: HubTokenizer) -> ModelConfig:
    """The model config with an id for MASK."""
    size = max(model.vocab_size, tokenizer.mask_id + 1)
    return dataclasses.replace(model, vocab_size=size)


def _row_of(name: str, tokenizer: HubTokenizer, model: ModelConfig) -> int:
    """The id whose rows a new MASK gets, which is the token `name`."""
    id_ = tokenizer.id_of(name)
    if model.attention_type != "causal" or tokenizer.mask_id < model.vocab_size - 1:
        raise ValueError(
            f"train.mask_like={name!r} has no effect, because the model of train.init_from has a "
            "MASK; remove it"
        )
    if id_ is None or id_ >= model.vocab_size:
        raise ValueError(
            f"train.mask_like={name!r} is not a token of train.init_from; use the name of a token, "
            "such as '<|endoftext|>', or remove it"
        )
    return id_


def _with_mask_row(
    model: ModelConfig, num_rows: int, like: int | None, place: Place, finish: Finish
) -> tuple[Place, Finish]:
    """`place` and `finish` of `read_params`, for tables of `num_rows` rows whose MASK is the last
    row of `model`.

    The row of MASK is that of id `like`, or the mean of the stored rows if `like` is None.
    """
    size = model.vocab_size

    def grown(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    def place_whole(path: str, shape: tuple[int, ...]) -> Any:
        if path not in TABLES:
            return place(path, shape)
        sharding = place(path, grown(shape, TABLES[path]))
        # The mesh need not divide the stored number of rows.
        is_split = isinstance(sharding, NamedSharding)
        return NamedSharding(sharding.mesh, PartitionSpec()) if is_split else sharding

    def with_row(path: str, parameter: Any) -> Any:
        if path not in TABLES or not isinstance(parameter, jax.Array):
            return finish(path, parameter)
        axis = TABLES[path]

        def put(table: jax.Array) -> jax.Array:
            if like is None:
                row = jnp.mean(table.astype(jnp.float32), axis=axis, keepdims=True)
            else:
                row = jax.lax.slice_in_dim(table, like, like + 1, axis=axis)
            rest = jax.lax.slice_in_dim(table, 0, min(num_rows, size - 1), axis=axis)
            return jnp.concatenate([rest, row.astype(table.dtype)], axis=axis)

        sharding = place(path, grown(parameter.shape, axis))
        return finish(path, jax.jit(put, out_shardings=sharding)(parameter))

    return place_whole, with_row


def _check_mask(tokenizer: HubTokenizer, model: ModelConfig, directory: Path) -> None:
    if tokenizer.mask_id == NO_MASK and model.attention_type != "causal":
        raise ValueError(
            f"{_config_of(directory)} has no field 'mask_token_id', and its vocabulary has no free "
            "id; add it"
        )


def _config_of(directory: Path) -> Path:
    """The file with the config of a model."""
    return directory if is_gguf(directory) else directory / CONFIG


def read_model(
    directory: Path, ignore: Sequence[str] = ()
) -> tuple[Family, ModelConfig, int, dict[str, Any], tuple[str, ...]]:
    """A directory's family, model config, maximum number of tokens per row, config fields, and the
    names of ignored fields.

    The fields in `ignore` are not read; a dot names a field of an object, as in
    ``rope_scaling.factor``. Those of a GGUF file are keys of its metadata, such as
    ``llama.attention.scale``. Raises ValueError for a name that is not a field.
    """
    where = _config_of(directory)
    if is_gguf(directory):
        file = opened(directory)
        file.check(file.unread.intersection(ignore))
        said, ignore = file.config, [name for name in ignore if name not in file.unread]
    else:
        said = read_json(where)
    family = family_of(said, str(where))
    said = family.said(said)
    for name in ignore:
        found = _without(said, name)
        if found is None:
            raise SettingError("ignore_config", name, f"is not a field of {where}", "remove it")
        said = found
    fields = FileFields(said, str(where))
    longest = fields.take(family.max_length, int, 4096)
    try:
        model = family.read(fields)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(where)) else f"{where}: {text}") from None
    fields.finish(family.idle)
    return family, model, longest, said, fields.ignored


def _without(said: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """The fields without the one at `path`; None if there is no such field."""
    if path in said:
        return {name: value for name, value in said.items() if name != path}
    outer, _, inner = path.partition(".")
    rest = _without(said[outer], inner) if isinstance(said.get(outer), dict) else None
    return None if rest is None else {**said, outer: rest}


def _fitted(preset: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The preset; if it has `threshold_alone`, its block lengths are adapted to the model."""
    settings, unit = dict(preset), model.block_length
    if settings.get("threshold_alone"):
        size = math.gcd(settings["block_length"], unit)
        settings |= {"threshold_alone": unit, "block_length": size}
    return settings


def _recommended(implied: SamplingParams, said: Mapping[str, Any]) -> SamplingParams:
    """A directory's settings; a length without steps keeps the number of tokens per step."""
    if "temperature" in said:
        said = {"temperature_end": -1.0} | dict(said)
    sample = dataclasses.replace(implied, **said)
    if "gen_length" in said and "steps" not in said:
        tokens = implied.gen_length or implied.steps
        steps = -(-implied.steps * sample.gen_length // tokens)
        sample = dataclasses.replace(sample, steps=max(steps, 1))
    return sample


def implied_sample(family: Family, model: ModelConfig, length: int) -> SamplingParams:
    """The first preset of a family, adapted to a canvas of `length` tokens."""
    settings = _fitted(next(iter(family.presets.values()), {}), model)
    if settings.get("gen_length", 0) > length:
        settings |= {"gen_length": length, "steps": length}
    return SamplingParams(**settings)


def read_tokenizer(
    directory: Path,
    family: Family,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    adds_mask: bool = False,
) -> tuple[HubTokenizer, tuple[int, ...]]:
    """A directory's tokenizer, and the ids other than EOS that end a generation.

    Special tokens are read from generation_config.json, config.json, tokenizer_config.json and the
    defaults of the family, in this order of precedence. An id of -1 means that there is no token.
    With `adds_mask`, a vocabulary without MASK and without a free id gets MASK as a new last id.
    """
    said = [_optional(directory / GENERATION), config]
    names = _optional(directory / "tokenizer_config.json")
    content = _content(directory, names)
    first = HubTokenizer(content, 0, 0, 0)

    def ids(role: str) -> tuple[int, ...]:
        for source in said:
            value = source.get(f"{role}_token_id")
            if value not in (None, -1):
                found = tuple(value) if isinstance(value, list) else (value,)
                if found and all(isinstance(id_, int) for id_ in found):
                    return _inside(found, vocab_size, role, directory)
        token = names.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        known = None if name is None else first.id_of(str(name))
        return () if known is None else (known,)

    eos = ids("eos") or ids("pad")
    if not eos:
        raise ValueError(f"{_config_of(directory)} has no field 'eos_token_id'; add it")
    mask = (
        ids("mask")
        or tuple(id_ for id_ in map(first.id_of, _MASK_NAMES) if id_ is not None)
        or (() if family.mask_id is None else (family.mask_id,))
    )
    # A causal model has no MASK. If the last id of the vocabulary is unused, it becomes MASK, so
    # that the model can be trained to fill holes.
    mask = mask or ((vocab_size - 1,) if vocab_size > first.vocab_size else ())
    if not mask and adds_mask:
        content, mask = _with_token(content, vocab_size, _ADDED_MASK), (vocab_size,)
        vocab_size += 1
    if mask:
        _inside(mask[:1], vocab_size, "mask", directory)
    mask = mask or (NO_MASK,)
    pad, bos = ids("pad") or eos[:1], ids("bos")
    tokenizer = HubTokenizer(content, mask[0], pad[0], eos[0], bos[0] if bos else None)
    try:
        check_fits(tokenizer, vocab_size)
    except ValueError as error:
        file = directory if is_gguf(directory) else directory / "tokenizer.json"
        raise ValueError(f"{file}: {error}") from None
    return tokenizer, eos[1:]


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
    said = _optional(directory / GENERATION)
    own = said.get(OWN) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{directory / GENERATION}: {OWN} is not an object of settings; remove it")
    found = {name: said[field] for field, name in _SHARED.items() if said.get(field) is not None}
    does_sample = said.get("do_sample")
    if not isinstance(does_sample, bool | None):
        raise ValueError(
            f"{directory / GENERATION}: do_sample={does_sample!r} is not a bool; use true or false"
        )
    is_greedy = not does_sample and (does_sample is not None or found.keys() & set(_OF_SAMPLING))
    if does_sample:
        found.setdefault("temperature", 1.0)
    try:
        found |= of_family(said)
        for name, value in (found | own).items():
            if name not in BUILT_IN.settings:
                known = tuple(BUILT_IN.settings)
                raise ValueError(f"{name[:60]!r} is not a setting; {nearest(name[:60], known)}")
            found[name] = BUILT_IN.settings[name].checked(value)
    except ValueError as error:
        raise ValueError(f"{directory / GENERATION}: {error}") from None
    if is_greedy and "temperature" not in own:
        found["temperature"] = 0.0
    if found.get("gen_length", 0) > length and "gen_length" not in own:
        found |= {"gen_length": 0, "steps": found.get("steps", length)}
    return found


def settings_fields(sample: SamplingParams, implied: SamplingParams) -> dict[str, Any]:
    """The fields of generation_config.json from which `read_settings` restores `sample`."""
    names = {name: field for field, name in _SHARED.items()}
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name in BUILT_IN.settings:
        value = getattr(sample, name)
        is_scaled = name == "steps" and sample.gen_length != implied.gen_length
        if value == getattr(implied, name) and not is_scaled:
            continue
        if name in names and (name, value) != ("gen_length", 0):
            fields[names[name]] = value
        else:
            own[name] = value
    if fields.keys() & set(_OF_SAMPLING):
        does_sample = sample.temperature > 0
        fields |= {"do_sample": does_sample, "temperature": sample.temperature}
        if not does_sample:
            del fields["temperature"]
    # A reader takes a temperature without its end for that of all steps.
    if {"temperature", "do_sample"} & fields.keys() and sample.temperature_end != -1:
        own["temperature_end"] = sample.temperature_end
    return fields | ({OWN: own} if own else {})


def read_chat(directory: Path, tokenizer: HubTokenizer) -> ChatTemplate | None:
    """The chat template of a directory, or None.

    A template that cannot be read or compiled has a `ChatTemplate.problem`.
    """
    try:
        source, file = _template_of(directory)
    except (OSError, ValueError) as error:
        problem = f"{directory / TEMPLATE} cannot be read ({error}); download it again"
        return ChatTemplate("", tokenizer, problem=problem)
    return None if source is None else chat_of(source, tokenizer, str(file))


def chat_of(source: str, tokenizer: HubTokenizer, where: str) -> ChatTemplate:
    """The chat template with this source, with a `ChatTemplate.problem` if it cannot be used.

    `where` is the name of its file.
    """
    try:
        check_template(source, where)
    except ValueError as error:
        return ChatTemplate(source, tokenizer, problem=str(error))
    return ChatTemplate(source, tokenizer)


def _template_of(directory: Path) -> tuple[str | None, Path]:
    """The source of a directory's chat template, None if there is none, and its file."""
    file = directory / TEMPLATE
    if file.exists():
        source: Any = file.read_text(encoding="utf-8-sig")
    else:
        file = directory / "tokenizer_config.json"
        source = _optional(file).get("chat_template")
    if is_gguf(directory):
        file, source = directory, opened(directory).template
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return source if isinstance(source, str) else None, file


def _with_token(content: str, id_: int, name: str) -> str:
    """The text of a tokenizer.json with a further special token."""
    token = {
        "id": id_,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    data = json.loads(content)
    data["added_tokens"] = [*(data.get("added_tokens") or ()), token]
    return json.dumps(data, ensure_ascii=False)


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _inside(ids: tuple[int, ...], vocab_size: int, role: str, directory: Path) -> tuple[int, ...]:
    for id_ in ids:
        if not 0 <= id_ < vocab_size:
            raise ValueError(
                f"{_config_of(directory)}: {role}_token_id={id_} is outside the vocabulary of "
                f"{vocab_size}; the tokenizer belongs to another model"
            )
    return ids


def _content(directory: Path, names: Mapping[str, Any]) -> str:
    """The text of tokenizer.json, made from vocab.json and merges.txt if there is no such file."""
    file = directory / "tokenizer.json"
    try:
        if is_gguf(directory):
            file = directory
            return HubTokenizer(opened(directory).tokenizer, 0, 0, 0).content
        if file.exists():
            content = file.read_text(encoding="utf-8-sig")
            return HubTokenizer(content, 0, 0, 0).content
        if not (directory / "vocab.json").exists() or not (directory / "merges.txt").exists():
            raise ValueError("it does not exist, and vocab.json or merges.txt is missing")
        lines = (directory / "merges.txt").read_text(encoding="utf-8-sig").split("\n")
        lines = [line.removesuffix("\r") for line in lines]
        merges = [line for line in lines if line and not line.startswith("#version")]
        added = [
            {"id": int(id_), "content": token["content"], "special": bool(token.get("special"))}
            for id_, token in names.get("added_tokens_decoder", {}).items()
        ]
        made = qwen_json(read_json(directory / "vocab.json"), merges, added)
        return HubTokenizer(made, 0, 0, 0).content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} cannot be used ({reason}); download it again") from None


KEPT = ("chat_template", "published")
"""Names in the metadata of a run for what it keeps of a published model: its chat template, and
`read_kept`."""


def read_kept(directory: Path, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """What a model trained from a directory keeps of it besides parameters and the chat template,
    as metadata: under ``published`` further ids that end a generation, the length of the canvas,
    and the settings of generation_config.json. `restored` reads them.
    """
    family, model, longest, fields, _ = read_model(directory, ignore)
    length = min(family.trained_length or longest, longest)
    size = model.vocab_size
    _, more_eos = read_tokenizer(directory, family, fields, vocab_size=size, adds_mask=True)
    settings = read_settings(directory, length, lambda said: family.recommended(said, model))
    kept = {"max_length": length, "more_eos_ids": list(more_eos), "settings": settings}
    return {"published": kept}


def restored(kept: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of a trained model that `read_kept` has kept, as keyword arguments of `Model`.

    Sampling settings that the config changes take precedence over those of the directory, and these
    over the first preset of the family that can express the trained model.
    """
    length, said = max(kept["max_length"], config.data.seq_len), kept["settings"]
    family = None
    with contextlib.suppress(ValueError):
        family = family_for(dataclasses.replace(config.model, lora_rank=0))
    plain = SamplingParams()
    own = {
        name: value for name, value in vars(config.sample).items() if value != getattr(plain, name)
    }
    if family is None:
        implied = dataclasses.replace(plain, gen_length=min(128, length), steps=min(128, length))
        presets = {}
    else:
        implied = implied_sample(family, config.model, length)
        presets = {name: _fitted(preset, config.model) for name, preset in family.presets.items()}
    return {
        "max_length": length,
        "more_eos_ids": tuple(kept["more_eos_ids"]),
        "presets": presets,
        "sample": _recommended(implied, said | own),
    }


def write_tokenizer(
    directory: Path,
    tokenizer: HubTokenizer,
    chat: ChatTemplate | None,
    *,
    more_eos: tuple[int, ...],
    settings: Mapping[str, Any],
    says_mask: bool = True,
) -> None:
    """Writes tokenizer.json and its companion files; `read_tokenizer` is the inverse.

    `settings` are the fields from `settings_fields`. MASK is written to `GENERATION` if `says_mask`
    is True.
    """
    (directory / "tokenizer.json").write_text(tokenizer.content, encoding="utf-8")
    eos: Any = [tokenizer.eos_id, *more_eos] if more_eos else tokenizer.eos_id
    ids = {
        "mask_token_id": tokenizer.mask_id,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": eos,
        "bos_token_id": tokenizer.bos_id,
    }
    said_ids = {name: id_ for name, id_ in ids.items() if id_ not in (None, NO_MASK)}
    if not says_mask:
        said_ids.pop("mask_token_id", None)
    _write(directory / GENERATION, {**said_ids, **settings})
    roles = {
        "mask": tokenizer.mask_id,
        "pad": tokenizer.pad_id,
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id,
    }
    said: dict[str, Any] = {
        f"{role}_token": tokenizer.token(id_)
        for role, id_ in roles.items()
        if id_ not in (None, NO_MASK) and tokenizer.token(id_)
    } | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat is not None and chat.source:
        said["chat_template"] = chat.source
        (directory / TEMPLATE).write_text(chat.source, encoding="utf-8")
    _write(directory / "tokenizer_config.json", said)


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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

    Raises:
      OSError: the disk is full.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists already; choose a new directory")
    if not config.model.experts or config.model.dense_layers or config.model.experts_beside:
        # A width of 0 stands for a width that only this library knows.
        model = dataclasses.replace(config.model, mlp_width=config.model.inner_width)
        config = dataclasses.replace(config, model=model)
    found = family_for(config.model, family)
    if config.objective.process != found.process:
        raise ValueError(
            f"the model was trained with objective.process={config.objective.process!r}, but "
            f"programs of the family {found.name} sample {found.process!r} models"
        )
    if isinstance(tokenizer, SubwordTokenizer):
        tokenizer = tokenizer.published()
    if not isinstance(tokenizer, HubTokenizer):
        raise ValueError(
            f"the model has a {tokenizer.to_json()['type']} tokenizer, which no tokenizer.json can "
            "describe; train with data.tokenizer=bpe:N or the path of a tokenizer.json"
        )
    kept = {name: tree for name, tree in params.items() if not name.endswith("_head")}
    if expressed(found, config.model).qkv_bias and not config.model.qkv_bias:
        config = dataclasses.replace(config, model=expressed(found, config.model))
        kept = _with_zero_biases(kept)
    abstract = jax.eval_shape(lambda: kept)
    pieces = pieces_of(found.sources(config.model), abstract, layers=config.model.layers)
    fields = _config_fields(found, config, tokenizer, dtype=str(kept["embedding"].dtype))
    length = min(found.trained_length or config.data.seq_len, config.data.seq_len)
    settings = _settings(found, config, implied_sample(found, config.model, length))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with refused_unless_full(target, "name another"):
            temporary.mkdir(parents=True)
            text = json.dumps(fields, indent=2, sort_keys=True)
            (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
            write_tokenizer(
                temporary,
                tokenizer,
                chat,
                more_eos=more_eos_ids,
                settings=settings,
                says_mask=found.generates_from_mask,
            )
            write_weights(temporary, kept, pieces, max_shard_bytes)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file.name for file in target.iterdir())


def _with_zero_biases(params: Params) -> Params:
    """The parameters of an equal model with biases on queries, keys and values."""
    found = dict(params)
    for stack in STACKS:
        if stack in params:
            attention = dict(params[stack]["attention"])
            for part in ("query", "key", "value"):
                kernel = attention[part]["kernel"]
                bias = np.zeros((kernel.shape[0], kernel.shape[-1]), kernel.dtype)
                attention[part] = attention[part] | {"bias": bias}
            found[stack] = params[stack] | {"attention": attention}
    return found


def _settings(family: Family, config: Config, implied: SamplingParams) -> dict[str, Any]:
    """The fields of generation_config.json for the settings, including those of the family."""
    sample, own = config.sample, {}
    if sample != implied:
        own = family.spoken(sample, config.model)
        length = own.get("max_new_tokens", implied.gen_length)
        given = family.recommended(own, config.model)
        implied = dataclasses.replace(implied, gen_length=length, **given)
    return settings_fields(sample, implied) | own


def _config_fields(
    family: Family, config: Config, tokenizer: HubTokenizer, *, dtype: str
) -> dict[str, Any]:
    fields = family.write(config.model) | {
        family.max_length: config.data.seq_len,
        "mask_token_id": tokenizer.mask_id,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype,
        "use_cache": False,
    }
    if tokenizer.bos_id is not None:
        fields["bos_token_id"] = tokenizer.bos_id
    if tokenizer.mask_id == NO_MASK:
        del fields["mask_token_id"]
    whole = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    if not family.within:
        return fields | whole
    outer = {name: fields[name] for name in family.outside}
    inner = {name: value for name, value in fields.items() if name not in outer}
    return outer | whole | {family.within: inner}
