"""The tokenizer of a published model, with the ids of its file and the special tokens of its
configs.

Unlike in `dlm_jax.data.subword.SubwordTokenizer`, no special tokens are appended, because the model
was trained with its own special tokens. `encode` never encodes text as a special token.
`encode_marked` is for chat templates, in which names of special tokens represent these tokens.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dlm_jax.data.tokenizers import checked_ids, utf8

# The split of Qwen2 (like GPT-4's): contractions, words, single digits, punctuation, white space.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class HubTokenizer:
    """The tokenizer in a published `tokenizer.json`, with the ids of its special tokens."""

    content: str
    mask_id: int
    pad_id: int
    eos_id: int
    bos_id: int | None = None
    _plain: tokenizers.Tokenizer = field(init=False, repr=False, compare=False)
    _marked: tokenizers.Tokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        content, plain, marked = _backends(self.content)
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_marked", marked)

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.content, self.mask_id, self.pad_id, self.eos_id, self.bos_id)
        return HubTokenizer, given

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        return frozenset(self._marked.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _specials(self) -> tuple[int, ...]:
        given = (self.mask_id, self.pad_id, self.eos_id, self.bos_id)
        return tuple(id_ for id_ in given if id_ is not None)

    @property
    def vocab_size(self) -> int:
        """The highest id plus 1."""
        return self._num_ids

    @cached_property
    def _num_ids(self) -> int:
        return 1 + max((*self._known_ids, *self._specials))

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that samplers never propose, ascending: MASK, PAD, BOS and ids without a token.

        PAD and BOS can be proposed if they equal EOS.
        """
        return self._banned

    @cached_property
    def _banned(self) -> tuple[int, ...]:
        empty = set(range(self.vocab_size)) - self._known_ids
        return tuple(sorted((empty | set(self._specials)) - {self.eos_id}))

    @property
    def space_id(self) -> int | None:
        return self.piece_id(" ")

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_marked(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 `[n]`, with names of special tokens encoded as special
        tokens.
        """
        utf8(text)
        return np.array(self._marked.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Any) -> str:
        array = checked_ids(ids, self.vocab_size)
        is_text = ~np.isin(array, self._specials)
        return self._marked.decode(array[is_text].tolist(), skip_special_tokens=True)

    def piece_id(self, piece: str) -> int | None:
        ids = self._plain.encode(piece, add_special_tokens=False).ids
        return ids[0] if len(ids) == 1 and self.decode(ids) == piece else None

    def token(self, id_: int) -> str:
        """The name of a token in the file; empty for an id without a name."""
        return self._marked.id_to_token(id_) or ""

    def id_of(self, token: str) -> int | None:
        """The id of the token named `token`, or None."""
        return self._marked.token_to_id(token)

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "hub", "tokenizer_json": self.content, "mask_id": self.mask_id,
            "pad_id": self.pad_id, "eos_id": self.eos_id, "bos_id": self.bos_id,
        }  # fmt: skip


@functools.lru_cache(maxsize=4)
def _backends(content: str) -> tuple[str, tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The text of a tokenizer.json without truncation and padding, and two tokenizers made from it.

    The first tokenizer never encodes text as a special token. Results are cached, because parsing a
    large file takes seconds.
    """
    try:
        data = {**json.loads(content), "truncation": None, "padding": None}
        content = json.dumps(data, separators=(",", ":"))
        plain, marked = (tokenizers.Tokenizer.from_str(content) for _ in range(2))
    # The library raises plain Exception, and files from other programs can cause any error.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the tokenizer.json is broken ({reason}); download it again") from None
    plain.encode_special_tokens = True
    return content, plain, marked


def qwen_json(vocabulary: dict[str, int], merges: list[str], added: list[dict[str, Any]]) -> str:
    """Returns the `tokenizer.json` of a Qwen2 vocabulary that was published as plain lists."""
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(_QWEN_SPLIT), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    made.decoder = decoders.ByteLevel()
    data = json.loads(made.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [plain | token for token in sorted(added, key=lambda t: t["id"])]
    return json.dumps(data)
