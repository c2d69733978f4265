"""Reads, splits and encodes a corpus, and caches its ids on disk.

The name of a cached file contains a hash of its inputs (text, tokenizer, split, format). Identical
inputs share a file, and any change creates a new one. Encoding is deterministic and files are
replaced atomically, so several processes can encode the same corpus simultaneously.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from dlm_jax.data import text as corpora
from dlm_jax.data.pipeline import (
    TAILS,
    DocumentRows,
    Encoded,
    RowSource,
    check_fills_a_row,
    cut_into_rows,
)
from dlm_jax.data.shards import (
    INDEX_NAME,
    PARTS,
    ShardMixture,
    TokenShards,
    fingerprint,
    id_dtype,
    joined,
    quotas_of,
    read_index,
)
from dlm_jax.data.text import Document, Source, default_cache_dir
from dlm_jax.data.tokenizers import Tokenizer, make_tokenizer, prefix_of
from dlm_jax.store.files import is_remote, refuse_failures, replacing


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus for training.

    Attributes:
      name: name of the source in messages.
      tokenizer: the given tokenizer, or a tokenizer created from the text.
      train_rows: input of `train_batches`: ids of a text, rows of documents, or shards.
      val_rows: held-out rows, input of `validation_windows`.
      sha256: hash of the whole text in UTF-8, of the documents as JSON lines (``[prompt, text]``,
        or the messages of a conversation), or of the index of the shards. Store the hash with
        results.
      num_val_characters: number of characters of held-out text, excluding prompts. Bits per
        character are nats per token times `num_val_tokens / (num_val_characters * ln 2)`.
      num_train_tokens: number of training targets, including tails (see `load_corpus`) and
        excluding prompts.
      num_val_tokens: number of targets in the held-out text.
      chat_template: text of the chat template for the tokenizer; empty if there is none.
    """

    name: str
    tokenizer: Tokenizer
    train_rows: RowSource
    val_rows: RowSource
    sha256: str
    num_val_characters: int
    num_train_tokens: int
    num_val_tokens: int
    chat_template: str = ""


def store_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a .npz file, replacing an existing file atomically.

    Raises:
      OSError: the disk is full.
    """
    remedy = "set DLM_JAX_CACHE to a writable directory with free space"
    with refuse_failures(f"the token file {path}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **arrays)


def load_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray] | None:
    """The arrays in a .npz file, of which zip verifies the checksums; None if the file is missing
    or damaged.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except Exception:  # a damaged file can cause any error
        return None


