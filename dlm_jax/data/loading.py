"""A corpus ready to train on: text read, split, encoded and cached on disk as token files.

The name of a token file holds a hash of everything it was made from (the text, the tokenizer, the
split, the format), so that equal inputs share files and a changed byte makes new ones. Building
is deterministic and files appear whole, so any number of processes may do it at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlm_jax.data import corpora, token_files
from dlm_jax.data.corpora import Document, Source
from dlm_jax.data.tokenizers import Tokenizer, make_tokenizer

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Corpus:
    """What training needs to know of its text.

    Attributes:
      name: the source, for messages.
      tokenizer: made from the text, or the one given.
      train_path: token file of the training text.
      val_path: token file of the held-out text.
      sha256: of the whole text in UTF-8; record it beside results.
      num_train_characters: characters of training text.
      num_val_characters: characters of held-out text; nats per token times `num_val_tokens`
        over this and ln 2 is bits per character.
      num_train_tokens: tokens in `train_path`.
      num_val_tokens: tokens in `val_path`.
    """

    name: str
    tokenizer: Tokenizer
    train_path: Path
    val_path: Path
    sha256: str
    num_train_characters: int
    num_val_characters: int
    num_train_tokens: int
    num_val_tokens: int


def load_corpus(
    source: Source,
    *,
    tokenizer: str | Tokenizer = "byte",
    seq_len: int = 1,
    held_out: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """The corpus of `source`, its token files in place; encodes only what no cache file holds.

    The text is held in memory while it is read and encoded; training maps the token files.

    Args:
      source: the built-in corpus's name, a path or a glob, or several (see `read_documents`).
      tokenizer: a kind from `TOKENIZERS`, made for the whole text (held-out part included, so
        that it can be encoded), or an existing tokenizer, such as a checkpoint's.
      seq_len: window length in tokens; the training text must fill one window.
      held_out: share of the characters to hold out, in (0, 1), at the end of the text.
      cache_dir: folder of the token files; None is `$DLM_JAX_CACHE` or `~/.cache/dlm_jax`.

    Raises:
      ValueError: bad source (see `read_documents`), unknown kind, a character the tokenizer
        lacks, too little text, or a cache folder that cannot be written.
    """
    documents = corpora.read_documents(source)
    text = corpora.join_documents(documents)
    name = corpora.describe(source)
    if len(text) < 2:
        raise ValueError(f"{name} has {len(text)} characters, too short to split; give more text")
    parts: dict[str, str] = dict(
        zip(("train", "val"), corpora.split_text(text, held_out), strict=True)
    )
    coder = make_tokenizer(tokenizer, text) if isinstance(tokenizer, str) else tokenizer
    sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
    key = _cache_key(sha256, coder, held_out)
    folder = token_files.default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    paths = {part: folder.absolute() / f"tokens-{key}-{part}.npy" for part in parts}
    missing = [part for part in parts if not token_files.is_intact(paths[part])]
    # Both are encoded before either is written, so that text with an error leaves no file.
    encoded = {part: _encode(coder, parts[part], documents) for part in missing}
    for part, ids in encoded.items():
        token_files.write_tokens(paths[part], ids, vocab_size=coder.vocab_size)
    counts = {part: len(token_files.open_tokens(path)) for part, path in paths.items()}
    if counts["train"] < seq_len:
        raise ValueError(
            f"{name} has {counts['train']} training tokens, fewer than one window of "
            f"seq_len={seq_len}; give more text or a smaller seq_len"
        )
    return Corpus(
        name=name,
        tokenizer=coder,
        train_path=paths["train"],
        val_path=paths["val"],
        sha256=sha256,
        num_train_characters=len(parts["train"]),
        num_val_characters=len(parts["val"]),
        num_train_tokens=counts["train"],
        num_val_tokens=counts["val"],
    )


def _cache_key(sha256: str, tokenizer: Tokenizer, held_out: float) -> str:
    inputs = [_FORMAT_VERSION, sha256, tokenizer.to_json(), held_out]
    encoded = json.dumps(inputs, sort_keys=True).encode("ascii")
    return hashlib.sha256(encoded).hexdigest()[:32]


def _encode(tokenizer: Tokenizer, text: str, documents: Sequence[Document]) -> np.ndarray:
    """Ids of `text`; an error names the document it is in and the position there."""
    try:
        return tokenizer.encode(text)
    except ValueError:
        for document in documents:
            try:
                tokenizer.encode(document.text)
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from None
        raise
