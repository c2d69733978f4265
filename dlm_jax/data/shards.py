"""Sharded corpora, read by index, and weighted mixtures of corpora.

A sharded corpus is a directory or bucket prefix::

    index.json                        an `Index`, with its CRC32 on a second line
    train-00000-of-00100.array_record
    val-00000-of-00100.array_record   held-out documents

A shard is an ArrayRecord file. The first record of a shard is JSON that identifies the tokenizer
(see `fingerprint`). The other records contain `record_tokens` little-endian ids each; the last
record can be shorter. The ids encode consecutive documents, each followed by EOS.

The ids of all shards form one sequence, of which only the required records are read; ArrayRecord
verifies their checksums. Files in buckets are copied into the cache and verified then, because rows
are read in random order.

A mixture divides its rows into blocks of `BLOCK` rows. Each corpus has a fixed number of rows per
block, in a different random order in each block, so the source of any row can be computed directly.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore
from etils import epath

from dlm_jax.data.tokenizers import Tokenizer, from_json
from dlm_jax.store.files import (
    copy_whole,
    crc_of,
    is_remote,
    located,
    refuse_failures,
    said,
    write_whole,
)

INDEX_NAME = "index.json"
PARTS = ("train", "val")
_FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file of a sharded corpus: its name, size in bytes, CRC32, and contents."""

    name: str
    num_bytes: int
    crc32: int
    tokens: int
    documents: int
    characters: int


@dataclass(frozen=True)
class Index:
    """The index of a sharded corpus, which lists its shards."""

    tokenizer: Tokenizer
    dtype: str
    record_tokens: int
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]

    def _line(self) -> str:
        facts = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        facts |= {part: list(map(dataclasses.asdict, facts[part])) for part in PARTS}
        facts |= {"format": _FORMAT, "tokenizer": self.tokenizer.to_json()}
        return json.dumps(facts, sort_keys=True)

    @property
    def sha256(self) -> str:
        """Hash of the contents, which does not depend on the location of the corpus."""
        return hashlib.sha256(self._line().encode("ascii")).hexdigest()

    def write(self, directory: epath.Path) -> None:
        path, line = directory / INDEX_NAME, self._line()
        content = (line + _ending(line)).encode()
        path.write_bytes(content) if is_remote(path) else write_whole(path, content)