class TurnEncoder(Protocol):
    """A chat template (`dlm_jax.hf.ChatTemplate`), which writes conversations."""

    @property
    def source(self) -> str:
        """The text of the template."""
        ...

    def turns(
        self, messages: Sequence[Mapping[str, Any]], /
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids before each turn of the assistant, and the ids of the turn."""
        ...


# Values of `data.tokenizer` that select the shards' own tokenizer; the last is the default.
_OWN = ("corpus", "character")

LAYOUTS = ("windows", "documents")

_FORMAT_VERSION = 2


def load_corpus(
    source: Source,
    *,
    tokenizer: str | Tokenizer = "byte",
    seq_len: int = 1,
    held_out: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
    layout: str = "windows",
    tail: str = "eos",
    pack: int = 1,
    weights: Sequence[float] = (),
    start_id: int | None = None,
    chat: TurnEncoder | None = None,
) -> Corpus:
    """Loads the corpus `source`, and encodes it unless the cache contains its ids.

    The whole text is in memory while it is read and encoded, and its ids afterwards.

    Args:
      source: one or several names, paths or globs (see `read_documents`), or the directories or
        URLs of sharded corpora, whose tokens are read in place.
      tokenizer: a kind (see `make_tokenizer`) or an existing tokenizer, such as that of a
        checkpoint. A character tokenizer is created from the whole text, so that the held-out part
        can be encoded. A BPE is trained only on the training text.
      seq_len: number of tokens per row. The training text must fill at least one window. A prompt,
        its response and one EOS must fit in a row.
      held_out: fraction of the characters (or documents) to hold out at the end, in (0, 1).
      cache_dir: directory of the cache; None means `$DLM_JAX_CACHE` or `~/.cache/dlm_jax`.
      layout: ``windows`` joins the documents with blank lines and cuts the text into consecutive
        windows. With ``documents``, each row is a document or part of a long document. Prompts
        require ``documents``.
      tail: tokens after the document of a row. ``eos`` fills the row with EOS as targets, so that a
        model learns to stop. ``pad`` is one EOS followed by PAD.
      pack: largest number of documents in a training row. Each document is in one row of an epoch.
      weights: relative number of rows from each sharded corpus. The weights need not sum to 1. If
        empty, rows are proportional to the numbers of tokens.
      start_id: id that a causal network puts before each row. With ``documents``, a row begins with
        the ids that the tokenizer puts before a text, without this one.
      chat: chat template for `tokenizer`, which conversations require. Each turn of the assistant
        is a row: what a chat sends before this turn is given, and what the template writes for the
        turn is the target. Later turns are not in the row, because a bidirectional model would
        see them.
    """
    for field, value, known in (("layout", layout, LAYOUTS), ("tail", tail, TAILS)):
        if value not in known:
            raise ValueError(f"{field}={value!r} is unknown; use {' or '.join(known)}")
    folder = Path(os.path.expanduser(cache_dir or default_cache_dir())).absolute()
    if roots := _roots_of(source):
        if layout != "windows":
            raise ValueError(
                f"data.layout={layout!r} is not supported for sharded corpora; use windows"
            )
        return _load_shards(roots, tokenizer, seq_len, weights, folder)
    if weights:
        raise ValueError(
            "data.weights applies to sharded corpora; build them with dlm_jax.data.shard"
        )
    documents, name = corpora.read_documents(source), corpora.describe(source)
    parts: Sequence[Any]
    if layout == "windows":
        for document in documents:
            document.check_plain("use data.layout=documents")
        text = corpora.join_documents(documents)
        parts = corpora.split_text(text, held_out, name=name)
        num_val_characters = len(parts[1])
        train_text, content = parts[0], text.encode("utf-8")
    else:
        talk = next((document.name for document in documents if document.messages), None)
        if talk is not None and chat is None:
            raise ValueError(
                f"{talk} is a conversation, but there is no chat template; set train.init_from "
                'to a model with a chat template, or write {"prompt": ..., "response": ...}'
            )
        chat = None if talk is None else chat
        parts = corpora.split_documents(documents, held_out, name=name)
        num_val_characters = sum(len(document.text) for document in parts[1])
        text, train_text = (
            "\n\n".join(f"{document.prompt or ''}{document.text}" for document in some)
            for some in (documents, parts[0])
        )
        lines = (json.dumps(one.messages or [one.prompt, one.text]) for one in documents)
        content = "\n".join(lines).encode("ascii")
    coder = tokenizer
    if isinstance(coder, str):
        coder = make_tokenizer(coder, text, train_text=train_text)
    sha256 = hashlib.sha256(content).hexdigest()
    prefix_ids = prefix_of(coder, start_id)
    inputs: list[Any] = [_FORMAT_VERSION, sha256, coder.to_json(), held_out]
    if layout == "documents":
        inputs += ["documents", seq_len, *prefix_ids, *([] if chat is None else [chat.source])]
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode("ascii")).hexdigest()[:32]

    cached = folder / f"corpus-{key}.npz"
    names = [*PARTS, *(f"{part}_bounds" for part in PARTS if layout == "documents")]
    arrays = load_arrays(cached, names)
    if arrays is None:
        arrays = {}
        for part, of_part in zip(PARTS, cast(Any, parts), strict=True):
            if layout == "windows":
                ids = _encode_text(coder, of_part, documents)
            else:
                rows = _encode_documents(coder, of_part, prefix_ids, chat)
                ids, bounds = cut_into_rows(rows, seq_len=seq_len, prefix_ids=prefix_ids)
                arrays[f"{part}_bounds"] = bounds
            arrays[part] = ids.astype(id_dtype(coder.vocab_size))
        store_arrays(cached, arrays)

    sources: list[Any] = [arrays[part] for part in PARTS]
    if layout == "windows":
        num_tokens = [len(ids) for ids in sources]
        check_fills_a_row(name, num_tokens[0], seq_len)
    else:
        # Held-out documents are evaluated one per row.
        sources = [
            DocumentRows(
                tokens=arrays[part],
                bounds=arrays[f"{part}_bounds"],
                seq_len=seq_len,
                eos_id=coder.eos_id,
                pad_id=coder.pad_id,
                tail=tail,
                pack=most,
            )
            for part, most in zip(PARTS, (pack, 1), strict=True)
        ]
        num_tokens = [rows.num_targets() for rows in sources]
    return Corpus(
        name=name,
        tokenizer=coder,
        train_rows=sources[0],
        val_rows=sources[1],
        sha256=sha256,
        num_val_characters=num_val_characters,
        num_train_tokens=num_tokens[0],
        num_val_tokens=num_tokens[1],
    )


def _encode_text(tokenizer: Tokenizer, text: str, documents: Sequence[Document]) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except ValueError:
        # The error names the document and the position in it.
        for _ in _encode_documents(tokenizer, documents):
            pass
        raise


def _encode_documents(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    prefix_ids: Sequence[int] = (),
    chat: TurnEncoder | None = None,
) -> Iterator[Encoded]:
    """Yields the ids of each document; an error names the document."""
    for document in documents:
        given = None
        try:
            if document.messages and chat is not None:
                for message in document.messages:
                    tokenizer.encode(message["content"])
                # The template itself writes BOS, as in a chat.
                for given, ids in chat.turns(document.messages):
                    # Every row ends with EOS, which a template can write, too.
                    ends = np.flatnonzero(ids == tokenizer.eos_id)
                    yield document.name, given, ids[: ends[0]] if ends.size else ids
                continue
            if document.prompt is not None:
                prompt = tokenizer.encode(document.prompt)
                given = np.concatenate([np.array(prefix_ids, np.int32), prompt])
            ids = tokenizer.encode(document.text)
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from None
        yield document.name, given, ids


def _roots_of(source: Source) -> list[str]:
    """The directories and URLs of the sharded corpora in `source`; empty for text."""
    roots, others = [], []
    for name in corpora.names_of(source):
        index = Path(os.path.expanduser(name)) / INDEX_NAME
        (roots if is_remote(name) or index.is_file() else others).append(name)
    if roots and others:
        raise ValueError(
            f"data.source={others[0]} is not a sharded corpus, but {roots[0]} is; convert it to "
            f"shards with python -m dlm_jax.data.shard"
        )
    return roots


def _load_shards(
    roots: list[str],
    tokenizer: str | Tokenizer,
    seq_len: int,
    weights: Sequence[float],
    folder: Path,
) -> Corpus:
    """The corpus of the shards under `roots`, which are not loaded into memory."""
    indices = [read_index(root) for root in roots]
    first = indices[0]
    facts = (fingerprint(first.tokenizer), first.dtype, first.record_tokens)
    for root, index in zip(roots, indices, strict=True):
        if (fingerprint(index.tokenizer), index.dtype, index.record_tokens) != facts:
            raise ValueError(
                f"data.source: {root} has a different tokenizer or record size from {roots[0]}; "
                "rebuild it"
            )
    coder = tokenizer
    if isinstance(coder, str) and not coder.startswith("bpe:"):
        coder = first.tokenizer if coder in _OWN else make_tokenizer(coder, "")
    if isinstance(coder, str) or fingerprint(coder) != facts[0]:
        raise ValueError(
            f"data.source: {roots[0]} was made with a different tokenizer from data.tokenizer; "
            f"rebuild it with that tokenizer, or use data.tokenizer=corpus"
        )
    if weights and len(weights) != len(roots):
        raise ValueError(
            f"data.weights has {len(weights)} numbers for {len(roots)} corpora; pass one per corpus"
        )
    train, val = (
        [TokenShards.of(*of, part, folder) for of in zip(roots, indices, strict=True)]
        for part in PARTS
    )
    quotas = quotas_of(tuple(map(float, weights or map(len, train))))
    used = [number for number, quota in enumerate(quotas) if quota]
    for number in used:
        check_fills_a_row(roots[number], len(train[number]), seq_len)
    for shards in (*train, *val):
        shards.check()
    train, val = ([part[number] for number in used] for part in (train, val))
    sums = [indices[number].sha256 for number in used]
    mixture = ShardMixture(tuple(train), tuple(quotas[number] for number in used))
    return Corpus(
        name=", ".join(roots),
        tokenizer=first.tokenizer,
        train_rows=train[0] if len(used) == 1 else mixture,
        val_rows=joined(val),
        sha256=sums[0] if len(used) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest(),
        num_val_characters=sum(shard.characters for one in val for shard in one.shards),
        num_train_tokens=sum(map(len, train)),
        num_val_tokens=sum(map(len, val)),
    )
