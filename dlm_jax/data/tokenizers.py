"""Tokenizers: bytes, characters, subwords, and those of published models.

A vocabulary consists of the text ids, followed by the special tokens in the order MASK, PAD, BOS,
EOS. Tokenizers are immutable and can be pickled, and tokenizers with the same fields are equal.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dlm_jax.store.files import check_regular, said

SPECIALS = ("mask", "pad", "bos", "eos")

# Bytes that never occur in UTF-8, which a model must not write.
NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


class Tokenizer:
    """The interface of a tokenizer, which is a dataclass: `to_json` stores its fields.

    Attributes:
      vocab_size: number of ids, including special tokens; every id is in `[0, vocab_size)`.
      mask_id: the id of a hole.
      pad_id: the id that fills a canvas beyond `length`.
      bos_id: the id that begins a text, or None.
      eos_id: the id that ends a generation.
      banned_ids: ids that samplers never propose, ascending: MASK, PAD, BOS and undecodable ids.
      prefix_ids: the ids before a text, such as BOS.
    """

    kind: ClassVar[str]
    vocab_size: int
    mask_id: int
    pad_id: int
    bos_id: int | None
    eos_id: int
    banned_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 `[n]`, without special tokens. Raises ValueError for text
        without ids.
        """
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        """The text of `ids`. Special tokens have no text."""
        raise NotImplementedError

    def piece_id(self, piece: str) -> int | None:
        """The single id that encodes `piece`, or None."""
        raise NotImplementedError

    def bytes_of(self, id_: int) -> bytes | None:
        """The bytes of a token that can be a part of a character. None for other tokens, whose
        bytes are those of the text that they add to a text.
        """
        del id_

    @property
    def space_id(self) -> int | None:
        """The id of the piece `" "`, which structural edits insert, or None."""
        return self.piece_id(" ")

    def to_json(self) -> dict[str, Any]:
        """A plain JSON dict with a `type`, from which `from_json` restores an equal tokenizer."""
        fields = [one.name for one in dataclasses.fields(self) if one.init]  # type: ignore[arg-type]
        values = {("tokenizer_json" if n == "content" else n): getattr(self, n) for n in fields}
        return {"type": self.kind} | values

    def __reduce__(self) -> tuple[Any, ...]:
        return from_json, (self.to_json(),)


def text_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of text tokens, which a corruption can substitute for the true token."""
    special = {*tokenizer.banned_ids, tokenizer.mask_id, tokenizer.pad_id, tokenizer.eos_id}
    return tuple(token for token in range(tokenizer.vocab_size) if token not in special)


def noise_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that uniform noise can show: text tokens, and EOS, which samplers can also write."""
    return tuple(sorted({*text_ids(tokenizer), tokenizer.eos_id}))


def prefix_of(tokenizer: Tokenizer, start_id: int | None = None) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text, without the `start_id` that a causal network
    puts before each row itself.
    """
    ids = tokenizer.prefix_ids
    return ids[1:] if ids[:1] == (start_id,) else ids


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if a tokenizer has more ids than a model of `vocab_size` logits.

    Published models pad their vocabulary, so it can have fewer.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {vocab_size} "
            "logits; use the tokenizer that the model was trained with"
        )


def _checked_ids(ids: Any, vocab_size: int) -> np.ndarray:
    """Returns `ids` as an integer array `[n]`; ValueError for a wrong shape or unknown ids."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"ids have shape {array.shape} and type {array.dtype}; decode a row of integers"
        )
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise ValueError(
            f"id {array[bad[0]]} at position {bad[0]} is outside the vocabulary of {vocab_size}; "
            "decode with the tokenizer that the model was trained with"
        )
    return array


