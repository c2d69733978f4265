"""Reads and writes a model as a directory in Hub layout; code in the directory never runs.

A written directory can be read by the family's own programs.
"""

from __future__ import annotations

import contextlib
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
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, SamplingParams
from dlm_jax.data import NO_MASK, HubTokenizer, SubwordTokenizer, check_fits, qwen_json
from dlm_jax.hf.chat import ChatTemplate
from dlm_jax.hf.families import expressed, family_for, family_of
from dlm_jax.hf.family import Family, FileFields, pieces_of, read_json
from dlm_jax.hf.generation import (
    GENERATION,
    implied_sample,
    presets_of,
    read_settings,
    recommended,
    settings_fields,
)
from dlm_jax.hf.gguf import TENSORS, is_gguf, opened
from dlm_jax.hf.tensors import (
    Finish,
    Place,
    Shards,
    check_tensors,
    read_params,
    write_weights,
)
from dlm_jax.model.lora import STACKS
from dlm_jax.model.transformer import build
from dlm_jax.randomness import key_of
from dlm_jax.settings import SettingError
from dlm_jax.store.files import refused_unless_full
from dlm_jax.types import Params

CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
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
    described = _describe(directory, ignore, adds_mask=adds_mask)
    family, model, tokenizer = described.family, described.config.model, described.tokenizer
    shards = opened(directory) if is_gguf(directory) else Shards(directory, family.name_of)
    tensors = TENSORS if is_gguf(directory) else family.tensors
    abstract = jax.eval_shape(build(model).init, key_of(0))
    pieces = pieces_of(tensors, abstract, layers=model.layers)
    table = pieces["embedding"][0].tensor
    check_tensors(
        shards,
        pieces,
        redundant={tensors["head/kernel"]: table} if model.tied_head else {},
        where=str(directory),
        config=_config_of(directory).name,
    )
    place = place or (lambda path, shape: None)
    whole = _with_mask(model, tokenizer)
    if adds_mask and (mask_like or whole != model):
        like = _row_of(mask_like, tokenizer, model) if mask_like else None
        place, finish = _with_mask_row(whole.vocab_size, like, place, finish)
    params = read_params(
        shards,
        pieces,
        abstract,
        dtype=None if dtype is None else np.dtype(jax.numpy.dtype(dtype)),
        place=place,
        finish=finish,
    )
    to = dtype or shards.entries[table].dtype.name
    whole = dataclasses.replace(whole, compute_dtype="bfloat16" if to == "bfloat16" else "float32")
    config = dataclasses.replace(described.config, model=whole)
    chat = read_chat(directory, tokenizer)
    return dataclasses.replace(described, config=config, params=params, chat=chat)


def _describe(directory: Path, ignore: Sequence[str] = (), *, adds_mask: bool) -> Published:
    """The content of a directory without parameters and chat template, for a vocabulary of the
    stored size.
    """
    family, model, longest, fields, ignored = read_model(directory, ignore)
    length = min(family.trained_length or longest, longest)
    settings = read_settings(directory, length, lambda said: family.recommended(said, model))
    size = model.vocab_size
    tokenizer, more_eos = read_tokenizer(
        directory, family, fields, vocab_size=size, adds_mask=adds_mask
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
        chat=None,
        presets=presets_of(family, model),
        more_eos_ids=more_eos,
        settings=settings,
        ignored=ignored,
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
    size: int, like: int | None, place: Place, finish: Finish
) -> tuple[Place, Finish]:
    """`place` and `finish` of `read_params`, for tables of `size` rows whose last one is MASK's.

    The row of MASK is that of id `like`, or the mean of the stored rows if `like` is None.
    """

    def place_table(path: str, shape: tuple[int, ...]) -> Any:
        axis = TABLES[path]
        return place(path, (*shape[:axis], size, *shape[axis + 1 :]))

    def place_stored(path: str, shape: tuple[int, ...]) -> Any:
        if path not in TABLES:
            return place(path, shape)
        sharding = place_table(path, shape)
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
            rest = jax.lax.slice_in_dim(table, 0, size - 1, axis=axis)
            return jnp.concatenate([rest, row.astype(table.dtype)], axis=axis)

        sharding = place_table(path, parameter.shape)
        return finish(path, jax.jit(put, out_shardings=sharding)(parameter))

    return place_stored, with_row


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
        rest = _without(said, name)
        if rest is None:
            raise SettingError("ignore_config", name, f"is not a field of {where}", "remove it")
        said = rest
    fields = FileFields(said, str(where))
    longest = fields.take(family.max_length, int, 4096)
    try:
        model = family.read(fields)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(where)) else f"{where}: {text}") from None
    return family, model, longest, said, fields.finish(family.idle)


