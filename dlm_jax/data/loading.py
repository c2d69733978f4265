"""A corpus ready to train on: text read, split, encoded and cached on disk as token files.

The name of a token file holds a hash of everything it was made from (the text, the tokenizer, the
split, the format), so that equal inputs share files and a changed byte makes new ones. Building
is deterministic and files appear whole, so any number of processes may do it at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.data import corpora, sharded, token_files
from dlm_jax.data.corpora import Document, Source
from dlm_jax.data.corpus import Corpus
from dlm_jax.data.rows import TAILS, DocumentRows, Encoded, cut_into_rows
from dlm_jax.data.tokenizer_kinds import make_tokenizer
from dlm_jax.data.tokenizers import Tokenizer

MakeTokenizer = Callable[[str], Tokenizer]
"""The tokenizer for a text."""

LAYOUTS = ("windows", "documents")

_FORMAT_VERSION = 1
_PARTS = ("train", "val")


def load_corpus(
    source: Source,
    *,
    tokenizer: str | Tokenizer | MakeTokenizer = "byte",
    seq_len: int = 1,
    held_out: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
    layout: str = "windows",
    tail: str = "eos",
    weights: Sequence[float] = (),
) -> Corpus:
    """The corpus of `source`, its token files in place; encodes only what no cache file holds.

    The text is held in memory while it is read and encoded; training maps the token files.

    Args:
      source: a corpus's name, a path or a glob, or several (see `read_documents`); or one or
        several sharded corpora, directories or URLs, whose tokens are read where they are.
      tokenizer: a kind (see `make_tokenizer`), an existing tokenizer, such as a checkpoint's, or a
        function that makes one for the whole text.
        Characters are those of the whole text, so that the held-out part can be encoded; a BPE
        learns from the training text alone.
      seq_len: tokens of a row. The training text must fill one window; a prompt, its response and
        one EOS must fit a row.
      held_out: share to hold out at the end, in (0, 1): of the characters, or with documents of
        their number.
      cache_dir: folder of the token files; None is `$DLM_JAX_CACHE` or `~/.cache/dlm_jax`.
      layout: ``windows`` joins the documents, one blank line between two, and cuts windows side by
        side; with ``documents``, a row is a document, or a part of one longer than a row. Prompts
        need the latter.
      tail: with documents, what stands behind one: ``eos``, EOS to the end of the row, trained as
        padding, so that a model learns where to stop; or ``pad``, one EOS and no more.
      weights: of several sharded corpora: the share of rows of each, which need not sum to 1; none:
        as many as they have tokens.

    Raises:
      ValueError: bad source (see `read_documents`), unknown kind, layout or tail, a character the
        tokenizer lacks, too little text, a prompt in windows, a response that is too long, or a
        cache folder that cannot be written.
    """
    for field, value, known in (("layout", layout, LAYOUTS), ("tail", tail, TAILS)):
        if value not in known:
            raise ValueError(f"{field}={value!r} is unknown; use {' or '.join(known)}")
    named = token_files.default_cache_dir() if cache_dir is None else cache_dir
    folder = Path(os.path.expanduser(named)).absolute()
    roots = sharded.roots_of(source)
    if roots:
        if layout != "windows":
            raise ValueError(f"data.layout={layout!r} is not for sharded corpora; use windows")
        return sharded.load_sharded(
            roots, tokenizer=tokenizer, seq_len=seq_len, weights=weights, cache_dir=folder
        )
    if weights:
        raise ValueError("data.weights mixes sharded corpora; make them with dlm_jax.data.shard")
    documents = corpora.read_documents(source)
    job = _Job(corpora.describe(source), seq_len, held_out, folder)
    if layout == "documents":
        return _load_documents(job, documents, tokenizer, tail)
    return _load_windows(job, documents, tokenizer)


@dataclass(frozen=True)
class _Job:
    """What both layouts need: a name for messages, sizes, and where files go."""

    name: str
    seq_len: int
    held_out: float
    folder: Path

    def paths(self, kind: str, key: str) -> dict[str, Path]:
        return {part: self.folder / f"{kind}-{key}-{part}.npy" for part in _PARTS}


def _load_windows(
    job: _Job, documents: Sequence[Document], tokenizer: str | Tokenizer | MakeTokenizer
) -> Corpus:
    for document in documents:
        if document.prompt is not None:
            raise ValueError(
                f"{document.name} has a prompt, which windows would cut off its response; "
                "use data.layout=documents"
            )
    text = corpora.join_documents(documents)
    if len(text) < 2:
        raise ValueError(
            f"{job.name} has {len(text)} characters, too short to split; give more text"
        )
    parts: dict[str, str] = dict(zip(_PARTS, corpora.split_text(text, job.held_out), strict=True))
    coder = _coder(tokenizer, text, parts["train"])
    sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
    paths = job.paths("tokens", _cache_key(sha256, coder, job.held_out))
    missing = [part for part in _PARTS if not token_files.is_intact(paths[part])]
    # Both are encoded before either is written, so that text with an error leaves no file.
    encoded = {part: _encode(coder, parts[part], documents) for part in missing}
    for part, ids in encoded.items():
        token_files.write_tokens(paths[part], ids, vocab_size=coder.vocab_size)
    counts = {part: len(token_files.open_tokens(path)) for part, path in paths.items()}
    if counts["train"] < job.seq_len:
        raise ValueError(
            f"{job.name} has {counts['train']} training tokens, fewer than one window of "
            f"seq_len={job.seq_len}; give more text or a smaller seq_len"
        )
    return Corpus(
        name=job.name,
        tokenizer=coder,
        train_rows=paths["train"],
        val_rows=paths["val"],
        sha256=sha256,
        num_train_characters=len(parts["train"]),
        num_val_characters=len(parts["val"]),
        num_train_tokens=counts["train"],
        num_val_tokens=counts["val"],
    )


def _load_documents(
    job: _Job,
    documents: Sequence[Document],
    tokenizer: str | Tokenizer | MakeTokenizer,
    tail: str,
) -> Corpus:
    train, val = corpora.split_documents(documents, job.held_out, name=job.name)
    parts = {"train": train, "val": val}
    coder = _coder(tokenizer, _all_text(documents), _all_text(train))
    lines = (json.dumps([document.prompt, document.text]) for document in documents)
    sha256 = hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()
    key = _cache_key(sha256, coder, job.held_out, "documents", job.seq_len)
    paths, bounds_paths = job.paths("tokens", key), job.paths("rows", key)
    made = {
        part: cut_into_rows(_encoded(coder, parts[part]), seq_len=job.seq_len)
        for part in _PARTS
        if not all(map(token_files.is_intact, (paths[part], bounds_paths[part])))
    }
    for part, (stretches, bounds) in made.items():
        ids = np.concatenate(stretches)
        token_files.write_tokens(paths[part], ids, vocab_size=coder.vocab_size)
        token_files.write_tokens(bounds_paths[part], bounds, vocab_size=len(ids) + 1)
    rows = {
        part: DocumentRows(
            tokens_path=paths[part],
            bounds_path=bounds_paths[part],
            seq_len=job.seq_len,
            eos_id=coder.eos_id,
            pad_id=coder.pad_id,
            tail=tail,
        )
        for part in _PARTS
    }
    return Corpus(
        name=job.name,
        tokenizer=coder,
        train_rows=rows["train"],
        val_rows=rows["val"],
        sha256=sha256,
        num_train_characters=sum(len(document.text) for document in train),
        num_val_characters=sum(len(document.text) for document in val),
        num_train_tokens=rows["train"].num_targets(),
        num_val_tokens=rows["val"].num_targets(),
    )


def _coder(tokenizer: str | Tokenizer | MakeTokenizer, text: str, train_text: str) -> Tokenizer:
    if callable(tokenizer):
        return tokenizer(text)
    if not isinstance(tokenizer, str):
        return tokenizer
    return make_tokenizer(tokenizer, text, train_text=train_text)


def _cache_key(sha256: str, tokenizer: Tokenizer, held_out: float, *more: Any) -> str:
    inputs = [_FORMAT_VERSION, sha256, tokenizer.to_json(), held_out, *more]
    encoded = json.dumps(inputs, sort_keys=True).encode("ascii")
    return hashlib.sha256(encoded).hexdigest()[:32]


def _all_text(documents: Sequence[Document]) -> str:
    return "\n\n".join(f"{document.prompt or ''}{document.text}" for document in documents)


def _encoded(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
    for document in documents:
        name, prompt = document.name, document.prompt
        try:
            given = None if prompt is None else tokenizer.encode(prompt)
            ids = tokenizer.encode(document.text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        yield Encoded(name, given, ids)


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