def utf8(text: str) -> bytes:
    """Returns `text` in UTF-8. Raises ValueError for a lone surrogate, which cannot be encoded."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at position "
            f"{error.start}, which is not a character; remove it or repair the text's encoding"
        ) from None


class _WithSpecials(Tokenizer):
    """A tokenizer whose special tokens follow its text ids."""

    def _set_ids(self, num_text_ids: int, never: tuple[int, ...] = ()) -> None:
        self.num_text_ids = num_text_ids
        self.vocab_size = num_text_ids + len(SPECIALS)
        self.mask_id, self.pad_id, self.bos_id, self.eos_id = range(num_text_ids, self.vocab_size)
        self.banned_ids = (*never, self.mask_id, self.pad_id, self.bos_id)

    def _text_ids(self, ids: Any) -> np.ndarray:
        array = _checked_ids(ids, self.vocab_size)
        return array[array < self.num_text_ids]


@dataclass(unsafe_hash=True)
class ByteTokenizer(_WithSpecials):
    """A tokenizer of the 256 byte values, followed by the special tokens. Every text can be
    encoded.

    Generated bytes can be invalid UTF-8, which decodes to U+FFFD. The 13 bytes that never occur in
    UTF-8 are banned.
    """

    kind = "byte"

    def __post_init__(self) -> None:
        self._set_ids(256, NEVER_IN_UTF8)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        return self._text_ids(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def bytes_of(self, id_: int) -> bytes:
        return bytes([id_] if id_ < self.num_text_ids else [])

    def piece_id(self, piece: str) -> int | None:
        data = piece.encode("utf-8", errors="replace")
        return data[0] if len(data) == 1 else None


@dataclass(unsafe_hash=True)
class CharacterTokenizer(_WithSpecials):
    """A tokenizer with one id per character of a corpus, in code-point order, followed by the
    special tokens.
    """

    kind = "character"
    characters: str

    def __post_init__(self) -> None:
        if not self.characters or list(self.characters) != sorted(set(self.characters)):
            raise ValueError(
                "characters are not distinct and ascending, or there are none; "
                "use CharacterTokenizer.of(text)"
            )
        self._set_ids(len(self.characters))
        self._ids = {character: id_ for id_, character in enumerate(self.characters)}

    @classmethod
    def of(cls, text: str) -> CharacterTokenizer:
        """The tokenizer for the characters in `text`. Raises ValueError if `text` is empty."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.fromiter(map(self._ids.__getitem__, text), np.int32, len(text))
        except KeyError as error:
            _refuse(text, text.index(error.args[0]))

    def decode(self, ids: Any) -> str:
        return "".join(map(self.characters.__getitem__, self._text_ids(ids).tolist()))

    def piece_id(self, piece: str) -> int | None:
        return self._ids.get(piece)


def _refuse(text: str, position: int) -> NoReturn:
    raise ValueError(
        f"the character {text[position]!a} (U+{ord(text[position]):04X}) at position {position} "
        "has no id in this tokenizer; remove it, or train a model with the byte tokenizer"
    )


MOST_IDS = 2**22
"""The largest vocabulary size of a tokenizer, 16 times that of published models."""

NO_MASK = MOST_IDS
"""The `Tokenizer.mask_id` of a vocabulary without MASK. It marks the empty positions of a canvas;
causal networks do not read it."""

# Names of special tokens without brackets, in lower case. The first name in the file is used.
_NAMES = {
    "mask": ("mask", "mdm_mask"),
    "pad": ("pad", "padding"),
    "bos": ("bos", "s", "startoftext", "begin_of_text", "begin_of_sentence", "cls"),
    "eos": ("eos", "/s", "endoftext", "end_of_text", "end_of_sentence", "im_end", "eot_id", "sep"),
}
_SPECIAL = re.compile(r"[<\[][|\uff5c]?(/?[\w\u2581]+)[|\uff5c]?[>\]]")
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")

# Plain byte-level splitting makes a newline between two non-space characters a piece of its own, so
# text can be cut after such a newline without changing ids.
_PLAIN_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_CUT = re.compile(r"(?<=\S\n)(?=\S)")
_CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 64

# The byte-level alphabet: a printable character of Latin-1 is the byte with its number, and the
# other bytes in order are the characters from U+0100 on.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}


# Parsing a large file takes seconds.
@functools.lru_cache(maxsize=8)
def _backend(content: str, unmarked: frozenset[str] | None = None) -> tokenizers.Tokenizer:
    """The library's tokenizer. With `unmarked`, it encodes no text as a special or such a token."""
    data = json.loads(content)
    is_edited = False
    for token in data.get("added_tokens") or ():
        special = bool(token.get("special")) or token["content"] in (unmarked or ())
        if token.get("special") != special:
            token["special"], is_edited = special, True
    backend = tokenizers.Tokenizer.from_str(json.dumps(data) if is_edited else content)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = unmarked is not None
    if isinstance(model := backend.model, models.BPE):
        model.dropout = None
        # A BPE drops unknown characters, but raises an error if its unknown token does not exist.
        if unmarked is not None and model.unk_token is None:
            model.unk_token = _NO_TOKEN
    return backend


