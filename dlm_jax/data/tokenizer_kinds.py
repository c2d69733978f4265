"""Creates tokenizers from a kind and a text, or from the JSON in a checkpoint."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

from dlm_jax.data.hub_tokenizer import HubTokenizer
from dlm_jax.data.subword import SubwordTokenizer, train_bpe
from dlm_jax.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer

_BPE = "bpe:"


_FROM_TEXT: dict[str, Callable[[str], Tokenizer]] = {
    "byte": lambda text: ByteTokenizer(),
    "character": CharacterTokenizer.of,
}
_OF_ONE_TEXT: dict[str, tuple[type, str]] = {
    "character": (CharacterTokenizer, "characters"),
    "subword": (SubwordTokenizer, "tokenizer_json"),
}
_OF_HUB = {"type", "tokenizer_json", "mask_id", "pad_id", "bos_id", "eos_id"}

TOKENIZERS: tuple[str, ...] = tuple(_FROM_TEXT)


def make_tokenizer(kind: str, text: str, *, train_text: str | None = None) -> Tokenizer:
    """Returns the tokenizer of `kind` for the corpus `text`.

    Args:
      kind: one of `TOKENIZERS`; ``bpe:SIZE``, which trains a byte-level BPE with SIZE ids; or the
        path, ending in ``.json``, of a Hugging Face ``tokenizer.json``.
      text: all text that the tokenizer must encode.
      train_text: the part of `text` that a BPE is trained on; None means all of `text`.
    """
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](text)
    if kind.startswith(_BPE):
        size = kind.removeprefix(_BPE)
        if not (size.isascii() and size.isdigit() and len(size) < 20):
            raise ValueError(
                f"tokenizer={kind!r} has no size; write the number of ids, such as {_BPE}1024"
            )
        return train_bpe(text if train_text is None else train_text, int(size))
    if kind.endswith(".json") or os.path.exists(os.path.expanduser(kind)):
        return SubwordTokenizer.of_file(kind)
    known = (*TOKENIZERS, f"{_BPE}SIZE")
    raise ValueError(f"{_unknown('tokenizer', kind, known)} or the path of a tokenizer.json")


def from_json(data: Any) -> Tokenizer:
    kind = data.get("type") if isinstance(data, dict) else None
    if kind in _OF_ONE_TEXT:
        made, field = _OF_ONE_TEXT[kind]
        if set(data) != {"type", field} or not isinstance(data[field], str):
            raise ValueError(
                f"a {kind} tokenizer is stored as {{'type': '{kind}', '{field}': TEXT}}, "
                f"but the file has the fields {sorted(data)}; it is damaged or from another program"
            )
        return made(data[field])
    if kind == "byte":
        if set(data) != {"type"}:
            raise ValueError(
                f"the byte tokenizer has no fields, but the file has {sorted(set(data) - {'type'})}"
            )
        return ByteTokenizer()
    if kind != "hub":
        raise ValueError(_unknown("tokenizer type", kind, ("byte", *_OF_ONE_TEXT, "hub")))
    if set(data) != _OF_HUB or not isinstance(data["tokenizer_json"], str):
        raise ValueError(
            f"a hub tokenizer has the fields {sorted(_OF_HUB)}, but the file has {sorted(data)}; "
            "the file is damaged or from another program"
        )
    ids = {name: value for name, value in data.items() if name.endswith("_id")}
    return HubTokenizer(data["tokenizer_json"], **ids)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises an error if a tokenizer has more ids than a model of `vocab_size` logits.

    Fewer ids than logits are allowed, because published models pad their vocabulary. Logits with
    index `tokenizer.vocab_size` or higher have no token, so sampling must ban them.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {vocab_size} "
            "logits; use the tokenizer that the model was trained with"
        )


def _unknown(what: str, value: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{what}={value!r} is unknown; {hint}use one of {', '.join(known)}"
