"""What a sharded corpus says of itself: its tokenizer, its shards, and their checksums.

A sharded corpus is a directory or bucket prefix::

    index.json                        see `Index`, and its CRC32 on a second line
    train-00000-of-00100.array_record
    val-00000-of-00100.array_record   held-out documents

A shard is an ArrayRecord file. Its first record is JSON that names the tokenizer (see
`fingerprint`); the others hold `record_tokens` ids each, little-endian, of its documents one behind
the other, each ended by EOS; the last record may be shorter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

from etils import epath

from dlm_jax.data.tokenizer_kinds import from_json
from dlm_jax.data.tokenizers import Tokenizer
from dlm_jax.storage import located, reachable, replacing

INDEX_NAME = "index.json"
_FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file of a corpus: its name, its size in bytes, its CRC32, and what it holds."""

    name: str
    num_bytes: int
    crc32: int
    tokens: int
    documents: int
    characters: int


@dataclass(frozen=True)
class Index:
    """A sharded corpus.

    Attributes:
      tokenizer: that made the ids.
      dtype: of the ids, little-endian.
      record_tokens: ids of a record.
      train: shards to train on.
      val: shards of held-out documents.
    """

    tokenizer: Tokenizer
    dtype: str
    record_tokens: int
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]

    @property
    def sha256(self) -> str:
        """Of all that it says: equal for equal corpora, wherever they lie."""
        return hashlib.sha256(self._line().encode("ascii")).hexdigest()

    def _line(self) -> str:
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "tokenizer": self.tokenizer.to_json(),
            "dtype": self.dtype,
            "record_tokens": self.record_tokens,
            "train": [dataclasses.asdict(shard) for shard in self.train],
            "val": [dataclasses.asdict(shard) for shard in self.val],
        }
        return json.dumps(facts, sort_keys=True)

    def write(self, directory: epath.Path) -> None:
        """Writes it, whole, as the last file of the corpus."""
        line = self._line()
        path = directory / INDEX_NAME
        with replacing(path) as file:
            file.write(f"{line}\n{zlib.crc32(line.encode()):08x}\n".encode())


def fingerprint(tokenizer: Tokenizer) -> str:
    """Tells tokenizers apart: a hash of what `to_json` says."""
    text = json.dumps(tokenizer.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_index(directory: str) -> Index:
    """The index of the corpus in a directory or under a URL.

    Raises:
      ValueError: none is there, the bucket is missing or closed, or the index is damaged or of
        another format.
    """
    path = located(directory) / INDEX_NAME
    with reachable("data.source", directory):
        content = path.read_bytes()
    line, _, crc = content.partition(b"\n")
    if crc != b"%08x\n" % zlib.crc32(line):
        raise ValueError(f"{path} is damaged: its checksum is wrong; copy the corpus again")
    facts = json.loads(line)
    if facts["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {facts['format']}, this program reads {_FORMAT}; make the corpus "
            "again with python -m dlm_jax.data.shard"
        )
    train, val = (tuple(Shard(**shard) for shard in facts[part]) for part in ("train", "val"))
    return Index(from_json(facts["tokenizer"]), facts["dtype"], facts["record_tokens"], train, val)