def _ending(line: str) -> str:
    return f"\n{zlib.crc32(line.encode()):08x}\n"


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's `to_json` that identifies the tokenizer."""
    text = json.dumps(tokenizer.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_index(directory: str) -> Index:
    path = located(directory) / INDEX_NAME
    with refuse_failures(f"data.source={directory}", "check the path and the permissions"):
        content = path.read_bytes().decode(errors="replace")
    line = content.partition("\n")[0]
    if content != line + _ending(line):
        raise ValueError(f"{path} is damaged: its checksum is wrong; copy the corpus again")
    facts = json.loads(line)
    if facts["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {facts['format']}, but this program reads {_FORMAT}; rebuild the "
            f"corpus with python -m dlm_jax.data.shard"
        )
    train, val = (tuple(Shard(**shard) for shard in facts[part]) for part in PARTS)
    return Index(from_json(facts["tokenizer"]), facts["dtype"], facts["record_tokens"], train, val)


_MAX_OPEN = 128
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of uint8, uint16, int32 and int64 for ids below `vocab_size`."""
    types = {1 << 8: np.uint8, 1 << 16: np.uint16, 1 << 31: np.int32}
    return np.dtype(next((t for limit, t in types.items() if vocab_size <= limit), np.int64))


class DamagedShard(ValueError):
    """An error for a shard that does not match its index."""


@contextlib.contextmanager
def _refuse_damage(path: str) -> Iterator[None]:
    """Converts the errors of ArrayRecord to a `DamagedShard` with the path."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, OSError) as error:
        raise DamagedShard(
            f"{path} is damaged or not of this corpus ({said(error)}); copy it again"
        ) from None


@dataclass(frozen=True)
class TokenShards:
    """The concatenated ids of the shards `paths`."""

    paths: tuple[str, ...]
    shards: tuple[Shard, ...]
    dtype: str
    record_tokens: int
    tokenizer_sha256: str
    cache_dir: str

    @classmethod
    def of(cls, directory: str, index: Index, part: str, cache_dir: Path) -> TokenShards:
        """The shards of one part (``train`` or ``val``) of the corpus in `directory`."""
        shards: tuple[Shard, ...] = getattr(index, part)
        return cls(
            paths=tuple(str(located(directory) / shard.name) for shard in shards),
            shards=shards,
            dtype=index.dtype,
            record_tokens=index.record_tokens,
            tokenizer_sha256=fingerprint(index.tokenizer),
            cache_dir=str(cache_dir / "shards"),
        )

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(shard.tokens for shard in self.shards)]

    @cached_property
    def _reader(self) -> Callable[[int], Any]:
        """The reader of a shard; the readers used last stay open."""
        return lru_cache(maxsize=_MAX_OPEN)(self._open)

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids at consecutive places, `[n]`."""
        start, stop, _ = places.indices(len(self))
        shard = bisect.bisect_right(self._starts, start) - 1
        parts = [np.zeros(0, self.dtype)]
        while shard < len(self.shards) and (base := self._starts[shard]) < stop:
            first, last = max(start, base), min(stop, self._starts[shard + 1])
            parts.append(self._stretch(shard, first - base, last - base))
            shard += 1
        return np.concatenate(parts)

    def _stretch(self, shard: int, first: int, stop: int) -> np.ndarray:
        """The ids `[first, stop)` of one shard."""
        record, last = first // self.record_tokens, (stop - 1) // self.record_tokens
        reader = self._reader(shard)
        with _refuse_damage(self.paths[shard]):
            # The first record is the header.
            parts = reader.read(record + 1, last + 2)
            skipped = first - record * self.record_tokens
            ids = np.frombuffer(b"".join(parts), self.dtype)[skipped : skipped + stop - first]
            if len(ids) < stop - first:
                raise ValueError("it has fewer tokens than its index lists")
        return ids

    def _open(self, shard: int) -> Any:
        facts, local = self.shards[shard], self._local(shard)
        with _refuse_damage(self.paths[shard]):
            if os.stat(local).st_size != facts.num_bytes:
                raise ValueError(f"it has not {facts.num_bytes} bytes")
            reader = array_record_module.ArrayRecordReader(
                local, _OPTIONS, file_reader_buffer_size=1 << 12
            )
            header = json.loads(reader.read(0, 1)[0])
            if header.get("tokenizer") != self.tokenizer_sha256:
                raise ValueError("it was made with a different tokenizer from its index")
        return reader

    def _local(self, shard: int) -> str:
        """The path of a local shard, or of a verified local copy of a remote shard."""
        path, facts = self.paths[shard], self.shards[shard]
        if not is_remote(path):
            return path
        origin = hashlib.sha256(f"{path} {facts.crc32}".encode()).hexdigest()[:16]
        copy = Path(self.cache_dir) / f"{origin}-{facts.name}"
        if not copy.exists() or copy.stat().st_size != facts.num_bytes:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with refuse_failures(f"data.source={path}", "check the network"):
                copy_whole(located(path), located(copy))
            with copy.open("rb") as file:
                crc = crc_of(file)
            if (copy.stat().st_size, crc) != (facts.num_bytes, facts.crc32):
                copy.unlink()
                raise DamagedShard(f"{path} has a wrong checksum; copy the shard again")
        return str(copy)

    def check(self) -> None:
        """Raises an error if a local shard is missing, or has the wrong size or tokenizer.

        Shards in buckets are verified when they are copied, and records when they are read.
        """
        for number, path in enumerate(self.paths):
            if not is_remote(path):
                self._reader(number)


def joined(parts: Sequence[TokenShards]) -> TokenShards:
    return dataclasses.replace(
        parts[0],
        paths=tuple(path for part in parts for path in part.paths),
        shards=tuple(shard for part in parts for shard in part.shards),
    )


BLOCK = 10_000
"""The number of rows in a block of a mixture. Weights are rounded to multiples of 1 / `BLOCK`."""

_SALT = 0x6D697865


@dataclass(frozen=True)
class ShardMixture:
    """Sharded corpora with the same tokenizer, and the number of rows of each corpus per block."""

    sources: tuple[TokenShards, ...]
    quotas: tuple[int, ...]

    def locate(self, row: int, seed: int) -> tuple[int, int]:
        """Returns the source of a row in the mixed stream, and the row's index in that source."""
        block, place = divmod(row, BLOCK)
        source, rank = _order(self.quotas, seed, block)[:, place]
        return int(source), block * self.quotas[source] + int(rank)


def quotas_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """The number of rows of each corpus per block, by the largest-remainder method; 0 for a weight
    of 0.
    """
    exact = (
        np.array(weights, np.float64) / sum(weights) * BLOCK if sum(weights) > 0 else np.zeros(1)
    )
    quotas = np.floor(exact).astype(int)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: BLOCK - quotas.sum()]] += 1
    if not exact.any() or not (exact >= 0).all() or ((exact > 0) & (quotas == 0)).any():
        raise ValueError(
            f"data.weights={list(weights)} must be numbers of at least 0, not all 0, and each 0 or "
            f"at least 1/{BLOCK} of their sum"
        )
    return tuple(int(quota) for quota in quotas)


@lru_cache(maxsize=4)
def _order(quotas: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """The source of each row in a block, and the rank of the row among the rows of that source."""
    bits = np.random.Philox(np.random.SeedSequence([_SALT, seed, block])).random_raw(BLOCK)
    places = np.argsort(bits, kind="stable")
    ends = np.cumsum(quotas)
    source = np.searchsorted(ends, places, side="right")
    # The ranks of a source ascend within the block, so that its rows keep their order.
    rank = np.empty(BLOCK, np.int64)
    for number in range(len(quotas)):
        mine = np.flatnonzero(source == number)
        rank[mine] = np.arange(len(mine))
    return np.stack([source, rank])