_NO_TOKEN = "\ufdd0"  # no character of a text


@dataclass(unsafe_hash=True)
class _OfFile(Tokenizer):
    """A tokenizer in the text `content` of a `tokenizer.json`. Text never becomes a special token.

    A subclass sets `mask_id`, `pad_id`, `bos_id`, `eos_id`, `vocab_size` and `banned_ids`.
    """

    content: str
    mask_id: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            self._read(json.loads(self.content))
        # The library raises plain Exception, and files from other programs can cause any error.
        except Exception as error:
            raise ValueError(
                f"the tokenizer.json is broken ({said(error)}); "
                "use a file written by the `tokenizers` library"
            ) from None

    def _read(self, data: Any) -> None:
        raise NotImplementedError

    def _set_content(self, data: Any) -> None:
        self.content = json.dumps(data, separators=(",", ":"))
        self._backend = _backend(self.content)
        self._vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if max(self._vocabulary.values()) >= MOST_IDS:
            raise ValueError(f"it has more than {MOST_IDS} ids")
        added = data.get("added_tokens") or ()
        self._added = {token["content"]: bool(token.get("special")) for token in added}

    def _set_specials(self, data: Any, specials: Iterable[int | None]) -> None:
        model, names = data["model"], self._vocabulary
        self._specials = [id_ for id_ in specials if id_ not in (None, NO_MASK)]
        self.vocab_size = 1 + max(*names.values(), *self._specials)
        self._empty = set(range(self.vocab_size)).difference(names.values())
        declared = {name for name, is_special in self._added.items() if is_special}
        self.textless_ids = frozenset((*self._specials, *(names[name] for name in declared)))
        # Names of special tokens that the file does not declare special.
        self._unmarked = frozenset(map(self.token, self._specials)) - declared
        name = model.get("unk_token")
        self._unknown_id = model.get("unk_id") if name is None else names.get(name)
        splitter = json.dumps(data.get("pre_tokenizer"))
        self._may_remove = '"Removed"' in splitter or '"CharDelimiterSplit"' in splitter
        self._may_cut = (
            "merges" in model
            and data.get("normalizer") is None
            and _PLAIN_BYTE_LEVEL.items()
            <= {"use_regex": True, **(data.get("pre_tokenizer") or {})}.items()
            and self._added.keys() <= declared | self._unmarked
        )

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A tokenizer that never encodes text as a special token."""
        return _backend(self.content, self._unmarked)

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        parts = [np.zeros(0, np.int32)]
        chunks = _chunks(text) if self._may_cut else iter([text])
        while some := list(islice(chunks, _CHUNKS_AT_ONCE)):
            parts += _encode(self._plain, some, text)
        ids = np.concatenate(parts)
        self._refuse_specials(ids)
        if self._may_remove:
            self._refuse_removed(text)
        return ids

    def _refuse_removed(self, text: str) -> None:
        """Raises ValueError for a character that the splitting removes, other than white space, or
        what the normalizer makes white space or nothing.
        """
        offsets = self._plain.encode(text, add_special_tokens=False).offsets
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        steps = [np.bincount(places, minlength=len(text) + 1) for places in (starts, ends)]
        normalizer = self._plain.normalizer
        for position in np.flatnonzero(np.cumsum(steps[0] - steps[1])[:-1] == 0).tolist():
            character = text[position]
            if normalizer is not None:
                character = normalizer.normalize_str(character)
            if character.strip():
                _refuse(text, position)

    def _refuse_specials(self, ids: np.ndarray, *more: int) -> None:
        """Raises ValueError for a special token or `more`, whose name can be a vocabulary word."""
        found = ids[np.isin(ids, (*self._specials, *more))]
        if found.size and found[0] != self._unknown_id:
            raise ValueError(
                f"the text contains {self.token(found[0])!r}, which this tokenizer reserves; "
                "remove it from the text"
            )

    def decode(self, ids: Any) -> str:
        # A hole has no text; the MASK of a causal model is outside its vocabulary.
        array = np.asarray(ids)
        array = _checked_ids(array[array != self.mask_id], self.vocab_size)
        text_ids = [id_ for id_ in array.tolist() if id_ not in self.textless_ids]
        return self._backend.decode(text_ids, skip_special_tokens=True)

    def bytes_of(self, id_: int) -> bytes | None:
        if id_ in self.textless_ids:
            return b""
        return _bytes_in(self.token(id_), str(self._backend.decoder))

    def piece_id(self, piece: str) -> int | None:
        try:
            (ids,) = _encode(self._plain, [piece], piece)
        except ValueError:
            return None
        return int(ids[0]) if len(ids) == 1 and self.decode(ids) == piece else None

    def token(self, id_: int) -> str:
        """The name of a token in the file; empty for an id without a name."""
        return self._backend.id_to_token(id_) or ""

    def id_of(self, token: str) -> int | None:
        """The id of the token named `token`, or None."""
        return self._vocabulary.get(token)


def _encode(backend: tokenizers.Tokenizer, texts: list[str], whole: str) -> list[np.ndarray]:
    """The ids of each of the `texts`, which are parts of `whole`, int32. Raises ValueError for a
    character that the model would lose.
    """
    try:
        # Unlike `encode`, this method lets other threads run.
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
    # The library raises plain Exception.
    except Exception as error:
        for character in dict.fromkeys(whole) if isinstance(backend.model, models.BPE) else ():
            try:
                backend.encode(character)
            except Exception:
                _refuse(whole, whole.index(character))
        raise ValueError(
            f"this tokenizer cannot encode the text ({said(error)}); "
            "remove the unknown characters, or train a model with the byte tokenizer"
        ) from None
    return [np.array(encoding.ids, np.int32) for encoding in encoded]


def _bytes_in(name: str, decoder: str) -> bytes | None:
    """The bytes of a token's name in the byte-level alphabet or as ``<0xE2>``, or None for text."""
    if "ByteLevel" in decoder:
        # Names of added tokens are texts.
        is_text = not _BYTE_OF.keys() >= set(name)
        return name.encode() if is_text else bytes(map(_BYTE_OF.__getitem__, name))
    is_part = "ByteFallback" in decoder and _FALLBACK.fullmatch(name)
    return bytes.fromhex(name[3:5]) if is_part else None