def _without(said: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """The fields without the one at `path`; None if there is no such field."""
    if path in said:
        return {name: value for name, value in said.items() if name != path}
    outer, _, inner = path.partition(".")
    rest = _without(said[outer], inner) if isinstance(said.get(outer), dict) else None
    return None if rest is None else {**said, outer: rest}


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
    generation = _optional(directory / GENERATION)
    names = _optional(directory / "tokenizer_config.json")
    content = _content(directory, names)
    bare = HubTokenizer(content, 0, 0, 0)

    def ids(role: str) -> tuple[int, ...]:
        for source in (generation, config):
            value = source.get(f"{role}_token_id")
            given: tuple[Any, ...] = tuple(value) if isinstance(value, list) else (value,)
            if value not in (None, -1) and given and all(isinstance(id_, int) for id_ in given):
                return inside(role, given)
        token = names.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        id_ = None if name is None else bare.id_of(str(name))
        return () if id_ is None else (id_,)

    def inside(role: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        for id_ in ids:
            if not 0 <= id_ < vocab_size:
                raise ValueError(
                    f"{_config_of(directory)}: {role}_token_id={id_} is outside the vocabulary of "
                    f"{vocab_size}; the tokenizer belongs to another model"
                )
        return ids

    eos = ids("eos") or ids("pad")
    if not eos:
        raise ValueError(f"{_config_of(directory)} has no field 'eos_token_id'; add it")
    # A causal model has no MASK. If the last id of the vocabulary is unused, it becomes MASK, so
    # that the model can be trained to fill holes.
    mask = (
        ids("mask")
        or tuple(id_ for id_ in map(bare.id_of, _MASK_NAMES) if id_ is not None)
        or (() if family.mask_id is None else (family.mask_id,))
        or ((vocab_size - 1,) if vocab_size > bare.vocab_size else ())
    )
    if not mask and adds_mask:
        data, flags = json.loads(content), ("single_word", "lstrip", "rstrip", "normalized")
        token = {"id": vocab_size, "content": _ADDED_MASK} | dict.fromkeys(flags, False)
        data["added_tokens"] = [*(data.get("added_tokens") or ()), token | {"special": True}]
        content, mask = json.dumps(data, ensure_ascii=False), (vocab_size,)
        vocab_size += 1
    (mask_id,) = inside("mask", mask[:1]) or (NO_MASK,)
    pad, bos = ids("pad") or eos, ids("bos")
    tokenizer = HubTokenizer(content, mask_id, pad[0], eos[0], bos[0] if bos else None)
    try:
        check_fits(tokenizer, vocab_size)
    except ValueError as error:
        file = directory if is_gguf(directory) else directory / "tokenizer.json"
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
        source = {one["name"]: one["template"] for one in source}.get("default")
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


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
        content = qwen_json(read_json(directory / "vocab.json"), merges, added)
        return HubTokenizer(content, 0, 0, 0).content
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
    length, said = max(saved["max_length"], config.data.seq_len), saved["settings"]
    family = None
    with contextlib.suppress(ValueError):
        family = family_for(dataclasses.replace(config.model, lora_rank=0))
    plain = SamplingParams()
    changed = {
        name: value for name, value in vars(config.sample).items() if value != getattr(plain, name)
    }
    if family is None:
        implied = dataclasses.replace(plain, gen_length=min(128, length), steps=min(128, length))
        presets = {}
    else:
        implied = implied_sample(family, config.model, length)
        presets = presets_of(family, config.model)
    return {
        "max_length": length,
        "more_eos_ids": tuple(saved["more_eos_ids"]),
        "presets": presets,
        "sample": recommended(implied, said | changed),
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
    if expressed(layout, config.model).qkv_bias and not config.model.qkv_bias:
        config = dataclasses.replace(config, model=expressed(layout, config.model))
        stored = _with_zero_biases(stored)
    abstract = jax.eval_shape(lambda: stored)
    pieces = pieces_of(layout.tensors, abstract, layers=config.model.layers)
    files = _config_files(layout, config, tokenizer, more_eos_ids, str(stored["embedding"].dtype))
    if chat is not None and chat.source:
        files["tokenizer_config.json"]["chat_template"] = chat.source
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with refused_unless_full(target, "name another"):
            temporary.mkdir(parents=True)
            for name, values in files.items():
                is_sorted = is_ascii = name == CONFIG
                text = json.dumps(values, indent=2, ensure_ascii=is_ascii, sort_keys=is_sorted)
                (temporary / name).write_text(text + "\n", encoding="utf-8")
            (temporary / "tokenizer.json").write_text(tokenizer.content, encoding="utf-8")
            if chat is not None and chat.source:
                (temporary / TEMPLATE).write_text(chat.source, encoding="utf-8")
            write_weights(temporary, stored, pieces, max_shard_bytes)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file.name for file in target.iterdir())


def _with_zero_biases(params: Params) -> Params:
    """The parameters of an equal model with biases on queries, keys and values."""
    biased = dict(params)
    for stack in STACKS:
        if stack in params:
            attention = dict(params[stack]["attention"])
            for part in ("query", "key", "value"):
                kernel = attention[part]["kernel"]
                bias = np.zeros((kernel.shape[0], kernel.shape[-1]), kernel.dtype)
                attention[part] = attention[part] | {"bias": bias}
            biased[stack] = params[stack] | {"attention": attention}
    return biased


def _config_files(
    family: Family,
    config: Config,
    tokenizer: HubTokenizer,
    more_eos: tuple[int, ...],
    dtype: str,
) -> dict[str, dict[str, Any]]:
    """The fields of a directory's JSON files, but for the chat template."""
    model, sample = config.model, config.sample
    roles = {
        "mask": tokenizer.mask_id,
        "pad": tokenizer.pad_id,
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id,
    }
    ids = {role: id_ for role, id_ in roles.items() if id_ not in (None, NO_MASK)}
    fields = family.write(model) | {f"{role}_token_id": id_ for role, id_ in ids.items()}
    fields |= {family.max_length: config.data.seq_len, "torch_dtype": dtype, "use_cache": False}
    outer = {name: fields.pop(name) for name in family.outside}
    whole = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    fields = outer | whole | ({family.within: fields} if family.within else fields)
    names = {f"{role}_token": tokenizer.token(id_) for role, id_ in ids.items()}
    names = {name: token for name, token in names.items() if token}
    said: dict[str, Any] = {f"{role}_token_id": id_ for role, id_ in ids.items()}
    if more_eos:
        said["eos_token_id"] = [tokenizer.eos_id, *more_eos]
    if not family.generates_from_mask:
        said.pop("mask_token_id", None)
    length = min(family.trained_length or config.data.seq_len, config.data.seq_len)
    implied = implied_sample(family, model, length)
    if sample != implied:
        of_family = family.spoken(sample, model)
        length = of_family.get("max_new_tokens", implied.gen_length)
        given = family.recommended(of_family, model)
        implied = dataclasses.replace(implied, gen_length=length, **given)
        said |= settings_fields(sample, implied) | of_family
    return {
        CONFIG: fields,
        GENERATION: said,
        "tokenizer_config.json": names | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
