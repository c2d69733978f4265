"""The interface of tokenizers, and the byte and character tokenizers.

A vocabulary consists of the text ids, followed by the special tokens in the order MASK, PAD, BOS,
EOS. Tokenizers are immutable and can be pickled, and tokenizers with the same fields are equal.
Checkpoints store tokenizers as JSON, which `to_json` writes and `tokenizer_kinds.from_json` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

_NUM_SPECIALS = 4

# Bytes that never occur in UTF-8, which a model must not write.
NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens; every id is in `[0, vocab_size)`."""
        ...

    @property
    def mask_id(self) -> int:
        """The id of a hole."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills a canvas beyond `length`."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, or None."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a generation."""
        ...

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that samplers never propose, ascending: MASK, PAD, BOS and undecodable ids."""
        ...

    @property
    def space_id(self) -> int | None:
        """The id of the piece `" "`, which structural edits insert, or None."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 `[n]`, without special tokens. Raises ValueError for text
        without ids.
        """
        ...

    def decode(self, ids: Any) -> str:
        """The text of `ids`. Special tokens have no text."""
        ...

    def piece_id(self, piece: str) -> int | None:
        """The single id that encodes `piece`, or None."""
        ...

    def to_json(self) -> dict[str, Any]:
        """A plain JSON dict with a `type`, from which `from_json` restores an equal tokenizer."""
        ...


def text_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of text tokens, which a corruption can substitute for the true token."""
    special = {*tokenizer.banned_ids, tokenizer.mask_id, tokenizer.pad_id, tokenizer.eos_id}
    return tuple(token for token in range(tokenizer.vocab_size) if token not in special)


def noise_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that uniform noise can show: text tokens, and EOS, which samplers can also write."""
    return tuple(sorted({*text_ids(tokenizer), tokenizer.eos_id}))


def checked_ids(ids: Any, vocab_size: int) -> np.ndarray:
    """Returns `ids` as an integer array `[n]`. Raises ValueError for a wrong shape or unknown
    ids.
    """
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


class _WithSpecials:
    """The base class of the byte and character tokenizers. Special tokens follow the `num_text_ids`
    text ids.
    """

    @property
    def num_text_ids(self) -> int:
        raise NotImplementedError

    @property
    def undecodable_ids(self) -> tuple[int, ...]:
        """Text ids that occur in no valid text."""
        return ()

    @property
    def vocab_size(self) -> int:
        return self.num_text_ids + _NUM_SPECIALS

    @property
    def mask_id(self) -> int:
        return self.num_text_ids

    @property
    def pad_id(self) -> int:
        return self.num_text_ids + 1

    @property
    def bos_id(self) -> int:
        return self.num_text_ids + 2

    @property
    def eos_id(self) -> int:
        return self.num_text_ids + 3

    @property
    def banned_ids(self) -> tuple[int, ...]:
        return (*self.undecodable_ids, self.mask_id, self.pad_id, self.bos_id)

    @property
    def space_id(self) -> int | None:
        return self.piece_id(" ")

    def piece_id(self, piece: str) -> int | None:
        raise NotImplementedError

    def _text_ids(self, ids: Any) -> np.ndarray:
        """Returns `ids` without special tokens. Raises ValueError for an id outside the
        vocabulary.
        """
        array = checked_ids(ids, self.vocab_size)
        return array[array < self.num_text_ids]


@dataclass(frozen=True)
class ByteTokenizer(_WithSpecials):
    """A tokenizer of the 256 byte values, followed by the special tokens. Every text can be
    encoded.

    Generated bytes can be invalid UTF-8, which decodes to U+FFFD.
    """

    @property
    def num_text_ids(self) -> int:
        return 256

    @property
    def undecodable_ids(self) -> tuple[int, ...]:
        """The 13 bytes that never occur in UTF-8."""
        return NEVER_IN_UTF8

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        return self._text_ids(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def piece_id(self, piece: str) -> int | None:
        data = piece.encode("utf-8", errors="replace")
        return data[0] if len(data) == 1 else None

    def to_json(self) -> dict[str, Any]:
        return {"type": "byte"}


@dataclass(frozen=True)
class CharacterTokenizer(_WithSpecials):
    """A tokenizer with one id per character of a corpus, in code-point order, followed by the
    special tokens.
    """

    characters: str

    def __post_init__(self) -> None:
        points = [ord(character) for character in self.characters]
        if not points:
            raise ValueError("characters is empty; pass at least one character")
        if any(a >= b for a, b in zip(points, points[1:], strict=False)):
            raise ValueError(
                "characters are not distinct and ascending; use CharacterTokenizer.of(text)"
            )

    @classmethod
    def of(cls, text: str) -> CharacterTokenizer:
        """The tokenizer for the characters in `text`. Raises ValueError if `text` is empty."""
        return cls("".join(sorted(set(text))))

    @property
    def num_text_ids(self) -> int:
        return len(self.characters)

    @cached_property
    def _points(self) -> np.ndarray:
        return _code_points(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points = _code_points(text)
        ids = np.searchsorted(self._points, points).astype(np.int32)
        is_known = self._points[np.minimum(ids, self.num_text_ids - 1)] == points
        if not is_known.all():
            position = int(np.argmin(is_known))
            raise ValueError(
                f"the character {text[position]!a} (U+{points[position]:04X}) at position "
                f"{position} is not one of the {self.num_text_ids} characters of the tokenizer; "
                "remove it, or train a model with the byte tokenizer"
            )
        return ids

    def decode(self, ids: Any) -> str:
        points = self._points[self._text_ids(ids)]
        return points.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def piece_id(self, piece: str) -> int | None:
        position = self.characters.find(piece) if len(piece) == 1 else -1
        return None if position < 0 else position

    def to_json(self) -> dict[str, Any]:
        return {"type": "character", "characters": self.characters}


def _code_points(text: str) -> np.ndarray:
    """Unicode code points of `text`, uint32 `[n]`, including lone surrogates."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
