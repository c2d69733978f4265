"""A published directory's tokenizer, special tokens, recommended settings and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlm_jax.config import SampleConfig
from dlm_jax.data import HubTokenizer, check_fits, qwen_json
from dlm_jax.published.chat import ChatTemplate, check_template
from dlm_jax.published.family import Family, read_json
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import nearest

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
OWN = "dlm_jax"
"""The field of `GENERATION` with the settings that only this library has."""

_SHARED = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "typical_p": "typical_p", "repetition_penalty": "repetition_penalty", "steps": "steps",
    "max_new_tokens": "gen_length",
}  # fmt: skip
"""Fields of `GENERATION` that are settings, and the names of these settings in this library."""

_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Fields of `GENERATION` that apply only with ``do_sample`` true."""

_MASK_NAMES = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "|<MASK>|", "[MASK]", "<mask>")


def read_tokenizer(
    directory: Path, family: Family, config: Mapping[str, Any], *, vocab_size: int
) -> tuple[HubTokenizer, tuple[int, ...]]:
    """A directory's tokenizer, and the ids other than EOS that end a generation.

    Special tokens are read from generation_config.json, config.json, tokenizer_config.json and the
    defaults of the family, in this order of precedence.
    """
    said = [_optional(directory / GENERATION), config]
    names = _optional(directory / "tokenizer_config.json")
    content = _content(directory, names)
    first = HubTokenizer(content, 0, 0, 0)

    def ids(role: str) -> tuple[int, ...]:
        for source in said:
            value = source.get(f"{role}_token_id")
            if value is not None:
                found = tuple(value) if isinstance(value, list) else (value,)
                if found and all(isinstance(id_, int) for id_ in found):
                    return _inside(found, vocab_size, role, directory)
        token = names.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        known = None if name is None else first.id_of(str(name))
        return () if known is None else (known,)

    eos = ids("eos") or ids("pad")
    if not eos:
        raise ValueError(f"{directory / 'config.json'} has no field 'eos_token_id'; add it")
    mask = ids("mask") or tuple(
        id_ for id_ in map(first.id_of, _MASK_NAMES) if id_ is not None
    ) or (() if family.mask_id is None else (family.mask_id,))  # fmt: skip
    # A causal model has no MASK. If the last id of the vocabulary is unused, it becomes MASK, so
    # that the model can be trained to fill holes.
    mask = mask or ((vocab_size - 1,) if vocab_size > first.vocab_size else ())
    if not mask:
        raise ValueError(
            f"{directory / 'config.json'} has no field 'mask_token_id', and its vocabulary has no "
            "free id; add it"
        )
    _inside(mask[:1], vocab_size, "mask", directory)
    pad, bos = ids("pad") or eos[:1], ids("bos")
    tokenizer = HubTokenizer(content, mask[0], pad[0], eos[0], bos[0] if bos else None)
    try:
        check_fits(tokenizer, vocab_size)
    except ValueError as error:
        raise ValueError(f"{directory / 'tokenizer.json'}: {error}") from None
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
    if "repetition_penalty" in found:
        found["penalty_last_n"] = -1  # in other programs, the penalty covers the whole text
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


def settings_fields(sample: SampleConfig, implied: SampleConfig) -> dict[str, Any]:
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
    if "repetition_penalty" in fields:
        own["penalty_last_n"] = sample.penalty_last_n
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
    """The chat template of a directory, or None."""
    file = directory / TEMPLATE
    if file.exists():
        try:
            source: Any = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from None
    else:
        file = directory / "tokenizer_config.json"
        source = _optional(file).get("chat_template")
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    check_template(source, str(file))
    return ChatTemplate(source, tokenizer)


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _inside(ids: tuple[int, ...], vocab_size: int, role: str, directory: Path) -> tuple[int, ...]:
    for id_ in ids:
        if not 0 <= id_ < vocab_size:
            raise ValueError(
                f"{directory / 'config.json'}: {role}_token_id={id_} is outside the vocabulary of "
                f"{vocab_size}; the tokenizer belongs to another model"
            )
    return ids


def _content(directory: Path, names: Mapping[str, Any]) -> str:
    """The text of tokenizer.json, made from vocab.json and merges.txt if there is no such file."""
    file = directory / "tokenizer.json"
    try:
        if file.exists():
            content = file.read_text(encoding="utf-8")
            return HubTokenizer(content, 0, 0, 0).content
        if not (directory / "vocab.json").exists() or not (directory / "merges.txt").exists():
            raise ValueError("it does not exist, and vocab.json or merges.txt is missing")
        lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
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
    ids = {"mask_token_id": tokenizer.mask_id, "pad_token_id": tokenizer.pad_id,
           "eos_token_id": eos, "bos_token_id": tokenizer.bos_id}  # fmt: skip
    said_ids = {name: id_ for name, id_ in ids.items() if id_ is not None}
    if not says_mask:
        del said_ids["mask_token_id"]
    _write(directory / GENERATION, {**said_ids, **settings})
    roles = {"mask": tokenizer.mask_id, "pad": tokenizer.pad_id, "eos": tokenizer.eos_id,
             "bos": tokenizer.bos_id}  # fmt: skip
    said: dict[str, Any] = {
        f"{role}_token": tokenizer.token(id_) for role, id_ in roles.items()
        if id_ is not None and tokenizer.token(id_)
    } | {"tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    if chat is not None:
        said["chat_template"] = chat.source
        (directory / TEMPLATE).write_text(chat.source, encoding="utf-8")
    _write(directory / "tokenizer_config.json", said)


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