@dataclass(unsafe_hash=True)
class SubwordTokenizer(_OfFile):
    """The tokenizer of a Hugging Face `tokenizer.json`, or a BPE that is trained on a text.

    Checkpoints store the content of the file, and tokenizers with the same content are equal.
    Encoding deviates from the settings of the file in a few ways that make ids unambiguous:

    - The special tokens are the added tokens of the file with a common name (`<|mask|>`, `[PAD]`,
      `<s>`, `</s>`, ...). Missing special tokens are appended to the vocabulary: MASK, PAD, BOS,
      EOS.
    - Text never becomes a special token: the name of a special token is encoded as text, or refused
      if the model has no other token for it.
    - Truncation, padding, BPE dropout and template specials are disabled.
    - Text that the file cannot encode raises an error, instead of being dropped or mapped to an
      unknown token.
    """

    kind = "subword"

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> SubwordTokenizer:
        """The tokenizer in the file `path`; ValueError if it cannot be read or is broken."""
        file = Path(os.path.expanduser(path))
        check_regular(file)
        try:
            return cls(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{path} cannot be read ({why}); pass the path of a tokenizer.json"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _read(self, data: Any) -> None:
        self._set_content(data)
        cores: dict[str, str] = {}
        for name in self._added:
            if match := _SPECIAL.fullmatch(name):
                cores.setdefault(match[1].lower().replace("\u2581", "_"), name)
        named = {role: next(filter(cores.get, _NAMES[role]), "") for role in SPECIALS}
        following = itertools.count(max(self._vocabulary.values()) + 1)
        self._roles = {
            role: self._vocabulary[cores[core]] if core else next(following)
            for role, core in named.items()
        }
        self.mask_id, self.pad_id, self.bos_id, self.eos_id = self._roles.values()
        self._set_specials(data, self._roles.values())
        self.textless_ids |= self._empty | ({self._unknown_id} - {None})
        decoder, never = str(self._backend.decoder), set(NEVER_IN_UTF8)
        learnt = self._backend.get_vocab(with_added_tokens=False).items()
        impossible = {id_ for name, id_ in learnt if never & {*(_bytes_in(name, decoder) or b"")}}
        banned = {*self._specials, *self._empty, *impossible, self._unknown_id}
        self.banned_ids = tuple(sorted(banned - {self.eos_id, None}))

    def encode(self, text: str) -> np.ndarray:
        ids = super().encode(text)
        if (is_unknown := ids == self._unknown_id).any():
            offsets = self._plain.encode(text, add_special_tokens=False).offsets
            _refuse(text, offsets[int(np.argmax(is_unknown))][0])
        return ids

    def published(self) -> HubTokenizer:
        """The same tokenizer, with the special tokens that were appended written in its file."""
        data = json.loads(self.content)
        data["added_tokens"] = list(data.get("added_tokens") or ())
        for role, id_ in self._roles.items():
            if not self.token(id_):
                name = f"<|{role}|>"
                while name in self._vocabulary:
                    name = f"<{name}>"
                data["added_tokens"].append(added_token(id_, name))
        ids = [self._roles[role] for role in ("mask", "pad", "eos", "bos")]
        tokenizer = HubTokenizer(json.dumps(data), *ids)
        if tokenizer.vocab_size != self.vocab_size or not all(map(tokenizer.token, ids)):
            raise ValueError(
                "the ids of the tokenizer.json have gaps, which its special tokens cannot follow; "
                "train with a tokenizer.json without gaps"
            )
        return tokenizer


def _chunks(text: str) -> Iterator[str]:
    """Parts of `text` whose concatenated ids equal the ids of the whole text."""
    start = 0
    while cut := _CUT.search(text, start + _CHUNK):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


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


def train_bpe(text: str, vocab_size: int) -> SubwordTokenizer:
    """A byte-level BPE with exactly `vocab_size` ids: 256 bytes, merges and four special tokens.

    Any text can be encoded and decodes exactly. A pair of pieces is merged only if it occurs at
    least twice. The same text always produces the same tokenizer.
    """
    smallest = 256 + len(SPECIALS)
    # The library allocates memory for all ids, and every merge requires two bytes of text.
    largest = min(smallest + len(utf8(text)), MOST_IDS)
    if smallest <= vocab_size <= largest:
        tokenizer = SubwordTokenizer(train_json(text, vocab_size - len(SPECIALS)))
        if tokenizer.vocab_size == vocab_size:
            return tokenizer
        largest = tokenizer.vocab_size
    raise ValueError(
        f"tokenizer='bpe:{vocab_size}' cannot be trained on a text of {len(text)} characters; use "
        f"bpe:{smallest} to bpe:{largest}, or more text"
    )


@dataclass(unsafe_hash=True)
class HubTokenizer(_OfFile):
    """The tokenizer in a published `tokenizer.json`, with the ids of its special tokens.

    Unlike in `SubwordTokenizer`, no special tokens are appended, because the model was trained with
    its own special tokens. `encode` never encodes text as MASK, PAD, BOS, EOS or a token that the
    file declares special. `encode_marked` is for chat templates, in which names of special tokens
    represent these tokens. The `mask_id` of a causal model without MASK is `NO_MASK`.

    Attributes:
      banned_ids: MASK, PAD, BOS and ids without a token, but not EOS, which PAD or BOS can equal.
      special_names: names of MASK, PAD, BOS, EOS and of the tokens that the file declares special.
      textless_ids: the special tokens, which `decode` omits.
    """

    kind = "hub"
    mask_id: int
    pad_id: int
    eos_id: int
    bos_id: int | None = None

    def _read(self, data: Any) -> None:
        self._set_content(data | {"truncation": None, "padding": None})
        self._set_specials(data, (self.mask_id, self.pad_id, self.eos_id, self.bos_id))
        self.banned_ids = tuple(sorted(self._empty.union(self._specials) - {self.eos_id}))
        self.special_names = frozenset(filter(None, map(self.token, self.textless_ids)))

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ids that the post-processor of the file puts before a text, such as BOS."""
        whole = self._backend.encode("a", add_special_tokens=True)
        places = whole.sequence_ids
        return tuple(whole.ids[: places.index(0)] if 0 in places else ())

    def markers_in(self, text: str) -> frozenset[str]:
        """Names of added tokens in `text` that have the form of a marker, such as ``<turn>``."""
        names = filter(_SPECIAL.fullmatch, self._added)
        return frozenset(name for name in names if name in text)

    def encode_marked(self, text: str, *, quote: str = "") -> np.ndarray:
        """The ids of `text`, int32 `[n]`, with names of special tokens encoded as special tokens. A
        name with `quote` behind its first character is text.
        """
        utf8(text)
        if not quote or quote not in text:
            return _encode(self._backend, [text], text)[0]
        quoted = [name for name in self._added if name[0] + quote + name[1:] in text]
        plain = _backend(self.content, self._unmarked.union(quoted))
        markers = pattern_of(frozenset(self._added)).pattern if self._added else "$"
        ids, before = [], ""
        # Text between two markers is encoded as one, because some tokenizers begin it with a space.
        for run in re.split(f"({markers})(?!{quote})", text):
            if quote not in run:
                before += run
                continue
            ids += _encode(self._backend, [before], before)
            run = run.replace(quote, "")
            ids += _encode(plain, [run], run)
            self._refuse_specials(ids[-1], *map(self._vocabulary.__getitem__, quoted))
            before = ""
        return np.concatenate([*ids, *_encode(self._backend, [before], before)])


@functools.lru_cache(maxsize=4)
def pattern_of(names: frozenset[str]) -> re.Pattern[str]:
    """A pattern that finds the names in a text, the longest first; `names` must not be empty."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    first = "".join(sorted({re.escape(name[0]) for name in ordered}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, ordered))})")


