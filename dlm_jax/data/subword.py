"""Subword tokenizers: Hugging Face `tokenizer.json` files, and byte-level BPEs trained on a text.

The file's content is the whole tokenizer: it travels inside checkpoints, and two tokenizers of
equal content are equal. Ours differs from what the file asks for in a few ways, all of them so
that ids mean one thing:

- Specials are the file's added tokens with a usual name (`<|mask|>`, `[PAD]`, `<s>`, `</s>`, ...);
  those it lacks are appended behind its vocabulary, in the order MASK, PAD, BOS, EOS.
- Text never becomes a special: a text that holds the characters of one is encoded as text.
- Truncation, padding, BPE dropout and the specials a template adds are off.
- Text the file has no ids for is refused, where it would be dropped or become an unknown token.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.data.subword_backend import MOST_IDS, SPECIALS, Backend, train_json
from dlm_jax.data.tokenizers import checked_ids, utf8


@dataclass(frozen=True)
class SubwordTokenizer:
    """The tokenizer of a `tokenizer.json` (see the module for what differs from the file).

    Attributes:
      content: the file's JSON text; how it is spaced does not count.
    """

    content: str
    _backend: Backend = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            data = json.loads(self.content)
            object.__setattr__(self, "content", json.dumps(data, separators=(",", ":")))
            object.__setattr__(self, "_backend", Backend(data))
        # The library raises plain Exception, and a file of another program anything.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"the tokenizer.json is broken ({reason}); "
                "give one that the `tokenizers` library wrote"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return SubwordTokenizer, (self.content,)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> SubwordTokenizer:
        """The tokenizer in the file `path`; ValueError if it cannot be read or is broken."""
        file = Path(os.path.expanduser(path))
        if file.is_dir():
            raise ValueError(f"{path} is a folder; name its file, {Path(path) / 'tokenizer.json'}")
        try:
            content = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist; give the path of a tokenizer.json") from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); give the path of a tokenizer.json"
            ) from None
        try:
            return cls(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of ids, appended specials included."""
        return self._backend.vocab_size

    @property
    def mask_id(self) -> int:
        """The id of a hole."""
        return self._backend.specials["mask"]

    @property
    def pad_id(self) -> int:
        """The id beyond `length`."""
        return self._backend.specials["pad"]

    @property
    def bos_id(self) -> int:
        """The id that begins a text."""
        return self._backend.specials["bos"]

    @property
    def eos_id(self) -> int:
        """The id that ends a generation."""
        return self._backend.specials["eos"]

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids no sampler may propose: MASK, PAD, BOS, unknown, impossible bytes, no token."""
        return self._backend.banned_ids

    @property
    def space_id(self) -> int | None:
        """The id of `" "`, or None."""
        return self.piece_id(" ")

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 `[n]`; ValueError for characters the tokenizer has no ids for."""
        utf8(text)
        return self._backend.encode(text)

    def decode(self, ids: Any) -> str:
        """Text of `ids`; specials stand for no text, bytes that are no UTF-8 become U+FFFD."""
        array = checked_ids(ids, self.vocab_size)
        is_text = ~np.isin(array, self._backend.textless_ids)
        return self._backend.decode(array[is_text].tolist())

    def piece_id(self, piece: str) -> int | None:
        """The id that adds `piece` to the text it follows, or None.

        Asked between two other tokens, as some tokenizers write a first token differently.
        """
        first = next(self._backend.candidates("a"), None)
        if not piece or first is None:
            return None
        alone, twice = self.decode([first]), self.decode([first, first])
        for candidate in self._backend.candidates(piece):
            if self.decode([first, candidate, first]) == alone + piece + twice[len(alone) :]:
                return candidate
        return None

    def to_json(self) -> dict[str, Any]:
        """`{"type": "subword", "tokenizer_json": ...}`, the file's whole content as a text."""
        return {"type": "subword", "tokenizer_json": self.content}


def train_bpe(text: str, vocab_size: int) -> SubwordTokenizer:
    """A byte-level BPE of exactly `vocab_size` ids: 256 bytes, merges, and four specials.

    Any text has ids, and they decode to it exactly. A pair of pieces is merged only if it occurs
    twice at least. Equal texts give equal tokenizers.

    Raises:
      ValueError: `vocab_size` is below 260, or `text` is too short for so many merges.
    """
    smallest = 256 + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"a BPE of {vocab_size} ids cannot hold the 256 bytes and {len(SPECIALS)} specials; "
            f"use bpe:{smallest} at least"
        )
    # Every merge needs two bytes of text, and the library makes room for all ids at once.
    largest = min(smallest + len(utf8(text)), MOST_IDS)
    if vocab_size > largest:
        raise ValueError(
            f"a BPE of {vocab_size} ids cannot be learnt from a text of {len(text)} characters; "
            f"use bpe:{largest} at most or give more text"
        )
    tokenizer = SubwordTokenizer(train_json(text, vocab_size - len(SPECIALS)))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the text of {len(text)} characters has pairs for a BPE of {tokenizer.vocab_size} "
            f"ids, not {vocab_size}; use bpe:{tokenizer.vocab_size} at most or give more text"
        )
    return tokenizer
