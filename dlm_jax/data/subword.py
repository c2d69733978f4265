"""Subword tokenizers: Hugging Face `tokenizer.json` files, and BPEs trained on a text.

Checkpoints store the content of the file, and tokenizers with the same content are equal. Encoding
deviates from the settings of the file in a few ways that make ids unambiguous:

- The special tokens are the added tokens of the file with a common name (`<|mask|>`, `[PAD]`,
  `<s>`, `</s>`, ...). Missing special tokens are appended to the vocabulary: MASK, PAD, BOS, EOS.
- Text never becomes a special token: the name of a special token is encoded as text.
- Truncation, padding, BPE dropout and template specials are disabled.
- Text that the file cannot encode raises an error, instead of being dropped or mapped to an unknown
  token.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers, trainers

from dlm_jax.data.tokenizers import NEVER_IN_UTF8, checked_ids, utf8

SPECIALS = ("mask", "pad", "bos", "eos")

MOST_IDS = 2**22
"""The largest vocabulary size of a tokenizer, 16 times that of published models."""

# Names of special tokens without brackets, in lower case. The first name in the file is used.
_NAMES = {
    "mask": ("mask", "mdm_mask"),
    "pad": ("pad", "padding"),
    "bos": ("bos", "s", "startoftext", "begin_of_text", "begin_of_sentence", "cls"),
    "eos": ("eos", "/s", "endoftext", "end_of_text", "end_of_sentence", "im_end", "eot_id", "sep"),
}
_SPECIAL = re.compile(r"[<\[][|\uff5c]?(/?[\w\u2581]+)[|\uff5c]?[>\]]")

# Plain byte-level splitting makes a newline between two non-space characters a piece of its own, so
# text can be cut after such a newline without changing ids.
_PLAIN_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_CUT = re.compile(r"(?<=\S\n)(?=\S)")
_CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 64


@dataclass(unsafe_hash=True)
class SubwordTokenizer:
    """The tokenizer of a `tokenizer.json`, with the differences listed in the module docstring."""

    content: str

    def __post_init__(self) -> None:
        try:
            data = json.loads(self.content)
            self.content = json.dumps(data, separators=(",", ":"))
            self._read(data)
        # The library raises plain Exception, and files from other programs can cause any error.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"the tokenizer.json is broken ({reason}); "
                "use a file written by the `tokenizers` library"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return SubwordTokenizer, (self.content,)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> SubwordTokenizer:
        """The tokenizer in the file `path`. Raises ValueError if the file cannot be read or is
        broken.
        """
        file = Path(os.path.expanduser(path))
        if file.is_dir():
            raise ValueError(
                f"{path} is a directory; pass its file, {Path(path) / 'tokenizer.json'}"
            )
        try:
            content = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist; pass the path of a tokenizer.json") from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); pass the path of a tokenizer.json"
            ) from None
        try:
            return cls(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _read(self, data: Any) -> None:
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ValueError("it has no model")
        added = data.get("added_tokens") or []
        self._names = _find_specials([token["content"] for token in added])
        data = _without_extras(data, self._names)
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
        inner = {role: _inner(data, name) for role, name in self._names.items()}
        self._tokenizer.add_special_tokens(list(inner.values()))
        self._tokenizer.encode_special_tokens = True
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._vocabulary:
            raise ValueError("it has no tokens")
        num_tokens = max(self._vocabulary.values()) + 1
        # The number of ids is checked before memory is allocated for each id.
        if num_tokens > MOST_IDS:
            raise ValueError(
                f"it has the id {num_tokens - 1}, but at most {MOST_IDS} ids are allowed"
            )
        missing = [role for role in SPECIALS if role not in inner]
        self.vocab_size = num_tokens + len(missing)
        self._specials = {role: self._vocabulary[name] for role, name in inner.items()}
        self._specials |= {role: num_tokens + i for i, role in enumerate(missing)}
        ids = (self._specials[role] for role in SPECIALS)
        self.mask_id, self.pad_id, self.bos_id, self.eos_id = ids
        self._unknown_id = self._id_of_unknown(data["model"])
        textless = set(range(num_tokens)) - set(self._vocabulary.values())
        textless |= set(self._specials.values())
        if self._unknown_id is not None:
            textless.add(self._unknown_id)
        self._textless_ids = sorted(textless)
        self.banned_ids = tuple(sorted((textless | self._impossible_ids(data)) - {self.eos_id}))
        has_bytes = _mentions_bytes(data, "pre_tokenizer", "normalizer") and self._has_all_bytes()
        is_bpe = "merges" in data["model"]
        can_always = has_bytes or data["model"].get("byte_fallback")
        self._may_drop = is_bpe and self._unknown_id is None and not can_always
        self._may_cut = (
            is_bpe
            and has_bytes
            and data.get("normalizer") is None
            and _PLAIN_BYTE_LEVEL.items()
            <= {"use_regex": True, **(data.get("pre_tokenizer") or {})}.items()
            and all(t["special"] or t["content"] in inner.values() for t in added)
        )

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        if self._may_cut:
            parts = [np.zeros(0, np.int32)]
            chunks = _chunks(text)
            while some := list(islice(chunks, _CHUNKS_AT_ONCE)):
                encoded = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
                parts += [np.array(encoding.ids, np.int32) for encoding in encoded]
            ids = np.concatenate(parts)
        else:
            self._refuse_dropped(text)
            encoding = self._encode_whole(text)
            ids = np.array(encoding.ids, np.int32)
            if self._unknown_id is not None and (ids == self._unknown_id).any():
                _refuse(text, encoding.offsets[int(np.argmax(ids == self._unknown_id))][0])
        for role, name in self._names.items():
            if (ids == self._specials[role]).any():
                raise ValueError(
                    f"the text contains {name!r} at position {text.find(name)}, which this "
                    f"tokenizer reserves; remove it from the text"
                )
        return ids

    def _encode_whole(self, text: str) -> tokenizers.Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # The library raises plain Exception if the model has no unknown token.
        except Exception as error:
            raise ValueError(
                f"this tokenizer cannot encode the text ({error}); "
                "remove the unknown characters, or train a model with the byte tokenizer"
            ) from None

    def decode(self, ids: Any) -> str:
        array = checked_ids(ids, self.vocab_size)
        is_text = ~np.isin(array, self._textless_ids)
        return self._tokenizer.decode(array[is_text].tolist(), skip_special_tokens=True)

    def _candidates(self, piece: str) -> Iterator[int]:
        """Yields candidates for the id of `piece` within a text."""
        ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
        if len(ids) == 1:
            yield ids[0]
        for token in (piece, piece.replace(" ", "\u2581")):
            if token in self._vocabulary:
                yield self._vocabulary[token]

    def _refuse_dropped(self, text: str) -> None:
        """Raises ValueError for a character that the model would silently drop."""
        if not self._may_drop:
            return
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        normal = normalizer.normalize_str(text) if normalizer else text
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(normal)] if splitter else [normal]
        model = self._tokenizer.model
        prefix = getattr(model, "continuing_subword_prefix", None) or ""
        suffix = getattr(model, "end_of_word_suffix", None) or ""
        for character in sorted(set().union(*pieces)):
            forms = {character, prefix + character, character + suffix, prefix + character + suffix}
            if not forms & self._vocabulary.keys():
                _refuse(text, text.find(character))

    def _id_of_unknown(self, model: dict[str, Any]) -> int | None:
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self._vocabulary.get(token)

    def _has_all_bytes(self) -> bool:
        never = {chr(byte) for byte in NEVER_IN_UTF8}
        return set(pre_tokenizers.ByteLevel.alphabet()) - never <= self._vocabulary.keys()

    def _impossible_ids(self, data: dict[str, Any]) -> set[int]:
        """Ids of tokens with bytes that never occur in UTF-8."""
        learnt = self._tokenizer.get_vocab(with_added_tokens=False)
        if _mentions_bytes(data, "decoder"):
            # In the byte-level alphabet, each of these bytes is the character with the same number.
            never = {chr(byte) for byte in NEVER_IN_UTF8}
            return {number for token, number in learnt.items() if not never.isdisjoint(token)}
        fallbacks = (f"<0x{byte:02X}>" for byte in NEVER_IN_UTF8)
        has_fallback = data["model"].get("byte_fallback")
        return {learnt[token] for token in fallbacks if has_fallback and token in learnt}

    @property
    def space_id(self) -> int | None:
        return self.piece_id(" ")

    def piece_id(self, piece: str) -> int | None:
        """The id that appends `piece` to preceding text, or None.

        The piece is tested between two other tokens, because some tokenizers treat the first token
        of a text differently.
        """
        first = next(self._candidates("a"), None)
        if not piece or first is None:
            return None
        alone, twice = self.decode([first]), self.decode([first, first])
        for candidate in self._candidates(piece):
            if self.decode([first, candidate, first]) == alone + piece + twice[len(alone) :]:
                return candidate
        return None

    def to_json(self) -> dict[str, Any]:
        return {"type": "subword", "tokenizer_json": self.content}


def train_json(text: str, num_tokens: int) -> str:
    """The `tokenizer.json` of a byte-level BPE with at most `num_tokens` ids, trained on `text`."""
    plain = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    plain["pre_tokenizer"] = plain["decoder"] = {**_PLAIN_BYTE_LEVEL, "trim_offsets": True}
    backend = tokenizers.Tokenizer.from_str(json.dumps(plain))
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_chunks(text), trainer)
    return backend.to_str()


def _chunks(text: str) -> Iterator[str]:
    """Parts of `text` whose concatenated ids equal the ids of the whole text."""
    start = 0
    while cut := _CUT.search(text, start + _CHUNK):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _find_specials(names: Iterable[str]) -> dict[str, str]:
    """The special token in `names` for each role; roles without a token are omitted."""
    cores: dict[str, str] = {}
    for name in names:
        if match := _SPECIAL.fullmatch(name):
            cores.setdefault(match[1].lower().replace("\u2581", "_"), name)
    return {
        role: next(cores[core] for core in known if core in cores)
        for role, known in _NAMES.items()
        if not cores.keys().isdisjoint(known)
    }


def _without_extras(data: dict[str, Any], specials: dict[str, str]) -> dict[str, Any]:
    """`data` without truncation, padding and dropout, with special tokens that no text can produce.

    A word-level model would encode the name of a special token as that token, so special tokens are
    renamed. BPE merges never produce special tokens.
    """
    model = {key: value for key, value in data["model"].items() if key != "dropout"}
    data = {**data, "model": model, "truncation": None, "padding": None}
    if "merges" not in model:
        new = {name: _inner(data, name) for name in specials.values()}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {new.get(key, key): value for key, value in model["vocab"].items()}
        else:
            model["vocab"] = [[new.get(key, key), score] for key, score in model["vocab"]]
        data["added_tokens"] = [
            {**token, "content": new.get(token["content"], token["content"])}
            for token in data.get("added_tokens") or []
        ]
    return data


def _inner(data: dict[str, Any], name: str) -> str:
    """The internal name of the special token `name`."""
    return name if "merges" in data["model"] else f"\ue000{name}\ue000"


def _mentions_bytes(data: dict[str, Any], *parts: str) -> bool:
    return any('"ByteLevel"' in json.dumps(data.get(part)) for part in parts)


def _refuse(text: str, position: int) -> None:
    raise ValueError(
        f"the character {text[position]!a} (U+{ord(text[position]):04X}) at position {position} "
        "has no id in this tokenizer; remove it, or train a model with the byte tokenizer"
    )


def train_bpe(text: str, vocab_size: int) -> SubwordTokenizer:
    """A byte-level BPE with exactly `vocab_size` ids: 256 bytes, merges and four special tokens.

    Any text can be encoded and decodes exactly. A pair of pieces is merged only if it occurs at
    least twice. The same text always produces the same tokenizer.
    """
    smallest = 256 + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"a BPE of {vocab_size} ids cannot contain the 256 bytes and {len(SPECIALS)} "
            f"special tokens; use at least bpe:{smallest}"
        )
    # The library allocates memory for all ids, and every merge requires two bytes of text.
    largest = min(smallest + len(utf8(text)), MOST_IDS)
    if vocab_size > largest:
        raise ValueError(
            f"a BPE of {vocab_size} ids cannot be trained on a text of {len(text)} characters; "
            f"use at most bpe:{largest} or more text"
        )
    tokenizer = SubwordTokenizer(train_json(text, vocab_size - len(SPECIALS)))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the text of {len(text)} characters supports a BPE of {tokenizer.vocab_size} ids, "
            f"not {vocab_size}; use at most bpe:{tokenizer.vocab_size} or more text"
        )
    return tokenizer