def qwen_split(num_digits: int) -> str:
    """The pattern that splits texts before the BPE of Qwen2 (like GPT-4's): contractions, words, up
    to `num_digits` digits, punctuation, white space.
    """
    digits = r"\p{N}" if num_digits == 1 else rf"\p{{N}}{{1,{num_digits}}}"
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def bpe_json(
    vocabulary: dict[str, int],
    merges: Iterable[str],
    added: Mapping[int, tuple[str, bool]],
    splits: Iterable[str],
    *,
    composes: bool = True,
    ignore_merges: bool = False,
    bos: tuple[str, int] | None = None,
) -> str:
    """The `tokenizer.json` of a byte-level BPE that was published as plain lists.

    `added` are the names of added tokens by id, and whether they are special. Each of the patterns
    `splits` splits the pieces of the previous one. With `composes`, characters are composed first
    (NFC), and with `ignore_merges` a piece in the vocabulary is one token. `bos` begins each text.
    """
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=ignore_merges))
    if composes:
        made.normalizer = normalizers.NFC()
    pieces = [pre_tokenizers.Split(tokenizers.Regex(one), behavior="isolated") for one in splits]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*pieces, by_bytes])
    made.decoder = decoders.ByteLevel()
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=[bos[0], "$A"], pair=[bos[0], "$A", "$B"], special_tokens=[bos]
        )
    data = json.loads(made.to_str())
    data["added_tokens"] = [added_token(id_, *token) for id_, token in sorted(added.items())]
    return json.dumps(data)


def added_token(id_: int, name: str, is_special: bool = True) -> dict[str, Any]:
    """An element of ``added_tokens`` in a `tokenizer.json`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": name, "special": is_special} | flags


TOKENIZERS = ("byte", "character")
_KINDS: dict[str, type[Any]] = {
    one.kind: one for one in (ByteTokenizer, CharacterTokenizer, SubwordTokenizer, HubTokenizer)
}


def make_tokenizer(kind: str, text: str, *, train_text: str | None = None) -> Tokenizer:
    """Returns the tokenizer of `kind` for the corpus `text`.

    Args:
      kind: one of `TOKENIZERS`; ``bpe:SIZE``, which trains a byte-level BPE with SIZE ids; or the
        path, ending in ``.json``, of a Hugging Face ``tokenizer.json``.
      text: all text that the tokenizer must encode.
      train_text: the part of `text` that a BPE is trained on; None means all of `text`.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "character":
        return CharacterTokenizer.of(text)
    if size := re.fullmatch("bpe:([0-9]{1,19})", kind):
        return train_bpe(text if train_text is None else train_text, int(size[1]))
    if kind.endswith(".json") or os.path.exists(os.path.expanduser(kind)):
        return SubwordTokenizer.of_file(kind)
    known = ", ".join(TOKENIZERS)
    raise ValueError(
        f"tokenizer={kind!r} is unknown; use one of {known}, bpe:SIZE (such as bpe:1024) or the "
        "path of a tokenizer.json"
    )


def from_json(data: Any) -> Tokenizer:
    """The tokenizer that `to_json` wrote. Raises ValueError for other data."""
    try:
        fields = {**data}
        kind = _KINDS[fields.pop("type")]
        if "tokenizer_json" in fields:
            fields["content"] = fields.pop("tokenizer_json")
        return kind(**fields)
    except (KeyError, TypeError):
        raise ValueError(
            f"{str(data)[:80]} is not a tokenizer; it is damaged or from another program"
        ) from None
